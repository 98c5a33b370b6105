"""Cells of the tables of `hpcray top`, as text that fits a column."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from hpcray.common.figures import lower_bound
from hpcray.common.terminal_text import plain
from hpcray.core.object_store.allocator import format_size
from hpcray.state.overview import FunctionUse, JobUse, NodeUse, is_slow
from hpcray.state.reports import format_duration

_FULL, _HIGH = 0.9, 0.7
_BAR = 4
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_WIDE = 110  # columns of a terminal
_LONGEST = 40  # characters of the longest bar of a distribution
_SLOW = 0.05  # seconds of a round trip to a node

Column = tuple[str, int]
"""The name of a column and its width."""

_NODE_COLUMNS: tuple[Column, ...] = (
    ("node", 5), ("CPU", 8), ("memory", 8), ("GPU", 8), ("store", 8), ("disk", 8), ("net in/out /s", 15),
)  # fmt: skip
_MORE_NODE_COLUMNS: tuple[Column, ...] = (
    ("host", 14),
    ("host CPU", 8),
    ("workers", 8),
    ("waiting", 7),
    ("round trip", 10),
    ("run times", 9),
    ("objects in/out /s", 17),
)
_FUNCTION_COLUMNS: tuple[Column, ...] = (
    ("function", 18), ("run", 4), ("queued", 6), ("ended", 7), ("failed", 6), ("p50", 7), ("p99", 7), ("total", 7),
)  # fmt: skip
_MORE_FUNCTION_COLUMNS: tuple[Column, ...] = (("per s", 8), ("share of time", 13))


def bar(share: float, limit: bool = False) -> Text:
    """`███▌ 87%`. limit: whether it is wrong that it is almost full, and so red: of memory, not of a busy CPU."""
    share = min(1.0, max(0.0, share))
    eighths = round(share * _BAR * 8)
    whole, rest = divmod(eighths, 8)
    text = ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(_BAR)
    style = "green" if not limit or share < _HIGH else "yellow" if share < _FULL else "red"
    return Text.assemble((text, style), f"{share * 100:3.0f}%")


def node_columns(width: int) -> list[Column]:
    """The columns of nodes on a terminal of this width."""
    return [*_NODE_COLUMNS, *(_MORE_NODE_COLUMNS if width >= _WIDE else ())]


def function_columns(width: int) -> list[Column]:
    """The columns of functions on a terminal of this width."""
    return [*_FUNCTION_COLUMNS, *(_MORE_FUNCTION_COLUMNS if width >= _WIDE else ())]


def node_cells(use: NodeUse, width: int) -> list[Any]:
    """The cells of a node, as many as `node_columns`."""
    if use.problem:
        state = use.problem.partition(":")[0] if use.problem != "no answer" else "silent"
        cells: list[Any] = [str(use.index), Text(state, style="" if use.left else "red")]
        return cells + [""] * (len(node_columns(width)) - len(cells))
    used, limit = use.memory
    store = use.store
    busy = sum(gpu["busy"] for gpu in use.gpus) / len(use.gpus) if use.gpus else None
    disk = short_size(store["on_disk"]) if store["on_disk"] else ""
    cells = [
        str(use.index), bar(use.cores / use.cpu_count if use.cpu_count else 0.0),
        bar(used / limit if limit else 0.0, limit=True), "" if busy is None else bar(busy),
        bar(store["used"] / store["capacity"] if store["capacity"] else 0.0), disk,
        f"{short_size(use.receiving)}/{short_size(use.sending)}",
    ]  # fmt: skip
    if width >= _WIDE:
        latency = Text(format_duration(use.latency)) if use.latency is not None else Text("")
        if use.latency is not None and use.latency > _SLOW:
            latency.stylize("red")
        workers = f"{use.workers.get('busy', 0)}/{sum(use.workers.values())}"
        slow = "" if use.slowness is None else Text(f"{use.slowness:.2g}x", style="red" if is_slow(use) else "")
        objects = f"{short_size(use.pulling)}/{short_size(use.pushing)}" if use.pulling or use.pushing else ""
        cells += [use.host, f"{use.cpu:.0%}", workers, str(use.waiting or ""), latency, slow, objects]
    return cells


def function_cells(one: FunctionUse, width: int, whole: float) -> list[Any]:
    """The cells of a function, as many as `function_columns`. whole: seconds of all functions."""
    times = [format_duration(one.p50), format_duration(one.p99)] if one.buckets else ["", ""]
    times.append(format_duration(one.total) if one.ended or one.running else "")
    failed = Text(str(one.failed), style="red") if one.failed else ""
    cells: list[Any] = [one.name, str(one.running or ""), str(one.queued or ""), str(one.ended or ""), failed, *times]
    if width >= _WIDE:
        cells += [f"{one.rate:.3g}" if one.rate else "", bar(one.total / whole) if whole else ""]
    return cells


def headline(use: JobUse) -> Text:
    """The job in one line."""
    alive = [one for one in use.nodes if not one.problem]
    lost = sum(bool(one.problem) and not one.left for one in use.nodes)
    store, capacity, disk = (sum(one.store[name] for one in alive) for name in ("used", "capacity", "on_disk"))
    parts = [f"{len(alive)} node{'s' * (len(alive) != 1)}" + (f", {lost} lost" if lost else "")]
    parts += [f"CPU {_used(alive, 'CPU')}"]
    parts += [f"GPU {_used(alive, 'GPU')}"] if any("GPU" in one.resources for one in alive) else []
    parts += [f"store {format_size(store)} of {format_size(capacity)}"]
    parts += [f"disk {format_size(disk)}"] if disk else []
    parts += [time.strftime("%H:%M:%S", time.localtime(use.time))]
    parts += [f"{format_duration(use.left)} left"] if use.left is not None else []
    parts += [f"node {one.index} is slow ({one.slowness:.2g}x)" for one in alive if is_slow(one)]
    return Text.assemble((plain(use.job_id), "bold"), "  ", "  ".join(parts), "  ", (plain(use.program), "dim"))


def core_time(use: JobUse) -> str:
    """The account of core time since the start of the job in one line, the most first; "" where there is none."""
    whole = sum(use.core_time.values())
    parts = sorted(use.core_time.items(), key=lambda item: -item[1])
    shown = [f"{seconds / whole:.0%} {name}" for name, seconds in parts if seconds >= whole / 200 > 0]
    return f"cores: {'; '.join(shown)}" if shown else ""


def short_size(size: float) -> str:
    """`1.5G`, `20k`, `0`: letters of Slurm's, in powers of 1024."""
    for unit, name in ((1 << 40, "T"), (1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k")):
        if size >= unit:
            return f"{size / unit:.1f}{name}" if size < 10 * unit else f"{size / unit:.0f}{name}"
    return f"{size:.0f}"


def distribution(one: FunctionUse, height: int = 20) -> list[str]:
    """The run times of a function as bars, a line for each range that occurs."""
    if not one.buckets:
        return ["no run has ended yet"]
    low, high = min(one.buckets), max(one.buckets)
    step = max(1, -(-(high - low + 1) // height))
    counts: list[tuple[int, int]] = [
        (start, sum(one.buckets.get(bucket, 0) for bucket in range(start, start + step)))
        for start in range(low, high + 1, step)
    ]
    most = max(count for _, count in counts)
    return [
        f"{format_duration(lower_bound(start)):>9}  {'█' * round(_LONGEST * count / most) or '▏' * bool(count)} {count}"
        for start, count in counts
    ]


def _used(nodes: Sequence[NodeUse], name: str) -> str:
    pairs = [one.resources[name] for one in nodes if name in one.resources]
    return f"{sum(used for used, _ in pairs):g}/{sum(total for _, total in pairs):g}"
