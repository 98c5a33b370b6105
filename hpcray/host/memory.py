"""How much memory this node's processes use, of how much: the machine's, its cgroups', or a limit that was given."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from hpcray.host.allocation import read_allocation
from hpcray.host.probe import _cgroup_directories, _read_number
from hpcray.host.procfs import group_memory, own_memory

_MEMINFO = "/proc/meminfo"
_UNLIMITED = 1 << 60
_SCAN_EVERY = 4


class Usage(NamedTuple):
    """Bytes in use, bytes that there are, and what says so."""

    used: int
    limit: int
    source: str


class MemoryGauge:
    """Reads the memory of this node.

    Args:
        given: bytes that the processes of this node may use together; 0: what the batch system says.
    """

    def __init__(self, given: int = 0) -> None:
        self._cgroups = [found for found in map(_limited, _cgroup_directories("memory")) if found is not None]
        self._limit = given or (read_allocation().memory_here or 0)
        self._name = "memory_limit" if given else "the batch system"
        self._reads = 0
        self._of_children = 0
        total = _meminfo().get("MemTotal", 0)
        if not given and (self._limit >= total or any(limit <= self._limit for _, limit in self._cgroups)):
            self._limit = 0  # something else sets a tighter one

    def read(self, pids: Iterable[int], shared: int) -> Usage:
        """The usage of what is fullest.

        Args:
            pids: processes of this node, of which a limit that no cgroup enforces is reckoned up. They lead groups; the
                others in those are looked at now and then. shared: bytes that they share.
        """
        found = [_machine()]
        found += [Usage(_cgroup_usage(directory, limit), limit, "its cgroup") for directory, limit in self._cgroups]
        if self._limit:
            found.append(Usage(shared + self._of_groups(list(pids)), self._limit, self._name))
        return max(found, key=lambda usage: usage.used / usage.limit if usage.limit else 0.0)

    def kernel_kills(self) -> int:
        """How many processes the kernel has ended so far because one of our cgroups was full."""
        return sum(_oom_kills(directory) for directory, _ in self._cgroups)

    def _of_groups(self, pids: list[int]) -> int:
        direct = sum(map(own_memory, pids))
        if self._reads % _SCAN_EVERY == 0:  # it looks at every process of the machine
            self._of_children = max(0, sum(group_memory(pids).values()) - direct)
        self._reads += 1
        return direct + self._of_children


def _oom_kills(directory: Path) -> int:
    for name in ("memory.events", "memory.oom_control"):
        try:
            lines = (directory / name).read_text().splitlines()
        except OSError:
            continue
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0


def _machine() -> Usage:
    numbers = _meminfo()
    total = numbers.get("MemTotal", 0)
    return Usage(total - numbers.get("MemAvailable", total), total, "the machine")


def _meminfo() -> dict[str, int]:
    try:
        with open(_MEMINFO, "rb", buffering=0) as file:  # several times a second: only the lines that are asked for
            lines = file.read(128).decode().splitlines()[:3]
    except OSError:
        return {}
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}


def _limited(directory: Path) -> tuple[Path, int] | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = _read_number(directory / name)
        if limit is not None and 0 < limit < _UNLIMITED:
            return directory, limit
    return None


def _cgroup_usage(directory: Path, limit: int) -> int:
    """Bytes that the kernel cannot take back by itself: without files that nobody has read for a while."""
    used = _read_number(directory / "memory.current")
    if used is None:
        used = _read_number(directory / "memory.usage_in_bytes") or 0
    if used * 2 < limit:
        return used  # the rest is of no interest
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        return used
    numbers = dict(line.split(maxsplit=1) for line in lines)
    return used - int(numbers.get("total_inactive_file", numbers.get("inactive_file", 0)))
