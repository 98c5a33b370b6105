"""The tensors that one process keeps for its device objects: which object has which, which have been exported, and
which move to the object store when there are too many on a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class DeviceObject:
    """The tensors of one value.

    value: id of the object whose value they belong to; b"" where it was put, and is owned by this process itself.
    sizes: bytes by device, as in `cuda:0`. tensors: None where they have moved to the object store. fixed: whether they
    never move. readers: the processes that have mapped them, with the number of times. has_moved: whether they have
    moved once: no other process may map them any more, as it knows where they were before.
    """

    __slots__ = ("fixed", "has_moved", "readers", "sizes", "tensors", "value")

    def __init__(self, tensors: Sequence[Any], value: bytes, sizes: Mapping[str, int], fixed: bool) -> None:
        self.tensors: Sequence[Any] | None = tensors
        self.value, self.sizes, self.fixed = value, sizes, fixed
        self.readers: dict[bytes, int] = {}
        self.has_moved = False


class DeviceObjectTable:
    """Tensors by the id of their object, the least recently used ones first. Pure: the caller holds its lock.

    Args:
        moves: whether tensors move to the object store, and what is used last matters.

    Attributes:
        exported: the objects whose tensors have been copied for readers in other processes.
    """

    def __init__(self, moves: bool = False) -> None:
        self.exported: set[bytes] = set()
        self.moves = moves
        self._objects: dict[bytes, DeviceObject] = {}
        self._held: dict[int, int] = {}  # identity of a tensor to the number of objects that have it

    def add(
        self,
        oid: bytes,
        tensors: Sequence[Any],
        value: bytes = b"",
        sizes: Mapping[str, int] | None = None,
        fixed: bool = False,
    ) -> None:
        """Keep the tensors of an object until it is freed. Arguments: see `DeviceObject`."""
        self._objects[oid] = DeviceObject(tensors, value, sizes or {}, fixed)
        self._hold(tensors)

    def find(self, oid: bytes) -> Sequence[Any] | None:
        """Return the tensors of an object, which is the last one used now; None where this process has none."""
        found = self._objects.get(oid)
        if found is None:
            return None
        if self.moves:
            del self._objects[oid]
            self._objects[oid] = found
        return found.tensors

    def has_moved_out(self, oid: bytes) -> bool:
        """Return True if the tensors of an object of this process are in the object store instead."""
        found = self._objects.get(oid)
        return found is not None and found.tensors is None

    def note_reader(self, oid: bytes, reader: bytes) -> bool:
        """Another process is about to map the tensors of an object.

        Returns:
            True: they stay where they are until `end_reader`. False: they are not there any more.
        """
        found = self._objects.get(oid)
        if found is None or found.has_moved:
            return False
        found.readers[reader] = found.readers.get(reader, 0) + 1
        return True

    def end_reader(self, oid: bytes, reader: bytes) -> None:
        """A process that has mapped the tensors of an object has unmapped them."""
        found = self._objects.get(oid)
        count = 0 if found is None else found.readers.get(reader, 0)
        if found is None or not count:
            return
        if count > 1:
            found.readers[reader] = count - 1
        else:
            del found.readers[reader]

    def process_died(self, reader: bytes) -> None:
        """A process is gone, with all that it has mapped."""
        for found in self._objects.values():
            found.readers.pop(reader, None)

    def surplus(self, limit: int, wanted: Mapping[str, int] | None = None, kept: bytes = b"") -> list[bytes]:
        """Return the objects that may move to the object store to make room, the least recently used ones first.

        Args:
            limit: bytes on each device. wanted: further bytes by device that are to be there. kept: an object that
                stays.

        Returns:
            As many as are needed where all of them do move. Those that cannot are followed by others.
        """
        over = {device: size - limit for device, (_, size) in self.totals().items()}
        for device, size in (wanted or {}).items():
            over[device] = over.get(device, -limit) + size
        return [
            oid
            for oid, each in self._objects.items()
            if oid != kept
            and self.may_move(oid)
            and any(over[device] > 0 and size for device, size in each.sizes.items())
        ]

    def is_over(self, limit: int, wanted: Mapping[str, int] | None = None) -> bool:
        """Return True if there is a device with more than `limit` bytes, `wanted` included."""
        totals = self.totals()
        return any(
            totals.get(device, (0, 0))[1] + (wanted or {}).get(device, 0) > limit
            for device in {*totals, *(wanted or {})}
        )

    def may_move(self, oid: bytes) -> bool:
        """Return True if the tensors of an object are here, and no other process has mapped them."""
        found = self._objects.get(oid)
        return found is not None and found.tensors is not None and not found.fixed and not found.readers

    def move_out(self, oid: bytes) -> None:
        """Forget the tensors of an object: they are in the object store."""
        found = self._objects[oid]
        assert self.may_move(oid), "tensors that others have mapped stay"
        tensors, found.tensors, found.has_moved = found.tensors, None, True
        self._unhold(tensors or ())

    def move_back(self, oid: bytes, tensors: Sequence[Any]) -> Sequence[Any]:
        """The tensors of an object have been read from the object store. Returns those that it has now: others, where
        another thread has read them as well."""
        found = self._objects.get(oid)
        if found is None:
            return tensors
        if found.tensors is None:
            found.tensors = tensors
            self._hold(tensors)
        return found.tensors

    def sizes(self, oid: bytes) -> Mapping[str, int]:
        """Return the bytes of an object by device, wherever its tensors are."""
        found = self._objects.get(oid)
        return {} if found is None else found.sizes

    def holds(self, tensor: Any) -> bool:
        """Return True while an object has this tensor."""
        return id(tensor) in self._held

    def returned(self) -> Iterator[tuple[bytes, bytes]]:
        """The objects with the tensors of values that other processes own, and the ids of these values."""
        for oid, found in self._objects.items():
            if found.value:
                yield oid, found.value

    def totals(self) -> dict[str, tuple[int, int]]:
        """By device: the number of objects with tensors there, and their bytes. Memory of two objects counts twice."""
        sums: dict[str, tuple[int, int]] = {}
        for found in self._objects.values():
            for device, size in found.sizes.items() if found.tensors is not None else ():
                count, total = sums.get(device, (0, 0))
                sums[device] = count + 1, total + size
        return sums

    def note_export(self, oid: bytes) -> None:
        """Note that the tensors of an object have been copied for readers in other processes."""
        if oid in self._objects:
            self.exported.add(oid)

    def export_failed(self, oid: bytes) -> None:
        """The tensors of an object have not been copied for readers, after all."""
        self.exported.discard(oid)

    def remove(self, oid: bytes) -> None:
        """Drop the tensors of an object that is freed."""
        self.exported.discard(oid)
        found = self._objects.pop(oid, None)
        if found is not None and found.tensors is not None:
            self._unhold(found.tensors)

    def _hold(self, tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            self._held[id(tensor)] = self._held.get(id(tensor), 0) + 1

    def _unhold(self, tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            left = self._held[id(tensor)] - 1
            if left:
                self._held[id(tensor)] = left
            else:
                del self._held[id(tensor)]

    def check_invariants(self) -> None:
        """Raise AssertionError where the counts are not those of the tensors, or an export has no object."""
        counts: dict[int, int] = {}
        for found in self._objects.values():
            assert found.tensors is not None or (found.has_moved and not found.readers), "tensors moved that are read"
            for tensor in found.tensors or ():
                counts[id(tensor)] = counts.get(id(tensor), 0) + 1
        assert counts == self._held, (counts, self._held)
        assert self.exported <= self._objects.keys(), "an export of an unknown object"
