"""Objects of one process on a node that leaves the job: copied to other nodes while it still lives."""

from __future__ import annotations

from hpcray.common.ids import owner_of, raylet_of
from hpcray.core.core_worker.object_entry import STORED
from hpcray.core.core_worker.object_table import Waiter
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.context import CoreWorkerContext
from hpcray.runtime.core_worker.io_engine import monotonic

_LOOK_INTERVAL = 0.02
_AT_ONCE = 32


class ObjectEvacuation:
    """Copies what only a leaving node has, a few objects at a time (lock held in all methods)."""

    def __init__(self, context: CoreWorkerContext) -> None:
        self._context = context

    def begin(self, msg: m.Evacuate) -> None:
        """Have each object of this process that only `msg.node` has kept on one of `msg.targets`; this node is
        preferred, as far as it has room. The answer follows when all are copied or cannot be."""
        self._go_on(msg, set(), {})

    def _go_on(self, msg: m.Evacuate, tried: set[bytes], waiters: dict[bytes, Waiter]) -> None:
        context, table = self._context, self._context.table
        under_way = {oid: waiter for oid, waiter in waiters.items() if waiter.count > 0}
        left = [oid for oid in self._only_there(msg.node) if oid not in tried]
        for oid in left[: _AT_ONCE - len(under_way)]:
            tried.add(oid)
            under_way[oid] = Waiter()
            table.recovery.replicate(oid, self._target(oid, msg), under_way[oid])
        if under_way:
            context.engine.add_timer(monotonic() + _LOOK_INTERVAL, lambda now: self._go_on(msg, tried, under_way))
        else:
            context.engine.send(raylet_of(context.node), m.Evacuated(msg.node))
        context.engine.flush()

    def _only_there(self, node: int) -> list[bytes]:
        me = self._context.me
        entries = self._context.table.entries.items()
        return [
            oid for oid, entry in entries if entry.state == STORED and entry.nodes == [node] and owner_of(oid) == me
        ]

    def _target(self, oid: bytes, msg: m.Evacuate) -> int:
        return msg.targets[int.from_bytes(oid[-8:], "big") % len(msg.targets)]
