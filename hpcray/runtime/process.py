"""What every driver and worker is: a process that owns objects, borrows others, talks to its raylet and its peers."""

from __future__ import annotations

import itertools
import os
import queue
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from hpcray.base.config import Config
from hpcray.base.errors import (
    GetTimeoutError,
    LocalRayletDiedError,
    ObjectLostError,
    OwnerDiedError,
    RaySystemError,
    RayTaskError,
)
from hpcray.base.ids import PUT_INDEX, node_of, raylet_of, show_proc
from hpcray.core.owner.table import INLINE, PENDING, STORED, ObjectTable, Waiter
from hpcray.host.arena import Arena
from hpcray.runtime.engine import Engine, monotonic
from hpcray.runtime.gcs_client import GcsClient
from hpcray.runtime.links import greet
from hpcray.runtime.refs import ObjectRef, current, died, new_ref, released
from hpcray.runtime.store_client import StoreClient
from hpcray.runtime.submission import Submitter
from hpcray.wire import messages as m
from hpcray.wire.serialization import ERROR, Serialized, deserialize, serialize, serialize_error

_sessions = itertools.count()
_LAST_WORDS = 0.3


class _Task(threading.local):
    """What this thread executes. protected: refs that arrived in its arguments (None outside of tasks)."""

    protected: list[bytes] | None = None
    task: bytes | None = None
    name: str = ""


