"""The raylet of one node: the object store and the local lease manager, joined to the event loop, the processes and the
transports; on the head also the GCS. `HANDLERS` at the end of this file maps each message to its handler."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from hpcray.common.ids import HEAD, node_of, raylet_of, show_proc
from hpcray.common.terminal_text import plain_line
from hpcray.core import effects as fx
from hpcray.core.gcs.gcs import Gcs, RecoveringGcs
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.core.raylet.local_lease_manager import LocalLeaseManager
from hpcray.platform.arena import Prefaulter
from hpcray.platform.spill_files import SpillFiles
from hpcray.protocol import messages as m
from hpcray.runtime.raylet.event_log import NodeEventLog
from hpcray.runtime.raylet.event_loop import EventLoop
from hpcray.runtime.raylet.local_processes import LocalProcesses, NeighborClients, NodeContext, NodeGarbageCollection
from hpcray.runtime.raylet.local_sockets import LocalSocket
from hpcray.runtime.raylet.log_monitor import LogMonitor
from hpcray.runtime.raylet.memory_monitor import MemoryMonitor
from hpcray.runtime.raylet.router import FrameSlotRouter, HeadLocation, Router
from hpcray.transport.base import DataPlane, TransportError

Handler = Callable[[float, bytes, Any], Iterable[Any]]
EffectHandler = Callable[[Any], None]
NO_HANDLERS: Mapping[type, Any] = MappingProxyType({})

_NOTHING: tuple[()] = ()
_FEW_WORKERS, _WORKERS_PER_CPU = 64, 8
"""Worker processes of a node, in all and for each CPU, above which a line says how many there are."""
_DIRECT_TO_NEIGHBORS = frozenset({m.Opened, m.StoreError, m.Unpin})


class RayletEvents(Protocol):
    """Reports of a raylet to the part that decides about the node and its job (`runtime.node.cluster_member`)."""

    def process_joined(self, proc: bytes) -> None:
        """A process of this node was welcomed."""

    def process_died(self) -> None:
        """A process of this node is gone."""

    def driver_died(self, reason: str) -> None:
        """The job's driver, a process of this node, is gone."""

    def template_gone(self, reason: str) -> None:
        """The template process has ended."""

    def give_up(self, reason: str) -> None:
        """This node cannot go on."""

    def node_unreachable(self, node: int, reason: str) -> None:
        """The transport finds another node dead."""


class Registrar(Protocol):
    """Stands before the GCS where registrations are answered only when a standby has them."""

    def register(self, now: float, src: bytes, msg: m.Message) -> Iterable[Any]:
        """Handle CreateActor, CreateGroup and GcsCall."""


class RayletDiagnostics(Protocol):
    """Answers of a raylet about itself and its node (`diagnostics.raylet_introspection.RayletIntrospection`).

    Attributes:
        preloaded: modules that the fork server was to import, and why it could not; "" if it has.
    """

    preloaded: dict[str, str]

    def on_introspect(self, now: float, src: bytes, msg: m.Introspect) -> Iterable[Any]:
        """Answer a question."""

    def on_answer(self, now: float, src: bytes, msg: m.GcsReply) -> Iterable[Any]:
        """A process of this node, or another raylet, answers a question of this one."""

    def on_last_figures(self, now: float, src: bytes, msg: m.LastFigures) -> Iterable[Any]:
        """A worker of this node ends in good order."""

    def node_died(self, now: float, node: int) -> None:
        """Another node is gone."""

    def row(self) -> dict[str, Any]:
        """Return the figures of this node, as its history keeps them."""


