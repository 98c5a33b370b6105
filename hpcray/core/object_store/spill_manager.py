"""Room in a full store: what is spilled to disk when, which processes are requested to unpin, what is read back early.

Many objects are written in one go, so that small ones cost no seek each. An object that lies on disk as well as in
memory gives up its block at no cost; it is read back into memory when it is requested. Disk space comes
in *segments*, files that are filled one after the other and closed when nothing in them is alive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec import Struct

from hpcray.core.effects import DiscardSpilled, Effect, LendSpilled, Piece, Send, WriteSpill
from hpcray.core.object_store.allocator import Allocator, CreateRequestQueue, LruEvictionPolicy, format_size
from hpcray.core.object_store.stored_object import ObjectsByClient, SpillSlot, StoredObject, StoredObjectState
from hpcray.protocol import messages as m

PAGE = 4096
_MIN_PAGED_BYTES = 16 * PAGE
"""Bytes from which on an object has its pages on disk to itself: written without a copy, and given back whole."""


class _Segment(Struct):
    """end: where the next object goes. live: objects in it, those being written included."""

    end: int = 0
    live: int = 0
    full: bool = False


class SpillSegments:
    """Hands out places on disk, one behind the other; a segment ends when it has grown beyond `size` bytes.

    Slots that are allocated together begin at a page, and so does each object that is large enough to have pages to
    itself.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._segments: dict[int, _Segment] = {}
        self._current = 0
        self._slots = 0
        self.used = 0

    def allocate_slots(self, sizes: Iterable[int]) -> list[SpillSlot]:
        """Neighboring places in one segment."""
        segment = self._segments.get(self._current)
        if segment is None or segment.full:
            self._current += 1
            segment = self._segments[self._current] = _Segment()
        slots = []
        segment.end = _round_to_pages(segment.end)
        for size in sizes:
            if size >= _MIN_PAGED_BYTES:
                segment.end = _round_to_pages(segment.end)
            self._slots += 1
            slots.append(SpillSlot(self._current, segment.end, size, self._slots))
            segment.end += _bytes_on_disk(size)
            segment.live += 1
            self.used += size
        segment.full = segment.end >= self._size
        return slots

    def free_slot(self, slot: SpillSlot) -> DiscardSpilled:
        """The effect that discards this slot, and with its last slot the segment."""
        segment = self._segments[slot.segment]
        segment.live -= 1
        self.used -= slot.size
        if not segment.live:
            del self._segments[slot.segment]
        return DiscardSpilled(slot.segment, slot.offset, _bytes_on_disk(slot.size), segment.live == 0)

    def __len__(self) -> int:
        """Number of segments that exist."""
        return len(self._segments)

    def check_invariants(self, slots: Collection[SpillSlot]) -> None:
        """These are all slots that were allocated and not freed: each lies in a segment, apart from the others."""
        assert self.used == sum(slot.size for slot in slots), f"{self.used} bytes on disk are not those of the slots"
        for number, segment in self._segments.items():
            own = sorted((slot.offset, slot.size) for slot in slots if slot.segment == number)
            assert len(own) == segment.live > 0, f"segment {number} counts {segment.live} slots, not {len(own)}"
            ends = [offset + size for offset, size in own]
            assert all(end <= start for end, (start, _) in zip(ends, own[1:], strict=False)), "slots overlap"
            assert ends[-1] <= segment.end, f"a slot lies beyond the end of segment {number}"
        assert {slot.segment for slot in slots} == self._segments.keys(), "slots in segments that do not exist"


