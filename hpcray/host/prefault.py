"""Writes ahead of the allocator: pages that hold memory already are many times faster to fill than untouched ones."""

from __future__ import annotations

import contextlib
import os
import threading

from hpcray.host.arena import Arena

WINDOW = 256 << 20
STEP = 2 << 20


class Prefaulter:
    """Populates arena pages in the background, a window ahead of what was ever allocated.

    It starts with the first allocation, so an idle job stays idle. It runs ahead by as much as was ever allocated,
    at most by `window`: the memory that is populated but was never asked for is bounded by both. Its thread has the
    lowest priority and ends when the window is full; the next call that moves the high-water mark starts it again.

    Args:
        arena: of this node; populated through the raylet's mapping.
        window: most bytes ahead of the high-water mark; 0 switches it off.
    """

    def __init__(self, arena: Arena, window: int = WINDOW) -> None:
        self._arena = arena
        self._window = window
        self._lock = threading.Lock()
        self._target = 0
        self._done = 0
        self._thread: threading.Thread | None = None
        self._stopped = window <= 0

    @property
    def populated_to(self) -> int:
        """End of what was populated so far."""
        return self._done

    @property
    def idle(self) -> bool:
        """Whether there is nothing to populate now; no thread runs then."""
        return self._thread is None

    def allocated_to(self, high_water: int) -> None:
        """Tell how far the allocator has ever come. Cheap when it has not moved far; never blocks."""
        target = min(self._arena.size, high_water + min(self._window, high_water))
        # Small moves are gathered: a thread per put would cost more than it gains.
        if self._stopped or (target < self._target + STEP and target < self._arena.size) or target <= self._target:
            return
        with self._lock:
            self._target = target
            self._done = max(self._done, high_water)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hpcray-prefault", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for it: at most one step. Call it before the arena is closed."""
        with self._lock:
            self._stopped = True
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while True:
            with self._lock:
                start = self._done
                if self._stopped or start >= self._target:
                    self._thread = None
                    return
                size = min(STEP, self._target - start)
                self._done = start + size
            if not self._arena.populate(start, size):
                self._stopped = True
