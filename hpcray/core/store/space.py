"""The room of a node store: its blocks, and the copies that may make way for a new object."""

from __future__ import annotations

from collections.abc import Callable

from hpcray.core.store.allocator import Allocator
from hpcray.core.store.objects import StoredObject


class Space:
    """An allocator that evicts, least recently used first.

    Args:
        size: bytes of the arena.
        evict: called with each copy that must go; it takes the copy out of the store by calling `release`.
    """

    def __init__(self, size: int, evict: Callable[[StoredObject], None]) -> None:
        self.blocks = Allocator(size)
        self.evictable_bytes = 0
        self.evicted = 0
        self._evictable: dict[bytes, StoredObject] = {}
        self._evict = evict

    def allocate(self, size: int) -> int | None:
        """Offset of a block; copies are evicted only where that can be enough."""
        offset = self.blocks.allocate(size)
        if offset is None and self.blocks.free_bytes + self.evictable_bytes >= size:
            while offset is None and self._evictable:
                self.evicted += 1
                self._evict(next(iter(self._evictable.values())))
                offset = self.blocks.allocate(size)
        return offset

    def release(self, obj: StoredObject) -> None:
        """Give the object's block back, if it has one."""
        self.keep(obj)
        if obj.offset >= 0:
            self.blocks.free(obj.offset)
            obj.offset = -1

    def may_evict(self, obj: StoredObject) -> None:
        """Nobody reads this copy any more; somebody did until now."""
        self._evictable[obj.id] = obj
        self.evictable_bytes += obj.size

    def keep(self, obj: StoredObject) -> None:
        """The object is in use (or gone): it must not be evicted."""
        if self._evictable.pop(obj.id, None) is not None:
            self.evictable_bytes -= obj.size

    def __contains__(self, obj: StoredObject) -> bool:
        """Whether the object holds a block that cannot be had by eviction."""
        return obj.offset >= 0 and obj.id not in self._evictable
