"""The record that one process keeps of one object, and the waiters on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Union

import msgspec

from hpcray.common.ids import RESIDENT_INDEX

PENDING, INLINE, STORED, LINEAGE_ONLY = 0, 1, 2, 3
TRANSITIONS: dict[int, frozenset[int]] = {
    PENDING: frozenset({INLINE, STORED}),  # a value or an error arrived; a store has sealed the object
    STORED: frozenset(
        {PENDING, INLINE, LINEAGE_ONLY}
    ),  # made again or located again; lost or discarded; only lineage needs it
    INLINE: frozenset(
        {PENDING, LINEAGE_ONLY, STORED}
    ),  # made again, as its resident part is lost; only lineage needs it, as it held refs; kept by a store
    LINEAGE_ONLY: frozenset({PENDING, INLINE}),  # made again; lost for good or discarded
}
"""Object states: the states that may follow each state. A state may also be set again to itself.

PENDING: no value yet. INLINE: `ObjectEntry.value` is the blob, perhaps an error. STORED: in the stores of
`ObjectEntry.nodes`. LINEAGE_ONLY: nothing refers to the object, but lineage remembers it because a task that took it
may have to run again.
"""

Hint = Union[tuple[int, tuple[int, ...]], tuple[int, tuple[int, ...], bytes], tuple[int, tuple[int, ...], bytes, bool]]
"""Facts about its object that travel with a ref: size in bytes and nodes that have it; or 0, none, and the value, and
whether its owner may die before the job ends."""


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


class EntryExtra:
    """The part of an `ObjectEntry` that few entries need; described there."""

    __slots__ = (
        "borrowers", "contained", "left_at", "mapping", "nodes", "owner_asked", "ready_waiters", "site", "size",
        "subscribers", "target",
    )  # fmt: skip

    def __init__(self) -> None:
        self.size = 0
        self.nodes: list[int] | None = None
        self.borrowers: dict[bytes, int] | None = None
        self.contained: list[Any] | None = None
        self.ready_waiters: list[Waiter] | None = None
        self.subscribers: list[bytes] | None = None
        self.mapping: ArenaMapping | None = None
        self.owner_asked = False
        self.left_at: list[int] | None = None
        self.site = ""
        self.target: tuple[str, Any] | None = None
        """Name of an extension that reads the value (`Extension.targeted_value`), and where to; None: none does."""


NO_EXTRA = EntryExtra()
"""The `extra` of every entry that needs none. Never written."""


def _detail(name: str) -> property:
    """An attribute of `EntryExtra` as one of `ObjectEntry`, which gets an `EntryExtra` of its own when it needs one."""
    default = getattr(NO_EXTRA, name)

    def write(entry: ObjectEntry, value: Any) -> None:
        if entry.extra is NO_EXTRA:
            if value is default:
                return
            entry.extra = EntryExtra()
        setattr(entry.extra, name, value)

    return property(attrgetter(f"extra.{name}"), write)


class ObjectEntry(msgspec.Struct, gc=False, eq=False):
    """One object as this process sees it.

    A process may own millions that wait for their tasks, so an entry is small (64 bytes), and the garbage collector
    does not visit it: a cycle through an entry has to be broken by hand (`ObjectRecovery.forget_tasks`).

    state: see `TRANSITIONS`. local: live refs in this process. borrowers: counts of other processes, kept by the owner
    (see `ReferenceCounter`). contained: refs inside the value, held by the owner (or by `KeptCopies`). nodes:
    locations of copies, the primary first, as far as the owner knows; they outlive an error. task: the task that makes
    the object and would make it again, or the word why none would (see `lineage`), or None for an object that was put;
    a `TaskTemplate` while the task is packed (`PackedTasks`): then `value` has its arguments.
    owner_asked: an ObjectGet has been sent. left_at: nodes where attempts that died, or copies that could not be read,
    may have left a copy. site: where in the user's program the ref was created; set only by
    `ObjectTable.record_creation_sites`. extra: what few entries need.
    """

    task: Any
    local: int
    state: int = PENDING
    value: bytes = b""
    local_waiters: Union[list[Waiter], None] = None
    extra: EntryExtra = NO_EXTRA

    if TYPE_CHECKING:
        size: int = 0
        nodes: list[int] | None = None
        borrowers: dict[bytes, int] | None = None
        contained: list[Any] | None = None
        ready_waiters: list[Waiter] | None = None
        subscribers: list[bytes] | None = None
        mapping: ArenaMapping | None = None
        owner_asked: bool = False
        left_at: list[int] | None = None
        site: str = ""
    else:
        size = _detail("size")
        nodes = _detail("nodes")
        borrowers = _detail("borrowers")
        contained = _detail("contained")
        ready_waiters = _detail("ready_waiters")
        subscribers = _detail("subscribers")
        mapping = _detail("mapping")
        owner_asked = _detail("owner_asked")
        left_at = _detail("left_at")
        site = _detail("site")

    def own_extra(self) -> EntryExtra:
        """The `EntryExtra` of this entry alone, to be written."""
        if self.extra is NO_EXTRA:
            self.extra = EntryExtra()
        return self.extra

    @property
    def available(self) -> bool:
        """True when the value can be read now, in this process."""
        return self.state == INLINE or self.mapping is not None

    @property
    def locations(self) -> list[int]:
        """Nodes that have, or may have, a copy."""
        return [*(self.nodes or ()), *(self.left_at or ())]


def resident_of(entry: ObjectEntry) -> bytes:
    """Return the id of the object that is the resident part of a value of ours: it stays in the process that made
    it, and the value refers to it; b"" where the value is whole."""
    found = ident_of(entry.contained[-1]) if entry.contained else b""  # it is pickled last, in each life of the value
    return found if found.endswith(RESIDENT_INDEX) else b""


def ident_of(ref: Any) -> bytes:
    """Return the id of a ref inside a value; in a replay it is all that there is of the ref."""
    found: bytes = getattr(ref, "_id", ref)
    return found


def site_of(entry: ObjectEntry | None) -> str:
    """Return where the ref of an object was created, if that was recorded; else ""."""
    return "" if entry is None else entry.site


def note_site(entry: ObjectEntry | None, site: str) -> None:
    """Note where the ref of a borrowed object was created."""
    if entry is not None:
        entry.site = site


# ------------------------------------------------------------ value hints
# Values of borrowed objects that came with refs, until they are first awaited.
#
# A value that comes with its ref saves a request to the owner. But an object whose owner dies is lost to those who have
# not read it, and a ref that is not awaited is no read. So such a value counts once it is awaited, and is dropped with
# the death of the owner. The values of a driver count at once, as the job ends with it.


class ValueHints:
    """Part of `ObjectTable`.

    Args:
        entries: the table's objects.
        has_side_records: see `ObjectTable`.

    Attributes:
        unread: the values, by object. An object that is not pending, or whose owner was asked, does not need its own.
    """

    def __init__(self, entries: dict[bytes, ObjectEntry], has_side_records: set[bytes]) -> None:
        self.unread: dict[bytes, bytes] = {}
        self._entries = entries
        self._has_side_records = has_side_records

    def add(self, oid: bytes, value: bytes) -> None:
        """A ref to a pending object came with its value."""
        self.unread[oid] = value
        self._has_side_records.add(oid)

    def read(self, oids: Iterable[bytes]) -> None:
        """These objects are awaited: values that came with refs to them are theirs."""
        for oid in self.unread.keys() & oids:
            self.adopt(oid, self._entries[oid])

    def adopt(self, oid: bytes, entry: ObjectEntry) -> bool:
        """Give a pending object the value that came with a ref to it. Returns False where none came."""
        if entry.state != PENDING or entry.owner_asked or oid not in self.unread:
            return False
        entry.value = self.unread.pop(oid)
        entry.state = INLINE
        return True

    def forget(self, oid: bytes) -> None:
        """The object has gone, or is known otherwise."""
        self.unread.pop(oid, None)

    def owner_died(self, proc: bytes) -> None:
        """Drop what belonged to a dead process."""
        for oid in [oid for oid in self.unread if oid[:8] == proc]:
            del self.unread[oid]

    def check_invariants(self, me: bytes) -> None:
        """Raise AssertionError where a value is one of no ref."""
        for oid in self.unread:
            assert oid in self._has_side_records and oid in self._entries, ("a value for no ref", oid.hex())
            assert oid[:8] != me, ("a value of ours that came with a ref", oid.hex())