class Raylet:
    """Dispatches messages by type, carries out effects, and reports to the cores which processes came and went.

    Attributes:
        head: the GCS, where this raylet is the head; None elsewhere. Head takeover sets it.
        registrar: set on a head that has a standby.
        transfers: of objects between nodes.
        handlers: `HANDLERS` bound to this raylet, with those of its cluster member.
        run_info: what the head knows of this run of the job.
        neighbor_dirs: session directories of the other nodes of this host, by node.
        forgotten_nodes: dead nodes that the cores and transports know to be dead.
    """

    def __init__(
        self,
        context: NodeContext,
        loop: EventLoop,
        router: Router,
        lease_manager: LocalLeaseManager,
        store: ObjectStore,
        head: Gcs | None,
        prefault: Prefaulter,
        data: DataPlane | None,
    ) -> None:
        self.context = context
        self.node = context.info.index
        self.loop = loop
        self.router = router
        self.lease_manager = lease_manager
        self.store = store
        self.head: Gcs | RecoveringGcs | None = head
        self.registrar: Registrar | None = None
        self.run_info = m.RunInfo()
        self.neighbor_dirs: dict[int, str] = {}
        self.forgotten_nodes: set[int] = set()
        self.handlers: dict[type, Handler] = {}
        self.garbage = NodeGarbageCollection(context.config, loop, router)
        self.events = NodeEventLog(self.log)
        self._many_workers = max(_FEW_WORKERS, _WORKERS_PER_CPU * (os.cpu_count() or 1))
        self.transfers = ObjectTransfers(context, data, prefault, self.transfer_ended)
        self._events: RayletEvents
        self._effect_handlers: dict[type, EffectHandler] = {}
        router.head_location.listeners.append(self._head_moved)

    @property
    def head_location(self) -> HeadLocation:
        """The head's node, see `Router`."""
        return self.router.head_location

    def attach(
        self,
        processes: LocalProcesses,
        neighbor_clients: NeighborClients,
        spill_io: SpillIo,
        memory_monitor: MemoryMonitor,
        introspection: RayletDiagnostics,
        log_monitor: LogMonitor,
        frames: FrameSlotRouter,
    ) -> None:
        """Complete this raylet with the parts that call it; before `start`."""
        self.processes = processes
        self.neighbor_clients = neighbor_clients
        self.spill_io = spill_io
        self.memory_monitor = memory_monitor
        self.introspection = introspection
        self.log_monitor = log_monitor
        self.frames = frames

    def cluster_grew(self, size: int) -> None:
        """The job has so many nodes now: report it to the lease manager and to the processes of this node."""
        self.context.cluster_size = size
        self.router.grow(size)
        self.apply(self.lease_manager.cluster_grew(self.loop.now, size))
        grew = m.ClusterGrew(size, self.neighbor_dirs, self.store.lifecycle.places)
        for proc in self.router.links:
            self.router.send(proc, grew)

    def start(
        self,
        events: RayletEvents,
        handlers: Mapping[type, Handler] = NO_HANDLERS,
        effect_handlers: Mapping[type, EffectHandler] = NO_HANDLERS,
    ) -> None:
        """Bind the handler tables, once. A recorder replaces methods of the cores before.

        Args:
            handlers, effect_handlers: those of the cluster member; none of them is in the tables of this module.
        """
        self._events = events
        self.handlers = {**{kind: bind(self) for kind, bind in HANDLERS.items()}, **handlers}
        own = {kind: bind(self) for kind, bind in EFFECT_HANDLERS.items()}
        self._effect_handlers = {**own, **effect_handlers}

    def apply(self, effects: Iterable[Any]) -> None:
        """Carry out the effects that a core has returned, in order."""
        effect_handlers = self._effect_handlers
        for effect in effects:
            effect_handlers[type(effect)](effect)

    def log(self, text: str) -> None:
        """Print a line on stderr."""
        with contextlib.suppress(OSError):  # the other end of stderr may be gone, as when the launcher was killed
            where = f"node {self.node} ({self.context.info.host})"
            sys.stderr.write(f"hpcray: {where}: {plain_line(text)}\n")  # at once: other nodes write there, too
            sys.stderr.flush()
        self.events.printed(text)

    def _fork_worker(self, effect: fx.ForkWorker) -> None:
        if effect.env:
            self.log_monitor.expect(effect.number, effect.env)
        self.processes.fork(effect.number, effect.env)
        count = self.processes.workers
        if count >= self._many_workers:
            self._many_workers = 2 * count
            self.log(
                f"{count} worker processes have been started here: there are many actors, or many tasks that are "
                "blocked in get() while others run in their place; do tasks call each other without end?"
            )

    def unexpected(self, now: float, src: bytes, msg: m.Message) -> Iterable[Any]:
        """Handle a message that no part of this raylet can use."""
        self.log(f"no use for {type(msg).__name__} from {show_proc(src)}")
        return _NOTHING

    # ------------------------------------------------------------ event_loop.EventHandler

    def hello(self, link: LocalSocket, hello: m.Hello) -> None:
        if link.kind == m.GUEST:
            self.neighbor_clients.hello(link)
        else:
            self.processes.hello(link, hello)

    def messages(self, src: bytes, messages: list[m.Message]) -> None:
        now = self.loop.now
        handlers = self.handlers
        for msg in messages:
            handler = handlers.get(type(msg))
            if handler is None:
                self.unexpected(now, src, msg)
                continue
            effects = handler(now, src, msg)
            if effects:
                self.apply(effects)

    def long_frame_sent(self, proc: bytes) -> None:
        self.apply(self.frames.sent_long(proc))

    def link_closed(self, link: LocalSocket, reason: str) -> None:
        if link.kind == m.GUEST:
            self.neighbor_clients.closed(link)
        else:
            self.processes.link_closed(link, reason)

    def transfer_ended(self, what: str, tag: int, error: str | None) -> None:
        ended = self.store.receive_ended if what == "received" else self.store.send_ended
        self.apply(ended(self.loop.now, tag, error))

    def node_lost(self, node: int, reason: str) -> None:
        self._events.node_unreachable(node, reason)

    # ------------------------------------------------------------ local_processes.ProcessEvents

    def new_number(self) -> int:
        return self.lease_manager.pool.new_number()

    def proc_of(self, number: int) -> bytes:
        return self.lease_manager.pool.proc_of(number)

    def welcome(self, proc: bytes) -> m.Welcome:
        context = self.context
        return m.Welcome(
            proc, context.info.node_id, context.session_dir, context.info.arena_size, context.cluster_size,
            context.info.host, self.lease_manager.job, context.config.as_dict(), self.run_info,
            self.head_location.node, self.neighbor_dirs, self.spill_io.overflow_path, context.reserve,
            self.store.lifecycle.places,
        )  # fmt: skip

    def joined(self, proc: bytes, kind: str, pid: int) -> None:
        self.apply(self.lease_manager.process_joined(self.loop.now, proc, kind, pid))
        self._events.process_joined(proc)
        self.events.inform(lambda extension: extension.process_joined(proc, kind, pid))

    def stopping(self, code: int) -> None:
        self.events.inform(lambda extension: extension.stopping(code))

    def leaving(self, proc: bytes) -> None:
        self.events.inform(lambda extension: extension.leaving(proc))

    def died(self, proc: bytes, kind: str, reason: str, peers: set[bytes]) -> None:
        """A process of this node is gone: report it to the cores, and to all that exchanged frames with it."""
        self.frames.process_died(proc)
        self.events.inform(lambda extension: extension.process_died(proc, kind, reason))
        if self.processes.stopping:
            self._events.process_died()  # all processes of the node end
            return
        now = self.loop.now
        self.log_monitor.worker_died(proc)
        self.apply(self.lease_manager.process_died(now, proc, reason))
        # Processes of neighboring nodes exchange messages with ours past this raylet.
        nodes = {node_of(peer) for peer in peers} | self.neighbor_dirs.keys()
        nodes -= {self.node, node_of(HEAD)}
        if self.head is None:
            nodes.discard(self.head_location.node)
            self.router.send(HEAD, m.ProcDied(proc, reason))
        for node in nodes:
            self.router.send(raylet_of(node), m.ProcDied(proc, reason))
        self._propagate_death(proc, reason)
        if kind == m.DRIVER:
            self._events.driver_died(reason)
        self._events.process_died()

    def fork_failed(self, number: int, reason: str) -> None:
        self.router.forget(self.proc_of(number), reason)
        self.apply(self.lease_manager.fork_failed(self.loop.now, number, reason))
        self._events.process_died()

    def template_broken(self, reason: str) -> None:
        self._events.give_up(reason)

    def preloaded(self, module: str, problem: str) -> None:
        why = problem.strip().splitlines()[-1] if problem else ""
        self.introspection.preloaded[module] = why
        if problem and module in self.context.config.preload.split(","):  # nobody has asked for the others
            self.log(f"warning: {module} of HPCRAY_PRELOAD cannot be imported: {why}; tasks that need it get the error")

    def template_gone(self, reason: str) -> None:
        self._events.template_gone(reason)

    def explain_sigkill(self) -> str:
        return self.memory_monitor.explain_sigkill()

    # ------------------------------------------------------------ deaths

    def _on_proc_died(self, now: float, src: bytes, msg: m.ProcDied) -> Iterable[Any]:
        """Handle the death of another node's process that exchanged messages with processes of this node."""
        self.apply(self.lease_manager.remote_process_died(now, msg.proc))
        self._propagate_death(msg.proc, msg.reason)
        return _NOTHING

    def _propagate_death(self, proc: bytes, reason: str) -> None:
        now = self.loop.now
        self.apply(self.store.process_died(now, proc))
        if self.head is not None:
            self.apply(self.head.process_died(now, proc, reason))
        for link in self.router.links.values():
            if proc in link.peers:
                link.peers.discard(proc)
                link.peers.add(raylet_of(node_of(proc)))  # other processes of its node may know the same objects
                self.router.send(link.proc, m.ProcDied(proc, reason))

    def _head_moved(self) -> None:
        """Report this node's inventory to the new head, after the frames that were on their way to the old one."""
        moved = m.HeadMoved(self.head_location.node, self.head_location.epoch)
        self.apply(self.lease_manager.head_moved(self.loop.now))
        for proc in self.router.links:
            self.router.send(proc, moved)

    # ------------------------------------------------------------ features

    def _on_extension_message(self, now: float, src: bytes, msg: m.ExtensionMessage) -> Iterable[Any]:
        for extension in self.events.extensions:
            if extension.name == msg.extension:
                extension.on_message(src, msg.body)
        return _NOTHING

    def _on_last_figures(self, now: float, src: bytes, msg: m.LastFigures) -> Iterable[Any]:
        self.events.inform(lambda extension: extension.last_figures(src, msg.figures))
        return self.introspection.on_last_figures(now, src, msg)

    def _on_end_reason(self, now: float, src: bytes, msg: m.EndReason) -> Iterable[Any]:
        self.events.explain_end(msg.kind, msg.text, src)
        return _NOTHING

    # ------------------------------------------------------------ messages to the head

    def _to_gcs(self, now: float, src: bytes, msg: m.Message) -> Iterable[Any]:
        return self.unexpected(now, src, msg) if self.head is None else self.head.handle(now, src, msg)

    def _to_recovering_gcs(self, now: float, src: bytes, msg: m.Message) -> Iterable[Any]:
        return self._to_gcs(now, src, msg) if isinstance(self.head, RecoveringGcs) else self.unexpected(now, src, msg)

    def _register(self, now: float, src: bytes, msg: m.Message) -> Iterable[Any]:
        return self._to_gcs(now, src, msg) if self.registrar is None else self.registrar.register(now, src, msg)

    def _to_lease_manager_or_gcs(self, now: float, src: bytes, msg: m.Message) -> Iterable[Any]:
        """In the head's raylet, KillActor and SetJob from itself are for its lease manager, all others for the GCS."""
        me = raylet_of(self.node)
        if src == me or self.head is None:
            return self.lease_manager.handle(now, src, msg)
        self.apply(self.head.handle(now, src, msg))
        # The GCS's messages to this raylet are handled first here too, not after those that came with this one.
        inbox, self.router.inbox = self.router.inbox, []
        self.messages(me, inbox)
        return _NOTHING

    # ------------------------------------------------------------ the object store and its transfers

    def _allocate(self, now: float, src: bytes, msg: m.Message) -> Iterable[Any]:
        effects = self.store.handle(now, src, msg)
        self.transfers.populate(self.store.high_water)
        self.garbage.note_shortages(self.store.shortages)
        return effects

    def _prefetch(self, now: float, src: bytes, msg: m.Prefetch) -> Iterable[Any]:
        """Pull the arguments of a task. Those in a neighbor's store are read there; it may have to restore them."""
        remote = []
        for ref in msg.refs:
            near = [] if self.node in ref.nodes else [node for node in ref.nodes if node in self.neighbor_dirs]
            if near:
                self.router.send(raylet_of(near[0]), m.Prefetch([m.ArgRef(ref.id, ref.size, near[:1])]))
            else:
                remote.append(ref)
        return self._allocate(now, src, m.Prefetch(remote)) if remote else _NOTHING

    def _on_infeasible(self, now: float, src: bytes, msg: m.Infeasible) -> Iterable[Any]:
        """Report an actor or a group of an earlier run that waits; the creators of all others are processes."""
        self.log(f"from the journal of an earlier run: {msg.reason}")
        return _NOTHING

    def _list_store(self, now: float, src: bytes, msg: m.ListStore) -> Iterable[Any]:
        links = [*self.router.links.values(), *self.router.neighbor_links.values()]
        processes = [[link.proc, link.pid, link.kind] for link in links]
        value = {**self.store.snapshot(), "list": self.store.largest_objects(msg.limit), "processes": processes}
        self.router.send(src, m.GcsReply(msg.req, True, msgspec.msgpack.encode(value)))
        return _NOTHING

    # ------------------------------------------------------------ effects

    def _send(self, effect: fx.Send) -> None:
        router = self.router
        if effect.dest in router.neighbor_links and type(effect.msg) in _DIRECT_TO_NEIGHBORS:
            router.reply_to_neighbor(effect.dest, effect.msg)
        else:
            router.send(effect.dest, effect.msg)


