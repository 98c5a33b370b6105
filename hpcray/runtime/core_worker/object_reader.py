"""Reading objects: get, and calls that come when a value is there."""

from __future__ import annotations

import copy
import errno
import logging
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pickle import loads
from sys import modules
from typing import Any, ClassVar, NamedTuple

from hpcray.common.exceptions import (
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    RayError,
    RaySystemError,
    WorkerCrashedError,
    store_full_error,
)
from hpcray.common.ids import owner_of, return_index
from hpcray.common.task_errors import RayTaskError
from hpcray.core.core_worker.object_entry import NO_EXTRA, ArenaMapping
from hpcray.core.core_worker.object_table import INLINE, LINEAGE_ONLY, PENDING, Waiter
from hpcray.core.core_worker.task import PendingTask
from hpcray.platform.arena import Arena
from hpcray.platform.direct_io import read_private_copy
from hpcray.protocol import messages as m
from hpcray.protocol.messages.objects import ERROR, PLAIN, is_error
from hpcray.protocol.serialization import deserialize, serialize_error
from hpcray.runtime.core_worker.context import CoreWorkerContext, current, object_time
from hpcray.runtime.core_worker.io_engine import monotonic, released
from hpcray.runtime.core_worker.object_refs import LocalRefs, ObjectRef, defer_release, new_ref
from hpcray.runtime.core_worker.threads import CallThread

_ERROR_DELAY = 0.02
"""Seconds for which a `get` waits for some of its objects though another one may be an error."""
_ROOM = "hint: drop references and arrays that are no longer needed"
_UNREADABLE = {
    None, errno.EIO, errno.ENXIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.ESTALE, errno.EREMOTEIO,
    errno.ETIMEDOUT,
}  # fmt: skip
"""Errors of a disk that has lost the bytes (None: the file ends before), not of a process that lacks something."""


_MANY_REFS = 8
"""Refs in a value from which on it is read with those that this process has."""
_BLOBS = (bytes, memoryview)
_IN_MESSAGES = {bytes}
_MOST_LOOKED_AT = 1000  # objects that a thread waits for


class _ValueRefs(NamedTuple):
    """A blob, and the refs in its value."""

    blob: bytes | memoryview
    refs: Sequence[ObjectRef[Any]]


class _TargetedValue(NamedTuple):
    """A blob that is no error, and the rest as in `EntryExtra.target`."""

    blob: bytes | memoryview
    extension: str
    target: Any


