"""Work and waits of the processes of one node: time of CPUs, bytes read and written, and where each thread waits.

Read when a watch asks for it, from /proc; hpcray's own processes are left out.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
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
_MOST_POLLED = 1024
_POLLED = struct.Struct("ihh")
_CHANNELS = ("pipe:", "socket:", "anon_inode:[eventfd]")
"""Descriptors to which only processes that have them open can write, but for sockets without a connection."""
_LOOKS_PER_SEARCH = 10
"""Looks after which all processes of the host are looked at again: their numbers may have been given anew."""
_NETLINK_SOCK_DIAG, _SOCK_DIAG, _DUMP, _SHOW_PEER, _PEER, _DONE, _ERROR, _ALL = 4, 20, 0x301, 4, 2, 3, 2, 0xFFFFFFFF
"""The kernel's numbers for a question for all Unix sockets and their peers."""
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
    if kind == POLL:
        target = _polled(pid, _NUMBERS[int(words[0])], arguments)
    if kind in (READ, ACCEPT, FILE_LOCK):
        descriptor = arguments[0]
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{arguments[0]}")
    return KernelWait(kind, target, descriptor, switches)


def _polled(pid: int, call: str, arguments: list[int]) -> str:
    """Return the pipes and sockets that a thread polls; "" where it polls anything else, or that cannot be seen."""
    numbers: set[int] = set()
    with contextlib.suppress(OSError, ValueError, struct.error):
        if call.startswith("epoll"):
            with open(f"/proc/{pid}/fdinfo/{arguments[0]}", encoding="ascii") as file:
                numbers = {int(line.split()[1]) for line in file if line.startswith("tfd:")}
        else:
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                numbers = _polled_numbers(memory.fileno(), call, arguments)
        targets = {os.readlink(f"/proc/{pid}/fd/{number}") for number in numbers}
        if 0 not in numbers and all(one.startswith(_CHANNELS) for one in targets):
            return " ".join(sorted(targets))
    return ""


def _polled_numbers(memory: int, call: str, arguments: list[int]) -> set[int]:
    if call.endswith("poll"):
        array = os.pread(memory, _POLLED.size * min(arguments[1], _MOST_POLLED), arguments[0])
        return {number for number, _, _ in _POLLED.iter_unpack(array) if number >= 0}
    size = (min(arguments[0], _MOST_POLLED) + 63) // 64 * 8
    sets = [int.from_bytes(os.pread(memory, size, place), "little") for place in arguments[1:4] if place]
    return {number for number in range(8 * size) if any(bits >> number & 1 for bits in sets)}


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
    """Return what the processes below `roots` wait for. `spared` ones are hpcray's own."""
    found, below = [], _processes_below(roots, set())
    held = {pid: _held_by(pid) for pid, _, _, _ in below}
    for pid, state, _, _ in below:
        if pid in spared or _is_ours(pid):
            found.append(ProcessWait(pid, _name(pid), state, [], *_connections(pid, held[pid]), ours=True))
            continue
        threads: list[str] = []
        with contextlib.suppress(OSError):
            threads = os.listdir(f"/proc/{pid}/task")
        waits = [kernel_wait(pid, int(thread)) for thread in threads[:_MOST_THREADS]]
        found.append(ProcessWait(pid, _name(pid), state, waits, *_connections(pid, held[pid])))
    wanted = {
        target
        for one in found
        for thread in one.threads
        if thread.kind in (READ, POLL)
        for target in thread.target.split()
    }
    outside = _held_outside(wanted, held) if wanted else set()
    for one in found:
        one.outside = sorted(outside & {target for thread in one.threads for target in thread.target.split()})
    return found


def _held_by(pid: int) -> set[str]:
    """Return what a process has open, as /proc names it."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def _held_outside(targets: set[str], held: dict[int, set[str]]) -> set[str]:
    """Return those pipes and sockets to which a process may write that is none of `held`."""
    everything = set[str]().union(*held.values())
    pipes = {one for one in targets if one.startswith("pipe:")}
    outside: set[str] = set()
    for name in os.listdir("/proc") if pipes else ():
        if name.isdigit() and int(name) not in held and not pipes <= outside:
            outside |= pipes & _held_by(int(name))
    sockets = {one for one in targets if one.startswith("socket:")}
    if sockets:
        peers = _unix_peers()
        connected = {f"socket:[{row.inode}]" for row in _tcp_sockets(os.getpid()) if row.state != _LISTENS}
        for one in sockets - connected:
            if peers.get(one) not in everything:
                outside.add(one)
    return outside


class _TcpSocket(Struct):
    own: str
    other: str
    state: str
    inode: str


def _tcp_sockets(pid: int) -> Iterable[_TcpSocket]:
    """The TCP sockets of the network that a process sees."""
    for table, family in ("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/net/{table}", encoding="ascii") as file:
            for line in file.readlines()[1:]:
                words = line.split()
                yield _TcpSocket(_address(words[1], family), _address(words[2], family), words[3], words[9])


def _unix_peers() -> dict[str, str]:
    """Return the other end of each connected Unix socket, both as /proc names them; {} where the kernel hides it."""
    question = struct.pack(
        "=IHHIIBBHIIIII", 40, _SOCK_DIAG, _DUMP, 1, 0, socket.AF_UNIX, 0, 0, _ALL, 0, _SHOW_PEER, 0, 0
    )
    found: dict[str, str] = {}
    with (
        contextlib.suppress(OSError, struct.error),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as asker,
    ):
        asker.settimeout(1.0)
        asker.send(question)
        while True:
            data = asker.recv(1 << 17)
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind in (_DONE, _ERROR):
                    return found
                (inode,) = struct.unpack_from("=I", data, 20)
                at = 32
                while at + 4 <= length:
                    size, attribute = struct.unpack_from("=HH", data, at)
                    if attribute == _PEER:
                        (peer,) = struct.unpack_from("=I", data, at + 4)
                        found[f"socket:[{inode}]"] = f"socket:[{peer}]"
                    at += max(4, (size + 3) & ~3)
                data = data[(length + 3) & ~3 :]
    return found


def _connections(pid: int, held: set[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the TCP connections of a process, and the addresses at which it waits for some."""
    ends: list[tuple[str, str]] = []
    listens: list[str] = []
    if any(one.startswith("socket:") for one in held):
        for row in _tcp_sockets(pid):
            if f"socket:[{row.inode}]" in held:
                if row.state == _LISTENS:
                    listens.append(row.own)
                elif row.state in _CONNECTED:
                    ends.append((row.own, row.other))
    return sorted(ends), sorted(listens)


def _address(digits: str, family: int) -> str:
    """Return an address with its port, which /proc shows as words of the machine's byte order."""
    host, _, port = digits.partition(":")
    raw = bytes.fromhex(host)
    words = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4)) if sys.byteorder == "little" else raw
    text = socket.inet_ntop(family, words)
    return f"{text.removeprefix('::ffff:')}:{int(port, 16)}"


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
