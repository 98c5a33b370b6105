"""The arena's space: where objects lie in it, which may be evicted, and the requests for a block that wait for room.

First-touched memory is ten to sixty times slower to fill than memory that was written before, so free space comes in
two kinds: *warm* blocks (below the high-water mark: they held an object once) and the untouched rest. Requests take
the warm block that fits best, and only then grow the high-water mark.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from hpcray.common.ids import owner_of, show_proc
from hpcray.core.object_store.stored_object import StoredObject, StoredObjectState

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
    """Best-fit over warm free blocks first, then untouched space; neighbors coalesce.

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
        """True if a block of this size would fit if nothing else were here."""
        return _rounded(size) <= self._size

    def fits(self, size: int) -> bool:
        """True if a block of this size can be allocated now."""
        size = _rounded(size)
        align = PAGE if size >= LARGE else ALIGN
        tail = self._tail_start()
        starts = [(start, start + have) for start, have in self._by_start.items()] + [(tail, self._size)]
        return any((start + align - 1) // align * align + size <= end for start, end in starts)

    def allocate(self, size: int) -> int | None:
        """Offset of a block of at least `size` bytes, or None where no free run is long enough."""
        size = _rounded(size)
        start = self._allocate_warm_aligned(size) if size >= LARGE else self._allocate_warm(size)
        if start is None:
            start = self._allocate_untouched(size)
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
            self._remove_free(left, offset - left)
            offset = left
        right = self._by_start.get(end)
        if right is not None:
            self._remove_free(end, right)
            end += right
        self._add_free(offset, end - offset)

    def _allocate_warm(self, size: int) -> int | None:
        at = bisect_left(self._by_size, size << _SHIFT)
        if at == len(self._by_size):
            return None
        key = self._by_size[at]
        start, have = key & _LOW, key >> _SHIFT
        self._remove_free(start, have)
        if have > size:
            self._add_free(start + size, have - size)
        return start

    def _allocate_warm_aligned(self, size: int) -> int | None:
        for at in range(bisect_left(self._by_size, size << _SHIFT), len(self._by_size)):
            key = self._by_size[at]
            block, have = key & _LOW, key >> _SHIFT
            start = (block + PAGE - 1) // PAGE * PAGE
            rest = block + have - start - size
            if rest >= 0:
                self._remove_free(block, have)
                if start > block:
                    self._add_free(block, start - block)
                if rest:
                    self._add_free(start + size, rest)
                return start
        return None

    def _tail_start(self) -> int:
        """Start of the free run at the arena's end: the untouched space and the warm block just below it."""
        return self._by_end.get(self._high, self._high)

    def _allocate_untouched(self, size: int) -> int | None:
        tail = self._tail_start()
        start = (tail + PAGE - 1) // PAGE * PAGE if size >= LARGE else tail
        if start + size > self._size:
            return None
        if tail < self._high:
            self._remove_free(tail, self._high - tail)
        if start > tail:
            self._add_free(tail, start - tail)
        self._high = start + size
        return start

    def _add_free(self, start: int, size: int) -> None:
        self._by_start[start] = size
        self._by_end[start + size] = start
        insort(self._by_size, size << _SHIFT | start)

    def _remove_free(self, start: int, size: int) -> None:
        del self._by_start[start]
        del self._by_end[start + size]
        del self._by_size[bisect_left(self._by_size, size << _SHIFT | start)]

    def blocks(self) -> dict[int, int]:
        """The blocks that are handed out: offset to bytes, rounding included."""
        return dict(self._live)

    def check_invariants(self) -> None:
        """Blocks and free runs below the high-water mark touch each other without a gap or an overlap."""
        runs = sorted([*self._live.items(), *self._by_start.items()])
        end = 0
        for start, size in runs:
            assert start == end and size > 0, f"a gap or an overlap at {start}, after {end}"
            end = start + size
        assert end == self._high <= self._size, f"the runs end at {end}, the high-water mark is {self._high}"
        assert self._used == sum(self._live.values()), f"{self._used} bytes are not the sum of the blocks"
        assert self._by_end == {start + size: start for start, size in self._by_start.items()}, "ends of free runs"
        assert self._by_size == sorted(size << _SHIFT | start for start, size in self._by_start.items()), "free sizes"
        assert not any(start in self._by_end for start in self._by_start), "two free runs were not joined"


class LruEvictionPolicy:
    """The objects that may give up their blocks, least recently used first.

    Attributes:
        evictable_bytes: bytes of these objects.
        evicted: count of the objects that had to go.
    """

    def __init__(self) -> None:
        self.evictable_bytes = 0
        self.evicted = 0
        self._candidates: dict[bytes, StoredObject] = {}

    def add_candidate(self, obj: StoredObject) -> None:
        """No process reads this object any more, and its bytes are elsewhere too; it was in use until now."""
        assert obj.id not in self._candidates
        self._candidates[obj.id] = obj
        self.evictable_bytes += obj.size

    def remove_candidate(self, obj: StoredObject) -> None:
        """The object is in use (or gone): it must not be evicted."""
        if self._candidates.pop(obj.id, None) is not None:
            self.evictable_bytes -= obj.size

    def next_victim(self) -> StoredObject | None:
        """The object to evict now."""
        if not self._candidates:
            return None
        self.evicted += 1
        return next(iter(self._candidates.values()))

    def is_candidate(self, obj: StoredObject) -> bool:
        """True if the block of this object can be had at once."""
        return obj.id in self._candidates

    def check_invariants(self, objects: dict[bytes, StoredObject]) -> None:
        """An evictable object is in memory, idle, and either a mere copy or on disk too."""
        assert self.evictable_bytes == sum(obj.size for obj in self._candidates.values()), "evictable bytes"
        for obj in self._candidates.values():
            assert objects.get(obj.id) is obj and obj.idle, f"{obj.id.hex()} can be evicted, and is not idle"
            assert obj.spill_slot is not None or not obj.preserved, f"{obj.id.hex()} would be lost by its eviction"


class CreateRequestQueue:
    """Requests for a block of the arena that find no room; the lifecycle serves them.

    Args:
        blocks: the allocator.
        eviction: what can be evicted.
        overtake_timeout: seconds for which small requests may overtake one that does not fit.

    Attributes:
        pending: requests without a block, oldest first.
        changed: there may be room now for one of them.
        shortages: number of requests so far that found no room at once.
    """

    def __init__(self, blocks: Allocator, eviction: LruEvictionPolicy, overtake_timeout: float) -> None:
        self.pending: dict[bytes, StoredObject] = {}
        self.changed = False
        self.shortages = 0
        self._blocks = blocks
        self._eviction = eviction
        self._overtake_timeout = overtake_timeout

    def in_order(self) -> list[StoredObject]:
        """The requests in the order in which they are served: the most urgent first, and of these the oldest."""
        return sorted(self.pending.values(), key=lambda obj: obj.priority)

    def blocks_others(self, now: float, obj: StoredObject) -> bool:
        """True if a request that does not fit has waited so long that room is kept for it."""
        return now - obj.since >= self._overtake_timeout

    def withdraw(self, obj: StoredObject) -> None:
        """The object gives up its block or its place in the queue, if it has one."""
        self._eviction.remove_candidate(obj)
        self.pending.pop(obj.id, None)
        if obj.offset >= 0:
            self.release_block(obj)
        self.note_room()

    def withdraw_request(self, obj: StoredObject) -> None:
        """The object waits for a block no longer."""
        self.pending.pop(obj.id, None)
        self.note_room()

    def release_block(self, obj: StoredObject) -> None:
        """The block of the object, which may have left the store, is not read any more."""
        self._blocks.free(obj.offset)
        obj.offset = -1
        self.note_room()

    def note_room(self) -> None:
        """There may be more room than before."""
        self.changed = bool(self.pending)

    def has_room(self, size: int) -> bool:
        """True if a request would probably be served at once."""
        return not self.pending and self.can_fit(size)

    def can_fit(self, size: int) -> bool:
        """True if there are so many bytes, in however many pieces, that are free or can be evicted."""
        return self._blocks.free_bytes + self._eviction.evictable_bytes >= size

    def check_invariants(self, objects: dict[bytes, StoredObject]) -> None:
        """A queued request is one of an object of the store, has no block, and the first one finds none now."""
        for obj in self.pending.values():
            assert objects.get(obj.id) is obj, f"{obj.id.hex()} waits for room, and is not in the store"
            assert obj.state is obj.state.WAITING and obj.offset < 0, f"{obj.id.hex()} waits for room, and has it"
        if self.pending:
            assert not self.changed, "there may be room, and the queue was not served"
            first = self.in_order()[0]
            assert not self._blocks.fits(first.size), f"{first.id.hex()} waits, and there is a free run for it"
            evictable = self._eviction.evictable_bytes
            assert not (evictable and self.can_fit(first.size)), f"{first.id.hex()} waits, and others can be evicted"


_TOP_OBJECTS = 5
_TOP_PINS = 3


def full_reason(
    node: int, obj: StoredObject, why: str, blocks: Allocator, held: Iterable[StoredObject], spilling: str
) -> str:
    """Why `obj` got no block on `node`: the request, the store, the largest of the objects that hold it, and what
    became of `spilling`."""
    who = "restoring" if obj.spill_slot is not None else "creating" if obj.creator is not None else "pulling"
    top = sorted(held, key=lambda other: -other.size)[:_TOP_OBJECTS]
    return (
        f"object store of node {node} is full: {who} object {obj.id.hex()} of {format_size(obj.size)} "
        f"({obj.size} bytes) {why}; capacity {format_size(blocks.size)}, used {format_size(blocks.used)}, "
        f"largest free run {format_size(blocks.largest_free)} ({blocks.largest_free} bytes). "
        f"Largest objects that cannot be evicted: {'; '.join(map(describe_object, top)) or 'none'}. "
        f"{spilling} hint: drop references and arrays that are no longer needed, or start with a "
        "larger object store (HPCRAY_OBJECT_STORE_MEMORY, in bytes)"
    )


def describe_object(obj: StoredObject) -> str:
    """One line: size, id, owner, and what holds its block."""
    if obj.pins:
        held_by = "pinned by " + ", ".join(show_proc(proc) for proc in sorted(obj.pins)[:_TOP_PINS])
        if len(obj.pins) > _TOP_PINS:
            held_by += f" and {len(obj.pins) - _TOP_PINS} more"
    elif obj.replica_pinners and obj.state is StoredObjectState.SEALED:
        held_by = "a copy kept for " + ", ".join(map(show_proc, sorted(obj.replica_pinners)))
    elif obj.io_reads:
        held_by = f"being read by {obj.io_reads} transfer(s)"
    elif obj.state is StoredObjectState.PULLING and obj.pull is not None:
        paused = obj.pull.retry_at is not None
        held_by = f"{'paused after a broken data link to' if paused else 'being received from'} node {obj.pull.node}"
    else:
        held_by = "referenced by its owner"
    state = "" if obj.state is StoredObjectState.SEALED else f", {obj.state.value}"
    return f"{format_size(obj.size)} {obj.id.hex()} (owner {show_proc(owner_of(obj.id))}{state}, {held_by})"


def format_size(size: int) -> str:
    """`1.5 GiB`, `20.0 KiB`, `17 B`: in powers of 1024, as sizes are given, so that `2g` comes back as 2.0 GiB."""
    for shift, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.1f} {name}"
    return f"{size} B"
