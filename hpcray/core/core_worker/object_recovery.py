"""Objects that no node can give us: located elsewhere, made again, or turned into an error.

A process that cannot get an object from any node it knows of reports that to the owner (`ObjectLost`). If the owner
knows no other location, it runs the task again that made the object, once for all processes that wait, and the answer
is the new location. The arguments of that task come back in the same way, however far that goes. Pure; `remake` submits
the task.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from hpcray.common.ids import TASK_BYTES, node_of, owner_of, raylet_of
from hpcray.core.core_worker.object_entry import (
    INLINE,
    LINEAGE_ONLY,
    PENDING,
    STORED,
    ObjectEntry,
    Waiter,
    ident_of,
    resident_of,
)
from hpcray.core.core_worker.object_pins import ObjectPins
from hpcray.core.core_worker.reference_counter import ReferenceCounter
from hpcray.core.core_worker.task import TaskTemplate
from hpcray.protocol.messages import AddLocation, Free, Message, ObjectGet, ObjectLost, ObjectReady, Open, Release

# ------------------------------------------------------------ lineage
# Lineage: the finished tasks that can run again, because something that they returned may be lost. Pure.
#
# A value inside a message cannot be lost, so only a task that left something in a node's store is kept, with the ids of
# the refs that its arguments mention. Such an argument is *remembered*: when the last ref to it dies its owner drops
# the copies but keeps the entry (`LINEAGE_ONLY`), and with it the task that would make it again. What was put, or made
# by a task that must not run twice, stays as it is.


BASE_COST = 400
"""Approximate bytes that a kept task takes besides its arguments."""

LOST, OWNER_DIED = "LOST", "OWNER_DIED"
PUT, RETRIES_DISABLED, MAX_ATTEMPTS_EXCEEDED = "PUT", "RETRIES_DISABLED", "MAX_ATTEMPTS_EXCEEDED"
LINEAGE_EVICTED, LINEAGE_DISABLED, TASK_CANCELLED = "LINEAGE_EVICTED", "LINEAGE_DISABLED", "TASK_CANCELLED"
DEPENDENCY = "DEPENDENCY_FAILED"


class Reconstructible(Protocol):
    """The part of a task that lineage reads. retries: runs left, -1 for any number; attempt: runs beyond the first."""

    id: bytes
    retries: int
    attempt: int
    cancelled: bool


class LineageRecord:
    """One task that can run again. Written by `Lineage` only.

    args: ids of the refs that its arguments mention, ours or borrowed. cost: bytes. live: its returns that still have a
    holder. running: a run is under way. expected: the returns that this run has to make, None for all.
    """

    __slots__ = ("args", "cost", "expected", "live", "running", "task")

    def __init__(self, task: Any, args: Sequence[bytes], cost: int) -> None:
        self.task, self.args, self.cost = task, args, cost
        self.live: set[bytes] = set()
        self.running = False
        self.expected: frozenset[bytes] | None = None


class Lineage:
    """The finished tasks of one process, the oldest first.

    Args:
        me: our proc id. limit: bytes; beyond it the oldest tasks are forgotten.
        unneeded: called for an argument that no kept task mentions any more.
        evicted: called for a return whose task was forgotten for want of room.

    Attributes:
        remembered: the number of kept tasks that mention an object of ours.
        used: bytes of all kept tasks.
    """

    def __init__(
        self, me: bytes, limit: int, unneeded: Callable[[bytes], None], evicted: Callable[[bytes], None]
    ) -> None:
        self.limit = limit
        self.kept: dict[bytes, LineageRecord] = {}
        self.remembered: Counter[bytes] = Counter()
        self.used = 0
        self._me = me
        self._unneeded = unneeded
        self._evicted = evicted
        self._dropping: list[LineageRecord] = []
        self._busy = False

    def why_not(self, task: Reconstructible) -> str:
        """The word why a task cannot run again; "" when it can. The only place that reads the state of a task."""
        if task.cancelled:
            return TASK_CANCELLED
        if self.limit and task.retries == 0:
            return MAX_ATTEMPTS_EXCEEDED if task.attempt else RETRIES_DISABLED
        return "" if self.limit else LINEAGE_DISABLED

    def keep(self, task: Reconstructible, returns: Iterable[bytes], args: Sequence[bytes], size: int) -> None:
        """Remember the task that makes these returns, which may be lost one day.

        Args:
            args: ids of the refs that its arguments mention. size: bytes of its arguments.
        """
        kept = self.kept.get(task.id)
        if kept is None:
            kept = self.kept[task.id] = LineageRecord(task, args, BASE_COST + size + 16 * len(args))
            self.used += kept.cost
            for oid in args:
                if oid[:8] == self._me:
                    self.remembered[oid] += 1
        kept.live.update(returns)

    def forbid(self, task: bytes) -> None:
        """Have a finished task not run again: it was cancelled, and nothing of it is to be waited for."""
        kept = self.kept.get(task)
        if kept is not None:
            kept.task.cancelled = True

    def trim(self) -> None:
        """Forget the oldest tasks, until the rest is within the limit."""
        while self.used > self.limit:
            kept = next((kept for kept in self.kept.values() if not kept.running), None)
            if kept is None:
                return
            for oid in kept.live:
                self._evicted(oid)
            self._drop(kept)

    def return_gone(self, oid: bytes, task: bytes) -> None:
        """Forget a return of a task that has no holder any more."""
        kept = self.kept.get(task)
        if kept is not None:
            kept.live.discard(oid)
            if not kept.live and not kept.running:
                self._drop(kept)

    # ------------------------------------------------------------ runs

    def run_begun(self, task: bytes) -> None:
        """Mark a kept task as running."""
        kept = self.kept.get(task)
        if kept is not None:
            kept.running = True

    def expect(self, task: bytes, returns: Iterable[bytes]) -> None:
        """Set the returns that the coming run of a kept task has to make."""
        self.kept[task].expected = frozenset(returns)

    def run_made(self, task: bytes, returns: Iterable[bytes]) -> None:
        """Record returns that a run has made; if they are lost later, this run is not to blame."""
        kept = self.kept.get(task)
        if kept is not None and kept.expected is not None:
            kept.expected = kept.expected.difference(returns)

    def take_expected(self, task: bytes) -> frozenset[bytes] | None:
        """The returns that the run that is over has not made, None where all were expected; forgotten from here on."""
        kept = self.kept[task]
        expected, kept.expected = kept.expected, None
        return expected

    def run_ended(self, task: bytes) -> None:
        """Mark a kept task as not running."""
        kept = self.kept.get(task)
        if kept is not None:
            kept.running = False
            if not kept.live:
                self._drop(kept)

    def _drop(self, kept: LineageRecord) -> None:
        """Forget a task, and the objects that were remembered for it alone: a chain of any length, so no recursion."""
        if self.kept.pop(kept.task.id, None) is None:
            return
        self.used -= kept.cost
        self._dropping.append(kept)
        if self._busy:
            return
        self._busy = True
        try:
            while self._dropping:
                for oid in self._dropping.pop().args:
                    if oid[:8] == self._me:
                        self._forget(oid)
        finally:
            self._busy = False

    def _forget(self, oid: bytes) -> None:
        self.remembered[oid] -= 1
        if self.remembered[oid] <= 0:
            del self.remembered[oid]
            self._unneeded(oid)

    def check_invariants(self, entries: Mapping[bytes, ObjectEntry]) -> None:
        """Raise AssertionError where byte and mention counts are not the sums over the kept tasks."""
        kept = self.kept.values()
        assert self.used == sum(one.cost for one in kept), (self.used, [one.cost for one in kept])
        mentioned = Counter(oid for one in kept for oid in one.args if oid[:8] == self._me)
        assert self.remembered == mentioned, (self.remembered, mentioned)
        assert not self._dropping and not self._busy, "a task is half forgotten"
        for oid in mentioned:
            assert oid in entries, ("a remembered object has no entry", oid.hex())
        for one in kept:
            assert one.live or one.running, ("a task is kept for nothing", one.task.id.hex())
            for oid in one.live:
                assert entries[oid].task is one.task, ("a return has another task", oid.hex(), entries[oid].task)


class Replication:
    """Copies that an owner holds on other nodes, so that the loss of one node does not lose the object.

    The other node's store pins such a copy for the owner (`Open.pin_replica`): it is never evicted, but may be spilled
    to disk. It goes with the object, or with the owner.

    Attributes:
        held: for each object the nodes that pin a copy for us, or will.
        failed: the reason why a node could not take a copy; kept until its waiter has read it (`take_failure`).
    """

    def __init__(self, send: Callable[[bytes, Message], None], notify: Callable[[Waiter], None]) -> None:
        self.held: dict[bytes, set[int]] = {}
        self.failed: dict[tuple[bytes, int], str] = {}
        self._send = send
        self._notify = notify
        self._waiters: dict[tuple[bytes, int], list[Waiter]] = {}

    def pin_copy(self, oid: bytes, entry: ObjectEntry, node: int, waiter: Waiter | None = None) -> None:
        """Have `node` pin a copy; it pulls one if it has none. `waiter` counts down when that is decided."""
        nodes = self.held.setdefault(oid, set())
        if waiter is not None:
            self._waiters.setdefault((oid, node), []).append(waiter)
        if node not in nodes:
            nodes.add(node)
            self._send(raylet_of(node), Open(oid, entry.size, list(entry.nodes or ()), pin_replica=True))

    def refuse(self, oid: bytes, node: int, problem: str, waiter: Waiter | None) -> None:
        """Let a wait end at once: no copy can be there."""
        if waiter is not None:
            self.failed[oid, node] = problem
            waiter.count -= 1
            self._notify(waiter)

    def answered(self, oid: bytes, node: int, problem: str) -> None:
        """Record a node's answer: it has the copy, or cannot have it and `problem` is the reason."""
        if problem:
            self._discard(oid, node)
            if (oid, node) in self._waiters:
                self.failed[oid, node] = problem
        for waiter in self._waiters.pop((oid, node), ()):
            waiter.count -= 1
            self._notify(waiter)

    def take_failure(self, oid: bytes, node: int) -> str:
        """End the wait for this answer.

        Returns:
            The reason why the node has no copy; "" when it has one, or may still get one.
        """
        self._waiters.pop((oid, node), None)
        return self.failed.pop((oid, node), "")

    def object_gone(self, oid: bytes) -> None:
        """Release all copies: the object is freed, or no copy of it is left."""
        for node in sorted(self.held.pop(oid, ())):
            self._send(raylet_of(node), Release([oid], unpin_replica=True))
            self.answered(oid, node, "the object is gone")

    def fail_all(self, reason: str) -> None:
        """End all waits: no answer can come any more."""
        for oid, node in list(self._waiters):
            self.answered(oid, node, reason)

    def node_died(self, node: int) -> None:
        """Forget the copies of a dead node."""
        for oid in [oid for oid, nodes in self.held.items() if node in nodes]:
            self.answered(oid, node, f"node {node} died")

    def check_invariants(self) -> None:
        """Raise AssertionError where a wait has no copy under way."""
        assert all(self.held.values()), self.held
        for oid, node in self._waiters:
            assert node in self.held.get(oid, ()), ("a wait for a copy that is not under way", oid.hex(), node)

    def _discard(self, oid: bytes, node: int) -> None:
        nodes = self.held.get(oid)
        if nodes is not None:
            nodes.discard(node)
            if not nodes:
                del self.held[oid]


