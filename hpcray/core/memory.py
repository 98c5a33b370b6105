"""Which worker to end when a node runs short of memory, before the kernel picks a process by itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpcray.base.deaths import LOW_MEMORY

SHARE = 4
"""Only workers that use at least this part of what the largest one does are considered: others would die in vain."""
_SHOWN = 10


@dataclass(frozen=True)
class Candidate:
    """A worker that could be ended.

    Attributes:
        worker: its proc id. pid: its process id.
        used: bytes that its end would free.
        since: when it began what it does; time of any clock.
        retriable: whether what it does is done again by itself.
        name: of what it runs, for people.
    """

    worker: bytes
    pid: int
    used: int
    since: float
    retriable: bool
    name: str


def choose(candidates: Iterable[Candidate]) -> Candidate | None:
    """The worker whose end frees much and loses little: among the large ones one whose task is retried, the newest."""
    alive = list(candidates)
    largest = max((one.used for one in alive), default=0)
    large = [one for one in alive if one.used * SHARE >= largest]
    return max(large, key=lambda one: (one.retriable, one.since, one.used), default=None)


def explain(
    victim: Candidate, everybody: Iterable[Candidate], where: str, used: int, limit: int, threshold: float
) -> str:
    """Why this worker was ended, and what the others use: the text of the OutOfMemoryError.

    Args:
        where: the node, and what sets its limit. used, limit: bytes of it. threshold: share of it.
    """
    top = sorted(everybody, key=lambda one: -one.used)[:_SHOWN]
    again = "what it ran may run again" if victim.retriable else "no worker as large as it runs what may be run again"
    lines = [
        LOW_MEMORY,
        f"Memory on {where} was {_gb(used)} / {_gb(limit)} ({used / limit:.3f}), above the threshold of {threshold:g}. "
        f"The worker with pid {victim.pid}, which ran {victim.name or 'nothing'} and used {_gb(victim.used)}, was "
        f"ended: of the large ones it is the newest, and {again}.",
        "Workers by memory:",
        *(f"  pid {one.pid}: {_gb(one.used)}, {one.name or 'idle'}" for one in top),
        "hint: let tasks ask for more (num_cpus, memory=), so that fewer run side by side; "
        "HPCRAY_MEMORY_USAGE_THRESHOLD sets the threshold (0: no worker is ended)",
    ]
    return "\n".join(lines)


class Guard:
    """When to look for a worker to end: above the threshold, and not while the last one is still going.

    Args:
        threshold: share of the limit; 0: never.
        patience: seconds after which a worker that was told to die is not waited for any more.
    """

    def __init__(self, threshold: float, patience: float = 2.0) -> None:
        self._threshold = threshold
        self._patience = patience
        self._victim = b""
        self._until = 0.0

    def short(self, now: float, used: int, limit: int) -> bool:
        """Whether a worker must go now."""
        if not self._threshold or limit <= 0 or used <= self._threshold * limit:
            return False
        return not self._victim or now >= self._until

    def critical(self, used: int, limit: int) -> bool:
        """Whether there is no time to ask anybody."""
        return used > (1.0 + self._threshold) / 2 * limit

    def ended(self, now: float, worker: bytes) -> None:
        """This worker was told to die."""
        self._victim, self._until = worker, now + self._patience

    def gone(self, worker: bytes) -> None:
        """A worker is gone."""
        if worker == self._victim:
            self._victim = b""


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f}GB"
