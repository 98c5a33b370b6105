"""Shared memory of channels: rings of slots that one process writes and others of its node read.

The memory is a memfd, which its maker keeps open. Others of the same user open it by `/proc/<pid>/fd/<fd>`: nothing has
a name in a file system, and nothing is left when all have ended, however they did.

The first line (64 bytes) of the memory begins with the word CLOSED. Each channel has, in lines of their own, the number
of values written, whether its writer sleeps, and for each reader the number of values read and whether it sleeps. These
words are written by one process each, and numbers wrap at 2**32. A slot is a header and the bytes of one value.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import platform
import struct
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hpcray.platform.busy_poll import PAUSE_DECAY, PREEMPTED, SHORTEST_PAUSE, SpinWindow

# ------------------------------------------------------------ futex
# Futexes: a thread sleeps in the kernel until another process wakes it at a word of shared memory.


_SYSCALL = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}.get(platform.machine())
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF
_POLL = 0.0002
"""Seconds between two looks where the number of the system call is not known."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
_barrier = threading.Lock()


def fence() -> None:
    """Make all writes of this thread visible to other processes before it reads anything further."""
    with _barrier:  # an atomic instruction, and a system call that POSIX lists as one that synchronizes memory
        pass


def wait(address: int, expected: int, timeout: float) -> None:
    """Sleep until `wake` is called for the word at `address`, at most `timeout` seconds; at once if the word is not
    `expected`. It may return early, as at a signal."""
    if _SYSCALL is None:
        time.sleep(min(timeout, _POLL))
        return
    seconds = int(timeout)
    limit = _Timespec(seconds, int((timeout - seconds) * 1e9))
    _syscall(_SYSCALL, address, _WAIT, expected, ctypes.addressof(limit))


def wake(address: int) -> None:
    """Wake all threads that wait at the word, in any process."""
    if _SYSCALL is not None:
        _syscall(_SYSCALL, address, _WAKE, _EVERYBODY, None)


# ------------------------------------------------------------ channel memory


LINE = 64
WORD = 4
MASK = 0xFFFFFFFF
PAGE = mmap.PAGESIZE
_CLOSED = 0
_SLOT = struct.Struct("<QQQQ")
_LOOK = 0.25
"""Seconds. A sleeper looks this often whether the memory was closed meanwhile."""
FOREVER = float("inf")


class ChannelClosed(Exception):  # no error: how every loop ends
    """The memory was closed; nothing more is written or read."""


class RingShape(NamedTuple):
    """How large a channel is: its readers, its slots, and the bytes of a slot."""

    readers: int
    slots: int
    capacity: int


class MappedFile:
    """A memfd in this process.

    Attributes:
        place: (pid, descriptor, size), by which others open it.
        words: the memory as numbers of 32 bits. view: the same as bytes. address: where it is in this process.
    """

    def __init__(self, fd: int, size: int, pid: int) -> None:
        self._fd = fd if pid == os.getpid() else -1
        self.map = mmap.mmap(fd, size)
        self.place = (pid, fd, size)
        self.view = memoryview(self.map)
        self.words = self.view.cast("I")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    @classmethod
    def create(cls, size: int) -> MappedFile:
        """Make one of zeros."""
        fd = os.memfd_create("hpcray-channels", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(fd, size, os.getpid())

    @classmethod
    def open(cls, pid: int, fd: int, size: int) -> MappedFile:
        """Open that of another process of this node.

        Raises:
            OSError: the process has ended.
        """
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            made = cls(own, size, pid)
        finally:
            os.close(own)
        made._fd = -1
        return made

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)


