"""How a reader gets at tensors on a device, and which memory of other processes it has mapped for them.

Pure: the caller holds its lock, and does what is returned.

Ways, from the cheapest: the same tensors (the same process); device memory of another process of this host, mapped
here, without a copy; a copy by UCX from a device to one of another host (`tensor_pulls`); a copy through the object
store of the host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

SAME_PROCESS, MAPPED, DIRECT, HOST = "same process", "mapped", "direct", "host"
DIRECT_SIZE = 128 << 10
"""Bytes from which on tensors pass directly: smaller ones come in the answer to the first message."""
IDLE_TIME = 10.0
"""Seconds for which a mapping without tensors stays: to open one costs milliseconds, and programs read again."""
IDLE_LIMIT = 64
"""Mappings without tensors that stay at most."""


class Place(NamedTuple):
    """A process that has tensors, or reads them.

    process: its id. host: identifies the running kernel, "" where that is not known. devices: those of the tensors, or
    all that the reader can map; empty: it has none, or no driver for them. wire: the UCX transports by which it sends
    device memory to other hosts, or receives it there, "" where it does not.
    """

    process: bytes
    host: str
    devices: Collection[str]
    wire: str = ""


class DeviceAllocation(NamedTuple):
    """Device memory of another process, of which tensors are parts.

    process: the one that allocated it. ident: its number there, never used again. device: where it is.
    """

    process: bytes
    ident: int
    device: str


def choose_way(
    source: Place, reader: Place, private: bool = False, size: int = DIRECT_SIZE, only_direct: bool = False
) -> str:
    """Return the way of tensors from their process to a reader.

    Args:
        private: whether the reader is to have a copy of the host's store. size: bytes of the tensors. only_direct:
            whether they pass directly, however few they are, and inside of a host too where they cannot be mapped.
    """
    if private:
        return HOST
    if source.process == reader.process:
        return SAME_PROCESS
    same_host = source.host and source.host == reader.host
    if source.devices and same_host and set(source.devices) <= set(reader.devices):
        return MAPPED
    can = bool(source.wire and source.wire == reader.wire and source.devices and reader.devices)
    pays = bool(source.host and reader.host and not same_host and size >= DIRECT_SIZE)
    return DIRECT if can and (pays or only_direct) else HOST


class _Mapping:
    __slots__ = ("idle_since", "pointer", "users")

    def __init__(self, pointer: int, now: float) -> None:
        self.pointer, self.idle_since, self.users = pointer, now, 0


class DeviceMappings:
    """The allocations of other processes that one process has mapped, each once, however many tensors are in it.

    A mapping is used by the tensors that were made from it, then idle for a while, then closed. What the caller is to
    close is returned as (allocation, pointer), and is not in the table any more.
    """

    def __init__(self) -> None:
        self._mappings: dict[DeviceAllocation, _Mapping] = {}

    def __len__(self) -> int:
        return len(self._mappings)

    def use(self, allocation: DeviceAllocation) -> int | None:
        """Return where the allocation is mapped, for one more user; None: the caller has to map it first."""
        found = self._mappings.get(allocation)
        if found is None:
            return None
        found.users += 1
        return found.pointer

    def opened(self, allocation: DeviceAllocation, pointer: int, now: float) -> None:
        """Add a mapping, without users so far.

        Raises:
            ValueError: the allocation is mapped already.
        """
        if allocation in self._mappings:
            raise ValueError(f"{allocation} is mapped already")
        self._mappings[allocation] = _Mapping(pointer, now)

    def unuse(self, allocation: DeviceAllocation, now: float) -> None:
        """Count one user less."""
        found = self._mappings[allocation]
        assert found.users > 0, "a mapping with fewer than no users"
        found.users -= 1
        found.idle_since = now

    def expire(self, now: float) -> list[tuple[DeviceAllocation, int]]:
        """Return the mappings to be closed now: those idle for long, or beyond the limit."""
        idle = [(item.idle_since, key) for key, item in self._mappings.items() if not item.users]
        idle.sort(key=lambda one: one[0])
        surplus = len(idle) - IDLE_LIMIT
        closed = [key for number, (since, key) in enumerate(idle) if number < surplus or now - since >= IDLE_TIME]
        return self._remove(closed)

    def clear(self) -> list[tuple[DeviceAllocation, int]]:
        """Return the mappings without users, to be closed as this process ends; the others end with it."""
        return self._remove([key for key, item in self._mappings.items() if not item.users])

    def _remove(self, keys: Iterable[DeviceAllocation]) -> list[tuple[DeviceAllocation, int]]:
        return [(key, self._mappings.pop(key).pointer) for key in keys]

    def check_invariants(self) -> None:
        """Raise AssertionError where a count is negative."""
        assert all(item.users >= 0 for item in self._mappings.values())


# ------------------------------------------------------------ export pool
# Which parts of the exportable memory of a device have copies of which tensors.
#
# Where other processes cannot map the memory that tensors are in, they are copied into memory that a process allocates
# for that: segments, each of which a reader maps once. Pure: the caller holds its lock, and does what is returned.

SEGMENT_SIZE = 64 << 20
"""Bytes of a segment; a larger block has one of its own."""
UNIT = 512
"""Blocks begin at multiples of this, as PyTorch's do."""
POOL_IDLE_TIME = 60.0
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
            number for number, one in self._segments.items() if one.is_empty and now - one.idle_since >= POOL_IDLE_TIME
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
