"""Text of the commands that look at a running job: tables, `hpcray status`, `memory` and `stack`.

The functions yield lines. Lines are complete however wide they are; `print_table` adds colours and rules on a terminal
that has room for them. Colours are there too where the click context of the command asks for them (`color`), as
FORCE_COLOR has it do, and are nowhere where it refuses them.
"""

from __future__ import annotations

import io
import linecache
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from click.globals import resolve_color_default
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcray.common.ids import FIRST_RETURN, OBJECT_BYTES
from hpcray.common.resources import ACCELERATOR_TYPE
from hpcray.common.terminal_text import plain
from hpcray.core.object_store.allocator import format_size
from hpcray.diagnostics.cluster_query import ClusterQuery, ClusterRoster, show_kernel
from hpcray.diagnostics.wait_graph import WaitGraph, WaitReason
from hpcray.platform.stacks import after_fork, interesting_frames, is_users
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.state.aggregator import StateAggregator
from hpcray.state.schemas import ActorState, JobState, NodeState, StateSchema, TaskState, WorkerState

MOST_GROUPS = 20  # placement groups that `hpcray status` lists one by one
_WIDEST_CELL, _NARROWEST_CELL = 60, 8  # characters, on a terminal
_GAP = 3  # blanks between columns, on a terminal
_UNLIMITED_WIDTH = 1 << 16  # columns of the console that plain text is made on
_STANDARD_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")
_SUMMED = ("objects", "capacity", "used", "on_disk", "pinned", "evictable", "spilled", "waiting")
_NODE_ID_COLUMNS = ("node_id", "driver_node_id")
_MOST_PINS = 3
_OWNER_COLUMNS = ("size", "objects", "owner")
_STORE_COLUMNS = ("size", "objects", "state", "refs", "owner", "pinned by", "object")
_SITE = "created at"
# What people look for comes first: a narrow terminal leaves the last columns out.
_FIRST_COLUMNS: dict[type[StateSchema], tuple[str, ...]] = {
    ActorState: ("actor_id", "class_name", "name", "state", "died", "restarts", "node_id", "pid", "reason"),
    TaskState: ("task_id", "name", "state", "duration", "node_id", "worker_pid", "error_type", "error_message"),
    WorkerState: ("worker_id", "worker_type", "is_alive", "node_id", "pid", "exit_type", "exit_detail"),
}
_DEVICE_COLUMNS = ("size", "objects", "device", "process")
_MOST_IDS = 3
_MOST_DEAD = 3
_OWN_NODES = "that the job began with"


def table_lines(columns: Sequence[str], rows: Iterable[Sequence[Any]], right: Collection[str] = ()) -> Iterator[str]:
    """Aligned columns under their names, as plain text; nothing where there are no rows.

    Args:
        columns: names.
        rows: one value per column; None is shown as nothing.
        right: names of columns that are aligned on the right.
    """
    rows = list(rows)
    if rows:
        yield from _lines_of(columns, rows, right, coloured=False)


def _lines_of(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], right: Collection[str], coloured: bool
) -> Iterator[str]:
    colours: Literal["standard"] | None = "standard" if coloured else None
    console = Console(file=io.StringIO(), width=_UNLIMITED_WIDTH, color_system=colours, force_terminal=coloured)
    with console.capture() as captured:
        console.print(_table(columns, rows, right, None))
    for line in captured.get().splitlines():
        yield line.rstrip()


