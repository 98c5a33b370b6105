"""Where the core time of a node went: an account whose rows add up to cores × wall time by construction.

A core is at each moment free or reserved. The raylet knows how many it has reserved for which process; the process
says, when it is asked, how long it has run tasks and how much CPU time it has used since. From one answer of a process
to the next, its reserved cores count as running on a CPU (no longer than its CPU time), as running off the CPU, or as
reserved without a task. All other core time was free.
"""

from __future__ import annotations

from dataclasses import dataclass

ON_CPU, OFF_CPU = "running tasks, on a CPU", "running tasks, off the CPU (sleep, I/O, get, or no CPU to be had)"
BETWEEN, ACTORS = "reserved, between two tasks", "reserved by actors, without a call"
BLOCKED, QUEUED, FREE = "lent by tasks blocked in get, and not used", "free, with tasks waiting", "free, nothing to do"
UNKNOWN = "reserved, and not seen"


@dataclass
class _Reservation:
    """The last answer of one process: since when, cores, seconds of tasks, of CPU; whether it is an actor."""

    at: float
    cores: float
    busy: float
    cpu: float
    actor: bool


class CoreTimeAccount:
    """The account of one node.

    Args:
        now: monotonic time. cores: how many it has.
    """

    def __init__(self, now: float, cores: float) -> None:
        self._began, self._cores = now, cores
        self._reserved = dict.fromkeys((ON_CPU, OFF_CPU, BETWEEN, ACTORS, UNKNOWN), 0.0)
        self._free = dict.fromkeys((BLOCKED, QUEUED, FREE), 0.0)
        self._sampled = now
        self._processes: dict[bytes, _Reservation] = {}

    def answered(self, now: float, proc: bytes, cores: float, actor: bool, busy: float, cpu: float) -> None:
        """A process says what it has run.

        Args:
            cores: reserved for it now. actor: whether for an actor.
            busy: seconds of tasks and calls since its start, running ones included. cpu: its CPU time.
        """
        known = self._processes.get(proc)
        if known is not None and known.cores:
            seconds = now - known.at
            ran = min(seconds, max(0.0, busy - known.busy))
            on = min(ran, max(0.0, cpu - known.cpu))
            self._reserved[ON_CPU] += known.cores * on
            self._reserved[OFF_CPU] += known.cores * (ran - on)
            self._reserved[ACTORS if known.actor else BETWEEN] += known.cores * (seconds - ran)
        self._processes[proc] = _Reservation(now, cores, busy, cpu, actor)

    def process_died(self, now: float, proc: bytes) -> None:
        """A process is gone; since its last answer it was not seen."""
        known = self._processes.pop(proc, None)
        if known is not None:
            self._reserved[UNKNOWN] += known.cores * (now - known.at)

    def sample(self, now: float, free: float, lent: float, waiting: bool) -> None:
        """Look at what is not reserved.

        Args:
            free: cores. lent: cores whose tasks are blocked in `get`. waiting: whether requests wait for resources.
        """
        seconds, self._sampled = now - self._sampled, now
        unused = min(max(0.0, free), lent)
        self._free[BLOCKED] += unused * seconds
        self._free[QUEUED if waiting else FREE] += (max(0.0, free) - unused) * seconds

    def rows(self, now: float) -> dict[str, float]:
        """Seconds of core time by what they were; they add up to cores × the time since the start."""
        reserved = dict(self._reserved)
        for known in self._processes.values():
            reserved[UNKNOWN] += known.cores * (now - known.at)
        whole, used = self._cores * (now - self._began), sum(reserved.values())
        if used > whole:  # amounts that changed between two answers
            return {name: seconds * whole / used for name, seconds in reserved.items()} | dict.fromkeys(self._free, 0.0)
        seen = sum(self._free.values())
        shares = {name: seconds / seen for name, seconds in self._free.items()} if seen else {**self._free, FREE: 1.0}
        return reserved | {name: (whole - used) * share for name, share in shares.items()}
