"""The object table of one process: what it owns, what it borrows, who waits, and when an object may go.

Pure: the caller holds its lock, passes messages in, and hands `send` and `notify` at construction.

Reference counting (docs/explain/ownership.md). A process counts its own `ObjectRef`s per object (`Entry.local`); the
owner additionally counts borrowing processes. Three rules make it safe on unordered channels:

1. Counts commute: a borrower's drop may overtake the add that a third process makes on its behalf.
2. A ref that arrived inside a task's arguments is protected by the submitter until the reply; if it is still held then,
   the reply names it (`TaskReply.borrowed`) and the submitter registers the borrower *before* it lets its own go.
3. Everywhere else a borrower registers itself at once, and no drop (nor task reply) leaves this process before every
   registration it sent is acknowledged. So whoever protected the inner ref lets go only after the owner knows us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hpcray.base.ids import node_of, owner_of, raylet_of
from hpcray.wire.messages import (
    AddLocation,
    BorrowAck,
    BorrowAdd,
    BorrowDrop,
    Free,
    Message,
    ObjectGet,
    ObjectReady,
    Open,
    Opened,
    Release,
    StoreError,
)
from hpcray.wire.serialization import ERROR

PENDING, INLINE, STORED = 0, 1, 2


class Waiter:
    """Counts down as objects become available. At zero its `callback` runs (under the lock), or its thread wakes.

    eager: the first error is as good as all values (`get` raises it at once).
    """

    __slots__ = ("callback", "count", "eager", "lock", "turn")

    def __init__(self, count: int = 1, callback: Callable[[], object] | None = None, eager: bool = False) -> None:
        self.count = count
        self.callback = callback
        self.eager = eager
        self.lock: Any = None
        self.turn = False


class Mapping:
    """Where an object lies in our node's arena, pinned for this process. views: live buffers that readers hold."""

    __slots__ = ("offset", "size", "views")

    def __init__(self, offset: int, size: int) -> None:
        self.offset, self.size, self.views = offset, size, 0


class Entry:
    """One object as this process sees it.

    state: PENDING, INLINE (value is the blob, perhaps an error), STORED (size, nodes). task: what would make it again.
    """

    __slots__ = (
        "asked", "borrowers", "contained", "local", "local_waiters", "mapping", "nodes", "opening", "ready_waiters",
        "size", "state", "subscribers", "task", "value",
    )  # fmt: skip

    def __init__(self, task: Any = None) -> None:
        self.state = PENDING
        self.value = b""
        self.size = 0
        self.nodes: list[int] | None = None
        self.local = 0
        self.borrowers: dict[bytes, int] | None = None
        self.contained: list[Any] | None = None
        self.local_waiters: list[Waiter] | None = None
        self.ready_waiters: list[Waiter] | None = None
        self.subscribers: list[bytes] | None = None
        self.mapping: Mapping | None = None
        self.opening = False
        self.asked = False
        self.task = task

    @property
    def available(self) -> bool:
        """Whether the value can be read now, in this process."""
        return self.state == INLINE or self.mapping is not None


