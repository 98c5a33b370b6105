"""Process plumbing that Python's os module lacks: prctl, and finding and killing descendants through /proc."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection, Iterator
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int | bytes) -> None:
    if _libc.prctl(option, value if isinstance(value, bytes) else ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def set_process_name(name: str) -> None:
    """What `ps -o comm` shows for this process, at most 15 characters."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies, instead of the init process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """A signal for this process as soon as its parent, pid `parent`, is gone; at once when it is gone already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def descendants(root: int) -> list[int]:
    """Pids of all live processes below `root`, itself not among them."""
    children: dict[int, list[int]] = {}
    dead: set[int] = set()
    for pid, parent, state in _processes():
        children.setdefault(parent, []).append(pid)
        if state in b"ZX":
            dead.add(pid)
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return [pid for pid in found if pid not in dead]


def kill_descendants(root: int, spared: Collection[int] = ()) -> int:
    """SIGKILL every process below `root` that is not `spared`; how many there were.

    A process that forks between the look and the kill escapes: call again until it returns 0.
    """
    found = [pid for pid in descendants(root) if pid not in spared]
    for pid in found:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


def reap_orphans(others: Collection[int]) -> None:
    """Reap dead children of this process that came to it as orphans; `others` are those that somebody waits for."""
    while True:
        try:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if dead is None or dead.si_pid in others:
            return
        os.waitpid(dead.si_pid, 0)


@dataclass(frozen=True)
class Family:
    """A process that is no child of ours, as it was when we looked.

    Attributes:
        pid: its process id.
        started: when it started, in clock ticks since boot: tells it from a later process with its pid.
        parent: its parent's process id.
    """

    pid: int
    started: int
    parent: int

    @classmethod
    def of(cls, pid: int) -> Family | None:
        """The process with this pid; None when there is none, or a dead one."""
        fields = _stat(pid)
        return None if fields is None or fields[0] in b"ZX" else cls(pid, int(fields[19]), int(fields[1]))

    @property
    def lives(self) -> bool:
        """Whether it still runs."""
        now = Family.of(self.pid)
        return now is not None and now.started == self.started

    @property
    def orphaned(self) -> bool:
        """Whether it runs, but the parent it had is gone."""
        now = Family.of(self.pid)
        return now is not None and now.started == self.started and now.parent != self.parent


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            masks = [line.split()[1] for line in file if line.startswith(b"SigCgt:")]
    except OSError:
        return False
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def describe_exit(status: int) -> str:
    """A wait status in words: `exit code 1`, `signal 9 (SIGKILL)`."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"signal {number} ({signal.Signals(number).name})"
        except ValueError:
            return f"signal {number}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"


def close_other_fds(keep: set[int]) -> None:
    """Close every file descriptor above 2 that is not in `keep`."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)


def _processes() -> Iterator[tuple[int, int, bytes]]:
    """(pid, parent, state letter) of every process."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _stat(int(name))
            if fields is not None:
                yield int(name), int(fields[1]), fields[0]


def _stat(pid: int) -> list[bytes] | None:
    """The fields of /proc/<pid>/stat after the command name; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command name may hold anything, but the last ")" ends it.
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None
