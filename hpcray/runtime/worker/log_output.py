"""The output of tasks: whole lines, each with the name and pid of its worker, repeated ones counted."""

from __future__ import annotations

import io
import mmap
import os
import re
import struct
import sys
import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from hpcray.platform.sockets import node_ip_address

_FLUSH_TIMEOUT = 0.2
"""Seconds for which a worker that exits waits for a thread that is writing."""


class PrefixedStream(io.TextIOBase):
    """A text stream that writes complete lines to a file descriptor, one `write` call per burst of lines."""

    def __init__(self, fd: int, where: Any, suffix: str) -> None:
        self._fd = fd
        self._where = where
        self._suffix = suffix
        self._partial = ""
        self._lock = threading.Lock()
        table = TABLE
        self._repeated = (
            LogDeduplicator(table, lambda line: self._put([line]), dedup_window()) if table is not None else None
        )

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Always UTF-8."""
        return "utf-8"

    def fileno(self) -> int:
        """The descriptor written to."""
        return self._fd

    def writable(self) -> bool:
        """Always."""
        return True

    def isatty(self) -> bool:
        """Lines are prefixed, so never."""
        return False

    def write(self, text: str) -> int:
        """Take text; complete lines go out."""
        with self._lock:
            *lines, self._partial = (self._partial + text).split("\n")
            if lines:
                self._emit(lines)
        return len(text)

    def flush(self) -> None:
        """Lines go out at once anyway; a partial line waits for its end, so that prefixes do not tear it."""

    def finish(self) -> None:
        """Write a last partial line, and what was counted of repeated ones."""
        if not self._lock.acquire(timeout=_FLUSH_TIMEOUT):
            return  # a thread is stuck in a write: the other end does not read
        try:
            if self._partial:
                self._emit([self._partial])
                self._partial = ""
        finally:
            self._lock.release()
        if self._repeated is not None:
            self._repeated.finish()

    def _emit(self, lines: list[str]) -> None:
        if self._repeated is not None:
            lines = [line for line in lines if not line or self._repeated.shows(line)]
        if lines:
            self._put(lines)

    def _put(self, lines: list[str]) -> None:
        prefix = f"({self._where.name or 'worker'} pid={os.getpid()}{self._suffix}) "
        data = "".join(f"{prefix}{line}\n" for line in lines).encode("utf-8", "backslashreplace")
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError:
                return  # the terminal is gone; that is no reason to fail the task


def redirect_output(path: str) -> None:
    """Send what this worker prints, native code included, to a file of the session directory."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def finish_output() -> None:
    """This process ends now."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, PrefixedStream):
            stream.finish()


def prefix_output(where: Any, away: bool) -> None:
    """Send this worker's prints through prefixed streams. `where.name` is the running function's name.

    Lines of other nodes than the driver's (`away`) have the node's address too, as in Ray.
    """
    suffix = f", ip={node_ip_address()}" if away else ""
    sys.stdout = PrefixedStream(1, where, suffix)
    sys.stderr = PrefixedStream(2, where, suffix)


VARIABLE = "RAY_DEDUP_LOGS"
_WINDOW = "RAY_DEDUP_LOGS_AGG_WINDOW_S"
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_ROW = struct.Struct("=8sdII")
_ROWS = 4096
"""Lines that the shared table of a node remembers."""
_HINT = f"set {VARIABLE}=0 to see all"


class LogDeduplicator:
    """One worker's view.

    Args:
        table: shared by all workers of the node. emit: writes a line. window: seconds in which a line that another
            worker has printed is only counted.
    """

    def __init__(self, table: mmap.mmap, emit: Callable[[str], None], window: float) -> None:
        self._table = table
        self._emit = emit
        self._window = window
        self._lock = threading.Lock()
        self._mine: dict[int, str] = {}

    def shows(self, line: str) -> bool:
        """Return True if this line is to be printed; else it is counted, and the count is printed later."""
        key = blake2b(_NUMBERS.sub("", line).encode("utf-8", "replace"), digest_size=8).digest()
        place = int.from_bytes(key[:4], "big") % _ROWS
        now = time.monotonic()
        known, since, pid, count = self._read(place)
        if known != key or now - since >= self._window:
            if not count or now - since >= 3 * self._window:  # else the worker that counted has still to print
                self._write(place, key, now, os.getpid(), 0)
            return True
        if pid == os.getpid():
            return True  # what one worker prints several times it means several times
        self._write(place, known, since, pid, count + 1)
        with self._lock:
            first = place not in self._mine
            self._mine[place] = line
        if count == 0 or first:
            timer = threading.Timer(max(0.0, since + self._window - now), self._print_count, (place,))
            timer.daemon = True
            timer.start()
        return False

    def finish(self) -> None:
        """Print at once the counts of this worker: it exits."""
        for place in list(self._mine):
            self._print_count(place)

    def _print_count(self, place: int) -> None:
        with self._lock:
            line = self._mine.pop(place, None)
        known, since, pid, count = self._read(place)
        if line is None or not count:
            return  # another worker that counted has printed
        self._write(place, known, since, pid, 0)
        self._emit(f"{line} [repeated {count}x across this node; {_HINT}]" if count > 1 else line)

    def _read(self, place: int) -> tuple[bytes, float, int, int]:
        key, since, pid, count = _ROW.unpack_from(self._table, place * _ROW.size)
        return key, since, pid, count

    def _write(self, place: int, key: bytes, since: float, pid: int, count: int) -> None:
        _ROW.pack_into(self._table, place * _ROW.size, key, since, pid, count)


def dedup_window() -> float:
    """The window in seconds; 0 when lines are shown as often as they come, which is the default."""
    if os.environ.get(VARIABLE, "0") != "1":
        return 0.0
    try:
        return float(os.environ.get(_WINDOW, "5"))
    except ValueError:
        return 5.0


TABLE: mmap.mmap | None = None
"""Made where this module is loaded first, or in the raylet: whose template's workers inherit it."""


def open_table() -> None:
    """Make the table, if lines are counted and there is none yet."""
    global TABLE
    if TABLE is None and dedup_window():
        TABLE = mmap.mmap(-1, _ROWS * _ROW.size)


open_table()
