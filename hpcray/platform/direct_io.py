"""Files without a name that are written and read past the page cache, straight from and to shared memory.

Direct transfers go in whole pages, in the file and in memory. Unaligned bytes are copied through a *bounce* buffer; so
is the last, partial page of each piece, so that no byte beside a piece is touched. On a file system without direct
access the same calls go through the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence

PAGE = 4096
CALL_SIZE = 16 << 20
"""Bytes of one system call: after each call a thread checks whether it is to end."""
BOUNCE_SIZE = 4 << 20
_MAX_BUFFERS = 500  # of one call; Linux takes 1024


class TransferCancelled(OSError):
    """The transfer was given up: its user has gone."""


def open_unnamed_file(directory: str, direct: bool = True) -> int:
    """Open a new file without a name; it is gone when the last descriptor is closed.

    Args:
        directory: where to make it.
        direct: whether to open it for direct access, if the file system has it.

    Raises:
        OSError: files cannot be made there.
    """
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    for more in (os.O_DIRECT, 0) if direct else (0,):
        try:
            return os.open(directory, flags | more, 0o600)
        except OSError:
            pass
    # Not every file system has O_TMPFILE; if the directory itself is the problem, this raises with the reason.
    fd, path = tempfile.mkstemp(prefix="hpcray-", dir=directory)
    os.unlink(path)
    return fd


def bounce_buffer() -> memoryview:
    """A page-aligned buffer of BOUNCE_SIZE bytes."""
    return memoryview(mmap.mmap(-1, BOUNCE_SIZE))


class DirectWriter:
    """Writes pieces into a file, one after the other.

    Args:
        position: offset in the file of the first byte; a multiple of PAGE.
        bounce: from `bounce_buffer`; used by this writer alone.
        over: returns True to give up, with `TransferCancelled`.
    """

    def __init__(self, fd: int, position: int, bounce: memoryview, over: Callable[[], bool]) -> None:
        self.position = position
        self._fd = fd
        self._bounce = bounce
        self._over = over
        self._written = position
        self._parts: list[memoryview] = []
        self._bytes = 0
        self._begin = self._end = 0  # bytes copied since the last part

    def put(self, data: memoryview, at_page: bool) -> None:
        """Append bytes.

        Args:
            at_page: whether they are page-aligned in memory; the caller may then not change them before `finish` has
                returned.
        """
        self.position += len(data)
        if at_page and not (self._end - self._begin) % PAGE:
            whole = len(data) // PAGE * PAGE
            for at in range(0, whole, CALL_SIZE):
                part = data[at : min(at + CALL_SIZE, whole)]
                self._close_copied()
                self._parts.append(part)
                self._bytes += len(part)
                if self._bytes >= CALL_SIZE or len(self._parts) >= _MAX_BUFFERS:
                    self._write()
            data = data[whole:]
        while len(data):
            if self._end == len(self._bounce):
                self._write()
            part = data[: len(self._bounce) - self._end]
            self._bounce[self._end : self._end + len(part)] = part
            self._end += len(part)
            data = data[len(part) :]

    def skip_to(self, position: int) -> None:
        """Continue at a position less than a page further on; the gap is filled with zeros."""
        self.put(memoryview(bytes(position - self.position)), False)

    def finish(self) -> None:
        """Fill the last page up and write everything that is buffered."""
        self.skip_to(-(-self.position // PAGE) * PAGE)
        self._write()

    def _close_copied(self) -> None:
        if self._end > self._begin:
            self._parts.append(self._bounce[self._begin : self._end])
            self._bytes += self._end - self._begin
            self._begin = self._end

    def _write(self) -> None:
        """Write all whole pages; a copied partial page stays in the buffer."""
        end = self._end
        self._end -= (end - self._begin) % PAGE
        self._close_copied()
        transfer(os.pwritev, self._fd, self._parts, self._written, self._bytes, self._over)
        self._written += self._bytes
        left = end - self._end
        self._bounce[:left] = self._bounce[self._end : end]
        self._begin, self._end = 0, left
        self._parts, self._bytes = [], 0


def read_direct(
    fd: int, position: int, into: memoryview, at_page: bool, bounce: memoryview, over: Callable[[], bool]
) -> None:
    """Fill `into` with the bytes of the file from `position` on.

    Args:
        at_page: whether `into` is page-aligned.

    Raises:
        OSError: the file cannot be read, or is too short. TransferCancelled.
    """
    if at_page and not position % PAGE:
        whole = len(into) // PAGE * PAGE
        for at in range(0, max(whole, 1), CALL_SIZE):
            parts = [into[at : min(at + CALL_SIZE, whole)]]
            need = len(parts[0])
            if at + need == whole and whole < len(into):  # with the partial page
                parts.append(bounce[:PAGE])
                need += len(into) - whole
            transfer(os.preadv, fd, parts, position + at, need, over)
        into[whole:] = bounce[: len(into) - whole]
        return
    while len(into):
        lead = position % PAGE
        size = min(len(into), len(bounce) - lead)
        pages = -(-(lead + size) // PAGE) * PAGE
        transfer(os.preadv, fd, [bounce[:pages]], position - lead, lead + size, over)
        into[:size] = bounce[lead : lead + size]
        into = into[size:]
        position += size


def read_private_copy(path: str, position: int, size: int) -> memoryview:
    """Read bytes of a file into private memory; read-only, page-aligned.

    Raises:
        OSError: the file cannot be read, or is too short.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        room = memoryview(mmap.mmap(-1, size))
        transfer(os.preadv, fd, [room], position, size, lambda: False)
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, position, size, os.POSIX_FADV_DONTNEED)
        return room.toreadonly()
    finally:
        os.close(fd)


def transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    parts: Sequence[memoryview],
    position: int,
    need: int,
    over: Callable[[], bool],
) -> None:
    """Repeat a system call until at least `need` bytes are transferred.

    Raises:
        OSError: the call failed, or the file ended. TransferCancelled.
    """
    left = [part for part in parts if len(part)]
    while need > 0:
        if over():
            raise TransferCancelled("the job is over")
        try:
            done = call(fd, left, position)
        except OSError as error:
            if error.errno != errno.EINVAL or not _give_up_direct(fd):
                raise
            continue  # larger pages, or a call that stopped in the middle of one
        if not done:
            raise OSError(f"the file ended {need} bytes early")
        position += done
        need -= done
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if done:
            left[0] = left[0][done:]


def _give_up_direct(fd: int) -> bool:
    """Use the page cache from now on. Returns True if the file had direct access until now."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_DIRECT:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return True
    return False
