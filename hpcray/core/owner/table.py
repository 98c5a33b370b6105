"""The object table of one process: what it owns, what it borrows, who waits, and when an object may go.

Pure: the caller holds its lock, passes messages in, and hands `send` and `notify` at construction.

A process counts its own `ObjectRef`s per object (`Entry.local`); the owner additionally counts borrowing processes
(`Borrowing`, docs/explain/ownership.md). An object that is ready and has neither is freed, on every node (`Counting`).
What is lost is made again (`Losing`); what a neighbouring node has is read there (`Near`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hpcray.base.ids import owner_of
from hpcray.core.owner.counting import Counting
from hpcray.core.owner.entries import FREED, INLINE, PENDING, STORED, Entry, Mapping, Waiter
from hpcray.core.owner.lineage import LOST, OWNER_DIED
from hpcray.wire.messages import AddLocation, Free, Message, ObjectGet, ObjectReady, OnDisk, Opened, StoreError
from hpcray.wire.serialization import ERROR

__all__ = ["FREED", "INLINE", "PENDING", "STORED", "Entry", "Mapping", "ObjectTable", "Waiter"]

_LINEAGE_LIMIT = 1 << 30
_PLACES = 4
"""Nodes that a ref names, of those that have its object: more than one may be dead by the time it is read."""


class ObjectTable(Counting):
    """See the module.

    Args:
        me: our proc id.
        send: queue a message.
        notify: a waiter is satisfied.
        lost: makes the error blob for an object that cannot be had any more, from (id, reason, why in a word: see
            `lineage`).
        lineage_limit: bytes of finished tasks that are kept; 0: nothing is ever made again.

    Attributes:
        entries: every object we own or borrow. Written here only; who reads it holds the lock.
    """

    def __init__(
        self,
        me: bytes,
        send: Callable[[bytes, Message], None],
        notify: Callable[[Waiter], None],
        lost: Callable[[bytes, str, str], bytes],
        lineage_limit: int = _LINEAGE_LIMIT,
    ) -> None:
        super().__init__(me, send, notify, lost, lineage_limit)
        self._notify = notify

    # ------------------------------------------------------------ what users and stores want gone

    def discard(self, oid: bytes, error: bytes) -> None:
        """The user wants the object gone, whoever refers to it: here it is this error from now on."""
        entry = self.entries.get(oid)
        if entry is None:
            return
        if oid[:8] == self.me and (entry.nodes or entry.left_at):
            self._send(self._raylet, Free([oid], [*(entry.nodes or ()), *(entry.left_at or ())]))
        self.unmap(oid)
        self.replicas.gone(oid)
        self.forget_task(oid, entry)
        entry.nodes = entry.left_at = entry.contained = None
        entry.state = INLINE
        entry.value = error
        self._ready(oid, entry)

    def unmap(self, oid: bytes) -> None:
        """Give up our pin, now or when the last view dies."""
        entry = self.entries.get(oid)
        if entry is not None:
            mapping, entry.mapping = entry.mapping, None
            self.pins.entry_gone(oid, mapping)

    # ------------------------------------------------------------ values

    def set_inline(self, oid: bytes, value: bytes, contained: list[Any] | None = None) -> bool:
        """The object is ready, its blob is here. Returns False when nobody refers to it any more."""
        entry = self.entries.get(oid)
        if entry is None or entry.state != PENDING:
            return False
        entry.state = INLINE
        entry.value = value
        if oid in self.special:
            self.made_inline(oid, entry, contained)
        else:
            entry.contained = contained
            if contained is None:
                entry.task = None  # nobody will have to make it again
        if entry.local_waiters or entry.ready_waiters or entry.subscribers or entry.local <= 0:
            self._ready(oid, entry)
        return True

    def set_stored(self, oid: bytes, size: int, node: int, contained: list[Any] | None = None) -> bool:
        """The object is ready, sealed in the store of `node`."""
        entry = self.entries.get(oid)
        if entry is None or entry.state != PENDING:
            if entry is None or not entry.nodes or node not in entry.nodes:
                self._send(self._raylet, Free([oid], [node]))
            return False
        entry.state = STORED
        entry.size = size
        entry.nodes = [node]
        entry.contained = contained if entry.contained is None else self.all_held(entry, contained)
        if node in self.dead_nodes:
            self.lose(oid, entry, f"node {node} died when it had just been made there")
        else:
            self._ready(oid, entry)
        return True

    def created_here(self, oid: bytes, offset: int, size: int, node: int, contained: list[Any] | None) -> None:
        """We wrote and sealed `oid` in our node's store and keep the creator's pin."""
        entry = self.entries[oid]
        self.pins.created(oid, entry, offset, size, node)
        entry.state = STORED
        entry.size = size
        entry.nodes = [node]
        entry.contained = contained
        self._ready(oid, entry)

    def located(self, oid: bytes, size: int, nodes: list[int]) -> None:
        """Somebody who knows says that a borrowed object is ready, and where its copies are."""
        entry = self.entries[oid]
        if entry.state == PENDING and oid[:8] != self.me:
            entry.state = STORED
            entry.size = size
            entry.nodes = nodes
            self._ready(oid, entry)

    def told(self, oid: bytes, size: int, nodes: Iterable[int]) -> None:
        """A ref came with the places its sender knew. Where the owner was asked already, its answer counts."""
        entry = self.entries[oid]
        living = [node for node in nodes if node not in self.dead_nodes]
        if living and not entry.asked:
            self.located(oid, size, living)

    def places(self, oid: bytes) -> tuple[int, tuple[int, ...]] | None:
        """What a ref that leaves this process says: the object's size, and nodes that have it. None: it is in no store,
        or nothing is known. No lock is needed."""
        entry = self.entries.get(oid)
        if entry is None or entry.state != STORED or not entry.nodes:
            return None
        return entry.size, tuple(entry.nodes[:_PLACES])

    def left_behind(self, oid: bytes, node: int) -> None:
        """The worker that was to make `oid` is dead; perhaps it had written it into its node's store."""
        entry = self.entries.get(oid)
        if entry is not None:
            entry.left_at = [*(entry.left_at or ()), node]

    def want_ready(self, oid: bytes, waiter: Waiter) -> bool:
        """Whether `oid` is ready; if not, `waiter` counts down when it is."""
        entry = self.entries[oid]
        if entry.state == FREED:
            self.revive(oid, entry)
        if entry.state != PENDING:
            return True
        if entry.ready_waiters is None:
            entry.ready_waiters = []
        entry.ready_waiters.append(waiter)
        self._ask(oid, entry)
        return False

    def want_local(self, oid: bytes, waiter: Waiter, priority: int = 0) -> bool:
        """Whether the value can be read here; if not, it is fetched and `waiter` counts down when it can.

        Args:
            priority: how urgent that is, see `wire.messages.Open`; the same for all objects of a waiter.
        """
        entry = self.entries[oid]
        if entry.state == FREED:
            self.revive(oid, entry)
        if entry.state == INLINE or entry.mapping is not None:
            return True
        if entry.state == PENDING:
            if not entry.asked and not oid.startswith(self.me):
                self._ask(oid, entry)
        elif self.pins.open(oid, entry, priority):
            return True
        if priority:
            waiter.priority = priority
        if entry.local_waiters is None:
            entry.local_waiters = [waiter]
        else:
            entry.local_waiters.append(waiter)
        return False

    def forget(self, oids: Iterable[bytes], waiter: Waiter) -> None:
        """The waiter gave up (a timeout): take it out of the objects' lists."""
        for oid in oids:
            entry = self.entries.get(oid)
            if entry is None:
                continue
            for waiters in (entry.ready_waiters, entry.local_waiters):
                if waiters and waiter in waiters:
                    waiters.remove(waiter)

    def fail_all(self, reason: str) -> None:
        """Nothing can arrive any more: whatever is awaited ends in an error."""
        self.replicas.fail(reason)
        for oid, entry in list(self.entries.items()):
            if entry.state == PENDING or entry.local_waiters:
                self.settle_lost(oid, entry, reason, LOST)

    # ------------------------------------------------------------ messages

    def on_opened(self, msg: Opened) -> None:
        """A store has the object, ours or a neighbour's, and pinned it for us."""
        node = self.pins.asked(msg.id)
        if msg.pulled:
            owner = owner_of(msg.id)
            if owner == self.me:
                self.on_add_location(AddLocation(msg.id, node))
            else:
                self._send(owner, AddLocation(msg.id, node))
        entry = self.entries.get(msg.id)
        if self.pins.opened(msg, entry):
            assert entry is not None
            if msg.id in self._unsure:
                self._came(msg.id, entry, node)
            if entry.mapping is not None and entry.mapping.node != node:
                self.pins.give_back(msg.id, node)
            self._fire(entry, entry.local_waiters)
            entry.local_waiters = None

    def on_disk(self, msg: OnDisk) -> None:
        """Our raylet has no room for the object, but lets us read its file."""
        entry = self.entries.get(msg.id)
        if self.pins.lent(msg, entry):
            assert entry is not None
            self._fire(entry, entry.local_waiters)
            entry.local_waiters = None

    def begin_file(self, oid: bytes) -> OnDisk:
        """A thread begins to read what is in `pins.files`."""
        return self.pins.begin_file(oid)

    def end_file(self, oid: bytes) -> None:
        """It has read it, or given up."""
        self.pins.end_file(oid)

    def file_failed(self, oid: bytes, error: str) -> None:
        """It cannot be read: it is looked for elsewhere, and who wants it waits for that (`want_local`)."""
        self.pins.file_failed(oid, self.entries.get(oid), error)

    def on_store_error(self, msg: StoreError) -> None:
        """A store cannot give us the object; where it only lacks room ("full") the object is not lost."""
        asked, node = self.pins.answered(msg.id)
        entry = self.entries.get(msg.id)
        if entry is None:
            return
        unread = entry.mapping is None or entry.mapping.node in self.dead_nodes
        if msg.kind == "lost" and entry.state == STORED and unread:
            if node == self._node:
                self._not_there(msg.id, entry, asked, msg.reason)
            else:
                self._not_near(msg.id, entry, node, msg.reason)
        elif msg.kind == "full" and entry.state == STORED and node != self._node:
            if (entry.local_waiters or msg.id in self._unsure) and entry.mapping is None:
                self.pins.ask(msg.id, entry, _urgency(entry))  # there may be room in ours
        elif msg.kind == "full" and entry.state == STORED:
            self.pins.refused[msg.id] = msg.reason
            waiters, entry.local_waiters = entry.local_waiters, None
            self._fire(entry, waiters, failed=True)
        elif msg.kind in ("lost", "full"):  # of an earlier life of the object
            if entry.state == PENDING and entry.local_waiters:
                self._ask(msg.id, entry)
        elif entry.state != INLINE and entry.mapping is None:
            self.settle_lost(msg.id, entry, msg.reason, LOST)

    def on_object_get(self, src: bytes, oid: bytes) -> None:
        """A borrower asks for the value."""
        entry = self.entries.get(oid)
        if entry is not None and entry.state == FREED:
            self.revive(oid, entry)
        if entry is None:
            self._send(src, ObjectReady(oid, 2, b"", 0, []))
        elif entry.state == PENDING:
            if entry.subscribers is None:
                entry.subscribers = []
            entry.subscribers.append(src)
        else:
            self._tell(src, oid, entry)

    def on_object_ready(self, msg: ObjectReady) -> None:
        """The owner answers our ObjectGet."""
        entry = self.entries.get(msg.id)
        if entry is None or entry.state != PENDING:
            return
        if msg.made:
            self.special.add(msg.id)
            self._made[msg.id] = msg.made
        if msg.status == 2:
            self.settle_lost(msg.id, entry, "its owner has already freed it", LOST)
        elif msg.size:
            self.located(msg.id, msg.size, msg.nodes)
        else:
            entry.state = INLINE
            entry.value = msg.value
            self._ready(msg.id, entry)

    def on_add_location(self, msg: AddLocation) -> None:
        """A node has a copy now."""
        entry = self.entries.get(msg.id)
        if msg.node in self.dead_nodes:
            return
        if (
            entry is None
            or entry.state == FREED
            or (entry.state == INLINE and entry.local <= 0 and not entry.borrowers)
        ):
            self._send(self._raylet, Free([msg.id], [msg.node]))  # nobody holds it
        elif entry.state == PENDING:  # of an earlier life of the object
            entry.left_at = [*(entry.left_at or ()), msg.node]
        else:
            self._also_at(entry, msg.node)

    def process_died(self, proc: bytes, reason: str) -> None:
        """A process is gone: its borrows end, what it owned is lost to us."""
        self._borrower_died(proc)
        if proc != self.me:
            for oid in [o for o, e in self.entries.items() if o[:8] == proc and e.state == PENDING]:
                self.settle_lost(oid, self.entries[oid], f"its owner is gone: {reason}", OWNER_DIED)

    # ------------------------------------------------------------ inside

    def _ask(self, oid: bytes, entry: Entry) -> None:
        if not entry.asked and oid[:8] != self.me:
            entry.asked = True
            self._send(oid[:8], ObjectGet(oid))

    def _ready(self, oid: bytes, entry: Entry) -> None:
        if entry.ready_waiters:
            self._fire(entry, entry.ready_waiters)
            entry.ready_waiters = None
        waiters = entry.local_waiters
        if waiters and (entry.state == INLINE or entry.mapping is not None or self._open_for(oid, entry)):
            self._fire(entry, waiters)
            entry.local_waiters = None
        if entry.subscribers:
            for src in entry.subscribers:
                self._tell(src, oid, entry)
            entry.subscribers = None
        if entry.local <= 0:
            self._maybe_free(oid, entry)

    def _open_for(self, oid: bytes, entry: Entry) -> bool:
        return self.pins.open(oid, entry, _urgency(entry))

    def _tell(self, dest: bytes, oid: bytes, entry: Entry) -> None:
        if entry.state == STORED:
            self._send(dest, ObjectReady(oid, 0, b"", entry.size, entry.nodes or [], self._made.get(oid, 0)))
        else:
            self._send(dest, ObjectReady(oid, 0, entry.value, 0, []))

    def _fire(self, entry: Entry, waiters: list[Waiter] | None, failed: bool = False) -> None:
        if waiters:
            failed = failed or (entry.state == INLINE and entry.value[-1] == ERROR)
            for waiter in waiters:
                if failed and waiter.eager:
                    waiter.count, waiter.eager = 0, False
                else:
                    waiter.count -= 1
                if waiter.count == 0:
                    self._notify(waiter)


def _urgency(entry: Entry) -> int:
    return min((waiter.priority for waiter in entry.local_waiters or ()), default=0)
