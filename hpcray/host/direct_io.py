"""Files without a name that are written and read past the page cache, straight out of shared memory and into it.

Direct transfers go in whole pages, in the file as in memory. What does not lie so is copied through a *bounce* buffer,
which also takes the last, broken page of each piece, so that no byte beside a piece is ever touched. Where a file
system has no direct access the same calls go through the page cache.
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
CALL = 16 << 20
"""Bytes of one system call: after each of them a thread looks whether it is to end."""
BOUNCE = 4 << 20
_BUFFERS = 500  # of one call; the system takes 1024


class Over(OSError):
    """Whoever wanted the bytes has gone."""


def nameless(directory: str) -> int:
    """A new file that no directory knows, with direct access where that can be had.

    Raises:
        OSError: files cannot be made there.
    """
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    for more in (os.O_DIRECT, 0):
        try:
            return os.open(directory, flags | more, 0o600)
        except OSError:
            pass
    # Not every file system can; and where the directory itself is the trouble, this fails with the reason.
    fd, path = tempfile.mkstemp(prefix="hpcray-spill-", dir=directory)
    os.unlink(path)
    return fd


def buffer() -> memoryview:
    """Room for what must be copied: whole pages, at a page."""
    return memoryview(mmap.mmap(-1, BOUNCE))


class Stream:
    """Writes pieces into a file, one behind the other.

    Args:
        position: where in the file the first byte goes; a multiple of PAGE.
        bounce: from `buffer`; nobody else's meanwhile.
        over: says whether to give up, with `Over`.
    """

    def __init__(self, fd: int, position: int, bounce: memoryview, over: Callable[[], bool]) -> None:
        self.position = position
        self._fd = fd
        self._bounce = bounce
        self._over = over
        self._written = position
        self._parts: list[memoryview] = []
        self._bytes = 0
        self._begin = self._end = 0  # what was copied since the last part

    def put(self, data: memoryview, at_page: bool) -> None:
        """Append bytes.

        Args:
            at_page: whether they lie at a page in memory; they may then have to stay as they are until `finish`.
        """
        self.position += len(data)
        if at_page and not (self._end - self._begin) % PAGE:
            whole = len(data) // PAGE * PAGE
            for at in range(0, whole, CALL):
                part = data[at : min(at + CALL, whole)]
                self._close_copied()
                self._parts.append(part)
                self._bytes += len(part)
                if self._bytes >= CALL or len(self._parts) >= _BUFFERS:
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
        """Go on there: less than a page further on."""
        self.put(memoryview(bytes(position - self.position)), False)

    def finish(self) -> None:
        """Fill the last page up, and see everything written."""
        self.skip_to(-(-self.position // PAGE) * PAGE)
        self._write()

    def _close_copied(self) -> None:
        if self._end > self._begin:
            self._parts.append(self._bounce[self._begin : self._end])
            self._bytes += self._end - self._begin
            self._begin = self._end

    def _write(self) -> None:
        """Write all whole pages; what was copied of a broken one stays."""
        end = self._end
        self._end -= (end - self._begin) % PAGE
        self._close_copied()
        transfer(os.pwritev, self._fd, self._parts, self._written, self._bytes, self._over)
        self._written += self._bytes
        left = end - self._end
        self._bounce[:left] = self._bounce[self._end : end]
        self._begin, self._end = 0, left
        self._parts, self._bytes = [], 0


def read(fd: int, position: int, into: memoryview, at_page: bool, bounce: memoryview, over: Callable[[], bool]) -> None:
    """Fill `into` with what the file has from `position` on.

    Args:
        at_page: whether `into` begins at a page in memory.

    Raises:
        OSError: it cannot be read, or the file ends before; Over.
    """
    if at_page and not position % PAGE:
        whole = len(into) // PAGE * PAGE
        for at in range(0, max(whole, 1), CALL):
            parts = [into[at : min(at + CALL, whole)]]
            need = len(parts[0])
            if at + need == whole and whole < len(into):  # the broken page comes along
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


def read_privately(path: str, position: int, size: int) -> memoryview:
    """Bytes of a file, in memory of this process alone; read-only, at a page.

    Raises:
        OSError: it cannot be read, or the file ends before.
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
    """Repeat a system call until at least `need` bytes have gone.

    Raises:
        OSError: what it failed with, or the file ended. Over.
    """
    left = [part for part in parts if len(part)]
    while need > 0:
        if over():
            raise Over("the job is over")
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
    """Go through the page cache from now on; whether the file did not already."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_DIRECT:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return True
    return False
