"""The tensors that one process keeps for its device objects: which object has which, and which have been exported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class DeviceObjectTable:
    """Tensors by the id of their object. Pure: the caller holds its lock.

    Attributes:
        exported: the objects whose tensors have been copied for readers in other processes.
    """

    def __init__(self) -> None:
        self.exported: set[bytes] = set()
        self._tensors: dict[bytes, Sequence[Any]] = {}
        self._held: dict[int, int] = {}  # identity of a tensor to the number of objects that have it

    def add(self, oid: bytes, tensors: Sequence[Any]) -> None:
        """Keep the tensors of an object until it is freed."""
        self._tensors[oid] = tensors
        for tensor in tensors:
            self._held[id(tensor)] = self._held.get(id(tensor), 0) + 1

    def find(self, oid: bytes) -> Sequence[Any] | None:
        """Return the tensors of an object; None where this process has none."""
        return self._tensors.get(oid)

    def holds(self, tensor: Any) -> bool:
        """Return True while an object has this tensor."""
        return id(tensor) in self._held

    def note_export(self, oid: bytes) -> None:
        """Note that the tensors of an object have been copied for readers in other processes."""
        if oid in self._tensors:
            self.exported.add(oid)

    def remove(self, oid: bytes) -> None:
        """Drop the tensors of an object that is freed."""
        self.exported.discard(oid)
        for tensor in self._tensors.pop(oid, ()):
            left = self._held[id(tensor)] - 1
            if left:
                self._held[id(tensor)] = left
            else:
                del self._held[id(tensor)]

    def check_invariants(self) -> None:
        """Raise AssertionError where the counts are not those of the tensors, or an export has no object."""
        counts: dict[int, int] = {}
        for tensors in self._tensors.values():
            for tensor in tensors:
                counts[id(tensor)] = counts.get(id(tensor), 0) + 1
        assert counts == self._held, (counts, self._held)
        assert self.exported <= self._tensors.keys(), "an export of an unknown object"
