"""Futexes: a thread sleeps in the kernel until another process wakes it at a word of shared memory."""

from __future__ import annotations

import ctypes
import platform
import threading
import time

_SYSCALL = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}.get(platform.machine())
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF
_POLL = 0.0002
"""Seconds between two looks where the number of the system call is not known."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
_barrier = threading.Lock()


def fence() -> None:
    """Make all writes of this thread visible to other processes before it reads anything further."""
    with _barrier:  # an atomic instruction, and a system call that POSIX lists as one that synchronizes memory
        pass


def wait(address: int, expected: int, timeout: float) -> None:
    """Sleep until `wake` is called for the word at `address`, at most `timeout` seconds; at once if the word is not
    `expected`. It may return early, as at a signal."""
    if _SYSCALL is None:
        time.sleep(min(timeout, _POLL))
        return
    seconds = int(timeout)
    limit = _Timespec(seconds, int((timeout - seconds) * 1e9))
    _syscall(_SYSCALL, address, _WAIT, expected, ctypes.addressof(limit))


def wake(address: int) -> None:
    """Wake all threads that wait at the word, in any process."""
    if _SYSCALL is not None:
        _syscall(_SYSCALL, address, _WAKE, _EVERYBODY, None)
