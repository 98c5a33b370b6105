"""Spilled objects on disk: segments, which threads write straight from the arena and read straight into it.

A segment is a file without a name, so nothing is left on any disk when its raylet is gone, however that raylet ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import queue
import re
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from hpcray.common.exceptions import StartupError
from hpcray.platform.arena import OVERFLOW_SIZE, Arena, OverflowMapping
from hpcray.platform.config_files import configured_environment
from hpcray.platform.direct_io import PAGE, DirectWriter, bounce_buffer, open_unnamed_file, read_direct

_MOUNTS = "/proc/self/mountinfo"
_VARIABLES = ("HPCRAY_TMPDIR", "SLURM_TMPDIR", "SLURM_JOB_TMPDIR", "TMPDIR", "LOCAL_SCRATCH", "LOCALSCRATCH")
_SHARED = frozenset(
    {
        *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "9p"),
        *("afs", "panfs", "wekafs", "orangefs", "pvfs2", "glusterfs", "virtiofs", "dvs"),
    }
)
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_READER_THREADS = 2
_CLOSE_TIMEOUT = 3.0  # seconds for the system calls that are under way at the end
_FULL_REPORT_INTERVAL = 10.0  # seconds
_SECTOR = 512
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_fallocate = ctypes.CDLL(None).fallocate
SpillReport = tuple[bytes, str | None]
"""A completion: the object's id (b"" for a write), and the error, if any."""
_Works = queue.SimpleQueue[Callable[[], None]]


class TmpDirectory(Struct, frozen=True):
    """A directory that temporary files could go to.

    Attributes:
        path: where.
        variable: the variable that names it; "" for the system's own.
        kind: type of its file system, "" where unknown.
        free: bytes that this user may still write.
        writable: whether this user may make files there.
    """

    path: str
    variable: str
    kind: str
    free: int
    writable: bool

    @property
    def node_local(self) -> bool:
        """True if no other node sees it and no network lies between. FUSE counts as shared."""
        return self.kind not in _SHARED and not self.kind.startswith("fuse")

    @property
    def in_memory(self) -> bool:
        """True if files there take memory."""
        return self.kind in _IN_MEMORY


def tmp_directories(environ: Mapping[str, str] | None = None) -> tuple[TmpDirectory, ...]:
    """The directories that the configuration and the environment name, then /tmp; each path once, missing ones left
    out."""
    environ = configured_environment(os.environ if environ is None else environ)
    named = [(environ.get(variable, ""), variable) for variable in _VARIABLES]
    found: dict[str, TmpDirectory] = {}
    for path, variable in [*named, ("/tmp", "")]:
        if path and os.path.isdir(path) and os.path.abspath(path) not in found:
            found[os.path.abspath(path)] = inspect_tmp_directory(os.path.abspath(path), variable)
    return tuple(found.values())


def inspect_tmp_directory(path: str, variable: str = "") -> TmpDirectory:
    """The properties of one directory."""
    free = 0
    with contextlib.suppress(OSError):
        state = os.statvfs(path)
        free = state.f_bavail * state.f_frsize
    return TmpDirectory(path, variable, file_system_type(path), free, os.access(path, os.W_OK | os.X_OK))


def file_system_type(path: str, mounts: str | None = None) -> str:
    """Type of the file system that holds `path`: "ext4", "nfs4", "tmpfs", ...; "" if unknown.

    Args:
        mounts: content of /proc/self/mountinfo; None: read it.
    """
    if mounts is None:
        try:
            with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
                mounts = file.read()
        except OSError:
            return ""
    path = os.path.realpath(path)
    best, kind = -1, ""
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields, after = left.split(), right.split()
        if len(fields) < 5 or not after:
            continue
        point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields[4])
        # Of several at one point the last one covers the others.
        if len(point) >= best and (path == point or path.startswith(point.rstrip("/") + "/")):
            best, kind = len(point), after[0]
    return kind


class _ThreadState(Struct):
    """State of one thread.

    Attributes:
        job: the name of its read, b"" for a write; None: idle.
        moved: when the job began, or last returned from a system call (seconds, monotonic).
    """

    job: bytes | None = None
    moved: float = 0.0


