"""Processes of this machine as the kernel sees them: names, parents, descendants, states; and threads made in time.

psutil is not used. The fork server cleans up, and a diagnosis is made, when a file system may have stopped answering:
nothing can be imported then, and importing psutil at the start would cost every node 7 ms. Besides, psutil derives the
start time of a process from the wall clock, which may be set between two looks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from msgspec import Struct

_PAGE = os.sysconf("SC_PAGE_SIZE")
_STAT_BYTES = 2048
_STATES = {
    b"R": "running",
    b"S": "sleeping",
    b"D": "in an uninterruptible wait (a disk or a network file system)",
    b"T": "stopped by a signal",
    b"t": "stopped by a debugger",
    b"Z": "dead, not reaped",
    b"X": "dead",
    b"I": "idle",
}
NO_THREAD = 73
"""Exit code of a worker that could not start one, before it said Hello."""


def let_kernel_kill_first() -> None:
    """Where memory runs out, the kernel ends this process rather than a raylet or the program.

    The variable RAY_worker_oom_score_adjustment gives another adjustment than 1000, the highest.
    """
    adjustment = os.environ.get("RAY_worker_oom_score_adjustment") or "1000"  # noqa: SIM112 -- the name is Ray's
    with contextlib.suppress(OSError):
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, adjustment.encode())
        finally:
            os.close(fd)


def descendants(root: int) -> list[int]:
    """Pids of all live processes below `root`, without `root`."""
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


def ancestors(pid: int) -> list[int]:
    """Return the parent of a process, its parent, and so on; [] if there is no such process."""
    parents = {child: parent for child, parent, _ in _processes()}
    found: list[int] = []
    while (pid := parents.get(pid, 0)) > 0:
        found.append(pid)
    return found


def children_by_name(pid: int) -> dict[int, str]:
    """Return the children of a process with the names that `ps -o comm` shows."""
    found = {}
    for child, parent, _ in _processes():
        with contextlib.suppress(OSError):
            if parent == pid:
                found[child] = Path(f"/proc/{child}/comm").read_text(errors="replace").strip()
    return found


def kill_descendants(root: int, spared: Collection[int] = ()) -> int:
    """SIGKILL every process below `root` that is not `spared`.

    Returns:
        The number of processes found. A process that forks between the listing and the kill escapes: call again until
        the number is 0.
    """
    found = [pid for pid in descendants(root) if pid not in spared]
    for pid in found:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


def end_processes_with(variable: str, texts: Collection[str]) -> None:
    """SIGKILL the processes of this user that were started with one of these texts in a variable."""
    wanted = {f"{variable}={text}".encode() for text in texts}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid != os.geteuid():
                    continue
                with open(f"/proc/{name}/environ", "rb") as file:
                    if not wanted.isdisjoint(file.read().split(b"\0")):
                        os.kill(int(name), signal.SIGKILL)


def reap_orphans(others: Collection[int]) -> None:
    """Reap dead children that this process adopted as orphans.

    Args:
        others: pids of children that other code waits for.
    """
    while True:
        try:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if dead is None or dead.si_pid in others:
            return
        os.waitpid(dead.si_pid, 0)


class ProcessIdentity(Struct, frozen=True):
    """A process that is not our child, as it was when we looked. The pid may be reused; the identity is not.

    Attributes:
        pid: process id.
        started: start time in clock ticks since boot.
        parent: pid of the parent.
    """

    pid: int
    started: int
    parent: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The process with this pid now; None if there is none or if it is dead."""
        fields = _stat(pid)
        return None if fields is None or fields[0] in b"ZX" else cls(pid, int(fields[19]), int(fields[1]))

    @property
    def alive(self) -> bool:
        """True if this process runs."""
        return self._now() is not None

    @property
    def orphaned(self) -> bool:
        """True if this process runs and has another parent than when we looked."""
        now = self._now()
        return now is not None and now.parent != self.parent

    @property
    def started_ms(self) -> int:
        """When it started, in milliseconds since 1970, by the clock as it is set now."""
        since_boot = self.started / os.sysconf("SC_CLK_TCK")
        return round(1000 * (time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot))

    def _now(self) -> ProcessIdentity | None:
        now = ProcessIdentity.of(self.pid)
        return now if now is not None and now.started == self.started else None


def describe_process(pid: int) -> dict[str, Any]:
    """Facts that the kernel knows of a process.

    Returns:
        "state" (in words), "wchan" (kernel function in which the process waits, "" for none), "threads", "rss" (bytes);
        an empty dict if there is no such process.
    """
    fields = _stat(pid)
    if fields is None:
        return {}
    return {
        "state": _STATES.get(fields[0], fields[0].decode()),
        "wchan": read_wchan(pid),
        "threads": int(fields[17]),
        "rss": int(fields[21]) * _PAGE,
    }


def read_wchan(pid: int) -> str:
    """The kernel function in which a process waits; "" if it runs, or if the kernel hides the name."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan", encoding="ascii") as file:
        text = file.read().strip()
        return "" if text == "0" else text
    return ""


def handles_signal(pid: int, number: int) -> bool:
    """True if a process has installed a handler for a signal."""
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
    """The fields of /proc/<pid>/stat after the command name; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # every raylet reads its own twice a second
            # The command name may hold anything, but the last ")" ends it.
            return file.read(_STAT_BYTES).rpartition(b")")[2].split()
    except OSError:
        return None


def forward_signals(pid: int, numbers: Iterable[int]) -> None:
    """Forward these signals to process `pid`; once it is gone they have their default effect."""

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in numbers:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, handle)


class PrestartedThread:
    """Waits for its work.

    Raises:
        SystemExit: with NO_THREAD; there can be no more threads (`ulimit -u`, or the cgroup's limit of processes).
    """

    def __init__(self, name: str) -> None:
        self._targets: list[Callable[[], None]] = []
        self._gate = threading.Lock()
        self._gate.acquire()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self.thread.start()
        except RuntimeError:
            raise SystemExit(NO_THREAD) from None

    def begin(self, target: Callable[[], None]) -> None:
        """Do this."""
        self._targets.append(target)
        self._gate.release()

    def _run(self) -> None:
        self._gate.acquire()
        self._targets.pop()()
