"""The object table of one process: the objects that it owns or borrows, their waiters, and when an object may go.

Pure: the caller holds its lock, passes messages in, and hands `send` and `notify` at construction. The table and its
parts share one dict of entries:

- `refs` (`ReferenceCounter`) counts this process's own refs per object (`ObjectEntry.local`) and, for objects of ours,
  the processes that borrow them. An object that is ready and has neither is freed, on every node.
- `packed` (`PackedTasks`) are the tasks that wait, without more than that.
- `pins` (`ObjectPins`) has what stores, ours and those of neighbors, hold for us.
- `recovery` (`ObjectRecovery`) makes lost objects again; its `lineage` is the tasks that can run again.
- `hints` (`ValueHints`) are values that came with refs and have not been awaited.
- `replicas` (`Replication`) are the copies that we hold on other nodes.
- `copies` (`KeptCopies`) are those of borrowed objects whose owners have left.

The public methods of the table and of its parts are the only way to change them; `core.record_replay` records them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from hpcray.common.ids import PUT_INDEX, RESIDENT_INDEX, TASK_BYTES, node_of, owner_of, raylet_of
from hpcray.core.core_worker.object_entry import (
    INLINE,
    LINEAGE_ONLY,
    NO_EXTRA,
    PENDING,
    STORED,
    ArenaMapping,
    Hint,
    ObjectEntry,
    ValueHints,
    Waiter,
)  # fmt: skip
from hpcray.core.core_worker.object_pins import ObjectPins
from hpcray.core.core_worker.object_recovery import LOST, KeptCopies, ObjectRecovery, Replication
from hpcray.core.core_worker.reference_counter import ReferenceCounter
from hpcray.core.core_worker.task import PackedTasks
from hpcray.protocol.messages import AddLocation, Free, Message, ObjectGet, ObjectReady, OnDisk, Opened, StoreError
from hpcray.protocol.messages.objects import ERROR

__all__ = [
    "INLINE",
    "LINEAGE_ONLY",
    "PENDING",
    "STORED",
    "ArenaMapping",
    "Hint",
    "ObjectEntry",
    "ObjectTable",
    "Waiter",
]

_LINEAGE_LIMIT = 1 << 30
_KNOWN_LOCATIONS = 4
"""Nodes that a ref names, of those that have its object: more than one may be dead by the time it is read."""
_FREED_HERE = "its owner (this process) has already freed it"


class ObjectTable:
    """See the module.

    Args:
        me: our proc id.
        send: queue a message.
        notify: a waiter is satisfied.
        lost: makes the error blob for an object that cannot be had any more, from (id, reason, word of `lineage`).
        lineage_limit: bytes of finished tasks that are kept; 0: nothing is ever made again.
        remake: submits a kept task once more; None: nothing is ever made again.
        entries: an empty dict to use; tests watch it.

    Attributes:
        entries: every object we own or borrow. Written here only; readers hold the lock.
        has_side_records: the objects that recovery, lineage or `when_freed` has to do with; all others pay for one look
            into it.
        on_free: calls to make when an object of ours is freed; see `when_freed`.
        dead_nodes: nodes that died; none comes back under its old number.
    """

    def __init__(
        self,
        me: bytes,
        send: Callable[[bytes, Message], None],
        notify: Callable[[Waiter], None],
        lost: Callable[[bytes, str, str], bytes],
        lineage_limit: int = _LINEAGE_LIMIT,
        remake: Callable[[Any], None] | None = None,
        entries: dict[bytes, ObjectEntry] | None = None,
    ) -> None:
        self.me = me
        self.entries: dict[bytes, ObjectEntry] = {} if entries is None else entries
        self.has_side_records: set[bytes] = set()
        self.on_free: dict[bytes, list[Callable[[], None]]] = {}
        self.dead_nodes: set[int] = set()
        self._node = node_of(me)
        self._raylet = raylet_of(self._node)
        self._send = send
        self._notify = notify
        self.hints = ValueHints(self.entries, self.has_side_records)
        self.refs = ReferenceCounter(me, self.entries, send, self._maybe_free, self._freed_already)
        self.packed = PackedTasks(self.entries)
        self.pins = ObjectPins(self._node, self.entries, send, self.dead_nodes)
        self.replicas = Replication(send, notify)
        self.recovery = ObjectRecovery(
            me, self.entries, self.has_side_records, self.dead_nodes, self.refs, self.pins, self.replicas, send, lost,
            remake, lineage_limit, self._ready, self._ask_owner, self.on_object_get, self._maybe_free,
        )  # fmt: skip
        self.copies = KeptCopies(
            self._node, self.entries, self.dead_nodes, self.has_side_records, self.refs, self.pins, send,
            self.set_locations, self.recovery.set_lost,
        )  # fmt: skip
        self.lineage = self.recovery.lineage

    # ------------------------------------------------------------ objects of ours

    def create(self, oid: bytes, task: Any = None) -> None:
        """Add a pending object that we own, with one local ref."""
        self.entries[oid] = ObjectEntry(task, 1)

    def put_inline(self, oid: bytes, value: bytes, contained: list[Any] | None = None) -> None:
        """Add an object that we own, with one local ref, whose blob is here."""
        entry = self.entries[oid] = ObjectEntry(None, 1, INLINE, value)
        if contained:
            entry.contained = contained

    def put_stored(self, oid: bytes, offset: int, size: int, contained: list[Any] | None) -> None:
        """An object of ours, pending or inline, was written and sealed in our store; we keep the creator's pin."""
        entry = self.entries[oid]
        self.pins.map_block(oid, entry, offset, size, self._node)
        self._stored_here(oid, entry, size, contained)

    def put_in_place(self, oid: bytes, size: int) -> None:
        """Add an object that we own, with one local ref, whose block was filled in place (`ObjectPins.begin_write`)."""
        entry = self.entries[oid] = ObjectEntry(None, 1)
        self.pins.end_write(oid, entry)
        self._stored_here(oid, entry, size, None)

    def abandon(self, oid: bytes) -> None:
        """Remove an object that we created and that will not come to be; no ref to it has left this thread."""
        self.entries.pop(oid, None)

    def record_creation_sites(self, call_site: Callable[[], str]) -> None:
        """Note in `ObjectEntry.site`, for each object created after this, the result of `call_site`."""

        def noting(method: Callable[..., None]) -> Callable[..., None]:
            def create(oid: bytes, *args: Any) -> None:
                method(oid, *args)
                self.entries[oid].site = call_site()

            return create

        makers: tuple[tuple[Any, str], ...] = (
            (self, "create"), (self.packed, "create"), (self, "put_inline"), (self, "put_in_place"),
        )  # fmt: skip
        for part, name in makers:
            setattr(part, name, noting(getattr(part, name)))

    def record_parents(self, running: Callable[[], bytes]) -> None:
        """Note in `PendingTask.parent`, for each task created after this, the result of `running`: the task or call
        that submits it."""
        create = self.create

        def create_child(oid: bytes, task: Any = None) -> None:
            if task is not None:
                task.parent = running()
            create(oid, task)

        self.create = create_child  # type: ignore[method-assign]

    # ------------------------------------------------------------ objects that go

    def bury(self, died: deque[Any]) -> None:
        """Uncount refs (ids) and views (1-tuples of ids) that died: empty `died`, also of those that die meanwhile."""
        entries, me, has_side_records = self.entries, self.me, self.has_side_records
        while died:
            oid = died.popleft()
            if type(oid) is not bytes:
                self.pins.view_died(oid[0])
                continue
            entry = entries.get(oid)
            if entry is None:
                continue
            local = entry.local = entry.local - 1
            if local > 0:
                continue
            if (
                entry.state == INLINE and oid not in has_side_records and oid.startswith(me)
                and (
                    (extra := entry.extra) is NO_EXTRA
                    or not (extra.size or extra.nodes or extra.borrowers or extra.left_at or extra.mapping)
                )
            ):  # fmt: skip
                del entries[oid]  # a small value of ours, which no other process knows of
            else:
                self._maybe_free(oid, entry)
            entry = extra = None  # type: ignore[assignment]  # refs in its value die here, not after the loop

    def discard(self, oid: bytes, error: bytes) -> None:
        """Free the object by hand, whatever refers to it: here it is this error from now on."""
        entry = self.entries.get(oid)
        if entry is None:
            return
        if oid[:8] == self.me:
            self.recovery.free_copies(oid, entry)
            self.packed.task_of(oid)  # a packed one, whose arguments are in this entry
        self.unmap(oid)
        self.replicas.object_gone(oid)
        self.recovery.forget_task(oid, entry)
        self.hints.forget(oid)
        entry.nodes = entry.left_at = entry.contained = None
        entry.state = INLINE
        entry.value = error
        if oid in self.on_free:
            self._freed(oid)
        self._ready(oid, entry)

    def unmap(self, oid: bytes) -> None:
        """Give up our pin, now or when the last view dies."""
        entry = self.entries.get(oid)
        if entry is not None:
            mapping, entry.mapping = entry.mapping, None
            self.pins.entry_gone(oid, mapping)

    def when_freed(self, oid: bytes, call: Callable[[], None]) -> None:
        """Make this call when an object of ours is freed, after earlier ones."""
        self.has_side_records.add(oid)
        self.on_free.setdefault(oid, []).append(call)

    def cancel_when_freed(self, oid: bytes) -> None:
        """Make no call when this object is freed."""
        self.on_free.pop(oid, None)

    def _freed(self, oid: bytes) -> None:
        for call in self.on_free.pop(oid, ()):
            call()

    def _maybe_free(self, oid: bytes, entry: ObjectEntry) -> None:
        if entry.local > 0 or self.entries.get(oid) is not entry:
            return  # not there any more: a signal handler, or a destructor, of the user's had refs buried meanwhile
        if oid[:8] == self.me:
            if entry.state == PENDING or entry.borrowers:
                return  # its task still runs: `_ready` comes back here; so do the ends of borrows
            with_records = oid in self.has_side_records
            if with_records and oid in self.lineage.remembered:
                self._outlive(oid, entry)
                return
            self.recovery.free_copies(oid, entry)
        else:
            with_records = oid in self.has_side_records
            if not with_records or oid not in self.copies.kept:
                self.refs.end_borrow(oid)
        del self.entries[oid]
        if entry.mapping is not None or self.pins.refused or self.pins.files:
            self.pins.entry_gone(oid, entry.mapping)
        if with_records:
            self.replicas.object_gone(oid)
            self.recovery.entry_dropped(oid, entry)
            self.copies.entry_dropped(oid)
            self.hints.forget(oid)
            if oid in self.on_free:
                self._freed(oid)

    def _outlive(self, oid: bytes, entry: ObjectEntry) -> None:
        """Keep an object of ours that has no holder, for the sake of lineage: what nothing can make again, as it is; of
        others, what can make them."""
        if oid[TASK_BYTES:] in (PUT_INDEX, RESIDENT_INDEX) or isinstance(entry.task, str):
            self.unmap(oid)
        else:
            self.recovery.free_copies(oid, entry)
            self.replicas.object_gone(oid)
            self.recovery.hibernate(oid, entry)
        if oid in self.on_free:
            self._freed(oid)

    def _freed_already(self, oid: bytes, entry: ObjectEntry) -> None:
        self.recovery.set_lost(oid, entry, _FREED_HERE, LOST)

    # ------------------------------------------------------------ values and locations

    def set_inline(self, oid: bytes, value: bytes, contained: list[Any] | None = None) -> bool:
        """The object is ready, its blob is here. Returns False when it has no holder any more."""
        entry = self.entries.get(oid)
        if entry is None or entry.state != PENDING:
            return False
        entry.state = INLINE
        entry.value = value
        if oid in self.has_side_records:
            self.recovery.set_inline_again(oid, entry, contained)
        elif contained is None:
            entry.task = None  # it will not have to be made again
            if entry.extra is NO_EXTRA:
                if entry.local_waiters or entry.local <= 0:
                    self._ready(oid, entry)
                return True
            entry.contained = None
        else:
            entry.contained = contained
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
        extra = entry.own_extra()
        extra.size = size
        extra.nodes = [node]
        if contained is not None:
            extra.contained = self.recovery.all_contained(entry, contained)
        if node in self.dead_nodes:
            self.recovery.lose(oid, entry, f"node {node} died when it had just been made there")
        else:
            self._ready(oid, entry)
        return True

    def set_locations(self, oid: bytes, size: int, nodes: list[int]) -> None:
        """A borrowed object is ready, and these nodes have copies."""
        entry = self.entries[oid]
        if entry.state == PENDING and oid[:8] != self.me:
            entry.state = STORED
            extra = entry.own_extra()
            extra.size = size
            extra.nodes = nodes
            self.hints.forget(oid)
            self._ready(oid, entry)

    def hint_locations(
        self, oid: bytes, size: int, nodes: Iterable[int], value: bytes = b"", mortal: bool = False
    ) -> None:
        """A ref came with the locations its sender knew, or the value. They count unless the owner was sent an
        ObjectGet.

        Args:
            oid, size, nodes, value: see `known_locations`.
            mortal: the owner may die before the job ends; see `ValueHints`.
        """
        entry = self.entries[oid]
        if value:
            if entry.state == PENDING and oid[:8] != self.me and not entry.owner_asked:
                if mortal:
                    self.hints.add(oid, value)
                    return
                entry.state = INLINE
                entry.value = value
                self._ready(oid, entry)
            return
        living = [node for node in nodes if node not in self.dead_nodes]
        if living and not entry.owner_asked:
            self.set_locations(oid, size, living)

    def known_locations(self, oid: bytes, room: int = 0, mortal: bool = False) -> Hint | None:
        """The hint for a ref that leaves this process. No lock is needed.

        Args:
            room: bytes that the ref may take for the value itself.
            mortal: whether this process may die before the job ends; owners of other objects may.

        Returns:
            The arguments of `hint_locations`: the object's size in bytes, and nodes that have it, or its small value;
            None when nothing is known, or the value is an error, whose readers the owner wants to know of.
        """
        entry = self.entries.get(oid)
        if entry is None:
            return None
        if entry.state == STORED and entry.nodes:
            return entry.size, tuple(entry.nodes[:_KNOWN_LOCATIONS])
        mine = oid[:8] == self.me
        value = entry.value if entry.state == INLINE else b"" if mine else self.hints.unread.get(oid, b"")
        if 0 < len(value) <= room and value[-1] != ERROR:
            return (0, (), value) if mine and not mortal else (0, (), value, True)
        return None

    def may_be_left_at(self, oid: bytes, node: int) -> None:
        """The worker that was to make `oid` is dead; perhaps it had written it into its node's store."""
        entry = self.entries.get(oid)
        if entry is not None:
            entry.left_at = [*(entry.left_at or ()), node]

    def _stored_here(self, oid: bytes, entry: ObjectEntry, size: int, contained: list[Any] | None) -> None:
        entry.state = STORED
        extra = entry.own_extra()
        extra.size = size
        extra.nodes = [self._node]
        extra.contained = contained
        self._ready(oid, entry)

    # ------------------------------------------------------------ waiters

    def wait_ready(self, oid: bytes, waiter: Waiter) -> bool:
        """Returns True when `oid` is ready; if not, `waiter` counts down when it is."""
        entry = self.entries[oid]
        if entry.state == LINEAGE_ONLY:
            self.recovery.revive(oid, entry)
        if entry.state != PENDING or self.hints.adopt(oid, entry):
            return True
        if entry.ready_waiters is None:
            entry.ready_waiters = []
        entry.ready_waiters.append(waiter)
        self._ask_owner(oid, entry)
        return False

    def wait_local(self, oid: bytes, waiter: Waiter, priority: int = 0) -> bool:
        """Returns True when the value can be read here; if not, it is fetched and `waiter` counts down when it can.

        Args:
            priority: urgency, see `protocol.messages.Open`; the same for all objects of a waiter.
        """
        entry = self.entries[oid]
        if entry.state == LINEAGE_ONLY:
            self.recovery.revive(oid, entry)
        if entry.state == INLINE or entry.extra.mapping is not None:
            return True
        if entry.state == PENDING:
            if not oid.startswith(self.me) and not entry.owner_asked:
                if self.hints.adopt(oid, entry):
                    return True
                self._ask_owner(oid, entry)
        elif self.pins.open(oid, entry, priority):
            return True
        if priority:
            waiter.priority = priority
        if entry.local_waiters is None:
            entry.local_waiters = [waiter]
        else:
            entry.local_waiters.append(waiter)
        return False

    def remove_waiter(self, oids: Iterable[bytes], waiter: Waiter) -> None:
        """Take a waiter that gave up (a timeout) out of the objects' lists."""
        for oid in oids:
            entry = self.entries.get(oid)
            if entry is None:
                continue
            for waiters in (entry.ready_waiters, entry.local_waiters):
                if waiters and waiter in waiters:
                    waiters.remove(waiter)

    def fail_all(self, reason: str) -> None:
        """End everything that is awaited in an error: nothing can arrive any more."""
        self.replicas.fail_all(reason)
        for oid, entry in list(self.entries.items()):
            if entry.state == PENDING or entry.local_waiters:
                self.packed.task_of(oid)  # a packed one, whose arguments are in this entry
                self.recovery.set_lost(oid, entry, reason, LOST)

    def _ask_owner(self, oid: bytes, entry: ObjectEntry) -> None:
        if not entry.owner_asked and oid[:8] != self.me:
            entry.owner_asked = True
            self._send(oid[:8], ObjectGet(oid))

    def _ready(self, oid: bytes, entry: ObjectEntry) -> None:
        extra = entry.extra
        if extra.ready_waiters:
            self._fire(entry, extra.ready_waiters)
            entry.ready_waiters = None
        waiters = entry.local_waiters
        if waiters and (
            entry.state == INLINE or entry.mapping is not None or self.pins.open(oid, entry, _urgency(entry))
        ):
            self._fire(entry, waiters)
            entry.local_waiters = None
        if extra.subscribers:
            for src in extra.subscribers:
                self._send_ready(src, oid, entry)
            entry.subscribers = None
        if entry.local <= 0:
            self._maybe_free(oid, entry)

    def _fire(self, entry: ObjectEntry, waiters: list[Waiter] | None, failed: bool = False) -> None:
        """Count waiters down. failed: their object is an error."""
        if waiters:
            failed = failed or (entry.state == INLINE and entry.value[-1] == ERROR)
            for waiter in waiters:
                if failed and waiter.eager:
                    waiter.count, waiter.eager = 0, False
                else:
                    waiter.count -= 1
                if waiter.count == 0:
                    self._notify(waiter)

    def _fire_local(self, entry: ObjectEntry) -> None:
        self._fire(entry, entry.local_waiters)
        entry.local_waiters = None

    # ------------------------------------------------------------ answers of stores

    def on_opened(self, msg: Opened) -> None:
        """A store, ours or a neighbor's, has the object and pinned it for us."""
        node = self.pins.requested_node(msg.id)
        if msg.pulled:
            owner = owner_of(msg.id)
            if owner == self.me:
                self.recovery.on_add_location(AddLocation(msg.id, node))
            else:
                self._send(owner, AddLocation(msg.id, node))
        entry = self.pins.opened(msg)
        if entry is not None:
            if self.recovery.is_unsure(msg.id):
                self.recovery.found_copy(msg.id, entry, node)
            if entry.mapping is not None and entry.mapping.node != node:
                self.pins.give_back(msg.id, node)
            self._fire_local(entry)

    def on_disk(self, msg: OnDisk) -> None:
        """Our raylet has no room for the object, but lets us read its file."""
        entry = self.pins.lent(msg)
        if entry is not None:
            self._fire_local(entry)

    def on_store_error(self, msg: StoreError) -> None:
        """A store cannot give us the object; where it only lacks room ("full") the object is not lost."""
        searched, node = self.pins.answered(msg.id)
        entry = self.entries.get(msg.id)
        if entry is None:
            return
        unread = entry.mapping is None or entry.mapping.node in self.dead_nodes
        if msg.kind == "lost" and entry.state == STORED and unread:
            if node == self._node:
                self.recovery.not_found(msg.id, entry, searched, msg.reason)
            else:
                self.recovery.not_found_at_neighbor(msg.id, entry, node, msg.reason)
        elif msg.kind == "full" and entry.state == STORED and node != self._node:
            if (entry.local_waiters or self.recovery.is_unsure(msg.id)) and entry.mapping is None:
                self.pins.open_here(msg.id, entry, _urgency(entry))  # there may be room in ours
        elif msg.kind == "full" and entry.state == STORED:
            self.pins.refused[msg.id] = msg.reason
            waiters, entry.local_waiters = entry.local_waiters, None
            self._fire(entry, waiters, failed=True)
        elif msg.kind in ("lost", "full"):  # of an earlier life of the object
            if entry.state == PENDING and entry.local_waiters:
                self._ask_owner(msg.id, entry)
        elif entry.state != INLINE and entry.mapping is None:
            self.recovery.set_lost(msg.id, entry, msg.reason, LOST)

    def on_replica(self, oid: bytes, node: int, problem: str) -> None:
        """A store has a copy that stays there for us, or cannot have one ("" when it has)."""
        if oid[:8] == self.me:
            self.recovery.on_replica(oid, node, problem)
        elif node == self._node:
            self.copies.answered(oid, problem)

    # ------------------------------------------------------------ owners and borrowers

    def on_object_get(self, src: bytes, oid: bytes) -> None:
        """A borrower asks for the value."""
        entry = self.entries.get(oid)
        if entry is not None and entry.state == LINEAGE_ONLY:
            self.recovery.revive(oid, entry)
        if entry is None:
            if not self.copies.handed_over:  # else a borrower keeps it, perhaps: that is sought when we are gone
                self._send(src, ObjectReady(oid, 2, b"", 0, []))
        elif entry.state == PENDING:
            if entry.subscribers is None:
                entry.subscribers = []
            entry.subscribers.append(src)
        else:
            self._send_ready(src, oid, entry)

    def on_object_ready(self, msg: ObjectReady) -> None:
        """The owner answers our ObjectGet."""
        entry = self.entries.get(msg.id)
        if entry is None or entry.state != PENDING:
            return
        if msg.remake_count:
            self.has_side_records.add(msg.id)
            self.recovery.remake_count[msg.id] = msg.remake_count
        if msg.status == 2:
            self.recovery.set_lost(msg.id, entry, "its owner has already freed it", LOST)
        elif msg.size:
            self.set_locations(msg.id, msg.size, msg.nodes)
        else:
            entry.state = INLINE
            entry.value = msg.value
            self._ready(msg.id, entry)

    def process_died(self, proc: bytes, reason: str) -> None:
        """A process is gone: its borrows end, the objects it owned are lost to us."""
        self.hints.owner_died(proc)
        self.refs.process_died(proc)
        self.recovery.process_died(proc, reason, self.copies.seek, self.copies.has)
        self.copies.process_died(proc)

    def _send_ready(self, dest: bytes, oid: bytes, entry: ObjectEntry) -> None:
        if entry.state == STORED:
            remake_count = self.recovery.remake_count.get(oid, 0)
            self._send(dest, ObjectReady(oid, 0, b"", entry.size, entry.nodes or [], remake_count))
        else:
            self._send(dest, ObjectReady(oid, 0, entry.value, 0, []))

    def check_invariants(self) -> None:
        """Raise AssertionError where entries contradict each other, or the indexes of the parts.

        Costs time in the size of the table; simulations call it after every event.
        """
        for oid, entry in self.entries.items():
            self._check_entry(oid, entry)
        for oid in self.on_free:
            assert oid in self.has_side_records, ("a call for an object without side records", oid.hex())
        self.hints.check_invariants(self.me)
        self.refs.check_invariants()
        self.pins.check_invariants()
        self.recovery.check_invariants()
        self.replicas.check_invariants()
        self.copies.check_invariants()

    def _check_entry(self, oid: bytes, entry: ObjectEntry) -> None:
        facts = (oid.hex(), entry.state, entry.local, entry.borrowers, entry.nodes, entry.task)
        if oid[:8] == self.me:
            held = entry.state == PENDING or entry.local > 0 or entry.borrowers
            assert held or oid in self.lineage.remembered, ("kept without a holder", *facts)
        else:
            assert entry.local > 0, ("borrowed without a local ref", *facts)
            assert entry.state != LINEAGE_ONLY, ("a borrower keeps an object for lineage", *facts)
        if entry.state == LINEAGE_ONLY:
            assert oid in self.lineage.remembered and not entry.value and entry.mapping is None, facts
        if entry.state == STORED and not entry.nodes and oid[:8] == self.me:  # a borrower asks the owner when it reads
            assert self.recovery.is_unsure(oid), ("stored at no known location", *facts)
        if entry.state != PENDING:
            assert not entry.ready_waiters and not entry.subscribers, ("ready, and awaited", *facts)
        elif entry.ready_waiters and oid[:8] != self.me:
            assert entry.owner_asked, ("awaited without an ObjectGet", *facts)
        if entry.local_waiters and entry.state != PENDING:
            assert oid in self.pins.opening, ("awaited without an Open", *facts)


def _urgency(entry: ObjectEntry) -> int:
    return min((waiter.priority for waiter in entry.local_waiters or ()), default=0)
