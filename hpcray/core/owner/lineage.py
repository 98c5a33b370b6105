"""Lineage: which finished tasks can run again, because something that they returned may be lost. Pure.

A value inside a message cannot be lost, so only a task that left something in a node's store is kept, with the ids of
the refs that its arguments mention. Such an argument is *remembered*: when the last ref to it dies its owner drops the
copies but keeps the entry (`FREED`), and with it the task that would make it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

BASE_COST = 400
"""Bytes that a kept task takes besides its arguments, about."""

LOST, OWNER_DIED = "LOST", "OWNER_DIED"
PUT, RETRIES_DISABLED, MAX_ATTEMPTS_EXCEEDED = "PUT", "RETRIES_DISABLED", "MAX_ATTEMPTS_EXCEEDED"
LINEAGE_EVICTED, LINEAGE_DISABLED, TASK_CANCELLED = "LINEAGE_EVICTED", "LINEAGE_DISABLED", "TASK_CANCELLED"
DEPENDENCY = "DEPENDENCY_FAILED"


class Recipe(Protocol):
    """What lineage needs to know of a task. retries: runs left, -1 for any number; attempt: runs beyond the first."""

    id: bytes
    retries: int
    attempt: int
    cancelled: bool


class Kept:
    """One task that can run again.

    args: what its arguments mention, ours or borrowed. live: its returns that somebody may still want. running: it is
    on its way now. wanted: what this run is to make, None for everything.
    """

    __slots__ = ("args", "cost", "live", "running", "task", "wanted")

    def __init__(self, task: Any, args: Sequence[bytes], cost: int) -> None:
        self.task, self.args, self.cost = task, args, cost
        self.live: set[bytes] = set()
        self.running = False
        self.wanted: frozenset[bytes] | None = None


class Lineage:
    """The finished tasks of one process, the one kept first in front.

    Args:
        me: our proc id. limit: bytes; beyond it the oldest are forgotten.
        unneeded: called for an argument that no kept task mentions any more.
        evicted: called for a return whose task was forgotten for want of room.

    Attributes:
        remembered: how many kept tasks mention an object of ours.
        used: bytes of all kept tasks.
    """

    def __init__(
        self, me: bytes, limit: int, unneeded: Callable[[bytes], None], evicted: Callable[[bytes], None]
    ) -> None:
        self.limit = limit
        self.kept: dict[bytes, Kept] = {}
        self.remembered: Counter[bytes] = Counter()
        self.used = 0
        self._me = me
        self._unneeded = unneeded
        self._evicted = evicted
        self._dropping: list[Kept] = []
        self._busy = False

    def why_not(self, task: Recipe) -> str:
        """Why a task cannot run again; "" when it can."""
        if task.cancelled:
            return TASK_CANCELLED
        if task.retries == 0:
            return MAX_ATTEMPTS_EXCEEDED if task.attempt else RETRIES_DISABLED
        return "" if self.limit else LINEAGE_DISABLED

    def keep(self, task: Recipe, returns: Iterable[bytes], args: Sequence[bytes], size: int) -> Kept:
        """These returns of `task` may be lost one day: remember what would make them.

        Args:
            args: ids of the refs that its arguments mention. size: bytes of its arguments.
        """
        kept = self.kept.get(task.id)
        if kept is None:
            kept = self.kept[task.id] = self.made(task, args, BASE_COST + size + 16 * len(args))
            self.used += kept.cost
            for oid in args:
                if oid[:8] == self._me:
                    self.remembered[oid] += 1
        kept.live.update(returns)
        return kept

    def made(self, task: Any, args: Sequence[bytes], cost: int) -> Kept:
        """A task that is kept from now on."""
        return Kept(task, args, cost)

    def trim(self) -> None:
        """Forget the oldest tasks, until what is left is within the limit."""
        while self.used > self.limit:
            kept = next((kept for kept in self.kept.values() if not kept.running), None)
            if kept is None:
                return
            for oid in kept.live:
                self._evicted(oid)
            self._drop(kept)

    def gone(self, oid: bytes, task: bytes) -> None:
        """Nobody will ask for this return of a task any more."""
        kept = self.kept.get(task)
        if kept is not None:
            kept.live.discard(oid)
            if not kept.live and not kept.running:
                self._drop(kept)

    def ended(self, kept: Kept) -> None:
        """A run of a kept task is over."""
        kept.running = False
        if not kept.live and self.kept.get(kept.task.id) is kept:
            self._drop(kept)

    def _drop(self, kept: Kept) -> None:
        """Forget a task, and what was remembered for it alone: a chain of any length, so no recursion."""
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