class ObjectTransfers:
    """Transfers of objects between nodes by the data plane, and memory that is populated ahead of what the store uses.

    Args:
        data: None: this node is the only one so far.
        prefault: populates the pages of the arena.
        ended: called with "received" or "sent", the tag, and why the transfer failed, for what ends at once.
    """

    def __init__(
        self,
        context: NodeContext,
        data: DataPlane | None,
        prefault: Prefaulter,
        ended: Callable[[str, int, str | None], None],
    ) -> None:
        self._context, self._data, self._prefault, self._ended = context, data, prefault, ended

    def use(self, data: DataPlane) -> None:
        """Use this data plane from now on."""
        self._data = data

    def populate(self, high_water: int) -> None:
        """The store has given out memory up to this offset."""
        self._prefault.allocated_to(high_water)

    def receive(self, effect: fx.StartReceive) -> None:
        """Receive a chunk of an object."""
        try:
            self._plane(effect.node).receive(effect.node, effect.tag, effect.offset, effect.size)
        except TransportError as error:
            self._ended("received", effect.tag, str(error))

    def send(self, effect: fx.StartSend) -> None:
        """Send a chunk of an object."""
        try:
            self._plane(effect.node).send(effect.node, effect.tag, effect.offset, effect.size)
        except TransportError as error:
            self._ended("sent", effect.tag, str(error))

    def cancel(self, effect: fx.CancelReceive) -> None:
        """Give up a chunk that has not come."""
        if self._data is None or self._data.cancel(effect.tag):
            self._ended("received", effect.tag, "cancelled")

    def _plane(self, node: int) -> DataPlane:
        if self._data is None or node >= self._context.cluster_size:
            raise TransportError(f"this cluster has no node {node}")
        return self._data


