"""Spilling: which objects of a full node store go to disk, and where on it they lie.

Disk space comes in *segments*, files that are filled one after the other and closed when nothing in them is alive. Many
objects are written in one go, so that small ones cost no seek each. An object that lies on disk as well as in memory
gives up its block at no cost; it is read back into memory when somebody wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from hpcray.core.effects import DiscardSpilled, Effect, Piece, WriteSpill
from hpcray.core.store.objects import Slot, StoredObject

PAGE = 4096
_PAGED = 16 * PAGE
"""Bytes from which on an object has its pages on disk to itself: written without a copy, and given back whole."""
RETRY_AFTER = 5.0
"""Seconds without a try after a write failed: a full disk is not emptied by asking."""


@dataclass(slots=True)
class _Segment:
    """end: where the next object goes. live: objects in it, those being written included."""

    end: int = 0
    live: int = 0
    full: bool = False


class Segments:
    """Hands out places on disk, one behind the other; a segment ends when it has grown beyond `size` bytes.

    What is taken together begins at a page, and so does each object that is large enough to have pages to itself.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._segments: dict[int, _Segment] = {}
        self._current = 0
        self._slots = 0
        self.used = 0

    def take(self, sizes: Iterable[int]) -> list[Slot]:
        """Neighbouring places in one segment."""
        segment = self._segments.get(self._current)
        if segment is None or segment.full:
            self._current += 1
            segment = self._segments[self._current] = _Segment()
        slots = []
        segment.end = _pages(segment.end)
        for size in sizes:
            if size >= _PAGED:
                segment.end = _pages(segment.end)
            self._slots += 1
            slots.append(Slot(self._current, segment.end, size, self._slots))
            segment.end += _taken(size)
            segment.live += 1
            self.used += size
        segment.full = segment.end >= self._size
        return slots

    def give_back(self, slot: Slot) -> DiscardSpilled:
        """Nothing that matters lies there any more; with its last object a segment goes."""
        segment = self._segments[slot.segment]
        segment.live -= 1
        self.used -= slot.size
        if not segment.live:
            del self._segments[slot.segment]
        return DiscardSpilled(slot.segment, slot.offset, _taken(slot.size), segment.live == 0)

    def __len__(self) -> int:
        """Number of segments that exist."""
        return len(self._segments)


def _taken(size: int) -> int:
    return _pages(size) if size >= _PAGED else size


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


class Spiller:
    """Writes the least recently used objects out when room is short: one batch at a time.

    Args:
        batch: a write holds at least this many bytes where there are so many to write; also the size of a segment.

    Attributes:
        idle: sealed primaries that nobody reads and that lie nowhere else, least recently used first.
        on_disk: the objects that lie on disk, by the numbers of their slots.
        failure: why the last write failed; "" after one that did not.
        progress: when a write last ended well.
        written, loaded: bytes that were written and read so far.
    """

    def __init__(self, batch: int, settle: Callable[[StoredObject, list[Effect]], None]) -> None:
        self.idle: dict[bytes, StoredObject] = {}
        self.on_disk: dict[int, StoredObject] = {}
        self.failure = ""
        self.progress = float("-inf")
        self.written = self.restored = self.loaded = self.failures = 0
        self._batch = batch
        self._settle = settle
        self._segments = Segments(batch)
        self._writing: list[tuple[StoredObject, Slot]] = []
        self._retry_at = float("-inf")
        self._writes = 0

    @property
    def busy(self) -> bool:
        """Whether a write is under way."""
        return bool(self._writing)

    @property
    def used(self) -> int:
        """Bytes of objects on disk."""
        return self._segments.used

    def may_spill(self, obj: StoredObject) -> None:
        """Nobody reads this primary any more."""
        self.idle[obj.id] = obj

    def keep(self, obj: StoredObject) -> None:
        """It is in use, or gone."""
        self.idle.pop(obj.id, None)

    def may_try(self, now: float) -> bool:
        """Whether a write could be started now."""
        return not self._writing and now >= self._retry_at

    def write(self, need: int, out: list[Effect]) -> None:
        """Start to write objects of at least `need` bytes together, or all that are idle; a batch at least."""
        chosen = list(self._oldest(max(need, self._batch)))
        if not chosen:
            return
        slots = self._segments.take(obj.size for obj in chosen)
        for obj in chosen:
            del self.idle[obj.id]
            obj.reads += 1  # the block must stay until the write has ended
        self._writing = list(zip(chosen, slots, strict=True))
        self._writes += 1
        pieces = tuple(Piece(obj.offset, slot.size, slot.offset) for obj, slot in self._writing)
        out.append(WriteSpill(self._writes, slots[0].segment, pieces))

    def ended(self, now: float, error: str | None, out: list[Effect]) -> None:
        """The write is over; after an error nothing of it counts and the objects are in memory only, as before."""
        written, self._writing = self._writing, []
        if error is None:
            self.failure, self.progress = "", now
        else:
            self.failure, self._retry_at = error, now + RETRY_AFTER
            self.failures += 1
        for obj, slot in written:
            obj.reads -= 1
            if error is None:
                obj.disk = slot
                self.on_disk[slot.number] = obj
                self.written += slot.size
            else:
                out.append(self._segments.give_back(slot))
            if obj.idle:
                self._settle(obj, out)

    def drop(self, obj: StoredObject) -> Slot | None:
        """What the disk has of the object matters no more; its place there, for `give_back`."""
        self.idle.pop(obj.id, None)
        slot, obj.disk = obj.disk, None
        if slot is not None:
            del self.on_disk[slot.number]
        return slot

    def give_back(self, slot: Slot) -> DiscardSpilled:
        """Nobody reads this place on disk any more."""
        return self._segments.give_back(slot)

    def snapshot(self, straight: int = 0) -> dict[str, int]:
        """Numbers for people and tests, in bytes where not said otherwise; restored, failures and segments count.
        loaded_bytes: read from disk, into the store or (`straight`) past it."""
        return {
            "on_disk": self.used,
            "segments": len(self._segments),
            "spilled_bytes": self.written,
            "restored": self.restored,
            "loaded_bytes": self.loaded + straight,
            "spill_failures": self.failures,
        }

    def _oldest(self, want: int) -> Iterator[StoredObject]:
        for obj in list(self.idle.values()):
            if want <= 0:
                return
            want -= obj.size
            yield obj
