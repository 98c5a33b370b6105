"""What tasks print: whole lines, each with the name and pid of who printed it."""

from __future__ import annotations

import io
import os
import sys
import threading
from typing import Any

from hpcray.host.address import node_ip_address
from hpcray.runtime import repeated_lines
from hpcray.runtime.repeated_lines import RepeatedLines, wanted

_PATIENCE = 0.2


class PrefixedStream(io.TextIOBase):
    """A text stream that writes complete lines to a file descriptor, one `write` call per burst of lines."""

    def __init__(self, fd: int, where: Any, suffix: str) -> None:
        self._fd = fd
        self._where = where
        self._suffix = suffix
        self._partial = ""
        self._lock = threading.Lock()
        table = repeated_lines.TABLE
        self._repeated = RepeatedLines(table, lambda line: self._put([line]), wanted()) if table is not None else None

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
        if not self._lock.acquire(timeout=_PATIENCE):
            return  # a thread is stuck in a write: nobody reads
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
