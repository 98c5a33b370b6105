"""What every driver and worker is: a process that owns objects, borrows others, talks to its raylet and its peers."""

from __future__ import annotations

import itertools
import math
import os
import socket
from collections.abc import Callable, Sequence
from pickle import dumps
from typing import Any

import msgspec

from hpcray.base.config import Config
from hpcray.base.errors import OufOfBandObjectRefSerializationException, RaySystemError
from hpcray.base.ids import PUT_INDEX, node_of, number_of, raylet_of, return_index, show_proc
from hpcray.core.owner.table import INLINE, ObjectTable
from hpcray.core.owner.tasks import Task
from hpcray.host.arena import Arena
from hpcray.host.peers import connect_private
from hpcray.runtime.ending import Ending
from hpcray.runtime.engine import Engine, monotonic
from hpcray.runtime.gcs_client import GcsClient
from hpcray.runtime.groups import Groups
from hpcray.runtime.links import greet
from hpcray.runtime.losses import Losses, lost_blob
from hpcray.runtime.progress import unavailable
from hpcray.runtime.reading import Reader
from hpcray.runtime.refs import ObjectRef, current, make_ref, new_ref, released
from hpcray.runtime.store_client import StoreClient
from hpcray.runtime.submission import Submitter
from hpcray.runtime.survey import RecordingTable, Survey
from hpcray.runtime.visiting import Visiting, map_arena
from hpcray.wire import messages as m
from hpcray.wire.serialization import PLAIN_END, SCALARS, Serialized, serialize
from hpcray.wire.views import view_tensors

_sessions = itertools.count()
_LAST_WORDS = 0.3
_MANY_DEAD = 256
_OUT_OF_BAND = "RAY_allow_out_of_band_object_ref_serialization"


