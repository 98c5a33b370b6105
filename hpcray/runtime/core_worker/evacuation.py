"""Objects of a node that leaves the job, as one process sees them while that node still lives: it copies those that it
owns to other nodes, and keeps those that it borrows; on the node itself, it has their borrowers keep its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from functools import partial

from hpcray.common.exceptions import RayError
from hpcray.common.ids import node_of, owner_of, raylet_of
from hpcray.core.core_worker.object_entry import INLINE, PENDING, STORED
from hpcray.core.core_worker.object_table import Waiter
from hpcray.protocol import messages as m
from hpcray.protocol.messages.objects import ERROR
from hpcray.runtime.core_worker.context import CoreWorkerContext
from hpcray.runtime.core_worker.io_engine import monotonic
from hpcray.runtime.core_worker.object_refs import new_ref
from hpcray.runtime.core_worker.object_writer import ObjectWriter

_LOOK_INTERVAL = 0.02
_AT_ONCE = 32
_MOST_TRIES = 4
"""Nodes that are asked for a copy of one object: the first may have no room, or leave or die itself."""
_LATE_LOOK_INTERVAL = 0.5
_LONGEST_LOOK_INTERVAL = 0.5
_ASK_AGAIN = 2.0
"""Seconds after which a borrower is asked again: its node may have had no room, or an object may have moved."""


class ObjectEvacuation:
    """Copies what only a leaving node has, a few objects at a time (lock held in all methods).

    Args:
        msg: names the node. Each object goes to one of `msg.targets`, to the next where that has no room, or is gone.
    """

    def __init__(self, context: CoreWorkerContext, msg: m.Evacuate) -> None:
        self._context = context
        self._node, self._targets = msg.node, msg.targets
        self._most_tries = min(len(msg.targets), _MOST_TRIES)
        self._queue: deque[bytes] = deque()
        self._tries: dict[bytes, int] = {}
        self._under_way: dict[bytes, Waiter] = {}
        self._answered = False

    def go_on(self, now: float = 0.0) -> None:
        """Begin, or look what has been copied. The answer follows when all are copied or cannot be. What actors of the
        node return after that is copied too, as far as there is time."""
        context = self._context
        self._read_answers()
        if not self._queue and not self._under_way:
            self._queue.extend(self._find())
        while self._queue and len(self._under_way) < _AT_ONCE:
            self._copy(self._queue.popleft())
        if not self._under_way and not self._answered:
            self._answered = True
            context.engine.send(raylet_of(context.node), m.Evacuated(self._node))
        if self._under_way or self._node not in context.table.dead_nodes:
            pause = _LOOK_INTERVAL if self._under_way else _LATE_LOOK_INTERVAL
            context.engine.add_timer(monotonic() + pause, self.go_on)
        context.engine.flush()

    def _read_answers(self) -> None:
        replicas = self._context.table.replicas
        for oid in [oid for oid, waiter in self._under_way.items() if waiter.count <= 0]:
            del self._under_way[oid]
            if replicas.take_failure(oid, self._target(oid)) and self._tries[oid] < self._most_tries:  # no other reads
                self._queue.append(oid)

    def _find(self) -> list[bytes]:
        """The objects of this process that only the node has. Takes time: this process may own a million others."""
        me, tries, most = self._context.me, self._tries, self._most_tries
        return [
            oid
            for oid, entry in self._context.table.entries.items()
            if entry.state == STORED
            and entry.nodes == [self._node]
            and owner_of(oid) == me
            and tries.get(oid, 0) < most
        ]

    def _copy(self, oid: bytes) -> None:
        entry = self._context.table.entries.get(oid)
        if entry is not None and entry.state == STORED and entry.nodes == [self._node]:
            self._tries[oid] = self._tries.get(oid, 0) + 1
            waiter = self._under_way[oid] = Waiter()
            self._context.table.recovery.replicate(oid, self._target(oid), waiter)

    def _target(self, oid: bytes) -> int:
        """The target that is asked at this try."""
        return self._targets[(int.from_bytes(oid[-8:], "big") + self._tries[oid] - 1) % len(self._targets)]


class ObjectHandover:
    """The objects of this process, whose node leaves, that processes elsewhere refer to (lock held in all methods).

    Args:
        leaving: all nodes that leave, as far as this process knows. What only processes of these refer to goes too.
        is_saved: returns whether the state of the actor that this process is, if it is one, was saved or need not be.
    """

    def __init__(
        self, context: CoreWorkerContext, leaving: Collection[int], is_saved: Callable[[], bool] = lambda: True
    ) -> None:
        self._context = context
        self._leaving = leaving
        self._is_saved = is_saved
        self._asked_at: dict[tuple[bytes, bytes], float] = {}

    def begin(self, pause: float = _LOOK_INTERVAL) -> None:
        """Have each borrower keep a copy. The answer follows when none borrows anything any more, and the state of the
        actor is saved."""
        context, now = self._context, monotonic()
        lent = context.table.refs.lent_beyond(self._leaving)
        for borrower, oids in lent.items():
            self._ask(borrower, oids, now)
        if lent or not self._is_saved():
            longer = min(2 * pause, _LONGEST_LOOK_INTERVAL)
            context.engine.add_timer(now + pause, lambda _: self.begin(longer))
        else:
            kept_at = sorted({node_of(borrower) for borrower, _ in self._asked_at})
            context.engine.send(raylet_of(context.node), m.Evacuated(context.node, kept_at))
        context.engine.flush()

    def _ask(self, borrower: bytes, oids: list[bytes], now: float) -> None:
        entries, asked_at = self._context.table.entries, self._asked_at
        due = [
            oid
            for oid in oids
            if entries[oid].state != PENDING and asked_at.get((borrower, oid), -_ASK_AGAIN) <= now - _ASK_AGAIN
        ]
        if due:
            asked_at.update(((borrower, oid), now) for oid in due)
            contained = {oid: [ref._id for ref in entries[oid].contained or ()] for oid in due}
            self._context.engine.send(
                borrower, m.KeepCopies(due, {oid: refs for oid, refs in contained.items() if refs})
            )


class BorrowedObjects:
    """The objects that this process borrows from owners whose nodes leave."""

    def __init__(self, context: CoreWorkerContext, writer: ObjectWriter) -> None:
        self._context = context
        self._writer = writer
        self._small: deque[bytes] = deque()
        self._writes = False

    def keep(self, msg: m.KeepCopies) -> None:
        """Have this node's store keep the objects as soon as they exist (lock held)."""
        context = self._context
        table = context.table
        for oid in msg.ids:
            if oid not in table.entries:
                continue  # the owner will read that it is not borrowed any more
            inner = msg.contained.get(oid)
            if inner and table.entries[oid].contained is None:
                for ident in inner:
                    table.refs.ref_deserialized(ident, None)
                table.copies.hold(oid, [new_ref(ident) for ident in inner])
            if table.wait_ready(oid, Waiter(callback=partial(self._ready, oid))):
                self._ready(oid)
        context.engine.flush()

    def _ready(self, oid: bytes) -> None:
        table = self._context.table
        entry = table.entries.get(oid)
        if entry is None:
            return
        if entry.state == STORED:
            table.copies.keep(oid)
        elif entry.state == INLINE and entry.value[-1] == ERROR:
            table.copies.keep_error(oid)
        elif entry.state == INLINE and oid not in self._small:
            self._small.append(oid)
            if not self._writes:  # a store may let its writers wait
                self._writes = True
                threading.Thread(target=self._write, name="hpcray-keep-copies", daemon=True).start()

    def _write(self) -> None:
        """Write small values, which live in this process, into the store: processes that get a ref read them there."""
        context = self._context
        while True:
            with context.engine.lock:
                if not self._small:
                    self._writes = False
                    return
                oid = self._small.popleft()
                entry = context.table.entries.get(oid)
                blob = entry.value if entry is not None and entry.state == INLINE else b""
            if not blob:
                continue
            try:
                offset = self._writer.write_unless_there(oid, blob)
            except RayError:
                continue  # there is no room: its owner asks again
            with context.engine.lock:
                context.table.copies.written(oid, offset, len(blob))
                context.engine.flush()