class ObjectReader:
    """Turns refs into values: `get` and callbacks.

    Args:
        arenas: those that this process can read, by node.
        explain: called with (ids that are not available, timeout) under the engine's lock; returns the text of the
            GetTimeoutError.
        unhandled_errors: gets to know of the errors that are read.

    Attributes:
        ready_queues: those that wait (`ReadyQueue`).
    """

    def __init__(
        self,
        context: CoreWorkerContext,
        arenas: Mapping[int, Arena],
        explain: Callable[[Sequence[bytes], float | None], str],
        unhandled_errors: UnhandledErrors,
    ) -> None:
        self._context = context
        self._explain = explain
        self._unhandled_errors = unhandled_errors
        self._engine = context.engine
        self._device_view_size = context.extensions.features.device_view_size
        self._table = context.table
        self._arenas = arenas
        self._callbacks = CallThread("hpcray-callbacks")
        self._out_of_scope = CallThread("hpcray-out-of-scope")
        self.ready_queues: list[Any] = []

    def close(self) -> None:
        """End the threads that make callbacks."""
        self._callbacks.close()
        self._out_of_scope.close()

    # ------------------------------------------------------------ get, wait

    def get_one(self, ref: ObjectRef[Any], timeout: float | None) -> Any:
        """The value of one ref: what `get` does, at less cost for a value that comes in a message."""
        engine, entries, oid = self._engine, self._table.entries, ref._id
        with engine.lock:
            if released:
                self._context.drain()
            entry = entries.get(oid)
            if entry is None:
                raise unknown_ref(oid)
            found = None
            if entry.state != INLINE:
                if entry.extra.mapping is None:
                    oids = [oid]
                    pins = self._table.pins
                    pins.begin_read(oids)
                    try:
                        self._await_local(oids, timeout)
                    finally:
                        pins.end_read(oids)
                elif engine.dirty:
                    engine.flush()
                if entry.state != INLINE:
                    found = self._found((oid,))
            elif engine.dirty:
                engine.flush()
            blob = entry.value
            extra = entry.extra
            if extra is not NO_EXTRA and found is None:
                contained = extra.contained
                if (contained and len(contained) >= _MANY_REFS) or extra.target is not None:
                    found = self._found((oid,))
        if engine.pending_calls:
            engine.run_pending_calls()
        if found is not None:  # it is in our node's store, or it is not read as most are
            values = self._values(found)
            return values[0] if values else self.get((ref,), timeout)[0]
        kind = blob[-1]
        try:
            if kind == PLAIN:
                return loads(blob)  # as `deserialize` would
            value = deserialize(blob)
        except Exception as error:  # unpickling runs user code
            raise unreadable(error) from error
        if kind == ERROR:
            with engine.lock:
                self._unhandled_errors.seen((oid,))
            try:
                raise raised_form(value)
            finally:
                del value  # as in `_values`
        return value

    def get(self, refs: Sequence[ObjectRef[Any]], timeout: float | None) -> list[Any]:
        """The values of the refs, in order.

        Raises:
            GetTimeoutError: not all were there in time. Anything a task raised, and RayError for what was lost.
        """
        engine = self._engine
        entries = self._table.entries
        with engine.lock:
            if released:
                self._context.drain()
            oids = [ref._id for ref in refs]
            try:
                missing = [
                    oid for oid in oids if (entry := entries[oid]).state != INLINE and entry.extra.mapping is None
                ]
            except KeyError as unknown:
                raise unknown_ref(unknown.args[0]) from None
            if missing:
                pins = self._table.pins
                pins.begin_read(oids)
                try:
                    self._await_local(missing, timeout, oids if len(missing) < len(oids) else ())
                finally:
                    pins.end_read(oids)
            elif engine.dirty:
                engine.flush()
            found = self._found(oids)
        if engine.pending_calls:
            engine.run_pending_calls()
        try:
            values = self._values(found)
        except BaseException:
            with engine.lock:
                self._unhandled_errors.seen(oids)
            raise
        if len(values) < len(found):
            return self.get(refs, timeout)  # what was refused to us was requested again by another thread
        return values

    def _has_error(self, oids: Sequence[bytes]) -> bool:
        """True where one of these objects is an error already: then nothing is waited for (lock held)."""
        entries = self._table.entries
        return any((entry := entries[oid]).state == INLINE and entry.value[-1] == ERROR for oid in oids)

    def _found(self, oids: Sequence[bytes]) -> list[Any]:
        """The blobs of these objects: in a message, a view of the store, or a file to be read; None: it is not there
        (lock held)."""
        found: list[Any] = []
        pins = self._table.pins
        entries = self._table.entries
        for oid in oids:
            entry = entries[oid]
            if entry.state == INLINE:
                found.append(entry.value)
            elif entry.extra.mapping is not None:
                # Made for all of them first: what an error below does not let be read gives its view back too.
                mapping, gone = entry.extra.mapping, partial(defer_release, (oid,))
                view = None
                if mapping.size >= self._device_view_size and "torch" in modules:
                    view = self._device_view(mapping, gone)
                if view is None:
                    view = self._arenas[mapping.node].pinned_view(mapping.offset, mapping.size, gone)
                found.append(view)
                pins.begin_view(oid)
            elif oid in pins.files:
                found.append(self._table.pins.begin_file(oid))
            elif oid in pins.refused:
                found.append(serialize_error(store_full_error(pins.refused[oid])))
            else:
                found.append(None)  # another one failed first
            extra = entry.extra
            if extra is not NO_EXTRA and type(found[-1]) in _BLOBS:
                if extra.target is not None and not is_error(found[-1]):
                    found[-1] = _TargetedValue(found[-1], *extra.target)
                elif extra.contained and len(extra.contained) >= _MANY_REFS:
                    found[-1] = _ValueRefs(found[-1], extra.contained)
        return found

    def _device_view(self, mapping: ArenaMapping, gone: Callable[[], object]) -> memoryview | None:
        """A view from which a device copies at full speed; None: there is none."""
        find = self._context.extensions.features.device_view
        if find is None or self._context.local.plain_views:
            return None
        return find(self._context, self._arenas[mapping.node], mapping.offset, mapping.size, gone)

    def _read_file(self, msg: m.OnDisk) -> memoryview | bytes | None:
        """The blob of what the store has no room for, in memory of our own; an error's where we cannot read it; None:
        no process can, and the store was asked to get it otherwise."""
        lost = ""
        try:
            return read_private_copy(msg.path, msg.position, msg.size)
        except OSError as error:
            if error.errno in _UNREADABLE:
                lost = f"{error.strerror or error} (past the store)"
                return None
            text = f"object {msg.id.hex()} ({msg.size} bytes) is on disk; the object store has no room to bring it back"
            return serialize_error(store_full_error(f"{text}, and reading it past the store failed: {error}. {_ROOM}"))
        finally:
            with self._engine.lock:
                if lost:
                    self._table.pins.file_failed(msg.id, lost)
                else:
                    self._table.pins.end_file(msg.id)
                self._engine.flush()

    def _read_files(self, found: list[Any]) -> list[Any]:
        """The same blobs, with the bytes of files instead of their places. An interrupt leaves no file open."""
        blobs: list[Any] = []
        try:
            for item in found:
                blobs.append(self._read_file(item) if type(item) is m.OnDisk else item)
        except BaseException:
            with self._engine.lock:
                for item in found[len(blobs) + 1 :]:  # that one has been ended
                    if type(item) is m.OnDisk:
                        self._table.pins.end_file(item.id)
                self._engine.flush()
            raise
        return blobs

    def _values(self, found: list[Any], timed: bool = False) -> list[Any]:
        """The values of blobs; fewer where some are not there.

        Args:
            timed: none is a file, and the time is counted already where some are not of messages.

        Raises:
            The error that is one of them.
        """
        kinds = set(map(type, found))
        if object_time.counts and not timed and kinds != _IN_MESSAGES:
            outermost = object_time.begin()
            try:
                return self._values(self._read_files(found), True)
            finally:
                if outermost:
                    object_time.end()
        if m.OnDisk in kinds:
            found = self._read_files(found)
        values: list[Any] = []
        error: BaseException | None = None
        try:
            for item in found:
                if type(item) is bytes:
                    kind = item[-1]
                    if kind == PLAIN:
                        values.append(loads(item))  # as `deserialize` would
                    elif kind == ERROR:
                        error = error if error is not None else deserialize(item)
                    else:
                        values.append(deserialize(item))
                elif type(item) is _ValueRefs:
                    values.append(deserialize(item.blob, LocalRefs(item.refs).load))
                elif type(item) is _TargetedValue:
                    value, problem = self._context.extensions.get(item.extension).targeted_value(item.target, item.blob)
                    values.append(value)
                    error, problem = error if error is not None else problem, None
                elif item is not None:
                    values.append(deserialize(item))
        except Exception as cause:  # unpickling runs user code
            raise unreadable(cause) from cause
        if error is not None:
            try:
                raise raised_form(error)
            finally:
                del error  # or its traceback, through this frame, keeps it and what the frames above hold
        return values

    def only_fetches(self) -> bool:
        """True if all objects that threads wait to read exist: they have to come here (lock held)."""
        entries, waits = self._table.entries, self._table.pins.being_read
        return bool(waits) and not any(
            (entry := entries.get(oid)) is None or entry.state == PENDING
            for oids in waits
            for oid in islice(oids, _MOST_LOOKED_AT)
        )

    def _await_local(self, oids: list[bytes], timeout: float | None, among: Sequence[bytes] = ()) -> None:
        """Wait for objects (lock held); not for long where another one of those that they are `among` is an error."""
        if self._context.dead is not None:
            self._context.check_alive()
        waiter = Waiter(len(oids), None, True)
        want = self._table.wait_local
        for oid in oids:
            if want(oid, waiter):
                waiter.count -= 1
        deadline = None if timeout is None else monotonic() + timeout
        if among and waiter.count > 0:  # they are looked through only where nearly all would not have come meanwhile
            soon = monotonic() + _ERROR_DELAY
            in_time = (deadline is None or soon < deadline) and self._context.block(waiter, soon)
            if not in_time and self._has_error(among):
                self._table.remove_waiter(oids, waiter)
                return
        if not self._context.block(waiter, deadline):
            self._table.remove_waiter(oids, waiter)
            open_ids = [oid for oid in oids if not self._table.entries[oid].available]
            if open_ids:
                raise GetTimeoutError(self._explain(open_ids, timeout))
        elif waiter.count < 0 or not waiter.eager:
            self._table.remove_waiter(oids, waiter)

    def when_ready_here(self, ref: ObjectRef[Any], call: Callable[[], object]) -> None:
        """Call `call()` (from any thread, no lock held) once the value can be read in this process.

        It must not wait for anything: the thread that drives the engine may be the one that makes the call.
        """
        engine = self._engine
        with engine.lock:
            waiter = Waiter(callback=lambda: engine.call_soon(call))
            if self._table.wait_local(ref._id, waiter):
                engine.call_soon(call)
            else:
                self._context.check_alive()
            engine.flush()
            engine.listen()
        engine.run_pending_calls()

    def when_available(self, ref: ObjectRef[Any], call: Callable[[Any, BaseException | None], object]) -> None:
        """Call `call(value, None)` or `call(None, error)` once the result is known, in a thread of its own."""

        def report() -> None:
            try:
                value = self.get([ref], None)[0]
            except BaseException as error:
                call(None, error)
            else:
                call(value, None)

        self._callbacks.start()
        self.when_ready_here(ref, lambda: self._callbacks.put(report))

    def when_ready(self, ref: ObjectRef[Any], call: Callable[[BaseException | None], object]) -> Callable[[], None]:
        """Call `call(None)` once the object exists, here or elsewhere; at once if it does, else from any thread.

        It must not wait for anything. It gets an error where this node's raylet dies before, and is not called after
        `shutdown()`, or where no ref to the object is left in this process.

        Returns:
            A function that withdraws the call.
        """
        context, table, oid = self._context, self._table, ref._id

        def ready() -> None:
            entry = table.entries.get(oid)
            if entry is not None and entry.local > 0:
                self._engine.call_soon(report)

        def report() -> None:
            if current.process is context:
                call(LocalRayletDiedError(context.dead) if context.dead is not None else None)

        def withdraw() -> None:
            with self._engine.lock:
                table.remove_waiter((oid,), waiter)

        waiter = Waiter(callback=ready)
        with self._engine.lock:
            context.check_alive()
            exists = table.wait_ready(oid, waiter)
            self._engine.flush()
            self._engine.listen()
        if exists:
            call(None)
        return withdraw

    def when_out_of_scope(self, ref: ObjectRef[Any], call: Callable[[bytes], object]) -> bool:
        """Call `call(id)`, in a thread for such calls, once no process holds a ref to an object of ours, and no task
        that takes it is under way; also when it is freed by hand.

        Returns:
            False, and no call comes, where that is so already.

        Raises:
            ValueError: the object is not ours.
        """
        oid = ref._id
        if owner_of(oid) != self._context.me:
            raise ValueError(
                f"Cannot register an out-of-scope/freed callback for object {oid.hex()}: it is not owned by this "
                "worker. hint: register it in the process that made the object, or submitted its task"
            )
        with self._engine.lock:
            entry = self._table.entries.get(oid)
            if entry is None or entry.state == LINEAGE_ONLY:
                return False
            self._out_of_scope.start()
            self._table.when_freed(oid, lambda: self._out_of_scope.put(partial(call, oid)))
        return True

    def is_private(self, blob: bytes) -> bool:
        """True unless the blob is the value of an object, which this process may read again, or send to another one."""
        with self._engine.lock:
            return not any(entry.value is blob for entry in self._table.entries.values())

    def load_slots(self, inline: list[bytes], refs: list[m.ArgRef] | None) -> list[Any]:
        """The values of a task's top-level ref arguments: inline, or fetched from node stores."""
        held = []
        with self._engine.lock:
            for ref in refs or ():
                self._table.refs.ref_deserialized(ref.id, self._context.local.protected)
                if ref.nodes:  # else it is made again just now: its owner will know
                    self._table.set_locations(ref.id, ref.size, ref.nodes)
                held.append(new_ref(ref.id))
        fetched = iter(self._arguments(held) if held else ())
        values = []
        for blob in inline:
            value = deserialize(blob) if blob else next(fetched)
            if blob and blob[-1] == ERROR:
                raise raised_form(value)  # only constructors get here: a task with a failed argument is not sent
            values.append(value)
        return values

    def _arguments(self, refs: list[ObjectRef[Any]]) -> list[Any]:
        outermost = object_time.begin()
        try:
            return self.get(refs, None)
        finally:
            if outermost:
                object_time.end()


