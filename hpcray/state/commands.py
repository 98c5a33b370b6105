"""The commands that look at a running job: `hpcray stack`, `why`, `list`, `summary`, `timeline`, `dump`, `replay`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hpcray.base.failures import RayError
from hpcray.base.ids import OBJECT_BYTES
from hpcray.runtime.diagnosis import PATIENCE, Diagnosis, stacks
from hpcray.runtime.process import Process
from hpcray.runtime.why import Why, show_lines
from hpcray.state import records
from hpcray.state.attach import attached
from hpcray.state.rows import Filter, Rows, select
from hpcray.state.stacks import show_stacks
from hpcray.state.tables import show_summary, show_table
from hpcray.state.timeline import timeline

_HELP = "Session directory of a node (default: the newest job of this user)."


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--address", default="auto", help=_HELP),
        click.option("--timeout", default=PATIENCE, show_default=True, help="Seconds that a process may take."),
        click.option("--json", "as_json", is_flag=True, help="Print everything as JSON."),
    ):
        command = option(command)
    return command


@contextlib.contextmanager
def job(address: str) -> Iterator[Process]:
    """The job at this address; the command ends with a message where there is none."""
    try:
        with attached(address) as process:
            yield process
    except (ConnectionError, ValueError, RayError) as error:
        raise click.ClickException(str(error)) from None


@click.command()
@_common
@click.option("--all", "everything", is_flag=True, help="hpcray's own threads and frames, and raylets, too.")
def stack(address: str, timeout: float, as_json: bool, everything: bool) -> None:
    """Show what every process of a running job does now: the stacks of all threads, and of the coroutines of async
    actors, with the task or call that each runs.

    Of a process that does not answer in time the kernel is asked: its state, and in what it waits.
    """
    with job(address) as process:
        rows = stacks(Diagnosis(process, timeout))
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    else:
        for line in show_stacks(rows, everything):
            click.echo(line)
    if any(row["problem"] or any(one["problem"] for one in row["processes"]) for row in rows):
        sys.exit(1)


@click.command()
@_common
@click.argument("ref", required=False)
def why(address: str, timeout: float, as_json: bool, ref: str | None) -> None:
    """Show what an object waits for, down to the process that works on it or the resource that is missing.

    REF is the id of an ObjectRef in hex (`ref.hex()`; errors and `hpcray stack` print it). Without it: what every `get`
    of the program waits for.
    """
    try:
        oid = bytes.fromhex(ref or "")
    except ValueError:
        oid = b"?"
    if ref is not None and len(oid) != OBJECT_BYTES:
        raise click.ClickException(f"{ref!r} is no object id; hint: {2 * OBJECT_BYTES} hex digits, ref.hex()")
    with job(address) as process:
        findings = Why(process, timeout).explain(oid) if ref is not None else Why(process, timeout).everything()
    if as_json:
        click.echo(json.dumps([{"depth": found.depth, "text": found.text} for found in findings], indent=1))
    else:
        for line in show_lines(findings):
            click.echo(line)


_KINDS: dict[str, Callable[[Rows], list[Any]]] = {
    "actors": Rows.actors,
    "jobs": Rows.jobs,
    "nodes": Rows.nodes,
    "objects": Rows.objects,
    "placement-groups": Rows.placement_groups,
    "tasks": Rows.tasks,
    "workers": Rows.workers,
}
_SUMMARIES = {"actors": Rows.summarize_actors, "objects": Rows.summarize_objects, "tasks": Rows.summarize_tasks}


@click.command(name="list")
@_common
@click.argument("kind", type=click.Choice(list(_KINDS)))
@click.option("-f", "--filter", "filters", multiple=True, metavar="COLUMN=VALUE", help="COLUMN=VALUE or COLUMN!=VALUE.")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1), help="Most rows.")
@click.option("--detail", is_flag=True, help="All columns.")
def list_(
    address: str, timeout: float, as_json: bool, kind: str, filters: tuple[str, ...], limit: int, detail: bool
) -> None:
    """List what there is in a running job: actors, tasks, objects, ... as `hpcray.util.state` gives it."""
    with job(address) as process:
        rows = Rows(process, timeout)
        found = _KINDS[kind](rows)
    try:
        chosen = select(found, [_parse_filter(text) for text in filters], limit)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    columns = (chosen[0].columns() if detail else chosen[0].base_columns()) if chosen else []
    if as_json:
        click.echo(json.dumps([{name: row[name] for name in columns} for row in chosen], indent=1))
    else:
        for line in show_table(columns, [[row[name] for name in columns] for row in chosen]):
            click.echo(line)
        more = f" of {len(found)}" if len(found) > len(chosen) else ""
        click.echo(f"{len(chosen)}{more} {kind}")
    _tell_missing(rows)


@click.command()
@_common
@click.argument("kind", type=click.Choice(list(_SUMMARIES)))
def summary(address: str, timeout: float, as_json: bool, kind: str) -> None:
    """Count the actors, tasks or objects of a running job, by name and state."""
    with job(address) as process:
        rows = Rows(process, timeout)
        found = _SUMMARIES[kind](rows)["cluster"]
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        table = found.pop("summary")
        for line in show_summary(table):
            click.echo(line)
        click.echo(", ".join(f"{name}: {value}" for name, value in found.items()))
    _tell_missing(rows)


@click.command(name="timeline")
@click.argument("file", type=click.Path(dir_okay=False, writable=True))
@click.option("--address", default="auto", help=_HELP)
def timeline_(file: str, address: str) -> None:
    """Write when which worker ran which task to FILE, in Chrome's trace format."""
    with job(address):
        timeline(file)
    click.echo(f"{file}; hint: open it at https://ui.perfetto.dev or chrome://tracing")


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
@click.option("--address", default="auto", help=_HELP)
@click.option("--timeout", default=10.0, show_default=True, help="Seconds that a raylet may take.")
def dump(file: Path, address: str, timeout: float) -> None:
    """Write what the cores of a running job (head, raylets, owners) were told, and decided, to FILE.

    The job must have been started with HPCRAY_RECORD=1. `hpcray replay FILE` then makes the same decisions again.
    """
    with job(address) as process:
        found, missing = records.fetch(Diagnosis(process, timeout))
    if found:
        records.write(file, found)
        inputs = sum(len(record.inputs) for record in found)
        click.echo(f"{file}: {len(found)} cores, {inputs} inputs")
    for text in missing:
        click.echo(text, err=True)
    if missing:
        sys.exit(1)


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
def replay(file: Path, as_json: bool) -> None:
    """Give the cores of FILE (see `hpcray dump`) the same inputs again and compare what they decide.

    Exit code 1 when one decides otherwise: this is another version, or decisions depend on what they must not.
    """
    try:
        results = records.replay_all(records.read(file))
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps([asdict(done) for done in results], indent=1))
    else:
        for line in records.show(results):
            click.echo(line)
    if any(done.differences for done in results):
        sys.exit(1)


def _parse_filter(text: str) -> Filter:
    test = "!=" if "!=" in text else "="
    column, found, value = text.partition(test)
    if not found or not column:
        raise ValueError(f"{text!r} is no filter; hint: COLUMN=VALUE or COLUMN!=VALUE")
    return column.strip(), test, value.strip()


def _tell_missing(rows: Rows) -> None:
    if rows.missing:
        click.echo(f"not complete: {'; '.join(rows.missing)}", err=True)
        sys.exit(1)


COMMANDS = [stack, why, list_, summary, timeline_, dump, replay]
