"""CPUs, memory and open files that this process may use, and the memory that its node uses.

Sources of the limits: the affinity mask, cgroups of version 1 and 2, the batch system, rlimits.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from hpcray.platform.allocation import read_allocation

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = "/proc/meminfo"
_PAGE = os.sysconf("SC_PAGE_SIZE")
_NO_MEMORY_LIMIT = 1 << 60  # bytes; version 1 cgroups write "no limit" as a number of this size
_GROUP_SCAN_INTERVAL = 4  # reads of the gauge between two scans of every process of the machine
_RESERVED_FDS = 24  # descriptors that a raylet keeps for itself: wires, spill files, libraries
_MAX_OPEN_FILES = 1 << 20


def open_standard_descriptors() -> None:
    """Open those of stdin, stdout and stderr that the process was started without: else a socket or the arena would get
    their numbers, and what a library or a child prints would be written there."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free


def usable_cpus() -> int:
    """CPUs this process may run on: its affinity mask, cut to the cgroup's quota and to what the batch system gave the
    job on this host; at least 1."""
    cpus = min(float(len(os.sched_getaffinity(0))), cgroup_cpus())
    given = read_allocation().cpus_here
    return max(1, math.floor(min(cpus, given or math.inf)))


def cgroup_cpus() -> float:
    """CPUs that the cgroup's quota allows; infinite without a quota. (A cpuset shows in the affinity mask.)"""
    return min((_quota(directory) for directory in _cgroup_directories("cpu")), default=math.inf)


def cpus_per_rank(ranks_on_host: int) -> int:
    """CPUs of one of several ranks on this host; at least 1.

    A launcher that bound the rank to CPUs of its own (the rank's mask is smaller than its parent's) has done the
    division.
    """
    if ranks_on_host <= 1:
        return usable_cpus()
    with contextlib.suppress(OSError):
        if os.sched_getaffinity(0) < os.sched_getaffinity(os.getppid()):
            return usable_cpus()
    return max(1, usable_cpus() // ranks_on_host)


def usable_memory() -> int:
    """Bytes of memory that the processes of this node may use together: the machine's, cut to the cgroup's limit and to
    what the batch system gave the job on this host."""
    total = _PAGE * os.sysconf("SC_PHYS_PAGES")
    limits = [limit for limit in (cgroup_memory(), read_allocation().memory_here) if limit]
    return min([total, *limits])


def cgroup_memory() -> int | None:
    """The smallest memory limit, in bytes, of the cgroups that hold this process; None without one."""
    limits = [
        limit
        for directory in _cgroup_directories("memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (limit := _read_number(directory / name)) is not None
    ]
    return min(limits, default=None)


class MemoryUsage(NamedTuple):
    """Bytes in use, the limit in bytes, and the name of the source of that limit."""

    used: int
    limit: int
    source: str


class MemoryGauge:
    """Measures the memory that this node uses against the limits that apply.

    Args:
        given: bytes that the processes of this node may use together; 0: the batch system's limit applies.
    """

    def __init__(self, given: int = 0) -> None:
        self._cgroups = [found for found in map(_limited, _cgroup_directories("memory")) if found is not None]
        self._limit = given or (read_allocation().memory_here or 0)
        self._name = "memory_limit" if given else "the batch system"
        self._reads = 0
        self._of_children = 0
        total = read_meminfo().get("MemTotal", 0)
        if not given and (self._limit >= total or any(limit <= self._limit for _, limit in self._cgroups)):
            self._limit = 0  # another source sets a tighter limit

    def read(self, pids: Iterable[int], shared: int) -> MemoryUsage:
        """The usage that is nearest to its limit: of the machine, of a cgroup, or of this node's processes.

        Args:
            pids: leaders of this node's process groups. Their memory is added up for a limit that no cgroup enforces;
                the other processes of these groups are read every few calls only.
            shared: bytes that all of them share.
        """
        found = [_machine()]
        for directory, limit in self._cgroups:
            found.append(MemoryUsage(_cgroup_usage(directory, limit), limit, "its cgroup"))
        if self._limit:
            found.append(MemoryUsage(shared + self._of_groups(list(pids)), self._limit, self._name))
        return max(found, key=lambda usage: usage.used / usage.limit if usage.limit else 0.0)

    def kernel_kills(self) -> int:
        """How many processes the kernel has killed so far because one of our cgroups was full."""
        return sum(_oom_kills(directory) for directory, _ in self._cgroups)

    def _of_groups(self, pids: list[int]) -> int:
        direct = sum(map(private_memory, pids))
        if self._reads % _GROUP_SCAN_INTERVAL == 0:
            self._of_children = max(0, sum(group_memory(pids).values()) - direct)
        self._reads += 1
        return direct + self._of_children


def group_memory(leaders: Collection[int]) -> dict[int, int]:
    """Bytes of private memory that each process group uses, by the pid of its leader.

    A worker leads a group; the processes that the worker starts belong to the group too.
    """
    found = dict.fromkeys(leaders, 0)
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                group = os.getpgid(int(name))
                if group in found:
                    found[group] += private_memory(int(name))
    return found


def private_memory(pid: int) -> int:
    """Resident bytes of a process that no other process shares; 0 if there is no such process."""
    with contextlib.suppress(OSError):
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(resident) - int(shared)) * _PAGE
    return 0


def _machine() -> MemoryUsage:
    numbers = read_meminfo()
    total = numbers.get("MemTotal", 0)
    return MemoryUsage(total - numbers.get("MemAvailable", total), total, "the machine")


def read_meminfo() -> dict[str, int]:
    """MemTotal, MemFree and MemAvailable of the machine in bytes; empty if the kernel does not provide them."""
    try:
        with open(_MEMINFO, "rb", buffering=0) as file:  # read several times a second: the first three lines suffice
            lines = file.read(128).decode().splitlines()[:3]
    except OSError:
        return {}
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}