class SpillIo:
    """The disk of one raylet: carries out what the store decides about spilling, and reports a disk that hangs.

    Args:
        files: closed with `close`.
    """

    def __init__(self, raylet: Raylet, files: SpillFiles) -> None:
        self._raylet = raylet
        self._files = files
        self._timeout = raylet.context.config.spill_timeout
        self._check_due = False
        self._stalled_since = 0.0
        self._stall_text = ""
        raylet.loop.watch(files.fileno(), lambda event: self._read_reports())

    def close(self) -> None:
        """Close the files; before the arena is closed."""
        self._files.close()

    def write(self, effect: fx.WriteSpill) -> None:
        """Write objects to a segment."""
        pieces = [(piece.offset, piece.size, piece.position) for piece in effect.pieces]
        self._files.write(effect.segment, pieces)
        self._schedule_check()

    def read(self, effect: fx.ReadSpill) -> None:
        """Read an object back into the arena."""
        piece = effect.piece
        self._files.read(effect.id, effect.segment, piece.offset, piece.size, piece.position)
        self._schedule_check()

    def lend(self, effect: fx.LendSpilled) -> None:
        """Let a process read an object in the file."""
        path = self._files.path(effect.segment)
        self._raylet.router.send(effect.proc, m.OnDisk(effect.id, path, effect.position, effect.size))

    @property
    def overflow_path(self) -> str:
        """Where processes of this node open the overflow file."""
        return self._files.overflow.path

    def reserve(self, effect: fx.ReserveOverflow) -> None:
        """Take disk space for an object past the store."""
        self._files.reserve(effect.id, effect.position, effect.size)
        self._schedule_check()

    def release(self, effect: fx.ReleaseOverflow) -> None:
        """Give the disk space of an object past the store back."""
        self._files.release(effect.position, effect.size)

    def discard(self, effect: fx.DiscardSpilled) -> None:
        """Free the space of an object in its segment."""
        self._files.discard(effect.segment, effect.position, effect.size, effect.last)

    def _read_reports(self) -> None:
        raylet = self._raylet
        now = raylet.loop.now
        for ident, error in self._files.reports():
            store = raylet.store
            raylet.apply(store.spill_read_ended(now, ident, error) if ident else store.spill_write_ended(now, error))
        if self._stall_text:
            self._check_stall()

    def _schedule_check(self) -> None:
        if not self._check_due and self._timeout:
            self._check_due = True
            loop = self._raylet.loop
            loop.call_at(loop.now + self._raylet.context.config.tick, self._tick)

    def _tick(self) -> None:
        self._check_due = False
        self._check_stall()
        if self._files.busy:
            self._schedule_check()

    def _check_stall(self) -> None:
        """Report stalled operations to the store; print a line when a stall begins and when it is over."""
        raylet, directory = self._raylet, self._files.directory
        stalled, seconds = self._files.stuck(self._timeout)
        if stalled and not self._stall_text:
            self._stalled_since = time.time() - seconds
            since = time.strftime("%H:%M:%S", time.localtime(self._stalled_since))
            self._stall_text = f"{directory} has not answered since {since}"
            raylet.log(
                f"objects are spilled to disk, and {self._stall_text} ({seconds:.0f} s); until it does, what does not "
                "fit into memory fails, and the rest goes on; hint: look at that disk or file server, or name another "
                "directory by HPCRAY_SPILL_DIR"
            )
        elif not stalled and self._stall_text:
            self._stall_text = ""
            raylet.log(f"{directory} answers again, after {time.time() - self._stalled_since:.0f} s; spilling goes on")
        elif not stalled:
            return
        raylet.apply(raylet.store.disk_stalled(raylet.loop.now, stalled, self._stall_text))


