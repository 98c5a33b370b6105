"""Lineage: the finished tasks that can run again, because something that they returned may be lost. Pure.

A value inside a message cannot be lost, so only a task that left something in a node's store is kept, with the ids of
the refs that its arguments mention. Such an argument is *remembered*: when the last ref to it dies its owner drops the
copies but keeps the entry (`LINEAGE_ONLY`), and with it the task that would make it again. What was put, or made by
a task that must not run twice, stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from hpcray.common.ids import raylet_of
from hpcray.core.core_worker.object_entry import ObjectEntry, Waiter
from hpcray.protocol.messages import Message, Open, Release

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
        if task.retries == 0:
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