# ------------------------------------------------------------ object recovery


_FORGOTTEN = "nothing but what was made from it was referred to, so its copies were dropped"


class ObjectRecovery:
    """Losses of the objects of one process, owned and borrowed.

    Args:
        me: our proc id.
        entries: the table's objects.
        has_side_records: the objects that this part, `on_free` or lineage has to do with; all others pay for one look
            into it.
        refs, pins, replicas: the other parts of the table.
        send: queue a message.
        lost: makes the error blob for an object that cannot be had any more, from (id, reason, word of `lineage`).
        remake: submits a kept task once more; None: nothing can be made again.
        lineage_limit: bytes of finished tasks that are kept; 0: nothing is ever made again.
        ready: serve the waiters and borrowers of an object.
        ask_owner: ask the owner of a borrowed object for its value, unless that was done.
        answer_get: answer a borrower's request for a value.
        maybe_free: called when an object may have lost its last holder.

    Attributes:
        lineage: the tasks that can run again.
        dead_nodes: nodes that died; none comes back under its old number.
        why_lost: for objects of ours that are lost for good, the reason.
        remake_count: times that an object of ours was made again; for borrowed objects, the owner's latest number.
    """

    def __init__(
        self,
        me: bytes,
        entries: dict[bytes, ObjectEntry],
        has_side_records: set[bytes],
        dead_nodes: set[int],
        refs: ReferenceCounter,
        pins: ObjectPins,
        replicas: Replication,
        send: Callable[[bytes, Message], None],
        lost: Callable[[bytes, str, str], bytes],
        remake: Callable[[Any], None] | None,
        lineage_limit: int,
        ready: Callable[[bytes, ObjectEntry], None],
        ask_owner: Callable[[bytes, ObjectEntry], None],
        answer_get: Callable[[bytes, bytes], None],
        maybe_free: Callable[[bytes, ObjectEntry], None],
    ) -> None:
        self.lineage = Lineage(me, lineage_limit, self._unneeded, self._evicted)
        self.dead_nodes = dead_nodes
        self.why_lost: dict[bytes, str] = {}
        self.remake_count: dict[bytes, int] = {}
        self._me = me
        self._node = node_of(me)
        self._raylet = raylet_of(self._node)
        self._entries = entries
        self._has_side_records = has_side_records
        self._refs = refs
        self._pins = pins
        self._replicas = replicas
        self._send = send
        self._lost = lost
        self._remake = remake
        self._ready = ready
        self._ask_owner = ask_owner
        self._answer_get = answer_get
        self._maybe_free = maybe_free
        # Objects of ours whose primary copy is gone, while a store may answer that it has another.
        self._unsure: set[bytes] = set()

    # ------------------------------------------------------------ objects that cannot be read

    def not_found(self, oid: bytes, entry: ObjectEntry, searched: Sequence[int], reason: str) -> None:
        """Our store found a stored object on none of the nodes `searched`."""
        others = [n for n in entry.nodes or () if n not in searched and n not in self.dead_nodes and n != self._node]
        if others:
            if oid[:8] == self._me and (oid in self._unsure or (entry.nodes and entry.nodes[0] == self._node)):
                self._secure_copy_at(oid, entry, others[0])
            self._ready(oid, entry)  # opens it again, from there, where there are waiters
        elif oid[:8] == self._me:
            self.lose(oid, entry, reason)
        else:
            entry.state, entry.nodes, entry.owner_asked = PENDING, None, True
            self._send(owner_of(oid), ObjectLost(oid, self.remake_count.get(oid, 0), list(searched), reason))

    def not_found_at_neighbor(self, oid: bytes, entry: ObjectEntry, node: int, reason: str) -> None:
        """The store of a neighbor does not have an object that was to be read there."""
        if not [n for n in entry.nodes or () if n != node and n not in self.dead_nodes]:
            self.not_found(oid, entry, [node], reason)
            return
        known = entry.nodes is not None and node in entry.nodes
        first = known and self._remove_location(entry, node)
        if oid[:8] == self._me:
            if known:
                entry.left_at = [*(entry.left_at or ()), node]  # perhaps it is there after all
            if first or oid in self._unsure:
                self._primary_gone(oid, entry, reason)
        if entry.state == STORED:
            self._ready(oid, entry)

    def on_object_lost(self, src: bytes, msg: ObjectLost) -> None:
        """A borrower cannot get an object of ours."""
        oid = msg.id
        entry = self._entries.get(oid)
        if msg.resident:
            self.resident_lost(oid, msg.resident, msg.reason)
        elif entry is not None and entry.state == STORED and msg.remake_count == self.remake_count.get(oid, 0):
            self._add_pinned_location(entry)
            if not [n for n in entry.nodes or () if n not in msg.nodes and n not in self.dead_nodes]:
                why = self._why_not(entry)
                if why and any(node not in self.dead_nodes for node in entry.nodes or ()):
                    # Perhaps only the way from there to here is broken; others can still read it.
                    self._send(src, ObjectReady(oid, 0, self._lost(oid, msg.reason, why), 0, []))
                    return
                self.lose(oid, entry, msg.reason)
        self._answer_get(src, oid)

    def resident_lost(self, oid: bytes, resident: bytes, reason: str) -> None:
        """The part of a value that stayed in a process is gone with it: the value is made again, with another one.

        Nothing happens where that is under way, or where the value has another one by now.

        Args:
            resident: id of the object that was this part. reason: how its process died.
        """
        entry = self._entries.get(oid)
        if entry is None:
            return
        if oid[:8] == self._me:
            if entry.state in (INLINE, STORED) and resident_of(entry) == resident:
                self._forget_value(oid, entry, resident)
                self._make_again(oid, entry, reason)
        else:
            self._forget_value(oid, entry, resident)
            entry.state, entry.owner_asked = PENDING, True
            self._send(owner_of(oid), ObjectLost(oid, self.remake_count.get(oid, 0), [], reason, resident))

    def resident_moved(self, oid: bytes, resident: bytes, value: bytes, size: int, node: int) -> None:
        """The process in which a part of a value of ours stays ends, and has written the whole value elsewhere.

        Args:
            value: the blob; b"": it is in the store of `node`, of `size` bytes.
        """
        entry = self._entries.get(oid)
        if entry is None or entry.state not in (INLINE, STORED) or resident_of(entry) != resident:
            if size and (entry is None or node not in (entry.nodes or ())):
                self._send(self._raylet, Free([oid], [node]))
            return
        entry.nodes, entry.left_at = [other for other in entry.locations if other != node], None
        self._forget_value(oid, entry, resident)
        if size:
            entry.state, entry.size, entry.nodes = STORED, size, [node]
            if node in self.dead_nodes:
                self.lose(oid, entry, f"node {node} died when it had just been moved there")
                return
        else:
            entry.state, entry.value = INLINE, value
        self._ready(oid, entry)

    def _forget_value(self, oid: bytes, entry: ObjectEntry, resident: bytes) -> None:
        """Forget the value of an object that will have another one, its copies, and the part that
        stays in a process."""
        if oid[:8] == self._me:
            self.free_copies(oid, entry)
            self._unsure.discard(oid)
            self._replicas.object_gone(oid)
            entry.contained = [ref for ref in entry.contained or () if ident_of(ref) != resident] or None
        mapping, entry.mapping = entry.mapping, None
        self._pins.entry_gone(oid, mapping)
        entry.value, entry.nodes, entry.left_at = b"", None, None

    def neighbor_lost(self, node: int) -> None:
        """The connection to a neighbor's store failed or ended: its objects are fetched as from any other node."""
        self._request_again(self._pins.unmet(node))

    def _request_again(self, oids: Iterable[bytes]) -> None:
        for oid in oids:
            entry = self._entries.get(oid)
            if entry is None:
                continue
            if oid in self._unsure and entry.state == STORED:
                self._look_again(oid, entry)
            if entry.local_waiters and entry.state == STORED:
                self._ready(oid, entry)
            elif entry.local_waiters and entry.state == PENDING:  # no location is known any more
                self._ask_owner(oid, entry)

    def _look_again(self, oid: bytes, entry: ObjectEntry) -> None:
        """Request an object of `_unsure` again: the request under way failed."""
        left = [node for node in entry.nodes or () if node not in self.dead_nodes]
        if left:
            self._secure_copy_at(oid, entry, left[0])
        else:
            self._pins.open_here(oid, entry)

    # ------------------------------------------------------------ making again

    def lose(self, oid: bytes, entry: ObjectEntry, reason: str) -> None:
        """Every copy of a stored object of ours is gone."""
        left = [node for node in entry.nodes or () if node not in self.dead_nodes]
        if left:  # perhaps a copy is there after all; it goes with the object
            entry.left_at = [*(entry.left_at or ()), *left]
        entry.nodes = None
        self._unsure.discard(oid)
        # The refs inside stay held: a process that has read this life of the object, or still has it pinned, may take
        # them out later.
        self._replicas.object_gone(oid)
        self._make_again(oid, entry, reason)

    def _make_again(self, oid: bytes, entry: ObjectEntry, reason: str) -> None:
        why = self._why_not(entry)
        if why:
            self.set_lost(oid, entry, reason, why)
            return
        self._has_side_records.add(oid)
        self.remake_count[oid] = self.remake_count.get(oid, 0) + 1
        entry.state = PENDING
        assert self._remake is not None
        self._remake(entry.task)

    def revive(self, oid: bytes, entry: ObjectEntry) -> None:
        """Make an object again that only lineage remembers."""
        if entry.state == LINEAGE_ONLY:
            self._make_again(oid, entry, _FORGOTTEN)

    def _why_not(self, entry: ObjectEntry) -> str:
        """The word why an object of ours cannot be made again; "" when it can."""
        task = entry.task
        if task is None or isinstance(task, str):
            return task or PUT
        if self._remake is None:
            return LOST
        kept = self.lineage.kept.get(task.id)
        why = self.lineage.why_not(task)
        if kept is not None and kept.running and why != TASK_CANCELLED:
            return ""  # perhaps this run makes it; its end decides
        return why or ("" if kept is not None else LINEAGE_EVICTED)

    def settle_lost(self, oid: bytes, reason: str, why: str) -> None:
        """Make a known object an error from now on. why: a word of `lineage`."""
        self.set_lost(oid, self._entries[oid], reason, why)

    def set_lost(self, oid: bytes, entry: ObjectEntry, reason: str, why: str) -> None:
        """`settle_lost` for an entry at hand."""
        entry.state = INLINE
        entry.value = self._lost(oid, reason, why)
        if oid[:8] == self._me:
            self._has_side_records.add(oid)
            self.why_lost[oid] = f"[{why}] {reason}"
            self.forget_task(oid, entry)
        self._ready(oid, entry)

    def forget_task(self, oid: bytes, entry: ObjectEntry) -> None:
        """Forget the task of an object that will not have to be made again."""
        task, entry.task = entry.task, None
        if task is not None and not isinstance(task, str) and self.lineage.kept:
            self.lineage.return_gone(oid, oid[:TASK_BYTES])

    def forget_tasks(self) -> None:
        """Forget all tasks: the process leaves the job. They may be parts of cycles through entries, which the garbage
        collector does not see."""
        for entry in self._entries.values():
            if type(entry.task) is not TaskTemplate:
                entry.task = None

    def keep_task(self, task: Any, returns: Sequence[bytes], args: Sequence[bytes], size: int) -> None:
        """Remember the task that has just made these returns, which may be lost one day.

        Args:
            args: ids of the refs that its arguments mention. size: bytes of its arguments.
        """
        why = self.lineage.why_not(task)
        known = [oid for oid in returns if oid in self._entries]
        if known and not why:
            self._has_side_records.update(known)
            self._has_side_records.update(args)
            self.lineage.keep(task, known, args, size)
        for oid in known:
            self._entries[oid].task = why or task
            if why:
                self.lineage.return_gone(oid, task.id)

    def recount_args(self, oids: Sequence[bytes]) -> None:
        """Count a ref to each of these once more: a task that mentions them is to run again."""
        for oid in oids:
            entry = self._entries.get(oid)
            if entry is not None:
                entry.local += 1
            else:
                entry = self._entries[oid] = ObjectEntry(None, 1)
                if oid[:8] != self._me:
                    self._refs.register([oid])
                else:
                    self.set_lost(oid, entry, _FORGOTTEN, LOST)
            self.revive(oid, entry)

    # ------------------------------------------------------------ lives of an object

    def hibernate(self, oid: bytes, entry: ObjectEntry) -> None:
        """Keep only what can make an object of ours again: it has no holder, but a task that took it may run again.

        A value that needs no room in a store, and holds nothing that does, stays.
        """
        held = entry.contained and entry.task is not None  # else of an earlier life
        if entry.state == STORED or held:
            entry.state, entry.value = LINEAGE_ONLY, b""
        mapping, entry.mapping = entry.mapping, None
        entry.nodes = entry.left_at = entry.contained = None
        self._unsure.discard(oid)
        self._pins.entry_gone(oid, mapping)

    def set_inline_again(self, oid: bytes, entry: ObjectEntry, contained: list[Any] | None) -> None:
        """An object that may have had earlier lives is a value in a message now, which cannot be lost."""
        entry.contained = self.all_contained(entry, contained)
        if contained is None:
            self.forget_task(oid, entry)

    @staticmethod
    def all_contained(entry: ObjectEntry, contained: list[Any] | None) -> list[Any] | None:
        """The refs inside an object, in this life and in earlier ones."""
        return contained if entry.contained is None else [*entry.contained, *(contained or ())]

    def free_copies(self, oid: bytes, entry: ObjectEntry) -> None:
        """Have every copy of an object of ours dropped, on every node."""
        if entry.nodes or entry.left_at:
            self._send(self._raylet, Free([oid], entry.locations))

    def entry_dropped(self, oid: bytes, entry: ObjectEntry) -> None:
        """Forget an object whose entry is gone."""
        self.forget_task(oid, entry)
        self._has_side_records.discard(oid)
        self._unsure.discard(oid)
        self.remake_count.pop(oid, None)
        self.why_lost.pop(oid, None)

    def _evicted(self, oid: bytes) -> None:
        self._entries[oid].task = LINEAGE_EVICTED

    def _unneeded(self, oid: bytes) -> None:
        entry = self._entries.get(oid)
        if entry is not None and entry.local <= 0 and not entry.borrowers and entry.state != PENDING:
            self._maybe_free(oid, entry)

    def process_died(
        self,
        proc: bytes,
        reason: str,
        sought: Callable[[bytes], bool] = lambda oid: False,
        kept: Callable[[bytes], bool] = lambda oid: False,
    ) -> None:
        """Turn the objects that a dead process owned, and that we wait for, into errors.

        Args:
            sought: looks for an object elsewhere; returns False where there is no hope.
            kept: returns True for an object that nodes keep although its owner has left.
        """
        if proc != self._me:
            for oid in [o for o, e in self._entries.items() if o[:8] == proc and e.state == PENDING]:
                if sought(oid):
                    continue
                self.set_lost(oid, self._entries[oid], f"its owner is gone: {reason}", OWNER_DIED)
            for oid, resident in self._values_with_residents_of(proc):
                if not kept(resident):
                    self.resident_lost(oid, resident, f"a part of it stayed in a process that is gone: {reason}")

    def _values_with_residents_of(self, proc: bytes) -> list[tuple[bytes, bytes]]:
        """The objects of ours, of whose values a part stays in this process, and the objects that are these parts."""
        found = ((oid, resident_of(e)) for oid, e in self._entries.items() if e.contained and oid[:8] == self._me)
        return [(oid, resident) for oid, resident in found if resident[:8] == proc]

    def mark_node_dead(self, node: int) -> bool:
        """Note a death before its consequences are dealt with (`node_died`). Returns False when it was known."""
        known = node in self.dead_nodes
        self.dead_nodes.add(node)
        return not known

    def node_died(self, node: int, reason: str) -> None:
        """Remove a dead node from all locations. `ObjectTable.process_died` deals with its processes."""
        self.dead_nodes.add(node)
        unanswered = self._pins.unmet(node)
        self._pins.node_died(node)
        self._replicas.node_died(node)
        gone = []
        for oid, entry in list(self._entries.items()):
            if entry.left_at and node in entry.left_at:
                entry.left_at = [n for n in entry.left_at if n != node]
            if entry.nodes and node in entry.nodes:
                first = self._remove_location(entry, node)
                if entry.state == STORED and (first or not entry.nodes):
                    gone.append(oid)
        for oid in gone:
            found = self._entries.get(oid)
            if found is not None and found.state == STORED:
                self._primary_gone(oid, found, f"the node that had it died: {reason}")
        self._request_again(unanswered)

    def processes_of(self, node: int) -> set[bytes]:
        """The processes of a node that own, or hold, an object of this table."""
        found = {oid[:8] for oid, e in self._entries.items() if node_of(oid) == node and e.state == PENDING}
        return found | self._refs.borrowers_on(node)

    # ------------------------------------------------------------ copies

    def replicate(self, oid: bytes, node: int, waiter: Waiter | None = None) -> None:
        """Have `node` pin a copy of an object of ours. `waiter` counts down when that is decided."""
        if node in self.dead_nodes:  # no answer would come
            self._replicas.refuse(oid, node, f"node {node} is dead", waiter)
            return
        self._has_side_records.add(oid)
        self._replicas.pin_copy(oid, self._entries[oid], node, waiter)

    def on_replica(self, oid: bytes, node: int, problem: str) -> None:
        """Another node's store answers that it holds a copy for us, or cannot ("" when it does)."""
        entry = self._entries.get(oid)
        if oid[:8] != self._me:
            return
        if entry is None or node not in self._replicas.held.get(oid, ()):
            if not problem:  # we released it meanwhile: it is a copy like any other
                self.on_add_location(AddLocation(oid, node))
            return
        self._replicas.answered(oid, node, problem)
        if not problem:
            self._add_location(entry, node)
        elif entry.nodes and node in entry.nodes and entry.state == STORED:
            first = self._remove_location(entry, node)
            if first:
                self._primary_gone(oid, entry, problem)

    def on_add_location(self, msg: AddLocation) -> None:
        """Record that a node has a copy now."""
        entry = self._entries.get(msg.id)
        if msg.node in self.dead_nodes:
            return
        if (
            entry is None
            or entry.state == LINEAGE_ONLY
            or (entry.state == INLINE and entry.local <= 0 and not entry.borrowers)
        ):
            self._send(self._raylet, Free([msg.id], [msg.node]))  # the object has no holder
        elif entry.state == PENDING:  # of an earlier life of the object
            entry.left_at = [*(entry.left_at or ()), msg.node]
        else:
            self._add_location(entry, msg.node)

    def is_unsure(self, oid: bytes) -> bool:
        """True while the primary copy of an object of ours is gone, and a store may answer that it has another."""
        return oid in self._unsure

    def found_copy(self, oid: bytes, entry: ObjectEntry, node: int) -> None:
        """A store, our own as a rule, has found an object of `_unsure`."""
        if entry.state != STORED:
            return
        if node == self._node and entry.mapping is not None and entry.mapping.node != node:
            self._keep_here(oid)
        else:
            self._secure_copy_at(oid, entry, node)

    def _primary_gone(self, oid: bytes, entry: ObjectEntry, reason: str) -> None:
        """Replace the primary copy, the one that its node does not evict: it is not there any more."""
        mine = oid[:8] == self._me
        if entry.nodes:
            if mine:
                held = self._replicas.held.get(oid, ())
                sources = [node for node in entry.nodes if node in held] or entry.nodes
                self._secure_copy_at(oid, entry, min(sources, key=lambda node: node != self._node))
        elif oid not in self._pins.opening:
            if mine:
                self.lose(oid, entry, reason)
            else:
                entry.state, entry.owner_asked = PENDING, False  # its owner will know another location
        elif mine:  # the answer of the store decides
            self._has_side_records.add(oid)
            self._unsure.add(oid)

    def _secure_copy_at(self, oid: bytes, entry: ObjectEntry, node: int) -> None:
        """Make the copy of an object of ours at this node, which may have evicted it, one that is not evicted."""
        self._has_side_records.add(oid)
        self._move_to_front(entry, node)
        if node == self._node and entry.mapping is None:
            self._pins.open(oid, entry)
        at = self._node if entry.mapping is None else entry.mapping.node
        if node == self._node and at not in self.dead_nodes:
            node = at  # the pinned copy is there for sure
            self._move_to_front(entry, node)
        if node != self._node:
            self._unsure.discard(oid)
            self._replicas.pin_copy(oid, entry, node)
        elif at == node and entry.mapping is not None:  # pinned, so it is there; the pin goes sooner or later
            self._keep_here(oid)
        else:  # it is not pinned there yet; a mapping that we may have is memory of a node that is dead
            self._unsure.add(oid)
            self._pins.open_here(oid, entry)

    def _keep_here(self, oid: bytes) -> None:
        self._unsure.discard(oid)
        self._send(self._raylet, Open(oid, self._entries[oid].size, [], pin_replica=True))

    @staticmethod
    def _move_to_front(entry: ObjectEntry, node: int) -> None:
        entry.nodes = [node, *(other for other in entry.nodes or () if other != node)]

    def _remove_location(self, entry: ObjectEntry, node: int) -> bool:
        """Drop `node` from the object's locations. Returns True if it held the primary copy."""
        assert entry.nodes
        first = entry.nodes[0] == node
        entry.nodes = [n for n in entry.nodes if n != node]
        if entry.mapping is not None and entry.mapping.node != node:
            self._add_pinned_location(entry)
        return first

    def _add_pinned_location(self, entry: ObjectEntry) -> None:
        """Add the node where the object is pinned, if it lives; the memory of a dead node can be read, by us alone."""
        if entry.mapping is not None and entry.mapping.node not in self.dead_nodes:
            self._add_location(entry, entry.mapping.node)

    def _add_location(self, entry: ObjectEntry, node: int) -> None:
        if entry.nodes is None:
            entry.nodes = [node]
        elif node not in entry.nodes:
            entry.nodes.append(node)

    def check_invariants(self) -> None:
        """Raise AssertionError where recovery keeps state of an object that the table does not know."""
        self.lineage.check_invariants(self._entries)
        for oid in (*self._unsure, *self.remake_count, *self.why_lost, *self._replicas.held, *self.lineage.remembered):
            assert oid in self._has_side_records and oid in self._entries, ("state of an unknown object", oid.hex())
        for oid in self._unsure:
            assert self._entries[oid].state == STORED, ("unsure of an object that is not stored", oid.hex())
            assert oid in self._pins.opening or oid in self._pins.files, ("unsure without a request", oid.hex())
        for oid, entry in self._entries.items():
            # A borrower may have its locations from an owner that does not know of a death yet.
            if oid[:8] == self._me and entry.state == STORED:
                assert self.dead_nodes.isdisjoint(entry.nodes or ()), ("located on dead nodes", oid.hex(), entry.nodes)


# ------------------------------------------------------------ kept copies
# Borrowed objects that our own node keeps for us, as the nodes of their owners leave the job.
#
# Ownership cannot move: an id names its owner. But an owner that leaves in good order sends its borrowers KeepCopies.
# Each of them has the store of its node keep the object for it, and then drops its borrow, so the owner need not stay.
# The store keeps a copy, in memory or on disk, as long as one of these processes wants it; that reads it like any
# stored object, and a ref that it passes on says where the copy is. See docs/explain/ownership.md.


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