def _terminal() -> Console:
    """Standard output, which is a terminal."""
    colours = {True: "standard", False: None, None: "auto"}[resolve_color_default()]
    return Console(highlight=False, markup=False, force_terminal=True, color_system=colours)  # type: ignore[arg-type]


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table to standard output: plain and complete in a pipe; on a terminal with rules, and so narrow that it
    fits: the widest columns are cut, then the last ones left out, and a line says which."""
    rows = list(rows)
    if not rows or not sys.stdout.isatty():
        for line in _lines_of(columns, rows, (), coloured=bool(resolve_color_default())) if rows else ():
            print(line)
        return
    console = _terminal()
    shown = fit_columns(columns, rows, console.width - 1)
    names, *cut = [[_cut(value, width) for value, width in zip(row, shown, strict=False)] for row in (columns, *rows)]
    console.print(_table(names, cut, (), box.SIMPLE_HEAD))
    if len(shown) < len(columns):
        console.print(f"not shown: {', '.join(columns[len(shown) :])}; hint: a wider terminal, or --json", style="dim")


def print_text(text: str, style: str = "") -> None:
    """Print a line to standard output; on a terminal in as many lines as it takes."""
    text = plain(text)
    if sys.stdout.isatty():
        _terminal().print(text, style=style or None)
    else:
        print(text)


def fit_columns(columns: Sequence[str], rows: Sequence[Sequence[Any]], width: int) -> list[int]:
    """Return the widths of the columns in a table of this width; of fewer columns where not all of them fit."""
    wanted = [
        min(_WIDEST_CELL, max(len(name), *(len(_text(row[place])) for row in rows)))
        for place, name in enumerate(columns)
    ]
    least = [min(one, _NARROWEST_CELL) for one in wanted]
    count = len(wanted)
    while count > 1 and sum(least[:count]) + _GAP * count > width:
        count -= 1
    widths = wanted[:count]
    while sum(widths) + _GAP * count > width and max(widths) > _NARROWEST_CELL:
        widths[widths.index(max(widths))] -= 1
    return widths


def list_table(
    rows: Sequence[StateSchema], columns: Sequence[str], nodes: Mapping[str, str], now: float | None = None
) -> tuple[list[str], list[list[Any]]]:
    """Names and cells of the table of `hpcray list`, for people: times as text, nodes by number, durations; when and
    why actors died.

    Args:
        rows: of the state API. columns: those to show. nodes: names of nodes, by id.
        now: Unix time in seconds; None: that of this machine.
    """
    now = time.time() if now is None else now
    names = list(columns)
    of_nodes = bool(rows) and isinstance(rows[0], NodeState)
    of_actors = bool(rows) and isinstance(rows[0], ActorState)
    timed = bool(rows) and isinstance(rows[0], (TaskState, JobState))
    if of_nodes:
        names.insert(0, "node")
    if of_actors:
        names[names.index("state") + 1 : names.index("state") + 1] = ["died", "restarts"]
        names.append("reason")
    if timed:
        names.insert(names.index("state" if isinstance(rows[0], TaskState) else "status") + 1, "duration")
    first = [name for name in _FIRST_COLUMNS.get(type(rows[0]), ()) if name in names] if rows else []
    names = [*first, *(name for name in names if name not in first)]
    cells = []
    for row in rows:
        shown = type(row).humanify(row.asdict())
        if of_nodes:
            shown["node"] = nodes.get(row["node_id"], "")
        else:
            shown |= {name: nodes.get(shown[name], shown[name]) for name in _NODE_ID_COLUMNS if shown.get(name)}
        if of_actors:
            cause = row["death_cause"] or {}
            ended = cause.get("end_time_ms")
            shown["died"] = time.strftime("%H:%M:%S", time.localtime(ended / 1000)) if ended else ""
            shown["restarts"] = row["num_restarts"] or ""
            shown["pid"] = row["pid"] or ""
            shown["reason"] = " ".join(cause["actor_died_error_context"]["error_message"].split()) if cause else ""
        if timed:
            shown["duration"] = _duration(row, now)
        cells.append([shown[name] for name in names])
    return names, cells


def _duration(row: StateSchema, now: float) -> str:
    """How long a task or job has run; "" before it does."""
    start, end = row.get("start_time_ms", row.get("start_time")), row.get("end_time_ms", row.get("end_time"))
    if not start:
        return ""
    return format_duration(max(0.0, (end / 1000 if end else now) - start / 1000))


def summary_rows(summary: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """(name, counts) for each name of a summary, sorted."""
    rows = []
    for name, known in sorted(summary.items()):
        counts = known.get("state_counts") or known.get("task_state_counts") or {}
        others = [f"{key}: {_number(value)}" for key, value in known.items() if isinstance(value, (int, float))]
        rows.append([name, ", ".join([*(f"{state}: {count}" for state, count in sorted(counts.items())), *others])])
    return rows


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], right: Collection[str], lines: box.Box | None
) -> Table:
    table = Table(box=lines, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(Text(name), justify="right" if name in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(_text(value), getattr(value, "style", "")) for value in row))
    return table


def _text(value: Any) -> str:
    """One line: errors and names may have several, and escape sequences."""
    text = "" if value is None else str(value)
    return text if text.isprintable() else plain(" ".join(text.split()))


def _cut(value: Any, width: int) -> Any:
    text = _text(value)
    if len(text) <= width:
        return value
    short = f"{text[: width - 1]}…"
    return Text(short, style=value.style) if isinstance(value, Text) else short


def format_duration(seconds: float) -> str:
    """`87 µs`, `12.3 ms`, `4.21 s`, `3:20`, `2:03:20`, `1-02:03:20` (days first)."""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (60.0, 1.0, "s")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    text = f"{minutes}:{rest:02}" if not hours and not days else f"{hours}:{minutes:02}:{rest:02}"
    return f"{days}-{hours:02}:{minutes:02}:{rest:02}" if days else text


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def show_demand(status: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines about waiting tasks and actors, and about placement groups; none where there are neither.

    Args:
        status: the GCS's answer to "status". groups: its answer to "placement_groups".
    """
    lines = [_unmet(row) for row in status["unmet"]]
    lines += [_actor(row, count) for row, count in _alike(status["waiting_actors"])]
    if lines:
        lines.insert(0, "waiting:")
    present = [group for group in groups if group["state"] != "REMOVED"]
    if present:
        lines.append("placement groups:")
        lines += [_group(group) for group in present[:MOST_GROUPS]]
    if len(present) > MOST_GROUPS:
        lines.append(f"  and {len(present) - MOST_GROUPS} more")
    return lines


