"""Which pulls are under way and which wait: what is asked for most urgently comes first."""

from __future__ import annotations

from hpcray.core.store.objects import StoredObject

TOGETHER = 4
"""So many pulls are always under way: one slow source must not hold up the others."""
LIMIT = 256 << 20
"""More are, while their objects have fewer bytes than this."""


URGENCIES = 3
"""Priorities go from 0, the most urgent, to one less than this."""


class Admission:
    """The pulls of one node, by priority, oldest first.

    A pull that is not admitted has no block and no receive. Those of lower priority do not count against others, so a
    `get` never waits for what is fetched ahead. Whoever is admitted may still wait for a block; the caller serves those
    requests by priority, too.
    """

    def __init__(self) -> None:
        self._active: dict[bytes, StoredObject] = {}
        self._count = [0] * URGENCIES
        self._bytes = [0] * URGENCIES
        self._waiting: list[dict[bytes, StoredObject]] = [{} for _ in range(URGENCIES)]

    def ask(self, obj: StoredObject) -> bool:
        """Whether the pull may begin now; if not, `ready` gives it later."""
        if self._may_begin(obj.priority) and not any(self._waiting[: obj.priority + 1]):
            self._begin(obj)
            return True
        self._waiting[obj.priority][obj.id] = obj
        return False

    def hurry(self, obj: StoredObject, priority: int) -> None:
        """Somebody needs the object more urgently than was known."""
        if priority >= obj.priority:
            return
        if self._active.get(obj.id) is obj:
            self._end(obj)
            obj.priority = priority
            self._begin(obj)
        elif self._waiting[obj.priority].pop(obj.id, None) is not None:
            self._waiting[priority][obj.id] = obj
        obj.priority = priority

    def ready(self) -> StoredObject | None:
        """A pull that may begin now and did not before."""
        for priority, queue in enumerate(self._waiting):
            if queue:
                if not self._may_begin(priority):
                    return None
                obj = queue.pop(next(iter(queue)))
                self._begin(obj)
                return obj
        return None

    def leave(self, obj: StoredObject) -> None:
        """It is here, or will not come."""
        if self._active.get(obj.id) is obj:
            self._end(obj)
        else:
            self._waiting[obj.priority].pop(obj.id, None)

    def coming(self) -> int:
        """Bytes of the objects that have a block already and are on their way."""
        return sum(obj.size for obj in self._active.values() if obj.offset >= 0)

    def __len__(self) -> int:
        """How many wait for their turn."""
        return sum(map(len, self._waiting))

    def _begin(self, obj: StoredObject) -> None:
        self._active[obj.id] = obj
        self._count[obj.priority] += 1
        self._bytes[obj.priority] += obj.size

    def _end(self, obj: StoredObject) -> None:
        del self._active[obj.id]
        self._count[obj.priority] -= 1
        self._bytes[obj.priority] -= obj.size

    def _may_begin(self, priority: int) -> bool:
        return sum(self._count[: priority + 1]) < TOGETHER or sum(self._bytes[: priority + 1]) < LIMIT
