"""Work and waits of the processes of one node: time of CPUs, bytes read and written, and where each thread waits.

Read when a watch asks for it, from /proc; hpcray's own processes are left out.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Collection, Iterable

from msgspec import Struct

from hpcray.diagnostics.wait_kinds import (
    ACCEPT,
    CHILD,
    FILE_LOCK,
    HIDDEN,
    LOCK,
    OTHER,
    POLL,
    READ,
    RUNNING,
    SIGNAL,
    TIMED,
    Activity,
    KernelWait,
    ProcessWait,
)

_TICK = os.sysconf("SC_CLK_TCK")
_OURS = ("hpcray-raylet", "hpcray-template", "hpcray-keeper", "hpcray-launch", "hpcray-mpi")
"""Names of processes that run nothing of a program's."""
_COMMANDS = b"hpcray.cli"
"""First part of the module of a command that looks at the job."""
_WAKE_BYTES = 8
"""Bytes that a thread of hpcray reads and writes to be woken: those of an eventfd."""
_MOST_THREADS = 64
_LOOKS_PER_SEARCH = 10
"""Looks after which all processes of the host are looked at again: their numbers may have been given anew."""
_LOOPBACK = ("127.", "::1")
_LISTENS = "0A"
_CONNECTED = ("01", "02")
"""States of TCP sockets in /proc: established, and about to be."""


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
}.get(os.uname().machine, {})  # fmt: skip


def kernel_wait(pid: int, thread: int) -> KernelWait:
    """Return what a thread of a process waits for."""
    place = f"/proc/{pid}/task/{thread}"
    switches = _switches(place)
    try:
        with open(f"{place}/syscall", encoding="ascii") as file:
            words = file.read().split()
    except OSError:
        return KernelWait(HIDDEN, switches=switches)
    if not words or words[0] in ("running", "-1"):
        return KernelWait(RUNNING, switches=switches)
    kind, timeout, pointer = _CALLS.get(_NUMBERS.get(int(words[0]), ""), (OTHER, -1, False))
    arguments = [int(word, 16) for word in words[1:7]]
    if timeout >= 0 and arguments[timeout] not in ((0,) if pointer else _UNTIMED_INT):
        kind = TIMED
    target, descriptor = "", -1
    if kind in (READ, ACCEPT, FILE_LOCK):
        descriptor = arguments[0]
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{arguments[0]}")
    return KernelWait(kind, target, descriptor, switches)


def _switches(place: str) -> int:
    with contextlib.suppress(OSError, ValueError), open(f"{place}/status", "rb") as file:
        for line in file:
            if line.startswith(b"voluntary_ctxt_switches:"):
                return int(line.split()[1])
    return 0


class _Seen(Struct):
    started: int
    cpu: float
    io: tuple[int, int, int, int]
    ours: bool


