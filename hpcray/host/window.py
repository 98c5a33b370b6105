"""Another process's shared memory, mapped here to be read."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os


class Window:
    """A read-only mapping of a memfd of another process. It outlives that process: nothing read through it can fault
    because of a death.

    Args:
        fd: the memfd; it is not needed any more after this call, and stays the caller's to close.
        size: bytes that are mapped.
        huge: as `Config.huge_pages`; with "auto" huge pages are asked for.

    Attributes:
        address: where the mapping starts in this process; 0 once closed.
        size: as given.

    Raises:
        OSError: `fd` holds less than `size` bytes, or cannot be mapped; nothing was left behind.
    """

    def __init__(self, fd: int, size: int, huge: str = "auto") -> None:
        have = os.fstat(fd).st_size
        if not 0 < size <= have:
            raise OSError(errno.EINVAL, f"shared memory of {have} bytes, {size} were announced")
        address = _mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), f"mapping {size} bytes of another node failed")
        self.address = int(address)
        self.size = size
        if huge == "auto" and hasattr(mmap, "MADV_HUGEPAGE"):
            _libc.madvise(ctypes.c_void_p(self.address), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)

    def close(self) -> None:
        """Unmap it. Nobody may be reading."""
        if self.address:
            _libc.munmap(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size))
            self.address = 0


# Python's mmap does not give the address of memory that may not be written.
_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_FAILED = ctypes.c_void_p(-1).value
