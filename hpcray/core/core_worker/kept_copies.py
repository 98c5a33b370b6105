"""Borrowed objects that our own node keeps for us, as the nodes of their owners leave the job.

Ownership cannot move: an id names its owner. But an owner that leaves in good order sends its borrowers KeepCopies.
Each of them has the store of its node keep the object for it, and then drops its borrow, so the owner need not stay.
The store keeps a copy, in memory or on disk, as long as one of these processes wants it; that reads it like any stored
object, and a ref that it passes on says where the copy is. See docs/explain/ownership.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcray.common.ids import node_of, raylet_of
from hpcray.core.core_worker.lineage import OWNER_DIED
from hpcray.core.core_worker.object_entry import INLINE, PENDING, STORED, ObjectEntry
from hpcray.core.core_worker.object_pins import ObjectPins
from hpcray.core.core_worker.reference_counter import ReferenceCounter
from hpcray.protocol.messages import Free, Message, ObjectGet, ObjectReady, Open, Release


class KeptCopies:
    """The copies of one process.

    Args:
        node: our own.
        entries: the table's objects.
        dead_nodes: nodes that died.
        has_side_records: see `ObjectTable`.
        refs, pins: the other parts of the table.
        send: queue a message.
        located: a borrowed object is in the stores of these nodes (`ObjectTable.set_locations`).
        lost: an object cannot be had any more (`ObjectRecovery.set_lost`).

    Attributes:
        kept: objects that our store keeps for us; their owners do not count us any more.
        handed_over: our own node leaves: borrowers of our objects keep copies, and drop their borrows.
    """

    def __init__(
        self,
        node: int,
        entries: dict[bytes, ObjectEntry],
        dead_nodes: set[int],
        has_side_records: set[bytes],
        refs: ReferenceCounter,
        pins: ObjectPins,
        send: Callable[[bytes, Message], None],
        located: Callable[[bytes, int, list[int]], None],
        lost: Callable[[bytes, ObjectEntry, str, str], None],
    ) -> None:
        self.kept: set[bytes] = set()
        self.handed_over = False
        self._asked: dict[bytes, int] = {}  # our store has not answered: their sizes
        self._kept_at: dict[int, list[int]] = {}  # by node that has left: those that keep objects of its processes
        self._sought: dict[bytes, set[bytes]] = {}  # the raylets that have not said whether they keep it
        self._node = node
        self._raylet = raylet_of(node)
        self._entries = entries
        self._dead_nodes = dead_nodes
        self._has_side_records = has_side_records
        self._refs = refs
        self._pins = pins
        self._send = send
        self._located = located
        self._lost = lost

    def hand_over(self) -> None:
        """Our own node leaves."""
        self.handed_over = True

    def keep(self, oid: bytes) -> None:
        """Have our store keep a borrowed object that is stored somewhere; `answered` follows."""
        entry = self._entries.get(oid)
        if entry is None or entry.state != STORED or oid in self.kept or oid in self._asked:
            return
        self._has_side_records.add(oid)
        self._asked[oid] = entry.size
        self._send(self._raylet, Open(oid, entry.size, list(entry.nodes or ()), pin_replica=True))

    def keep_error(self, oid: bytes) -> None:
        """A borrowed object is an error, which this process has and no store takes: its owner need not stay for it. Who
        is passed the ref later finds that its owner has gone."""
        entry = self._entries.get(oid)
        if entry is not None and entry.state == INLINE and oid not in self.kept:
            self._has_side_records.add(oid)
            self.kept.add(oid)
            self._refs.end_borrow(oid)

    def hold(self, oid: bytes, contained: list[Any]) -> None:
        """Hold the refs inside the value of a borrowed object, as its owner has done until now."""
        entry = self._entries.get(oid)
        if entry is not None and entry.contained is None:
            entry.contained = contained

    def written(self, oid: bytes, offset: int | None, size: int) -> None:
        """The small value of a borrowed object was written into our store, which is to keep it: others read it there.

        Args:
            offset: of its block; None: another process of this node has written it.
        """
        entry = self._entries.get(oid)
        if entry is None or entry.state != INLINE or entry.mapping is not None:
            if offset is not None:
                self._send(self._raylet, Release([oid]))
                self._send(self._raylet, Free([oid], []))
            return
        entry.state, entry.value, entry.size, entry.nodes = STORED, b"", size, [self._node]
        if offset is not None:
            self._pins.map_block(oid, entry, offset, size, self._node)
        self.keep(oid)

    def answered(self, oid: bytes, problem: str) -> None:
        """Our store keeps a copy for us, or cannot ("" when it does)."""
        size, entry = self._asked.pop(oid, None), self._entries.get(oid)
        if size is None or entry is None:
            return
        if problem:
            if entry.state == STORED and entry.mapping is None and not entry.local_waiters:
                entry.state, entry.nodes, entry.owner_asked = PENDING, None, False  # the owner knows where it is
            return
        self.kept.add(oid)
        if entry.state == PENDING:
            self._located(oid, size, [self._node])
        else:
            entry.nodes = [self._node]
        self._refs.end_borrow(oid)

    def entry_dropped(self, oid: bytes) -> None:
        """No ref to the object is left here."""
        self._sought.pop(oid, None)
        if oid in self.kept or oid in self._asked:
            self.kept.discard(oid)
            self._asked.pop(oid, None)
            self._send(self._raylet, Release([oid], unpin_replica=True))

    def node_left(self, node: int, kept_at: list[int]) -> None:
        """A node has left, and these keep objects that its processes owned."""
        if kept_at:
            self._kept_at[node] = kept_at

    def seek(self, oid: bytes) -> bool:
        """The owner of a borrowed object is gone: ask the nodes that may keep a copy; `found` follows. Returns False
        where none does."""
        nodes = [node for node in self._kept_at.get(node_of(oid), ()) if node not in self._dead_nodes]
        if nodes and oid not in self._sought:
            self._has_side_records.add(oid)
            self._sought[oid] = {raylet_of(node) for node in nodes}
            for node in nodes:
                self._send(raylet_of(node), ObjectGet(oid))
        return bool(nodes)

    def has(self, oid: bytes) -> bool:
        """Return True where nodes keep an object whose owner has left, or may do so."""
        return oid in self.kept or oid in self._asked or bool(self._kept_at.get(node_of(oid)))

    def process_died(self, proc: bytes) -> None:
        """An owner has left: keep what this process borrowed after that, of which refs say where copies are. Or a
        raylet is gone, which this process had asked: it cannot say any more what its node keeps."""
        if node_of(proc) in self._kept_at:
            for oid in [oid for oid, entry in self._entries.items() if oid[:8] == proc and entry.state == STORED]:
                self.keep(oid)
        for oid, asked in [(oid, asked) for oid, asked in self._sought.items() if proc in asked]:
            self._not_there(oid, asked, proc)

    def found(self, raylet: bytes, msg: ObjectReady) -> None:
        """A raylet says whether its node keeps an object. Where it was the last one, and none does, it is lost."""
        asked = self._sought.get(msg.id)
        if asked is not None and msg.size:
            del self._sought[msg.id]
            self._located(msg.id, msg.size, msg.nodes)
            self.keep(msg.id)  # no other process protects it
        elif asked is not None:
            self._not_there(msg.id, asked, raylet)

    def node_died(self, node: int) -> None:
        """A node is dead: it cannot say any more what it keeps."""
        for oid, asked in list(self._sought.items()):
            self._not_there(oid, asked, raylet_of(node))

    def _not_there(self, oid: bytes, asked: set[bytes], raylet: bytes) -> None:
        asked.discard(raylet)
        if not asked:
            del self._sought[oid]
            entry = self._entries.get(oid)
            if entry is not None and entry.state == PENDING:
                self._lost(oid, entry, "its owner has left, and no node keeps it", OWNER_DIED)

    def check_invariants(self) -> None:
        """Raise AssertionError where a copy is kept for no ref."""
        for oid in (*self.kept, *self._asked):
            assert oid in self._entries and oid in self._has_side_records, ("kept for no ref", oid.hex())