class ObjectTable:
    """See the module. `lost(id, reason, owner_died)` makes the error blob for an object that cannot be had any more."""

    def __init__(
        self,
        me: bytes,
        send: Callable[[bytes, Message], None],
        notify: Callable[[Waiter], None],
        lost: Callable[[bytes, str, bool], bytes],
    ) -> None:
        self.me = me
        self.entries: dict[bytes, Entry] = {}
        self.unacked = 0
        self._send = send
        self._notify = notify
        self._lost = lost
        self._raylet = raylet_of(node_of(me))
        self._lingering: dict[bytes, Mapping] = {}
        self._unregistered: set[bytes] = set()
        self._deferred: list[bytes] = []
        self._acks: dict[int, bytes] = {}
        self._seq = 0
        self._lent: set[bytes] = set()
        self.on_free: dict[bytes, Callable[[], None]] = {}

    # ------------------------------------------------------------ local references

    def create(self, oid: bytes, task: Any = None) -> Entry:
        """A new object that we own, still pending."""
        entry = self.entries[oid] = Entry(task)
        return entry

    def arrived(self, oid: bytes, protected: list[bytes] | None) -> None:
        """A ref to `oid` was deserialized: count it, and borrow the object if it is not ours.

        Args:
            protected: the running task's list of refs that its submitter protects (rule 2), or None (rule 3).
        """
        entry = self.entries.get(oid)
        if entry is None:
            entry = self.entries[oid] = Entry()
            entry.local = 1
            if oid[:8] == self.me:
                self._settle_lost(oid, entry, "its owner (this process) has already freed it", False)
            elif protected is None:
                self._register([oid])
            else:
                self._unregistered.add(oid)
        else:
            entry.local += 1
        if protected is not None and oid in self._unregistered:
            protected.append(oid)

    def adopt(self, oid: bytes) -> None:
        """A ref to `oid` came inside a value returned to us, with one borrow already counted for us at its owner."""
        entry = self.entries.get(oid)
        if entry is None:
            entry = self.entries[oid] = Entry()
            entry.local = 1
            if oid[:8] == self.me:
                self._settle_lost(oid, entry, "its owner (this process) has already freed it", False)
        elif oid[:8] != self.me:
            if oid in self._unregistered:
                self._unregistered.discard(oid)
            else:
                self._drop(oid)
            entry.local += 1
        else:
            entry.local += 1

    def release(self, oid: bytes) -> None:
        """One local ref died."""
        entry = self.entries.get(oid)
        if entry is None:
            return
        entry.local -= 1
        if entry.local <= 0:
            self._maybe_free(oid, entry)

    def view_died(self, oid: bytes) -> None:
        """The last buffer of one read of `oid` died."""
        mapping = self._lingering.get(oid)
        if mapping is not None:
            mapping.views -= 1
            if mapping.views == 0:
                del self._lingering[oid]
                self._send(self._raylet, Release([oid]))
            return
        entry = self.entries.get(oid)
        if entry is not None and entry.mapping is not None:
            entry.mapping.views -= 1

    # ------------------------------------------------------------ values

    def set_inline(self, oid: bytes, value: bytes, contained: list[Any] | None = None) -> bool:
        """The object is ready, its blob is here. Returns False when nobody refers to it any more."""
        entry = self.entries.get(oid)
        if entry is None or entry.state != PENDING:
            return False
        entry.state = INLINE
        entry.value = value
        entry.contained = contained
        self._ready(oid, entry)
        return True

    def set_stored(self, oid: bytes, size: int, node: int, contained: list[Any] | None = None) -> bool:
        """The object is ready, sealed in the store of `node`."""
        entry = self.entries.get(oid)
        if entry is None or entry.state != PENDING:
            self._send(self._raylet, Free([oid], [node]))
            return False
        entry.state = STORED
        entry.size = size
        entry.nodes = [node]
        entry.contained = contained
        self._ready(oid, entry)
        return True

    def want_ready(self, oid: bytes, waiter: Waiter) -> bool:
        """Whether `oid` is ready; if not, `waiter` counts down when it is."""
        entry = self.entries[oid]
        if entry.state != PENDING:
            return True
        if entry.ready_waiters is None:
            entry.ready_waiters = []
        entry.ready_waiters.append(waiter)
        self._ask(oid, entry)
        return False

    def want_local(self, oid: bytes, waiter: Waiter) -> bool:
        """Whether the value can be read here; if not, it is fetched and `waiter` counts down when it can."""
        entry = self.entries[oid]
        if entry.state == INLINE or entry.mapping is not None:
            return True
        if entry.local_waiters is None:
            entry.local_waiters = []
        entry.local_waiters.append(waiter)
        if entry.state == PENDING:
            self._ask(oid, entry)
        else:
            self._open(oid, entry)
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

    def created_here(self, oid: bytes, offset: int, size: int, node: int, contained: list[Any] | None) -> None:
        """We wrote and sealed `oid` in our node's store and keep the creator's pin."""
        entry = self.entries[oid]
        entry.mapping = Mapping(offset, size)
        entry.state = STORED
        entry.size = size
        entry.nodes = [node]
        entry.contained = contained
        self._ready(oid, entry)

    # ------------------------------------------------------------ messages

    def on_opened(self, msg: Opened) -> None:
        """Our raylet has the object and pinned it for us."""
        entry = self.entries.get(msg.id)
        if msg.pulled:
            owner = owner_of(msg.id)
            node = node_of(self.me)
            if owner == self.me:
                self.on_add_location(AddLocation(msg.id, node))
            else:
                self._send(owner, AddLocation(msg.id, node))
        if entry is None:
            if msg.id not in self._lingering:
                self._send(self._raylet, Release([msg.id]))
            return
        entry.opening = False
        # Views of an earlier life of this ref may still hold the same pin: one process has one pin per object.
        entry.mapping = self._lingering.pop(msg.id, None) or Mapping(msg.offset, msg.size)
        self._fire(entry, entry.local_waiters)
        entry.local_waiters = None

    def on_store_error(self, msg: StoreError) -> None:
        """Our raylet cannot give us the object."""
        entry = self.entries.get(msg.id)
        if entry is not None:
            entry.opening = False
            self._settle_lost(msg.id, entry, msg.reason, False)

    def on_object_get(self, src: bytes, oid: bytes) -> None:
        """A borrower asks for the value."""
        entry = self.entries.get(oid)
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
        if msg.status == 2:
            self._settle_lost(msg.id, entry, "its owner has already freed it", False)
        elif msg.size:
            entry.state = STORED
            entry.size = msg.size
            entry.nodes = msg.nodes
            self._ready(msg.id, entry)
        else:
            entry.state = INLINE
            entry.value = msg.value
            self._ready(msg.id, entry)

    def on_borrow_add(self, src: bytes, msg: BorrowAdd) -> None:
        """Somebody (or a third party for them) registers a borrower with us."""
        for oid in msg.ids:
            self.lend(oid, msg.borrower)
        if msg.seq:
            self._send(src, BorrowAck(msg.seq))

    def lend(self, oid: bytes, borrower: bytes) -> None:
        """Count one borrow of `borrower` on an object of ours."""
        entry = self.entries.get(oid)
        if entry is None or borrower == self.me:
            return
        if entry.borrowers is None:
            entry.borrowers = {}
        self._count(oid, entry, borrower, 1)

    def on_borrow_drop(self, msg: BorrowDrop) -> None:
        """A borrower let go."""
        for oid in msg.ids:
            entry = self.entries.get(oid)
            if entry is None:
                continue
            if entry.borrowers is None:
                entry.borrowers = {}
            self._count(oid, entry, msg.borrower, -1)
            self._maybe_free(oid, entry)

    def on_borrow_ack(self, msg: BorrowAck) -> None:
        """The owner knows us now."""
        if self._acks.pop(msg.seq, None) is None:
            return
        self.unacked -= 1
        self._run_deferred()

    def on_add_location(self, msg: AddLocation) -> None:
        """A node has a copy now."""
        entry = self.entries.get(msg.id)
        if entry is None:
            self._send(self._raylet, Free([msg.id], [msg.node]))
        elif entry.nodes is not None and msg.node not in entry.nodes:
            entry.nodes.append(msg.node)

    def process_died(self, proc: bytes, reason: str) -> None:
        """A process is gone: its borrows end, what it owned is lost to us."""
        for oid in [o for o in self._lent if proc in (self.entries[o].borrowers or ())]:
            entry = self.entries[oid]
            assert entry.borrowers is not None
            del entry.borrowers[proc]
            if not entry.borrowers:
                self._lent.discard(oid)
            self._maybe_free(oid, entry)
        if proc != self.me:
            for oid in [o for o, e in self.entries.items() if o[:8] == proc and e.state == PENDING]:
                self._settle_lost(oid, self.entries[oid], f"its owner is gone: {reason}", True)
        for seq in [s for s, owner in self._acks.items() if owner == proc]:
            del self._acks[seq]
            self.unacked -= 1
        self._run_deferred()

    # ------------------------------------------------------------ borrowing

    def keep(self, protected: list[bytes]) -> list[bytes]:
        """At a task's end: those of its protected refs that we still hold. The reply must name them (rule 2)."""
        kept = [oid for oid in dict.fromkeys(protected) if oid in self._unregistered and oid in self.entries]
        self._unregistered.difference_update(kept)
        return kept

    def borrowed_by(self, worker: bytes, ids: list[bytes]) -> None:
        """A reply of `worker` named refs that it keeps: register it with their owners, on its behalf."""
        for oid in ids:
            if oid[:8] == self.me:
                self.lend(oid, worker)
            elif oid[:8] != worker:
                self._send_add(oid[:8], [oid], worker)

    def give(self, oid: bytes, to: bytes) -> None:
        """A value that we send to `to` contains this ref: count a borrow for `to` now, while we hold the ref."""
        if oid[:8] == self.me:
            self.lend(oid, to)
        elif oid[:8] != to:
            self._send_add(oid[:8], [oid], to)

    def _register(self, oids: list[bytes]) -> None:
        for oid in oids:
            self._send_add(oid[:8], [oid], self.me)

    def _send_add(self, owner: bytes, ids: list[bytes], borrower: bytes) -> None:
        self._seq += 1
        self._acks[self._seq] = owner
        self.unacked += 1
        self._send(owner, BorrowAdd(ids, borrower, self._seq))

    def _drop(self, oid: bytes) -> None:
        if self._unregistered:
            pending, self._unregistered = self._unregistered, set()
            self._register([o for o in pending if o in self.entries])
        if self.unacked:
            self._deferred.append(oid)
        else:
            self._send(oid[:8], BorrowDrop([oid], self.me))

    def _run_deferred(self) -> None:
        if not self.unacked and self._deferred:
            deferred, self._deferred = self._deferred, []
            for oid in deferred:
                self._send(oid[:8], BorrowDrop([oid], self.me))

    def _count(self, oid: bytes, entry: Entry, borrower: bytes, by: int) -> None:
        borrowers = entry.borrowers
        assert borrowers is not None
        count = borrowers.get(borrower, 0) + by
        if count:
            borrowers[borrower] = count
            self._lent.add(oid)
        else:
            borrowers.pop(borrower, None)
            if not borrowers:
                self._lent.discard(oid)

    # ------------------------------------------------------------ inside

    def _maybe_free(self, oid: bytes, entry: Entry) -> None:
        if entry.local > 0:
            return
        if oid[:8] == self.me:
            if entry.state == PENDING:
                return  # its task still runs; `_ready` comes back here
            if entry.borrowers and any(count > 0 for count in entry.borrowers.values()):
                return
            if entry.state == STORED:
                self._send(self._raylet, Free([oid], entry.nodes or []))
        elif oid in self._unregistered:
            self._unregistered.discard(oid)
        else:
            self._drop(oid)
        del self.entries[oid]
        self._lent.discard(oid)
        if oid in self.on_free:
            self.on_free.pop(oid)()
        mapping = entry.mapping
        if mapping is not None:
            if mapping.views:
                self._lingering[oid] = mapping
            else:
                self._send(self._raylet, Release([oid]))

    def _ask(self, oid: bytes, entry: Entry) -> None:
        if not entry.asked and oid[:8] != self.me:
            entry.asked = True
            self._send(oid[:8], ObjectGet(oid))

    def _open(self, oid: bytes, entry: Entry) -> None:
        if not entry.opening:
            entry.opening = True
            self._send(self._raylet, Open(oid, entry.size, entry.nodes or []))

    def _ready(self, oid: bytes, entry: Entry) -> None:
        if entry.ready_waiters:
            self._fire(entry, entry.ready_waiters)
            entry.ready_waiters = None
        if entry.local_waiters:
            if entry.state == INLINE or entry.mapping is not None:
                self._fire(entry, entry.local_waiters)
                entry.local_waiters = None
            else:
                self._open(oid, entry)
        if entry.subscribers:
            for src in entry.subscribers:
                self._tell(src, oid, entry)
            entry.subscribers = None
        if entry.local <= 0:
            self._maybe_free(oid, entry)

    def _tell(self, dest: bytes, oid: bytes, entry: Entry) -> None:
        if entry.state == STORED:
            self._send(dest, ObjectReady(oid, 0, b"", entry.size, entry.nodes or []))
        else:
            self._send(dest, ObjectReady(oid, 0, entry.value, 0, []))

    def _settle_lost(self, oid: bytes, entry: Entry, reason: str, owner_died: bool) -> None:
        entry.state = INLINE
        entry.value = self._lost(oid, reason, owner_died)
        self._ready(oid, entry)

    def _fire(self, entry: Entry, waiters: list[Waiter] | None) -> None:
        if waiters:
            failed = entry.state == INLINE and entry.value[-1] == ERROR
            for waiter in waiters:
                waiter.count = 0 if failed and waiter.eager else waiter.count - 1
                if waiter.count == 0:
                    self._notify(waiter)

    def fail_all(self, reason: str) -> None:
        """Nothing can arrive any more: whatever is awaited ends in an error."""
        for oid, entry in list(self.entries.items()):
            if entry.state == PENDING or entry.local_waiters:
                self._settle_lost(oid, entry, reason, False)
