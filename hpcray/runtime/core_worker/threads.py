"""Threads of a process beside those of the program: one that makes calls, one that runs the garbage collector, and how
the one that drives the I/O engine in the background is started, sleeps, and is woken."""

from __future__ import annotations

import contextlib
import gc
import logging
import queue
import threading
import traceback
from collections.abc import Callable
from functools import partial
from time import monotonic

from hpcray.platform.process_tree import PrestartedThread


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


# ------------------------------------------------------------ background thread
# The thread that drives the I/O engine while no other thread waits for something (`io_engine`).


class BackgroundThread:
    """A thread that looks now and then whether there is something to do, and is parked meanwhile if that is long.

    Args:
        run: what it does.
        prestarted: a thread to be used in place of a new one.

    Attributes:
        start: has it begin. thread: for its name and id.
        is_parked: it sleeps until `unpark` is called, or is about to.
    """

    def __init__(self, run: Callable[[], None], prestarted: PrestartedThread | None = None) -> None:
        self.thread = prestarted.thread if prestarted else threading.Thread(target=run, name="hpcray-io", daemon=True)
        self.start: Callable[[], None] = partial(prestarted.begin, run) if prestarted else self.thread.start
        self._gate, self._called, self.is_parked = threading.Lock(), threading.Lock(), False
        self._gate.acquire()
        self._called.acquire()

    def pause(self, seconds: float) -> bool:
        """Sleep until the next look (in this thread); True when it was called before that."""
        return self._called.acquire(timeout=seconds)

    def call(self) -> None:
        """Have it look now: the pause that it makes, or its next one, ends at once."""
        if self._called.locked():
            with contextlib.suppress(RuntimeError):
                self._called.release()

    def park(self) -> None:
        """Have `sleep` last until `unpark` (lock held, as there)."""
        self.is_parked = True

    def sleep(self, seconds: float) -> bool:
        """Sleep while it is parked (in this thread); False when it still is, after so many seconds."""
        return self._gate.acquire(timeout=seconds)

    def unpark(self) -> None:
        """End its sleep, if it is parked (lock held)."""
        if self.is_parked:  # a handler may have interrupted the caller since it looked
            self.is_parked = False
            self._gate.release()

    def join(self, seconds: float) -> None:
        """Wait for its end, for at most so long, unless it is the caller itself."""
        if threading.current_thread() is not self.thread:
            self.thread.join(seconds)


class PeriodicCalls:
    """Calls that are all made again and again, with the shortest period that was asked for.

    Args:
        longest: seconds, the period while there is no call.

    Attributes:
        due: when they are made next (monotonic seconds).
    """

    def __init__(self, longest: float) -> None:
        self._calls: list[Callable[[], None]] = []
        self._period = longest
        self.due = monotonic() + longest

    def add(self, period: float, call: Callable[[], None]) -> None:
        """Make this call too, every `period` seconds or more often."""
        self._calls.append(call)
        self._period = min(self._period, period)
        self.due = monotonic() + self._period

    def run(self) -> None:
        """Make the calls."""
        self.due = monotonic() + self._period
        for call in self._calls:
            try:
                call()
            except Exception:
                traceback.print_exc()