class Process(Reader):
    """One per interpreter. `connect` makes it."""

    def __init__(self, sock: socket.socket, welcome: m.Welcome, arena: Arena, kind: str, session_dir: str) -> None:
        me = welcome.proc
        config = Config(**welcome.config)
        engine = Engine(me, session_dir, welcome.neighbours, config.spin)
        table = _table_kind(config)(me, engine.send, engine.notify, self._lost_blob, config.lineage_limit)
        super().__init__(me, engine, table, arena)
        self.node = node_of(welcome.proc)
        self.node_id = welcome.node_id
        self.host = welcome.host
        self.kind = kind
        self.job = welcome.job
        self.session_dir = session_dir
        self.cluster_size = welcome.cluster_size
        self.config = config
        self._inline_limit = config.inline_limit
        view_tensors(config.enable_zero_copy_torch_tensors)
        self.run = welcome.run
        self.head = welcome.head
        self.on_exit: Callable[[int], None] = lambda code: None
        self.on_death: Callable[[bytes], None] = lambda proc: None
        self._raylet = raylet_of(self.node)
        # Refs of an earlier session of this interpreter may still live: their ids must never be ours.
        self._counter = (next(_sessions) & 0xFF) << 32
        released.clear()
        self._pinned: list[ObjectRef[Any]] = []
        self._warned: set[str] = set()
        self.handlers: dict[type, Callable[[bytes, Any], None]] = {}
        self.submitter = Submitter(self)
        self.gcs = GcsClient(self)
        self.groups = Groups(self)
        self.store = StoreClient(self)
        self.visiting = Visiting(self, welcome.neighbours)
        table.visit(welcome.neighbours, self.visiting)
        self.losses = Losses(self)
        self.ending = Ending(self)
        self.survey = Survey(self)
        self.handlers.update(self._message_handlers())
        self.handlers.update(self.store.handlers())
        self.handlers.update(self.ending.handlers())
        self.handlers.update(self.submitter.handlers())
        self.handlers.update(self.survey.handlers())
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
            m.BorrowAck: lambda _, msg: table.on_borrow_ack(msg),
            m.BorrowDrop: lambda _, msg: table.on_borrow_drop(msg),
            m.BorrowTake: table.on_borrow_take,
            m.BorrowAsk: table.on_borrow_ask,
            m.BorrowEnd: table.on_borrow_end,
            m.AddLocation: lambda _, msg: table.on_add_location(msg),
            m.GcsReply: lambda _, msg: self.gcs.on_reply(msg),
            m.GroupState: lambda _, msg: self.groups.on_state(msg),
            m.SetJob: lambda _, msg: self._on_set_job(msg),
            m.Exit: lambda _, msg: self.on_exit(msg.code),
            m.ProcDied: lambda _, msg: self.process_died(msg.proc, msg.reason),
            m.Undeliverable: lambda _, msg: self.process_died(msg.proc, msg.reason),
            m.Knock: lambda src, msg: self.engine.knocked(src),
            m.ObjectLost: table.on_object_lost,
            m.NodeDied: lambda _, msg: self.losses.node_died(msg),
            m.HeadMoved: lambda _, msg: self._head_moved(msg),
        }

    # ------------------------------------------------------------ references

    def next_task_id(self) -> bytes:
        """A fresh task id (lock held)."""
        self._counter += 1
        return self.me + self._counter.to_bytes(5, "big")

    def ref_arrived(self, oid: bytes, places: tuple[int, tuple[int, ...]] | None) -> None:
        """A ref was deserialized (or made by hand) in this thread; perhaps it tells size and places of its object."""
        engine = self.engine
        with engine.lock:
            self.table.arrived(oid, self.local.protected)
            if places is not None:
                self.table.told(oid, *places)
            if engine.dirty:
                engine.flush()

    def pin_forever(self, ref: ObjectRef[Any]) -> None:
        """A ref was pickled by somebody else's pickler: nobody counts that copy, so the object stays.

        Raises:
            OufOfBandObjectRefSerializationException: RAY_allow_out_of_band_object_ref_serialization is 0.
        """
        if os.environ.get(_OUT_OF_BAND) == "0":
            raise OufOfBandObjectRefSerializationException(
                f"{ref!r} is pickled outside of arguments and values, where nobody counts it; hint: pass the ref "
                f"itself, or what holds it, or set {_OUT_OF_BAND}=1"
            )
        self._pinned.append(ref)

    def explain(self, missing: Sequence[bytes], timeout: float | None) -> str:
        """What is known of objects that did not come in time (lock held)."""
        return unavailable(self, missing, timeout)

    # ------------------------------------------------------------ put

    def put(self, value: Any) -> ObjectRef[Any]:
        """Make an object of a value. Small ones involve no other process.

        Raises:
            TypeError: it cannot be pickled. ObjectStoreFullError: no room in the node's store.
        """
        refs: list[Any] | None = None
        if type(value) in SCALARS:
            blob = dumps(value, 5) + PLAIN_END  # as `serialize` does, without a call
        else:
            made, refs = serialize(value)
            if isinstance(made, Serialized):
                if made.size > self._inline_limit:
                    return self._put_large(made, refs)
                blob = made.join()
            else:
                blob = made
        if len(blob) > self._inline_limit:
            return self._put_large(blob, refs)
        engine = self.engine
        with engine.lock:
            if len(released) > _MANY_DEAD:
                self.drain()
                engine.flush()
            engine.activity += 1  # else the background thread would wake for every ref that dies
            self._counter += 1
            oid = self.me + self._counter.to_bytes(5, "big") + PUT_INDEX
            entry = self.table.create(oid)
            entry.state = INLINE
            entry.value = blob
            entry.local = 1
            if refs:
                entry.contained = refs
        ref: ObjectRef[Any] = make_ref(ObjectRef)  # `new_ref`, without a call
        ref._id = oid
        return ref

    def _put_large(self, blob: bytes | Serialized, refs: list[Any] | None) -> ObjectRef[Any]:
        with self.engine.lock:
            oid = self.next_task_id() + PUT_INDEX
            self.table.create(oid).local = 1
        try:
            offset, size = self.store.write(oid, blob)
        except BaseException:
            with self.engine.lock:
                self.table.abandon(oid)
            raise
        ref = new_ref(oid)
        with self.engine.lock:
            self.table.created_here(oid, offset, size, self.node, refs or None)
            self.engine.flush()
        return ref

    def set_job(self, job: m.JobInfo, namespace: str) -> None:
        """Tell the cluster what this driver's tasks need to know (its sys.path, …); `namespace` is for us alone."""
        self.job = msgspec.structs.replace(job, namespace=namespace)
        with self.engine.lock:
            self.engine.send(self._raylet, m.SetJob(job))
            self.engine.flush()

    def _on_set_job(self, msg: m.SetJob) -> None:
        known = self.job
        self.job = msgspec.structs.replace(msg.job, namespace=known.namespace) if known is not None else msg.job

    # ------------------------------------------------------------ death

    def _peer_lost(self, proc: bytes, reason: str) -> None:
        if proc == self._raylet:
            self.dead = f"the raylet of this node is gone ({reason})"
            self.on_exit(1)
            self.table.fail_all(self.dead)
            self.gcs.fail()
            self.groups.fail()
            self.store.fail()
            return
        if number_of(proc) == 0:
            self.visiting.lost(node_of(proc))
            return
        leases = self.submitter.leases
        leased = leases.workers.get(proc)
        far = node_of(proc) != self.node
        if not far and (leased is None or not leased.inflight):
            self.process_died(proc, f"{show_proc(proc)}: {reason}")
            return
        # Its raylet knows how it died and will say so; until then nothing more is sent to it.
        leases.suspect(proc)
        if far:
            self.engine.knock(proc)
            return
        self.engine.add_timer(
            monotonic() + _LAST_WORDS, lambda now: self.process_died(proc, f"{show_proc(proc)}: {reason}")
        )

    def process_died(self, proc: bytes, reason: str) -> None:
        """A process of the job is gone (lock held)."""
        self.engine.read_rest(proc)  # its last answers: its raylet's word comes on another way
        self.engine.drop_peer(proc)
        self.gcs.process_died(proc)
        self.on_death(proc)
        leased = self.submitter.leases.workers.get(proc)
        for task in leased.inflight.values() if leased is not None else ():
            self.left_behind(task, proc)
        self.submitter.process_died(proc, reason)
        self.table.process_died(proc, reason)

    def _head_moved(self, msg: m.HeadMoved) -> None:
        self.head = msg.node
        self.gcs.head_moved()
        self.groups.head_moved()
        self.submitter.actors.head_moved()

    def left_behind(self, task: Task, proc: bytes) -> None:
        """A process died before it answered this task; perhaps large returns were in its node's store already."""
        for index in range(task.num_returns):
            self.table.left_behind(task.id + return_index(index), node_of(proc))

    def _lost_blob(self, oid: bytes, reason: str, why: str) -> bytes:
        return lost_blob(oid, reason, why, self.dead)

    def close(self) -> None:
        """Leave the job: close every socket. The caller has told the raylet what it wants of it."""
        current.process = None
        with self.engine.lock:
            # Idle workers that we hold would be killed as if they worked for us, before they have written their rest.
            self.submitter.leases.tick(math.inf)
            self.engine.flush()
            self.dead = self.dead or "hpcray.shutdown() was called"
            for oid, entry in list(self.table.entries.items()):
                if entry.local_waiters or entry.ready_waiters:
                    self.table.on_store_error(m.StoreError(oid, "closed", self.dead))
            self.gcs.fail()
            self.groups.fail()
            self.store.fail()
        self.engine.run_after()
        self._callbacks.put(None)
        self.engine.close()
        for arena in self.arenas.values():
            arena.close()


