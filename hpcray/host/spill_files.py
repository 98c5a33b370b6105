"""Spilled objects on disk: segments written and read by threads, straight out of the arena and into it.

A segment is a file without a name, so nothing is left on any disk when its raylet is gone, however it went.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcray.base.errors import StartupError
from hpcray.host.allocation_tmp import Directory, directories, look_at
from hpcray.host.arena import Arena
from hpcray.host.direct_io import PAGE, Stream, buffer, nameless, read

_READERS = 2
_CLOSING = 3.0  # seconds for the system calls that are under way at the end
_SECTOR = 512
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE

_fallocate = ctypes.CDLL(None).fallocate

Report = tuple[bytes, str | None]
"""What has ended: the object's id (b"" for a write), and the error, if any."""


_Works = queue.SimpleQueue[Callable[[], None]]


@dataclass(slots=True)
class _Desk:
    """What one thread does. job: the name of its read, b"" for a write; None: it waits for work. moved: when it began,
    or last came back from a system call (seconds, monotonic)."""

    job: bytes | None = None
    moved: float = 0.0


class SpillFiles:
    """The disk of one node store. Every call returns at once; ends are told through `fileno` and `reports`.

    Threads and files are made when they are first needed: a job that never spills has none.

    Args:
        directory: where the files are made.
        arena: of this node.
        say: called once, by `reports`, with a line about where objects go, when the first one does.
    """

    def __init__(self, directory: str, arena: Arena, say: Callable[[str], None]) -> None:
        self.directory = directory
        self._arena = arena
        self._say = say
        self._segments: dict[int, int] = {}
        self._discards: _Works = queue.SimpleQueue()
        # By segment: bytes that matter no more and still take space, and where they are.
        self._dead: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        self._writes: _Works = queue.SimpleQueue()
        self._reads: _Works = queue.SimpleQueue()
        self._works = {"write": self._writes, "discard": self._discards}
        self._works |= {f"read-{number}": self._reads for number in range(_READERS)}
        self._desks: dict[str, _Desk] = {}
        self._under_way: dict[bytes, None] = {}
        self._ended: deque[Report] = deque()
        self._words: deque[str] = deque()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._threads: list[threading.Thread] = []
        self._own = threading.local()
        self._told = False
        self._closed = False

    def fileno(self) -> int:
        """Readable when `reports` has something to tell."""
        return self._event

    def reports(self) -> list[Report]:
        """What has ended since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
            self._under_way.pop(ended[-1][0], None)
        while self._words:
            self._say(self._words.popleft())
        return ended

    def stuck(self, limit: float) -> tuple[list[bytes], float]:
        """What has not moved for `limit` seconds: names of reads, b"" for the write; and for how many seconds.

        A system call moves at most 16 MB. What waits to be read is stuck when all threads that read are.
        """
        now = time.monotonic()
        jobs = {name: (desk.job, now - desk.moved) for name, desk in self._desks.items()}
        held = {name: (job, still) for name, (job, still) in jobs.items() if job is not None and still >= limit}
        names = [job for job, _ in held.values()]
        if len(held) - ("write" in held) == _READERS:
            names = [b""] * ("write" in held) + [ident for ident in self._under_way if ident]
        return names, max((still for _, still in held.values()), default=0.0)

    @property
    def busy(self) -> bool:
        """Whether the end of anything has still to be reported."""
        return bool(self._under_way)

    def write(self, segment: int, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Write pieces (offset in the arena, size, position in the segment), all in bytes. One write at a time."""
        self._under_way[b""] = None
        try:
            self._start()
        except RuntimeError as problem:  # of the threads: `ulimit -u`, or what a cgroup allows
            self._tell(b"", f"{problem}: no more are allowed, by `ulimit -u` or a cgroup ({self.directory})")
            return
        self._writes.put(lambda: self._write(segment, pieces))

    def read(self, ident: bytes, segment: int, offset: int, size: int, position: int) -> None:
        """Read bytes of a segment into the arena. It was written, so there are threads."""
        self._under_way[ident] = None
        self._reads.put(lambda: self._read(ident, segment, offset, size, position))

    def discard(self, segment: int, position: int, size: int, last: bool) -> None:
        """These bytes are not needed any more; last: nor is the rest.

        The disk space is given back at the latest when as much of a segment is dead as is alive: a disk that is told
        of each object has little time for anything else.
        """
        self._discards.put(lambda: self._discard(segment, position, size, last))

    def path(self, segment: int) -> str:
        """Where other processes of this user can open a segment that has been written to, as long as this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._segments[segment]}"

    def close(self) -> None:
        """Stop the threads, at the next system call, and close all files. What is under way is not reported."""
        self._closed = True
        for work in (self._writes, self._discards, *[self._reads] * _READERS):
            work.put(_nothing)
        deadline = time.monotonic() + _CLOSING
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return  # in a call to a file system that does not answer; it uses the files until this process has ended
        for fd in self._segments.values():
            with contextlib.suppress(OSError):
                os.close(fd)
        self._segments.clear()
        os.close(self._event)

    # ------------------------------------------------------------ in the threads

    def _start(self) -> None:
        """All threads, before anything is written: what is on disk can then be read."""
        if len(self._desks) == len(self._works):
            return
        for name in [name for name in self._works if name not in self._desks]:
            desk = _Desk()
            args = (self._works[name], desk)
            thread = threading.Thread(target=self._serve, args=args, name=f"hpcray-spill-{name}", daemon=True)
            thread.start()
            self._desks[name] = desk
            self._threads.append(thread)

    def _serve(self, work: _Works, desk: _Desk) -> None:
        self._own.desk = desk
        while not self._closed:
            work.get()()

    def _begin(self, job: bytes) -> None:
        desk = self._own.desk
        desk.moved = time.monotonic()
        desk.job = job

    def _write(self, segment: int, pieces: Sequence[tuple[int, int, int]]) -> None:
        self._begin(b"")
        error = None
        try:
            if not self._told:
                self._words.append(describe(look_at(self.directory)))  # here, as it may take long
                self._told = True
            fd = self._segments.get(segment)
            if fd is None:
                fd = self._segments[segment] = nameless(self.directory)
            stream = Stream(fd, pieces[0][2], self._bounce(), self._over)
            for offset, size, position in pieces:
                stream.skip_to(position)
                stream.put(self._arena.view(offset, size), not offset % PAGE)
            stream.finish()
        except Exception as problem:  # whatever it is: without a report everybody would wait for ever
            error = self._describe(problem)
        self._end(b"", error)

    def _read(self, ident: bytes, segment: int, offset: int, size: int, position: int) -> None:
        self._begin(ident)
        error = None
        try:
            fd = self._segments.get(segment)
            if fd is None:
                raise OSError("it was given up meanwhile")
            read(fd, position, self._arena.view(offset, size), not offset % PAGE, self._bounce(), self._over)
        except Exception as problem:
            error = self._describe(problem)
        self._end(ident, error)

    def _discard(self, segment: int, position: int, size: int, last: bool) -> None:
        fd = self._segments.get(segment)
        if fd is None:
            return  # it could not be made
        if last:
            del self._segments[segment]
            self._dead.pop(segment, None)
            with contextlib.suppress(OSError):  # some network file systems tell here what went wrong before
                os.close(fd)
            return
        total, dead = self._dead.get(segment, (0, []))
        dead.append((position, position + size))
        self._dead[segment] = (total + size, dead)
        try:
            taken = os.fstat(fd).st_blocks * _SECTOR
        except OSError:  # a stale handle, a broken disk: its reads will tell
            return
        if 2 * (total + size) >= taken:
            for begin, end in _joined(dead):
                begin, end = -(-begin // PAGE) * PAGE, end // PAGE * PAGE
                if end > begin:  # not every file system can
                    _fallocate(fd, _PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(end - begin))
            self._dead[segment] = (0, [])

    def _bounce(self) -> memoryview:
        """A buffer of this thread's own."""
        found: memoryview | None = getattr(self._own, "bounce", None)
        if found is None:
            found = self._own.bounce = buffer()
        return found

    def _describe(self, problem: Exception) -> str:
        text = problem.strerror if isinstance(problem, OSError) else ""
        return f"{text or str(problem) or type(problem).__name__} ({self.directory})"

    def _over(self) -> bool:
        """Asked before each system call."""
        self._own.desk.moved = time.monotonic()
        return self._closed

    def _end(self, ident: bytes, error: str | None) -> None:
        self._own.desk.job = None  # before it is told: what has ended is not stuck
        self._tell(ident, error)

    def _tell(self, ident: bytes, error: str | None) -> None:
        self._ended.append((ident, error))
        with contextlib.suppress(OSError):
            os.eventfd_write(self._event, 1)


