"""Distributed reference counting: who besides the owner holds a ref. docs/explain/ownership.md tells why it is right.

Three rules, on channels that keep the order of one pair of processes and nothing else:

1. A borrower counts itself at the owner, in messages of its own, so its add never comes after its drop.
2. A ref that arrived inside a task's arguments is protected by the submitter until the reply. If it is still held then,
   the borrower counts itself before the reply leaves. (Where the submitter is the owner, the reply itself says so.)
3. Elsewhere a borrower counts itself at once. No drop, and no reply, leaves this process before everything that it
   registered earlier is acknowledged: whoever protected the ref so far lets go only after the owner knows us.

A ref that a task returns is *pledged* to the submitter before the reply leaves: the owner keeps it for that process
until it takes it over. If the giver dies in between, the owner asks the taker to say when no reply can come any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from hpcray.base.ids import PROC_BYTES
from hpcray.core.owner.entries import Entry
from hpcray.wire.messages import (
    BorrowAck,
    BorrowAdd,
    BorrowAsk,
    BorrowDrop,
    BorrowEnd,
    BorrowTake,
    Message,
)


class Borrowing:
    """Both ends of the protocol for all objects of one process. The table, its subclass, says when an object is free.

    `Entry.borrowers` maps who holds the object to a count: a process (8 bytes), or a pledge (giver and taker, 16).

    Attributes:
        unacked: our registrations that no owner has acknowledged yet.
    """

    def __init__(self, me: bytes, send: Callable[[bytes, Message], None]) -> None:
        self.me = me
        self.entries: dict[bytes, Entry] = {}
        self.unacked = 0
        self._send = send
        # Borrowed refs that the submitter of a running task protects for us; their owners do not know us.
        self._unregistered: set[bytes] = set()
        self._seq = 0
        self._acks: dict[int, bytes] = {}
        self._held: deque[tuple[int, bytes, Message]] = deque()
        self._lent: set[bytes] = set()
        self._takers: set[bytes] = set()
        self._asked_of: dict[bytes, list[bytes]] = {}

    def _maybe_free(self, oid: bytes, entry: Entry) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------ borrower

    def hold(self, dest: bytes, msg: Message) -> None:
        """Send `msg` once everything registered so far is acknowledged, in the order of these calls (rule 3)."""
        if self._acks:
            self._held.append((self._seq, dest, msg))
        else:
            self._send(dest, msg)

    def keep(self, protected: Iterable[bytes], submitter: bytes) -> list[bytes]:
        """At a task's end: count ourselves for those of its protected refs that we still hold (rule 2).

        Returns:
            Those that the submitter owns: the reply must name them instead.
        """
        named: list[bytes] = []
        other: list[bytes] = []
        for oid in protected:
            if oid in self._unregistered:
                self._unregistered.discard(oid)
                (named if oid[:PROC_BYTES] == submitter else other).append(oid)
        if other:
            self._register(other)
        return named

    def give(self, oid: bytes, to: bytes) -> None:
        """A reply to `to` will contain this ref: have it kept for `to`, while we hold it ourselves."""
        owner = oid[:PROC_BYTES]
        if owner == self.me:
            self.lend(oid, to)
        elif owner == to:
            # The reply takes the same way, but our own drop may be ahead of it.
            self._send(owner, BorrowAdd([oid], to, 0))
        else:
            self._send_add(owner, [oid], to)

    def take_back(self, oid: bytes, to: bytes) -> None:
        """The reply with this ref will not be sent after all."""
        owner = oid[:PROC_BYTES]
        if owner == self.me:
            self.on_borrow_drop(BorrowDrop([oid], to))
        else:
            self._send(owner, BorrowDrop([oid], self.me + to))

    def _take(self, oid: bytes, giver: bytes) -> None:
        """A reply of `giver` with this ref has come: what was pledged to us counts as ours from now on."""
        owner = oid[:PROC_BYTES]
        if owner == self.me:
            entry = self.entries.get(oid)
            if entry is not None:
                self._count(oid, entry, giver + self.me, -1)
        elif owner != giver:
            self._send(owner, BorrowTake([oid], giver))

    def _register(self, oids: Iterable[bytes]) -> None:
        by_owner: dict[bytes, list[bytes]] = {}
        for oid in oids:
            by_owner.setdefault(oid[:PROC_BYTES], []).append(oid)
        for owner, ids in by_owner.items():
            self._send_add(owner, ids, self.me)

    def _register_protected(self) -> None:
        """Rely on nobody's protection any more."""
        if self._unregistered:
            pending, self._unregistered = self._unregistered, set()
            self._register(sorted(pending))

    def _send_add(self, owner: bytes, ids: list[bytes], borrower: bytes) -> None:
        self._seq += 1
        self._acks[self._seq] = owner
        self.unacked += 1
        self._send(owner, BorrowAdd(ids, borrower, self._seq))

    def _drop(self, oid: bytes) -> None:
        # What we let go of may be what protected others: they are registered first.
        self._register_protected()
        self.hold(oid[:PROC_BYTES], BorrowDrop([oid], self.me))

    def on_borrow_ack(self, msg: BorrowAck) -> None:
        """The owner knows us now. (Number 0 only makes our death known to its sender.)"""
        if self._acks.pop(msg.seq, None) is not None:
            self.unacked -= 1
            self._send_held()

    def _send_held(self) -> None:
        held = self._held
        while held and not (self._acks and next(iter(self._acks)) <= held[0][0]):
            _, dest, msg = held.popleft()
            self._send(dest, msg)

    def on_borrow_ask(self, src: bytes, msg: BorrowAsk) -> None:
        """An owner wants to know when nothing can come any more from a giver that it knows to be dead."""
        self._asked_of.setdefault(msg.giver, []).append(src)
        self._send(msg.giver, BorrowAck(0))  # if we have not heard of its death, this makes us hear

    # ------------------------------------------------------------ owner

    def on_borrow_add(self, src: bytes, msg: BorrowAdd) -> None:
        """Somebody counts itself, or pledges our object to somebody else."""
        for oid in msg.ids:
            if msg.borrower == src:
                self.lend(oid, src)
            else:
                self._pledge(oid, src, msg.borrower)
        if msg.seq:
            self._send(src, BorrowAck(msg.seq))

    def lend(self, oid: bytes, borrower: bytes) -> None:
        """Count one borrow of `borrower` on an object of ours."""
        entry = self.entries.get(oid)
        if entry is not None and borrower != self.me:
            self._count(oid, entry, borrower, 1)

    def borrowed_by(self, worker: bytes, ids: list[bytes]) -> None:
        """A reply of `worker` named refs of ours that it keeps."""
        for oid in ids:
            self.lend(oid, worker)

    def on_borrow_take(self, src: bytes, msg: BorrowTake) -> None:
        """A process took over what was pledged to it."""
        for oid in msg.ids:
            entry = self.entries.get(oid)
            if entry is not None:
                self._count(oid, entry, src, 1)
                self._count(oid, entry, msg.giver + src, -1)

    def on_borrow_drop(self, msg: BorrowDrop) -> None:
        """A borrower let go."""
        for oid in msg.ids:
            entry = self.entries.get(oid)
            if entry is not None:
                self._count(oid, entry, msg.borrower, -1)
                self._maybe_free(oid, entry)

    def on_borrow_end(self, src: bytes, msg: BorrowEnd) -> None:
        """A taker has heard of the giver's death too: what it has not taken until now it never will."""
        self._end({msg.giver + src})

    def _pledge(self, oid: bytes, giver: bytes, taker: bytes) -> None:
        entry = self.entries.get(oid)
        if entry is not None:
            self._count(oid, entry, giver + taker, 1)
            if taker not in self._takers and taker != self.me:
                # The taker may be dead already, and has perhaps never spoken with us: this makes us hear of its death.
                self._takers.add(taker)
                self._send(taker, BorrowAck(0))

    def _count(self, oid: bytes, entry: Entry, borrower: bytes, by: int) -> None:
        borrowers = entry.borrowers
        if borrowers is None:
            borrowers = entry.borrowers = {}
        count = borrowers.get(borrower, 0) + by
        if count > 0:
            borrowers[borrower] = count
            self._lent.add(oid)
        else:
            borrowers.pop(borrower, None)
            if not borrowers:
                self._lent.discard(oid)

    def _end(self, gone: set[bytes]) -> None:
        """These borrowers and pledges hold nothing any more."""
        for oid in [o for o in self._lent if not gone.isdisjoint(self.entries[o].borrowers or ())]:
            entry = self.entries[oid]
            assert entry.borrowers is not None
            for key in gone:
                entry.borrowers.pop(key, None)
            if not entry.borrowers:
                self._lent.discard(oid)
            self._maybe_free(oid, entry)

    # ------------------------------------------------------------ deaths

    def _borrower_died(self, proc: bytes) -> None:
        """What a dead process borrowed, was pledged, or had still to acknowledge, is nobody's concern any more."""
        self._takers.discard(proc)
        gone = {proc}
        ask: set[bytes] = set()
        for oid in self._lent:
            for key in self.entries[oid].borrowers or ():
                if key[PROC_BYTES:] == proc or key == proc + self.me:
                    gone.add(key)
                elif len(key) > PROC_BYTES and key[:PROC_BYTES] == proc:
                    ask.add(key[PROC_BYTES:])
        self._end(gone)
        for taker in sorted(ask):
            self._send(taker, BorrowAsk(proc))
        for owner in self._asked_of.pop(proc, ()):
            self._send(owner, BorrowEnd(proc))
        # It may have been the submitter that protected what its task brought us.
        self._unregistered = {oid for oid in self._unregistered if oid[:PROC_BYTES] != proc}
        self._register_protected()
        for seq in [s for s, owner in self._acks.items() if owner == proc]:
            del self._acks[seq]
            self.unacked -= 1
        self._send_held()