class Process:
    """One per interpreter. `connect` makes it."""

    def __init__(self, sock: socket.socket, welcome: m.Welcome, arena: Arena, kind: str, session_dir: str) -> None:
        self.me = welcome.proc
        self.node = node_of(welcome.proc)
        self.node_id = welcome.node_id
        self.host = welcome.host
        self.kind = kind
        self.job = welcome.job
        self.session_dir = session_dir
        self.cluster_size = welcome.cluster_size
        self.config = Config(**welcome.config)
        self.arena = arena
        self.local = _Task()
        self.dead: str | None = None
        self.blocker: Callable[[Waiter, float | None], bool] | None = None
        self.on_exit: Callable[[int], None] = lambda code: None
        self._raylet = raylet_of(self.node)
        # Refs of an earlier session of this interpreter may still live: their ids must never be ours.
        self._counter = (next(_sessions) & 0xFF) << 32
        released.clear()
        self._pinned: list[ObjectRef[Any]] = []
        self._warned: set[str] = set()
        self._callbacks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._teller: threading.Thread | None = None
        self.handlers: dict[type, Callable[[bytes, Any], None]] = {}
        self.engine = Engine(self.me, session_dir)
        send = self.engine.send
        self.table = ObjectTable(self.me, send, self.engine.notify, self._lost_blob)
        self.submitter = Submitter(self)
        self.gcs = GcsClient(self)
        self.store = StoreClient(self)
        self.handlers.update(self._message_handlers())
        self.handlers.update(self.store.handlers())
        self.handlers.update(self.submitter.handlers())
        self._sock = sock

    def start(self, listener: socket.socket | None = None) -> None:
        """Begin to read and write; every handler is in `handlers` by now."""
        self.engine.start(self._sock, self.handlers, self._peer_lost, self.drain, listener)

    def _message_handlers(self) -> dict[type, Callable[[bytes, Any], None]]:
        table = self.table
        return {
            m.ObjectGet: lambda src, msg: table.on_object_get(src, msg.id),
            m.ObjectReady: lambda _, msg: table.on_object_ready(msg),
            m.BorrowAdd: table.on_borrow_add,
            m.BorrowAck: lambda _, msg: self._on_borrow_ack(msg),
            m.BorrowDrop: lambda _, msg: table.on_borrow_drop(msg),
            m.AddLocation: lambda _, msg: table.on_add_location(msg),
            m.GcsReply: lambda _, msg: self.gcs.on_reply(msg),
            m.SetJob: lambda _, msg: self._on_set_job(msg),
            m.Exit: lambda _, msg: self.on_exit(msg.code),
            m.ProcDied: lambda _, msg: self.process_died(msg.proc, msg.reason),
            m.Undeliverable: lambda _, msg: self.process_died(msg.proc, msg.reason),
            m.NodeDied: lambda _, msg: self._node_died(msg),
        }

    # ------------------------------------------------------------ references

    def next_task_id(self) -> bytes:
        """A fresh task id (lock held)."""
        self._counter += 1
        return self.me + self._counter.to_bytes(5, "big")

    def ref_arrived(self, oid: bytes) -> None:
        """A ref was deserialized (or made by hand) in this thread."""
        engine = self.engine
        with engine.lock:
            self.table.arrived(oid, self.local.protected)
            if engine.dirty:
                engine.flush()

    def pin_forever(self, ref: ObjectRef[Any]) -> None:
        """A ref was pickled by somebody else's pickler: nobody counts that copy, so the object stays."""
        self._pinned.append(ref)

    def drain(self) -> None:
        """Take deferred deaths of refs and views into account (lock held)."""
        while released:
            item = released.popleft()
            if type(item) is bytes:
                self.table.release(item)
            else:
                self.table.view_died(item[0])

    # ------------------------------------------------------------ put

    def put(self, value: Any) -> ObjectRef[Any]:
        """Make an object of a value. Small ones involve no other process.

        Raises:
            TypeError: it cannot be pickled. ObjectStoreFullError: no room in the node's store.
        """
        blob, refs = serialize(value)
        limit = self.config.inline_limit
        if isinstance(blob, Serialized):
            if blob.size > limit:
                return self._put_large(blob, refs)
            blob = blob.join()
        elif len(blob) > limit:
            return self._put_large(blob, refs)
        engine = self.engine
        with engine.lock:
            if len(released) > 256:
                self.drain()
                engine.flush()
            self._counter += 1
            oid = self.me + self._counter.to_bytes(5, "big") + PUT_INDEX
            entry = self.table.create(oid)
            entry.state = INLINE
            entry.value = blob
            entry.local = 1
            if refs:
                entry.contained = refs
        return new_ref(oid)

    def _put_large(self, blob: bytes | Serialized, refs: list[Any]) -> ObjectRef[Any]:
        with self.engine.lock:
            oid = self.next_task_id() + PUT_INDEX
            self.table.create(oid).local = 1
        ref = new_ref(oid)
        offset, size = self.store.write(oid, blob)
        with self.engine.lock:
            self.table.created_here(oid, offset, size, self.node, refs or None)
            self.engine.flush()
        return ref

    # ------------------------------------------------------------ get, wait

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
            try:
                missing = [
                    oid for oid in [ref._id for ref in refs]
                    if (entry := entries[oid]).state != INLINE and entry.mapping is None
                ]  # fmt: skip
            except KeyError as unknown:
                raise foreign(unknown.args[0]) from None
            if missing:
                self._await_local(missing, timeout)
            elif engine.dirty:
                engine.flush()
            found: list[Any] = []
            for ref in refs:
                entry = entries[ref._id]
                if entry.state == INLINE:
                    found.append(entry.value)
                elif entry.mapping is not None:
                    entry.mapping.views += 1
                    found.append(entry.mapping)
                else:
                    found.append(None)  # another one failed first
        self.engine.run_after()
        values: list[Any] = []
        error: BaseException | None = None
        for ref, item in zip(refs, found, strict=True):
            if type(item) is bytes:
                value = deserialize(item)
                if item[-1] == ERROR:
                    error = error or value
                else:
                    values.append(value)
            elif item is not None:
                view = self.arena.pinned_view(item.offset, item.size, partial(died, (ref._id,)))
                values.append(deserialize(view))
                del view
        if error is not None:
            raise raised_form(error)
        return values

    def _await_local(self, oids: list[bytes], timeout: float | None) -> None:
        self.check_alive()
        waiter = Waiter(len(oids), eager=True)
        for oid in oids:
            if self.table.want_local(oid, waiter):
                waiter.count -= 1
        if not self.block(waiter, None if timeout is None else monotonic() + timeout):
            self.table.forget(oids, waiter)
            open_ids = [oid for oid in oids if not self.table.entries[oid].available]
            if open_ids:
                raise GetTimeoutError(
                    f"get timed out after {timeout} s: {len(open_ids)} of {len(oids)} objects are not available, "
                    f"first {open_ids[0].hex()} (owner {show_proc(open_ids[0])})"
                )
        elif waiter.count < 0 or len(oids) > 1:
            self.table.forget(oids, waiter)

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
                want = self.table.want_local if fetch_local else self.table.want_ready
                waiter = Waiter(num_returns - len(done))
                for ref in rest:
                    want(ref._id, waiter)
                self.block(waiter, None if timeout is None else monotonic() + timeout)
                self.table.forget([ref._id for ref in rest], waiter)
                done, rest = self._split(refs, num_returns, fetch_local)
            else:
                self.engine.flush()
        self.engine.run_after()
        return done, rest

    def _split(
        self, refs: Sequence[ObjectRef[Any]], num_returns: int, local: bool
    ) -> tuple[list[ObjectRef[Any]], list[ObjectRef[Any]]]:
        """The first `num_returns` refs that are ready (`local`: whose value is here), and all others."""
        entries = self.table.entries
        done: list[ObjectRef[Any]] = []
        rest: list[ObjectRef[Any]] = []
        for index, ref in enumerate(refs):
            entry = entries.get(ref._id)
            if entry is None:
                raise foreign(ref._id)
            if entry.available if local else entry.state != PENDING:
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
                entry = self.table.entries[ref.id]
                if entry.state == PENDING and ref.id[:8] != self.me:
                    entry.state, entry.size, entry.nodes = STORED, ref.size, ref.nodes
                held.append(new_ref(ref.id))
        fetched = iter(self.get(held, None) if held else ())
        values = []
        for blob in inline:
            value = deserialize(blob) if blob else next(fetched)
            if blob and blob[-1] == ERROR:
                raise raised_form(value)  # only constructors get here: a task with a failed argument is not sent
            values.append(value)
        return values

    def set_job(self, job: m.JobInfo, namespace: str) -> None:
        """Tell the cluster what this driver's tasks need to know (its sys.path, …); `namespace` is for us alone."""
        self.job = msgspec.structs.replace(job, namespace=namespace)
        with self.engine.lock:
            self.engine.send(self._raylet, m.SetJob(job))
            self.engine.flush()

    def _on_set_job(self, msg: m.SetJob) -> None:
        known = self.job
        self.job = msgspec.structs.replace(msg.job, namespace=known.namespace) if known is not None else msg.job

    def _on_borrow_ack(self, msg: m.BorrowAck) -> None:
        self.table.on_borrow_ack(msg)
        if not self.table.unacked:
            self.submitter.acks_done()

    # ------------------------------------------------------------ death

    def _peer_lost(self, proc: bytes, reason: str) -> None:
        if proc == self._raylet:
            self.dead = f"the raylet of this node is gone ({reason})"
            self.on_exit(1)
            self.table.fail_all(self.dead)
            self.gcs.fail()
            self.store.fail()
            return
        leased = self.submitter.leases.workers.get(proc)
        if leased is None or not leased.inflight:
            self.process_died(proc, f"{show_proc(proc)}: {reason}")
            return
        # Its raylet knows how it died and will say so; until then nothing more is sent to it.
        leased.asked_back = True
        self.engine.add_timer(
            monotonic() + _LAST_WORDS, lambda now: self.process_died(proc, f"{show_proc(proc)}: {reason}")
        )

    def process_died(self, proc: bytes, reason: str) -> None:
        """A process of the job is gone (lock held)."""
        self.engine.drop_peer(proc)
        self.submitter.process_died(proc, reason)
        self.table.process_died(proc, reason)
        if not self.table.unacked:
            self.submitter.acks_done()

    def _node_died(self, msg: m.NodeDied) -> None:
        for proc in self.engine.peers_of(msg.node):
            self.process_died(proc, msg.reason)

    def check_alive(self) -> None:
        """Raise LocalRayletDiedError when nothing can be asked for any more."""
        if self.dead is not None:
            raise LocalRayletDiedError(self.dead)

    def _lost_blob(self, oid: bytes, reason: str, owner_died: bool) -> bytes:
        if self.dead is not None:
            return serialize_error(LocalRayletDiedError(self.dead))
        kind = OwnerDiedError if owner_died else ObjectLostError
        return serialize_error(kind(oid.hex(), show_proc(oid), reason))

    def close(self) -> None:
        """Leave the job: close every socket. The caller has told the raylet what it wants of it."""
        current.process = None
        with self.engine.lock:
            self.dead = self.dead or "hpcray.shutdown() was called"
            for oid, entry in list(self.table.entries.items()):
                if entry.local_waiters or entry.ready_waiters:
                    self.table.on_store_error(m.StoreError(oid, "closed", self.dead))
            self.gcs.fail()
            self.store.fail()
        self.engine.run_after()
        self._callbacks.put(None)
        self.engine.close()
        self.arena.close()


