"""The commands that look at a running job: `hpcray status`, `memory`, `metrics`, `stack`, `why`, `list`, `summary`,
`worker-logs`, `timeline`, `dump`, `replay`."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hpcray.api import runtime_context
from hpcray.cli import json_option, print_json, print_record
from hpcray.cli.history import (
    ended_job,
    object_events,
    print_list,
    print_log_record,
    print_memory,
    print_running,
    print_status,
    print_summary,
    print_timeline,
    print_why,
    write_timeline,
)
from hpcray.cli.job_option import job, job_option, session_directory
from hpcray.cli.top_cells import headline
from hpcray.common.terminal_text import plain, plain_line
from hpcray.core.object_store.allocator import format_size
from hpcray.diagnostics import metrics_endpoint as node_metrics
from hpcray.diagnostics.cluster_query import QUERY_TIMEOUT, ClusterQuery, stacks
from hpcray.diagnostics.record_replay import replay as replay_core
from hpcray.diagnostics.wait_graph import WaitReason, show_lines
from hpcray.state import recordings, timeline
from hpcray.state.aggregator import StateAggregator, select
from hpcray.state.logs import LineFilter, LogError, LogReader, WorkerLines
from hpcray.state.node_metrics import common_labels, export_metrics, own_metrics
from hpcray.state.overview import JobOverview, LiveJob
from hpcray.state.reports import (
    WaitSearch,
    count_objects,
    growth,
    largest_processes,
    list_table,
    node_columns,
    print_stores,
    print_table,
    print_text,
    show_actors,
    show_autoscaler,
    show_demand,
    show_preloaded,
    show_stacks,
    sum_stores,
    summary_rows,
)
from hpcray.state.schemas import Filter, GetLogOptions
from hpcray.topology.node_order import draw, near_domains, network

_NODE_COLUMNS = ("node", "host", "state", "CPU", "GPU", "others", "object store", "waiting", "id")

_STORE = "object_store_memory"
_MOST_PROCESSES = 10

_process_timeout = click.option(
    "--timeout", default=QUERY_TIMEOUT, show_default=True, help="Seconds that a process may take."
)


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(plain_line(line))


@click.command()
@job_option
@json_option("an object: nodes, resources, waiting work, groups; of an ended job how, its nodes and functions")
def status(address: str, as_json: bool) -> None:
    """Show a running job: nodes with used and total resources, waiting work, placement groups, actors that died.

    Of a job that has ended: how, its nodes, and what has run.
    """
    if history := ended_job(address):
        print_status(history, as_json)
        return
    with job(address) as process:
        nodes, total = runtime_context.nodes(), runtime_context.cluster_resources()
        free, now = runtime_context.available_resources(), process.gcs.call("status")
        groups = process.gcs.call("placement_groups")
        use = JobOverview(process).sample()
        live = LiveJob(process)
        rosters = live.nodes()
        actors = live.actors_on(rosters)
    stores = {one.index: one.store for one in use.nodes if one.store}
    # What the nodes say now: the head hears of a store's use in steps of one per cent.
    free[_STORE] = sum(store["capacity"] - store["used"] for store in stores.values())
    total[_STORE] = sum(store["capacity"] for store in stores.values())
    if as_json:
        waits = {
            "unmet": now["unmet"],
            "demand": now["demand"],
            "actors": now["actors"],
            "autoscaler": now["autoscaler"],
        }
        rows = [{**group, "group": group["group"].hex()} for group in groups]
        known = {"nodes": nodes, "total": total, "available": free, "stores": stores}
        preloaded = {node.index: node.preloaded for node in rosters}
        print_json({**known, **waits, "placement_groups": rows, "preloaded": preloaded})
        return
    print_text(headline(use).plain.rstrip())
    print_table(_NODE_COLUMNS, _node_rows(nodes, node_columns(now), stores))
    for name in sorted(total):
        if not name.startswith("node:"):
            amounts = (free.get(name, 0), total[name])
            left, whole = map(format_size, map(int, amounts)) if "memory" in name else (f"{one:.4g}" for one in amounts)
            click.echo(f"{plain(name)}: {left} of {whole} free")
    _print_lines(show_demand(now, groups))
    _print_lines(show_actors(actors))
    _print_lines(show_preloaded(rosters))
    _print_lines(show_autoscaler(now))


@click.command()
@job_option
@json_option("an object: the network, switch in switch")
def topology(address: str, as_json: bool) -> None:
    """Draw the network of a running job: switches, and the nodes behind each, with blocks and NVLink domains."""
    with job(address):
        found = network(runtime_context.nodes())
    if as_json:
        print_json(found)
    else:
        _print_lines(draw(found))


def _node_rows(
    nodes: list[dict[str, Any]], columns: dict[int, dict[str, str]], stores: Mapping[int, dict[str, Any]]
) -> Iterator[list[Any]]:
    for node in nodes:
        used, store = columns.get(node["Index"], {}), stores.get(node["Index"])
        state, text = "alive" if node["Alive"] else "dead", ""
        if store is not None:
            text = f"{format_size(store['used'])} of {format_size(store['capacity'])}"
            text += f", {format_size(store['on_disk'])} on disk" if store["on_disk"] else ""
        amounts = [*(used.get(name, "") for name in ("CPU", "GPU", "others")), text]
        yield [
            f"node {node['Index']}",
            node["NodeManagerHostname"],
            state,
            *amounts,
            used.get("waiting", ""),
            node["NodeID"][:12],
        ]


@click.command()
@job_option
@click.option("--limit", default=100, show_default=True, type=click.IntRange(0), help="Most objects per node.")
@click.option("--timeout", default=10.0, show_default=True, help="Seconds that the nodes may take to answer.")
@click.option(
    "--growth", "seconds", type=click.FloatRange(0.1), metavar="S",
    help="Show instead by how much objects become more in so many seconds, by where they come from.",
)  # fmt: skip
@json_option("an object: nodes with their objects, the total, processes; with --growth a list of origins")
def memory(address: str, limit: int, timeout: float, seconds: float | None, as_json: bool) -> None:
    """Show the objects in the stores of a running job: largest first, with owners and the processes that pin them; then
    the processes with most memory of their own.

    With HPCRAY_RECORD_REF_CREATION_SITES=1 at the start of the job also where each ref was created.
    """
    if history := ended_job(address):
        print_memory(history, as_json)
        return
    if seconds is not None:
        _show_growth(address, seconds, limit, timeout, as_json)
        return
    with job(address) as process:
        rows = process.diagnostics.list_stores(limit, timeout, devices=True)
        largest = largest_processes(process, _MOST_PROCESSES, timeout)
    if as_json:
        print_json({"nodes": rows, "total": sum_stores(rows), "processes": largest})
    else:
        print_stores(rows)
        click.echo("processes with most memory (with what they map of the stores):")
        cells = [
            [f"node {one['node']}", one["pid"], one["what"], format_size(one["rss"]), ", ".join(one["runs"])]
            for one in largest
        ]
        print_table(("node", "pid", "what", "memory", "runs"), cells)
    if any(row["problem"] for row in rows):
        sys.exit(1)


def _show_growth(address: str, seconds: float, limit: int, timeout: float, as_json: bool) -> None:
    with job(address) as process:
        before = count_objects(process, timeout)
        with suppress(KeyboardInterrupt):  # what there is
            time.sleep(seconds)
        after = count_objects(process, timeout)
    rows = growth(before.origins, after.origins)
    if as_json:
        print_json([asdict(one) for one in rows])
    else:
        cells = [
            (f"{one.more:+}", _signed_size(one.more_bytes), one.count, format_size(one.size), one.origin)
            for one in rows[:limit]
        ]
        print_table(["more", "bytes", "objects", "size", "origin"], cells)
        counts = after.origins.values()
        total = f"{sum(count for count, _ in counts)} objects, {format_size(sum(size for _, size in counts))}"
        click.echo(f"{'' if rows else 'nothing has changed: '}{total} now")
    partial = [f"{name} owns more objects than were counted" for name in after.partial]
    if problems := [*partial, *(f"{name} did not answer" for name in after.missing)]:
        click.echo(plain(f"not complete: {'; '.join(problems)}"), err=True)
        sys.exit(1)


def _signed_size(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{format_size(abs(size))}"


@click.command()
@job_option
@click.option("--openmetrics", is_flag=True, help="In the format of OpenMetrics instead of Prometheus's.")
@click.option("--serve", is_flag=True, help="Serve them on the node's socket until the job ends.")
@click.option(
    "--textfile",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write them there again and again, for node_exporter's textfile collector.",
)
@click.option("--interval", default=15.0, show_default=True, type=click.FloatRange(0.1), help="Seconds between two.")
@json_option("a list of samples: name, type, labels, value")
def metrics(
    address: str, openmetrics: bool, serve: bool, textfile: Path | None, interval: float, as_json: bool
) -> None:  # fmt: skip
    """Print the metrics of this node: its own, and those of its programs (ray.util.metrics).

    Text format of Prometheus. A scraper reads the same from a Unix socket while a process serves it (--serve, a program
    that measures, or HPCRAY_METRICS_EXPORT): curl --unix-socket <session directory>/metrics.s http://node/metrics
    """
    if as_json and (openmetrics or serve or textfile is not None):
        raise click.UsageError("--json prints the metrics once; hint: without --openmetrics, --serve and --textfile")
    path = session_directory(address)
    try:
        with job(path) as process:
            if serve or textfile is not None:
                export_metrics(process, textfile, interval)
                return
            accept = node_metrics.OPENMETRICS if openmetrics else ""
            text = node_metrics.read_metrics(path, accept)
            text = text or node_metrics.metrics_text(own_metrics(process), common_labels(process), accept)[0]
        if as_json:
            print_json(node_metrics.parse_samples(text))
        else:
            click.echo(plain(text, lines=True) if sys.stdout.isatty() else text, nl=False)
    except OSError as error:
        raise click.ClickException(f"the metrics of {path} cannot be read: {error}") from None


@click.command()
@job_option
@_process_timeout
@json_option("a list of nodes, with processes and their threads; of an ended job a list of tasks")
@click.option("--all", "everything", is_flag=True, help="hpcray's own threads and frames, and raylets, too.")
def stack(address: str, timeout: float, as_json: bool, everything: bool) -> None:
    """Show the stacks of all threads of every process of a running job, and of the coroutines of async actors, with the
    task or call that each runs.

    For a process that does not answer in time: its state and wait channel, from the kernel. Of a job that has ended:
    what ran when it was heard of last.
    """
    if history := ended_job(address):
        print_running(history, as_json)
        return
    with job(address) as process:
        rows = stacks(ClusterQuery(process, timeout))
    if as_json:
        print_json(rows)
    else:
        _print_lines(show_stacks(rows, everything))
    if any(row["problem"] or any(one["problem"] for one in row["processes"]) for row in rows):
        sys.exit(1)


@click.command()
@job_option
@_process_timeout
@json_option("a list of lines: depth and text")
@click.argument("what", required=False)
def why(address: str, timeout: float, as_json: bool, what: str | None) -> None:
    """Show what an object, a task or an actor waits for, down to the process that works on it or the resource that is
    missing; of a dead actor, when, where and why it died; of an object also where looks at the stores have seen it.

    WHAT is an id in hex, or its beginning (`ref.hex()`, `hpcray list`, errors and `hpcray stack` print ids), the name
    of a function or method, or the name or class of an actor. Without it: every `get` of the program that waits; where
    none does, the tasks that do not run. Of a job that has ended: why it has; with WHAT, what its history has of it.
    """
    if history := ended_job(address):
        print_why(history, what, as_json)
        return
    with job(address) as process:
        search = WaitSearch(process, timeout)
        findings = search.explain(what) if what is not None else search.explain_all()
        findings += [WaitReason(1, text) for text in object_events(process.place.session_dir, what or "")]
    if not findings:
        raise click.ClickException(
            f"there is no object, task or actor {what!r}; hint: hpcray list tasks, hpcray list actors"
        )
    if as_json:
        print_json([{"depth": found.depth, "text": found.text} for found in findings])
    else:
        _print_lines(show_lines(findings))


KINDS: dict[str, Callable[[StateAggregator], list[Any]]] = {
    "actors": StateAggregator.actors,
    "cluster-events": StateAggregator.cluster_events,
    "jobs": StateAggregator.jobs,
    "nodes": StateAggregator.nodes,
    "objects": StateAggregator.objects,
    "placement-groups": StateAggregator.placement_groups,
    "tasks": StateAggregator.tasks,
    "workers": StateAggregator.workers,
}
_SUMMARIES = {
    "actors": StateAggregator.summarize_actors,
    "objects": StateAggregator.summarize_objects,
    "tasks": StateAggregator.summarize_tasks,
}


@click.command(name="list")
@job_option
@_process_timeout
@json_option("a list of rows")
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.option("-f", "--filter", "filters", multiple=True, metavar="COLUMN=VALUE", help="COLUMN=VALUE or COLUMN!=VALUE.")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1), help="Most rows.")
@click.option("--detail", is_flag=True, help="All columns.")
@click.option("--format", "shape", type=click.Choice(["default", "table", "json"]), default="default", hidden=True)
def list_(
    address: str, timeout: float, as_json: bool, kind: str, filters: tuple[str, ...], limit: int, detail: bool,
    shape: str,
) -> None:  # fmt: skip
    """List the actors, tasks, objects, ... of a running job, as `hpcray.util.state` returns them.

    In a table nodes are `node 0`, and tasks and jobs have a duration; so may filters say: -f "node_id=node 0".
    Of a job that has ended: actors, nodes, placement-groups, tasks, workers and cluster-events, as in its history.
    """
    if history := ended_job(address):
        print_list(history, kind, filters, limit, as_json or shape == "json")
        return
    with job(address) as process:
        state = StateAggregator(process, timeout)
        found = KINDS[kind](state)
        known = sorted(process.gcs.nodes(), key=lambda row: row["Index"])
        nodes = {row["NodeID"]: f"node {row['Index']}" for row in known}
    try:
        rows = select(found, [_parse_filter(text, nodes) for text in filters], limit)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if kind == "nodes":
        order = list(nodes)
        rows.sort(key=lambda row: order.index(row["node_id"]))
    columns = rows[0].list_columns(detail) if rows else []
    if as_json or shape == "json":
        print_json([{name: row[name] for name in columns} for row in rows])
    else:
        print_table(*list_table(rows, columns, nodes))
        more = f" of {len(found)}" if len(found) > len(rows) else ""
        click.echo(f"{len(rows)}{more} {kind}")
    _report_missing(state)


@click.command()
@job_option
@_process_timeout
@json_option("an object: the summary by name, and totals")
@click.argument("kind", type=click.Choice(list(_SUMMARIES)))
def summary(address: str, timeout: float, as_json: bool, kind: str) -> None:
    """Count the actors, tasks or objects of a job, by name and state; of one that has ended, without objects."""
    if history := ended_job(address):
        print_summary(history, kind, as_json)
        return
    with job(address) as process:
        state = StateAggregator(process, timeout)
        found = _SUMMARIES[kind](state)["cluster"]
    if as_json:
        print_json(found)
    else:
        print_table(["name", "counts"], summary_rows(found.pop("summary")))
        print_text(", ".join(f"{name}: {value}" for name, value in found.items()))
    _report_missing(state)


@click.command()
@job_option
@click.option("--node-id", help="The node; by default this one.")
@click.option("--node-ip", help="The node, by its address.")
@click.option("--actor-id", help="What this actor wrote.")
@click.option("--task-id", help="What this task wrote.")
@click.option("--submission-id", help="What the entrypoint of this submitted job wrote.")
@click.option("--attempt-number", default=0, show_default=True, help="Which run of the task.")
@click.option("--pid", type=int, help="What this worker wrote.")
@click.option("--err", is_flag=True, help="Standard error instead of standard output.")
@click.option("--tail", default=-1, metavar="LINES", help="Only the last lines.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written later, until Ctrl-C.")
@click.option("--timeout", default=10.0, show_default=True, help="Seconds that a node may take to answer.")
@json_option("a list of names of files; of a file a stream of lines: text")
@click.argument("name", required=False)
def worker_logs(
    address: str, node_id: str | None, node_ip: str | None, err: bool, tail: int, follow: bool, timeout: float,
    as_json: bool, name: str | None, **of: Any,
) -> None:  # fmt: skip
    """Print a log file of a running job: what a worker, an actor or a task has written.

    NAME is a file or a pattern; without one, or with one that is no file, the names of the files are listed.
    """
    with job(address) as process:
        if not node_ip and not node_id and not of["actor_id"] and not of["task_id"]:
            node_id = process.place.node_id
        reader = LogReader(process, timeout)
        try:
            named = any((of["actor_id"], of["task_id"], of["pid"], of["submission_id"]))
            if not named and (name is None or any(c in name for c in "*?[")):
                names = [each for part in reader.find(node_id, node_ip, name or "*").values() for each in part]
                if as_json:
                    print_json(names)
                else:
                    _print_lines(names)
                return
            wanted = GetLogOptions(
                timeout=timeout, node_id=node_id, node_ip=node_ip, filename=name, lines=tail,
                media_type="stream" if follow else "file", suffix="err" if err else "out", **of,
            )  # fmt: skip
            if as_json:
                for text in text_lines(reader.stream(wanted)):
                    print_record(text=text)
                return
            for data in reader.stream(wanted):
                click.echo(data, nl=False)
        except (LogError, ValueError) as error:
            raise click.ClickException(str(error)) from None


@click.command(name="timeline")
@click.argument("file", type=click.Path(dir_okay=False, writable=True), required=False)
@job_option
@json_option("a list of events, as in FILE, which is not needed then")
def timeline_(file: str | None, address: str, as_json: bool) -> None:
    """Write the tasks of each worker of a job, running or ended, over time to FILE, in Chrome's trace format, which is
    JSON."""
    if file is None and not as_json:
        raise click.UsageError("one of FILE and --json is needed; hint: hpcray timeline out.json")
    if history := ended_job(address):
        print_timeline(history, file, as_json)
        return
    with job(address):
        write_timeline(timeline() or [], file, as_json)


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
@job_option
@click.option("--timeout", default=10.0, show_default=True, help="Seconds that a raylet may take.")
@json_option("an object: the file, its cores and inputs, what is missing")
def dump(file: Path, address: str, timeout: float, as_json: bool) -> None:
    """Write the inputs and decisions of the cores of a running job (head, raylets, owners) to FILE.

    The job must have been started with HPCRAY_RECORD=1. `hpcray replay FILE` then makes the same decisions again.
    """
    with job(address) as process:
        found, missing = recordings.fetch(ClusterQuery(process, timeout))
    if found:
        recordings.write(file, found)
    inputs = sum(len(record.inputs) for record in found)
    if as_json:
        print_json({"file": str(file) if found else None, "cores": len(found), "inputs": inputs, "missing": missing})
    elif found:
        click.echo(f"{file}: {len(found)} cores, {inputs} inputs")
    for text in missing:
        click.echo(plain(text), err=True)
    if missing:
        sys.exit(1)


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_option("a list of cores, with the differences")
def replay(file: Path, as_json: bool) -> None:
    """Give the cores of FILE (see `hpcray dump`) the same inputs again and compare their decisions.

    Exit code 1 when a decision differs: this is another version, or a core depends on more than its inputs.
    """
    try:
        results = [replay_core(record, near_sets=near_domains) for record in recordings.read(file)]
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        print_json([asdict(done) for done in results])
    else:
        _print_lines(recordings.show(results))
    if any(done.differences for done in results):
        sys.exit(1)


def _parse_filter(text: str, nodes: Mapping[str, str]) -> Filter:
    test = "!=" if "!=" in text else "="
    column, found, value = text.partition(test)
    if not found or not column:
        raise ValueError(f"{text!r} is no filter; hint: COLUMN=VALUE or COLUMN!=VALUE")
    value = value.strip()
    if column.strip().lower() == "node_id":
        value = next((ident for ident, name in nodes.items() if value == name), value)
    return column.strip(), test, value


def _report_missing(state: StateAggregator) -> None:
    if state.missing:
        click.echo(plain(f"not complete: {'; '.join(state.missing)}"), err=True)
        sys.exit(1)


COMMANDS = [status, topology, memory, metrics, stack, why, list_, summary, worker_logs, timeline_, dump, replay]


# ------------------------------------------------------------ worker output
# The lines of workers, as `hpcray logs` prints them.


_TIMEOUT = 10.0  # seconds


def text_lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a text that comes in pieces, the last one too where it has no end."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
    if rest:
        yield rest.decode(errors="replace")


def print_worker_lines(
    address: str, follow: bool, task: str, actor: str, nodes: Collection[int], pattern: str, as_json: bool
) -> None:
    """Print lines of workers of a running job: `(f pid=123, node 2) text`; those of standard error there."""
    try:
        wanted = LineFilter(nodes or None, task, actor, re.compile(pattern) if pattern else None)
    except re.error as error:
        raise click.UsageError(f"--grep {pattern}: {error}") from None
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `hpcray logs | head` ends silently
    with job(address) as process:
        indices = {row["Index"] for row in process.gcs.nodes()}
        if unknown := sorted({*nodes} - indices):
            raise click.ClickException(f"there is no node {unknown[0]}; hint: hpcray list nodes")
        lines = WorkerLines(process, _TIMEOUT)
        found = False
        try:
            for line in lines.follow(wanted) if follow else lines.read(wanted):
                found = True
                if as_json:
                    print_log_record(line.text, line.error, who=line.who or None, pid=line.pid, node=line.node)
                    continue
                who = f"{plain(line.who)} " if line.who else ""
                prefix = click.style(f"({who}pid={line.pid}, node {line.node})", fg="cyan")
                click.echo(f"{prefix} {line.text}", err=line.error)
        except KeyboardInterrupt:
            sys.exit(130)
        if not found and (nodes or task or actor or pattern):
            click.echo(
                f"no line matches; {lines.lines} lines of {len(lines.processes)} processes were read; "
                "hint: hpcray list actors, hpcray list tasks show the names; without options all lines are printed",
                err=True,
            )
        elif not found:
            click.echo(f"none of the {len(lines.processes)} workers has printed anything", err=True)
