"""Threads of a process beside those of the program: one that makes calls, and one that runs the garbage collector."""

from __future__ import annotations

import gc
import logging
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


# ------------------------------------------------------------ gc thread
# The thread of a process that runs Python's garbage collector on request.


logger = logging.getLogger(__name__)


class PythonGCThread(threading.Thread):
    """Collects cyclic garbage when `trigger_gc` is called; requests that come during a collection are one.

    User code is interrupted between two of its instructions only, as by any other thread. Destructors of what was
    garbage run in this thread.

    Args:
        gc_collect_func: in place of `gc.collect`: collects, and returns how many objects were garbage.
    """

    def __init__(self, *, gc_collect_func: Callable[[], int] | None = None) -> None:
        super().__init__(name="PythonGCThread", daemon=True)
        self._collect = gc_collect_func or gc.collect
        self._requested = threading.Event()
        self._stopped = False

    def trigger_gc(self) -> None:
        """Have the thread collect soon. Never blocks."""
        self._requested.set()

    def run(self) -> None:
        while True:
            self._requested.wait()
            self._requested.clear()
            if self._stopped:
                return
            try:
                self._collect()
            except Exception:
                logger.exception("hpcray: collecting garbage failed")

    def stop(self) -> None:
        """End the thread, after the collection that is under way."""
        self._stopped = True
        self._requested.set()
        self.join()
