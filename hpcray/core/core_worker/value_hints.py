"""Values of borrowed objects that came with refs, until they are first awaited.

A value that comes with its ref saves a request to the owner. But an object whose owner dies is lost to those who have
not read it, and a ref that is not awaited is no read. So such a value counts once it is awaited, and is dropped with
the death of the owner. The values of a driver count at once, as the job ends with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpcray.core.core_worker.object_entry import INLINE, PENDING, ObjectEntry


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
