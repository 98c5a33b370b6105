"""What the kernel tells of a process that does not speak for itself, and of the memory that processes use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

_PAGE = os.sysconf("SC_PAGE_SIZE")
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in an uninterruptible wait (a disk or a network file system)",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead, not reaped",
    "X": "dead",
    "I": "idle",
}


def describe_process(pid: int) -> dict[str, Any]:
    """What the kernel knows of a process.

    Returns:
        "state" (in words), "wchan" (the kernel function in which it waits, "" for none), "threads", "rss" (bytes);
        empty when there is no such process.
    """
    try:
        fields = _stat(Path(f"/proc/{pid}/stat"))
    except OSError:
        return {}
    return {
        "state": _STATES.get(fields[0], fields[0]),
        "wchan": read_wchan(pid),
        "threads": int(fields[17]),
        "rss": int(fields[21]) * _PAGE,
    }


def read_wchan(pid: int) -> str:
    """In which function of the kernel a process waits; "" when in none, or when that is not told."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/wchan").read_text().strip()
        return "" if text == "0" else text
    return ""


def group_memory(leaders: Collection[int]) -> dict[int, int]:
    """Bytes of memory of its own (without what it shares) that each process group uses, by its leader's pid.

    A worker leads a group, in which the processes that it starts are too.
    """
    found = dict.fromkeys(leaders, 0)
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            group = int(_stat(Path(f"/proc/{name}/stat"))[2])
            if group in found:
                found[group] += own_memory(int(name))
    return found


def own_memory(pid: int) -> int:
    """Bytes that would be free if the process ended: resident and not shared, and in swap."""
    with contextlib.suppress(OSError):
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(resident) - int(shared)) * _PAGE
    return 0


def _stat(path: Path) -> list[str]:
    """The fields of /proc/<pid>/stat after the command name, which may hold anything but ends with the last ")"."""
    return path.read_text(errors="replace").rpartition(")")[2].split()
