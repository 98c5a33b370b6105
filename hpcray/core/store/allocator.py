"""Where objects lie in the arena.

First-touched memory is ten to sixty times slower to fill than memory that was written before, so free space comes in
two kinds: *warm* blocks (below the high-water mark: they held an object once) and the untouched rest. Requests take
the warm block that fits best, and only then grow the high-water mark.
"""

from __future__ import annotations

from bisect import bisect_left, insort

ALIGN = 64
PAGE = 4096
LARGE = 1 << 20

_SHIFT = 48
_LOW = (1 << _SHIFT) - 1


def _rounded(size: int) -> int:
    if size >= LARGE:
        return (size + PAGE - 1) // PAGE * PAGE
    return (size + ALIGN - 1) // ALIGN * ALIGN or ALIGN


class Allocator:
    """Best-fit over warm free blocks first, then untouched space; neighbours coalesce.

    Offsets are multiples of 64; those of blocks of 1 MiB or more are multiples of 4096. Sizes are rounded up
    likewise. Costs O(log n) comparisons plus one short list shift per call, n being the number of free blocks.

    Args:
        size: bytes of the arena, at most 2**48; what is beyond the last multiple of 64 is not used.
    """

    __slots__ = ("_by_end", "_by_size", "_by_start", "_high", "_live", "_size", "_used")

    def __init__(self, size: int) -> None:
        if not 0 < size <= 1 << _SHIFT:
            raise ValueError(f"arena size {size} is out of range 1..2**{_SHIFT}")
        self._size = size // ALIGN * ALIGN
        self._high = 0
        self._used = 0
        self._live: dict[int, int] = {}
        # Free warm blocks, three ways: start -> size, end -> start, and sorted keys (size << 48 | start).
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        self._by_size: list[int] = []

    @property
    def size(self) -> int:
        """Bytes that can be handed out."""
        return self._size

    @property
    def used(self) -> int:
        """Bytes handed out, rounding included."""
        return self._used

    @property
    def free_bytes(self) -> int:
        """Bytes not handed out, in however many pieces."""
        return self._size - self._used

    @property
    def high_water(self) -> int:
        """End of the memory that was ever handed out. It never sinks."""
        return self._high

    @property
    def largest_free(self) -> int:
        """Length of the longest free run. A block of 1 MiB or more may lose up to a page of it to alignment."""
        tail = self._size - self._tail_start()
        return max(tail, self._by_size[-1] >> _SHIFT) if self._by_size else tail

    def could_hold(self, size: int) -> bool:
        """Whether a block of this size would fit if nothing else were here."""
        return _rounded(size) <= self._size

    def allocate(self, size: int) -> int | None:
        """Offset of a block of at least `size` bytes, or None where no free run is long enough."""
        size = _rounded(size)
        start = self._take_warm_aligned(size) if size >= LARGE else self._take_warm(size)
        if start is None:
            start = self._grow(size)
            if start is None:
                return None
        self._live[start] = size
        self._used += size
        return start

    def free(self, offset: int) -> None:
        """Give a block back.

        Raises:
            ValueError: no block was handed out at this offset (or it was freed before); nothing changed.
        """
        size = self._live.pop(offset, None)
        if size is None:
            raise ValueError(f"no allocated block starts at offset {offset}")
        self._used -= size
        end = offset + size
        left = self._by_end.get(offset)
        if left is not None:
            self._remove(left, offset - left)
            offset = left
        right = self._by_start.get(end)
        if right is not None:
            self._remove(end, right)
            end += right
        self._insert(offset, end - offset)

    def _take_warm(self, size: int) -> int | None:
        at = bisect_left(self._by_size, size << _SHIFT)
        if at == len(self._by_size):
            return None
        key = self._by_size[at]
        start, have = key & _LOW, key >> _SHIFT
        self._remove(start, have)
        if have > size:
            self._insert(start + size, have - size)
        return start

    def _take_warm_aligned(self, size: int) -> int | None:
        for at in range(bisect_left(self._by_size, size << _SHIFT), len(self._by_size)):
            key = self._by_size[at]
            block, have = key & _LOW, key >> _SHIFT
            start = (block + PAGE - 1) // PAGE * PAGE
            rest = block + have - start - size
            if rest >= 0:
                self._remove(block, have)
                if start > block:
                    self._insert(block, start - block)
                if rest:
                    self._insert(start + size, rest)
                return start
        return None

    def _tail_start(self) -> int:
        """Start of the free run at the arena's end: the untouched space and the warm block just below it."""
        return self._by_end.get(self._high, self._high)

    def _grow(self, size: int) -> int | None:
        tail = self._tail_start()
        start = (tail + PAGE - 1) // PAGE * PAGE if size >= LARGE else tail
        if start + size > self._size:
            return None
        if tail < self._high:
            self._remove(tail, self._high - tail)
        if start > tail:
            self._insert(tail, start - tail)
        self._high = start + size
        return start

    def _insert(self, start: int, size: int) -> None:
        self._by_start[start] = size
        self._by_end[start + size] = start
        insort(self._by_size, size << _SHIFT | start)

    def _remove(self, start: int, size: int) -> None:
        del self._by_start[start]
        del self._by_end[start + size]
        del self._by_size[bisect_left(self._by_size, size << _SHIFT | start)]
