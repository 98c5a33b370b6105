"""Nodes of the ownership simulation that leave in good order: what `runtime.core_worker.drain_client` does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ownership_losses import NODE_DIED
from ownership_parts import ERROR, LARGE, Ref, refs_in

from hpcray.common.ids import node_of, owner_of, raylet_of
from hpcray.core.core_worker.object_table import INLINE, PENDING, STORED, Waiter
from hpcray.protocol import messages as m

if TYPE_CHECKING:
    from ownership_oracle import Oracle
    from ownership_process import Process
    from ownership_store import Store

ASK_AGAIN = 300
"""Events after which a borrower is asked again."""
MOST_TRIES = 4
MOST_LOOKS = 400
"""Looks after which the time of a node that leaves is up."""


class Departing:
    """The part of a world in which nodes leave in good order.

    Attributes:
        departures: so many nodes will leave. leaving: those that are about to. kept_at: by node that has left, the
            nodes that keep objects of its processes. first_keepers: for each of these objects the processes that kept
            it when its owner left.
        handed_over: objects that processes elsewhere kept then. in_time: nodes that waited for nobody at the end.
        read_kept: reads of what an owner that has left had owned.
    """

    channels: dict[tuple[bytes, bytes], deque[Any]]
    processes: dict[bytes, Process]
    stores: list[Store]
    oracle: Oracle
    living: list[Process]
    lost_copies: set[bytes]
    dead: set[bytes]
    events: int
    pick: Any
    one: Any
    end_of: Any
    born: Any
    make_store: Any

    def __init__(self, departures: int) -> None:
        self.departures = departures
        self.leaving: set[int] = set()
        self.kept_at: dict[int, list[int]] = {}
        self.first_keepers: dict[bytes, set[bytes]] = {}
        self.handed_over = self.in_time = self.read_kept = 0
        self._looks: dict[int, int] = {}
        self._asked_at: dict[tuple[bytes, bytes], int] = {}
        self._copied: dict[tuple[int, bytes], Waiter] = {}
        self._tries: dict[tuple[int, bytes], int] = {}
        self._targets: dict[int, list[int]] = {}

    @property
    def acting(self) -> list[Process]:
        """The processes whose programs do something: those of a node that leaves have ended their tasks."""
        return [process for process in self.living if process.node not in self.leaving]

    def begin_leaving(self) -> None:
        """Perhaps a node begins to leave. Node 0 stays."""
        found = [s for s in self.stores[1:] if s.alive and s.node not in self.leaving]
        store = self.one(found)
        if store is None or not any(process.node not in (*self.leaving, store.node) for process in self.living):
            return
        self.departures -= 1
        self.leaving.add(store.node)
        self._looks[store.node] = 0
        self._targets[store.node] = [
            other.node for other in self.stores if other.alive and other.node not in self.leaving
        ]
        for process in [process for process in self.living if process.node == store.node]:
            for frame in [frame for frame in process.frames if frame.task is not None]:
                process.finish(frame, [], False, False)
            process.turn()
            process.table.copies.hand_over()

    def departures_under_way(self) -> list[Callable[[], None]]:
        return [partial(self.look, node) for node in sorted(self.leaving)]

    def look(self, node: int) -> None:
        """What the processes do every moment; at the end the node goes."""
        self._looks[node] += 1
        waits = False
        for process in self.living:
            if process.node == node:
                waits |= self.hand_over(process)
            else:
                waits |= self.evacuate(process, node)
        self.in_time += not waits
        if not waits or self._looks[node] > MOST_LOOKS:
            self.leave(node)

    def hand_over(self, process: Process) -> bool:
        """`ObjectHandover.begin`: whether somebody elsewhere still borrows from this process."""
        lent = process.table.refs.lent_beyond(self.leaving)
        for borrower, oids in lent.items():
            entries = process.table.entries
            due = [
                oid
                for oid in oids
                if entries[oid].state != PENDING
                and self._asked_at.get((borrower, oid), -ASK_AGAIN) <= self.events - ASK_AGAIN
            ]
            if due:
                self._asked_at.update(((borrower, oid), self.events) for oid in due)
                contained = {oid: [ref.id for ref in entries[oid].contained or ()] for oid in due}
                process.send(borrower, m.KeepCopies(due, {oid: refs for oid, refs in contained.items() if refs}))
        return bool(lent)

    def evacuate(self, process: Process, node: int) -> bool:
        """`ObjectEvacuation`: whether an object of this process is on its way from there. Its targets may leave before
        it is."""
        targets = self._targets[node]
        for oid, entry in list(process.table.entries.items()):
            if owner_of(oid) == process.id and entry.state == STORED and entry.nodes == [node]:
                waiter, tries = self._copied.get((node, oid)), self._tries.get((node, oid), 0)
                if (waiter is None or waiter.count <= 0) and tries < min(len(targets), MOST_TRIES):
                    place = int.from_bytes(oid[-8:], "big") + tries
                    self._tries[node, oid] = tries + 1
                    self._copied[node, oid] = Waiter()
                    process.table.recovery.replicate(oid, targets[place % len(targets)], self._copied[node, oid])
        return any(
            waiter.count > 0 and owner_of(oid) == process.id for (of, oid), waiter in self._copied.items() if of == node
        )

    def leave(self, node: int) -> None:
        """The head declares it dead."""
        store = self.stores[node]
        gone = [process for process in self.living if process.node == node]
        others = [process for process in self.living if process.node != node]
        ours = {process.id for process in gone}
        self.kept_at[node] = sorted({node_of(borrower) for borrower, oid in self._asked_at if owner_of(oid) in ours})
        for process in others:
            for oid in process.table.copies.kept:
                if owner_of(oid) in ours:
                    entry = process.table.entries[oid]
                    if entry.state == STORED:
                        self.first_keepers.setdefault(oid, set()).add(process.id)
                    self.handed_over += 1
        self.lost_copies.update(store.pins)
        for process in gone:
            self.oracle.about_to_die(process)
        for process in gone:
            self.end_of(process)
        store.lose_power()
        self.leaving.discard(node)
        for process in self.living:
            self.channels.setdefault((raylet_of(node), process.id), deque()).append(NODE_DIED)
        for other in self.stores:
            if other.alive:
                self.channels.setdefault((raylet_of(node), raylet_of(other.node)), deque()).append(NODE_DIED)
        self.join()

    def join(self) -> None:
        """Another node comes for one that has left."""
        self.stores.append(self.make_store(len(self.stores)))
        self.stores[-1].known_dead.update(self.dead)  # the node table has them
        for _ in range(2):
            self.born(self.stores[-1].node)

    def check_kept(self, process: Process, oid: bytes, reason: str) -> None:
        """An object is said to be lost: no process may have kept it since its owner left."""
        assert oid not in process.table.copies.kept, f"{process.id.hex()} keeps {oid.hex()}, and has lost it: {reason}"
        keepers = [
            other
            for other in self.living
            if other.id in self.first_keepers.get(oid, ()) and oid in other.table.copies.kept
        ]
        assert not keepers, f"{process.id.hex()} cannot have {oid.hex()}, which {keepers[0].id.hex()} keeps: {reason}"


class KeepsCopies:
    """The part of a process that borrows from owners whose nodes leave: `BorrowedObjects`."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def on_keep(self, msg: m.KeepCopies) -> None:
        process, table = self.process, self.process.table
        for oid in msg.ids:
            if oid not in table.entries:
                continue
            inner = msg.contained.get(oid)
            if inner and table.entries[oid].contained is None:
                for ident in inner:
                    table.refs.ref_deserialized(ident, None)
                table.copies.hold(oid, [Ref(process, ident) for ident in inner])
            if table.wait_ready(oid, Waiter(callback=partial(self.ready, oid))):
                self.ready(oid)

    def ready(self, oid: bytes) -> None:
        process, table = self.process, self.process.table
        entry = table.entries.get(oid)
        if entry is None:
            return
        if entry.state == STORED:
            table.copies.keep(oid)
        elif entry.state == INLINE and entry.value.endswith(ERROR):
            table.copies.keep_error(oid)
        elif entry.state == INLINE:
            store = process.world.stores[process.node]
            there = oid in store.pins
            if not there:
                store.created(oid, process.id, refs_in(entry.value))
            table.copies.written(oid, None if there else 64, LARGE)