HANDLERS: dict[type[m.Message], Callable[[Raylet], Handler]] = {
    # Leases, workers and bundles of this node.
    m.RequestLeases: lambda r: r.lease_manager.handle,
    m.ReturnLease: lambda r: r.lease_manager.handle,
    m.Blocked: lambda r: r.lease_manager.handle,
    m.Unblocked: lambda r: r.lease_manager.handle,
    m.GrantLeases: lambda r: r.lease_manager.handle,
    m.StartActor: lambda r: r.lease_manager.handle,
    m.ProcLeaving: lambda r: r.lease_manager.handle,
    m.ExitRefused: lambda r: r.lease_manager.handle,
    m.Undeliverable: lambda r: r.lease_manager.handle,
    m.PrepareBundles: lambda r: r.lease_manager.handle,
    m.CommitBundles: lambda r: r.lease_manager.handle,
    m.ReturnBundles: lambda r: r.lease_manager.handle,
    m.ResourceContention: lambda r: r.lease_manager.handle,
    m.PeerLeaseRequest: lambda r: r.lease_manager.handle,
    m.PeerLeasesRefused: lambda r: r.lease_manager.handle,
    m.PlacementGroupNodes: lambda r: r.lease_manager.handle,
    m.KillActor: lambda r: r._to_lease_manager_or_gcs,
    m.SetJob: lambda r: r._to_lease_manager_or_gcs,
    m.Infeasible: lambda r: r._on_infeasible,
    m.ProcDied: lambda r: r._on_proc_died,
    # The object store.
    m.Create: lambda r: r._allocate,
    m.Open: lambda r: r._allocate,
    m.Prefetch: lambda r: r._prefetch,
    m.Seal: lambda r: r.store.handle,
    m.Release: lambda r: r.store.handle,
    m.Free: lambda r: r.store.handle,
    m.Pull: lambda r: r.store.handle,
    m.PullRefused: lambda r: r.store.handle,
    m.PullElsewhere: lambda r: r.store.handle,
    m.RaisePriority: lambda r: r.store.handle,
    m.DiskRead: lambda r: r.store.handle,
    m.ObjectGet: lambda r: r.store.handle,
    m.ListStore: lambda r: r._list_store,
    # The GCS, where this raylet is the head.
    m.CreateActor: lambda r: r._register,
    m.CreateGroup: lambda r: r._register,
    m.GcsCall: lambda r: r._register,
    m.WatchActor: lambda r: r._to_gcs,
    m.ActorReady: lambda r: r._to_gcs,
    m.ActorGone: lambda r: r._to_gcs,
    m.ActorOutOfScope: lambda r: r._to_gcs,
    m.StartActorRefused: lambda r: r._to_gcs,
    m.UnmetLeaseRequest: lambda r: r._to_gcs,
    m.GrantLeasesRefused: lambda r: r._to_gcs,
    m.NodeView: lambda r: r._to_gcs,
    m.WatchGroup: lambda r: r._to_gcs,
    m.RemoveGroup: lambda r: r._to_gcs,
    m.RequestGarbageCollection: lambda r: r._to_gcs,
    m.BundlesPrepared: lambda r: r._to_gcs,
    m.NodeInventory: lambda r: r._to_recovering_gcs,
    # Long frames in slots.
    m.SlotFrame: lambda r: r.frames.on_slot_frame,
    m.FrameRead: lambda r: r.frames.on_frame_read,
    m.FrameSlotsReturned: lambda r: r.frames.on_returned,
    # What workers print.
    m.OutputLost: lambda r: r.log_monitor.on_lost,
    m.OutputPrinted: lambda r: r.log_monitor.on_printed,
    m.FlushOutput: lambda r: r.log_monitor.on_flush,
    # Memory and introspection.
    m.CollectGarbage: lambda r: r.garbage.on_collect,
    m.RetriableTasks: lambda r: r.memory_monitor.on_retriable_tasks,
    m.Introspect: lambda r: r.introspection.on_introspect,
    m.GcsReply: lambda r: r.introspection.on_answer,
    m.LastFigures: lambda r: r._on_last_figures,
    m.EndReason: lambda r: r._on_end_reason,
    m.ExtensionMessage: lambda r: r._on_extension_message,
}
"""The handler of each message in a raylet; `Raylet.start` binds each entry, once. Membership, failover and drain are in
`runtime.node.cluster_member.HANDLERS`; no message is in both tables."""

EFFECT_HANDLERS: dict[type, Callable[[Raylet], EffectHandler]] = {
    fx.Send: lambda r: r._send,
    fx.ForkWorker: lambda r: r._fork_worker,
    fx.Preload: lambda r: lambda effect: r.processes.preload(effect.modules, effect.env),
    fx.KillWorker: lambda r: lambda effect: r.processes.kill(effect.worker, effect.reason),
    fx.StartReceive: lambda r: r.transfers.receive,
    fx.StartSend: lambda r: r.transfers.send,
    fx.CancelReceive: lambda r: r.transfers.cancel,
    fx.WriteSpill: lambda r: r.spill_io.write,
    fx.ReadSpill: lambda r: r.spill_io.read,
    fx.LendSpilled: lambda r: r.spill_io.lend,
    fx.DiscardSpilled: lambda r: r.spill_io.discard,
    fx.ReserveOverflow: lambda r: r.spill_io.reserve,
    fx.ReleaseOverflow: lambda r: r.spill_io.release,
}
"""The handler of each effect of a core; bound like `HANDLERS`."""
