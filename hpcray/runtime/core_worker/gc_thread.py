"""The thread of a process that runs Python's garbage collector on request."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable

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
