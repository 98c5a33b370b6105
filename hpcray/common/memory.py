"""Memory of long values: copied by several threads, kept for the next message, and advised upon to the kernel."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

_PAGE = mmap.PAGESIZE
PARALLEL_COPY_SIZE = 64 << 20
"""Bytes above which several threads pay off: they cost about 0.1 ms, one core copies as much in about 5 ms."""
_MAX_COPY_THREADS = 4


_BYTES_HEADER = bytes.__basicsize__ - 1
"""Bytes of an object of type `bytes` before its content."""


def is_aligned(content: bytes, alignment: int) -> bool:
    """Return True if the content lies at a multiple of `alignment`. In CPython the id of an object is its address."""
    return (id(content) + _BYTES_HEADER) % alignment == 0


def aligned_copy(content: bytes, alignment: int) -> memoryview:
    """Return a copy of the content that lies at a multiple of `alignment`."""
    room = bytearray(len(content) + alignment - 1)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(room)) % alignment
    copy = memoryview(room)[start : start + len(content)]
    copy[:] = content
    return copy


def copy_thread_count() -> int:
    """Number of threads of this process that copy a large buffer. One core does not reach the bandwidth of a socket's
    memory, a few do; with two or three cores, the others have other work."""
    return max(1, min(_MAX_COPY_THREADS, len(os.sched_getaffinity(0)) // 2))


def parallel_copy(copy: Callable[[Any, Any], object], target: Any, source: Any, threads: int) -> None:
    """Copy a part in each of several threads. When this returns or raises, no thread copies any more.

    Args:
        copy: `copy(target, source)` of equally long parts; releases the GIL.
        target, source: equally long, and can be sliced.
    """
    copy_in_parallel(copy, [(target, source)], threads)


def copy_in_parallel(copy: Callable[[Any, Any], object], pairs: Sequence[tuple[Any, Any]], threads: int) -> None:
    """Copy several targets and sources as `parallel_copy` does one of each: each thread copies as many bytes."""
    shares = _equal_shares(pairs, threads)
    helpers = [threading.Thread(target=_copy_share, args=(copy, share), name="hpcray-copy") for share in shares[1:]]
    interrupted: BaseException | None = None
    own = shares[:1]
    try:
        for helper, share in zip(helpers, shares[1:], strict=True):
            try:
                helper.start()
            except RuntimeError:  # a limit on processes or threads
                own.append(share)
        for share in own:
            _copy_share(copy, share)
    finally:
        for helper in helpers:
            while helper.is_alive():
                try:
                    helper.join()
                except KeyboardInterrupt as error:  # the threads write into memory that the caller may free after this
                    interrupted = error
    if interrupted is not None:
        raise interrupted


def _equal_shares(pairs: Sequence[tuple[Any, Any]], count: int) -> list[list[tuple[Any, Any]]]:
    """Split targets and sources into at most `count` lists of as many bytes, at multiples of a page of each."""
    size = sum(len(source) for _, source in pairs)
    step = -(-size // count // _PAGE) * _PAGE
    shares: list[list[tuple[Any, Any]]] = [[]]
    room = step
    for target, source in pairs:
        at = 0
        while at < len(source):
            if room <= 0:
                shares.append([])
                room = step
            end = min(len(source), at + room)
            shares[-1].append((target[at:end], source[at:end]))
            room -= end - at
            at = end
    return shares


def _copy_share(copy: Callable[[Any, Any], object], share: Sequence[tuple[Any, Any]]) -> None:
    for target, source in share:
        copy(target, source)


# ------------------------------------------------------------ buffers that are used again
# Memory for long messages that are received.


_UNIT = 1 << 18
_LARGEST_ON_HEAP = 8 << 20
RAYLET_ROOM = 32 << 20
"""Bytes that a raylet keeps: the long messages of all processes of its node pass it, and a node has one."""
PROCESS_ROOM = 8 << 20
"""Bytes that a driver or a worker keeps: only its own messages pass it, and a node has many."""


def keep_freed_memory() -> None:
    """Have the C library keep up to 16 MB of freed memory: messages come and go, and untouched pages are slow to fill.

    The GNU library takes what is shorter than the longest block that was ever mapped and freed from its heap, and keeps
    twice as much of that. The block itself costs nothing, as no page of it is used: `bytes` asks for zeroed memory, as
    a fresh mapping is already; `bytearray` would write the zeros, 2,048 page faults in each process that starts.
    """
    bytes(_LARGEST_ON_HEAP)


class BufferPool:
    """Buffers that are used again once no view of them is left: to fill untouched memory takes several times longer.

    Args:
        room: bytes of the buffers that are kept; of a larger one nothing is kept.
    """

    def __init__(self, room: int = RAYLET_ROOM) -> None:
        self._room = room
        self._kept = 0
        self._buffers: deque[bytearray] = deque()

    def take(self, size: int) -> memoryview:
        """Return `size` writable bytes; they are the caller's while a view of them exists."""
        buffers = self._buffers
        for _ in range(len(buffers)):
            buffer = buffers.popleft()
            buffers.append(buffer)  # so the one that was taken first is the next to be tried
            if len(buffer) >= size and _is_unused(buffer):
                return memoryview(buffer)[:size]
        fresh = bytearray(-(-size // _UNIT) * _UNIT)
        if len(fresh) <= self._room:
            buffers.append(fresh)
            self._kept += len(fresh)
            while self._kept > self._room:
                self._kept -= len(buffers.popleft())
        return memoryview(fresh)[:size]


def _is_unused(buffer: bytearray) -> bool:
    """Return True if the buffer has no view: its length can be changed then, and only then."""
    try:
        buffer.append(buffer.pop())
    except BufferError:
        return False
    return True


# ------------------------------------------------------------ advice to the kernel
# Advice to the kernel about memory, by address: `mmap.mmap.madvise` knows only whole maps of its own.


_libc = ctypes.CDLL(None, use_errno=True)


def madvise(address: int, size: int, advice: int) -> bool:
    """Give advice (`mmap.MADV_...`) about whole pages. Returns whether the kernel takes it."""
    return int(_libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)) == 0


# ------------------------------------------------------------ bytes that are elsewhere
# Bytes that exist only once they are written.


class DeferredBytes(ABC):
    """Bytes that a value has elsewhere, as on a device. The writer of the value says where they are to be copied to.

    Attributes:
        nbytes: their number.
    """

    nbytes: int

    @abstractmethod
    def copy_to(self, memory: memoryview) -> None:
        """Write the bytes into `memory`, which has room for exactly these. Returns when they are there."""
