"""The results of a worker on their way to their owners: returns, exceptions, and values that generators yield."""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import traceback
import types
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Executor
from time import perf_counter
from typing import Any

from msgspec import Struct

from hpcray.common.exceptions import AsyncioActorExit, RayError, TaskCancelledError
from hpcray.common.ids import TaskID, raylet_of, return_index
from hpcray.common.task_errors import RayTaskError, make_task_error
from hpcray.core.core_worker.object_table import Waiter
from hpcray.platform.sockets import node_ip_address
from hpcray.protocol import messages as m
from hpcray.protocol.serialization import (
    NONE_BLOB,
    SerializationError,
    Serialized,
    dumps_in_band,
    serialize,
    serialize_error,
)
from hpcray.runtime.core_worker.context import object_time
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.runtime.core_worker.object_writer import ObjectOccupied
from hpcray.runtime.worker.context import WorkerContext
from hpcray.runtime.worker.task_events import TaskEventBuffer

_UNCOUNTED = 9
"""How many times as many ended tasks as are remembered may await the raylet's next question, which counts them."""
_FLUSH_US = 1_000
POST_MORTEM = "RAY_DEBUG_POST_MORTEM"
"""Variable, Ray's: with 1 a task that raises an error waits for `hpcray debug`."""


class Verdict(Exception):
    """The end of a call as the worker itself sees it: `error` is raised at the caller as it is.

    An error that user code raises is wrapped in a RayTaskError whatever its class: an actor that the call has asked may
    have died, or a task that it has waited for been cancelled, which its caller must not take for its own end.
    """

    def __init__(self, error: RayError) -> None:
        super().__init__(error)
        self.error = error


class _Broken(Exception):
    """A generator failed after it had begun: these returns were ready by then, the error stands for the next one."""

    def __init__(self, returns: list[m.Returned], error: BaseException) -> None:
        super().__init__()
        self.returns, self.error = returns, error


