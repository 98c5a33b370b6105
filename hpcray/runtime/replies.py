"""What a worker sends back: results, exceptions, and what it keeps of the arguments."""

from __future__ import annotations

import os
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import cloudpickle

from hpcray.base.errors import (
    ActorDiedError,
    RayTaskError,
    RuntimeEnvSetupError,
    TaskCancelledError,
    make_task_error,
)
from hpcray.base.ids import raylet_of, return_index
from hpcray.host.address import node_ip_address
from hpcray.runtime.record import Record
from hpcray.runtime.store_client import Occupied
from hpcray.wire import messages as m
from hpcray.wire.serialization import NONE_BLOB, Serialized, serialize, serialize_error

if TYPE_CHECKING:
    from hpcray.runtime.process import Process
    from hpcray.runtime.worker import Worker

_FLUSH_US = 1_000
_AS_THEY_ARE = (ActorDiedError, RuntimeEnvSetupError, TaskCancelledError)


class _Broken(Exception):
    """A generator failed after some values, which were ready by then."""

    def __init__(self, returns: list[m.Returned], error: BaseException) -> None:
        super().__init__()
        self.returns, self.error = returns, error


class Replies:
    """Sends the replies of one worker.

    Attributes:
        since_flush: microseconds of work whose replies may still be buffered. record: what has run here, if kept.
    """

    def __init__(self, worker: Worker, process: Process) -> None:
        self._worker = worker
        self._process = process
        self._engine = process.engine
        self._table = process.table
        self._raylet = raylet_of(process.node)
        self._inline_limit = process.config.inline_limit
        self.since_flush = 0
        size = process.config.task_events
        self.record = Record(size) if size else None
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
        if self._ended is not None:
            called = self._worker.called(task, name) if self._worker.options else name
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
            except _Broken as broken:
                first, error = broken.returns, broken.error
            except BaseException as raised:
                error = raised
        status = 0
        if error is not None:
            status = 1
            blob = self.error_blob(error, name, actor, task)
            returns = [*first, *(m.Returned(blob) for _ in range(abs(num_returns) - len(first)))]
        value = error = None
        self._send(src, m.TaskReply(task, status, returns or [], us, self.kept(protected, src)), us, hold)

    def kept(self, protected: list[bytes] | None, src: bytes) -> list[bytes] | None:
        """Count us for the refs from the arguments that we still hold; the reply to `src` names those that it owns."""
        if not protected:
            return None
        with self._engine.lock:
            self._process.drain()
            return self._process.table.keep(protected, src) or None

    def error_blob(self, error: BaseException, name: str, actor: tuple[str, str] | None, task: bytes) -> bytes:
        """The blob of an exception, as its `get` will raise it."""
        kind = type(error)  # not isinstance: that asks the exception for its class, which may raise
        if issubclass(kind, KeyboardInterrupt) and task in self._worker.cancelled:
            self._worker.cancelled.discard(task)
            return serialize_error(TaskCancelledError(error_message=f"{name} was cancelled while it ran"))
        if issubclass(kind, _AS_THEY_ARE) and not issubclass(kind, RayTaskError):
            return serialize_error(error)
        return serialize_error(task_error(error, name, actor))

    def returned(self, src: bytes, task: bytes, index: int, blob: bytes | Serialized, refs: list[Any]) -> m.Returned:
        """One return value as its owner `src` gets it; a large one is in the node's store then."""
        contained = [ref._id for ref in refs] or None
        size = blob.size if isinstance(blob, Serialized) else len(blob)
        value = b""
        object_id = task + return_index(index)
        if size <= self._inline_limit:
            value = blob.join() if isinstance(blob, Serialized) else blob
            size = 0
        else:
            try:
                self._process.store.write(object_id, blob)
            except Occupied:  # it is made again, and somebody here still reads what it was: this one travels
                value, size = blob.join() if isinstance(blob, Serialized) else blob, 0
        if refs or size:
            with self._engine.lock:
                for ref in refs:
                    self._process.table.give(ref._id, src)
                if size:
                    self._engine.send(self._raylet, m.Release([object_id]))
        return m.Returned(value, size, contained)

    def _withdraw(self, src: bytes, task: bytes, returns: list[m.Returned]) -> None:
        """The first of several returns were ready when a later one failed: an error will be sent instead."""
        with self._engine.lock:
            for index, item in enumerate(returns):
                for inner in item.contained or ():
                    self._process.table.take_back(inner, src)
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
        want = own.want if own is not None else None
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
        """What a generator has yielded before it failed is there; what it yields too much is dropped, as in Ray."""
        returns: list[m.Returned] = []
        own = self._worker.options.get(task)
        want = own.want if own is not None else None
        try:
            for item in values:
                index = len(returns)
                if index == num_returns:
                    print(f"hpcray: a generator yields more than num_returns={num_returns} values", file=sys.stderr)
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
            traceback.print_exc()
        return returns

    def send_now(self, dest: bytes, msg: m.Message) -> None:
        """Send what a task yields."""
        with self._engine.lock:
            if self._process.table.unacked:
                self._process.table.hold(dest, msg)
            else:
                self._engine.send(dest, msg)
            self._engine.flush()

    def _send(self, dest: bytes, msg: m.Message, us: int, hold: bool) -> None:
        """Queue a reply. It leaves at once unless more short work waits (then after a millisecond of it at most)."""
        engine = self._engine
        with engine.lock:
            if self._table.unacked:
                self._table.hold(dest, msg)
                engine.flush()
                return
            peer = engine.peers.get(dest) or engine.peer(dest)  # `send`, without a call
            peer.out.append(msg)
            if not peer.dirty:
                peer.dirty = True
                engine.dirty.append(peer)
            self.since_flush += us + 10
            if hold:
                engine.buffered()
            elif not self._worker.queue or self.since_flush > _FLUSH_US:
                self.since_flush = 0
                engine.flush()
            else:
                engine.buffered()


def task_error(error: BaseException, name: str, actor: tuple[str, str] | None) -> RayTaskError:
    """What user code raised, wrapped to travel. Never fails: somebody waits for it."""
    try:
        return make_task_error(name, error, os.getpid(), node_ip_address(), actor, cloudpickle.dumps)
    except BaseException as problem:  # user code runs when an exception is pickled, or asked for what it is
        text = f"it raised {type(error).__name__}, of which nothing can be told: {type(problem).__name__} was raised"
        return make_task_error(name, RuntimeError(text), os.getpid(), node_ip_address(), actor, cloudpickle.dumps)