class SpilledFileLoans:
    """Objects on disk that processes of the node read from their file by themselves, as there is no room to bring them
    back.

    Lent is the place on disk, not the object: that may come back into memory meanwhile, or go. The place stays until
    each of its readers has read, or is dead.

    Args:
        segments: to which a place is given back.

    Attributes:
        count: number of loans so far.
        last_shortage: when a loan was necessary last, and how many bytes of the store were in use then.
    """

    def __init__(self, segments: SpillSegments) -> None:
        self.count = 0
        self.last_shortage = (float("-inf"), 0)
        self._segments = segments
        self._lent: dict[bytes, dict[bytes, list[SpillSlot]]] = {}
        self._readers: dict[int, int] = {}  # by number of the slot
        self._orphans: dict[int, SpillSlot] = {}  # lent slots that no object needs any more, by number

    def lend_slot(self, obj: StoredObject, proc: bytes, out: list[Effect]) -> None:
        """Let a process read an object that is on disk."""
        slot = obj.spill_slot
        assert slot is not None
        self.count += 1
        self._lent.setdefault(proc, {}).setdefault(obj.id, []).append(slot)
        self._readers[slot.number] = self._readers.get(slot.number, 0) + 1
        out.append(LendSpilled(proc, obj.id, slot.segment, slot.offset, obj.size))

    def free_slot(self, slot: SpillSlot, out: list[Effect]) -> None:
        """Its object does not need this place any more: free it, as soon as no process reads it."""
        if slot.number in self._readers:
            self._orphans[slot.number] = slot
        else:
            out.append(self._segments.free_slot(slot))

    def return_slot(self, proc: bytes, ident: bytes, out: list[Effect]) -> SpillSlot | None:
        """The process has read the file, or does not intend to. Returns the slot that it was lent, if any."""
        objects = self._lent.get(proc, {})
        slots = objects.get(ident)
        if slots is None:
            return None
        slot = slots.pop()
        if not slots:
            del objects[ident]
        if not objects:
            del self._lent[proc]
        self._readers[slot.number] -= 1
        if not self._readers[slot.number]:
            del self._readers[slot.number]
            if self._orphans.pop(slot.number, None) is not None:
                out.append(self._segments.free_slot(slot))
        return slot

    def process_died(self, proc: bytes, out: list[Effect]) -> None:
        """The process reads no more."""
        for ident, slots in list(self._lent.get(proc, {}).items()):
            for _ in list(slots):
                self.return_slot(proc, ident, out)

    def borrowers(self) -> set[bytes]:
        """The processes that were lent a place."""
        return set(self._lent)

    def orphans(self) -> Collection[SpillSlot]:
        """Slots that are lent, and that no object needs any more."""
        return self._orphans.values()

    def check_invariants(self, slots: Collection[SpillSlot]) -> None:
        """Each slot that is lent is one of `slots`, and its count of readers is right."""
        lent = [slot for objects in self._lent.values() for each in objects.values() for slot in each]
        assert set(lent) <= set(slots), "a slot is lent, and is not on disk"
        numbers = [slot.number for slot in lent]
        assert self._readers == {number: numbers.count(number) for number in numbers}, "readers of lent slots"
        assert self._orphans.keys() <= self._readers.keys(), "a slot without object or reader was not freed"


def _bytes_on_disk(size: int) -> int:
    return _round_to_pages(size) if size >= _MIN_PAGED_BYTES else size


def _round_to_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


BATCH_BYTES = 128 << 20
"""Bytes that are written in one go, where there are so many; files of this size cost a disk, or a shared file system,
few operations."""
WRITE_RETRY_DELAY = 5.0
"""Seconds without a try after a write failed: a full disk is not emptied by asking."""
READ_AHEAD_BYTES = 64 << 20
"""Bytes that are read ahead of one reader, where the store is large enough."""

_BATCHES_PER_STORE = 8  # a small store is not emptied by one batch
_UNPIN_PERIOD = 0.5  # seconds between two requests to unpin, where the first brought nothing
_UNPIN_SHARE = 4  # a request to unpin asks for at least this fraction (one in ...) of the store
_READ_AHEAD_SHARE = 16  # of a small store, one in so many bytes is read ahead
_MAX_SEQUENCES = 16  # readers that are distinguished
_MAX_GAP = 16  # objects that are gone may lie between two of one sequence


class _Sequence(Struct):
    """A reader that goes on from one object to the next.

    Attributes:
        until: what comes before this number was read ahead, or is in memory anyhow.
        steps: objects that were requested.
    """

    until: int
    steps: int = 0


