"""The tensors that one process keeps for its device objects: which object has which, and which have been exported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class DeviceObject:
    """The tensors of one value.

    value: id of the object whose value they belong to; b"" where it was put, and is owned by this process itself.
    sizes: bytes by device, as in `cuda:0`.
    """

    __slots__ = ("sizes", "tensors", "value")

    def __init__(self, tensors: Sequence[Any], value: bytes, sizes: Mapping[str, int]) -> None:
        self.tensors, self.value, self.sizes = tensors, value, sizes


class DeviceObjectTable:
    """Tensors by the id of their object. Pure: the caller holds its lock.

    Attributes:
        exported: the objects whose tensors have been copied for readers in other processes.
    """

    def __init__(self) -> None:
        self.exported: set[bytes] = set()
        self._objects: dict[bytes, DeviceObject] = {}
        self._held: dict[int, int] = {}  # identity of a tensor to the number of objects that have it

    def add(
        self, oid: bytes, tensors: Sequence[Any], value: bytes = b"", sizes: Mapping[str, int] | None = None
    ) -> None:
        """Keep the tensors of an object until it is freed. Arguments: see `DeviceObject`."""
        self._objects[oid] = DeviceObject(tensors, value, sizes or {})
        for tensor in tensors:
            self._held[id(tensor)] = self._held.get(id(tensor), 0) + 1

    def find(self, oid: bytes) -> Sequence[Any] | None:
        """Return the tensors of an object; None where this process has none."""
        found = self._objects.get(oid)
        return None if found is None else found.tensors

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
            for device, size in found.sizes.items():
                count, total = sums.get(device, (0, 0))
                sums[device] = count + 1, total + size
        return sums

    def note_export(self, oid: bytes) -> None:
        """Note that the tensors of an object have been copied for readers in other processes."""
        if oid in self._objects:
            self.exported.add(oid)

    def remove(self, oid: bytes) -> None:
        """Drop the tensors of an object that is freed."""
        self.exported.discard(oid)
        found = self._objects.pop(oid, None)
        for tensor in () if found is None else found.tensors:
            left = self._held[id(tensor)] - 1
            if left:
                self._held[id(tensor)] = left
            else:
                del self._held[id(tensor)]

    def check_invariants(self) -> None:
        """Raise AssertionError where the counts are not those of the tensors, or an export has no object."""
        counts: dict[int, int] = {}
        for found in self._objects.values():
            for tensor in found.tensors:
                counts[id(tensor)] = counts.get(id(tensor), 0) + 1
        assert counts == self._held, (counts, self._held)
        assert self.exported <= self._objects.keys(), "an export of an unknown object"