def _table_kind(config: Config) -> type[ObjectTable]:
    """Who wants a record of what is decided, or to know where refs come from, pays for it; nobody else does."""
    if config.record:
        from hpcray.core.owner.noted import NotedTable

        return NotedTable
    return RecordingTable if config.record_ref_creation_sites else ObjectTable


def _forked() -> None:
    """A child that user code forked is nobody in the job: what it inherited belongs to its parent, whose end must be
    seen, also by those who only see a connection end."""
    if current.process is not None:
        current.process.engine.let_go()
    current.process = None
    current.worker = None


os.register_at_fork(after_in_child=_forked)


def connect(session_dir: str, kind: str) -> Process:
    """Join the session in `session_dir` as a "driver", "attached" driver, or "worker". `start` it when it is complete.

    Raises:
        RaySystemError: no raylet answers there.
    """
    sock = None
    try:
        sock = connect_private(os.path.join(session_dir, "r.s"), timeout=30.0)
        greet(sock, m.Hello(os.getpid(), kind, b""))
        head, fds, _, _ = socket.recv_fds(sock, 4, 1, socket.MSG_CMSG_CLOEXEC)
        frame = (
            _read_exactly(sock, int.from_bytes(head + _read_exactly(sock, 4 - len(head)), "little")) if head else b""
        )
    except OSError as error:
        if sock is not None:
            sock.close()
        raise RaySystemError(f"cannot join the session in {session_dir}: {error}") from error
    if not frame or not fds:
        sock.close()
        raise RaySystemError(f"the raylet of {session_dir} closed the connection; hint: is its job still running?")
    (welcome,) = m.decode(frame[16:])
    assert isinstance(welcome, m.Welcome)
    return Process(sock, welcome, map_arena(fds[0], welcome), kind, session_dir)


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    parts = []
    while size > 0:
        part = sock.recv(size)
        if not part:
            raise ConnectionError("connection closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
