"""The waits of threads as the kernel sees them (`/proc/PID/task/TID/syscall`). Nothing is stopped for it."""

from __future__ import annotations

import contextlib
import os
import platform

from msgspec import Struct

RUNNING, LOCK, TIMED, CHILD, READ, POLL, SIGNAL, ACCEPT, FILE_LOCK, OTHER, HIDDEN = (
    "running", "lock", "timed", "child", "read", "poll", "signal", "accept", "file lock", "other", "hidden",
)  # fmt: skip
"""Kinds of waits: it runs, or waits for a lock, for a time, a child process, bytes of one descriptor, events of
several, a signal, a connection, a lock of a file; another system call; the kernel hides it."""
_UNTIMED_INT = (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
_CALLS = {
    # name: (kind, number of the argument that is a timeout (-1: none; as a pointer 0 means none), whether it is one)
    "read": (READ, -1, False),
    "readv": (READ, -1, False),
    "recvfrom": (READ, -1, False),
    "recvmsg": (READ, -1, False),
    "write": (READ, -1, False),
    "writev": (READ, -1, False),
    "sendto": (READ, -1, False),
    "poll": (POLL, 2, False),
    "ppoll": (POLL, 2, True),
    "select": (POLL, 4, True),
    "pselect6": (POLL, 4, True),
    "epoll_wait": (POLL, 3, False),
    "epoll_pwait": (POLL, 3, False),
    "epoll_pwait2": (POLL, 3, True),
    "nanosleep": (TIMED, -1, False),
    "clock_nanosleep": (TIMED, -1, False),
    "futex": (LOCK, 3, True),
    "wait4": (CHILD, -1, False),
    "waitid": (CHILD, -1, False),
    "accept": (ACCEPT, -1, False),
    "accept4": (ACCEPT, -1, False),
    "pause": (SIGNAL, -1, False),
    "rt_sigsuspend": (SIGNAL, -1, False),
    "rt_sigtimedwait": (SIGNAL, -1, False),
    "flock": (FILE_LOCK, -1, False),
    "fcntl": (FILE_LOCK, -1, False),
}
_NUMBERS = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 19: "readv", 20: "writev", 23: "select", 34: "pause", 35: "nanosleep",
        43: "accept", 44: "sendto", 45: "recvfrom", 47: "recvmsg", 61: "wait4", 72: "fcntl", 73: "flock",
        128: "rt_sigtimedwait", 130: "rt_sigsuspend", 202: "futex", 230: "clock_nanosleep", 232: "epoll_wait",
        247: "waitid", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait", 288: "accept4", 441: "epoll_pwait2",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 32: "flock", 63: "read", 64: "write", 65: "readv", 66: "writev",
        72: "pselect6", 73: "ppoll", 95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep",
        133: "rt_sigsuspend", 137: "rt_sigtimedwait", 202: "accept", 206: "sendto", 207: "recvfrom", 212: "recvmsg",
        242: "accept4", 260: "wait4", 441: "epoll_pwait2",
    },
}.get(platform.machine(), {})  # fmt: skip


class KernelWait(Struct, frozen=True):
    """The wait of one thread.

    Attributes:
        kind: one of those above. target: what the descriptor of a READ, ACCEPT or FILE_LOCK is, as /proc names it.
        switches: how often the thread has waited so far: a wait that goes on does not change it.
    """

    kind: str
    target: str = ""
    switches: int = 0


def kernel_wait(pid: int, thread: int) -> KernelWait:
    """Return what a thread of a process waits for."""
    place = f"/proc/{pid}/task/{thread}"
    switches = _switches(place)
    try:
        with open(f"{place}/syscall", encoding="ascii") as file:
            words = file.read().split()
    except OSError:
        return KernelWait(HIDDEN, "", switches)
    if not words or words[0] in ("running", "-1"):
        return KernelWait(RUNNING, "", switches)
    kind, timeout, pointer = _CALLS.get(_NUMBERS.get(int(words[0]), ""), (OTHER, -1, False))
    arguments = [int(word, 16) for word in words[1:7]]
    if timeout >= 0 and arguments[timeout] not in ((0,) if pointer else _UNTIMED_INT):
        kind = TIMED
    target = ""
    if kind in (READ, ACCEPT, FILE_LOCK):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{arguments[0]}")
    return KernelWait(kind, target, switches)


def _switches(place: str) -> int:
    with contextlib.suppress(OSError, ValueError), open(f"{place}/status", "rb") as file:
        for line in file:
            if line.startswith(b"voluntary_ctxt_switches:"):
                return int(line.split()[1])
    return 0
