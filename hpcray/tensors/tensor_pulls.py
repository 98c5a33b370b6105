"""GPUDirect: tensors from a device of one process to a device of another one by UCX, without a copy in the host.

Pure: the caller holds its lock, knows the time, and does what is returned. The reader asks for the ranges of memory
that it wants (`TensorPulls`); the process that has them sends each as a message of its own (`TensorSends`). Requests
and answers go the way of all messages of the job, so both ends know each other; only the bytes pass over UCX. The first
range is small: whether it comes in time is the trial of two processes that have not done this before.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

SEGMENT = 64 << 20
"""Bytes of a message at most. What has no progress for a while is one message at most."""
TRIAL = 1 << 20
"""Bytes of the first message at most, so that a way that does not work is found soon."""
TRIAL_TIME = 5.0
"""Seconds that the first message of two processes may take: they have to connect."""
STALL_TIME = 30.0
"""Seconds that each later message may take."""
DEATH_TIME = 3.0
"""Seconds within which the death of a process is reported: it breaks transfers, and says nothing about the way."""
RETRY_TIME = 60.0
"""Seconds for which nothing is pulled from a node after it has failed."""
LEAST_RATE = 2e9
"""Bytes per second that pulls of `RATED` bytes reach at least, where UCX copies from device to device. Where it has
copied through the host by itself, 0.8 GB/s were measured; our own way through the host is faster."""
RATED = 256 << 20
MOST_READERS = 2
"""Readers that pull one object at the same time. Others take the way through the host, where one copy serves all."""


class PullRange(NamedTuple):
    """Bytes of a storage. storage: its number among those of the object. first: where they begin there."""

    storage: int
    first: int
    size: int


def divide_ranges(ranges: Sequence[PullRange]) -> list[PullRange]:
    """Divide ranges into those of a message each, in order; the first one is small."""
    found: list[PullRange] = []
    for storage, first, size in ranges:
        at = 0
        while at < size:
            part = min(size - at, SEGMENT if found else TRIAL)
            found.append(PullRange(storage, first + at, part))
            at += part
    return found


def are_within(ranges: Sequence[PullRange], sizes: Sequence[int]) -> bool:
    """Return True if all ranges are of storages with these sizes, in bytes, and none is empty."""
    return all(
        0 <= storage < len(sizes) and first >= 0 and size > 0 and first + size <= sizes[storage]
        for storage, first, size in ranges
    )


class TensorPullState(enum.Enum):
    """State of a pull.

    REQUESTED: the process that has the tensors has not answered. SENDING: it sends them. DONE: all are here. GONE: they
    are not where they were, or their process is dead; the object says what is to be done. FAILED: this way does not
    work. CANCELLED: the reader has given up.
    """

    REQUESTED = "requested"
    SENDING = "sending"
    DONE = "done"
    GONE = "gone"
    FAILED = "failed"
    CANCELLED = "cancelled"


OPEN = (TensorPullState.REQUESTED, TensorPullState.SENDING)


class TensorPull:
    """One pull.

    source: the process that has the tensors. node: of that. sizes: of the messages that are not here yet, in bytes.
    rest: bytes that were not here with the first message, which came when `began` says. limit: when the next message
    has to be here, or it fails; None before any is sent. broken: why a message cannot come any more; "": all can.
    reason: why it ended.
    """

    __slots__ = ("began", "broken", "limit", "node", "reason", "rest", "sizes", "source", "state")

    def __init__(self, source: bytes, node: int, sizes: dict[int, int]) -> None:
        self.source, self.node, self.sizes = source, node, sizes
        self.state, self.reason, self.broken = TensorPullState.REQUESTED, "", ""
        self.rest, self.began = 0, 0.0
        self.limit: float | None = None


class TensorPulls:
    """The pulls of a reader, by number.

    Args:
        least_rate: bytes per second below which a node counts as one with which this way does not pay off; 0: none.
    """

    def __init__(self, least_rate: float = LEAST_RATE) -> None:
        self._least_rate = least_rate
        self._pulls: dict[int, TensorPull] = {}
        self._numbers = 0
        self._proven: set[bytes] = set()
        self._failed: dict[int, tuple[float, str]] = {}  # by node: when, why

    def __len__(self) -> int:
        return len(self._pulls)

    def problem(self, node: int, now: float) -> str:
        """Return why nothing is pulled from a node now; "": it may be tried."""
        when, why = self._failed.get(node, (0.0, ""))
        return why if why and now - when < RETRY_TIME else ""

    def begin(self, source: bytes, node: int, sizes: Sequence[int]) -> int:
        """Return the number of a new pull.

        Args:
            source: the process that has the tensors. node: of that. sizes: of the messages, in bytes.
        """
        self._numbers += 1
        self._pulls[self._numbers] = TensorPull(source, node, dict(enumerate(sizes)))
        return self._numbers

    def find(self, number: int) -> TensorPull | None:
        """Return a pull; None where it has ended and was taken out."""
        return self._pulls.get(number)

    def coming(self, number: int, source: bytes, now: float) -> bool:
        """Note that the messages are on their way. Returns whether that changes the pull."""
        pull = self._open(number, source)
        if pull is None or pull.state is not TensorPullState.REQUESTED:
            return False
        pull.state = TensorPullState.SENDING
        if not pull.broken:
            pull.limit = now + (STALL_TIME if source in self._proven else TRIAL_TIME)
        self._end_if_complete(pull, now)
        return True

    def refused(self, number: int, source: bytes, reason: str, gone: bool, now: float) -> bool:
        """Note that the process does not send the tensors, or not all. Returns whether that ends the pull.

        Args:
            gone: whether it does not have them any more; else it cannot send them this way.
        """
        pull = self._open(number, source)
        if pull is None:
            return False
        if gone:
            _end(pull, TensorPullState.GONE, reason)
        else:
            self._fail(pull, reason, now)
        return True

    def landed(self, number: int, message: int, now: float) -> bool:
        """Note that a message is here. Returns whether the pull is DONE now."""
        pull = self._pulls.get(number)
        if pull is None or pull.state not in OPEN or message not in pull.sizes:
            return False
        del pull.sizes[message]
        if not pull.began:
            pull.began, pull.rest = now, sum(pull.sizes.values())
        if pull.state is TensorPullState.REQUESTED:
            return False  # the answer is on its way
        self._proven.add(pull.source)
        if not pull.broken:
            pull.limit = now + STALL_TIME
        return self._end_if_complete(pull, now)

    def broke(self, number: int, reason: str, now: float) -> None:
        """Note that a message cannot be received. That ends the pull as `expire` says: its process may be dead."""
        pull = self._pulls.get(number)
        if pull is not None and pull.state in OPEN and not pull.broken:
            pull.broken, pull.limit = reason, now + DEATH_TIME

    def process_died(self, source: bytes) -> list[int]:
        """Forget a process. Returns the pulls that this ends."""
        self._proven.discard(source)
        ended = [number for number, pull in self._pulls.items() if pull.source == source and pull.state in OPEN]
        for number in ended:
            _end(self._pulls[number], TensorPullState.GONE, "its process died")
        return ended

    def expire(self, number: int, now: float) -> bool:
        """Fail a pull whose next message is late, or broken. Returns whether it was."""
        pull = self._pulls.get(number)
        if pull is None or pull.state not in OPEN or pull.limit is None or now < pull.limit:
            return False
        late = f"nothing came for {STALL_TIME if pull.source in self._proven else TRIAL_TIME:g} s"
        self._fail(pull, pull.broken or late, now)
        return True

    def take_out(self, number: int) -> TensorPull:
        """Return a pull, which is forgotten. One that has not ended is CANCELLED."""
        pull = self._pulls.pop(number)
        if pull.state in OPEN:
            _end(pull, TensorPullState.CANCELLED, "nobody waits for it any more")
        return pull

    def _open(self, number: int, source: bytes) -> TensorPull | None:
        pull = self._pulls.get(number)
        return pull if pull is not None and pull.source == source and pull.state in OPEN else None

    def _end_if_complete(self, pull: TensorPull, now: float) -> bool:
        if pull.sizes:
            return False
        _end(pull, TensorPullState.DONE)
        self._proven.add(pull.source)
        seconds = now - pull.began
        if self._least_rate and pull.rest >= RATED and pull.rest < self._least_rate * seconds:
            self._failed[pull.node] = now, f"it is slow there: {pull.rest / seconds / 2**30:.2f} GiB/s"
        return True

    def _fail(self, pull: TensorPull, reason: str, now: float) -> None:
        _end(pull, TensorPullState.FAILED, reason)
        self._proven.discard(pull.source)
        self._failed[pull.node] = now, reason

    def check_invariants(self) -> None:
        """Raise AssertionError where a pull is in no state that it can be in."""
        for pull in self._pulls.values():
            is_limited = pull.state is TensorPullState.SENDING or (pull.state in OPEN and bool(pull.broken))
            assert (pull.limit is not None) == is_limited, (pull.state, pull.limit)
            assert not (pull.state is TensorPullState.DONE and pull.sizes), "a pull is done without all of its messages"
            assert not (pull.state is TensorPullState.SENDING and not pull.sizes), "a complete pull is not done"
            assert pull.state is not TensorPullState.CANCELLED, "a pull that nobody waits for is in the table"


def _end(pull: TensorPull, state: TensorPullState, reason: str = "") -> None:
    pull.state, pull.reason, pull.limit = state, reason, None


class TensorSends:
    """Ranges that a process sends to readers, by reader and number of the pull. Each pull is released once: when all
    has been sent, or nothing more will be."""

    def __init__(self) -> None:
        self._sends: dict[tuple[bytes, int], tuple[bytes, set[int]]] = {}

    def __len__(self) -> int:
        return len(self._sends)

    def begin(self, reader: bytes, number: int, oid: bytes, messages: int) -> bool:
        """Note a request. Returns False for one that is there already."""
        if (reader, number) in self._sends:
            return False
        self._sends[reader, number] = oid, set(range(messages))
        return True

    def is_busy(self, oid: bytes) -> bool:
        """Return True if as many readers pull an object as may at the same time."""
        return sum(its == oid for its, _ in self._sends.values()) >= MOST_READERS

    def is_wanted(self, reader: bytes, number: int) -> bool:
        """Return True while the reader waits."""
        return (reader, number) in self._sends

    def sent(self, reader: bytes, number: int, message: int) -> bytes:
        """Note that a message was sent. Returns the object where it was the last one, which is to be released."""
        found = self._sends.get((reader, number))
        if found is None:
            return b""
        found[1].discard(message)
        return b"" if found[1] else self.end(reader, number)

    def end(self, reader: bytes, number: int) -> bytes:
        """Nothing more is to be sent. Returns the object that is to be released; b"": it was before."""
        return self._sends.pop((reader, number), (b"", set()))[0]

    def process_died(self, reader: bytes) -> list[tuple[int, bytes]]:
        """Forget a reader. Returns its numbers with the objects that are to be released."""
        keys = [key for key in self._sends if key[0] == reader]
        return [(key[1], self._sends.pop(key)[0]) for key in keys]


# ------------------------------------------------------------ tensor pieces
# How the memory of a device object is divided into pieces, which pass through the host one after the other.
#
# Pure. A piece is an object of its own in the store: while one is read, the next one is being written.


PIECED_SIZE = 32 << 20
"""Bytes of a device object from which on pieces pay off. To make and find a piece takes processors some 100 us."""
_SMALLEST, _LARGEST = 16 << 20, 32 << 20
"""Bytes of a piece. A copy of the largest one takes 0.6 ms at the 54 GB/s of PCIe 5."""
_SHARE = 32
"""A piece takes at most this part of the store: several are written and read at once."""
_PIECES = 16
"""Pieces of an object at least, where that does not make them too small: the first one is not read, nor the last one
written, while another one is on its way."""
_ALIGN = 64


class PieceRange(NamedTuple):
    """A part of a piece. storage: number of the storage that it is of. first: where it begins there, at: where in the
    piece, size: all in bytes."""

    storage: int
    first: int
    at: int
    size: int


def piece_size(total: int, store: int) -> int:
    """Return the most bytes of a piece.

    Args:
        total: bytes of the object. store: bytes of the node's store.
    """
    wanted = max(_SMALLEST, min(_LARGEST, -(-total // _PIECES)), _ALIGN)
    return -(-min(wanted, max(_ALIGN, store // _SHARE)) // _ALIGN) * _ALIGN


def divide(sizes: Sequence[int], largest: int) -> list[list[PieceRange]]:
    """Divide storages into pieces, in order. Several small storages are in one piece.

    Args:
        sizes: of the storages, in bytes. largest: bytes of a piece at most, a multiple of 64.

    Returns:
        The ranges of each piece; they begin at multiples of 64 there.
    """
    pieces: list[list[PieceRange]] = []
    room = 0
    for number, size in enumerate(sizes):
        first = 0
        while first < size:
            if not room:
                pieces.append([])
                room = largest
            part = min(room, size - first)
            pieces[-1].append(PieceRange(number, first, largest - room, part))
            room -= min(room, -(-part // _ALIGN) * _ALIGN)
            first += part
    return pieces


def bytes_of(piece: Sequence[PieceRange]) -> int:
    """Return the bytes of a piece."""
    return piece[-1].at + piece[-1].size if piece else 0
