"""Which pulls are under way and which wait: what is asked for most urgently comes first."""

from __future__ import annotations

from hpcray.core.store.objects import StoredObject

TOGETHER = 4
"""So many pulls are always under way: one slow source must not hold up the others."""
LIMIT = 256 << 20
"""More are, while their objects have fewer bytes than this."""


class Admission:
    """The pulls of one node, by priority (0 is the most urgent), oldest first.

    A pull that is not admitted has no block and no receive. Those of lower priority do not count against others, so a
    `get` never waits for what is fetched ahead. Whoever is admitted may still wait for a block; the caller serves those
    requests by priority, too.
    """

    def __init__(self) -> None:
        self._active: dict[bytes, StoredObject] = {}
        self._waiting: dict[bytes, StoredObject] = {}

    def ask(self, obj: StoredObject) -> bool:
        """Whether the pull may begin now; if not, `ready` gives it later."""
        if self._may_begin(obj.priority) and not any(o.priority <= obj.priority for o in self._waiting.values()):
            self._active[obj.id] = obj
            return True
        self._waiting[obj.id] = obj
        return False

    def ready(self) -> StoredObject | None:
        """A pull that may begin now and did not before."""
        if not self._waiting:
            return None
        obj = min(self._waiting.values(), key=lambda obj: obj.priority)
        if not self._may_begin(obj.priority):
            return None
        self._active[obj.id] = self._waiting.pop(obj.id)
        return obj

    def leave(self, obj: StoredObject) -> None:
        """It is here, or will not come."""
        for book in (self._active, self._waiting):
            if book.get(obj.id) is obj:
                del book[obj.id]

    def coming(self) -> int:
        """Bytes of the objects that have a block already and are on their way."""
        return sum(obj.size for obj in self._active.values() if obj.offset >= 0)

    def __len__(self) -> int:
        """How many wait for their turn."""
        return len(self._waiting)

    def _may_begin(self, priority: int) -> bool:
        count = size = 0
        for obj in self._active.values():
            if obj.priority <= priority:
                count += 1
                size += obj.size
        return count < TOGETHER or size < LIMIT
