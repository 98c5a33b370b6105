"""Raylets and processes whose cores note what they are told (`HPCRAY_RECORD=1`), for `hpcray dump`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcray.core.recording import Recorder, portion

if TYPE_CHECKING:
    from hpcray.core.owner.noted import NotedTable
    from hpcray.runtime.process import Process
    from hpcray.runtime.raylet import Raylet


class Recorders:
    """The records of one raylet's cores. Make it before the first of them is told anything.

    Args:
        raylet: its handlers get the recorded methods. chunk, slots: of its store.
    """

    def __init__(self, raylet: Raylet, chunk: int, slots: int) -> None:
        config = raylet.seat.config
        common: dict[str, Any] = {"config": config.as_dict()}
        size, spill = raylet.seat.info.arena_size, config.spill_threshold
        made: dict[str, dict[str, Any]] = {
            "raylet": {
                "total": raylet.seat.info.total,
                "cluster_size": raylet.seat.cluster_size,
                "gpu_ids": list(raylet.core._ledger.gpu_ids),
                "limit": raylet.core.pool.limit,
            },
            "head": {},
            "store": {"store": {"size": size, "spill_threshold": spill, "chunk": chunk, "slots": slots}},
        }
        cores = {"raylet": raylet.core, "head": raylet.head, "store": raylet.store}
        self._recorders = {
            name: Recorder(name, raylet.node, {**common, **made[name]})
            for name, core in cores.items()
            if core is not None
        }
        for name, recorder in self._recorders.items():
            for method in recorder.methods():
                # Drivers get their numbers from the pool itself, which numbers its workers without being told.
                target = raylet if method == "new_number" else cores[name]
                before = getattr(target, method)
                after = recorder.wrap(target, method)
                for kind, handler in raylet.handlers.items():
                    if handler == before:
                        raylet.handlers[kind] = after

    def portion(self, name: str = "", start: int = 0) -> Any:
        """Without a name: the names of the cores. Else the record from input `start` on, about a MB of it."""
        if not name:
            return list(self._recorders)
        return portion(self._recorders[name].record, start)


def owner_portion(process: Process) -> Callable[..., Any]:
    """The same of a driver's or worker's object table; `process` records."""
    table: NotedTable = process.table  # type: ignore[assignment]
    record = table.log.record

    def told(name: str = "", start: int = 0) -> Any:
        return portion(record, start) if name else [record.core]

    return told
