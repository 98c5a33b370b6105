"""Reading objects: get, wait, and calls that come when a value is there."""

from __future__ import annotations

import errno
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pickle import loads
from typing import Any

from hpcray.base.errors import GetTimeoutError, LocalRayletDiedError, RaySystemError, RayTaskError
from hpcray.base.fullness import store_full
from hpcray.base.ids import node_of
from hpcray.core.owner.table import INLINE, PENDING, ObjectTable, Waiter
from hpcray.host.arena import Arena
from hpcray.host.direct_io import read_privately
from hpcray.runtime.engine import Engine, monotonic
from hpcray.runtime.refs import ObjectRef, died, new_ref, released
from hpcray.wire import messages as m
from hpcray.wire.serialization import ERROR, PLAIN, deserialize, serialize_error

_ROOM = "hint: drop references and arrays that are no longer needed"
_UNREADABLE = {
    None, errno.EIO, errno.ENXIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.ESTALE, errno.EREMOTEIO,
    errno.ETIMEDOUT,
}  # fmt: skip
"""Errors of a disk that has lost the bytes (None: the file ends before), not of a process that lacks something."""
_NOT_URGENT = 1
"""Priority of what somebody asks about (`wait`): behind what somebody waits to read."""


class ThreadState(threading.local):
    """What this thread executes: the message. protected: refs that came in its arguments (None outside of tasks).
    since: when that began."""

    protected: list[bytes] | None = None
    task: m.PushTask | m.ActorCall | None = None
    name: str = ""
    since: float = 0.0


