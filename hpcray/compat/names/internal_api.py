"""`ray._private.internal_api`: garbage collection and a report on the object stores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcray.runtime.core_worker.core_worker import need_process
from hpcray.state.reports import show_stores

_MEMORY_SUMMARY_ROWS = 100
_MEMORY_SUMMARY_TIMEOUT = 10.0  # seconds
_MIB = 1 << 20


def global_gc() -> None:
    """Have every worker and driver of the job run Python's garbage collector, soon.

    Raises:
        RaySystemError: hpcray is not initialized.
    """
    need_process().request_global_gc()


def memory_summary(address: str | None = None, *_: Any, stats_only: bool = False, **__: Any) -> str:
    """Return the text that `hpcray memory` prints for the job of this process, then sums in Ray's form.

    Args:
        address: without effect, as are Ray's arguments for sorting and grouping.
        stats_only: whether to return the sums only.

    Raises:
        RaySystemError: hpcray is not initialized.
    """
    limit = 0 if stats_only else _MEMORY_SUMMARY_ROWS
    rows = need_process().diagnostics.list_stores(limit, _MEMORY_SUMMARY_TIMEOUT)
    tables = [] if stats_only else list(show_stores(rows))
    return "\n".join([*tables, *_store_sums([row for row in rows if not row["problem"]])])


def _store_sums(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The lines that programs of Ray's look for."""

    def total(name: str) -> int:
        return int(sum(row[name] for row in rows))

    used, capacity = total("used"), max(1, total("capacity"))
    full, needed = (round(100 * part / capacity, 2) for part in (used, used - total("evictable")))
    yield "--- Aggregate object store stats across all nodes ---"
    yield f"Plasma memory usage {used // _MIB} MiB, {total('objects')} objects, {full}% full, {needed}% needed"
    if total("overflow"):
        yield f"Plasma filesystem mmap usage: {total('overflow') // _MIB} MiB"
    if spilled := total("spilled_bytes"):
        speed = int(spilled / _MIB / max(1e-6, sum(row["spill_seconds"] for row in rows)))
        yield f"Spilled {spilled // _MIB} MiB, {total('spilled_objects')} objects, avg write throughput {speed} MiB/s"
    if total("loaded_bytes"):
        yield f"Restored {total('loaded_bytes') // _MIB} MiB, {total('restored')} objects"
    if total("queued") or total("waiting"):
        yield "Object fetches queued, waiting for available memory."