class ReadAhead:
    """Follows the readers of one store: an application that reads objects in the order in which they were written will
    soon read the next ones. Two objects in a row make a sequence.

    Args:
        size: bytes of the store.
        on_disk: the objects on disk, by the number of their slot: the order in which they were written.

    Attributes:
        window: bytes that are read ahead of one reader.
    """

    def __init__(self, size: int, on_disk: Mapping[int, StoredObject]) -> None:
        self.window = min(READ_AHEAD_BYTES, size // _READ_AHEAD_SHARE)
        self._on_disk = on_disk
        self._sequences: dict[int, _Sequence] = {}

    def next_restores(self, obj: StoredObject) -> Iterator[StoredObject]:
        """An object that is on disk, and perhaps in memory too, was requested: yields what to read back now.

        The caller stops iterating when there is no room for the object that was yielded last.
        """
        assert obj.spill_slot is not None
        number = obj.spill_slot.number
        sequence = self._sequences.pop(number, None)
        following = self._next_number(number)
        if following < 0 or (sequence is None and following in self._sequences):
            return
        if sequence is None:
            sequence = _Sequence(following)
        sequence.until = max(sequence.until, following)
        sequence.steps += 1
        self._sequences[following] = sequence
        if len(self._sequences) > _MAX_SEQUENCES:
            del self._sequences[next(iter(self._sequences))]
        if sequence.steps > 1:
            yield from self._advance(sequence, following)

    def _advance(self, sequence: _Sequence, start: int) -> Iterator[StoredObject]:
        known = (self._on_disk.get(number) for number in range(start, sequence.until))
        ahead = sum(obj.size for obj in known if obj is not None)
        while True:
            obj = self._on_disk.get(sequence.until)
            if obj is not None:
                ahead += obj.size
                if ahead > self.window:
                    return
                if obj.state is StoredObjectState.SPILLED:
                    yield obj
            sequence.until = max(sequence.until + 1, self._next_number(sequence.until))
            if sequence.until not in self._on_disk:
                return

    def _next_number(self, number: int) -> int:
        """The object written after this one; -1: none in sight."""
        return next((at for at in range(number + 1, number + 1 + _MAX_GAP) if at in self._on_disk), -1)


class SpillDisk:
    """The disk of one store, as the operations on it have shown it last.

    Attributes:
        failure: why the last write failed; "" after one that did not.
        last_progress: when a write last ended well.
        may_retry_at: when the disk may be tried again, after a failure.
        reads_stalled: whether a read of the disk has not moved for long. writes_stalled: likewise.
        stall_reason: what does not answer, and since when, while that is so.
    """

    def __init__(self) -> None:
        self.failure = self.stall_reason = ""
        self.last_progress = self.may_retry_at = float("-inf")
        self.reads_stalled = self.writes_stalled = False

    def write_ended(self, now: float, error: str | None) -> None:
        """Something was written, or disk space was reserved; or that has failed."""
        if error is None:
            self.failure, self.last_progress = "", now
        else:
            self.failure, self.may_retry_at = error, now + WRITE_RETRY_DELAY

    def set_stall(self, write: bool, read: bool, reason: str) -> None:
        """The disk has not answered for long, or answers again.

        Args:
            write: the write that is under way has not moved. read: a read has not.
            reason: what does not answer, and since when.
        """
        self.writes_stalled, self.reads_stalled, self.stall_reason = write, read, reason

    @property
    def stalled(self) -> bool:
        """True if the disk does not answer. No process may read its files then: it could never be interrupted."""
        return self.writes_stalled or self.reads_stalled


class RestoreFigures:
    """Counts what is read back into memory, and for how long something was.

    Attributes:
        count, size: objects that were read back, and their bytes. seconds: for how long objects were read back.
    """

    def __init__(self) -> None:
        self.count = self.size = 0
        self.seconds = self._began = 0.0
        self._reads = 0

    def began(self, now: float) -> None:
        """The bytes of an object are being read back into memory."""
        if not self._reads:
            self._began = now
        self._reads += 1

    def ended(self, now: float, size: int, error: str | None) -> None:
        """The bytes of an object are back in memory, or could not be read."""
        self._reads -= 1
        if not self._reads:
            self.seconds += now - self._began
        if error is None:
            self.count += 1
            self.size += size


class SpillManager:
    """Spills the least recently used objects, one batch at a time, when requests wait, or before, when the store is
    fuller than a threshold.

    Processes keep objects pinned that they do not read, so as to read them again at no cost. When room is short they
    are requested to give such pins up (`Unpin`).

    A disk that does not answer is a state of the `disk`: requests that wait for it fail, and the
    objects in memory stay available. A write or read that was started may still be done, at any time: its blocks
    stay as they are until its end is reported.

    Args:
        blocks, queue, eviction, clients: of the store.
        threshold: share of the arena; 0 switches spilling off.

    Attributes:
        on_disk: the objects that lie on disk, by the numbers of their slots.
        segments, loans, read_ahead: the places on disk, those lent to processes, the restores before a request.
        disk, restores: the state of the disk, and what was read back.
        written_bytes, written, failures: so many so far.
        write_seconds: how long the writes that ended well took.
    """

    def __init__(
        self,
        blocks: Allocator,
        queue: CreateRequestQueue,
        eviction: LruEvictionPolicy,
        clients: ObjectsByClient,
        threshold: float,
    ) -> None:
        self._blocks = blocks
        self._queue = queue
        self._eviction = eviction
        self._clients = clients
        self._enabled = threshold > 0
        self._limit = int(blocks.size * threshold) if self._enabled else blocks.size
        self._batch = min(BATCH_BYTES, blocks.size // _BATCHES_PER_STORE)
        self.on_disk: dict[int, StoredObject] = {}
        self.segments = SpillSegments(self._batch)
        self.loans = SpilledFileLoans(self.segments)
        self.read_ahead = ReadAhead(blocks.size, self.on_disk)
        self.disk = SpillDisk()
        self.restores = RestoreFigures()
        self.written_bytes = self.written = self.failures = 0
        self.write_seconds = self._write_began = 0.0
        self._candidates: dict[bytes, StoredObject] = {}  # least recently used first
        self._writing: list[tuple[StoredObject, SpillSlot]] = []
        self._writes = 0
        self._unpin_sent_at = float("-inf")
        self._unpin_progress = (0, 0)

    # ------------------------------------------------------------ what can be spilled

    def add_candidate(self, obj: StoredObject) -> None:
        """No process reads this preserved object any more, and it lies nowhere else."""
        self._candidates[obj.id] = obj

    def remove_candidate(self, obj: StoredObject) -> None:
        """The object is in use, or gone."""
        self._candidates.pop(obj.id, None)

    def is_candidate(self, obj: StoredObject) -> bool:
        """True if the object may be written to disk next."""
        return obj.id in self._candidates

    # ------------------------------------------------------------ making room

    def start_if_short(self, now: float, out: list[Effect]) -> None:
        """Where room is short, start to write, and ask processes to unpin."""
        short = self._blocks.used - self._eviction.evictable_bytes - self._limit
        pending = self._queue.pending
        if pending:
            short = max(short, next(iter(pending.values())).size)
        if short <= 0:
            return
        if self._enabled and not self._writing and now >= self.disk.may_retry_at:
            self._write_began = now
            self._start_write(short, out)
        if not self._write_moves and (pending or not self._candidates):
            self._request_unpin(now, max(short, self._blocks.size // _UNPIN_SHARE), out)

    def write_ended(self, now: float, error: str | None, out: list[Effect]) -> list[StoredObject]:
        """The write is over; after an error nothing of it counts and the objects are in memory only, as before.

        Returns:
            the objects, which are read by one write less.
        """
        written, self._writing = self._writing, []
        self.disk.write_ended(now, error)
        if error is None:
            self.written += len(written)
            self.write_seconds += now - self._write_began
        else:
            self.failures += 1
        for obj, slot in written:
            obj.io_reads -= 1
            if error is None:
                obj.spill_slot = slot
                self.on_disk[slot.number] = obj
                self.written_bytes += slot.size
            else:
                out.append(self.segments.free_slot(slot))
        return [obj for obj, _ in written]

    def drop_from_disk(self, obj: StoredObject, out: list[Effect]) -> None:
        """The bytes on disk are needed no more. A process that was lent the place there may still read it."""
        self._candidates.pop(obj.id, None)
        slot, obj.spill_slot = obj.spill_slot, None
        if slot is not None:
            del self.on_disk[slot.number]
            self.loans.free_slot(slot, out)

    def _start_write(self, need: int, out: list[Effect]) -> None:
        """Write objects of at least `need` bytes together, or all candidates; a batch at least."""
        batch = list(self._least_recently_used(max(need, self._batch)))
        if not batch:
            return
        slots = self.segments.allocate_slots(obj.size for obj in batch)
        for obj in batch:
            del self._candidates[obj.id]
            obj.io_reads += 1  # the block must stay until the write has ended
        self._writing = list(zip(batch, slots, strict=True))
        self._writes += 1
        pieces = tuple(Piece(obj.offset, slot.size, slot.offset) for obj, slot in self._writing)
        out.append(WriteSpill(self._writes, slots[0].segment, pieces))

    def _least_recently_used(self, need: int) -> Iterator[StoredObject]:
        for obj in list(self._candidates.values()):
            if need <= 0:
                return
            need -= obj.size
            yield obj

    def _request_unpin(self, now: float, size: int, out: list[Effect]) -> None:
        """Send Unpin: again only when room came of the last time, or after a while."""
        progress = (self.written_bytes, self._eviction.evicted)
        if now >= self._unpin_sent_at + _UNPIN_PERIOD or progress != self._unpin_progress:
            self._unpin_sent_at, self._unpin_progress = now, progress
            out.extend(Send(proc, m.Unpin(size)) for proc in self._clients.pinners())

    # ------------------------------------------------------------ progress and stalls

    @property
    def stuck(self) -> bool:
        """True if nothing can be spilled now, so that only the end of a pin or of an object makes room."""
        idle = not (self._writing or self.disk.stalled)
        return idle and (not self._enabled or bool(self.disk.failure) or not self._candidates)

    def may_make_room(self, since: float) -> bool:
        """True if spilling makes, or has made since then, room for the requests that wait."""
        return self._write_moves or self.disk.last_progress > since

    @property
    def _write_moves(self) -> bool:
        return bool(self._writing) and not self.disk.writes_stalled

    def report(self) -> str:
        """A sentence on the state of spilling."""
        if not self._enabled:
            return "Spilling to disk is off (HPCRAY_SPILL_THRESHOLD=0)."
        if self.disk.stalled:
            return f"Spilling to disk does not get on: {self.disk.stall_reason}; another directory: HPCRAY_SPILL_DIR."
        if self.disk.failure:
            return f"Spilling to disk failed: {self.disk.failure}."
        return f"{format_size(self.segments.used)} were spilled to disk, nothing else can be."

    def snapshot(self, pushed_bytes: int = 0) -> dict[str, float]:
        """Numbers for people and tests, in bytes except the counts spilled_objects, restored, spill_failures and
        segments, and the seconds spill_seconds and restore_seconds.
        loaded_bytes: read from disk, into the store or (`pushed_bytes`) past it."""
        return {
            "on_disk": self.segments.used,
            "segments": len(self.segments),
            "spilled_bytes": self.written_bytes,
            "spilled_objects": self.written,
            "spill_seconds": self.write_seconds,
            "restore_seconds": self.restores.seconds,
            "restored": self.restores.count,
            "loaded_bytes": self.restores.size + pushed_bytes,
            "spill_failures": self.failures,
        }

    def check_invariants(self, objects: dict[bytes, StoredObject]) -> None:
        """Every slot on disk belongs to one object, one write or one loan; candidates are idle and nowhere else."""
        for obj in self._candidates.values():
            name = obj.id.hex()
            assert objects.get(obj.id) is obj and obj.idle, f"{name} can be spilled, and is not idle"
            assert obj.preserved and obj.spill_slot is None, f"{name} need not be spilled"
            assert not self._eviction.is_candidate(obj), f"{name} can be spilled and evicted"
        for number, obj in self.on_disk.items():
            assert objects.get(obj.id) is obj, f"{obj.id.hex()} is on disk, and not in the store"
            assert obj.spill_slot is not None and obj.spill_slot.number == number, f"{obj.id.hex()}: another slot"
        slots = [obj.spill_slot for obj in objects.values() if obj.spill_slot is not None]
        assert len(slots) == len(self.on_disk), "an object has a slot on disk that is not in the index"
        slots += [slot for _, slot in self._writing]
        slots += self.loans.orphans()
        assert len({slot.number for slot in slots}) == len(slots), "a slot on disk belongs to two"
        self.segments.check_invariants(slots)
        self.loans.check_invariants(slots)
        for obj, _ in self._writing:
            assert obj.offset >= 0 and obj.io_reads > 0, f"{obj.id.hex()} is being written, and may be overwritten"

    def written_now(self) -> list[StoredObject]:
        """The objects that are being written to disk."""
        return [obj for obj, _ in self._writing]
