"""Advice to the kernel about memory, by address: `mmap.mmap.madvise` knows only whole maps of its own."""

from __future__ import annotations

import ctypes

_libc = ctypes.CDLL(None, use_errno=True)


def madvise(address: int, size: int, advice: int) -> bool:
    """Give advice (`mmap.MADV_...`) about whole pages. Returns whether the kernel takes it."""
    return int(_libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)) == 0
