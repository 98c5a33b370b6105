"""Which ranges of arenas a process has registered with the driver of its devices, and which it gives up for others.

Pure: the caller holds its lock, and does what is returned.

A driver copies at full speed from and to memory that it has registered. It refuses a copy of which only a part is in
such memory (CUDA: "must be either entirely registered, or not registered at all"). So an arena is not registered in
place: each range is mapped once more, and that mapping is registered whole. What is read through it is registered, and
what is read through the arena's own mapping is not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

REGISTERED_SIZE = 1 << 20
"""Bytes of an object from which on registering pays off."""
GRANULE = 2 << 20
"""Ranges begin at multiples of this, and end there or at the end of their arena: what is allocated again in about the
same place is in the same range, and reserved huge pages are not divided."""
KEPT_TIME = 10.0
"""Seconds for which a range that was used makes no room for others: to register one costs as much as an ordinary copy,
so a program that uses more than the budget in turn would lose by it."""
_REMEMBERED = 256
"""Reads of which the range is remembered."""


class RegisteredRange:
    """A range of an arena, in bytes.

    Attributes:
        users: views of it, and copies under way. used_at: seconds. ready: whether it is registered, not about to be.
    """

    __slots__ = ("arena", "closing", "end", "ready", "start", "used_at", "users")

    def __init__(self, arena: Hashable, start: int, end: int, now: float) -> None:
        self.arena, self.start, self.end, self.used_at = arena, start, end, now
        self.users = 0
        self.ready = self.closing = False

    def contains(self, arena: Hashable, start: int, end: int) -> bool:
        """Return True if another range is a part of this one."""
        return self.arena == arena and self.start <= start and end <= self.end

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.start


class RegisteredRanges:
    """The registered ranges of one process. Times are in seconds.

    Args:
        budget: bytes of all of them.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._ranges: list[RegisteredRange] = []
        self._reads: OrderedDict[tuple[Hashable, int, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ranges)

    @property
    def total(self) -> int:
        """Bytes of all ranges, those about to be registered or closed included."""
        return sum(each.size for each in self._ranges)

    def use(self, arena: Hashable, start: int, end: int, now: float) -> RegisteredRange | None:
        """Return a registered range with these bytes, for one more user; None: there is none."""
        for each in self._ranges:
            if each.ready and each.contains(arena, start, end):
                each.users += 1
                each.used_at = now
                return each
        return None

    def note_read(self, arena: Hashable, start: int, end: int) -> bool:
        """Note that a program reads these bytes, whatever for.

        Returns:
            True at the second time and later. What is read once is not worth registering.
        """
        key = arena, start // GRANULE, -(-end // GRANULE)
        known = key in self._reads
        self._reads[key] = None
        self._reads.move_to_end(key)
        if len(self._reads) > _REMEMBERED:
            self._reads.popitem(last=False)
        return known

    def add(
        self, arena: Hashable, start: int, end: int, whole: int, now: float
    ) -> tuple[RegisteredRange, list[RegisteredRange]] | None:
        """Add a range with these bytes, which the caller is to register: `registered` or `failed` follows.

        Args:
            whole: bytes of the arena.

        Returns:
            The range, and those to be closed before: unused ones that it contains, and of others that were not used for
            a while the least recently used ones, as far as it needs room. None: there is no room, or another thread
            registers such a range.
        """
        if any(not each.ready and not each.closing and each.contains(arena, start, end) for each in self._ranges):
            return None
        made = RegisteredRange(arena, start // GRANULE * GRANULE, min(whole, -(-end // GRANULE) * GRANULE), now)
        unused = [each for each in self._ranges if each.ready and not each.users]
        closed = [each for each in unused if made.contains(each.arena, each.start, each.end)]
        room = self._budget - self.total + sum(each.size for each in closed)
        idle = (each for each in unused if each not in closed and now - each.used_at >= KEPT_TIME)
        others = sorted(idle, key=lambda each: each.used_at)
        while made.size > room:
            if not others:
                return None
            closed.append(others.pop(0))
            room += closed[-1].size
        for each in closed:
            self._ranges.remove(each)
        self._ranges.append(made)
        return made, closed

    def registered(self, made: RegisteredRange) -> bool:
        """The range is registered.

        Returns:
            False: its arena was forgotten meanwhile, and the caller is to close it.
        """
        if made.closing:
            self._ranges.remove(made)
            return False
        made.ready = True
        return True

    def failed(self, made: RegisteredRange) -> None:
        """The range could not be registered."""
        self._ranges.remove(made)

    def unuse(self, found: RegisteredRange) -> bool:
        """Count one user less.

        Returns:
            True: the caller is to close it now.
        """
        assert found.users > 0, "a range with fewer than no users"
        found.users -= 1
        if not found.closing or found.users:
            return False
        self._ranges.remove(found)
        return True

    def forget(self, arena: Hashable) -> list[RegisteredRange]:
        """An arena is unmapped. Returns the ranges to be closed now; the others are when their users are gone."""
        for key in [key for key in self._reads if key[0] == arena]:
            del self._reads[key]
        closed = []
        for each in [each for each in self._ranges if each.arena == arena]:
            if each.ready and not each.users:
                closed.append(each)
                self._ranges.remove(each)
            each.ready, each.closing = False, True
        return closed

    def clear(self) -> list[RegisteredRange]:
        """Return all registered ranges, used or not, to be closed as this process ends. None is left."""
        closed = [each for each in self._ranges if each.ready or each.users]
        self._ranges.clear()
        return closed

    def check_invariants(self) -> None:
        """Raise AssertionError where the budget is exceeded, or a range is out of order."""
        assert self.total <= self._budget, (self.total, self._budget)
        for each in self._ranges:
            assert each.start < each.end and each.users >= 0 and not (each.ready and each.closing), each
            assert each.ready or each.closing or not each.users, "a range is used before it is registered"
