"""The worker's side of generators: every value that a task yields is sent to its caller at once."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from hpcray.base.errors import TaskCancelledError
from hpcray.core.owner.table import Waiter
from hpcray.wire import messages as m
from hpcray.wire.serialization import serialize

if TYPE_CHECKING:
    from hpcray.runtime.worker import Worker


class Yielding:
    """All tasks of one worker that yield now, by task id, with how many of their values were taken.

    A task of which nobody takes values any more is in none of these.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._taken: dict[bytes, int] = {}
        self._callers: dict[bytes, bytes] = {}
        self._waiters: dict[bytes, Waiter] = {}
        worker.process.on_death = self._caller_died

    def on_taken(self, _: bytes, msg: m.StreamTaken) -> None:
        """The caller took a value (lock held)."""
        known = self._worker.options
        if msg.task not in self._taken:
            if msg.task not in known:
                return
            # It has not begun yet. Others that were counted so, and were given back since, are forgotten here.
            self._taken = {task: count for task, count in self._taken.items() if task in known}
        self._taken[msg.task] = max(msg.count, self._taken.get(msg.task, 0))
        self._wake(msg.task)

    def _wake(self, task: bytes) -> None:
        waiter = self._waiters.get(task)
        if waiter is not None and waiter.count > 0:
            waiter.count = 0
            self._worker.engine.notify(waiter)

    def _caller_died(self, proc: bytes) -> None:
        """Nobody wants the values of its tasks: each ends when it yields the next one (lock held)."""
        for task in [task for task, caller in self._callers.items() if caller == proc]:
            self._close(task)

    def _close(self, task: bytes) -> None:
        self._taken.pop(task, None)
        self._callers.pop(task, None)
        self._wake(task)
        self._waiters.pop(task, None)

    def run(self, src: bytes, msg: m.PushTask | m.ActorCall, value: Any) -> None:
        """Send what `value`, a generator, yields. Its exceptions are the caller's."""
        if not isinstance(value, Iterator):
            raise TypeError(f"num_returns='streaming' needs a generator, not {type(value).__name__}; hint: yield")
        sender = _Sender(self, self._worker, src, msg)
        try:
            drive(value, sender)
        finally:
            sender.close()

    async def run_async(self, threads: Executor, src: bytes, msg: m.ActorCall, value: Any) -> None:
        """The same on an asyncio loop, which is never blocked: plain generators run in one of `threads`."""
        loop = asyncio.get_running_loop()
        if not isinstance(value, AsyncIterator):
            context = contextvars.copy_context()
            await loop.run_in_executor(threads, context.run, self.run, src, msg, value)
            return
        sender = _Sender(self, self._worker, src, msg)
        try:
            async for item in value:
                if sender.blocks or not isinstance(item, (int, float, str, bytes, bool, type(None))):
                    await loop.run_in_executor(threads, sender.send, item)
                else:
                    sender.send(item)
        finally:
            sender.close()

    # ------------------------------------------------------------ for the senders

    def begin(self, task: bytes, caller: bytes) -> None:
        """Count what is taken of this task."""
        with self._worker.engine.lock:
            self._callers[task] = caller
            self._taken.setdefault(task, 0)

    def end(self, task: bytes) -> None:
        """The task yields no more."""
        with self._worker.engine.lock:
            self._close(task)

    def await_room(self, task: bytes, sent: int, window: int) -> None:
        """Wait until fewer than `window` of the values sent have not been taken; a negative one never waits.

        Raises:
            TaskCancelledError: nobody takes any more, as the caller is dead or the task has ended.
        """
        if window <= 0 and task in self._taken:
            return
        engine = self._worker.engine
        with engine.lock:
            while (taken := self._taken.get(task)) is not None and sent - taken >= window:
                waiter = self._waiters[task] = Waiter()
                engine.wait(waiter)
            if taken is None:
                raise TaskCancelledError(error_message="nobody takes what this generator yields any more")


class _Sender:
    """Sends the values of one task. Those that an earlier run of it has sent are left out."""

    def __init__(self, yielding: Yielding, worker: Worker, src: bytes, msg: m.PushTask | m.ActorCall) -> None:
        own = worker.options.get(msg.task)
        self._yielding, self._worker = yielding, worker
        self._src, self._task = src, msg.task
        self._window = own.window if own is not None else -1
        self._skip = own.skip if own is not None else 0
        self._want = frozenset(own.want) if own is not None and own.want is not None else None
        self._index = 0
        self.blocks = self._window > 0
        yielding.begin(msg.task, src)

    def send(self, value: Any) -> None:
        index = self._index
        self._index += 1
        if index < self._skip:
            return
        self._yielding.await_room(self._task, index, self._window)
        if self._want is not None and index + 1 not in self._want:
            return
        replies = self._worker.replies
        item = replies.returned(self._src, self._task, index + 1, *serialize(value))
        replies.send_now(self._src, m.StreamItem(self._task, index, item))

    def close(self) -> None:
        self._yielding.end(self._task)


def drive(values: Iterator[Any], sender: _Sender) -> None:
    """Run a generator to its end. This frame is between the task and user code (`worker.in_user_code`)."""
    for value in values:
        sender.send(value)
