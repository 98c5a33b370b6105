"""Which parts of the exportable memory of a device have copies of which tensors.

Where other processes cannot map the memory that tensors are in, they are copied into memory that a process allocates
for that: segments, each of which a reader maps once. Pure: the caller holds its lock, and does what is returned.
"""

from __future__ import annotations

from typing import NamedTuple

SEGMENT_SIZE = 64 << 20
"""Bytes of a segment; a larger block has one of its own."""
UNIT = 512
"""Blocks begin at multiples of this, as PyTorch's do."""
IDLE_TIME = 60.0
"""Seconds after which a segment without blocks is freed: longer than readers keep mappings that they do not use."""


class PoolBlock(NamedTuple):
    """A part of a segment. segment: its number, never used again. offset, size: in bytes."""

    segment: int
    offset: int
    size: int


class _PoolSegment:
    __slots__ = ("free", "idle_since", "size")

    def __init__(self, size: int, now: float) -> None:
        self.size, self.idle_since = size, now
        self.free = [(0, size)]
        """Offset and size of what is free, by offset; no two of them touch."""

    @property
    def is_empty(self) -> bool:
        return self.free == [(0, self.size)]


def segment_size(size: int) -> int:
    """Return the bytes of a new segment for a block of `size` bytes."""
    return max(SEGMENT_SIZE, -(-size // UNIT) * UNIT)


class ExportPool:
    """The segments of one device, and their blocks: first fit. Times are in seconds."""

    def __init__(self) -> None:
        self._segments: dict[int, _PoolSegment] = {}

    def __len__(self) -> int:
        return len(self._segments)

    def allocate(self, size: int) -> PoolBlock | None:
        """Return a block; None: the caller has to add a segment of `segment_size(size)` bytes first."""
        needed = max(UNIT, -(-size // UNIT) * UNIT)
        for number, segment in self._segments.items():
            for at, (offset, length) in enumerate(segment.free):
                if length >= needed:
                    segment.free[at : at + 1] = [(offset + needed, length - needed)] if length > needed else []
                    return PoolBlock(number, offset, needed)
        return None

    def add(self, number: int, size: int, now: float) -> None:
        """Add a segment that was allocated.

        Raises:
            ValueError: there is one of this number.
        """
        if number in self._segments:
            raise ValueError(f"there is a segment {number}")
        self._segments[number] = _PoolSegment(size, now)

    def free(self, block: PoolBlock, now: float) -> None:
        """Take a block back that no reader uses any more."""
        segment = self._segments[block.segment]
        start, end = block.offset, block.offset + block.size
        kept = []
        for offset, length in segment.free:
            assert offset + length <= start or end <= offset, "a block was freed twice"
            if offset + length == start:
                start = offset
            elif offset == end:
                end += length
            else:
                kept.append((offset, length))
        segment.free = sorted([*kept, (start, end - start)])
        if segment.is_empty:
            segment.idle_since = now

    def expire(self, now: float) -> list[int]:
        """Return the numbers of segments that the caller is to free: they have been empty for long."""
        closed = [
            number for number, one in self._segments.items() if one.is_empty and now - one.idle_since >= IDLE_TIME
        ]
        for number in closed:
            del self._segments[number]
        return closed

    def check_invariants(self) -> None:
        """Raise AssertionError where free parts overlap, touch or leave their segment."""
        for segment in self._segments.values():
            end = -1
            for offset, length in segment.free:
                assert length > 0 and offset > end and offset + length <= segment.size, segment.free
                assert offset % UNIT == 0
                end = offset + length
