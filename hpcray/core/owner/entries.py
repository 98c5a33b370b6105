"""What a process knows of one object, and who waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PENDING, INLINE, STORED, FREED = 0, 1, 2, 3


class Waiter:
    """Counts down as objects become available. At zero its `callback` runs (under the lock), or its thread wakes.

    eager: the first error is as good as all values (`get` raises it at once); False once that has been so. priority:
    how urgent it is, see `wire.messages.Open`.
    """

    __slots__ = ("callback", "count", "eager", "lock", "priority", "turn")

    def __init__(self, count: int = 1, callback: Callable[[], object] | None = None, eager: bool = False) -> None:
        self.count = count
        self.callback = callback
        self.eager = eager
        self.lock: Any = None
        self.turn = False
        self.priority = 0


class Mapping:
    """Where an object lies in the arena of a node, ours or a neighbour, pinned for this process. views: live buffers
    that readers hold."""

    __slots__ = ("node", "offset", "size", "views")

    def __init__(self, offset: int, size: int, node: int) -> None:
        self.offset, self.size, self.node, self.views = offset, size, node, 0


class Entry:
    """One object as this process sees it.

    state: PENDING, INLINE (value is the blob, perhaps an error), STORED (size, nodes), FREED (nobody holds it, but
    lineage remembers it: a task that took it may have to run again). local: our live refs. borrowers: counts of other
    processes, kept by the owner (see `Borrowing`). contained: refs inside the value, held by the owner. nodes: where
    copies are, as the owner knows; it outlives an error that replaced the value. task: what makes the object, and would
    make it again; or why nothing would, in a word (see `lineage`); None: it was put. asked: the owner was asked for the
    value. left_at: nodes where attempts that died, or copies that could not be read, may have left it.
    """

    __slots__ = (
        "asked", "borrowers", "contained", "left_at", "local", "local_waiters", "mapping", "nodes", "ready_waiters",
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
        self.asked = False
        self.left_at: list[int] | None = None
        self.task = task

    @property
    def available(self) -> bool:
        """Whether the value can be read now, in this process."""
        return self.state == INLINE or self.mapping is not None