def show_autoscaler(status: Mapping[str, Any]) -> list[str]:
    """Lines about further nodes, in the words of `ray status`; none where the job has no autoscaler.

    Args:
        status: the GCS's answer to "status".
    """
    scaling = status["autoscaler"]
    if scaling is None:
        return []
    there = Counter(row["type"] for row in status["nodes"])
    idle = sum(row["idle"] for row in status["nodes"])
    lines = [
        f"autoscaler: {scaling['min_nodes']} to {scaling['max_nodes']} nodes; idle ones are given back after "
        f"{scaling['idle_timeout']:g} s",
        f"  Active: {', '.join(f'{count} {name or _OWN_NODES}' for name, count in there.items())}; {idle} idle",
    ]
    lines.append("  Pending:" + ("" if scaling["pending"] else " (no pending nodes)"))
    lines += [f"    {_pending(row)}" for row in scaling["pending"][:MOST_GROUPS]]
    if len(scaling["pending"]) > MOST_GROUPS:
        lines.append(f"    and {len(scaling['pending']) - MOST_GROUPS} more")
    lines.append("  Recent failures:" + ("" if scaling["failures"] else " (no failures)"))
    lines += [f"    {row['type']}, {row['age']:.0f} s ago: {row['reason']}" for row in scaling["failures"]]
    lines += [f"    {name}: {_held(seconds)}" for name, seconds in scaling["held"].items()]
    wanted = ", ".join(f"{count} x {_amounts(amounts)}" for amounts, count in scaling["requested"])
    return [*lines, f"  From request_resources: {wanted or '(none)'}"]


def _pending(row: Mapping[str, Any]) -> str:
    job = f", batch job {row['instance']}" if row["instance"] else ""
    why = f" ({row['detail']})" if row["detail"] else ""
    return f"{row['type']}{job}: {row['state']} for {row['age']:.0f} s{why}"


def _held(seconds: float) -> str:
    return (
        "no further node is started" if seconds < 0 else f"the next node is started in {seconds:.0f} s at the earliest"
    )


def node_columns(status: Mapping[str, Any]) -> dict[int, dict[str, str]]:
    """For each living node, by its index: the used and total CPUs, GPUs and custom resources, and the waiting tasks."""
    return {
        row["index"]: {
            "CPU": _used(row, "CPU"),
            "GPU": _used(row, "GPU"),
            "others": ", ".join(f"{name} {_used(row, name)}" for name in sorted(row["total"]) if _is_other(name)),
            "waiting": str(status["demand"].get(str(row["index"]), 0) or ""),
        }
        for row in status["nodes"]
    }