class ChannelMemory(SpinWindow):
    """The channels of one graph on one node. All its processes know the same shapes."""

    def __init__(self, file: MappedFile, shapes: Sequence[RingShape], spin: float) -> None:
        super().__init__(spin)
        self.file = file
        self.rings, at = [], LINE
        for shape in shapes:
            self.rings.append((shape, at))
            at += _size_of(shape)

    @classmethod
    def create(cls, shapes: Sequence[RingShape], spin: float) -> ChannelMemory:
        """Make memory for channels of these shapes."""
        size = LINE + sum(map(_size_of, shapes))
        return cls(MappedFile.create(size), shapes, spin)

    @classmethod
    def open(cls, place: tuple[int, int, int], shapes: Sequence[RingShape], spin: float) -> ChannelMemory:
        """Open the memory that another process has made.

        Raises:
            OSError: that process has ended.
        """
        return cls(MappedFile.open(*place), shapes, spin)

    @property
    def closed(self) -> bool:
        """True after `close`, in any process."""
        return bool(self.file.words[_CLOSED])

    def close(self) -> None:
        """End all waits of all processes: they raise `ChannelClosed`."""
        self.file.words[_CLOSED] = 1
        fence()
        for shape, at in self.rings:
            for line in range(2 + 2 * shape.readers):
                wake(self.file.address + at + line * LINE)

    def wait(self, word: int, old: int, flag: int, deadline: float) -> bool:
        """Wait until a word is not `old`, polling for a while if that paid lately (docs/decisions/0010-spinning.md).

        Args:
            word, flag: places of the word, and of that which says that this process sleeps.
            deadline: by `time.monotonic()`.

        Returns:
            False when the deadline has passed.

        Raises:
            ChannelClosed: `close` was called.
        """
        words = self.file.words
        if self._window and self._poll(word, old, deadline):
            return True
        began = time.monotonic()
        try:
            while True:
                words[flag] = 1
                fence()
                if words[word] != old:
                    break
                if words[_CLOSED]:
                    raise ChannelClosed
                left = min(_LOOK, deadline - time.monotonic())
                if left <= 0:
                    return False
                wait(self.file.address + word * WORD, old, left)
        finally:
            words[flag] = 0
        now = time.monotonic()
        if now - began < self._limit and now >= self._not_before:
            self._window = self._limit
        return True

    def _poll(self, word: int, old: int, deadline: float) -> bool:
        words, clock, give_way = self.file.words, time.monotonic, os.sched_yield
        last = clock()
        until = min(last + self._window, deadline)
        while words[word] == old:
            give_way()
            now = clock()
            foreign = now - last > PREEMPTED
            if now >= until or foreign:
                self._narrow(0.0 if foreign else self._window / 2, now)
                return words[word] != old
            last = now
        self._window = self._limit
        self._pause = max(SHORTEST_PAUSE, self._pause * PAUSE_DECAY)
        return True


