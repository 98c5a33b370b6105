"""The file that holds what a node's store has no memory for, mapped range by range by the processes that use it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os

from hpcray.platform.direct_io import PAGE, open_unnamed_file

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
