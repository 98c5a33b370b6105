"""What `hpcray memory` prints: the stores of a job's nodes, summed and listed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from hpcray.core.store.report import show_size

_SUMMED = ("objects", "capacity", "used", "on_disk", "pinned", "evictable", "spilled", "waiting")
_MOST_PINS = 3
_HEAD = ("size", "state", "refs", "owner", "pinned by", "object", "created at")


def sum_stores(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Totals over the nodes that answered; used, on_disk, evictable and capacity in bytes, the others in objects."""
    answered = [row for row in rows if not row["problem"]]
    return {"nodes": len(answered), **{name: sum(row[name] for row in answered) for name in _SUMMED}}


def show_stores(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The lines of a table per node, and of the totals.

    Args:
        rows: as `Survey.look` gives them.
    """
    for row in rows:
        where = f"node {row['node']} ({row['host']})"
        if row["problem"]:
            yield f"{where}: {row['problem']}"
            continue
        yield f"{where}: {_one_line(row)}"
        if row["list"]:
            yield from _aligned([_HEAD, *map(_cells, row["list"])])
        if row["objects"] > len(row["list"]):
            yield f"  {row['objects'] - len(row['list'])} smaller ones are not shown; hint: --limit"
    total = sum_stores(rows)
    yield f"all {total['nodes']} nodes: {_one_line(total)}"


def _one_line(row: dict[str, Any]) -> str:
    text = f"{row['objects']} objects; {show_size(row['used'])} of {show_size(row['capacity'])} used"
    text += f", {show_size(row['evictable'])} of that can be evicted" if row["evictable"] else ""
    text += f"; {show_size(row['on_disk'])} on disk" if row["on_disk"] else ""
    return text + (f"; {row['waiting']} wait for room" if row["waiting"] else "")


def _cells(obj: dict[str, Any]) -> tuple[str, ...]:
    state = f"{obj['state']}, copy" if obj["copy"] else obj["state"]
    refs = "?" if obj["refs"] is None else f"{obj['refs']} + {obj['borrowers']} borrowed"
    return show_size(obj["size"]), state, refs, obj["owner"], _pins(obj), obj["id"], obj["site"]


def _pins(obj: dict[str, Any]) -> str:
    names = [name.partition(" (")[0] for name in obj["pins"][:_MOST_PINS]]
    if len(obj["pins"]) > _MOST_PINS:
        names.append(f"{len(obj['pins']) - _MOST_PINS} more")
    if obj["reads"]:
        names.append(f"{obj['reads']} transfers")
    return ", ".join(names) or "-"


def _aligned(table: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        first, *others = (text.ljust(width) for text, width in zip(cells, widths, strict=True))
        yield f"  {first.strip():>{widths[0]}}  {'  '.join(others)}".rstrip()