class ActivityMeter:
    """Adds up what the processes of a node do, those that have ended included."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._total = Activity()
        self._foreign: set[int] = set()
        self._roots: set[int] = set()
        self._looks = 0

    def look(self, roots: Iterable[int], spared: Collection[int], asleep: Collection[int] = ()) -> Activity:
        """Look at all processes below `roots`, and at these.

        Args:
            spared: pids of processes that do not count. asleep: of those that do not count this time.
        """
        total, before, now = self._total, self._seen, dict[int, _Seen]()
        roots = set(roots)
        self._looks += 1
        if roots != self._roots or self._looks % _LOOKS_PER_SEARCH == 0:
            self._roots = roots
            self._foreign.clear()
        stopped: list[int] = []
        for pid, state, started, cpu in _processes_below(roots, self._foreign):
            if pid in spared:
                continue
            known = before.get(pid)
            if known is None or known.started != started:
                known = _Seen(started, 0.0, (0, 0, 0, 0), _is_ours(pid))
                total.moved += not known.ours  # it was started since
            if known.ours:
                now[pid] = known
                continue
            io = _read_io(pid)
            if pid not in asleep:
                total.cpu += max(0.0, cpu - known.cpu)
                total.moved += _has_moved(known.io, io)
            if state in "Tt":
                stopped.append(pid)
            now[pid] = _Seen(started, cpu, io, False)
        total.moved += sum(pid not in now and not one.ours for pid, one in before.items())  # it has ended
        self._seen = now
        return Activity(total.cpu, total.moved, stopped, len(now))


def waits_of(roots: Iterable[int], spared: Collection[int]) -> list[ProcessWait]:
    """Return what the processes below `roots` wait for, `spared` ones left out."""
    found = []
    for pid, state, _, _ in _processes_below(roots, set()):
        if pid in spared or _is_ours(pid):
            continue
        threads: list[str] = []
        with contextlib.suppress(OSError):
            threads = os.listdir(f"/proc/{pid}/task")
        waits = [kernel_wait(pid, int(thread)) for thread in threads[:_MOST_THREADS]]
        found.append(ProcessWait(pid, _name(pid), state, waits, *_connections(pid)))
    return found


def _connections(pid: int) -> tuple[list[str], bool]:
    """Return the other hosts to which a process has TCP connections, and whether it listens."""
    inodes = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    peers: set[str] = set()
    listens = False
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)) if inodes else ():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/net/{table}", encoding="ascii") as file:
            for line in file.readlines()[1:]:
                words = line.split()
                if words[9] in inodes:
                    listens = listens or words[3] == _LISTENS
                    peer = _address(words[2].partition(":")[0], family)
                    if words[3] in _CONNECTED and not peer.startswith(_LOOPBACK):
                        peers.add(peer)
    return sorted(peers), listens


def _address(digits: str, family: int) -> str:
    """Return an IP address that /proc shows as words of the machine's byte order."""
    raw = bytes.fromhex(digits)
    words = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4)) if sys.byteorder == "little" else raw
    text = socket.inet_ntop(family, words)
    return text.removeprefix("::ffff:")


def _has_moved(before: tuple[int, int, int, int], now: tuple[int, int, int, int]) -> bool:
    """Return True if a process has read or written more than what wakes its threads."""
    read, written, reads, writes = (new - old for new, old in zip(now, before, strict=True))
    return read > _WAKE_BYTES * reads or written != _WAKE_BYTES * writes


def _read_io(pid: int) -> tuple[int, int, int, int]:
    """Return the bytes that a process has read and written, and by how many calls; zeros where that is hidden."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/io", "rb") as file:
        numbers = [int(line.split()[1]) for line in file.readlines()[:4]]
        return numbers[0], numbers[1], numbers[2], numbers[3]
    return 0, 0, 0, 0


def _is_ours(pid: int) -> bool:
    """Return True for processes that run nothing of a program: those of a node, and commands that look at the job."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return _name(pid).startswith(_OURS) or any(word.startswith(_COMMANDS) for word in file.read().split(b"\0"))
    return False


def _name(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
        return file.read().strip()
    return ""


def _processes_below(roots: Iterable[int], foreign: set[int]) -> list[tuple[int, str, int, float]]:
    """(pid, state, start in ticks, CPU seconds) of live processes: `roots` and all below them.

    Args:
        foreign: pids of others, which are not read again; those that are read here for nothing are added.
    """
    rows: dict[int, tuple[str, int, int, float]] = {}
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in foreign:
            continue
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
            cpu = (int(words[11]) + int(words[12])) / _TICK
            rows[int(name)] = words[0].decode(), int(words[1]), int(words[19]), cpu
            children.setdefault(int(words[1]), []).append(int(name))
    found: dict[int, tuple[int, str, int, float]] = {}
    todo = list(roots)
    while todo:
        pid = todo.pop()
        if pid in rows and pid not in found:
            state, _, started, cpu = rows[pid]
            if state not in "ZX":
                found[pid] = (pid, state, started, cpu)
            todo += children.get(pid, [])
    foreign.update(rows.keys() - found.keys())
    return list(found.values())
