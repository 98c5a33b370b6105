"""One actor inside its worker: constructor, calls (one by one, in threads, or on an asyncio loop), end."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from hpcray.base.errors import ActorDiedError, AsyncioActorExit
from hpcray.base.ids import HEAD
from hpcray.core.owner.table import Waiter
from hpcray.wire import messages as m
from hpcray.wire.serialization import deserialize, serialize_error

if TYPE_CHECKING:
    from hpcray.runtime.worker import Worker

perf_counter = time.perf_counter
async_task: contextvars.ContextVar[bytes | None] = contextvars.ContextVar("async_task", default=None)


class ExitActor(SystemExit):
    """Raised by `exit_actor` inside a method."""


class ActorHost:
    """The actor that this worker is for the rest of its life."""

    def __init__(self, worker: Worker, msg: m.BecomeActor) -> None:
        self.worker = worker
        self.spec = msg.spec
        self.restarts = msg.restarts
        self.instance: Any = None
        self.is_async = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._semaphore: asyncio.Semaphore | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._pending: deque[tuple[bytes, m.ActorCall]] = deque()
        self._posted = False
        self._tasks: dict[bytes, asyncio.Task[None]] = {}
        self._open = 0
        self._lock = threading.Lock()
        self._label: tuple[str, str] | None = None

    # ------------------------------------------------------------ life

    def construct(self) -> None:
        """Run the constructor and tell the GCS."""
        worker, spec = self.worker, self.spec
        process = worker.process
        local = process.local
        local.task, local.name = spec.actor, spec.class_name
        error = b""
        try:
            cls = deserialize(spec.cls)
            self.is_async = has_async_method(cls)
            if self.is_async:
                self._start_loop()
            elif spec.max_concurrency > 1:
                self._pool = ThreadPoolExecutor(spec.max_concurrency, thread_name_prefix=spec.class_name)
            args, kwargs = worker.arguments(spec.args, spec.inline, spec.refs)
            self.instance = cls(*args, **kwargs)
            del args, kwargs
        except BaseException as raised:
            label = (spec.class_name, spec.actor.hex())
            cause = worker.task_error(raised, f"{spec.class_name}.__init__", label)
            error = serialize_error(ActorDiedError(cause, actor_id=spec.actor.hex()))
        local.task = None
        engine = process.engine
        with engine.lock:
            # The creator lets go of the arguments once it hears that we are up: our own borrows must be known by then.
            while process.table.unacked:
                engine.wait(Waiter(), time.monotonic() + 0.01)
            engine.send(HEAD, m.ActorReady(spec.actor, error, []))
            engine.flush()

    def finish(self, reason: str) -> None:
        """Leave once everything that was accepted has run."""
        while True:
            with self._lock:
                if not self._open and not self._pending:
                    break
            time.sleep(0.002)
        self.worker.leave(reason)

    # ------------------------------------------------------------ calls

    def call(self, src: bytes, msg: m.ActorCall) -> None:
        """Start one call, in the order of arrival."""
        if self._loop is not None:
            with self._lock:
                self._open += 1
                self._pending.append((src, msg))
                if self._posted:
                    return
                self._posted = True
            self._loop.call_soon_threadsafe(self._start_pending)
        elif self._pool is not None:
            with self._lock:
                self._open += 1
            self._pool.submit(self._run_in_thread, src, msg)
        else:
            self._run(src, msg)

    def cancel(self, task: bytes) -> bool:
        """Cancel a running coroutine; False when it is none of ours."""
        running = self._tasks.get(task)
        if running is None or self._loop is None:
            return False
        self._loop.call_soon_threadsafe(running.cancel)
        return True

    def _run_in_thread(self, src: bytes, msg: m.ActorCall) -> None:
        try:
            self._run(src, msg)
        finally:
            with self._lock:
                self._open -= 1

    def _run(self, src: bytes, msg: m.ActorCall) -> None:
        started = perf_counter()
        worker = self.worker
        local = worker.process.local
        protected: list[bytes] = []
        local.protected = protected
        local.task = msg.task
        local.name = self.spec.class_name
        value: Any = None
        error: BaseException | None = None
        leaving = ""
        try:
            args, kwargs = worker.arguments(msg.args, msg.inline, msg.refs)
            value = self._method(msg.method)(*args, **kwargs)
            del args, kwargs
        except SystemExit as exit_:
            leaving = _why(exit_)
            error = ActorDiedError(f"The actor exited: {leaving}", actor_id=self.spec.actor.hex())
        except BaseException as raised:
            error = raised
        us = int((perf_counter() - started) * 1e6)
        name = f"{self.spec.class_name}.{msg.method}"
        label = self._described() if error is not None else None
        worker.reply(src, msg.task, msg.num_returns, value, error, name, us, protected, label)
        del value, error
        local.protected = None
        local.task = None
        if leaving:
            worker.leave(leaving)

    def _method(self, name: str) -> Any:
        if name.startswith("__ray_"):
            if name == "__ray_ready__":
                return lambda: True
            if name == "__ray_call__":
                return lambda function, *args, **kwargs: function(self.instance, *args, **kwargs)
            if name == "__ray_terminate__":
                return _exit
        return getattr(self.instance, name)

    def _described(self) -> tuple[str, str]:
        if self._label is None:
            # The default repr holds an address; a user's own __repr__ is what people want to see.
            own = getattr(type(self.instance), "__repr__", None) is not object.__repr__
            self._label = (repr(self.instance) if own else self.spec.class_name, self.spec.actor.hex())
        return self._label

    # ------------------------------------------------------------ asyncio

    def _start_loop(self) -> None:
        loop = self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run_loop, args=(loop,), name="hpcray-asyncio", daemon=True).start()

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        limit = self.spec.max_concurrency
        self._semaphore = asyncio.Semaphore(limit)
        loop.run_forever()

    def _start_pending(self) -> None:
        assert self._loop is not None
        while True:
            with self._lock:
                if not self._pending:
                    self._posted = False
                    return
                src, msg = self._pending.popleft()
            self._tasks[msg.task] = self._loop.create_task(self._run_async(src, msg))

    async def _run_async(self, src: bytes, msg: m.ActorCall) -> None:
        worker = self.worker
        assert self._semaphore is not None
        value: Any = None
        error: BaseException | None = None
        leaving = ""
        protected: list[bytes] = []
        started = perf_counter()
        try:
            async with self._semaphore:
                started = perf_counter()
                async_task.set(msg.task)
                local = worker.process.local
                local.protected = protected
                try:
                    if msg.refs:
                        loop = asyncio.get_running_loop()
                        args, kwargs = await loop.run_in_executor(None, self._arguments, msg, protected)
                    else:
                        args, kwargs = worker.arguments(msg.args, msg.inline, None)
                finally:
                    local.protected = None
                value = self._method(msg.method)(*args, **kwargs)
                if inspect.isawaitable(value):
                    value = await value
                del args, kwargs
        except (SystemExit, AsyncioActorExit) as exit_:
            leaving = _why(exit_)
            error = ActorDiedError(f"The actor exited: {leaving}", actor_id=self.spec.actor.hex())
        except BaseException as raised:
            error = raised
        us = int((perf_counter() - started) * 1e6)
        name = f"{self.spec.class_name}.{msg.method}"
        label = self._described() if error is not None else None
        if leaving:
            # SystemExit must not escape into the loop; the reply goes out, then this process does.
            worker.reply(src, msg.task, msg.num_returns, value, error, name, us, protected, label)
            worker.leave(leaving)
        self._tasks.pop(msg.task, None)
        large = not isinstance(value, (int, float, str, bytes, bool, type(None)))
        try:
            if large and error is None:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(
                    None, worker.reply, src, msg.task, msg.num_returns, value, error, name, us, protected, label
                )  # a large value is written to the store: not on the loop
            else:
                worker.reply(src, msg.task, msg.num_returns, value, error, name, us, protected, label)
        finally:
            with self._lock:
                self._open -= 1

    def _arguments(self, msg: m.ActorCall, protected: list[bytes]) -> Any:
        local = self.worker.process.local
        local.protected = protected
        try:
            return self.worker.arguments(msg.args, msg.inline, msg.refs)
        finally:
            local.protected = None


def has_async_method(cls: type) -> bool:
    """Whether a class makes an async actor: any of its methods is a coroutine function or an async generator."""
    return any(
        inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)
        for _, member in inspect.getmembers(cls, inspect.isfunction)
    )


def _why(leaving: BaseException) -> str:
    if isinstance(leaving, SystemExit) and not isinstance(leaving, ExitActor):
        return f"it raised SystemExit({leaving.code})"
    return "exit_actor() was called"


def _exit() -> None:
    raise ExitActor(0)
