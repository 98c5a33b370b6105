"""Attributes that a process sets for itself in the kernel: its name, its end with its parent, which orphans it adopts.

Few modules are loaded for it: `hpcray.launch.local_ranks` starts with this one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

LAUNCHER_NAME = "hpcray-ranks"
"""Name of the process that `hpcray-launch` starts the ranks of one host with."""
TEMPLATE_NAME = "hpcray-template"
"""Name of the fork server of a node, which tidies up after its raylet."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def set_process_name(name: str) -> None:
    """Set the name that `ps -o comm` shows for this process; the kernel keeps 15 bytes of it."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def become_subreaper() -> None:
    """Make this process, instead of init, the parent of descendants whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies.

    Args:
        parent: pid of the parent; if that process is gone already, the signal is sent at once.
        number: the signal.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def children() -> Iterator[tuple[int, str]]:
    """The children of this process, adopted ones too, with the names that `ps -o comm` shows."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
            for pid in map(int, file.read().split()):
                with (
                    contextlib.suppress(OSError),
                    open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as comm,
                ):
                    yield pid, comm.read().strip()


def _prctl(option: int, value: int | bytes) -> None:
    if _libc.prctl(option, value if isinstance(value, bytes) else ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