def unknown_ref(oid: bytes) -> RaySystemError:
    """The error for a ref that this process does not know."""
    return RaySystemError(f"ObjectRef({oid.hex()}) is not of this session; hint: was hpcray.shutdown() called since?")


def unreadable(error: Exception) -> RayError:
    """Return what `get` raises for a value that does not unpickle, or whose tensors are lost or do not come in time."""
    if isinstance(error, (ObjectLostError, GetTimeoutError)):
        return copy.copy(error)
    return RaySystemError(error, "".join(traceback.format_exception(error)))


def raised_form(error: BaseException) -> BaseException:
    """Return what `get` raises for a stored error: also an instance of the user's class, with its remote traceback."""
    if isinstance(error, RayTaskError):
        return error.as_instanceof_cause()
    return error


# ------------------------------------------------------------ unhandled errors
# Errors of tasks that were never looked at before their last ref went: they are logged.

_SWITCH = "RAY_IGNORE_UNHANDLED_ERRORS"


def log_unhandled(error: BaseException) -> None:
    """Log an error that was never looked at."""
    logging.getLogger("hpcray").error("Unhandled error (suppress with '%s=1'): %s", _SWITCH, error)


class UnhandledErrors:
    """The objects of one process that are errors, and that nothing has looked at: no `get`, task or other process.

    All of it costs nothing where tasks do not fail.

    Attributes:
        reporters: called with each error that is freed unseen, without the lock.
    """

    reporters: ClassVar[list[Callable[[BaseException], None]]] = [log_unhandled]

    def __init__(self, context: CoreWorkerContext) -> None:
        self._table, self._engine = context.table, context.engine
        self._unseen: dict[bytes, bytes] = {}

    def watch(self, task: PendingTask, blob: bytes) -> None:
        """All returns of a task are about to become this error (lock held)."""
        for index in range(task.num_returns):
            self._watch(task.id + return_index(index), blob)

    def watch_reply(self, task: PendingTask, msg: m.TaskReply) -> None:
        """The returns of a task that raised are about to come. Those that a generator yielded before are no errors
        (lock held)."""
        for index, item in enumerate(msg.returns if task.num_returns > 0 else ()):
            if item.value and is_error(item.value):
                self._watch(task.id + return_index(index), item.value)

    def _watch(self, oid: bytes, blob: bytes) -> None:
        entry = self._table.entries.get(oid)
        awaited = entry is None or entry.state != PENDING or entry.subscribers
        if not awaited and oid not in self._unseen:
            self._unseen[oid] = blob
            self._table.when_freed(oid, lambda: self._freed(oid))

    def seen(self, oids: Iterable[bytes]) -> None:
        """Forget those of these objects that are errors: they were looked at (lock held)."""
        for oid in oids if self._unseen else ():
            entry = self._table.entries.get(oid)
            if entry is not None and entry.state == INLINE:
                self._unseen.pop(oid, None)

    def _freed(self, oid: bytes) -> None:
        blob = self._unseen.pop(oid, None)
        if blob is not None and _SWITCH not in os.environ:
            self._engine.call_soon(lambda: self._report(blob))

    def _report(self, blob: bytes) -> None:
        error = deserialize(blob)
        if isinstance(error, (RayTaskError, WorkerCrashedError, NodeDiedError)):
            for report in self.reporters:
                report(error)
