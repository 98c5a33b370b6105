"""A thread for calls into the program that nothing of ours may wait for."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable


class CallThread:
    """Makes calls one after the other, in a thread that starts with the first one.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, if it does not run."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def put(self, call: Callable[[], object]) -> None:
        """Have a call made after those that wait. Never blocks; the thread must have been started."""
        self._queue.put(call)

    def close(self) -> None:
        """End the thread, after the calls that wait."""
        self._queue.put(None)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except BaseException:
                traceback.print_exc()
            del call
