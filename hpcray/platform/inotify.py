"""Changes of the files of a directory, by Linux's inotify."""

from __future__ import annotations

import ctypes
import os
import struct

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