class Replies:
    """Sends the replies of one worker.

    Attributes:
        since_flush: microseconds of work whose replies may still be buffered. record: what has run here, if kept.
    """

    def __init__(self, worker: WorkerContext, process: CoreWorker) -> None:
        self._worker = worker
        self._process = process
        self._engine = process.engine
        self._refs = process.table.refs
        self._raylet = raylet_of(process.node)
        self._inline_limit = process.config.inline_limit
        self.since_flush = 0
        size = process.config.task_events
        uncounted = _UNCOUNTED * size if process.config.history else 0
        self.record = TaskEventBuffer(size, uncounted) if size else None
        self._ended = self.record.add if self.record is not None else None

    def reply(
        self,
        src: bytes,
        task: bytes,
        num_returns: int,
        value: Any,
        error: BaseException | None,
        name: str,
        us: int,
        protected: list[bytes] | None,
        actor: tuple[str, str] | None = None,
        hold: bool = False,
    ) -> None:
        """Send a result (or an exception) to the submitter; large values go into the node's store first.

        Args:
            hold: more replies follow at once, and then a flush.
        """
        called = name
        if self._worker.options:
            called = self._worker.display_name(task, name)
            if error is None:
                try:
                    value = self._by_its_transport(task, num_returns, value)
                except BaseException as raised:  # of an extension, which may be a program's
                    error = raised
        if self._ended is not None:
            self._ended((task, called, perf_counter(), us, error is not None))
        returns: list[m.Returned] | None = None
        first: Sequence[m.Returned] = ()
        if error is None:
            try:
                if num_returns == 1:
                    blob, refs = (NONE_BLOB, []) if value is None else serialize(value)
                    if type(blob) is bytes and len(blob) <= self._inline_limit and not refs and not protected:
                        self._send(src, m.TaskDone(task, blob, us), us, hold)
                        return
                    returns = [self.returned(src, task, 0, blob, refs)]
                else:
                    returns = self._many(src, task, num_returns, value)
            except BaseException as raised:
                error = raised
                if num_returns == 1 and type(value) is types.GeneratorType:  # found here, as no generator pickles
                    try:
                        returns, error = self._of_generator(src, task, 1, value), None
                    except _Broken as broken:
                        error = broken
        status = 0
        if error is not None:
            status = 1
            if type(error) is _Broken:
                first, error = error.returns, error.error
            blob = self.error_blob(error, name, actor, task)
            returns = [*first, *(m.Returned(blob) for _ in range(max(1, abs(num_returns) - len(first))))]
        value = error = None
        self._send(src, m.TaskReply(task, status, returns or [], us, self.kept(protected, src)), us, hold)

    def _by_its_transport(self, task: bytes, num_returns: int, value: Any) -> Any:
        """Return what is pickled in place of what a task or call has returned, as its transport has it."""
        own = self._worker.options.get(task)
        if own is None or not own.transport or value is None:
            return value
        extension = self._process.extensions.of_transport(own.transport)
        if num_returns == 1:
            return extension.outgoing_value(value, own.transport, task + return_index(0))
        if num_returns > 1 and hasattr(value, "__iter__"):
            items = (
                extension.outgoing_value(item, own.transport, task + return_index(index))
                for index, item in enumerate(value)
            )
            # Of a generator the values before an error are returned, too.
            return items if isinstance(value, types.GeneratorType) else list(items)
        return value

    def kept(self, protected: list[bytes] | None, src: bytes) -> list[bytes] | None:
        """Count us for the refs from the arguments that we still hold; the reply to `src` names those that it owns."""
        if not protected:
            return None
        with self._engine.lock:
            self._process.drain()
            return self._refs.end_protection(protected, src) or None

    def error_blob(self, error: BaseException, name: str, actor: tuple[str, str] | None, task: bytes) -> bytes:
        """The blob of an exception, as its `get` will raise it."""
        kind = type(error)  # not isinstance: that asks the exception for its class, which may raise
        if issubclass(kind, (KeyboardInterrupt, asyncio.CancelledError)) and task in self._worker.cancelled:
            cancelled = TaskCancelledError(TaskID(task), f"{name} was cancelled while it ran")
            cancelled.__context__ = error  # the text says where it was, as in Ray
            error = self._task_error(cancelled, name, actor, task)
        elif issubclass(kind, KeyboardInterrupt):  # the program has interrupted itself: as in Ray, it looks like this
            cancelled = TaskCancelledError(TaskID(task), f"{name} was interrupted while it ran")
            cancelled.__context__ = error
            error = self._task_error(cancelled, name, actor, task)
        elif kind is Verdict:
            error = error.error  # type: ignore[attr-defined]
        else:
            if os.environ.get(POST_MORTEM) == "1":
                self._process.extensions.features.post_mortem(error)
            error = self._task_error(error, name, actor, task)
        if self.record is not None:
            self.record.explain(task, error)
        return serialize_error(error)

    def _task_error(self, error: BaseException, name: str, actor: tuple[str, str] | None, task: bytes) -> RayTaskError:
        return task_error(error, name, actor, f"ray::{self._worker.display_name(task, name)}")

    def returned(
        self, src: bytes, task: bytes, index: int, blob: bytes | Serialized, refs: list[Any], yielded: bool = False
    ) -> m.Returned:
        """One return value as its owner `src` gets it; a large one is in the node's store then.

        Args:
            yielded: the task that returns it goes on.
        """
        contained = [ref._id for ref in refs] or None
        size = blob.size if isinstance(blob, Serialized) else len(blob)
        value = b""
        object_id = task + return_index(index)
        if size <= self._inline_limit:
            value = blob.join() if isinstance(blob, Serialized) else blob
            size = 0
        else:
            began = not yielded and object_time.begin(self.record.last if self.record is not None else 0.0)
            try:
                self._process.stores.writer.write(object_id, blob)
            except ObjectOccupied:  # it is made again, and its earlier form is still being read here: this one travels
                value, size = blob.join() if isinstance(blob, Serialized) else blob, 0
            finally:
                if began:
                    object_time.end()
        if refs or size:
            with self._engine.lock:
                for ref in refs:
                    self._refs.pledge_to(ref._id, src)
                if size:
                    self._engine.send(self._raylet, m.Release([object_id]))
        return m.Returned(value, size, contained)

    def _withdraw(self, src: bytes, task: bytes, returns: list[m.Returned]) -> None:
        """The first of several returns were ready when a later one failed: an error will be sent instead."""
        with self._engine.lock:
            for index, item in enumerate(returns):
                for inner in item.contained or ():
                    self._refs.withdraw_pledge(inner, src)
                if item.size:
                    self._engine.send(self._raylet, m.Free([task + return_index(index)], []))

    def _many(self, src: bytes, task: bytes, num_returns: int, value: Any) -> list[m.Returned]:
        if num_returns <= 0:
            return [m.Returned(NONE_BLOB) for _ in range(-num_returns)]  # of a generator: its values have been sent
        if isinstance(value, types.GeneratorType):
            return self._of_generator(src, task, num_returns, value)
        try:
            values = list(value)
        except TypeError:
            values = [value]
        if len(values) != num_returns:
            raise ValueError(f"Task returned {len(values)} objects, but num_returns={num_returns}.")
        returns: list[m.Returned] = []
        own = self._worker.options.get(task)
        want = own.missing if own is not None else None
        try:
            for index, item in enumerate(values):
                if want is not None and index not in want:
                    returns.append(m.Returned(b""))  # its owner still has that of an earlier run
                else:
                    returns.append(self.returned(src, task, index, *serialize(item)))
        except BaseException:
            self._withdraw(src, task, returns)
            raise
        return returns

    def _of_generator(self, src: bytes, task: bytes, num_returns: int, values: Iterator[Any]) -> list[m.Returned]:
        """Return the values of a generator, those before an error too; surplus ones are dropped, as in Ray."""
        returns: list[m.Returned] = []
        own = self._worker.options.get(task)
        want = own.missing if own is not None else None
        try:
            for item in values:
                index = len(returns)
                if index == num_returns:
                    print(
                        f"hpcray: the generator that a task returned yields more than num_returns={num_returns} "
                        "values, which are lost; hint: return a list, or write the task itself with `yield`",
                        file=sys.stderr,
                    )
                    break
                known = want is not None and index not in want  # its owner still has that of an earlier run
                returns.append(m.Returned(b"") if known else self.returned(src, task, index, *serialize(item)))
            count = len(returns)
            if count < num_returns:
                self._withdraw(src, task, returns)
                returns = []
                raise ValueError(f"Task returned {count} objects, but num_returns={num_returns}.")
        except BaseException as raised:
            if len(returns) < num_returns:
                raise _Broken(returns, raised) from raised
            print(
                f"hpcray: a generator raised after its num_returns={num_returns} values; no ref has the error",
                file=sys.stderr,
            )
            traceback.print_exc()
        return returns

    def send_now(self, dest: bytes, msg: m.Message) -> None:
        """Send what a task yields."""
        with self._engine.lock:
            if self._refs.unacked:
                self._refs.send_after_acks(dest, msg)
            else:
                self._engine.send(dest, msg)
            self._engine.flush()

    def _send(self, dest: bytes, msg: m.Message, us: int, hold: bool) -> None:
        """Queue a reply. It leaves at once unless more short work waits (then after a millisecond of it at most)."""
        engine = self._engine
        with engine.lock:
            if self._refs.unacked:
                self._refs.send_after_acks(dest, msg)
                engine.flush()
                return
            peer = engine.peers.get(dest) or engine.links.peer(dest)  # `send`, without a call
            peer.out.append(msg)
            if not peer.dirty:
                peer.dirty = True
                engine.dirty.append(peer)
            self.since_flush += us + 10
            if hold:
                engine.flush_soon()
            elif not self._worker.queue or self.since_flush > _FLUSH_US:
                self.since_flush = 0
                engine.flush()
            else:
                engine.flush_soon()


