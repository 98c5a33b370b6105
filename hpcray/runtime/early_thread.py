"""A thread that exists before it is known what it will do: who cannot have one must find that out in time."""

from __future__ import annotations

import threading
from collections.abc import Callable

NO_THREAD = 73
"""Exit code of a worker that could not start one, before it said Hello."""


class EarlyThread:
    """Waits for its work.

    Raises:
        SystemExit: with NO_THREAD; there can be no more threads (`ulimit -u`, or the cgroup's limit of processes).
    """

    def __init__(self, name: str) -> None:
        self._target: Callable[[], None] = lambda: None
        self._gate = threading.Lock()
        self._gate.acquire()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self.thread.start()
        except RuntimeError:
            raise SystemExit(NO_THREAD) from None

    def begin(self, target: Callable[[], None]) -> None:
        """Do this."""
        self._target = target
        self._gate.release()

    def _run(self) -> None:
        self._gate.acquire()
        self._target()