class SpillFiles:
    """The disk of one node's object store. No call blocks; `fileno` and `reports` signal completions.

    Threads and files are made when they are first needed: a job that never spills has none.

    Args:
        directory: where the files are made.
        arena: of this node.
        say: called once, by `reports`, with a line that names the directory, after the first write.
        capacity_threshold: share of the disk beyond which nothing more is written; 0: no limit.
        report_full: called by `reports`, now and then, with a line on a disk beyond that share.

    Attributes:
        overflow: the file of objects past the store.
    """

    def __init__(
        self,
        directory: str,
        arena: Arena,
        say: Callable[[str], None],
        capacity_threshold: float = 0.0,
        report_full: Callable[[str], None] = print,
    ) -> None:
        self.directory = directory
        self.overflow = arena.overflow = OverflowMapping.create(directory)
        self._capacity_threshold = capacity_threshold
        self._arena = arena
        self._say = say
        self._segments: dict[int, int] = {}
        self._discards: _Works = queue.SimpleQueue()
        # By segment: bytes that matter no more and still take space, and where they are.
        self._dead: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        self._writes: _Works = queue.SimpleQueue()
        self._reads: _Works = queue.SimpleQueue()
        self._works = {"write": self._writes, "discard": self._discards}
        self._works |= {f"read-{number}": self._reads for number in range(_READER_THREADS)}
        self._states: dict[str, _ThreadState] = {}
        self._under_way: dict[bytes, None] = {}
        self._ended: deque[SpillReport] = deque()
        self._words: deque[str] = deque()
        self._report_full = report_full
        self._full_reports: deque[str] = deque()
        self._full_reported_at = -_FULL_REPORT_INTERVAL
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._threads: list[threading.Thread] = []
        self._own = threading.local()
        self._directory_reported = False
        self._closed = False

    def fileno(self) -> int:
        """Readable when `reports` has completions."""
        return self._event

    def reports(self) -> list[SpillReport]:
        """The completions since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
            self._under_way.pop(ended[-1][0], None)
        while self._words:
            self._say(self._words.popleft())
        while self._full_reports:
            self._report_full(self._full_reports.popleft())
        return ended

    def stuck(self, limit: float) -> tuple[list[bytes], float]:
        """Transfers without progress for `limit` seconds.

        A system call moves at most 16 MB. Queued reads are stuck when all reader threads are.

        Returns:
            Names of reads, b"" for the write; and the longest time without progress in seconds.
        """
        now = time.monotonic()
        jobs = {name: (state.job, now - state.moved) for name, state in self._states.items()}
        held = {name: (job, still) for name, (job, still) in jobs.items() if job is not None and still >= limit}
        names = [job for job, _ in held.values()]
        if len(held) - ("write" in held) == _READER_THREADS:
            names = [b""] * ("write" in held) + [ident for ident in self._under_way if ident]
        return names, max((still for _, still in held.values()), default=0.0)

    @property
    def busy(self) -> bool:
        """True if a completion is still to be reported."""
        return bool(self._under_way)

    def write(self, segment: int, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Write pieces (offset in the arena, size, position in the segment), all in bytes. One write at a time."""
        self._under_way[b""] = None
        try:
            self._start()
        except RuntimeError as problem:  # of the threads: `ulimit -u`, or what a cgroup allows
            self._report(b"", f"{problem}: no more are allowed, by `ulimit -u` or a cgroup ({self.directory})")
            return
        self._writes.put(lambda: self._write(segment, pieces))

    def read(self, ident: bytes, segment: int, offset: int, size: int, position: int) -> None:
        """Read bytes of a segment into the arena. The segment was written, so the threads run."""
        self._under_way[ident] = None
        self._reads.put(lambda: self._read(ident, segment, offset, size, position))

    @property
    def overflow_size(self) -> int:
        """Bytes that the file of objects past the store may have."""
        return OVERFLOW_SIZE if self.overflow.path else 0

    def reserve(self, name: bytes, position: int, size: int) -> None:
        """Take disk space in the file of objects past the store."""
        self._under_way[name] = None
        try:
            self._start()
        except RuntimeError as problem:
            self._report(name, f"{problem}: no more are allowed, by `ulimit -u` or a cgroup ({self.directory})")
            return
        self._writes.put(lambda: self._reserve(name, position, size))

    def release(self, position: int, size: int) -> None:
        """Give disk space in the file of objects past the store back, after what was asked for before."""
        self._writes.put(lambda: self.overflow.release(position, size))

    def discard(self, segment: int, position: int, size: int, last: bool) -> None:
        """Drop bytes of a segment; `last`: and the rest of it.

        Disk space is freed when at least half of a segment is dead: freeing it for each object would cost the disk too
        much time.
        """
        self._discards.put(lambda: self._discard(segment, position, size, last))

    def path(self, segment: int) -> str:
        """A path by which other processes of this user can open a segment that was written, as long as this process
        lives."""
        return f"/proc/{os.getpid()}/fd/{self._segments[segment]}"

    def close(self) -> None:
        """Stop the threads, at the next system call, and close all files. Transfers in progress are not reported."""
        self._closed = True
        for work in (self._writes, self._discards, *[self._reads] * _READER_THREADS):
            work.put(_nothing)
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return  # in a call to a file system that does not answer; it uses the files until this process has ended
        for fd in self._segments.values():
            with contextlib.suppress(OSError):
                os.close(fd)
        self._segments.clear()
        self.overflow.close()
        os.close(self._event)

    def _start(self) -> None:
        """Start all threads, before anything is written: what is on disk can then be read."""
        if len(self._states) == len(self._works):
            return
        for name in [name for name in self._works if name not in self._states]:
            state = _ThreadState()
            args = (self._works[name], state)
            thread = threading.Thread(target=self._serve, args=args, name=f"hpcray-spill-{name}", daemon=True)
            thread.start()
            self._states[name] = state
            self._threads.append(thread)

    def _serve(self, work: _Works, state: _ThreadState) -> None:
        self._own.state = state
        while not self._closed:
            work.get()()

    def _begin(self, job: bytes) -> None:
        state = self._own.state
        state.moved = time.monotonic()
        state.job = job

    def _write(self, segment: int, pieces: Sequence[tuple[int, int, int]]) -> None:
        self._begin(b"")
        error = None
        try:
            if not self._directory_reported:
                self._words.append(
                    describe_spill_directory(inspect_tmp_directory(self.directory))
                )  # here, as it may take long
                self._directory_reported = True
            self._check_capacity()
            fd = self._segments.get(segment)
            if fd is None:
                fd = self._segments[segment] = open_unnamed_file(self.directory)
            stream = DirectWriter(fd, pieces[0][2], self._bounce(), self._over)
            for offset, size, position in pieces:
                stream.skip_to(position)
                stream.put(self._arena.view(offset, size), not offset % PAGE)
            stream.finish()
        except Exception as problem:  # of any kind: without a report all would wait forever
            error = self._describe(problem)
        self._end(b"", error)

    def _reserve(self, name: bytes, position: int, size: int) -> None:
        self._begin(name)
        error = None
        try:
            self._check_capacity()
            self.overflow.reserve(position, size)
        except Exception as problem:
            error = self._describe(problem)
        self._end(name, error)

    def _check_capacity(self) -> None:
        """Leave some of the disk to others.

        Raises:
            OSError: more of it is in use than `capacity_threshold`.
        """
        state = os.statvfs(self.directory)
        share = 1.0 - state.f_bavail / state.f_blocks if state.f_blocks else 0.0
        if self._capacity_threshold and share > self._capacity_threshold:
            if time.monotonic() - self._full_reported_at >= _FULL_REPORT_INTERVAL:
                self._full_reported_at = time.monotonic()
                free, size = (blocks * state.f_frsize / 2**30 for blocks in (state.f_bavail, state.f_blocks))
                self._full_reports.append(
                    f"{self.directory} is over {100 * self._capacity_threshold:g}% full, available space: "
                    f"{free:.3f} GiB; capacity: {size:.3f} GiB. Object creation will fail if spilling is required."
                )
            text = f"{100 * share:.1f} % of it are in use (HPCRAY_DISK_CAPACITY_THRESHOLD={self._capacity_threshold:g})"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {text}")

    def _read(self, ident: bytes, segment: int, offset: int, size: int, position: int) -> None:
        self._begin(ident)
        error = None
        try:
            fd = self._segments.get(segment)
            if fd is None:
                raise OSError("it was given up meanwhile")
            read_direct(fd, position, self._arena.view(offset, size), not offset % PAGE, self._bounce(), self._over)
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
            with contextlib.suppress(OSError):  # some network file systems report errors of earlier writes here
                os.close(fd)
            return
        total, dead = self._dead.get(segment, (0, []))
        dead.append((position, position + size))
        self._dead[segment] = (total + size, dead)
        try:
            taken = os.fstat(fd).st_blocks * _SECTOR
        except OSError:  # a stale handle, a broken disk: reads will report that
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
            found = self._own.bounce = bounce_buffer()
        return found

    def _describe(self, problem: Exception) -> str:
        text = problem.strerror if isinstance(problem, OSError) else ""
        return f"{text or str(problem) or type(problem).__name__} ({self.directory})"

    def _over(self) -> bool:
        """Called before each system call."""
        self._own.state.moved = time.monotonic()
        return self._closed

    def _end(self, ident: bytes, error: str | None) -> None:
        self._own.state.job = None  # before the report: an ended transfer is not stuck
        self._report(ident, error)

    def _report(self, ident: bytes, error: str | None) -> None:
        self._ended.append((ident, error))
        with contextlib.suppress(OSError):
            os.eventfd_write(self._event, 1)


def spill_directory(configured: str) -> str:
    """The directory that a node spills to: the user's setting, else the first node-local directory for temporary files
    on a disk.

    Raises:
        StartupError: no files can be made in the directory that the user set.
    """
    if configured:
        if not os.path.isdir(configured) or not inspect_tmp_directory(configured).writable:
            raise StartupError(
                f"HPCRAY_SPILL_DIR={configured!r} is not a directory in which this user may make files on host "
                f"{os.uname().nodename}; hint: name one that exists on every node, or leave it out"
            )
        return configured
    usable = [directory for directory in tmp_directories() if directory.writable]
    good = [directory for directory in usable if directory.node_local and not directory.in_memory]
    return (good or usable)[0].path if usable else tempfile.gettempdir()


def describe_spill_directory(directory: TmpDirectory) -> str:
    """A line that names the directory of spilled objects, with a warning if the directory is unsuitable."""
    text = (
        f"the object store is full; objects are spilled to {directory.path} ({directory.kind or 'unknown'} file system"
    )
    text += f", {directory.free / 2**30:.1f} GiB free)"
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
    """Wakes a thread, so that it checks whether to end."""
