"""The node's shared memory: a memfd that every process of the node maps whole.

A memfd has no name, so nothing is left in any file system when the last process that holds it is gone, however that
process ended. The raylet's allocator decides where objects lie in it; this module is only the memory: mapping it,
copying into it by several threads, and populating its pages ahead of the allocator.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

from hpcray.common.config import Config
from hpcray.common.exceptions import StartupError
from hpcray.common.memory import (
    PARALLEL_COPY_SIZE,
    DeferredBytes,
    copy_in_parallel,
    copy_thread_count,
    madvise,
    parallel_copy,
)
from hpcray.platform.direct_io import PAGE, open_unnamed_file
from hpcray.platform.resource_limits import read_meminfo, usable_memory
from hpcray.protocol.messages.objects import OVERFLOW

# ------------------------------------------------------------ overflow file
# The file that holds what a node's store has no memory for, mapped range by range by the processes that use it.


OVERFLOW_SIZE = 1 << 43
"""Bytes that the file may span. Space on the disk is taken by what is reserved only."""
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_libc = ctypes.CDLL(None, use_errno=True)


class OverflowMapping:
    """A process's access to an overflow file. The file is opened with the first range.

    Args:
        path: where it can be opened as long as its raylet lives; "": there is none.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1

    @classmethod
    def create(cls, directory: str) -> OverflowMapping:
        """Make such a file, without a name: it is gone when this process is, however that ended. In a directory where
        no file can be made, `path` stays ""."""
        made = cls("")
        with contextlib.suppress(OSError):
            made._fd = open_unnamed_file(directory, direct=False)
            made.path = f"/proc/{os.getpid()}/fd/{made._fd}"
        return made

    def map(self, position: int, size: int) -> memoryview:
        """A writable view of a range, unmapped with the last object that uses it.

        Raises:
            OSError: it cannot be mapped. ValueError: it lies beyond the end of the file.
        """
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        start = position // PAGE * PAGE
        mapping = mmap.mmap(self._fd, position + size - start, offset=start)
        return memoryview(mapping)[position - start :]

    def close(self) -> None:
        """Close the descriptor; what is mapped stays so."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def reserve(self, position: int, size: int) -> None:
        """Take disk space for a range: a write into a mapping cannot report that the disk is full.

        Raises:
            OSError: the disk is full, or its file system cannot reserve space.
        """
        if _libc.fallocate(self._fd, 0, ctypes.c_int64(position), ctypes.c_int64(size)) != 0:
            number = ctypes.get_errno() or errno.EIO
            raise OSError(number, os.strerror(number))

    def release(self, position: int, size: int) -> None:
        """Give the space of a range back, with what is in it."""
        size = -(-size // PAGE) * PAGE
        _libc.fallocate(self._fd, _PUNCH_HOLE, ctypes.c_int64(position), ctypes.c_int64(size))


# ------------------------------------------------------------ arena


STORE_MEMORY_SHARE = 0.3
MIN_ARENA_SIZE = 1 << 20

_PAGE = mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23
_GRANULE = 1 << 20  # bytes; unit in which a process remembers what it has mapped already

HUGE_PAGE_MODES = ("auto", "off", "reserved")
TOO_FEW_HUGE_PAGES = (
    "HPCRAY_HUGE_PAGES=reserved, but there are not enough free ones for the object store, so it takes ordinary pages. "
    "hint: `grep HugePages /proc/meminfo`; an administrator sets vm.nr_hugepages"
)


class ArenaError(StartupError):
    """The node's shared memory cannot be made or mapped; nothing was left behind."""