def raise_open_file_limit() -> int:
    """Raise the soft limit of open files to the hard one. Returns the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return _MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def free_connections(open_files: int) -> int:
    """How many processes may still connect to this one before it runs out of descriptors; 0 or less: none.

    Args:
        open_files: limit of open files, from `raise_open_file_limit`.
    """
    return open_files - len(os.listdir("/proc/self/fd")) - _RESERVED_FDS


def _cgroup_directories(controller: str) -> Iterator[Path]:
    """The cgroup of this process and its ancestors, version 2 and version 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = _CGROUP / controller if controllers else _CGROUP
        directory = top / path.lstrip("/")
        while True:
            yield directory
            if directory == top or top not in directory.parents:
                break
            directory = directory.parent


def _quota(directory: Path) -> float:
    """CPU quota of one cgroup, in CPUs; infinite without one."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (directory / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    quota_us = _read_number(directory / "cpu.cfs_quota_us")
    period_us = _read_number(directory / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else math.inf


def _limited(directory: Path) -> tuple[Path, int] | None:
    """The cgroup and its memory limit in bytes; None without a limit."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = _read_number(directory / name)
        if limit is not None and 0 < limit < _NO_MEMORY_LIMIT:
            return directory, limit
    return None


def _cgroup_usage(directory: Path, limit: int) -> int:
    """Bytes that the kernel cannot reclaim: without page cache that was not read for a while."""
    used = _read_number(directory / "memory.current")
    if used is None:
        used = _read_number(directory / "memory.usage_in_bytes") or 0
    if used * 2 < limit:
        return used  # far from full: the exact figure does not matter
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        return used
    numbers = dict(line.split(maxsplit=1) for line in lines)
    return used - int(numbers.get("total_inactive_file", numbers.get("inactive_file", 0)))


def _oom_kills(directory: Path) -> int:
    for name in ("memory.events", "memory.oom_control"):
        try:
            lines = (directory / name).read_text().splitlines()
        except OSError:
            continue
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