def spill_directory(chosen: str) -> str:
    """Where a node spills: what the user chose, else the first node-local directory for temporary files on a disk.

    Raises:
        StartupError: no files can be made in the chosen one.
    """
    if chosen:
        if not os.path.isdir(chosen) or not look_at(chosen).writable:
            raise StartupError(
                f"HPCRAY_SPILL_DIR={chosen!r} is not a directory in which this user may make files on host "
                f"{os.uname().nodename}; hint: name one that exists on every node, or leave it out"
            )
        return chosen
    usable = [directory for directory in directories() if directory.writable]
    good = [directory for directory in usable if directory.node_local and not directory.in_memory]
    return (good or usable)[0].path if usable else tempfile.gettempdir()


def describe(directory: Directory) -> str:
    """The line that says where objects are spilled to, with a warning where that is a bad place."""
    text = (
        f"the object store is full; objects are spilled to {directory.path} ({directory.kind or 'unknown'} file system"
    )
    text += f", {directory.free / 1e9:.1f} GB free)"
    if not directory.node_local:
        text += "; this is a network file system, which is slow and shared. hint: set HPCRAY_SPILL_DIR to a local disk"
    elif directory.in_memory:
        text += "; this takes memory, too. hint: set HPCRAY_SPILL_DIR to a directory on a disk"
    return text


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes in as few ranges as possible."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _nothing() -> None:
    """Wakes a thread, so that it looks whether it is to end."""