class Arena:
    """A shared memory mapping of this process. Make one with `create` (the raylet) or `attach` (all others).

    A forked child uses its parent's object as it is. The mapping goes when the arena is closed *and* the last view into
    it is dead.

    Attributes:
        fd: the memfd. Inherited by fork, closed by exec; pass it on with SCM_RIGHTS.
        size: bytes for objects.
        reserve: bytes behind them, which the raylet uses. whole: bytes of this mapping.
        reserved: True if its pages are huge pages reserved by the administrator (`Config.huge_pages`).
        copiers: number of threads that write a large buffer.
        address: where the mapping starts in this process.
        overflow: the file in which ranges from OVERFLOW on lie; None: there is none.
    """

    reserved = False

    def __init__(self, fd: int, size: int, reserve: int = 0, huge: str = "auto") -> None:
        try:
            self._map = mmap.mmap(fd, size + reserve, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            raise ArenaError(
                f"mapping {size} bytes of shared memory failed: {error}. "
                "hint: check `ulimit -v`, or choose a smaller object store (HPCRAY_OBJECT_STORE_MEMORY, in bytes)"
            ) from error
        if huge == "auto":
            with contextlib.suppress(OSError, AttributeError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.fd = fd
        self.size = size
        self.reserve = reserve
        self.whole = size + reserve
        self._view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._mapped = bytearray(-(-size // _GRANULE))
        self.copiers = copy_thread_count()
        self.overflow: OverflowMapping | None = None

    @classmethod
    def create(cls, size: int, reserve: int = 0, huge: str = "auto") -> Arena:
        """Make shared memory of `size` bytes. No page of it is used until it is written.

        Args:
            size: bytes for objects.
            reserve: bytes behind them for the raylet itself.
            huge: "auto": huge pages where the system gives them for the asking; "off"; "reserved": those that were set
                aside (vm.nr_hugepages); where these do not suffice, "auto".

        Raises:
            ArenaError: it is smaller than 1 MiB, larger than what this machine can give now, or refused by the system.
        """
        if size < MIN_ARENA_SIZE:
            raise ArenaError(f"an object store of {size} bytes is too small; hint: give it at least {MIN_ARENA_SIZE}")
        if huge not in HUGE_PAGE_MODES:
            raise ArenaError(f"huge_pages={huge!r} is not one of {', '.join(HUGE_PAGE_MODES)}; hint: HPCRAY_HUGE_PAGES")
        if huge == "reserved":
            made = cls._of_reserved_pages(size, reserve)
            if made is not None:
                return made
            huge = "auto"
        available = available_memory()
        if size > available:
            raise ArenaError(
                f"an object store of {size} bytes does not fit: this machine has {available} bytes to give "
                f"(memory limit of this job {usable_memory()}, available now {_available_now()}). "
                f"hint: set HPCRAY_OBJECT_STORE_MEMORY to at most {int(available * STORE_MEMORY_SHARE)}, "
                "or ask for more memory"
            )
        fd = os.memfd_create("hpcray-arena", os.MFD_CLOEXEC)
        try:
            os.fchmod(fd, 0o600)  # the default is 0777; other users cannot open it through /proc anyway
            os.ftruncate(fd, size + reserve)
            return cls(fd, size, reserve, huge)
        except OSError as error:
            os.close(fd)
            raise ArenaError(
                f"making an object store of {size} bytes failed: {error}. hint: check `ulimit -f`, "
                "or choose a smaller one (HPCRAY_OBJECT_STORE_MEMORY, in bytes)"
            ) from error
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def _of_reserved_pages(cls, size: int, reserve: int) -> Arena | None:
        """An arena of reserved huge pages; None if there are too few of them."""
        page = _huge_page()
        size, reserve = size // page * page, -(-reserve // page) * page
        if not size:
            return None
        fd = -1
        try:
            fd = os.memfd_create("hpcray-arena", os.MFD_CLOEXEC | os.MFD_HUGETLB)
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size + reserve)
            made = cls(fd, size, reserve, "off")  # this sets them aside for us, so that no access can lack them later
        except (OSError, ArenaError):
            if fd >= 0:
                os.close(fd)
            return None
        made.reserved = True
        return made

    @classmethod
    def attach(cls, fd: int, size: int, huge: str = "auto", reserve: int = 0) -> Arena:
        """Map an arena whose descriptor this process got from its raylet; the arena owns `fd` from here on.

        Args:
            fd: as it came.
            size: bytes for objects.
            huge: as for `create`.
            reserve: bytes behind them that are mapped, too.

        Raises:
            ArenaError: `fd` holds less than `size + reserve` bytes, or cannot be mapped; `fd` stays open.
        """
        have = os.fstat(fd).st_size
        if have < size + reserve or size <= 0:
            raise ArenaError(f"the shared memory got from the raylet has {have} bytes, {size + reserve} were announced")
        return cls(fd, size, reserve, huge)

    def view(self, offset: int, size: int) -> memoryview:
        """A writable view, to fill a block. The view pins nothing: the caller holds the block meanwhile.

        Raises:
            ValueError: the range is not inside the arena.
        """
        return self._range(offset, size)

    def pinned_view(self, offset: int, size: int, on_dead: Callable[[], object]) -> memoryview:
        """A read-only view with a callback for its death, and the death of all that was made from it.

        Slices, NumPy arrays and anything else that holds the buffer, directly or through each other, keep it alive.

        Args:
            offset, size: bytes.
            on_dead: called once, in any thread, perhaps inside the garbage collector: it must not block or raise. It
                is not called when the interpreter is shutting down.

        Raises:
            ValueError: the range is not inside the arena.
        """
        view: memoryview = _watched(self._range(offset, size), on_dead).data
        return view.toreadonly()

    def map_again(self, start: int, end: int) -> mmap.mmap:
        """Map a part of the arena once more, for as long as the result lives.

        Args:
            start: in bytes, a multiple of the page size.

        Raises:
            OSError, ValueError: there is no such part, or the system refuses.
        """
        if not 0 <= start < end <= self.whole or self.fd < 0:
            raise ValueError(f"range {start}..{end} is not in the arena")
        return mmap.mmap(self.fd, end - start, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=start)

    def filled_view(self, offset: int, size: int, on_dead: Callable[[], object]) -> memoryview:
        """Like `pinned_view`, but writable, and with all of its pages populated: to fill a block in place."""
        memory = self._range(offset, size)
        if size >= _GRANULE:
            self._map_pages(offset, size)
        view: memoryview = _watched(memory, on_dead).data
        return view

    def borrowed_view(self, offset: int, size: int, on_dead: Callable[[], object]) -> tuple[memoryview, int]:
        """A writable view with a callback for its death, as `pinned_view`, for a raylet, which has no NumPy.

        Args:
            offset, size: bytes. There should be few sizes, as each makes a type of its own.
            on_dead: as for `pinned_view`.

        Returns:
            The view, and a number that the `obj` of all views made from it has as its `id`.
        """
        self._range(offset, size)
        array = (ctypes.c_char * size).from_buffer(self._map, offset)
        ref = weakref.ref(array, _reap)
        _pins[id(ref)] = (ref, on_dead)
        return memoryview(array).cast("B"), id(array)

    def write(self, offset: int, source: Any) -> None:
        """Copy a C-contiguous buffer, or `DeferredBytes`, into the arena; other threads run meanwhile when it is large.

        Raises:
            ValueError: it does not fit between `offset` and the end of the arena.
            TypeError: it is not C-contiguous.
        """
        try:
            data = memoryview(source)
        except TypeError:
            if not isinstance(source, DeferredBytes):
                raise
            if source.nbytes:
                memory = self._range(offset, source.nbytes)
                self._map_pages(offset, source.nbytes)
                source.copy_to(memory)
            return
        size = data.nbytes
        if not size:
            return
        memory = self._range(offset, size)
        data = data.cast("B")
        if size < _GRANULE:
            memory[:] = data
            return
        self._map_pages(offset, size)
        np = _numpy()
        target = np.frombuffer(memory, np.uint8)
        if size >= PARALLEL_COPY_SIZE and self.copiers > 1:
            parallel_copy(np.copyto, target, np.frombuffer(data, np.uint8), self.copiers)
        else:
            np.copyto(target, np.frombuffer(data, np.uint8))

    def write_all(self, base: int, pieces: Sequence[tuple[int, Any]]) -> None:
        """Copy several C-contiguous buffers; where they are large together, in several threads.

        Args:
            base: added to the offset of each. pieces: offset and buffer.

        Raises:
            ValueError, TypeError: as `write`.
        """
        if self.copiers > 1 and len(pieces) > 2:
            sizes = [_size(piece) for _, piece in pieces]
            if sum(sizes) >= PARALLEL_COPY_SIZE > max(sizes):  # else `write` sees to it
                self._write_in_parallel(base, pieces)
                return
        for at, piece in pieces:
            self.write(base + at, piece)

    def _write_in_parallel(self, base: int, pieces: Sequence[tuple[int, Any]]) -> None:
        np = _numpy()
        pairs = []
        for at, piece in pieces:
            if _size(piece) < _GRANULE or isinstance(piece, DeferredBytes):
                self.write(base + at, piece)
                continue
            data = memoryview(piece)
            memory = self._range(base + at, data.nbytes)
            self._map_pages(base + at, data.nbytes)
            pairs.append((np.frombuffer(memory, np.uint8), np.frombuffer(data.cast("B"), np.uint8)))
        copy_in_parallel(np.copyto, pairs, self.copiers)

    def populate(self, offset: int, size: int) -> bool:
        """Give these pages memory and map them here, without changing what they hold. Other threads run meanwhile.

        Returns:
            False where the kernel cannot (before Linux 5.14): pages are then populated when first written.
        """
        start = offset // _PAGE * _PAGE
        end = min(self.size, offset + size)
        return end <= start or madvise(self.address + start, end - start, _MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Close the descriptor and drop the mapping, or leave it to the last view that is alive."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        if self.overflow is not None:
            self.overflow.close()
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()
        self._view = memoryview(b"")

    def _map_pages(self, offset: int, size: int) -> None:
        """Map a range in one go where this process writes it for the first time: page faults cost twice as much."""
        if offset >= OVERFLOW:
            return
        first, last = offset // _GRANULE, (offset + size - 1) // _GRANULE + 1
        if self._mapped.find(0, first, last) >= 0 and self.populate(offset, size):
            # The granules at the ends may be mapped in part only; to fault the rest is cheap enough.
            self._mapped[first:last] = b"\1" * (last - first)

    def _range(self, offset: int, size: int) -> memoryview:
        if offset < 0 or size < 0 or offset + size > self.whole or self.fd < 0:
            if offset >= OVERFLOW and self.fd >= 0 and self.overflow is not None:
                return self.overflow.map(offset - OVERFLOW, size)
            state = "is closed" if self.fd < 0 else f"has {self.size} bytes"
            raise ValueError(f"range {offset}..{offset + size} is not in the arena, which {state}")
        return self._view[offset : offset + size]


def _size(piece: Any) -> int:
    return len(piece) if type(piece) is bytes else int(piece.nbytes)


def watched_view(memory: memoryview, on_dead: Callable[[], object]) -> memoryview:
    """Return a read-only view of memory with a callback for its death; see `Arena.pinned_view`."""
    view: memoryview = _watched(memory, on_dead).data
    return view.toreadonly()


def _watched(memory: memoryview, on_dead: Callable[[], object]) -> Any:
    # A memoryview cannot be weakly referenced, the array it views can, and the buffer protocol keeps that alive.
    # Were it a slice of another array, `numpy.ndarray(buffer=view)` would keep that one alive instead.
    np = _numpy()
    array = np.frombuffer(memory, np.uint8)
    ref = weakref.ref(array, _reap)
    _pins[id(ref)] = (ref, on_dead)
    return array


@cache
def _numpy() -> ModuleType:
    """NumPy, imported when objects are read or written: a raylet only moves them, and starts faster without it."""
    import numpy

    return numpy


def _huge_page() -> int:
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("Hugepagesize:"):
                return int(line.split()[1]) * 1024
    return 2 << 20


def default_arena_size(config: Config, ranks_on_host: int = 1) -> int:
    """Arena size of one node: the configured size, or 30 % of the memory this machine can give, shared by the ranks.

    Args:
        config: its `object_store_memory` is used as it is when it is not 0.
        ranks_on_host: how many ranks of the job run on this host.
    """
    if config.object_store_memory:
        return config.object_store_memory
    share = int(available_memory() * STORE_MEMORY_SHARE) // max(1, ranks_on_host)
    return max(MIN_ARENA_SIZE, share // MIN_ARENA_SIZE * MIN_ARENA_SIZE)


def available_memory() -> int:
    """Bytes that can be had now: what is available on the machine, cut to the memory limit of the cgroup."""
    return min(usable_memory(), _available_now())


def _available_now() -> int:
    return read_meminfo().get("MemAvailable") or usable_memory()


# The weak references of all pins, which must live until they fire, with what to call then.
_pins: dict[int, tuple[Any, Callable[[], object]]] = {}


def _reap(
    ref: Any,
    pop: Callable[[int, None], tuple[Any, Callable[[], object]] | None] = _pins.pop,
    finalizing: Callable[[], bool] = sys.is_finalizing,
) -> None:
    """Handle the death of a pinned array. All that is needed is bound as a default: this may run while modules are torn
    down."""
    entry = pop(id(ref), None)
    if entry is not None and not finalizing():
        entry[1]()


PREFAULT_WINDOW = 256 << 20
PREFAULT_STEP = 2 << 20


class Prefaulter:
    """Populates arena pages in the background, a window ahead of what was ever allocated.

    The thread starts with the first allocation, so an idle job stays idle. It runs ahead by as many bytes as were ever
    allocated, at most by `window`; both bound the memory that is populated and never used. The thread has the lowest
    priority and ends when the window is full; the next call that raises the high-water mark starts it again.

    Args:
        arena: of this node; populated through the raylet's mapping.
        window: maximum bytes ahead of the high-water mark; 0 disables the prefaulter.

    Attributes:
        populated_to: end of what was populated so far.
    """

    def __init__(self, arena: Arena, window: int = PREFAULT_WINDOW) -> None:
        self._arena = arena
        self._window = window
        self._lock = threading.Lock()
        self._target = 0
        self.populated_to = 0
        self._thread: threading.Thread | None = None
        self._stopped = window <= 0

    @property
    def idle(self) -> bool:
        """True if no thread runs: nothing is left to populate."""
        return self._thread is None

    def allocated_to(self, high_water: int) -> None:
        """Report the highest offset that was ever allocated. Cheap when it has not moved far; never blocks."""
        target = min(self._arena.size, high_water + min(self._window, high_water))
        # Small moves are batched: a thread per put would cost more than it gains.
        moved_little = target < self._target + PREFAULT_STEP and target < self._arena.size
        if self._stopped or moved_little or target <= self._target:
            return
        with self._lock:
            self._target = target
            self.populated_to = max(self.populated_to, high_water)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hpcray-prefault", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it: at most one step. Call it before the arena is closed."""
        with self._lock:
            self._stopped = True
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while True:
            with self._lock:
                start = self.populated_to
                if self._stopped or start >= self._target:
                    self._thread = None
                    return
                size = min(PREFAULT_STEP, self._target - start)
                self.populated_to = start + size
            if not self._arena.populate(start, size):
                self._stopped = True
