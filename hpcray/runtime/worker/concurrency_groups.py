"""Where an actor's calls run when it is not one after the other: in threads, or on an asyncio loop.

An actor has one runner, and one more for each of its concurrency groups.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import traceback
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import CoroutineType
from typing import Any, Protocol

from hpcray.common.exceptions import AsyncioActorExit
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.arguments import NO_ARGS
from hpcray.runtime.core_worker.context import async_task
from hpcray.runtime.core_worker.object_refs import ObjectRef
from hpcray.runtime.worker.actor_event_loop import ActorEventLoop
from hpcray.runtime.worker.context import ActorContext
from hpcray.runtime.worker.replies import GeneratorExecutor

perf_counter = time.perf_counter
REPLY_HOLD = 0.001
"""Seconds for which replies may wait for others, so that they leave together."""


class CallRunner(Protocol):
    """Runs calls, at most `limit` at a time; they start in the order of arrival."""

    def call(self, src: bytes, msg: m.ActorCall) -> None:
        """Start one call, now or when there is room."""

    def cancel(self, task: bytes) -> None:
        """Cancel a call, if it is one of ours."""

    def idle(self) -> bool:
        """Return True if everything that was accepted has run."""

    def close(self) -> None:
        """Start no more calls: those that wait get no reply."""


_SPREAD = 32
"""Threads among which calls are spread; more are started when all are busy."""


class ThreadedCallRunner:
    """Calls in threads, which live as long as the actor: what a thread keeps for itself (`threading.local`) stays.

    The first calls get a thread each, even if one is idle: calls that are made together run in different threads.
    """

    def __init__(self, actor: ActorContext, name: str, limit: int) -> None:
        self._actor = actor
        self._name = name
        self._threads = 0
        self._queue: SimpleQueue[tuple[bytes, m.ActorCall]] = SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[bytes] = set()
        self._limit = limit
        self._flushed = 0.0
        self._closed = False

    def call(self, src: bytes, msg: m.ActorCall) -> None:
        """See `CallRunner`."""
        with self._lock:
            self._open.add(msg.task)
            threads = self._threads
            starts = threads < self._limit and (threads < _SPREAD or len(self._open) > threads)
            self._threads += starts
        if starts:
            name = f"{self._name}_{threads}"
            threading.Thread(target=self._run_calls, args=(src, msg), name=name, daemon=True).start()
        else:
            self._queue.put((src, msg))

    def cancel(self, task: bytes) -> None:
        """See `CallRunner`. One that runs is not interrupted: it may ask `is_canceled()`."""
        with self._lock:
            if task in self._open:
                self._actor.worker.cancelled.add(task)

    def idle(self) -> bool:
        """See `CallRunner`."""
        return not self._open

    def close(self) -> None:
        """See `CallRunner`."""
        self._closed = True

    def _run_calls(self, src: bytes, msg: m.ActorCall) -> None:
        self._actor.worker.register_thread()
        call = (src, msg)
        del src, msg
        while True:
            try:
                self._run(*call)
            except BaseException:
                traceback.print_exc()  # the thread goes on: calls may wait for it
            del call  # its arguments need not live on
            call = self._queue.get()

    def _run(self, src: bytes, msg: m.ActorCall) -> None:
        actor = self._actor
        try:
            if msg.task in actor.worker.cancelled:
                actor.worker.reply_cancelled(src, msg)
            elif not self._closed:
                actor.run(src, msg, self._hold)
        finally:
            with self._lock:
                self._open.discard(msg.task)
                if actor.worker.options or actor.worker.cancelled:
                    actor.worker.forget_options(msg.task)

    def _hold(self) -> bool:
        """Return True if a reply may wait for the next one, as calls wait for a thread. See `IoEngine.flush_soon`."""
        if len(self._open) <= self._limit:
            return False
        now = perf_counter()
        if now - self._flushed < REPLY_HOLD:
            return True
        self._flushed = now
        return False


class AsyncioCallRunner:
    """Calls on an asyncio `loop` in a thread of its own.

    Args:
        drives: whether that thread also drives the engine; one thread of a process at most.

    Attributes:
        drives: the same; False where the program makes event loops of its own kind.
    """

    def __init__(
        self, actor: ActorContext, generators: GeneratorExecutor, name: str, limit: int, drives: bool = False
    ) -> None:
        self._actor = actor
        self._engine = actor.worker.engine
        self._generators = generators
        self._limit = limit
        # Without a lock: `_taken` is written by who takes calls in, `_ended` by the loop's thread.
        self._pending: deque[tuple[bytes, m.ActorCall]] = deque()
        self._taken = self._ended = 0
        self._posted = self._closed = False
        self._flushed = 0.0
        self._flush_posted = False
        self._tasks: dict[bytes, asyncio.Task[None]] = {}
        self._queued: OrderedDict[bytes, tuple[bytes, m.ActorCall]] = OrderedDict()  # `limit` others run
        self._running = 0
        # Of our own: what blocks in the loop's default one, which is the user's, must not keep replies back.
        self.threads = ThreadPoolExecutor(limit, thread_name_prefix=f"{name}:io")
        self.loop = asyncio.new_event_loop()
        self.drives = drives and type(self.loop) is asyncio.SelectorEventLoop
        self._wake = self._post
        if self.drives:
            self.loop.close()
            own = self.loop = ActorEventLoop(self._engine, self._start_pending, lambda: bool(self._pending))
            self._wake = own.end_wait
        threading.Thread(target=self._run_loop, name=name, daemon=True).start()

    def call(self, src: bytes, msg: m.ActorCall) -> None:
        """See `CallRunner`."""
        with self._engine.lock:
            self._taken += 1
            self._pending.append((src, msg))
            self._wake()

    def _post(self) -> None:
        if not self._posted:
            self._posted = True
            self.loop.call_soon_threadsafe(self._start_pending)

    def cancel(self, task: bytes) -> None:
        """See `CallRunner`."""
        self.loop.call_soon_threadsafe(self._cancel, task)

    def idle(self) -> bool:
        """See `CallRunner`."""
        return self._taken == self._ended

    def close(self) -> None:
        """See `CallRunner`."""
        self._closed = True

    def _cancel(self, task: bytes) -> None:
        if task in self._tasks:
            # Not at once: a coroutine that is cancelled before its first step would never see it, nor answer.
            self.loop.call_soon(self._cancel_now, task)
        elif task in self._queued:
            self._actor.worker.reply_cancelled(*self._queued.pop(task))
            self._forget(task)

    def _cancel_now(self, task: bytes) -> None:
        running = self._tasks.get(task)
        if running is not None:  # else it has ended meanwhile: what is cancelled would be its answer
            self._actor.worker.cancelled.add(task)
            running.cancel()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def _start_pending(self) -> None:
        self._posted = False  # first: what comes after the last look below posts again
        pending = self._pending
        while pending:
            src, msg = pending.popleft()
            if self._running < self._limit:
                self._start(src, msg)
            else:
                self._queued[msg.task] = (src, msg)

    def _start(self, src: bytes, msg: m.ActorCall) -> None:
        self._running += 1
        self._tasks[msg.task] = self.loop.create_task(self._run(src, msg))

    def _start_next(self) -> None:
        """A call has ended. The next one begins after the coroutines that this one has woken, as in Ray."""
        self._running -= 1
        if self._queued:
            self._start(*self._queued.popitem(last=False)[1])

    def _hold(self, now: float) -> bool:
        """Return True if a reply may wait for those of other calls, until the end of this round of the loop."""
        if self._taken - self._ended == 1 or now - self._flushed >= REPLY_HOLD:
            self._flushed = now
            return False
        if not self._flush_posted:
            self._flush_posted = True
            self.loop.call_soon(self._flush)
        return True

    def _flush(self) -> None:
        self._flush_posted = False
        with self._engine.lock:
            self._engine.flush()

    async def _run(self, src: bytes, msg: m.ActorCall) -> None:
        actor = self._actor
        worker = actor.worker
        value: Any = None
        error: BaseException | None = None
        protected: list[bytes] = []
        started = perf_counter()  # diagnostics take a call for one that runs from here on
        try:
            try:
                if self._closed:
                    self._forget(msg.task)
                    return
                async_task.set(msg)
                if msg.args == NO_ARGS:
                    value = actor.method(msg.method)()
                else:
                    if msg.refs:
                        # Some are in a store, and may have to be pulled: not on the loop.
                        args, kwargs = await self.loop.run_in_executor(self.threads, self._arguments, msg, protected)
                    else:
                        args, kwargs = self._arguments(msg, protected)
                    value = actor.method(msg.method)(*args, **kwargs)
                    del args, kwargs
                if type(value) is CoroutineType or (inspect.isawaitable(value) and not isinstance(value, ObjectRef)):
                    value = await value
                if msg.num_returns < 0:
                    await self._generators.run_async(self.threads, src, msg, value)
                    value = None
            finally:
                self._start_next()
        except (SystemExit, AsyncioActorExit) as exit_:
            error = actor.exit_error(exit_)
        except BaseException as raised:
            error = raised
        ended = perf_counter()
        us = int((ended - started) * 1e6)
        name = actor.name_of(msg.method)
        if worker.cancelled and msg.task in worker.cancelled:  # whatever the coroutine has made of it
            value, error = None, _cancelled(error)
        label = actor.error_label() if error is not None else None
        self._tasks.pop(msg.task, None)
        large = not isinstance(value, (int, float, str, bytes, bool, type(None)))
        try:
            if large and error is None:
                await self.loop.run_in_executor(
                    self.threads, worker.reply, src, msg.task, msg.num_returns, value, error, name, us, protected, label
                )  # a large value is written to the store: not on the loop
            else:
                hold = self._hold(ended)
                worker.reply(src, msg.task, msg.num_returns, value, error, name, us, protected, label, hold)
        finally:
            error = None  # its traceback holds this frame: a cycle, which would keep the arguments
            self._forget(msg.task)

    def _forget(self, task: bytes) -> None:
        """A call is over."""
        self._tasks.pop(task, None)
        self._ended += 1
        if self._actor.worker.options or self._actor.worker.cancelled:
            self._actor.worker.forget_options(task)

    def _arguments(self, msg: m.ActorCall, protected: list[bytes]) -> Any:
        local = self._actor.worker.process.local
        local.protected = protected
        try:
            return self._actor.worker.arguments(msg.args, msg.inline, msg.refs)
        finally:
            local.protected = None


def _cancelled(error: BaseException | None) -> asyncio.CancelledError:
    """Return what a call that was cancelled while it ran ends in; `error`: what its coroutine has made of that."""
    if isinstance(error, asyncio.CancelledError):
        return error
    try:
        raise asyncio.CancelledError
    except asyncio.CancelledError as cancelled:
        cancelled.__context__ = error
        return cancelled
