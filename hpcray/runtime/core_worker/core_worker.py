"""The core of every driver and worker, composed of its parts, and how it joins a session."""

from __future__ import annotations

import gc
import itertools
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pickle import dumps
from typing import Any, Protocol, cast

from hpcray.common.config import Config
from hpcray.common.exceptions import LocalRayletDiedError, OufOfBandObjectRefSerializationException, RaySystemError
from hpcray.common.ids import HEAD, PUT_INDEX, node_of, number_of, owner_of, raylet_of, show_proc
from hpcray.core.core_worker.object_entry import PENDING, Hint, site_of
from hpcray.core.core_worker.object_table import ObjectTable, Waiter
from hpcray.core.core_worker.task import PendingTask
from hpcray.platform.arena import Arena
from hpcray.platform.process_tree import PrestartedThread
from hpcray.platform.resource_limits import usable_memory
from hpcray.platform.session_directory import remove_dead_sessions
from hpcray.platform.sockets import connect_private
from hpcray.protocol import messages as m
from hpcray.protocol.frames import LONG, LONG_BATCH
from hpcray.protocol.out_of_band import use_transfer_memory, view_tensors
from hpcray.protocol.serialization import PLAIN_END, SCALARS, Serialized, serialize
from hpcray.protocol.storage_cache import storages
from hpcray.runtime.core_worker import context
from hpcray.runtime.core_worker.context import (
    BoundHandlers,
    CurrentProcess,
    Handler,
    HandlerTable,
    ProcessPlace,
    ThreadState,
    require_context,
)
from hpcray.runtime.core_worker.drain_client import (
    BorrowedObjects,
    DrainAdmission,
    DrainClient,
    ObjectEvacuation,
    ObjectHandover,
)
from hpcray.runtime.core_worker.extensions import NO_FEATURES, Extensions, FeatureTable
from hpcray.runtime.core_worker.frame_slots import FrameSlotClient
from hpcray.runtime.core_worker.gcs_client import GcsClient
from hpcray.runtime.core_worker.io_engine import IoEngine, begin_exit, monotonic, released
from hpcray.runtime.core_worker.neighbor_store_client import NeighborStoreClient, map_arena
from hpcray.runtime.core_worker.object_reader import ObjectReader, unknown_ref
from hpcray.runtime.core_worker.object_refs import ObjectRef, carry_creation_sites, creation_site, make_ref, new_ref
from hpcray.runtime.core_worker.object_writer import ObjectReplicator, ObjectWriter
from hpcray.runtime.core_worker.peer_sockets import greet
from hpcray.runtime.core_worker.placement_group_client import PlacementGroupClient
from hpcray.runtime.core_worker.task_retries import lost_blob
from hpcray.runtime.core_worker.task_submitter import TaskSubmitter
from hpcray.runtime.core_worker.threads import PythonGCThread
from hpcray.runtime.core_worker.wait_manager import WaitManager

_sessions = itertools.count()
_TIDY_AFTER = 0.5
"""Seconds after the end of its raylet at which a driver looks whether anything of the node is left."""
_DEATH_REPORT_TIMEOUT = 0.3
"""Seconds for which the raylet may report how a peer died whose connection has ended."""
_MAX_UNBURIED = 256
"""Dead refs and views that `put` leaves to the background thread."""
OUT_OF_BAND = "RAY_allow_out_of_band_object_ref_serialization"


class Diagnostics(Protocol):
    """Diagnostics of a core worker (`hpcray.diagnostics`): answers about itself, reports of long waits."""

    @property
    def handlers(self) -> HandlerTable:
        """Handlers of the messages that ask this process about itself."""

    def explain(self, missing: Sequence[bytes], timeout: float | None) -> str:
        """Return the text of a GetTimeoutError (engine's lock held)."""

    def hint(self, value: object) -> str:
        """Return what to do with a value that is neither a ref nor a list of refs, for the error of `get`."""

    def introspect(self, what: str, args: Any) -> Any:
        """Answer a question of this process about itself, as another process would get it."""

    def report_waits(self) -> None:
        """Report all `get`s that wait, from the background thread."""

    def free(self, refs: Iterable[ObjectRef[Any]], local_only: bool) -> None:
        """Drop objects by hand: on all nodes, or the copies in this node's store."""

    def list_stores(
        self, limit: int, timeout: float, only: Collection[int] | None = None, devices: bool = False
    ) -> list[dict[str, Any]]:
        """List the object stores of all nodes, or of some."""