class Reader:
    """The reading half of a process: what waits for objects, and turns their bytes into values.

    Attributes:
        local: what the calling thread executes.
        arena: of our node. arenas: all in which we can read, by node.
        dead: why nothing can be asked for any more; None while it can.
        blocker: how a worker waits inside a task; None elsewhere.
    """

    def __init__(self, me: bytes, engine: Engine, table: ObjectTable, arena: Arena) -> None:
        self.me = me
        self.engine = engine
        self.table = table
        self.arena = arena
        self.arenas = {node_of(me): arena}
        self.local = ThreadState()
        self.dead: str | None = None
        self.blocker: Callable[[Waiter, float | None], bool] | None = None
        self._callbacks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._teller: threading.Thread | None = None

    def check_alive(self) -> None:
        """Raise LocalRayletDiedError when nothing can be asked for any more."""
        if self.dead is not None:
            raise LocalRayletDiedError(self.dead)

    def drain(self) -> None:
        """Take deferred deaths of refs and views into account (lock held)."""
        self.table.bury(released)

    # ------------------------------------------------------------ get, wait

    def get_one(self, ref: ObjectRef[Any], timeout: float | None) -> Any:
        """The value of one ref: what `get` does, at less cost for a value that comes in a message."""
        engine, entries, oid = self.engine, self.table.entries, ref._id
        with engine.lock:
            if released:
                self.drain()
            entry = entries.get(oid)
            if entry is None:
                raise foreign(oid)
            if entry.state != INLINE and entry.mapping is None:
                oids = [oid]
                gathering = self.table.pins.gathering
                gathering.append(oids)
                try:
                    self._await_local(oids, timeout)
                finally:
                    gathering.remove(oids)
            elif engine.dirty:
                engine.flush()
            found = None if entry.state == INLINE else self._found((oid,))
            blob = entry.value
        if engine.after:
            engine.run_after()
        if found is not None:  # it is in our node's store
            values = self._values(found)
            return values[0] if values else self.get((ref,), timeout)[0]
        kind = blob[-1]
        if kind == PLAIN:
            return loads(blob)  # as `deserialize` would
        value = deserialize(blob)
        if kind == ERROR:
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
        engine = self.engine
        entries = self.table.entries
        with engine.lock:
            if released:
                self.drain()
            oids = [ref._id for ref in refs]
            try:
                missing = [oid for oid in oids if (entry := entries[oid]).state != INLINE and entry.mapping is None]
            except KeyError as unknown:
                raise foreign(unknown.args[0]) from None
            if missing:
                gathering = self.table.pins.gathering
                gathering.append(oids)
                try:
                    self._await_local(missing, timeout)
                finally:
                    gathering.remove(oids)
            elif engine.dirty:
                engine.flush()
            found = self._found(oids)
        if engine.after:
            engine.run_after()
        values = self._values(found)
        if len(values) < len(found):
            return self.get(refs, timeout)  # what was refused to us has been asked for again by another thread
        return values

    def _found(self, oids: Sequence[bytes]) -> list[Any]:
        """The blobs of these objects: in a message, a view of the store, or a file to be read; None: it is not there
        (lock held)."""
        found: list[Any] = []
        pins = self.table.pins
        for oid in oids:
            entry = self.table.entries[oid]
            if entry.state == INLINE:
                found.append(entry.value)
            elif entry.mapping is not None:
                # Made for all of them first: what an error below does not let be read gives its view back too.
                mapping, gone = entry.mapping, partial(died, (oid,))
                found.append(self.arenas[mapping.node].pinned_view(mapping.offset, mapping.size, gone))
                mapping.views += 1
            elif oid in pins.files:
                found.append(self.table.begin_file(oid))
            elif oid in pins.refused:
                found.append(serialize_error(store_full(pins.refused[oid])))
            else:
                found.append(None)  # another one failed first
        return found

    def _read_file(self, msg: m.OnDisk) -> memoryview | bytes | None:
        """The blob of what the store has no room for, in memory of our own; an error's where we cannot read it; None:
        nobody can, and the store has been told to get it otherwise."""
        lost = ""
        try:
            return read_privately(msg.path, msg.position, msg.size)
        except OSError as error:
            if error.errno in _UNREADABLE:
                lost = f"{error.strerror or error} (past the store)"
                return None
            text = f"object {msg.id.hex()} ({msg.size} bytes) is on disk; the object store has no room to bring it back"
            return serialize_error(store_full(f"{text}, and reading it past the store failed: {error}. {_ROOM}"))
        finally:
            with self.engine.lock:
                if lost:
                    self.table.file_failed(msg.id, lost)
                else:
                    self.table.end_file(msg.id)
                self.engine.flush()

    def _read_files(self, found: list[Any]) -> list[Any]:
        """The same blobs, with the bytes of files instead of their places. An interrupt leaves no file open."""
        blobs: list[Any] = []
        try:
            for item in found:
                blobs.append(self._read_file(item) if type(item) is m.OnDisk else item)
        except BaseException:
            with self.engine.lock:
                for item in found[len(blobs) + 1 :]:  # that one has been ended
                    if type(item) is m.OnDisk:
                        self.table.end_file(item.id)
                self.engine.flush()
            raise
        return blobs

    def _values(self, found: list[Any]) -> list[Any]:
        """The values of blobs; fewer where some are not there.

        Raises:
            The error that is one of them.
        """
        if m.OnDisk in set(map(type, found)):
            found = self._read_files(found)
        values: list[Any] = []
        error: BaseException | None = None
        for item in found:
            if type(item) is bytes:
                kind = item[-1]
                if kind == PLAIN:
                    values.append(loads(item))  # as `deserialize` would
                elif kind == ERROR:
                    error = error if error is not None else deserialize(item)
                else:
                    values.append(deserialize(item))
            elif item is not None:
                values.append(deserialize(item))
        if error is not None:
            try:
                raise raised_form(error)
            finally:
                del error  # or its traceback, through this frame, keeps it and what the frames above hold
        return values

    def _await_local(self, oids: list[bytes], timeout: float | None) -> None:
        if self.dead is not None:
            self.check_alive()
        waiter = Waiter(len(oids), None, True)
        want = self.table.want_local
        for oid in oids:
            if want(oid, waiter):
                waiter.count -= 1
        if not self.block(waiter, None if timeout is None else monotonic() + timeout):
            self.table.forget(oids, waiter)
            open_ids = [oid for oid in oids if not self.table.entries[oid].available]
            if open_ids:
                raise GetTimeoutError(self.explain(open_ids, timeout))
        elif waiter.count < 0 or not waiter.eager:
            self.table.forget(oids, waiter)

    def explain(self, missing: Sequence[bytes], timeout: float | None) -> str:
        """Why these objects are not there after `timeout` seconds (lock held)."""
        raise NotImplementedError

    def block(self, waiter: Waiter, deadline: float | None) -> bool:
        """Wait for `waiter` (lock held), in a worker through the hook that lends its CPU meanwhile."""
        if waiter.count <= 0:
            self.engine.flush()
            return True
        if self.blocker is not None:
            return self.blocker(waiter, deadline)
        return self.engine.wait(waiter, deadline)

    def wait(
        self, refs: Sequence[ObjectRef[Any]], num_returns: int, timeout: float | None, fetch_local: bool
    ) -> tuple[list[ObjectRef[Any]], list[ObjectRef[Any]]]:
        """Wait until `num_returns` of the refs are ready; both lists keep the order of `refs`."""
        with self.engine.lock:
            self.check_alive()
            self.drain()
            done, rest = self._split(refs, num_returns, fetch_local)
            if len(done) < num_returns:
                waiter = Waiter(num_returns - len(done))
                for ref in rest:
                    if fetch_local:
                        self.table.want_local(ref._id, waiter, _NOT_URGENT)
                    else:
                        self.table.want_ready(ref._id, waiter)
                enough = self.block(waiter, None if timeout is None else monotonic() + timeout)
                self.table.forget([ref._id for ref in rest], waiter)
                done, rest = self._split(refs, num_returns, fetch_local)
                if enough and len(done) < num_returns:  # they came, but not all of them had room here together
                    done, rest = self._split(refs, num_returns, False)
            else:
                self.engine.flush()
        self.engine.run_after()
        return done, rest

    def _split(
        self, refs: Sequence[ObjectRef[Any]], num_returns: int, local: bool
    ) -> tuple[list[ObjectRef[Any]], list[ObjectRef[Any]]]:
        """The first `num_returns` refs that are ready (`local`: whose value is here), and all others."""
        entries, pins = self.table.entries, self.table.pins
        odd = pins.refused or pins.files
        done: list[ObjectRef[Any]] = []
        rest: list[ObjectRef[Any]] = []
        for index, ref in enumerate(refs):
            entry = entries.get(ref._id)
            if entry is None:
                raise foreign(ref._id)
            if not local:
                ready = entry.state != PENDING
            elif entry.state == INLINE or entry.mapping is not None:
                ready = True
            else:
                ready = bool(odd) and (ref._id in pins.refused or ref._id in pins.files)
            if ready:
                done.append(ref)
                if len(done) == num_returns:
                    rest.extend(refs[index + 1 :])
                    break
            else:
                rest.append(ref)
        return done, rest

    def when_ready_here(self, ref: ObjectRef[Any], call: Callable[[], object]) -> None:
        """Call `call()` (from any thread, no lock held) once the value can be read in this process.

        It must not wait for anything: the thread that drives the engine may be the one that makes the call.
        """
        engine = self.engine
        with engine.lock:
            waiter = Waiter(callback=lambda: engine.later(call))
            if self.table.want_local(ref._id, waiter):
                engine.later(call)
            else:
                self.check_alive()
            engine.flush()
        engine.run_after()

    def when_available(self, ref: ObjectRef[Any], call: Callable[[Any, BaseException | None], object]) -> None:
        """Call `call(value, None)` or `call(None, error)` once it can be told, in a thread for that: it may wait."""

        def tell() -> None:
            try:
                value = self.get([ref], None)[0]
            except BaseException as error:
                call(None, error)
            else:
                call(value, None)

        with self.engine.lock:
            if self._teller is None:
                self._teller = threading.Thread(target=self._tell_all, name="hpcray-callbacks", daemon=True)
                self._teller.start()
        self.when_ready_here(ref, lambda: self._callbacks.put(tell))

    def _tell_all(self) -> None:
        while (tell := self._callbacks.get()) is not None:
            try:
                tell()
            except BaseException:
                traceback.print_exc()
            del tell

    def load_slots(self, inline: list[bytes], refs: list[m.ArgRef] | None) -> list[Any]:
        """The values of a task's top-level ref arguments: inline, or fetched from node stores."""
        held = []
        with self.engine.lock:
            for ref in refs or ():
                self.table.arrived(ref.id, self.local.protected)
                self.table.located(ref.id, ref.size, ref.nodes)
                held.append(new_ref(ref.id))
        fetched = iter(self.get(held, None) if held else ())
        values = []
        for blob in inline:
            value = deserialize(blob) if blob else next(fetched)
            if blob and blob[-1] == ERROR:
                raise raised_form(value)  # only constructors get here: a task with a failed argument is not sent
            values.append(value)
        return values


def foreign(oid: bytes) -> RaySystemError:
    """The error for a ref that this process does not know."""
    return RaySystemError(f"ObjectRef({oid.hex()}) is not of this session; hint: was hpcray.shutdown() called since?")


def raised_form(error: BaseException) -> BaseException:
    """What `get` raises for a stored error: also an instance of the user's class, with its remote traceback."""
    if isinstance(error, RayTaskError):
        return error.as_instanceof_cause()
    return error
