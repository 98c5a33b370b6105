"""`hpcray profile`: where the time of a running job goes, or its memory."""

from __future__ import annotations

import sys
import time
from pathlib import Path, PurePath

import click

from hpcray.cli import json_option, write_named
from hpcray.cli.job_option import errors_as_messages, job, job_option
from hpcray.common.terminal_text import plain
from hpcray.core.object_store.allocator import format_size
from hpcray.diagnostics.cluster_query import show_kernel
from hpcray.state.profile import (
    FORMATS,
    SUFFIXES,
    FunctionTime,
    JobProfile,
    JobProfiler,
    ProcessProfile,
    ProfileError,
    ProfileRequest,
    limits,
    time_by_label,
    top_functions,
)
from hpcray.state.reports import print_table, print_text

_SILENT_LINES = 12  # of the stacks of a process that does not answer
_INTERRUPTED = 130


@click.command()
@job_option
@click.option(
    "--seconds", default=10.0, show_default=True, type=click.FloatRange(0.1, 3600), help="How long to measure."
)
@click.option("--rate", default=100.0, show_default=True, type=click.FloatRange(1, 1000), help="Samples per second.")
@click.option("--memory", is_flag=True, help="Memory that is allocated meanwhile and not freed, instead of time.")
@click.option("--actor", default="", metavar="NAME", help="Only this actor: its id, name or class.")
@click.option("--node", "nodes", type=int, multiple=True, metavar="N", help="Only processes of this node.")
@click.option("--task", default="", metavar="NAME", help="Only while tasks of this function run.")
@click.option("--all", "everything", is_flag=True, help="hpcray's own threads and frames, too.")
@click.option("--top", "rows", default=15, show_default=True, type=click.IntRange(0), help="Rows of the table.")
@click.option(
    "-o", "--output", "files", multiple=True, type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help=f"Write the whole profile there: {', '.join(f'*{suffix}: {name}' for suffix, name in SUFFIXES.items())}.",
)  # fmt: skip
@click.option("--format", "shape", type=click.Choice(list(FORMATS)), help="Of the files, whatever their names are.")
@json_option("an object: the whole profile")
def profile(
    address: str, seconds: float, rate: float, memory: bool, actor: str, nodes: tuple[int, ...], task: str,
    everything: bool, rows: int, files: tuple[Path, ...], shape: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Show which functions of a running job take time: its processes sample themselves, and are not stopped.

    https://www.speedscope.app shows FILE.json as a flame graph; so does `hpcray dashboard`. Ctrl-C ends the profile
    early, and shows what there is. Exit code: 1 where a process did not answer.
    """
    for file in files:
        if shape is None and file.suffix not in SUFFIXES:
            raise click.UsageError(
                f"-o {file}: end it in {', '.join(SUFFIXES)}, or say --format; flame graphs: FILE.json"
            )
        if not file.parent.is_dir():  # said before anything is measured
            raise click.ClickException(f"{file}: No such file or directory")
    if memory and task:
        raise click.UsageError("--task: Python does not know which task has allocated memory; hint: --actor, --node")
    request = ProfileRequest(seconds, rate, memory, nodes or None, actor, task, everything)
    if sys.stderr.isatty():
        click.echo(f"measuring for {seconds:g} s; Ctrl-C ends it early", err=True)
    with errors_as_messages(ProfileError), job(address) as process:
        try:
            found = JobProfiler(process, request).take(time.sleep)
        except KeyboardInterrupt:  # the second one, or before anything was measured
            sys.exit(_INTERRUPTED)
    for file in files:
        write_named(file, FORMATS[shape or SUFFIXES[file.suffix]](found))
    if as_json:
        click.echo(FORMATS["json"](found))
    else:
        _print(found, rows)
        for file in files:
            what = shape or SUFFIXES[file.suffix]
            hint = "; hint: open it at https://www.speedscope.app" if what == "speedscope" else ""
            click.echo(f"{file}: {what}{hint}")
    if found.missing or len(found.answered) < len(found.processes):
        sys.exit(1)


def _print(found: JobProfile, rows: int) -> None:
    nodes = {one.node for one in found.answered}
    where = f"{len(found.answered)} processes on {len(nodes)} node{'s' if len(nodes) != 1 else ''}"
    if found.unit == "bytes":
        click.echo(f"{found.seconds:.1f} s of {where}: memory allocated and not freed\n")
        _print_memory(found, rows)
    else:
        click.echo(f"{found.seconds:.1f} s of {where}, {found.rate:g} samples per second\n")
        _print_times(found, rows)
    for one in found.processes:
        if one.problem:
            _print_problem(one)
    for text in found.missing:
        click.echo(plain(f"not included: {text}"))
    for text in limits(found) if found.answered else ():
        print_text(f"note: {text}", "dim")


def _print_times(found: JobProfile, rows: int) -> None:
    labels = [[f"{seconds:.1f} s", f"{cpu:.1f} s", str(count), label] for label, seconds, cpu, count in
              time_by_label(found)[:rows]]  # fmt: skip
    idle = found.idle()
    labels += [[f"{seconds:.1f} s", "", "", f"({what})"] for what, seconds in idle.items()]
    print_table(["time", "CPU", "processes", "task"], labels)
    functions = [one for one in top_functions(found.stacks()) if one.own > 0][:rows]
    whole = sum(stack.value for one in found.answered for stack in one.stacks) or 1.0
    cells = [
        [
            f"{100 * one.own / whole:.1f} %",
            f"{100 * one.total / whole:.1f} %",
            f"{one.cpu:.1f} s",
            one.frame[2],
            _at(one),
        ]
        for one in functions
    ]
    if cells:
        click.echo()
        print_table(["own", "total", "CPU", "function", "hottest line"], cells)
    elif not idle:
        click.echo("nothing ran that was asked for")


def _print_memory(found: JobProfile, rows: int) -> None:
    lines = [one for one in top_functions(found.stacks()) if one.own > 0][:rows]
    cells = [[format_size(int(one.own)), str(one.count), _where(one.frame)] for one in lines]
    print_table(["bytes", "blocks", "line"], cells)
    cells = []
    for one in sorted(found.answered, key=lambda one: -one.memory["traced"])[:rows]:
        before, after = one.memory["before"], one.memory["after"]
        anonymous, shared = (after[name] - before[name] for name in ("anonymous", "shared"))
        cells.append([_signed(one.memory["traced"]), _signed(anonymous), _signed(shared), one.title])
    if cells:
        click.echo()
        print_table(["of Python", "resident", "shared", "process"], cells)


def _print_problem(one: ProcessProfile) -> None:
    said = f"; the kernel says: {show_kernel(one.kernel)}" if one.kernel else ""
    click.echo(plain(f"{one.title}: {one.problem}{said}"))
    for line in one.kernel.get("stacks", "").splitlines()[:_SILENT_LINES]:
        click.echo(plain(f"  {line}"))


def _at(one: FunctionTime) -> str:
    return _where((one.frame[0], one.line, ""))


def _where(frame: tuple[str, int, str]) -> str:
    """The last two parts of the path, and the line."""
    file, line, _ = frame
    return f"{'/'.join(PurePath(file).parts[-2:])}:{line}" if file else ""


def _signed(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{format_size(abs(size))}"
