"""The workers of one node that have ended, and how, in Ray's words."""

from __future__ import annotations

from collections import deque
from typing import Any

from hpcray.core.raylet.worker_pool import BUSY, WorkerProcess
from hpcray.protocol.messages import CONSTRUCTOR_RAISED, USER_EXIT, out_of_memory

ENDED_KEPT = 1000
SYSTEM_ERROR, NODE_OUT_OF_MEMORY, USER_ERROR = "SYSTEM_ERROR", "NODE_OUT_OF_MEMORY", "USER_ERROR"
INTENDED_USER_EXIT, INTENDED_SYSTEM_EXIT = "INTENDED_USER_EXIT", "INTENDED_SYSTEM_EXIT"


class EndedWorkers:
    """The last `ENDED_KEPT` of them."""

    def __init__(self) -> None:
        self._rows: deque[tuple[float, dict[str, Any]]] = deque(maxlen=ENDED_KEPT)

    def add(self, now: float, worker: WorkerProcess, reason: str) -> None:
        """Keep a worker that has died, as it was; `reason` says how its process ended."""
        kind, detail = exit_of(worker, reason)
        spec = worker.allocation.actor_spec if worker.allocation is not None else None
        actor = spec.actor if spec is not None else b""
        row = {"proc": worker.proc, "pid": worker.pid, "actor": actor, "exit_type": kind, "exit_detail": detail}
        self._rows.append((now, row))

    def rows(self, now: float) -> list[dict[str, Any]]:
        """Return one row for each, the earliest first. seconds: since its end."""
        return [{**row, "seconds": now - at} for at, row in self._rows]


def exit_of(worker: WorkerProcess, reason: str) -> tuple[str, str]:
    """Return Ray's type of a worker's exit, and what is known of it.

    Args:
        worker: as it was when it died.
        reason: how its process ended: an exit code, a signal, or why it was killed.
    """
    allocation = worker.allocation
    why = (allocation.exit_reason or allocation.kill_reason) if allocation is not None else ""
    if USER_EXIT in why:
        return INTENDED_USER_EXIT, why
    if CONSTRUCTOR_RAISED in why:
        return USER_ERROR, why
    if out_of_memory(why) or out_of_memory(reason):
        return NODE_OUT_OF_MEMORY, why or reason
    if why:
        return INTENDED_SYSTEM_EXIT, f"Worker exits because {why}"
    if reason == "exit code 0":
        if worker.state == BUSY:
            return INTENDED_USER_EXIT, f"{USER_EXIT} Its last call is over (max_calls), or raised SystemExit(0)."
        return INTENDED_SYSTEM_EXIT, "Worker exits because it was idle for a long time."
    return SYSTEM_ERROR, f"Worker exits unexpectedly: {reason}"
