"""Distributed reference counting: local refs, and the processes besides the owner that hold one.

docs/explain/ownership.md argues why the protocol is right. Three rules, on channels that keep the order of one pair of
processes and nothing else:

1. A borrower counts itself at the owner, in messages of its own, so its add never comes after its drop.
2. A ref that arrived inside a task's arguments is protected by the submitter until the reply. If it is still held then,
   the borrower counts itself before the reply leaves. (Where the submitter is the owner, the reply itself names it.)
3. Elsewhere a borrower counts itself at once. No drop, and no reply, leaves this process before all its earlier
   registrations are acknowledged: the process that protected the ref so far lets go only after the owner knows us.

A ref that a task returns is *pledged* to the submitter before the reply leaves: the owner keeps the object for that
process (the taker) until it takes the ref over. If the giver dies in between, the owner asks the taker to report when
no reply can come any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable

from hpcray.common.ids import PROC_BYTES, node_of
from hpcray.core.core_worker.object_entry import ObjectEntry
from hpcray.protocol.messages import (
    BorrowAck,
    BorrowAdd,
    BorrowDrop,
    BorrowsSettled,
    BorrowTake,
    Message,
    SettleBorrows,
)


class ReferenceCounter:
    """Local counts, and both ends of the borrowing protocol, for all objects of one process.

    `ObjectEntry.borrowers` maps each holder to a count: a process (8 bytes), or a pledge (giver and taker, 16 bytes).

    Args:
        me: our proc id.
        entries: the table's objects.
        send: queue a message.
        maybe_free: called when an object may have lost its last holder.
        freed_already: called for a new entry of an object of ours that no longer exists.

    Attributes:
        unacked: our registrations that no owner has acknowledged yet: sequence number to owner.
    """

    def __init__(
        self,
        me: bytes,
        entries: dict[bytes, ObjectEntry],
        send: Callable[[bytes, Message], None],
        maybe_free: Callable[[bytes, ObjectEntry], None],
        freed_already: Callable[[bytes, ObjectEntry], None],
    ) -> None:
        self.unacked: dict[int, bytes] = {}
        self._me = me
        self._entries = entries
        self._send = send
        self._maybe_free = maybe_free
        self._freed_already = freed_already
        # Borrowed refs that the submitter of a running task protects for us; their owners do not know us.
        self._unregistered: set[bytes] = set()
        self._seq = 0
        self._held: deque[tuple[int, bytes, Message]] = deque()  # messages that wait for acknowledgements
        self._lent: dict[
            bytes, None
        ] = {}  # objects of ours with borrowers; ordered, so that a replay repeats the order
        self._takers: set[bytes] = set()  # processes whose death is sure to be reported to us
        self._end_reports: dict[bytes, list[bytes]] = {}  # giver to the owners that want a BorrowEnd when it dies

    # ------------------------------------------------------------ local refs

    def ref_deserialized(self, oid: bytes, protected: list[bytes] | None) -> None:
        """Count a ref that arrived in this process, and borrow the object if it is not ours.

        Args:
            protected: the running task's list of refs that its submitter protects (rule 2), or None (rule 3).
        """
        entry = self._entries.get(oid)
        if entry is None:
            entry = self._entries[oid] = ObjectEntry(None, 1)
            if oid[:8] == self._me:
                self._freed_already(oid, entry)
            elif protected is None:
                self.register([oid])
            else:
                self._unregistered.add(oid)
        else:
            entry.local += 1
        if protected is not None and oid in self._unregistered:
            protected.append(oid)

    def adopt_returned_ref(self, oid: bytes, giver: bytes) -> None:
        """Count a ref inside a value that `giver` returned to us; it pledged the object to us (`pledge_to`)."""
        entry = self._entries.get(oid)
        mine = oid[:8] == self._me
        self._take(oid, giver)
        if entry is None:
            entry = self._entries[oid] = ObjectEntry(None, 1)
            if mine:
                self._freed_already(oid, entry)
            return
        entry.local += 1
        if oid in self._unregistered:
            self._unregistered.discard(oid)
        elif not mine:
            self._drop(oid)  # it was counted once already

    def remove_local_ref(self, oid: bytes) -> None:
        """Uncount one local ref."""
        entry = self._entries.get(oid)
        if entry is None:
            return
        entry.local -= 1
        if entry.local <= 0:
            self._maybe_free(oid, entry)

    # ------------------------------------------------------------ borrower

    def send_after_acks(self, dest: bytes, msg: Message) -> None:
        """Send `msg` once everything registered so far is acknowledged, in the order of these calls (rule 3)."""
        if self.unacked:
            self._held.append((self._seq, dest, msg))
        else:
            self._send(dest, msg)

    def end_protection(self, protected: Iterable[bytes], submitter: bytes) -> list[bytes]:
        """At a task's end, count ourselves for those of its protected refs that we still hold (rule 2).

        Returns:
            The refs that the submitter owns: the reply must name them instead.
        """
        named: list[bytes] = []
        other: list[bytes] = []
        for oid in protected:
            if oid in self._unregistered:
                self._unregistered.discard(oid)
                (named if oid[:PROC_BYTES] == submitter else other).append(oid)
        if other:
            self.register(other)
        return named

    def pledge_to(self, oid: bytes, to: bytes) -> None:
        """Have the object kept for `to`, while we hold it ourselves: a reply to `to` will contain this ref."""
        owner = oid[:PROC_BYTES]
        if owner == self._me:
            self.add_borrower(oid, to)
        elif owner == to:
            # The reply takes the same way, but our own drop may be ahead of it.
            self._send(owner, BorrowAdd([oid], to, 0))
        else:
            self._send_add(owner, [oid], to)

    def withdraw_pledge(self, oid: bytes, to: bytes) -> None:
        """Undo `pledge_to`: the reply with this ref will not be sent."""
        owner = oid[:PROC_BYTES]
        if owner == self._me:
            self.on_borrow_drop(BorrowDrop([oid], to))
        else:
            self._send(owner, BorrowDrop([oid], self._me + to))

    def register(self, oids: Iterable[bytes]) -> None:
        """Count ourselves at the owners of these borrowed objects."""
        by_owner: dict[bytes, list[bytes]] = {}
        for oid in oids:
            by_owner.setdefault(oid[:PROC_BYTES], []).append(oid)
        for owner, ids in by_owner.items():
            self._send_add(owner, ids, self._me)

    def end_borrow(self, oid: bytes) -> None:
        """Let a borrowed object go: our last local ref died."""
        if oid in self._unregistered:
            self._unregistered.discard(oid)
        else:
            self._drop(oid)

    def on_borrow_ack(self, msg: BorrowAck) -> None:
        """Record that an owner knows us. (Number 0 acknowledges nothing: it makes our death known to its sender.)"""
        if self.unacked.pop(msg.seq, None) is not None:
            self._send_held()

    def on_borrow_ask(self, src: bytes, msg: SettleBorrows) -> None:
        """Answer `src` with BorrowEnd once we know that `msg.giver` is dead: nothing can come from it any more."""
        self._end_reports.setdefault(msg.giver, []).append(src)
        self._send(msg.giver, BorrowAck(0))  # if its death was not reported to us yet, this message causes the report

    def _take(self, oid: bytes, giver: bytes) -> None:
        """Turn what `giver` pledged to us into a borrow of ours: its reply has come."""
        owner = oid[:PROC_BYTES]
        if owner == self._me:
            entry = self._entries.get(oid)
            if entry is not None:
                self._count(oid, entry, giver + self._me, -1)
        elif owner != giver:
            self._send(owner, BorrowTake([oid], giver))

    def _register_protected(self) -> None:
        """Stop relying on the protection of submitters."""
        if self._unregistered:
            pending, self._unregistered = self._unregistered, set()
            self.register(sorted(pending))

    def _send_add(self, owner: bytes, ids: list[bytes], borrower: bytes) -> None:
        self._seq += 1
        self.unacked[self._seq] = owner
        self._send(owner, BorrowAdd(ids, borrower, self._seq))

    def _drop(self, oid: bytes) -> None:
        # The dropped ref may be what protected others: they are registered first.
        self._register_protected()
        self.send_after_acks(oid[:PROC_BYTES], BorrowDrop([oid], self._me))

    def _send_held(self) -> None:
        held = self._held
        while held and not (self.unacked and next(iter(self.unacked)) <= held[0][0]):
            _, dest, msg = held.popleft()
            self._send(dest, msg)

    # ------------------------------------------------------------ owner

    def on_borrow_add(self, src: bytes, msg: BorrowAdd) -> None:
        """Count `src` as a borrower of our objects, or its pledges of them to `msg.borrower`."""
        for oid in msg.ids:
            if msg.borrower == src:
                self.add_borrower(oid, src)
            else:
                self._pledge(oid, src, msg.borrower)
        if msg.seq:
            self._send(src, BorrowAck(msg.seq))

    def add_borrower(self, oid: bytes, borrower: bytes) -> None:
        """Count one borrow of `borrower` on an object of ours."""
        entry = self._entries.get(oid)
        if entry is not None and borrower != self._me:
            self._count(oid, entry, borrower, 1)

    def add_borrows_in_reply(self, worker: bytes, ids: list[bytes]) -> None:
        """Count the refs of ours that a reply of `worker` names as kept."""
        for oid in ids:
            self.add_borrower(oid, worker)

    def on_borrow_take(self, src: bytes, msg: BorrowTake) -> None:
        """Replace pledges to `src` by borrows of `src`."""
        for oid in msg.ids:
            entry = self._entries.get(oid)
            if entry is not None:
                self._count(oid, entry, src, 1)
                self._count(oid, entry, msg.giver + src, -1)

    def on_borrow_drop(self, msg: BorrowDrop) -> None:
        """Uncount one borrow of each object."""
        for oid in msg.ids:
            entry = self._entries.get(oid)
            if entry is not None:
                self._count(oid, entry, msg.borrower, -1)
                self._maybe_free(oid, entry)

    def on_borrow_end(self, src: bytes, msg: BorrowsSettled) -> None:
        """End all pledges of a dead giver to `src`: what `src` has not taken until now it never will."""
        self._end({msg.giver + src})

    def _pledge(self, oid: bytes, giver: bytes, taker: bytes) -> None:
        entry = self._entries.get(oid)
        if entry is not None:
            self._count(oid, entry, giver + taker, 1)
            if taker not in self._takers and taker != self._me:
                # The taker may be dead already, and may never have sent us anything: this causes a report of its death.
                self._takers.add(taker)
                self._send(taker, BorrowAck(0))

    def _count(self, oid: bytes, entry: ObjectEntry, borrower: bytes, by: int) -> None:
        borrowers = entry.borrowers
        if borrowers is None:
            borrowers = entry.borrowers = {}
        count = borrowers.get(borrower, 0) + by
        if count > 0:
            borrowers[borrower] = count
            self._lent[oid] = None
        else:
            borrowers.pop(borrower, None)
            if not borrowers:
                self._lent.pop(oid, None)

    def _end(self, gone: set[bytes]) -> None:
        for oid in [o for o in self._lent if not gone.isdisjoint(self._entries[o].borrowers or ())]:
            entry = self._entries[oid]
            assert entry.borrowers is not None
            for key in gone:
                entry.borrowers.pop(key, None)
            if not entry.borrowers:
                self._lent.pop(oid, None)
            self._maybe_free(oid, entry)

    def lent_beyond(self, nodes: Container[int]) -> dict[bytes, list[bytes]]:
        """Objects of ours that are held for processes of other nodes than these, by process."""
        found: dict[bytes, list[bytes]] = {}
        for oid in self._lent:
            for key in self._entries[oid].borrowers or ():
                proc = key[-PROC_BYTES:]  # of a pledge: the taker
                if node_of(proc) not in nodes:
                    found.setdefault(proc, []).append(oid)
        return found

    def borrowers_on(self, node: int) -> set[bytes]:
        """Processes of `node` that hold, or pledged, or were pledged, an object of ours."""
        keys = [key for oid in self._lent for key in self._entries[oid].borrowers or ()]
        return {proc for key in keys for proc in (key[:8], key[8:]) if proc and node_of(proc) == node}

    def process_died(self, proc: bytes) -> None:
        """End what a dead process borrowed, what was pledged to it, and what it had still to acknowledge."""
        self._takers.discard(proc)
        gone = {proc}
        ask: set[bytes] = set()
        for oid in self._lent:
            for key in self._entries[oid].borrowers or ():
                if key[PROC_BYTES:] == proc or key == proc + self._me:
                    gone.add(key)
                elif len(key) > PROC_BYTES and key[:PROC_BYTES] == proc:
                    ask.add(key[PROC_BYTES:])
        self._end(gone)
        for taker in sorted(ask):
            self._send(taker, SettleBorrows(proc))
        for owner in self._end_reports.pop(proc, ()):
            self._send(owner, BorrowsSettled(proc))
        # It may have been the submitter that protected what its task brought us.
        self._unregistered = {oid for oid in self._unregistered if oid[:PROC_BYTES] != proc}
        self._register_protected()
        for seq in [s for s, owner in self.unacked.items() if owner == proc]:
            del self.unacked[seq]
        self._send_held()

    def check_invariants(self) -> None:
        """Raise AssertionError where counts, and the indexes over them, contradict each other."""
        lent = {oid for oid, entry in self._entries.items() if entry.borrowers}
        assert self._lent.keys() == lent, ("lent objects", self._lent, lent)
        for oid in lent:
            borrowers = self._entries[oid].borrowers or {}
            assert oid[:PROC_BYTES] == self._me, ("a borrower counts borrowers", oid.hex())
            assert all(count > 0 for count in borrowers.values()), (oid.hex(), borrowers)
            assert {len(key) for key in borrowers} <= {PROC_BYTES, 2 * PROC_BYTES}, (oid.hex(), borrowers)
        for oid in self._unregistered:
            assert oid in self._entries, ("a protected ref without an entry", oid.hex())
            assert oid[:PROC_BYTES] != self._me, ("an owner borrows its own object", oid.hex())
        assert list(self.unacked) == sorted(self.unacked) and max(self.unacked, default=0) <= self._seq, self.unacked
        first = min(self.unacked, default=self._seq + 1)
        assert not self._held or first <= self._held[0][0], ("a message waits for nothing", first, self._held[0])
