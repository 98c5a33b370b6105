"""The choice of the worker that ends when the memory of a node is short, its time, and the text that says why."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from hpcray.protocol.messages import LOW_MEMORY, NOTHING_BESIDE

SMALLEST_SHARE = 4
"""Only workers that use at least this fraction (1 / 4) of what the largest one does are considered: the end of a
smaller one would free too little."""
_WORKERS_LISTED = 10


class Candidate(Struct, frozen=True):
    """A worker that could be killed.

    Attributes:
        worker: its proc id. pid: its process id.
        used: bytes that its end would free.
        since: when it began its task or actor; seconds of any clock.
        retriable: whether its task or actor is started again without the user's help; of an idle worker, whether it
            owns nothing.
        name: of the task or actor, for users; "" for an idle worker.
    """

    worker: bytes
    pid: int
    used: int
    since: float
    retriable: bool
    name: str


class WorkerKillingPolicy:
    """Decides when a worker has to be killed: above the threshold, and not while the previous one is still ending.

    Args:
        threshold: share of the memory limit; 0: no worker is ever killed.
        exit_timeout: seconds after which a killed worker is not waited for any more.
    """

    def __init__(self, threshold: float, exit_timeout: float = 2.0) -> None:
        self._threshold = threshold
        self._exit_timeout = exit_timeout
        self._victim = b""
        self._wait_until = 0.0

    def must_kill(self, now: float, used: int, limit: int) -> bool:
        """True if a worker must be killed now. used, limit: bytes."""
        if not self._threshold or limit <= 0 or used <= self._threshold * limit:
            return False
        return not self._victim or now >= self._wait_until

    def is_critical(self, used: int, limit: int) -> bool:
        """True if no time is left to learn from the owners which tasks are retriable."""
        return used > (1.0 + self._threshold) / 2 * limit

    def worker_killed(self, now: float, worker: bytes) -> None:
        """This worker was sent a SIGKILL, or was asked to exit."""
        self._victim, self._wait_until = worker, now + self._exit_timeout

    def worker_died(self, worker: bytes) -> None:
        """A worker is dead, or stays."""
        if worker == self._victim:
            self._victim = b""


def choose_victim(candidates: Iterable[Candidate]) -> Candidate | None:
    """The worker whose end frees much and loses little: among the large ones a retriable one, the newest. One that does
    nothing and owns objects is the last."""
    alive = list(candidates)
    largest = max((one.used for one in alive), default=0)
    large = [one for one in alive if one.used * SMALLEST_SHARE >= largest]
    return max(
        large, key=lambda one: (one.retriable, bool(one.name) or one.retriable, one.since, one.used), default=None
    )


def explain_kill(
    victim: Candidate, candidates: Iterable[Candidate], where: str, used: int, limit: int, threshold: float
) -> str:
    """Why this worker was killed, and what the others use: the text of the OutOfMemoryError.

    Args:
        where: the node, and what sets its limit. used, limit: bytes of it. threshold: share of it.
    """
    top = sorted(candidates, key=lambda one: -one.used)
    beside = sum(one.used for one in top if one.name and one is not victim)
    alone = f" {NOTHING_BESIDE}" if beside * SMALLEST_SHARE < victim.used else ""
    again = "what it ran may run again" if victim.retriable else "no worker as large as it runs what may be run again"
    lines = [
        LOW_MEMORY,
        f"Memory on {where} was {_gb(used)} / {_gb(limit)} ({used / limit:.3f}), above the threshold of {threshold:g}. "
        f"The worker with pid {victim.pid}, which ran {victim.name or 'nothing'} and used {_gb(victim.used)}, was "
        f"ended: of the large ones it is the newest, and {again}.{alone}",
        "Workers by memory:",
        *(f"  pid {one.pid}: {_gb(one.used)}, {one.name or 'idle'}" for one in top[:_WORKERS_LISTED]),
        "hint: let tasks ask for more (num_cpus, memory=), so that fewer run side by side; "
        "HPCRAY_MEMORY_USAGE_THRESHOLD sets the threshold (0: no worker is ended)",
    ]
    return "\n".join(lines)


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f}GB"
