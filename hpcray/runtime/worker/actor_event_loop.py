"""The event loop of an async actor. Its thread waits for the loop's own sockets and for messages at once.

While it waits it drives the process's `IoEngine`. So a call costs no switch between threads: the thread that reads it
runs its coroutine, and writes the reply.
"""

from __future__ import annotations

import asyncio
import logging
import os
import selectors
import threading
from collections.abc import Callable
from contextvars import Context
from threading import get_ident
from time import monotonic
from typing import Any

from hpcray.core.core_worker.object_table import Waiter
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.runtime.core_worker.io_engine import IoEngine

_LOOK_INTERVAL = 0.0005
"""Seconds between two looks for messages while the loop has something to run all the time. Less than a tick of the
engine's background thread, which would take over."""


def wait_without_driving(engine: IoEngine, waiter: Waiter) -> None:
    """Block until `waiter.count` is zero, and leave it to the loop's thread to drive. Lock held before and after."""
    if engine.dirty:
        engine.flush()
    while waiter.count > 0:
        gate = waiter.lock = threading.Lock()
        gate.acquire()
        engine.lock.release()
        try:
            gate.acquire()
        finally:
            engine.lock.acquire()
            waiter.lock = None


class LoopWaiter(selectors.EpollSelector):
    """Waits for what the loop has registered by driving the engine, which watches this selector's own epoll.

    Args:
        engine: of this process.
        start_calls: called, in the loop's thread and without a lock, after each wait: starts the calls that came.
        has_calls: returns whether there are such calls (called with the engine's lock held).
    """

    def __init__(self, engine: IoEngine, start_calls: Callable[[], None], has_calls: Callable[[], bool]) -> None:
        super().__init__()
        self._engine = engine
        self._start_calls = start_calls
        self._has_calls = has_calls
        self._sleeper, self._glance = Waiter(0), Waiter()
        self._watched = True
        self._looked = 0.0
        self.waits = False
        with engine.lock:
            engine.watched.use(self.fileno(), self._ripe)
            engine.busy_poll.arm(self.fileno(), again=False)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See `selectors.BaseSelector`. Also returns, with an empty list, when a call has come."""
        engine, now = self._engine, monotonic()
        if engine.closed:
            return super().select(timeout)
        if timeout is not None and timeout <= 0:
            if now - self._looked > _LOOK_INTERVAL:
                self._looked = now
                with engine.lock:
                    engine.wait(self._glance, now)  # one turn, as its time is over
            self._start_calls()
            return super().select(0)
        sleeper = self._sleeper
        with engine.lock:
            if not self._has_calls():
                if not self._watched:
                    self._watched = True
                    engine.busy_poll.arm(self.fileno(), again=True)
                sleeper.count = 1
                self.waits = True
                try:
                    engine.wait(sleeper, None if timeout is None else now + timeout)
                finally:
                    self.waits = False
                    sleeper.count = 0
        self._looked = monotonic()
        self._start_calls()
        return [] if self._watched else super().select(0)

    def end_wait(self) -> None:
        """Have `select` return, where the loop's thread is in it (engine's lock held)."""
        if self._sleeper.count:
            self._sleeper.count = 0
            self._engine.notify(self._sleeper)

    def _ripe(self) -> None:
        self._watched = False
        self.end_wait()


class ActorEventLoop(asyncio.SelectorEventLoop):
    """An event loop whose thread drives the engine while it waits. Arguments: as of `LoopWaiter`."""

    def __init__(self, engine: IoEngine, start_calls: Callable[[], None], has_calls: Callable[[], bool]) -> None:
        self._engine = engine
        self._waiting = LoopWaiter(engine, start_calls, has_calls)
        super().__init__(self._waiting)

    def run_forever(self) -> None:
        """See `asyncio.AbstractEventLoop`."""
        self._engine.loop_thread = get_ident()
        super().run_forever()

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """See `asyncio.AbstractEventLoop`. What a message causes in the loop's own thread needs no wake-up."""
        if self._waiting.waits and get_ident() == self._engine.loop_thread:
            with self._engine.lock:
                self._waiting.end_wait()
            return self.call_soon(callback, *args, context=context)
        return super().call_soon_threadsafe(callback, *args, context=context)

    def end_wait(self) -> None:
        """A call has come (engine's lock held)."""
        self._waiting.end_wait()


# ------------------------------------------------------------ blocking get
# A warning of `get` inside of coroutines of async actors. Other processes do not pay for it.


_SWITCH = "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"


expected_blocks: list[Callable[[], bool]] = []
"""Each returns True if the program says that it blocks on purpose; `ray._private.worker` has one."""


def warn_of_blocking_get(process: CoreWorker) -> None:
    """Log a warning at the first `get` of this process that blocks an event loop."""
    if os.environ.get(_SWITCH, "1") not in ("1", "true", "True"):
        return
    reader = process.reader
    plain = reader.get_one, reader.get

    def watched(get: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if (
                asyncio._get_running_loop() is not None and asyncio.current_task() is not None
            ):  # else: the `get` of an `await`
                reader.get_one, reader.get = plain  # type: ignore[method-assign]
                if any(is_expected() for is_expected in expected_blocks):
                    return get(*args)
                logging.getLogger("hpcray").warning(
                    "Using blocking ray.get inside async actor. This blocks the event loop. Please use `await` on "
                    "object ref with asyncio.gather if you want to yield execution to the event loop instead."
                )
            return get(*args)

        return call

    reader.get_one, reader.get = watched(plain[0]), watched(plain[1])  # type: ignore[method-assign]
