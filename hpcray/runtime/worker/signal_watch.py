"""Signals that come just before the main thread of a worker begins to wait."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from threading import get_ident

from hpcray.core.core_worker.object_table import Waiter
from hpcray.runtime.core_worker.io_engine import IoEngine

_READ = 512


class SignalWatch:
    """Ends the wait of the main thread for a moment when a signal comes, so that Python calls the signal's handler.

    Python calls handlers between two instructions of the main thread. A signal that the kernel delivers after the last
    one before a wait, or to another thread, interrupts no system call: without this it would wait for the next message.

    Args:
        engine: of this process. Create this on the main thread.
        idle: returns what the main thread waits for while it has no work; None while it has.
    """

    def __init__(self, engine: IoEngine, idle: Callable[[], Waiter | None]) -> None:
        self._engine, self._idle, self._main = engine, idle, get_ident()
        self._read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        engine.watched[self._read] = self._signalled
        engine.busy_poll.arm(self._read, again=False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def _signalled(self) -> None:
        """Called by whoever drives; the main thread has been woken if that is who does."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, _READ)
        self._engine.busy_poll.arm(self._read, again=True)
        if get_ident() == self._main:
            return
        parked = self._engine.parked
        for waiter in (self._engine.park_of.get(self._main), self._idle()):
            if waiter is not None and waiter.lock is not None:
                if waiter in parked:
                    parked.remove(waiter)  # it parks again; until then nothing is handed to it
                with contextlib.suppress(RuntimeError):  # it has been woken already
                    waiter.lock.release()
