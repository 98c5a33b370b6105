"""What this process may use of its machine: CPUs and memory."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

from hpcray.host.allocation import read_allocation

_CGROUP = Path("/sys/fs/cgroup")


def usable_cpus() -> int:
    """CPUs this process may run on: its affinity mask, cut to the cgroup's quota and to what the batch system gave the
    job on this host; at least 1."""
    cpus = min(float(len(os.sched_getaffinity(0))), cgroup_cpus())
    given = read_allocation().cpus_here
    return max(1, math.floor(min(cpus, given or math.inf)))


def cgroup_cpus() -> float:
    """CPUs that the cgroup's quota allows; infinite when it sets none. (A cpuset shows in the affinity mask.)"""
    return min((_quota(directory) for directory in _cgroup_directories("cpu")), default=math.inf)


def cpus_per_rank(ranks_on_host: int) -> int:
    """CPUs of one of several ranks on this host; at least 1.

    A launcher that bound the rank to CPUs of its own (its mask is smaller than its parent's) has done the division.
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
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [limit for limit in (cgroup_memory(), read_allocation().memory_here) if limit]
    return min([total, *limits])


def cgroup_memory() -> int | None:
    """The smallest memory limit of the cgroups that this process is in, bytes; None without one."""
    limits = [
        limit
        for directory in _cgroup_directories("memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (limit := _read_number(directory / name)) is not None
    ]
    return min(limits, default=None)


def _quota(directory: Path) -> float:
    """CPU quota of one cgroup, in CPUs; infinite when there is none."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (directory / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    quota_us = _read_number(directory / "cpu.cfs_quota_us")
    period_us = _read_number(directory / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else math.inf


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


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
