"""Bytes that exist only once they are written."""

from __future__ import annotations

from abc import ABC, abstractmethod


class DeferredBytes(ABC):
    """Bytes that a value has elsewhere, as on a device. The writer of the value says where they are to be copied to.

    Attributes:
        nbytes: their number.
    """

    nbytes: int

    @abstractmethod
    def copy_to(self, memory: memoryview) -> None:
        """Write the bytes into `memory`, which has room for exactly these. Returns when they are there."""
