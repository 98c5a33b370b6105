"""Warnings of tasks that run again and of actors that restart."""

from __future__ import annotations

import logging

from hpcray.core.core_worker.task import PendingTask
from hpcray.runtime.core_worker.io_engine import IoEngine, monotonic

_BURST = 5.0
"""Seconds in which one function or class is named once; the next line counts the rest."""


class RetryWarnings:
    """The warnings of one process (lock held)."""

    def __init__(self, engine: IoEngine) -> None:
        self._engine = engine
        self._named: dict[str, tuple[float, int]] = {}

    def task_runs_again(self, task: PendingTask, why: str) -> None:
        """A task is about to run again. Its `attempt` counts that run, its `retries` do not."""
        self._warn(f"task {task.name} runs again", f"retry {_of(task.attempt, task.retries)}", why)

    def actor_restarts(self, class_name: str, actor: bytes, restarts: int, limit: int, why: str) -> None:
        """An actor of this process restarts for the `restarts`-th time."""
        left = limit if limit < 0 else limit - restarts
        self._warn(f"actor {class_name} restarts", f"{actor.hex()}, restart {_of(restarts, left)}", why)

    def _warn(self, what: str, which: str, why: str) -> None:
        now = monotonic()
        last, more = self._named.get(what, (now - _BURST, 0))
        if now - last < _BURST:
            self._named[what] = last, more + 1
            return
        self._named[what] = now, 0
        rest = f" ({more} more since the last such line)" if more else ""
        self._engine.call_soon(
            lambda: logging.getLogger("hpcray").warning("hpcray: %s (%s): %s%s", what, which, why, rest)
        )


def _of(done: int, left: int) -> str:
    return f"{done} of {done + left}" if left >= 0 else f"{done}, no limit"