class WorkerExecutor(Protocol):
    """The part of a worker that runs its tasks (`runtime.worker.task_executor`). Its methods are called with the
    engine's lock held."""

    def block(self, waiter: Waiter, deadline: float | None) -> bool:
        """Wait for `waiter` inside a task, which lends its CPU meanwhile. Returns False at the deadline."""

    def process_died(self, proc: bytes) -> None:
        """End what runs for a dead process only."""

    def save_state(self) -> Callable[[], bool]:
        """Save the state of the actor that runs here, if it moves to another node.

        Returns:
            What returns whether that is done.
        """


class StoreClients:
    """The object stores of this host, as this process uses them.

    Attributes:
        arena: shared memory of this node. arenas: all arenas that this process can read, by node index.
        writer: makes objects in the store of this node. replicator: has other nodes keep copies of them.
        neighbors: of the other nodes of this host. frame_slots: long frames from and to other nodes.
    """

    def __init__(self, process: CoreWorker, arena: Arena, neighbors: Mapping[int, str]) -> None:
        self.arena = arena
        self.arenas = {process.node: arena}
        self.frame_slots: FrameSlotClient = FrameSlotClient(process, arena)
        self.writer: ObjectWriter = ObjectWriter(process, arena)
        self.replicator: ObjectReplicator = ObjectReplicator(process, process.gcs)
        self.neighbors: NeighborStoreClient = NeighborStoreClient(process, self.arenas, neighbors)
        process.table.pins.use_neighbors(neighbors, self.neighbors)

    def close(self) -> None:
        """Unmap all arenas."""
        for arena in self.arenas.values():
            arena.close()


