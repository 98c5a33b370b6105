"""The room of a node store: its blocks, the requests that wait for one, and the objects that may make way."""

from __future__ import annotations

from collections.abc import Callable

from hpcray.core.effects import Effect
from hpcray.core.store.allocator import Allocator
from hpcray.core.store.objects import StoredObject


class Space:
    """An allocator with a queue in front; it evicts what can be had again, least recently used first.

    Args:
        size: bytes of the arena.
        patience: seconds for which small requests may overtake one that does not fit.
        evict: called with each object that must give up its block; it does so by calling `withdraw`.
        placed: called with each object that got its block.

    Attributes:
        waiting: requests without a block, oldest first.
        changed: there may be room now for one of them.
    """

    def __init__(
        self,
        size: int,
        patience: float,
        evict: Callable[[StoredObject, list[Effect]], None],
        placed: Callable[[StoredObject, list[Effect]], None],
    ) -> None:
        self.blocks = Allocator(size)
        self.waiting: dict[bytes, StoredObject] = {}
        self.changed = False
        self.evictable_bytes = 0
        self.evicted = 0
        self._evictable: dict[bytes, StoredObject] = {}
        self._patience = patience
        self._evict = evict
        self._placed = placed

    def place(self, now: float, obj: StoredObject, out: list[Effect]) -> None:
        """Give an object its block, now or when there is room; earlier requests are served first."""
        if self.waiting:
            self.waiting[obj.id] = obj
            self.serve(now, out)
        elif not self._allocate(obj, out):
            self.waiting[obj.id] = obj

    def serve(self, now: float, out: list[Effect]) -> None:
        """Serve waiting requests, the most urgent first and of these the oldest. A small one may overtake a large one
        that does not fit, but only until the large one has waited for `patience`: then room is kept for it."""
        self.changed = False
        for obj in sorted(self.waiting.values(), key=_urgency):
            if obj.id not in self.waiting:
                continue
            if self._allocate(obj, out):
                self.waiting.pop(obj.id, None)
            elif now - obj.since >= self._patience:
                break

    def withdraw(self, obj: StoredObject) -> None:
        """The object gives up its block or its place in the queue, if it has one."""
        self.keep(obj)
        self.waiting.pop(obj.id, None)
        if obj.offset >= 0:
            self.blocks.free(obj.offset)
            obj.offset = -1
        self.changed = bool(self.waiting)

    def give_back(self, obj: StoredObject) -> None:
        """The block of an object that the store has forgotten is not read any more."""
        self.blocks.free(obj.offset)
        self.changed = bool(self.waiting)

    def may_evict(self, obj: StoredObject) -> None:
        """Nobody reads this object any more, and its bytes are elsewhere too; somebody read it until now."""
        self._evictable[obj.id] = obj
        self.evictable_bytes += obj.size
        self.changed = bool(self.waiting)

    def keep(self, obj: StoredObject) -> None:
        """The object is in use (or gone): it must not be evicted."""
        if self._evictable.pop(obj.id, None) is not None:
            self.evictable_bytes -= obj.size

    def has_room(self, size: int) -> bool:
        """Whether a request would probably be served at once."""
        return not self.waiting and self.blocks.free_bytes + self.evictable_bytes >= size

    def can_evict(self, obj: StoredObject) -> bool:
        """Whether its block can be had at once."""
        return obj.id in self._evictable

    def _allocate(self, obj: StoredObject, out: list[Effect]) -> bool:
        """Give it a block; objects are evicted only where that can be enough."""
        size = obj.size
        offset = self.blocks.allocate(size)
        if offset is None and self.blocks.free_bytes + self.evictable_bytes >= size:
            while offset is None and self._evictable:
                self.evicted += 1
                self._evict(next(iter(self._evictable.values())), out)
                offset = self.blocks.allocate(size)
        if offset is None:
            return False
        obj.offset = offset
        self._placed(obj, out)
        return True


def _urgency(obj: StoredObject) -> int:
    return obj.priority