class RingWriter:
    """The writing end of a channel. One thread uses it."""

    def __init__(self, memory: ChannelMemory, channel: int) -> None:
        self._memory, self._words = memory, memory.file.words
        self.shape, at = memory.rings[channel]
        self._written, self._sleeps = at // WORD, (at + LINE) // WORD
        self._read = [(at + (2 + 2 * reader) * LINE) // WORD for reader in range(self.shape.readers)]
        self._readers_sleep = [word + LINE // WORD for word in self._read]
        self._slots = at + _lines_of(self.shape)
        self._stride = _stride_of(self.shape)
        self._number = 0
        self._room_until = self.shape.slots
        self._address = memory.file.address + at

    def slot(self, deadline: float) -> tuple[int, memoryview]:
        """Wait for a free slot.

        Returns:
            Where it is, for `publish`, and its bytes.

        Raises:
            TimeoutError: none was free in time. ChannelClosed: none will be.
        """
        words = self._words
        while self._number >= self._room_until:
            behind, slowest = max(((self._number - words[word]) & MASK, word) for word in self._read)
            self._room_until = self._number - behind + self.shape.slots
            old = (self._number - behind) & MASK
            if behind >= self.shape.slots and not self._memory.wait(slowest, old, self._sleeps, deadline):
                raise TimeoutError
        at = self._slots + self._number % self.shape.slots * self._stride
        return at, self._memory.file.view[at + LINE : at + LINE + self.shape.capacity]

    def publish(self, at: int, *header: int) -> None:
        """Hand a slot to the readers, with four numbers of its header."""
        _SLOT.pack_into(self._memory.file.map, at, *header)
        self._number += 1
        words = self._words
        fence()
        words[self._written] = self._number & MASK
        fence()
        for flag in self._readers_sleep:
            if words[flag]:
                wake(self._address)
                return


class RingReader:
    """One reading end of a channel. One thread uses it."""

    def __init__(self, memory: ChannelMemory, channel: int, reader: int) -> None:
        self._memory, self._words = memory, memory.file.words
        self._shape, at = memory.rings[channel]
        self._written, self._writer_sleeps = at // WORD, (at + LINE) // WORD
        line = at + (2 + 2 * reader) * LINE
        self._read, self._sleeps = line // WORD, (line + LINE) // WORD
        self._slots = at + _lines_of(self._shape)
        self._stride = _stride_of(self._shape)
        self._number = 0
        self._address = memory.file.address + line

    def ready(self) -> bool:
        """Return True if `next` would return at once."""
        return self._words[self._written] != self._number & MASK

    def wait(self, deadline: float) -> None:
        """Wait until `ready`. Raises what `next` raises; an interrupt changes nothing."""
        old = self._number & MASK
        if self._words[self._written] == old and not self._memory.wait(self._written, old, self._sleeps, deadline):
            raise TimeoutError

    def next(self, deadline: float) -> tuple[tuple[int, int, int, int], memoryview]:
        """Wait for the next value. It stays where it is until `done`.

        Returns:
            The numbers of its header, and the bytes of its slot.

        Raises:
            TimeoutError: none came in time. ChannelClosed: none will come.
        """
        self.wait(deadline)
        fence()
        memory = self._memory
        at = self._slots + self._number % self._shape.slots * self._stride
        header = _SLOT.unpack_from(memory.file.map, at)
        return header, memory.file.view[at + LINE : at + LINE + self._shape.capacity]

    def done(self) -> None:
        """Give the slot back to the writer."""
        self._number += 1
        words = self._words
        words[self._read] = self._number & MASK
        fence()
        if words[self._writer_sleeps]:
            wake(self._address)


def _stride_of(shape: RingShape) -> int:
    return LINE + -(-shape.capacity // LINE) * LINE


def _lines_of(shape: RingShape) -> int:
    return -(-(2 + 2 * shape.readers) * LINE // PAGE) * PAGE


def _size_of(shape: RingShape) -> int:
    return -(-(_lines_of(shape) + shape.slots * _stride_of(shape)) // PAGE) * PAGE


# ------------------------------------------------------------ value memory
# Memory for large values of channels: written by one process, read in place by others, used again when all are done.
#
# A file begins with a line (64 bytes) for each reader, whose first word is the number of the last use that the reader
# has let go of. Readers let go when no array is left that views the memory, so a value stays as it is while it is in
# use, whatever is written meanwhile: that goes to other memory.

_serials = itertools.count(1)


class _Block:
    """A file of the writer's. use: the number of the value that it holds or held last."""

    __slots__ = ("file", "serial", "size", "use")

    def __init__(self, readers: int, size: int) -> None:
        self.serial = next(_serials)
        self.use = 0
        self.size = -(-size // PAGE) * PAGE
        self.file = MappedFile.create(_head(readers) + self.size)


class ValueMemory:
    """The writer's blocks, as many as values are in use at a time.

    Args:
        readers: how many read each value.
    """

    def __init__(self, readers: int) -> None:
        self._readers = readers
        self._blocks: list[_Block] = []

    def take(self, size: int) -> tuple[tuple[int, int, int, int], memoryview]:
        """Find memory for a value that no reader uses.

        Returns:
            What readers must know (for `ValueViews.view`), and the memory.
        """
        free = [block for block in self._blocks if self._is_free(block)]
        block = min((block for block in free if block.size >= size), key=lambda block: block.size, default=None)
        if block is None:
            for small in free:
                self._blocks.remove(small)
            block = _Block(self._readers, size)
            self._blocks.append(block)
        block.use += 1
        _, fd, whole = block.file.place
        head = _head(self._readers)
        return (block.serial << 32 | block.use & MASK, fd, whole, size), block.file.view[head : head + size]

    def _is_free(self, block: _Block) -> bool:
        words = block.file.words
        return all(words[reader * LINE // WORD] == block.use & MASK for reader in range(self._readers))


class ValueViews:
    """The blocks of one writer as one of its readers sees them.

    Args:
        pid: the writer. readers: how many there are. reader: which one this is. kept: blocks that stay mapped.
    """

    def __init__(self, pid: int, readers: int, reader: int, kept: int) -> None:
        self._pid, self._head, self._word, self._kept = pid, _head(readers), reader * LINE // WORD, kept
        self._files: OrderedDict[int, MappedFile] = OrderedDict()

    def view(self, header: tuple[int, int, int, int]) -> memoryview:
        """Return the memory of a value, which is let go of when no view of it is left.

        Raises:
            OSError: the writer has ended.
        """
        use, fd, whole, size = header
        serial = use >> 32
        file = self._files.get(serial)
        if file is None:
            file = self._files[serial] = MappedFile.open(self._pid, fd, whole)
            if len(self._files) > self._kept:
                self._files.popitem(last=False)
        else:
            self._files.move_to_end(serial)
        array = (ctypes.c_char * size).from_buffer(file.map, self._head)
        _watch(array, _Release(file.words, self._word, use & MASK))
        return memoryview(array).cast("B")


class _Release:
    __slots__ = ("_use", "_word", "_words")

    def __init__(self, words: memoryview, word: int, use: int) -> None:
        self._words, self._word, self._use = words, word, use

    def __call__(self) -> None:
        self._words[self._word] = self._use


_watched: dict[int, tuple[Any, Callable[[], None]]] = {}


def _watch(array: Any, on_dead: Callable[[], None]) -> None:
    # `weakref.finalize` would do the same, and call what is left when the interpreter ends.
    ref = weakref.ref(array, _reap)
    _watched[id(ref)] = (ref, on_dead)


def _reap(ref: Any) -> None:
    found = _watched.pop(id(ref), None)
    if found is not None:
        found[1]()


def _head(readers: int) -> int:
    return -(-readers * LINE // PAGE) * PAGE