class CoreWorker:
    """A process that owns objects, borrows others, and talks to its raylet and its peers. One per interpreter.

    `connect` makes it. Its parts know it as a `CoreWorkerContext`.

    Attributes:
        exit_listeners: called with the exit code when the raylet ends this process, or is gone, in this order.
        executor: runs the tasks of a worker; None in other processes.
        handlers: of all messages, once it is started.
        extensions: features in this process.
    """

    handlers: BoundHandlers

    def __init__(
        self,
        sock: socket.socket,
        welcome: m.Welcome,
        arena: Arena,
        kind: str,
        session_dir: str,
        diagnostics: Callable[[CoreWorker], Diagnostics],
        features: FeatureTable,
        executor: Callable[[CoreWorker], WorkerExecutor] | None,
        listener: socket.socket | None,
        thread: PrestartedThread | None,
    ) -> None:
        self.me = me = welcome.proc
        self.node = node_of(me)
        self.config = config = Config(**welcome.config)
        self.engine = IoEngine(
            me, session_dir, sock, welcome.neighbors, config.spin, self._peer_lost, self.drain, listener, thread
        )
        self.dead: str | None = None
        self.extensions: Extensions = Extensions(self, features, config.extensions)
        self.table, self.recorder = self._make_table(features)
        self.local = ThreadState()
        node = welcome.node_id, welcome.host, welcome.head, welcome.cluster_size
        self.place = ProcessPlace(kind, session_dir, *node, welcome.run, welcome.job)
        view_tensors(config.enable_zero_copy_torch_tensors)
        if features.transport_memory is not None:
            use_transfer_memory(partial(features.transport_memory, self))
        storages.keep(lambda: min(config.unused_tensor_memory, usable_memory() // 8))
        self.exit_listeners: list[Callable[[int], None]] = []
        # Refs of an earlier session of this interpreter may still live: their ids must never be ours.
        self.task_counter = (next(_sessions) & 0xFF) << 32
        released.clear()
        self._gc_thread: PythonGCThread | None = None
        self._warned: set[str] = set()
        self.gcs: GcsClient = GcsClient(self)
        self.submitter: TaskSubmitter = TaskSubmitter(self, self.gcs, welcome.places)
        admission = DrainAdmission(self, self.submitter.leases, self.submitter.fail)
        self.placement_groups: PlacementGroupClient = PlacementGroupClient(self, self.gcs, admission)
        self.stores: StoreClients = StoreClients(self, arena, welcome.neighbors)
        self.drain_client: DrainClient = DrainClient(self, admission, BorrowedObjects(self, self.stores.writer))
        self.diagnostics = diagnostics(self)
        self.reader = ObjectReader(self, self.stores.arenas, self.diagnostics.explain, self.submitter.unhandled_errors)
        self.waits: WaitManager = WaitManager(self, unknown_ref)
        self.executor = executor(self) if executor is not None else None

    def start(self, *handlers: HandlerTable) -> None:
        """Begin to read and write. handlers: those of a worker or of a driver, beside HANDLERS."""
        self.handlers = BoundHandlers((self, HANDLERS), self.diagnostics.handlers, *handlers)
        self.engine.start(self.handlers)

    def check_alive(self) -> None:
        """Raise LocalRayletDiedError if nothing can be requested any more."""
        if self.dead is not None:
            raise LocalRayletDiedError(self.dead)

    def warn_once(self, key: str) -> bool:
        """Return True for the first call with this key (lock held)."""
        if key in self._warned:
            return False
        self._warned.add(key)
        return True

    def drain(self) -> None:
        """Apply the deferred destructors of refs and views to the table (lock held)."""
        self.table.bury(released)

    def block(self, waiter: Waiter, deadline: float | None) -> bool:
        """Wait for `waiter` (lock held), in a worker as its executor does, which lends its CPU meanwhile."""
        if waiter.count <= 0:
            self.engine.flush()
            return True
        if self.executor is not None:
            return self.executor.block(waiter, deadline)
        return self.engine.wait(waiter, deadline)

    def _collect_garbage(self) -> None:
        """Have this process collect its garbage, in a thread that is started for the first time (lock held)."""
        if self._gc_thread is None:
            self._gc_thread = PythonGCThread(gc_collect_func=self._collect_and_release)
            self._gc_thread.start()
        self._gc_thread.trigger_gc()

    def _collect_and_release(self) -> int:
        found = gc.collect()
        with self.engine.lock:
            self.drain()
            self.engine.flush()
        return found

    def request_global_gc(self) -> None:
        """Have all processes of the job collect their garbage."""
        with self.engine.lock:
            self.check_alive()
            self.engine.send(HEAD, m.RequestGarbageCollection())
            self.engine.flush()

    def _make_table(self, features: FeatureTable) -> tuple[ObjectTable, Any]:
        """Recording and call-site tracking are opt-in; the default table carries no overhead."""
        engine, config = self.engine, self.config
        remake: Callable[[PendingTask], None] = lambda task: self.submitter.retries.reconstruct(task)  # noqa: E731
        given = self.me, engine.send, engine.notify, self._lost_blob, config.lineage_limit, remake
        record = features.record_table if config.record else None
        table, recorder = record(*given) if record is not None else (ObjectTable(*given), None)
        if config.record_ref_creation_sites:
            table.record_creation_sites(creation_site)
            carry_creation_sites()
        return table, recorder

    def _lost_blob(self, oid: bytes, reason: str, why: str) -> bytes:
        return lost_blob(oid, reason, why, self.dead, site_of(self.table.entries.get(oid)))

    # ------------------------------------------------------------ references

    def next_task_id(self) -> bytes:
        """A fresh task id (lock held)."""
        self.task_counter += 1
        return self.me + self.task_counter.to_bytes(5, "big")

    def ref_arrived(self, oid: bytes, hint: Hint | None) -> None:
        """Count a ref that this thread deserialized or made by hand. hint: what came with it (`known_locations`)."""
        engine = self.engine
        with engine.lock:
            if released:  # perhaps of this object: it must not outlive its last ref
                self.drain()
            self.table.refs.ref_deserialized(oid, self.local.protected)
            if hint is not None:
                self.table.hint_locations(oid, *hint)
            if engine.dirty:
                engine.flush()

    def hint_arrived(self, oid: bytes, hint: Hint) -> None:
        """Note what came with another copy of a ref that this process has (`known_locations`)."""
        with self.engine.lock:
            entry = self.table.entries.get(oid)
            if entry is not None and entry.state == PENDING:
                self.table.hint_locations(oid, *hint)

    def _on_object_get(self, src: bytes, msg: m.ObjectGet) -> None:
        for extension in self.extensions.loaded:
            if extension.on_object_get(src, msg):
                return
        self.answer_object_get(src, msg)

    def answer_object_get(self, src: bytes, msg: m.ObjectGet) -> None:
        """A borrower asks for a value, whose bytes exist (lock held)."""
        self.submitter.unhandled_errors.seen((msg.id,))
        self.table.on_object_get(src, msg.id)
        entry = self.table.entries.get(msg.id)
        if entry is not None and len(entry.value) > LONG:
            peer = self.engine.links.peer(src)
            self.engine.flush_long_soon(peer, len(entry.value) * len(peer.out) >= LONG_BATCH)

    def _on_object_lost(self, src: bytes, msg: m.ObjectLost) -> None:
        if msg.resident:
            self.submitter.actors.suspect(owner_of(msg.resident))
        self.table.recovery.on_object_lost(src, msg)

    def resident_lost(self, oid: bytes, resident: bytes, reason: str) -> None:
        """The part of a value that had stayed in another process cannot be had: see `ObjectRecovery` (lock held)."""
        self.submitter.actors.suspect(owner_of(resident))
        self.table.recovery.resident_lost(oid, resident, reason)

    def _on_resident_moved(self, src: bytes, msg: m.ResidentMoved) -> None:
        self.table.recovery.resident_moved(msg.id, msg.resident, msg.value, msg.size, node_of(src))

    def pin_forever(self, ref: ObjectRef[Any]) -> None:
        """Keep the object of a ref that a foreign pickler pickled, for ever: that copy of the ref is not counted.

        Raises:
            OufOfBandObjectRefSerializationException: RAY_allow_out_of_band_object_ref_serialization is 0.
        """
        if os.environ.get(OUT_OF_BAND) == "0":
            raise OufOfBandObjectRefSerializationException(
                f"{ref!r} is pickled outside of arguments and values, where nobody counts it; hint: pass the ref "
                f"itself, or what holds it, or set {OUT_OF_BAND}=1"
            )
        with self.engine.lock:
            self.table.refs.ref_deserialized(ref._id, None)

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
                if made.size > self.config.inline_limit:
                    return self.put_serialized(made, refs)
                blob = made.join()
            else:
                blob = made
        if len(blob) > self.config.inline_limit:
            return self.put_serialized(blob, refs)
        engine = self.engine
        with engine.lock:
            if len(released) > _MAX_UNBURIED:
                self.drain()
                engine.flush()
            engine.activity += 1  # else the background thread would wake for every ref that dies
            self.task_counter += 1
            oid = self.me + self.task_counter.to_bytes(5, "big") + PUT_INDEX
            self.table.put_inline(oid, blob, refs)
        ref: ObjectRef[Any] = make_ref(ObjectRef)  # `new_ref`, without a call
        ref._id = oid
        return ref

    def put_serialized(self, blob: bytes | Serialized, refs: list[Any] | None) -> ObjectRef[Any]:
        """Make an object in the node's store of a value that `serialize` has turned into this blob and these refs.

        Raises:
            ObjectStoreFullError: no room in the node's store.
        """
        with self.engine.lock:
            oid = self.next_task_id() + PUT_INDEX
            self.table.create(oid)
        try:
            offset, size = self.stores.writer.write(oid, blob)
        except BaseException:
            with self.engine.lock:
                self.table.abandon(oid)
            raise
        ref = new_ref(oid)
        with self.engine.lock:
            self.table.put_stored(oid, offset, size, refs or None)
            self.engine.flush()
        return ref

    def set_job(self, job: m.JobInfo) -> None:
        """Send the cluster what this driver's tasks need (its sys.path, …)."""
        self.place.job = job
        with self.engine.lock:
            self.engine.send(raylet_of(self.node), m.SetJob(job))
            self.engine.flush()

    # ------------------------------------------------------------ death

    def _peer_lost(self, proc: bytes, reason: str) -> None:
        if proc == raylet_of(self.node):
            if self.place.kind == m.DRIVER and not self.dead:  # the fork server tidies up, unless it was killed too
                threading.Timer(_TIDY_AFTER, remove_dead_sessions, [dict(os.environ)]).start()
            self.dead = f"the raylet of this node is gone ({reason}){self.config.end_note}"
            self.end(1)
            self.table.fail_all(self.dead)
            self._disconnected()
            return
        if number_of(proc) == 0:
            self.stores.neighbors.lost(node_of(proc))
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
            self.engine.reroute_via_raylet(proc)
            return
        self.engine.add_timer(
            monotonic() + _DEATH_REPORT_TIMEOUT, lambda now: self.process_died(proc, f"{show_proc(proc)}: {reason}")
        )

    def _disconnected(self) -> None:
        """Fail what waits for other processes (lock held)."""
        self.extensions.disconnected()
        self.gcs.fail()
        self.placement_groups.fail()
        self.stores.writer.fail()

    def end(self, code: int) -> None:
        """Call the `exit_listeners` (lock held)."""
        for listener in self.exit_listeners:
            listener(code)

    def process_died(self, proc: bytes, reason: str) -> None:
        """Drop a dead process: its leases, tasks, borrows and copies (lock held)."""
        self.engine.read_rest(proc)  # its last answers: its raylet's word comes on another way
        self.engine.links.drop_peer(proc)
        self.gcs.process_died(proc)
        self.extensions.process_died(proc)
        if self.executor is not None:
            self.executor.process_died(proc)
        leased = self.submitter.leases.workers.get(proc)
        for task in leased.inflight.values() if leased is not None else ():
            self.submitter.left_behind(task, proc)
        self.submitter.process_died(proc, reason)
        self.table.process_died(proc, reason)

    def _head_moved(self, msg: m.HeadMoved) -> None:
        self.place.head = msg.node
        self.gcs.head_moved()
        self.placement_groups.head_moved()
        self.submitter.actors.head_moved()

    def _evacuate(self, msg: m.Evacuate) -> None:
        """A node leaves the job: copy the objects of this process that only it has, or have their borrowers do so."""
        leaving = self.drain_client.leaving
        leaving.add(msg.node)
        if msg.node == self.node:
            self.table.copies.hand_over()
            is_saved = self.executor.save_state() if self.executor is not None else lambda: True
            ObjectHandover(self, leaving, is_saved).begin()
        else:
            ObjectEvacuation(self, msg).go_on()

    def _on_object_ready(self, src: bytes, msg: m.ObjectReady) -> None:
        if number_of(src):
            self.table.on_object_ready(msg)
        else:
            self.table.copies.found(src, msg)

    def _undeliverable(self, msg: m.Undeliverable) -> None:
        self.table.copies.node_left(node_of(msg.proc), msg.kept_at)
        self.process_died(msg.proc, msg.reason)

    def _cluster_grew(self, msg: m.ClusterGrew) -> None:
        """Nodes have joined the job (lock held)."""
        self.place.cluster_size = msg.cluster_size
        self.engine.links.add_neighbors(msg.neighbors)
        self.stores.neighbors.add(msg.neighbors)
        self.table.pins.add_neighbors(sorted(msg.neighbors))
        self.submitter.cluster_grew(msg.places)

    def _node_died(self, msg: m.NodeDied) -> None:
        """Drop a dead node with its processes, leases, copies and borrowers (lock held)."""
        table = self.table
        if not table.recovery.mark_node_dead(msg.node):
            return
        table.copies.node_left(msg.node, msg.kept_at)
        retries = self.submitter.retries
        retries.hold()
        try:
            for proc in sorted({*self.engine.links.peers_of(msg.node), *table.recovery.processes_of(msg.node)}):
                self.process_died(proc, f"node {msg.node} died: {msg.reason}")
            self.engine.links.lose_node(msg.node)
            table.recovery.node_died(msg.node, msg.reason)
            table.copies.node_died(msg.node)
        finally:
            retries.submit_held()

    def close(self, exiting: bool = False) -> None:
        """Leave the job: close every socket. The caller has sent its last requests to the raylet.

        Args:
            exiting: the interpreter ends: threads that wait go on waiting, and end with it.
        """
        if exiting:
            begin_exit()
        if current.process is self:
            current.process = None
        with self.engine.lock:
            # Idle workers that we hold would be killed as if they worked for us, before they have written their rest.
            self.submitter.leases.return_idle()
            if self.place.kind in (m.DRIVER, m.ATTACHED) and not self.dead:
                self.engine.send(raylet_of(self.node), m.ProcLeaving(f"{m.USER_EXIT} Shutdown by ray.shutdown()."))
            self.engine.flush()
            self.dead = self.dead or "hpcray.shutdown() was called"
            self._disconnected()
            for oid, entry in list(self.table.entries.items()):
                if not exiting and (entry.local_waiters or entry.ready_waiters):
                    self.table.on_store_error(m.StoreError(oid, "closed", self.dead))
            self.table.recovery.forget_tasks()
        self.engine.run_pending_calls()
        if self._gc_thread is not None and self._gc_thread is not threading.current_thread():
            self._gc_thread.stop()
        self.reader.close()
        for extension in reversed(self.extensions.loaded):
            extension.close()
        self.engine.close()
        self.stores.close()


HANDLERS: dict[type, Callable[[CoreWorker], Handler]] = {
    m.ObjectGet: lambda p: p._on_object_get,
    m.ObjectReady: lambda p: p._on_object_ready,
    m.ObjectLost: lambda p: p._on_object_lost,
    m.AddLocation: lambda p: lambda _, msg: p.table.recovery.on_add_location(msg),
    m.BorrowAdd: lambda p: p.table.refs.on_borrow_add,
    m.BorrowAck: lambda p: lambda _, msg: p.table.refs.on_borrow_ack(msg),
    m.BorrowDrop: lambda p: lambda _, msg: p.table.refs.on_borrow_drop(msg),
    m.BorrowTake: lambda p: p.table.refs.on_borrow_take,
    m.SettleBorrows: lambda p: p.table.refs.on_borrow_ask,
    m.BorrowsSettled: lambda p: p.table.refs.on_borrow_end,
    m.Created: lambda p: p.stores.writer.on_created,
    m.Opened: lambda p: p.stores.writer.on_opened,
    m.StoreError: lambda p: p.stores.writer.on_store_error,
    m.ReplicaPinned: lambda p: lambda src, msg: p.table.on_replica(msg.id, node_of(src), msg.reason),
    m.KeepCopies: lambda p: lambda _, msg: p.drain_client.borrowed.keep(msg),
    m.OnDisk: lambda p: lambda _, msg: p.table.on_disk(msg),
    m.Unpin: lambda p: lambda src, msg: p.table.pins.give_up(msg.size, node_of(src)),
    m.CollectGarbage: lambda p: lambda _, msg: p._collect_garbage(),
    m.Welcome: lambda p: p.stores.neighbors.on_welcome,
    m.FrameSlots: lambda p: p.stores.frame_slots.on_slots,
    m.SlotFrame: lambda p: p.stores.frame_slots.on_frame,
    m.ReclaimFrameSlots: lambda p: p.stores.frame_slots.on_reclaim,
    m.LeaseGranted: lambda p: p.submitter.on_lease_granted,
    m.LeaseRevoked: lambda p: lambda _, msg: p.process_died(msg.worker, msg.reason),
    m.ReclaimIdle: lambda p: lambda src, msg: p.submitter.leases.reclaim(node_of(src), msg.busy),
    m.Infeasible: lambda p: p.submitter.on_infeasible,
    m.LeasesCapped: lambda p: p.submitter.on_leases_capped,
    m.TaskDone: lambda p: p.submitter.on_task_done,
    m.TaskReply: lambda p: p.submitter.on_task_reply,
    m.TasksReturned: lambda p: p.submitter.on_tasks_returned,
    m.ResidentMoved: lambda p: p._on_resident_moved,
    m.StreamItem: lambda p: p.submitter.generator_streams.on_item,
    m.ExtensionMessage: lambda p: p.extensions.on_message,
    m.CancelRef: lambda p: lambda _, msg: p.submitter.cancellation.cancel_object(msg.id, msg.force, msg.recursive),
    m.ActorStateUpdate: lambda p: lambda _, msg: p.submitter.actors.on_state(msg),
    m.GcsReply: lambda p: lambda _, msg: p.gcs.on_reply(msg),
    m.PlacementGroupStateUpdate: lambda p: lambda _, msg: p.placement_groups.on_state(msg),
    m.Drain: lambda p: p.drain_client.on_drain,
    m.DrainOver: lambda p: p.drain_client.on_drain_over,
    m.Exit: lambda p: lambda _, msg: p.end(msg.code),
    m.ProcDied: lambda p: lambda _, msg: p.process_died(msg.proc, msg.reason),
    m.Undeliverable: lambda p: lambda _, msg: p._undeliverable(msg),
    m.ProbeViaRaylet: lambda p: lambda src, _: p.engine.links.on_probe_via_raylet(src),
    m.NodeDied: lambda p: lambda _, msg: p._node_died(msg),
    m.HeadMoved: lambda p: lambda _, msg: p._head_moved(msg),
    m.Evacuate: lambda p: lambda _, msg: p._evacuate(msg),
    m.ClusterGrew: lambda p: lambda _, msg: p._cluster_grew(msg),
}
"""The handlers of every driver and worker, by message; each is bound to the process once (`BoundHandlers`). Workers add
their own (`worker.task_executor.HANDLERS`), and so do diagnostics (`diagnostics.introspection.HANDLERS`)."""


current = cast("CurrentProcess[CoreWorker]", context.current)
"""The core worker of this interpreter, with its type."""


def need_process() -> CoreWorker:
    """Return the core worker of this interpreter.

    Raises:
        RaySystemError: hpcray is not initialized.
    """
    return cast(CoreWorker, require_context())


def _forked() -> None:
    """Leave the job in a child that user code forked. Its copies of the sockets are closed: peers must see a
    connection end when the parent ends."""
    current.forget_postponed()
    if current.process is not None:
        current.process.engine.links.close_after_fork()
    current.process = None
    if current.worker is not None:
        current.worker.begin_forked_child()
    current.worker = None


os.register_at_fork(after_in_child=_forked)


def connect(
    session_dir: str,
    kind: str,
    diagnostics: Callable[[CoreWorker], Diagnostics],
    features: FeatureTable = NO_FEATURES,
    executor: Callable[[CoreWorker], WorkerExecutor] | None = None,
    listener: socket.socket | None = None,
    thread: PrestartedThread | None = None,
) -> CoreWorker:
    """Join the session in `session_dir` as a "driver", "attached" driver, or "worker". `start` it when it is complete.

    Args:
        diagnostics: what answers questions about the process: `diagnostics.introspection.ObjectInventory`.
        features: what the entry point of this process knows about features.
        executor: what runs the tasks of a worker.
        listener: the socket for peers, if it had to exist before the raylet learned of this process.
        thread: runs the I/O engine in the background, in place of a new one.

    Raises:
        RaySystemError: no raylet answers there.
    """
    sock = None
    try:
        sock = connect_private(os.path.join(session_dir, "r.s"), timeout=30.0)
        greet(sock, m.Hello(os.getpid(), kind))
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
    arena = map_arena(fds[0], welcome)
    return CoreWorker(sock, welcome, arena, kind, session_dir, diagnostics, features, executor, listener, thread)


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    parts = []
    while size > 0:
        part = sock.recv(size)
        if not part:
            raise ConnectionError("connection closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
