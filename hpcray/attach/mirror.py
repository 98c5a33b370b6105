"""The near end's copy of a node's shared memory: what drivers here read and write, at the offsets that it has there.

It is a sparse file without a name, as large as the arena, in a temporary directory: a driver maps it as it would map
the arena. Space is taken for the objects that are in use here, and given back with them; what is in the file may go to
the disk, so a value that is longer than this host's memory has room, too.
"""

from __future__ import annotations

import os

from hpcray.platform.arena import OverflowMapping
from hpcray.protocol.messages.objects import OVERFLOW


class Mirror:
    """The memory of one node.

    Args:
        directory: where the file is made.
        size: of the arena, with what is behind the objects.

    Raises:
        OSError: such a file cannot be made there.
    """

    def __init__(self, directory: str, size: int) -> None:
        self._arena, self._overflow = OverflowMapping.create(directory), OverflowMapping.create(directory)
        if not self._arena.path or not self._overflow.path:
            raise OSError(f"no file can be made in {directory}; hint: HPCRAY_ATTACH_DIR names a directory on a disk")
        self.fd = os.open(self._arena.path, os.O_RDWR | os.O_CLOEXEC)
        self._overflow_fd = os.open(self._overflow.path, os.O_RDWR | os.O_CLOEXEC)
        os.ftruncate(self.fd, size)
        self._users: dict[int, int] = {}

    @property
    def overflow(self) -> str:
        """Path of the file for offsets from OVERFLOW on."""
        return self._overflow.path

    def take(self, offset: int, size: int) -> None:
        """Take space for an object that a driver is to write or read.

        Raises:
            OSError: there is none.
        """
        self._file(offset).reserve(offset % OVERFLOW, size)
        self._users[offset] = self._users.get(offset, 0) + 1

    def give_back(self, offset: int, size: int) -> None:
        """A driver does not use an object any more."""
        left = self._users.get(offset, 0) - 1
        if left > 0:
            self._users[offset] = left
            return
        self._users.pop(offset, None)
        start = -(-offset // _PAGE) * _PAGE  # pages that it shares with a neighbor stay
        end = (offset + size) // _PAGE * _PAGE
        if end > start:
            self._file(offset).release(start % OVERFLOW, end - start)

    def read(self, offset: int, size: int) -> bytes:
        """Return what a driver has written."""
        return os.pread(self._fd(offset), size, offset % OVERFLOW)

    def write(self, offset: int, data: memoryview) -> None:
        """Write what a driver will read.

        Raises:
            OSError: there is no space.
        """
        fd, at = self._fd(offset), offset % OVERFLOW
        while data:
            done = os.pwrite(fd, data, at)
            data, at = data[done:], at + done

    def close(self) -> None:
        """Close the files; what drivers have mapped stays until they end."""
        os.close(self.fd)
        os.close(self._overflow_fd)
        self._arena.close()
        self._overflow.close()

    def _file(self, offset: int) -> OverflowMapping:
        return self._overflow if offset >= OVERFLOW else self._arena

    def _fd(self, offset: int) -> int:
        return self._overflow_fd if offset >= OVERFLOW else self.fd


_PAGE = os.sysconf("SC_PAGESIZE")
