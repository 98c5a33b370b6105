"""The record that one process keeps of one object, and the waiters on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Union

PENDING, INLINE, STORED, LINEAGE_ONLY = 0, 1, 2, 3
TRANSITIONS: dict[int, frozenset[int]] = {
    PENDING: frozenset({INLINE, STORED}),  # a value or an error arrived; a store has sealed the object
    STORED: frozenset(
        {PENDING, INLINE, LINEAGE_ONLY}
    ),  # made again or located again; lost or discarded; only lineage needs it
    INLINE: frozenset({LINEAGE_ONLY, STORED}),  # only lineage needs it, as it held refs; kept by a store
    LINEAGE_ONLY: frozenset({PENDING, INLINE}),  # made again; lost for good or discarded
}
"""Object states: the states that may follow each state. A state may also be set again to itself.

PENDING: no value yet. INLINE: `ObjectEntry.value` is the blob, perhaps an error. STORED: in the stores of
`ObjectEntry.nodes`. LINEAGE_ONLY: nothing refers to the object, but lineage remembers it because a task that took it
may have to run again.
"""

Hint = Union[tuple[int, tuple[int, ...]], tuple[int, tuple[int, ...], bytes]]
"""Facts about its object that travel with a ref: size in bytes and nodes that have it; or 0, none, and the value."""


class Waiter:
    """Counts down as objects become available. At zero its `callback` runs (under the lock), or its thread wakes.

    eager: the first error satisfies the waiter (`get` raises it at once); reset to False when that happens. priority:
    urgency of a fetch, see `protocol.messages.Open`.
    """

    __slots__ = ("__weakref__", "callback", "count", "eager", "lock", "priority", "turn")  # weak: see `record_replay`

    def __init__(self, count: int = 1, callback: Callable[[], object] | None = None, eager: bool = False) -> None:
        self.count = count
        self.callback = callback
        self.eager = eager
        self.lock: Any = None
        self.turn = False
        self.priority = 0


class ArenaMapping:
    """The block of an object in the arena of a node (ours or a neighbor), pinned for this process.

    offset, size: bytes. views: live buffers that readers hold.
    """

    __slots__ = ("node", "offset", "size", "views")

    def __init__(self, offset: int, size: int, node: int) -> None:
        self.offset, self.size, self.node, self.views = offset, size, node, 0


class ObjectEntry:
    """One object as this process sees it.

    state: see `TRANSITIONS`. local: live refs in this process. borrowers: counts of other processes, kept by the owner
    (see `ReferenceCounter`). contained: refs inside the value, held by the owner (or by `KeptCopies`). nodes:
    locations of copies, the primary first, as far as the owner knows; they outlive an error. task: the task that makes
    the object and would make it again, or the word why none would (see `lineage`), or None for an object that was put.
    owner_asked: an ObjectGet has been sent. left_at: nodes where attempts that died, or copies that could not be read,
    may have left a copy. site: where in the user's program the ref was created; set only by
    `ObjectTable.record_creation_sites`.
    """

    __slots__ = (
        "borrowers", "contained", "left_at", "local", "local_waiters", "mapping", "nodes", "owner_asked",
        "ready_waiters", "site", "size", "state", "subscribers", "task", "value",
    )  # fmt: skip
    site: str

    def __init__(self, task: Any, local: int) -> None:
        self.state = PENDING
        self.value = b""
        self.size = 0
        self.nodes: list[int] | None = None
        self.local = local
        self.borrowers: dict[bytes, int] | None = None
        self.contained: list[Any] | None = None
        self.local_waiters: list[Waiter] | None = None
        self.ready_waiters: list[Waiter] | None = None
        self.subscribers: list[bytes] | None = None
        self.mapping: ArenaMapping | None = None
        self.owner_asked = False
        self.left_at: list[int] | None = None
        self.task = task

    @property
    def available(self) -> bool:
        """True when the value can be read now, in this process."""
        return self.state == INLINE or self.mapping is not None

    @property
    def locations(self) -> list[int]:
        """Nodes that have, or may have, a copy."""
        return [*(self.nodes or ()), *(self.left_at or ())]


def site_of(entry: ObjectEntry | None) -> str:
    """Return where the ref of an object was created, if that was recorded; else ""."""
    return getattr(entry, "site", "")


def note_site(entry: ObjectEntry | None, site: str) -> None:
    """Note where the ref of a borrowed object was created."""
    if entry is not None:
        entry.site = site