def _forked() -> None:
    """A child that user code forked is nobody in the job: what it inherited belongs to its parent."""
    current.process = None
    current.worker = None


os.register_at_fork(after_in_child=_forked)


def foreign(oid: bytes) -> RaySystemError:
    """The error for a ref that this process does not know."""
    return RaySystemError(f"ObjectRef({oid.hex()}) is not of this session; hint: was hpcray.shutdown() called since?")


def raised_form(error: BaseException) -> BaseException:
    """What `get` raises for a stored error: also an instance of the user's class, with its remote traceback."""
    if isinstance(error, RayTaskError):
        return error.as_instanceof_cause()
    return error


def connect(session_dir: str, kind: str) -> Process:
    """Join the session in `session_dir` as a "driver", "attached" driver, or "worker". `start` it when it is complete.

    Raises:
        RaySystemError: no raylet answers there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(30.0)
        sock.connect(os.path.join(session_dir, "r.s"))
        greet(sock, m.Hello(os.getpid(), kind, b""))
        head, fds, _, _ = socket.recv_fds(sock, 4, 1, socket.MSG_CMSG_CLOEXEC)
        frame = (
            _read_exactly(sock, int.from_bytes(head + _read_exactly(sock, 4 - len(head)), "little")) if head else b""
        )
    except OSError as error:
        sock.close()
        raise RaySystemError(f"cannot join the session in {session_dir}: {error}") from error
    if not frame or not fds:
        sock.close()
        raise RaySystemError(f"the raylet of {session_dir} closed the connection; hint: is its job still running?")
    (welcome,) = m.decode(frame[16:])
    assert isinstance(welcome, m.Welcome)
    arena = Arena.attach(fds[0], welcome.arena_size)
    return Process(sock, welcome, arena, kind, session_dir)


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    parts = []
    while size > 0:
        part = sock.recv(size)
        if not part:
            raise ConnectionError("connection closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
