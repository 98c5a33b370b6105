"""Output of this node's workers, on its way from their log files to the driver that they work for.

A worker writes to its own two files, so that its output survives it, whatever it dies of. This part reads what is added
to them and sends it on, a limited amount at a time: a driver that prints slowly keeps the rest in the files.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import struct
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from hpcray.common.ids import number_of
from hpcray.common.job_names import parse_worker_log_name
from hpcray.common.resources import JOB_FIELD, runtime_env_fields
from hpcray.platform.private_files import make_private_directory, open_private_file
from hpcray.platform.session_directory import keep_logs
from hpcray.platform.sockets import node_ip_address
from hpcray.protocol import messages as m
from hpcray.runtime.raylet.event_loop import EventLoop
from hpcray.runtime.raylet.router import Router

# ------------------------------------------------------------ inotify
# Changes of the files of a directory, by Linux's inotify.


IN_MODIFY, IN_MOVED_TO, IN_CREATE = 0x2, 0x80, 0x100
_EVENT = struct.Struct("=iIII")
_READ = 1 << 16


class DirectoryWatch:
    """The names of the files of a directory that were written to.

    Args:
        directory: its path.
        events: other events than writes, as inotify numbers them.

    Raises:
        OSError: the user has as many watches as the system permits.
    """

    def __init__(self, directory: str, events: int = IN_MODIFY) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        if libc.inotify_add_watch(self._fd, os.fsencode(directory), events) < 0:
            number = ctypes.get_errno()
            os.close(self._fd)
            raise OSError(number, "inotify_add_watch")

    def fileno(self) -> int:
        """Readable when there are names to read."""
        return self._fd

    def read(self) -> set[str]:
        """Return the names of the files that changed since the last call."""
        names: set[str] = set()
        try:
            data = os.read(self._fd, _READ)
        except BlockingIOError:
            return names
        place = 0
        while place < len(data):
            _, _, _, length = _EVENT.unpack_from(data, place)
            place += _EVENT.size
            names.add(os.fsdecode(data[place : place + length].rstrip(b"\0")))
            place += length
        return names

    def close(self) -> None:
        """Stop watching."""
        os.close(self._fd)


# ------------------------------------------------------------ log monitor


DELAY = 0.02
"""Seconds from a change to its reading: a burst of lines is one message."""
POLL = 0.25
"""Seconds between two looks at the files where the system does not report changes."""
PIECE = 64 << 10
"""Bytes of one message."""
WINDOW = 1 << 20
"""Bytes that may be on their way to one driver."""
_NOTHING: tuple[()] = ()


class _Tail(msgspec.Struct):
    """A log file of a worker, as far as it was read.

    Attributes:
        driver: its reader, b"" for none; None for the cluster's first driver.
        inode: of the file that is read; a file that was rotated away has another name by then.
        ended: whether its worker is dead.
    """

    worker: bytes
    pid: int
    error: bool
    driver: bytes | None
    inode: int = 0
    offset: int = 0
    ended: bool = False


class LogMonitor:
    """The log files of this node's workers.

    Args:
        directory: where they are; made here, and again where it was removed.
        kept: where they stay after the job, "" for nowhere: `directory` is a link then.
        first_driver: returns the proc id of the cluster's first driver; b"" while there is none, or it wants no output.
        log: writes a line about this node.
    """

    def __init__(
        self,
        loop: EventLoop,
        router: Router,
        directory: str,
        kept: str,
        first_driver: Callable[[], bytes],
        log: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._router = router
        self._directory = directory
        self._kept = kept
        self._first_driver = first_driver
        self._log = log
        self._lost: set[str] = set()
        self._ip = node_ip_address()
        self._drivers: dict[int, bytes] = {}
        self._tails: dict[str, _Tail] = {}
        self._dead: set[bytes] = set()  # workers; no more of their files are taken up
        self._changed: dict[str, None] = {}
        self._on_the_way: dict[bytes, int] = {}
        self._due = self._rests = False
        self._watch: DirectoryWatch | None = None
        self._polls = False
        self._begin()

    def restore(self) -> bool:
        """Make the directory again if it was removed. Returns whether it was.

        Raises:
            OSError: it cannot be made.
        """
        if os.path.isdir(self._directory):
            return False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._directory)  # a link to nothing
        if self._watch is not None:
            if not self._rests:
                self._loop.unwatch(self._watch.fileno())
            self._watch.close()
            self._watch, self._rests = None, False
        self._read_removed()
        self._begin()
        return True

    def _read_removed(self) -> None:
        """Send what workers have written to files that are gone: they have them open, until there is a directory."""
        for tail in self._tails.values():
            driver = self._driver_of(tail)
            with contextlib.suppress(OSError), open(f"/proc/{tail.pid}/fd/{1 + tail.error}", "rb", 0) as file:
                state = os.fstat(file.fileno())
                if not driver or state.st_nlink or tail.inode not in (0, state.st_ino):
                    continue
                file.seek(tail.offset)
                if data := file.read(WINDOW):
                    self._on_the_way[driver] = self._on_the_way.get(driver, 0) + len(data)
                    self._router.send(
                        driver, m.WorkerOutput(tail.worker, tail.pid, self._ip, tail.error, data, last=False)
                    )

    def _begin(self) -> None:
        """Make the directory and watch it."""
        if self._kept and (problem := keep_logs(self._directory, self._kept)):
            self._log(f"warning: {problem}")
        make_private_directory(self._directory)
        try:
            self._watch = DirectoryWatch(self._directory)
        except OSError:
            if not self._polls:
                self._polls = True
                self._loop.call_at(self._loop.now + POLL, self._poll)
        else:
            self._loop.watch(self._watch.fileno(), self._rest)

    def expect(self, number: int, env: Iterable[tuple[str, str]]) -> None:
        """A worker with this number and environment is about to be forked."""
        fields = runtime_env_fields(env)
        if JOB_FIELD in fields:
            self._drivers[number] = msgspec.convert(fields[JOB_FIELD], m.JobInfo).driver

    def worker_died(self, worker: bytes) -> None:
        """Read the rest of what a worker has written."""
        self._look()  # a file that it never wrote to is not worth a message
        self._dead.add(worker)
        names = self._files_of(worker)
        for name in names:
            self._tails[name].ended = True
        self._note(names)
        if not names:
            self._drivers.pop(number_of(worker), None)

    def on_printed(self, now: float, src: bytes, msg: m.OutputPrinted) -> Iterable[Any]:
        """There is room for more on the way to a driver."""
        self._on_the_way[src] = self._on_the_way.get(src, 0) - msg.size
        if self._changed:
            self._schedule(0.0)
        return _NOTHING

    def on_lost(self, now: float, src: bytes, msg: m.OutputLost) -> Iterable[Any]:
        """A worker cannot write its log files. All workers of the node have the same problem: it is said once."""
        if msg.text not in self._lost:
            self._lost.add(msg.text)
            self._log(f"{msg.text}; hint: make room there, or set HPCRAY_LOG_DIR or HPCRAY_TMPDIR to another place")
        return _NOTHING

    def on_flush(self, now: float, src: bytes, msg: m.FlushOutput) -> Iterable[Any]:
        """Send a driver all that there is, and then the answer."""
        with contextlib.suppress(OSError):
            self._note(os.listdir(self._directory))
        for name in [name for name in self._changed if self._driver_of(self._tails[name]) == src]:
            while self._send_piece(name):
                pass
        self._router.send(src, m.OutputFlushed())
        return _NOTHING

    def _files_of(self, worker: bytes) -> list[str]:
        return [name for name, tail in self._tails.items() if tail.worker == worker]

    def _driver_of(self, tail: _Tail) -> bytes:
        return self._first_driver() if tail.driver is None else tail.driver

    def _look(self) -> None:
        """Note what has changed since the last look; without reports from the system, every file."""
        with contextlib.suppress(OSError):
            self._note(os.listdir(self._directory) if self._watch is None else self._watch.read())

    def _rest(self, event: int) -> None:
        """Files change: look at them when more has come, and let no further change wake this raylet until then."""
        assert self._watch is not None
        self._loop.unwatch(self._watch.fileno())
        self._rests = True
        self._schedule(DELAY)

    def _poll(self) -> None:
        if self._watch is None:
            self._look()
        self._loop.call_at(self._loop.now + POLL, self._poll)

    def _note(self, names: Iterable[str]) -> None:
        """Files have changed, or may have."""
        for name in names:
            if name not in self._tails:
                found = parse_worker_log_name(name)
                if found is None or found[0] in self._dead:
                    continue
                worker, pid, error = found
                self._tails[name] = _Tail(worker, pid, error, self._drivers.get(number_of(worker)))
            self._changed[name] = None
        if self._changed:
            self._schedule(DELAY)

    def _schedule(self, delay: float) -> None:
        if not self._due:
            self._due = True
            self._loop.call_at(self._loop.now + delay, self._read)

    def _read(self) -> None:
        """Send a piece of each changed file whose driver has room."""
        if self._rests and self._watch is not None:
            self._look()
            self._rests = False
            self._loop.watch(self._watch.fileno(), self._rest)
        self._due = more = False
        for name in list(self._changed):
            driver = self._driver_of(self._tails[name])
            if driver and self._on_the_way.get(driver, 0) < WINDOW:
                more = self._send_piece(name) or more
        if more:
            self._schedule(0.0)

    def _send_piece(self, name: str) -> bool:
        """Read and send the next piece of a file. Returns whether there may be more."""
        tail = self._tails[name]
        data, more = self._next_piece(name, tail)
        last = tail.ended and not more
        if data or last:
            driver = self._driver_of(tail)
            self._on_the_way[driver] = self._on_the_way.get(driver, 0) + len(data)
            self._router.send(driver, m.WorkerOutput(tail.worker, tail.pid, self._ip, tail.error, data, last))
        if not more:
            del self._changed[name]
        if last:
            del self._tails[name]
            if not self._files_of(tail.worker):
                self._drivers.pop(number_of(tail.worker), None)
        return more

    def _next_piece(self, name: str, tail: _Tail) -> tuple[bytes, bool]:
        """Read on in a file, or in the one that took its place. Returns the bytes, and whether there may be more."""
        path = os.path.join(self._directory, name)
        data, tail.inode, tail.offset, more = read_on(path, tail.inode, tail.offset, PIECE)
        return data, more


# ------------------------------------------------------------ rotated files
# Log files that are rotated while they are read: `f`, and the older `f.1`, `f.2`, ..., known by their inodes.


def read_on(path: str, inode: int, offset: int, size: int) -> tuple[bytes, int, int, bool]:
    """Read on in a log file, or in those that took its place.

    Args:
        path: of the present file. inode, offset: where the last call ended; inode 0: begin with the oldest file, or,
            with an offset below 0, so many bytes before the end of the present one. size: bytes at most.

    Returns:
        The bytes, the inode and offset where they end, and whether there may be more.
    """
    with contextlib.suppress(OSError):  # a file that is rotated right now: its next line is a change again
        while True:
            files = _generations(path)
            inodes = [file.st_ino for _, file in files]
            if not inodes:
                break
            if inode not in inodes:
                place = _holding(-offset, [file.st_size for _, file in files]) if offset < 0 else len(files) - 1
                before = sum(file.st_size for _, file in files[: place + 1])
                inode, offset = inodes[place], max(0, before + offset) if offset < 0 else 0
            place = inodes.index(inode)
            with os.fdopen(open_private_file(files[place][0]), "rb", buffering=0) as file:
                found = os.fstat(file.fileno())
                if found.st_ino != inode:
                    continue
                offset = offset if offset <= found.st_size else 0  # a new file has the number of a deleted one
                file.seek(offset)
                data = file.read(size)
            if data or not place:
                return data, inode, offset + len(data), len(data) == size or place > 0
            inode, offset = inodes[place - 1], 0  # read to its end, and rotated away
    return b"", inode, offset, False


def _holding(count: int, sizes: list[int]) -> int:
    """Return the first of these files that has, with those before it, so many bytes; else the last."""
    sums = itertools.accumulate(sizes)
    return next((place for place, size in enumerate(sums) if size >= count), len(sizes) - 1)


def _generations(path: str) -> list[tuple[str, os.stat_result]]:
    """Return a log file and those that were rotated away, with their states, the newest first.

    While its worker rotates them one number is missing: each file moves up by one, the oldest first.
    """
    found = []
    numbers = itertools.count()
    missing = 0
    while missing < 2:
        number = next(numbers)
        source = f"{path}.{number}" if number else path
        try:
            found.append((source, os.stat(source)))
            missing = 0
        except FileNotFoundError:
            missing += 1
    return found
