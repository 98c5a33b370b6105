"""`ray._private.internal_api`: garbage collection, the object stores of all nodes, tasks that run again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from hpcray.api.session import require_session
from hpcray.compat.names.state import GlobalState, state
from hpcray.runtime.core_worker.core_worker import need_process

_MEMORY_SUMMARY_ROWS = 100
_MEMORY_SUMMARY_TIMEOUT = 10.0  # seconds
_MEMORY_INFO_TIMEOUT = 60.0  # seconds
_MIB = 1 << 20
PENDING_NODE_ASSIGNMENT, SUBMITTED_TO_WORKER = 4, 6
"""`TaskStatus` of Ray's protocol: the task waits, or was sent to a worker."""


class ObjectStoreStats(msgspec.Struct, kw_only=True):
    """Sums over the object stores of all nodes that answer, since their start. Amounts in bytes, times in seconds."""

    spill_time_total_s: float = 0.0
    spilled_bytes_total: int = 0
    spilled_objects_total: int = 0
    restore_time_total_s: float = 0.0
    restored_bytes_total: int = 0
    restored_objects_total: int = 0
    object_store_bytes_used: int = 0
    object_store_bytes_avail: int = 0
    object_store_bytes_primary_copy: int = 0
    object_store_bytes_fallback: int = 0
    num_local_objects: int = 0
    object_pulls_queued: bool = False
    cumulative_created_objects: int = 0


class MemoryInfoReply(msgspec.Struct):
    """Answer of `get_memory_info_reply`."""

    store_stats: ObjectStoreStats
    memory_summary: str = ""


class LineageReconstructionTask(msgspec.Struct, frozen=True):
    """A task that runs again, as what it had made is lost. labels: the option `_labels`."""

    name: str
    status: int
    labels: dict[str, str]


def get_state_from_address(address: str | None = None) -> GlobalState:
    """Return the state of the job that this process has joined, whatever the address says."""
    require_session()
    return state


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
    tables: list[str] = []
    if not stats_only:
        from hpcray.state.reports import show_stores  # with rich, which takes a tenth of the time of `import ray.data`

        tables += show_stores(rows)
    return "\n".join([*tables, *_store_sums(_stats(rows))])


def get_memory_info_reply(
    state: Any = None,
    node_manager_address: str | None = None,
    node_manager_port: int | None = None,
    timeout_seconds: float = _MEMORY_INFO_TIMEOUT,
) -> MemoryInfoReply:
    """Return what the object stores of all nodes hold, and have spilled and restored.

    Args:
        state, node_manager_address, node_manager_port: without effect.
        timeout_seconds: how long to wait for the nodes.
    """
    return MemoryInfoReply(_stats(require_session().diagnostics.list_stores(0, timeout_seconds)))


def get_local_ongoing_lineage_reconstruction_tasks() -> list[tuple[LineageReconstructionTask, int]]:
    """Return the tasks of this process that run again for lost objects, alike ones with their number."""
    process = require_session()
    found: Counter[tuple[str, int, tuple[tuple[str, str], ...]]] = Counter()
    with process.engine.lock:
        for task in process.submitter.retries.reconstructing(process.submitter.generator_streams.is_open):
            status = PENDING_NODE_ASSIGNMENT if task.worker is None else SUBMITTED_TO_WORKER
            name = task.extra.name or task.name
            found[name, status, tuple(sorted((task.extra.labels or {}).items()))] += 1
    return [
        (LineageReconstructionTask(name, status, dict(labels)), count)
        for (name, status, labels), count in found.items()
    ]


def _stats(stores: list[dict[str, Any]]) -> ObjectStoreStats:
    rows = [row for row in stores if not row["problem"]]

    def total(name: str) -> int:
        return int(sum(row[name] for row in rows))

    return ObjectStoreStats(
        spill_time_total_s=float(sum(row["spill_seconds"] for row in rows)),
        spilled_bytes_total=total("spilled_bytes"),
        spilled_objects_total=total("spilled_objects"),
        restore_time_total_s=float(sum(row["restore_seconds"] for row in rows)),
        restored_bytes_total=total("loaded_bytes"),
        restored_objects_total=total("restored"),
        object_store_bytes_used=total("used"),
        object_store_bytes_avail=total("capacity"),
        object_store_bytes_primary_copy=total("used") - total("evictable"),
        object_store_bytes_fallback=total("overflow"),
        num_local_objects=total("objects"),
        object_pulls_queued=bool(total("queued") or total("waiting")),
        cumulative_created_objects=total("created"),
    )


def _store_sums(stats: ObjectStoreStats) -> Iterator[str]:
    """The lines that programs of Ray's look for."""
    used, capacity = stats.object_store_bytes_used, max(1, stats.object_store_bytes_avail)
    full, needed = (round(100 * part / capacity, 2) for part in (used, stats.object_store_bytes_primary_copy))
    yield "--- Aggregate object store stats across all nodes ---"
    yield f"Plasma memory usage {used // _MIB} MiB, {stats.num_local_objects} objects, {full}% full, {needed}% needed"
    if stats.object_store_bytes_fallback:
        yield f"Plasma filesystem mmap usage: {stats.object_store_bytes_fallback // _MIB} MiB"
    if stats.spilled_bytes_total:
        spilled = stats.spilled_bytes_total / _MIB
        speed = int(spilled / max(1e-6, stats.spill_time_total_s))
        yield f"Spilled {int(spilled)} MiB, {stats.spilled_objects_total} objects, avg write throughput {speed} MiB/s"
    if stats.restored_bytes_total:
        yield f"Restored {stats.restored_bytes_total // _MIB} MiB, {stats.restored_objects_total} objects"
    if stats.object_pulls_queued:
        yield "Object fetches queued, waiting for available memory."
