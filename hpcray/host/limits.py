"""What the kernel lets this process have: open files and processes."""

from __future__ import annotations

import contextlib
import os
import resource

_RESERVE = 24
"""Descriptors that a raylet keeps for itself: wires, spill files, libraries."""
_MOST_FILES = 1 << 20


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard one; what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft


def connections_left(open_files: int) -> int:
    """So many processes may connect to this one before it runs out of descriptors; 0 or less: none."""
    return open_files - len(os.listdir("/proc/self/fd")) - _RESERVE