def _used(row: Mapping[str, Any], name: str) -> str:
    total = row["total"].get(name, 0)
    return f"{total - row['available'].get(name, 0):g}/{total:g}" if total else ""


def _is_other(name: str) -> bool:
    return name not in _STANDARD_RESOURCES and not name.startswith(("node:", ACCELERATOR_TYPE))


NEVER_SERVED = ", which no node can ever serve"
"""At the end of a line about demand."""


def _unmet(row: Mapping[str, Any]) -> str:
    where = f" on {row['strategy']}" if row["strategy"] else ""
    never = "" if row["feasible"] else NEVER_SERVED
    processes = "process" if row["holders"] == 1 else "processes"
    return f"  {row['count']} x {_amounts(row['resources'])}{where} for tasks of {row['holders']} {processes}{never}"


def _alike(actors: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int]]:
    found: dict[tuple[str, str, bool], list[Mapping[str, Any]]] = {}
    for row in actors:
        found.setdefault((row["class_name"], _amounts(row["resources"]), row["feasible"]), []).append(row)
    return [(rows[0], len(rows)) for rows in found.values()]


def _actor(row: Mapping[str, Any], count: int) -> str:
    never = "" if row["feasible"] else NEVER_SERVED
    return f"  {count} x {_amounts(row['resources'])} for actors {row['class_name']}{never}"


def _group(group: Mapping[str, Any]) -> str:
    kinds = Counter(_amounts(bundle) for bundle in group["bundles"])
    bundles = ", ".join(text if count == 1 else f"{count} x {text}" for text, count in kinds.items())
    name = group["name"] or group["group"].hex()
    nodes = sorted({node for node in group["nodes"] if node >= 0})
    where = f" on node {', '.join(map(str, nodes))}" if nodes else ""
    return f"  {name}: {group['state']}, {group['strategy']} of {bundles}{where}"


def _amounts(resources: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in sorted(resources.items())) + "}"