def task_error(
    error: BaseException, name: str, actor: tuple[str, str] | None, proctitle: str | None = None
) -> RayTaskError:
    """Wrap what user code raised. Never fails: the submitter waits for the reply."""
    if isinstance(error, SerializationError):  # it holds the value that does not pickle
        cause, error = error.__cause__, TypeError(str(error))
        error.__cause__ = cause
    try:
        return make_task_error(name, error, os.getpid(), node_ip_address(), actor, dumps_in_band, proctitle)
    except BaseException as problem:  # user code runs when an exception is pickled, or inspected
        text = f"it raised {type(error).__name__}, of which nothing can be told: {type(problem).__name__} was raised"
        return make_task_error(name, RuntimeError(text), os.getpid(), node_ip_address(), actor, proctitle=proctitle)


class StreamingGeneratorStats(Struct, frozen=True):
    """The value of a `yield` in a generator task: the seconds that it took to make an object of what it yielded."""

    object_creation_dur_s: float


class GeneratorExecutor:
    """All tasks of one worker that yield now, by task id, with how many of their values were taken.

    A task whose caller takes no more values is in none of these.
    """

    def __init__(self, worker: WorkerContext, replies: Replies) -> None:
        self.replies = replies
        self._worker = worker
        self._taken: dict[bytes, int] = {}
        self._callers: dict[bytes, bytes] = {}
        self._waiters: dict[bytes, Waiter] = {}

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

    def caller_died(self, proc: bytes) -> None:
        """Close the generators of a dead caller: each ends when it yields its next value (lock held)."""
        for task in [task for task, caller in self._callers.items() if caller == proc]:
            self._close(task)

    def _close(self, task: bytes) -> None:
        self._taken.pop(task, None)
        self._callers.pop(task, None)
        self._wake(task)
        self._waiters.pop(task, None)

    def cancel(self, task: bytes) -> None:
        """End the generator of a call that was cancelled, if one runs, where it yields its next value."""
        with self._worker.engine.lock:
            self._wake(task)

    def run(self, src: bytes, msg: m.PushTask | m.ActorCall, value: Any) -> None:
        """Send what `value`, a generator, yields. Its exceptions are the caller's."""
        self._run(self._sender(src, msg, value), value)

    def _sender(self, src: bytes, msg: m.PushTask | m.ActorCall, value: Any) -> _Sender:
        if not isinstance(value, Iterator):
            raise ValueError(
                f"Functions with num_returns='streaming' must return a generator, not {type(value).__name__}"
            )
        return _Sender(self, self._worker, src, msg)

    def _run(self, sender: _Sender, value: Iterator[Any]) -> None:
        try:
            drive(value, sender)
        except AsyncioActorExit:
            raise
        except Exception as raised:
            raise _failed(raised) from raised
        finally:
            sender.close()

    async def run_async(self, threads: Executor, src: bytes, msg: m.ActorCall, value: Any) -> None:
        """The same on an asyncio loop, which is never blocked: plain generators run in one of `threads`."""
        loop = asyncio.get_running_loop()
        if not isinstance(value, AsyncIterator):
            context = contextvars.copy_context()
            sender = self._sender(src, msg, value)
            try:
                await loop.run_in_executor(threads, context.run, self._run, sender, value)
            finally:
                sender.close()  # cancelled: the thread goes on until the next `yield`
            return
        sender = _Sender(self, self._worker, src, msg)
        answer = getattr(value, "asend", None)
        send = sender.send if sender.per_yield == 1 else sender.send_several
        stats: StreamingGeneratorStats | None = None
        try:
            while True:
                try:
                    item = await (value.__anext__() if answer is None else answer(stats))
                except StopAsyncIteration:
                    return
                if sender.blocks or not isinstance(item, (int, float, str, bytes, bool, type(None))):
                    stats = await loop.run_in_executor(threads, send, item)
                else:
                    stats = send(item)
        except AsyncioActorExit:
            raise
        except Exception as raised:
            raise _failed(raised) from raised
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
            Verdict: the call was cancelled, or no more values are taken, as the caller is dead or the task has ended.
        """
        cancelled = self._worker.cancelled
        if window <= 0 and task in self._taken and not cancelled:
            return
        engine = self._worker.engine
        with engine.lock:
            while (taken := self._taken.get(task)) is not None and task not in cancelled and 0 < window <= sent - taken:
                waiter = self._waiters[task] = Waiter()
                engine.wait(waiter)
            if task in cancelled:
                raise Verdict(TaskCancelledError(TaskID(task), "The generator was cancelled while it ran"))
            if taken is None:
                raise Verdict(TaskCancelledError(error_message="nobody takes what this generator yields any more"))


class _Sender:
    """Sends the values of one task. Those that an earlier run of it has sent are left out."""

    def __init__(
        self, yielding: GeneratorExecutor, worker: WorkerContext, src: bytes, msg: m.PushTask | m.ActorCall
    ) -> None:
        own = worker.options.get(msg.task)
        self._yielding, self._worker = yielding, worker
        self._src, self._task = src, msg.task
        self._window = own.window if own is not None else -1
        self.per_yield = own.per_yield if own is not None else 1
        self._skip = own.skip if own is not None else 0
        self._transport = own.transport if own is not None else ""
        self._want = frozenset(own.missing) if own is not None and own.missing is not None else None
        self._index = 0
        self._most = worker.process.config.max_generator_returns
        self.blocks = self._window > 0
        yielding.begin(msg.task, src)

    def send_several(self, values: Any) -> StreamingGeneratorStats:
        """Send the values that one `yield` gave, then wait as after a single one."""
        if not isinstance(values, (tuple, list)):
            raise TypeError(
                f"Streaming generator tasks with _num_objects_per_yield={self.per_yield} must yield a tuple or list "
                f"of length {self.per_yield}, not {type(values).__name__}"
            )
        if len(values) != self.per_yield:
            raise ValueError(
                f"Streaming generator task yielded {len(values)} objects, but _num_objects_per_yield={self.per_yield}"
            )
        stats = StreamingGeneratorStats(sum(self.send(value, False).object_creation_dur_s for value in values))
        self._yielding.await_room(self._task, self._index, self._window)
        return stats

    def send(self, value: Any, alone: bool = True) -> StreamingGeneratorStats:
        """Send the next value, and wait while the caller has too many that it has not taken.

        Args:
            alone: no more values of the same `yield` follow; False: the caller waits after the last of them.
        """
        index = self._index
        if index >= self._most:
            raise ValueError(f"a generator yields at most {self._most} values; hint: yield lists of them")
        self._index += 1
        began = perf_counter()
        item = None
        if index >= self._skip and (self._want is None or index + 1 in self._want):
            if self._transport:
                extension = self._worker.process.extensions.of_transport(self._transport)
                value = extension.outgoing_value(value, self._transport, self._task + return_index(index + 1))
            blob, refs = serialize(value)
            item = self._yielding.replies.returned(self._src, self._task, index + 1, blob, refs, yielded=True)
        stats = StreamingGeneratorStats(perf_counter() - began)
        if item is not None:
            self._yielding.replies.send_now(self._src, m.StreamItem(self._task, index, item))
        if alone:
            self._yielding.await_room(self._task, index + 1, self._window)
        return stats

    def close(self) -> None:
        self._yielding.end(self._task)


def drive(values: Iterator[Any], sender: _Sender) -> None:
    """Run a generator to its end. This frame is between the task and user code (`task_executor.in_user_code`)."""
    stats = None
    send = sender.send if sender.per_yield == 1 else sender.send_several
    while True:
        try:
            answer = stats is not None and _takes_values(values)
            value = values.send(stats) if answer else next(values)  # type: ignore[attr-defined]
        except StopIteration:
            return
        stats = send(value)
        del value


def _takes_values(values: Any) -> bool:
    """Return True if `values.send` reaches a generator: `yield from` may have handed over to any iterator."""
    inner = getattr(values, "gi_yieldfrom", None)
    while inner is not None:
        values, inner = inner, getattr(inner, "gi_yieldfrom", None)
    return hasattr(values, "send")


def _failed(error: BaseException) -> _Broken:
    """The end of a stream that broke: the task has no value, as always, and one value more, which is the error."""
    return _Broken([m.Returned(NONE_BLOB)], error)
