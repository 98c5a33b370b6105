"""Generators of refs: what a task or call yields, one object each, as it comes.

The objects are returns of the task: number 0 is ready when the task has ended (`completed()`), number i + 1 is what it
yielded i-th. The caller always has one entry more than it has values, and more if it looks further ahead: whoever waits
for the next value waits for that entry, and learns from it too when there is none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, NoReturn

from hpcray.common.exceptions import ObjectRefStreamEndOfStreamError
from hpcray.common.ids import TaskID, node_of, return_index
from hpcray.core.core_worker.object_table import PENDING, ObjectTable, Waiter
from hpcray.core.core_worker.task import PendingTask
from hpcray.protocol import messages as m
from hpcray.protocol.messages.objects import is_error
from hpcray.protocol.serialization import Serialized, serialize, serialize_error
from hpcray.runtime.core_worker.context import CoreWorkerContext, require_context
from hpcray.runtime.core_worker.io_engine import IoEngine
from hpcray.runtime.core_worker.object_refs import LateRelease, ObjectRef, T_co, collecting, is_referred, new_ref
from hpcray.runtime.core_worker.task_retries import TaskRetries

if TYPE_CHECKING:
    import asyncio


_END = serialize_error(ObjectRefStreamEndOfStreamError("the generator has no more values"))
_EVERYTHING = 1 << 62


class GeneratorStream:
    """One task's values, counted from 1. refs: those not taken yet, and behind them at least that of the next one.

    received, taken: how many values came, and were taken. expected: how many have, or had, an entry. end: how many
    there are, None while that is not known; rest: what stands in the entries behind them. dropped: no more will be
    taken.
    """

    __slots__ = ("dropped", "end", "expected", "received", "refs", "rest", "taken", "task")

    def __init__(self, task: PendingTask) -> None:
        self.task = task
        self.refs: deque[ObjectRef[Any]] = deque()
        self.received = self.taken = self.expected = 0
        self.end: int | None = None
        self.rest = _END
        self.dropped = False

    @property
    def finished(self) -> bool:
        """True when all values were taken, and it is known that there are no more."""
        return self.end is not None and self.taken >= self.end

    def expect(self, table: ObjectTable, ahead: int = 1) -> None:
        """Have entries for as many values beyond those received (engine's lock held)."""
        while not self.dropped and self.expected < self.received + ahead:
            self.expected += 1
            object_id = self.task.id + return_index(self.expected)
            table.create(object_id)
            self.refs.append(new_ref(object_id))
            if self.end is not None and self.expected > self.end:
                table.set_inline(object_id, self.rest)

    def release(self, engine: IoEngine) -> None:
        """Let the task go on without a consumer (engine's lock held)."""
        self.dropped = True
        if self.task.extra.window > 0 and self.task.worker is not None:
            engine.send(self.task.worker, m.StreamTaken(self.task.id, _EVERYTHING))

    def close(self, table: ObjectTable, rest: bytes) -> None:
        """No more values come: what was expected of them is `rest` (engine's lock held)."""
        self.end, self.rest = self.received, rest
        for position in range(self.received, self.expected):
            table.set_inline(self.task.id + return_index(position + 1), rest)


class GeneratorStreams:
    """The streams that this process is the caller of. All methods want the engine's lock held."""

    def __init__(self, context: CoreWorkerContext, retries: TaskRetries) -> None:
        self._retries = retries
        self._engine = context.engine
        self._table = context.table
        self._open: dict[bytes, GeneratorStream] = {}

    def open(self, task: PendingTask) -> Any:
        """Return the result of `.remote()`: a generator of refs, or for "dynamic" the ref of one."""
        stream = self._open[task.id] = GeneratorStream(task)
        completed = task.id + return_index(0)
        self._table.create(completed, task)
        stream.expect(self._table)
        ref = new_ref(completed)
        return ref if task.extra.dynamic else ObjectRefGenerator(stream, ref)

    def release_all(self) -> None:
        """This process ends, and takes no more values."""
        for stream in self._open.values():
            stream.release(self._engine)

    def is_open(self, task_id: bytes) -> bool:
        """Return True if a task has never ended; one that has may run again for values that were lost."""
        return task_id in self._open

    def received(self, task_id: bytes) -> int:
        """How many values came: a task that runs again need not send them again."""
        stream = self._open.get(task_id)
        return stream.received if stream is not None else 0

    def announce_taken(self, task: PendingTask, worker: bytes) -> None:
        """Send a worker, with the task, how many values were taken before."""
        stream = self._open.get(task.id)
        if task.extra.window > 0 and (stream is None or stream.taken or stream.dropped):
            count = _EVERYTHING if stream is None or stream.dropped else stream.taken
            self._engine.send(worker, m.StreamTaken(task.id, count))

    def on_item(self, src: bytes, msg: m.StreamItem) -> None:
        """The task yielded a value."""
        stream = self._open.get(msg.task)
        object_id = msg.task + return_index(msg.index + 1)
        item = msg.item
        if stream is not None and msg.index < stream.received:
            self._adopt(src, item)
            return
        contained = self._adopt(src, item)
        if item.size or contained:
            self._keep(msg.task, stream, object_id)
        if stream is not None:
            stream.received += 1
            stream.expect(self._table)
        if item.size:
            self._table.set_stored(object_id, item.size, node_of(src), contained)
        else:
            self._table.set_inline(object_id, item.value, contained)

    def finish(self, task: PendingTask, src: bytes, msg: m.TaskReply) -> None:
        """The task has ended. An exception is one value more; one of the generator's own is nothing but that."""
        last = msg.returns[-1].value
        self._end(task, last if is_error(last) else None, msg.returns[0].value)

    def fail(self, task: PendingTask, error: bytes) -> None:
        """The task will not end any more."""
        self._end(task, error, error)

    def _end(self, task: PendingTask, last: bytes | None, completed: bytes) -> None:
        stream = self._open.pop(task.id, None)
        if stream is None:
            return
        if last is not None:
            stream.received += 1
            stream.expect(self._table)
            self._table.set_inline(task.id + return_index(stream.received), last)
        failed = is_error(completed)
        contained: list[Any] | None = None
        if task.extra.dynamic and not failed:
            contained = [stream.refs.popleft() for _ in range(stream.received)]
            blob, _ = serialize(DynamicObjectRefGenerator(contained))
            completed = blob.join() if isinstance(blob, Serialized) else blob
        stream.close(self._table, completed if failed else _END)
        self._table.set_inline(task.id + return_index(0), completed, contained)

    def _keep(self, task_id: bytes, stream: GeneratorStream | None, object_id: bytes) -> None:
        """A value that may be lost one day has come, of a first run or of a later one."""
        kept = self._table.lineage.kept.get(task_id)
        task = stream.task if stream is not None else kept.task if kept is not None else None
        if task is not None:
            self._retries.keep(task, [object_id], running=True)

    def _adopt(self, src: bytes, item: m.Returned) -> list[Any] | None:
        for inner in item.contained or ():
            self._table.refs.adopt_returned_ref(inner, src)
        return [new_ref(inner) for inner in item.contained] if item.contained else None


class ObjectRefGenerator(Generic[T_co]):
    """Gives the refs of what a task or actor call yields, in order, as they come. `for`, `async for`, `next`."""

    def __init__(self, stream: GeneratorStream, completed: ObjectRef[Any]) -> None:
        self._stream = stream
        self._completed = completed

    def __iter__(self) -> Iterator[ObjectRef[T_co]]:
        return self

    def __next__(self) -> ObjectRef[T_co]:
        """The next ref; waits until its value is there. If the task failed, the last ref's value is the error."""
        context = require_context()
        with context.engine.lock:
            if not self._stream.finished:
                context.check_alive()
                waiter = Waiter()
                oid = self._stream.refs[0]._id
                if not context.table.wait_ready(oid, waiter):
                    try:
                        context.block(waiter, None)
                    finally:
                        context.table.remove_waiter([oid], waiter)
            ref = self._take(context)
        context.engine.run_pending_calls()
        if ref is None:
            raise StopIteration
        return ref

    def __aiter__(self) -> AsyncIterator[ObjectRef[T_co]]:
        return self

    async def __anext__(self) -> ObjectRef[T_co]:
        return await self._next_async()

    async def _next_async(self, timeout_s: float | None = None) -> ObjectRef[T_co]:
        """`_next_sync` on an asyncio loop."""
        context = require_context()
        if not self._stream.finished:
            import asyncio

            loop = asyncio.get_running_loop()
            ready: asyncio.Future[None] = loop.create_future()

            def wake() -> None:
                try:
                    loop.call_soon_threadsafe(_settle, ready)
                except RuntimeError:
                    if not loop.is_closed():  # else nobody waits any more
                        raise

            context.reader.when_ready_here(self._stream.refs[0], wake)
            await asyncio.wait([ready], timeout=None if timeout_s is None or timeout_s < 0 else timeout_s)
            if not ready.done():
                return ObjectRef.nil()
        with context.engine.lock:
            ref = self._take(context)
        if ref is None:
            raise StopAsyncIteration
        return ref

    def completed(self) -> ObjectRef[Any]:
        """A ref that is ready when the task has ended; its value is the error if it failed."""
        return self._completed

    @property
    def _generator_ref(self) -> ObjectRef[Any]:
        return self._completed

    def _next_sync(self, timeout_s: float | None = None) -> ObjectRef[Any]:
        """`next` for at most so many seconds (None or -1: for ever); the nil ref when there is none by then."""
        ref = self.peek()
        if timeout_s is not None and timeout_s < 0:
            timeout_s = None
        wait = require_context().waits.wait
        if ref is not None and timeout_s is not None and not wait([ref], 1, timeout_s, False)[0]:
            return ObjectRef.nil()
        return next(self)

    def _get_next_ref_n(self, num_refs: int) -> list[ObjectRef[Any]]:
        """The next refs, ready or not, which stay where they are. One behind the last value raises when it is read.

        Raises:
            ValueError: `num_refs` is not positive.
        """
        _check_positive(num_refs)
        context = require_context()
        with context.engine.lock:
            stream = self._stream
            stream.expect(context.table, stream.taken + num_refs - stream.received)
            return list(islice(stream.refs, num_refs))

    def _consume_next_ref_n(self, num_refs: int) -> None:
        """Take the next values without looking at them, those behind the end too.

        Raises:
            ValueError: `num_refs` is not positive, or not so many have come.
        """
        _check_positive(num_refs)
        context = require_context()
        with context.engine.lock:
            stream = self._stream
            if stream.end is None and stream.taken + num_refs > stream.received:
                come = stream.received - stream.taken
                raise ValueError(f"of {num_refs} values only {come} have come; hint: wait for the last one first")
            for _ in range(num_refs):
                if stream.refs:
                    stream.refs.popleft()
            self._count_taken(context, num_refs)

    def _get_next_object_id_binary(self) -> bytes:
        """The id of what `next` gives, or would give if there were more values."""
        return self._get_next_ref_n(1)[0]._id

    def _stream_exhausted(self) -> bool:
        """Return True if all values were taken and the task has ended."""
        return self.is_finished()

    def send(self, value: Any) -> NoReturn:
        """Not supported, as in Ray."""
        raise NotImplementedError("`gen.send` is not supported.")

    def throw(self, value: Any) -> NoReturn:
        """Not supported, as in Ray."""
        raise NotImplementedError("`gen.throw` is not supported.")

    def close(self) -> NoReturn:
        """Not supported, as in Ray."""
        raise NotImplementedError("`gen.close` is not supported. hint: cancel() ends its task")

    async def asend(self, value: Any) -> NoReturn:
        """Not supported, as in Ray."""
        raise NotImplementedError("`gen.asend` is not supported.")

    async def athrow(self, value: Any) -> NoReturn:
        """Not supported, as in Ray."""
        raise NotImplementedError("`gen.athrow` is not supported.")

    async def aclose(self) -> NoReturn:
        """Not supported, as in Ray."""
        raise NotImplementedError("`gen.aclose` is not supported. hint: cancel() ends its task")

    def next_ready(self) -> bool:
        """Return True if `next()` would return a ref at once."""
        context = require_context()
        with context.engine.lock:
            stream = self._stream
            return not stream.finished and context.table.entries[stream.refs[0]._id].state != PENDING

    def is_finished(self) -> bool:
        """Return True if the task has ended and all refs were taken: `next()` would stop."""
        return self._stream.finished

    def task_id(self) -> TaskID:
        """Id of the task."""
        return self._completed.task_id()

    def peek(self) -> ObjectRef[Any] | None:
        """The ref that `next()` will give, ready or not; None when it is known that there is none."""
        with require_context().engine.lock:
            return None if self._stream.finished else self._stream.refs[0]

    def _take(self, context: CoreWorkerContext) -> ObjectRef[Any] | None:
        if self._stream.finished:
            return None
        ref = self._stream.refs.popleft()
        self._count_taken(context, 1)
        return ref

    def _count_taken(self, context: CoreWorkerContext, count: int) -> None:
        stream = self._stream
        stream.taken += count
        stream.expect(context.table)
        if stream.task.extra.window > 0 and stream.task.worker is not None:
            context.engine.send(stream.task.worker, m.StreamTaken(stream.task.id, stream.taken))
            context.engine.flush()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "You cannot return or pass a generator to other task. Serializing a ObjectRefGenerator is not allowed. "
            "hint: pass the refs that it gives"
        )

    def __repr__(self) -> str:
        return f"ObjectRefGenerator({self._completed.hex()})"

    def __del__(self) -> None:
        stream = getattr(self, "_stream", None)
        if stream is None:
            return
        if collecting and is_referred(self):
            self._late = LateRelease.of(partial(_drop_stream, stream))
            return
        _drop_stream(stream)


def _drop_stream(stream: GeneratorStream) -> None:
    """Take note that the values of a stream that are left will not be taken."""
    stream.dropped = True
    stream.refs = deque()
    if stream.task.extra.window > 0 and stream.task.worker is not None:
        try:
            context = require_context()
            context.engine.call_soon(lambda: _take_all(context, stream))
        except Exception:  # the session has ended, or the interpreter is going down
            return


class DynamicObjectRefGenerator:
    """The value of a ref that `num_returns="dynamic"` gave: the refs of what was yielded. Each is given once, then let
    go, so that values which are not needed any more make room while others are read."""

    def __init__(self, refs: Iterable[ObjectRef[Any]]) -> None:
        self._refs = deque(refs)

    def __iter__(self) -> Iterator[ObjectRef[Any]]:
        while self._refs:
            yield self._refs.popleft()

    def __len__(self) -> int:
        return len(self._refs)


def _check_positive(num_refs: int) -> None:
    if num_refs <= 0:
        raise ValueError("num_refs must be positive")


def _take_all(context: CoreWorkerContext, stream: GeneratorStream) -> None:
    """Release the task of a dropped generator: it need not wait for a consumer."""
    with context.engine.lock:
        stream.release(context.engine)
        context.engine.flush()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