def show_actors(actors: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """How many actors there are in each state, and the last that died; nothing where there are none.

    Args:
        actors: rows of `LiveJob.actors`.
    """
    counts = Counter(row["state"] for row in actors)
    if counts:
        yield f"actors: {', '.join(f'{count} {state}' for state, count in sorted(counts.items()))}"
    dead = sorted((row for row in actors if row["ended"] is not None), key=lambda row: -row["ended"])
    for row in dead[:_MOST_DEAD]:
        name = f" {row['name']!r}" if row["name"] else ""
        when = time.strftime("%H:%M:%S", time.localtime(row["ended"]))
        reason = " ".join(row["reason"].split())
        yield f"  {row['class']}{name} died at {when} on node {row['node']}: {reason}; hint: hpcray why {row['actor']}"
    if len(dead) > _MOST_DEAD:
        yield f"  and {len(dead) - _MOST_DEAD} more; hint: hpcray list actors -f state=DEAD"


def show_preloaded(nodes: Sequence[ClusterRoster]) -> Iterator[str]:
    """Which modules all workers have from their fork server, and which could not be imported; nothing for none."""
    asked = dict.fromkeys(module for node in nodes for module in node.preloaded)
    failed = [(module, node) for module in asked for node in nodes if node.preloaded.get(module)]
    good = [module for module in asked if any(node.preloaded.get(module) == "" for node in nodes)]
    if good:
        yield f"preloaded: {', '.join(good)}"
    for module, node in failed[:_MOST_DEAD]:
        yield f"  {module} could not be preloaded on node {node.index}: {node.preloaded[module]}"
    if len(failed) > _MOST_DEAD:
        yield f"  and {len(failed) - _MOST_DEAD} more"


def sum_stores(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Totals over the nodes that answered; used, on_disk, evictable and capacity in bytes, the others in objects."""
    answered = [row for row in rows if not row["problem"]]
    return {"nodes": len(answered), **{name: sum(row[name] for row in answered) for name in _SUMMED}}


def show_stores(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A table of objects per node, and the totals.

    Args:
        rows: as `ObjectInventory.list_stores` gives them.
    """
    for row in rows:
        where = f"node {row['node']} ({row['host']})"
        if row["problem"]:
            yield f"{where}: {row['problem']}"
            continue
        yield f"{where}: {_store_line(row)}"
        columns, cells = _store_table(row["list"])
        for line in table_lines(columns, cells, right=("size", "objects")):
            yield f"  {line}"
        if row["objects"] > len(row["list"]):
            yield _not_shown(row)
        yield from _device_lines(row)
    yield from _store_totals(rows)


def _store_totals(rows: list[dict[str, Any]]) -> Iterator[str]:
    total = sum_stores(rows)
    yield f"all {total['nodes']} nodes: {_store_line(total)}"
    listed = [obj for row in rows if not row["problem"] for obj in row["list"]]
    owners = _owner_cells(listed)
    if owners:
        partial = len(listed) < total["objects"]
        yield f"by owner{', of the objects listed' if partial else ''}:"
        for line in table_lines(_OWNER_COLUMNS, owners, right=_OWNER_COLUMNS[:2]):
            yield f"  {line}"
    if listed and not any(obj["site"] for obj in listed):
        yield "where refs were created is not recorded; hint: HPCRAY_RECORD_REF_CREATION_SITES=1 at the job's start"


def _owner_cells(listed: Iterable[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Cells of a table of owners: bytes and number of their objects without copies; those with most bytes first."""
    found: dict[str, list[int]] = {}
    for obj in listed:
        if not obj["copy"]:
            row = found.setdefault(obj["owner"], [0, 0])
            row[0], row[1] = row[0] + obj["size"], row[1] + 1
    largest = sorted(found.items(), key=lambda item: -item[1][0])
    return [(format_size(size), str(count), owner) for owner, (size, count) in largest]


def print_stores(rows: list[dict[str, Any]]) -> None:
    """Print the lines of `show_stores`; on a terminal with tables that fit it."""
    if not sys.stdout.isatty():
        for line in show_stores(rows):
            print(line)
        return
    for row in rows:
        lines = show_stores([row])
        print(next(lines))
        if not row["problem"]:
            print_table(*_store_table(row["list"]))
            if row["objects"] > len(row["list"]):
                print(_not_shown(row))
            for line in _device_lines(row):
                print_text(line)
    for line in _store_totals(rows):
        print_text(line)


def _device_lines(row: dict[str, Any]) -> Iterator[str]:
    """A table of the tensors that processes of a node keep for device objects."""
    kept = row.get("device_objects")
    if kept:
        yield "  device objects, in the processes that made them:"
        cells = [(format_size(one["size"]), str(one["objects"]), one["device"], one["process"]) for one in kept]
        for line in table_lines(_DEVICE_COLUMNS, cells, right=_DEVICE_COLUMNS[:2]):
            yield f"    {line}"


def _not_shown(row: dict[str, Any]) -> str:
    return f"  {row['objects'] - len(row['list'])} smaller ones are not shown; hint: --limit"


def _store_line(row: dict[str, Any]) -> str:
    text = f"{row['objects']} objects; {format_size(row['used'])} of {format_size(row['capacity'])} used"
    text += f", {format_size(row['evictable'])} of that can be evicted" if row["evictable"] else ""
    text += f"; {format_size(row['on_disk'])} on disk" if row["on_disk"] else ""
    return text + (f"; {row['waiting']} wait for room" if row["waiting"] else "")


def _store_table(listed: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Names and cells of the table of a node's objects: one row for those that differ only in their ids."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for obj in listed:
        state = f"{obj['state']}, copy" if obj["copy"] else obj["state"]
        refs = "?" if obj["refs"] is None else f"{obj['refs']} + {obj['borrowers']} borrowed"
        alike = format_size(obj["size"]), state, refs, obj["owner"], _pins(obj), obj["site"]
        groups.setdefault(alike, []).append(obj["id"])
    rows = []
    for (size, *cells, site), ids in groups.items():
        more = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
        rows.append([size, str(len(ids)), *cells, ids[0] + more, site])
    if any(row[-1] for row in rows):
        return [*_STORE_COLUMNS, _SITE], rows
    return [*_STORE_COLUMNS], [row[:-1] for row in rows]


def _pins(obj: dict[str, Any]) -> str:
    names = [name.partition(" (")[0] for name in obj["pins"][:_MOST_PINS]]
    if len(obj["pins"]) > _MOST_PINS:
        names.append(f"{len(obj['pins']) - _MOST_PINS} more")
    if obj["reads"]:
        names.append(f"{obj['reads']} transfers")
    return ", ".join(names) or "-"


def show_stacks(rows: Iterable[dict[str, Any]], everything: bool) -> Iterator[str]:
    """Threads and coroutines of every process, with their frames.

    Args:
        rows: as `diagnosis.stacks` gives them.
        everything: also hpcray's own threads, and raylets.
    """
    hidden = 0
    for node in rows:
        yield f"node {node['node']} ({node['host']}){': ' + node['problem'] if node['problem'] else ''}"
        for row in node["processes"]:
            yield from _process(row, everything)
            hidden += 0 if everything else sum(1 for thread in row["threads"] if not _shown(row, thread))
    if hidden:
        yield f"{hidden} threads of hpcray's own are not shown; hint: --all"


def _process(row: dict[str, Any], everything: bool) -> Iterator[str]:
    what = f"actor {row['actor']}" if row["actor"] else row["kind"]
    state = f", {row['state']}" if row["state"] else ""
    yield f"  {row['process']} ({what}, pid {row['pid']}{state})"
    if row["problem"]:
        yield f"    {row['problem']}; the kernel says: {show_kernel(row['kernel'])}"
        yield from (f"    {line}" for line in row["kernel"].get("stacks", "").splitlines())
        return
    calls = {call["thread"]: call for call in row["calls"] if call["thread"]}
    for wanted, oids in row["waits"]:
        more = f" and {len(oids) - _MOST_IDS} more" if len(oids) > _MOST_IDS else ""
        what = f"wait for {wanted} of" if wanted else "get for"
        yield f"    waits in {what} {', '.join(oids[:_MOST_IDS])}{more}; hint: hpcray why REF"
    for thread in row["threads"]:
        if everything or _shown(row, thread):
            call = calls.get(thread["ident"])
            runs = f" runs {call['name']} for {call['seconds']:.1f} s" if call else ""
            yield f"    thread {thread['name']!r}{runs}"
            yield from _frames(thread["frames"], everything)
    if row["actor"] and not row["calls"] and not row["waits"]:
        yield "    runs no call now"
    running = {call["task"]: call for call in row["calls"] if not call["thread"]}
    for coroutine in row["coroutines"]:
        call = running.get(coroutine["task"])
        since = f" for {call['seconds']:.1f} s" if call else ""
        yield f"    coroutine {call['name'] if call else coroutine['name']!r}{since}"
        yield from _frames(coroutine["frames"], everything)


def _shown(row: dict[str, Any], thread: dict[str, Any]) -> bool:
    """True if a thread runs a task, or has frames of the user's code on its stack."""
    if row["kind"] == "raylet":
        return False
    if any(call["thread"] == thread["ident"] for call in row["calls"]):
        return True
    return not thread["name"].startswith("hpcray-") and any(map(is_users, after_fork(thread["frames"])))


def _frames(frames: list[list[Any]], everything: bool) -> Iterator[str]:
    for file, line, function in frames if everything else interesting_frames(after_fork(frames)):
        text = linecache.getline(file, line).strip()
        yield f"      {file}:{line} in {function}{': ' + text if text else ''}"


# ------------------------------------------------------------ why
# Why a task does not run, or what became of an actor: found by id, by the beginning of one, or by name.

_SHORTEST_ID = 6
"""Hex digits from which on a text may be the beginning of an id."""
_MOST_ACTORS = 5
_MOST_NAMES = 5
_CREATION = "ACTOR_CREATION_TASK"
_OVER = ("FINISHED", "FAILED")
_NO_WORKER = "PENDING_NODE_ASSIGNMENT"


NEVER = "can never serve it"
"""In a line about what waits: a node has not what a task or an actor asks for."""


def never_first(findings: Iterable[WaitReason]) -> list[WaitReason]:
    """The lines of an explanation, what can never run before what has to wait."""
    parts: list[list[WaitReason]] = []
    for one in findings:
        if one.depth == 0 or not parts:
            parts.append([])
        parts[-1].append(one)
    parts.sort(key=lambda part: not any(NEVER in one.text for one in part))
    return [one for part in parts for one in part]


class WaitSearch:
    """Explains waits on behalf of one process, for one answer.

    Args:
        process: it sends the questions.
        timeout: seconds that a process may take.
        only: the nodes whose waits are explained; None: all of them.
    """

    def __init__(self, process: CoreWorker, timeout: float, only: Set[int] | None = None) -> None:
        self._graph = WaitGraph(process, timeout, only)
        self._state = StateAggregator(process, timeout, only)

    def explain(self, wanted: str) -> list[WaitReason]:
        """Explain an object, a task or an actor.

        Args:
            wanted: an id in hex or its beginning, the name of a function or method, or the name or class of an actor.

        Returns:
            Nothing where there is none such.
        """
        if len(wanted) == 2 * OBJECT_BYTES and _is_hex(wanted):
            return self._graph.explain(bytes.fromhex(wanted))
        actors = [row for row in self._state.actors() if _is_meant(wanted, row.actor_id, row.name, row.class_name)]
        found: list[WaitReason] = []
        for actor in sorted(actors, key=_by_importance)[:_MOST_ACTORS]:
            found += self._graph.explain_actor(bytes.fromhex(actor.actor_id))
        if len(actors) > _MOST_ACTORS:
            found.append(WaitReason(0, f"and {len(actors) - _MOST_ACTORS} more actors; hint: hpcray list actors"))
        tasks = [row for row in self._state.tasks() if row.type != _CREATION]
        return found + self._tasks(
            row for row in tasks if _is_meant(wanted, row.task_id, row.name, row.func_or_class_name)
        )

    def explain_all(self, everything: bool = False) -> list[WaitReason]:
        """Explain what drivers wait for, and the tasks that wait for a worker; where no driver waits, all that do not
        run. What can never run comes first.

        Args:
            everything: what tasks and actors wait for in any case.
        """
        found = self._graph.explain_all(everything)
        tasks = [row for row in self._state.tasks() if row.type != _CREATION and row.state not in (*_OVER, "RUNNING")]
        if self._graph.found_waits:
            told = {text for one in found for text in one.text.split()}
            tasks = [row for row in tasks if row.state == _NO_WORKER and row.name not in told]
        return never_first(found + self._tasks(tasks))

    def _tasks(self, rows: Iterable[TaskState]) -> list[WaitReason]:
        by_name: dict[str, list[TaskState]] = {}
        for row in rows:
            by_name.setdefault(row.name, []).append(row)
        found: list[WaitReason] = []
        for name, tasks in list(by_name.items())[:_MOST_NAMES]:
            counts = Counter(row.state for row in tasks)
            found.append(WaitReason(0, f"{name}: {', '.join(f'{count} {state}' for state, count in counts.items())}"))
            found += _below(self._one_of_each_state(tasks))
        if len(by_name) > _MOST_NAMES:
            found.append(WaitReason(0, f"and {len(by_name) - _MOST_NAMES} more functions; hint: hpcray list tasks"))
        return found

    def _one_of_each_state(self, tasks: list[TaskState]) -> Iterator[WaitReason]:
        for state in dict.fromkeys(row.state for row in tasks if row.state not in _OVER):
            row = next(row for row in tasks if row.state == state)
            yield WaitReason(0, f"{state}, such as task {row.task_id}:")
            yield from _below(self._graph.explain(bytes.fromhex(row.task_id) + FIRST_RETURN))
        failed = [row for row in tasks if row.state == "FAILED"]
        if failed:
            last = max(failed, key=lambda row: row.end_time_ms or 0)
            why = " ".join((last.error_message or "").split()[-40:])
            yield WaitReason(0, f"FAILED, the last: task {last.task_id}: {last.error_type or ''} {why}".rstrip())


def _below(reasons: Iterable[WaitReason]) -> Iterator[WaitReason]:
    return (WaitReason(one.depth + 1, one.text) for one in reasons)


def _by_importance(row: ActorState) -> tuple[bool, int]:
    """Those that do not live come first, the last dead one before the others."""
    return row.state == "ALIVE", -int((row.death_cause or {}).get("end_time_ms") or 0)


def _is_meant(wanted: str, ident: str, name: str | None, of: str) -> bool:
    if len(wanted) >= _SHORTEST_ID and _is_hex(wanted) and ident.startswith(wanted.lower()):
        return True
    return any(text and (text == wanted or text.rpartition(".")[2] == wanted) for text in (name, of))


def _is_hex(text: str) -> bool:
    return all(digit in "0123456789abcdefABCDEF" for digit in text)


# ------------------------------------------------------------ memory use
# What takes the memory of a job: objects, by where they come from and how they grow, and processes.

_MOST_OBJECTS = 100_000
"""Objects that one process lists, at most."""


@dataclass
class ObjectCensus:
    """The objects that the processes of a job own.

    Attributes:
        origins: of each origin, how many there are and their bytes. An origin is the line that created the refs, where
            the job records them; else the function that returned the objects, or the process that has put them.
        partial: processes that own more objects than they have listed. missing: those that did not answer.
    """

    origins: dict[str, tuple[int, int]]
    partial: list[str]
    missing: list[str]


@dataclass(frozen=True)
class ObjectGrowth:
    """The objects of one origin: how many more there are than before, and how many more bytes; and now."""

    origin: str
    more: int
    more_bytes: int
    count: int
    size: int


def count_objects(process: CoreWorker, patience: float) -> ObjectCensus:
    """Count the objects of a job by where they come from.

    Args:
        process: it sends the questions. patience: seconds that a process may take to answer.
    """
    query = ClusterQuery(process, patience)
    people = {one.proc: one for one in query.processes() if one.kind in ("driver", "worker") and one.proc != process.me}
    answers = query.ask(people, "objects", _MOST_OBJECTS)
    found = ObjectCensus({}, [], [])
    for proc, one in people.items():
        answer = answers.get(proc)
        if answer is None:
            if proc not in query.gone:
                found.missing.append(one.title)
            continue
        for row in answer["rows"]:
            if row["mine"] and row["state"] in ("inline", "stored"):
                origin = row["site"] or row["task"] or f"put by {one.title}"
                count, size = found.origins.get(origin, (0, 0))
                found.origins[origin] = count + 1, size + row["size"]
        if answer["total"] > len(answer["rows"]):
            found.partial.append(one.title)
    return found


def growth(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> list[ObjectGrowth]:
    """Return what has changed from one count to the next, the largest growth first.

    Args:
        before, after: `ObjectCensus.origins`.
    """
    found = []
    for origin in {*before, *after}:
        (old, old_size), (new, new_size) = before.get(origin, (0, 0)), after.get(origin, (0, 0))
        if (old, old_size) != (new, new_size):
            found.append(ObjectGrowth(origin, new - old, new_size - old_size, new, new_size))
    return sorted(found, key=lambda one: (-one.more_bytes, -one.more, one.origin))


# ------------------------------------------------------------ process memory
# The processes of a job that take most memory, beside the object stores.


def largest_processes(process: CoreWorker, limit: int, timeout: float) -> list[dict[str, Any]]:
    """The processes with most resident memory but for the one that asks, the largest first.

    Args:
        limit: how many. timeout: seconds that a raylet or process may take.

    Returns:
        Rows "pid", "node", "what", "rss" (bytes) and "runs", the names of the tasks and calls that run there.
    """
    query = ClusterQuery(process, timeout)
    nodes = query.nodes()
    people = {one.proc: one for node in nodes for one in node.processes if one.proc != process.me}
    raylets = [one.proc for one in people.values() if one.kind == "raylet"]
    used = [row for rows in query.ask(raylets, "usage").values() for row in rows if row["proc"] in people]
    largest = sorted(used, key=lambda row: -int(row["rss"]))[:limit]
    calls = query.ask([row["proc"] for row in largest], "calls")
    return [
        {
            "pid": row["pid"],
            "node": people[row["proc"]].node,
            "what": people[row["proc"]].actor_class or people[row["proc"]].kind,
            "rss": row["rss"],
            "runs": [call["name"] for call in calls.get(row["proc"]) or ()],
        }
        for row in largest
    ]
