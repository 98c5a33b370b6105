"""A raylet: the pure cores of one node, composed with its loop, its processes and its wires."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from hpcray.base.config import Config
from hpcray.base.ids import HEAD, make_proc, node_of, raylet_of, show_proc
from hpcray.core import effects as fx
from hpcray.core.gcs import head as gcs
from hpcray.core.raylet import HANDLES, RayletCore
from hpcray.core.store.node_store import HANDLES as STORE_HANDLES
from hpcray.core.store.node_store import NodeStore
from hpcray.host.prefault import Prefaulter
from hpcray.runtime.local_links import DRIVER, GUEST, Link
from hpcray.runtime.local_processes import LocalProcesses
from hpcray.runtime.raylet_loop import RayletLoop
from hpcray.runtime.router import Router
from hpcray.transport.base import DataPlane, TransportError
from hpcray.wire import messages as m

if TYPE_CHECKING:
    from hpcray.runtime.guests import Guests

Handler = Callable[[float, bytes, Any], Iterable[Any]]

_NOTHING: tuple[()] = ()
_TO_GUESTS = frozenset({m.Opened, m.StoreError, m.Unpin})


@dataclass(frozen=True)
class Seat:
    """What one raylet knows about itself.

    Attributes:
        info: this node, as the head will know it.
        cluster_size: number of nodes.
        session_dir: its session directory.
        config: its settings.
        driver_rank: the node that runs the program.
    """

    info: m.NodeInfo
    cluster_size: int
    session_dir: str
    config: Config
    driver_rank: int = 0


class Raylet:
    """Dispatches messages by type, carries out effects, and tells the cores which processes came and went.

    What the cluster and the end of the job need is `Cluster`'s part; it adds its handlers to these tables.

    Attributes:
        handlers: message type to who handles it; the effects it returns are carried out.
        carriers: effect (or membership event) type to who carries it out.
        on_driver_died: called when the job's driver is gone.
        on_template_gone: called when the template process has ended.
        on_fatal: called with the reason why this node cannot go on.
        on_node_lost: called when the wire finds a node dead.
        on_death: called after each death of a local process.
        on_joined: called with each process that was welcomed.
        headship: where the head is.
        run: what the head knows of this run of the job.
        neighbours: see `neighbours.neighbours`.
        buried: nodes whose death is dealt with.
    """

    def __init__(
        self,
        seat: Seat,
        loop: RayletLoop,
        router: Router,
        core: RayletCore,
        store: NodeStore,
        head: gcs.HeadCore | None,
        prefault: Prefaulter,
        data: DataPlane | None,
    ) -> None:
        self.seat = seat
        self.node = seat.info.index
        self.loop = loop
        self.router = router
        self.core = core
        self.store = store
        self.head = head
        self.processes: LocalProcesses
        self.guests: Guests
        self.on_driver_died: Callable[[str], None]
        self.on_template_gone: Callable[[str], None]
        self.on_fatal: Callable[[str], None]
        self.on_node_lost: Callable[[int, str], None]
        self.on_death: Callable[[], None]
        self.on_joined: Callable[[bytes], None] = lambda proc: None
        self.run = m.RunInfo()
        self.neighbours: dict[int, str] = {}
        self.buried: set[int] = set()
        self.headship = router.headship
        self._me = raylet_of(self.node)
        self._prefault = prefault
        self._data = data
        self.handlers: dict[type, Handler] = dict.fromkeys(HANDLES, core.handle)
        self.handlers |= dict.fromkeys(STORE_HANDLES, store.handle)
        self.handlers |= dict.fromkeys((m.Create, m.Open), self._allocate)
        self.handlers |= {m.Prefetch: self._prefetch, m.ProcDied: self._remote_died}
        if head is not None:
            self.lead(head, gcs.HANDLES)
        self.headship.listeners.append(self._head_moved)
        self.handlers[m.ListStore] = self._list_store
        self.handlers[m.Infeasible] = self._resumed_waits
        self.carriers: dict[type, Callable[[Any], None]] = {
            fx.Send: self._send,
            fx.ForkWorker: lambda effect: self.processes.fork(effect.number, effect.env),
            fx.KillWorker: lambda effect: self.processes.kill(effect.worker, effect.reason),
            fx.StartReceive: self._start_receive,
            fx.StartSend: self._start_send,
            fx.CancelReceive: self._cancel_receive,
        }

    def lead(self, head: gcs.HeadCore, handles: Iterable[type]) -> None:
        """This raylet is the head, from now on."""
        self.head = head
        self.handlers |= dict.fromkeys(handles, head.handle)
        self.handlers |= {m.KillActor: self._for_core_or_head, m.SetJob: self._for_core_or_head}

    def apply(self, effects: Iterable[Any]) -> None:
        """Carry out what a core asks for, in order."""
        carriers = self.carriers
        for effect in effects:
            carriers[type(effect)](effect)

    def _send(self, effect: fx.Send) -> None:
        router = self.router
        if effect.dest in router.guests and type(effect.msg) in _TO_GUESTS:
            router.answer(effect.dest, effect.msg)
        else:
            router.send(effect.dest, effect.msg)

    # ------------------------------------------------------------ what the loop tells (raylet_loop.Events)

    def hello(self, link: Link, hello: m.Hello) -> None:
        """A new connection has said who it is."""
        if link.kind == GUEST:
            self.guests.hello(link)
        else:
            self.processes.hello(link, hello)

    def messages(self, src: bytes, messages: list[m.Message]) -> None:
        """Messages for this raylet."""
        now = self.loop.now
        handlers = self.handlers
        for msg in messages:
            handler = handlers.get(type(msg))
            if handler is None:
                self.say(f"no use for {type(msg).__name__} from {show_proc(src)}")
                continue
            effects = handler(now, src, msg)
            if effects:
                self.apply(effects)

    def link_closed(self, link: Link, reason: str) -> None:
        """A process closed its connection."""
        if link.kind == GUEST:
            self.guests.closed(link)
        else:
            self.processes.link_closed(link, reason)

    def transfer_ended(self, what: str, tag: int, error: str | None) -> None:
        """A "received" or "sent" report of the data plane."""
        ended = self.store.received if what == "received" else self.store.sent
        self.apply(ended(self.loop.now, tag, error))

    def node_lost(self, node: int, reason: str) -> None:
        """The wire itself found a node dead."""
        self.on_node_lost(node, reason)

    # ------------------------------------------------------------ what the processes tell (ProcessEvents)

    def new_number(self) -> int:
        """A process number for a driver."""
        return self.core.pool.new_number()

    def welcome(self, proc: bytes) -> m.Welcome:
        """The answer to its Hello."""
        seat = self.seat
        return m.Welcome(
            proc,
            seat.info.node_id,
            seat.session_dir,
            seat.info.arena_size,
            seat.cluster_size,
            seat.info.host,
            self.core.job,
            seat.config.as_dict(),
            self.run,
            self.headship.node,
            self.neighbours,
        )

    def joined(self, proc: bytes, kind: str, pid: int) -> None:
        """It was welcomed."""
        self.apply(self.core.process_joined(self.loop.now, proc, kind, pid))
        self.on_joined(proc)

    def died(self, proc: bytes, kind: str, reason: str, peers: set[bytes]) -> None:
        """A process of this node is gone: tell the cores, and whoever spoke with it."""
        if self.processes.leaving:
            self.on_death()  # everybody goes
            return
        now = self.loop.now
        self.apply(self.core.process_died(now, proc, reason))
        # Processes of neighbours speak with ours without us.
        nodes = {node_of(peer) for peer in peers} | self.neighbours.keys()
        nodes -= {self.node, node_of(HEAD)}
        if self.head is None:
            nodes.discard(self.headship.node)
            self.router.send(HEAD, m.ProcDied(proc, reason))
        for node in nodes:
            self.router.send(raylet_of(node), m.ProcDied(proc, reason))
        self._tell_of_death(proc, reason)
        if kind == DRIVER:
            self.on_driver_died(reason)
        self.on_death()

    def fork_failed(self, number: int, reason: str) -> None:
        """A worker could not be forked."""
        self.router.forget(make_proc(self.node, number), reason)
        self.apply(self.core.fork_failed(self.loop.now, number, reason))
        self.on_death()

    def template_broken(self, reason: str) -> None:
        """No worker can be forked on this node."""
        self.on_fatal(reason)

    def template_gone(self, reason: str) -> None:
        """The template process has ended."""
        self.on_template_gone(reason)

    # ------------------------------------------------------------ deaths

    def _remote_died(self, now: float, src: bytes, msg: m.ProcDied) -> Iterable[Any]:
        """Another raylet says that a process of its node, which spoke with somebody here, is gone."""
        self.apply(self.core.remote_process_died(now, msg.proc))
        self._tell_of_death(msg.proc, msg.reason)
        return _NOTHING

    def _tell_of_death(self, proc: bytes, reason: str) -> None:
        now = self.loop.now
        self.apply(self.store.process_died(now, proc))
        if self.head is not None:
            self.apply(self.head.process_died(now, proc, reason))
        for link in self.router.links.values():
            if proc in link.peers:
                link.peers.discard(proc)
                link.peers.add(raylet_of(node_of(proc)))  # what `proc` knew of may still be known on its node
                self.router.send(link.proc, m.ProcDied(proc, reason))

    def _head_moved(self) -> None:
        """The successor hears what is here, after what was on its way to the old head."""
        moved = m.HeadMoved(self.headship.node, self.headship.epoch)
        self.apply(self.core.head_moved(self.loop.now))
        for proc in self.router.links:
            self.router.send(proc, moved)

    # ------------------------------------------------------------ dispatch that type alone does not decide

    def _for_core_or_head(self, now: float, src: bytes, msg: m.Message) -> Iterable[Any]:
        """In the head's raylet, what it says to itself and what processes say to the head look alike."""
        if src == self._me or self.head is None:
            return self.core.handle(now, src, msg)
        self.apply(self.head.handle(now, src, msg))
        # What it says to this raylet comes first here too, not after what has come in with this message.
        said, self.router.inbox = self.router.inbox, []
        self.messages(self._me, said)
        return _NOTHING

    # ------------------------------------------------------------ transfers

    def _allocate(self, now: float, src: bytes, msg: m.Message) -> Iterable[Any]:
        effects = self.store.handle(now, src, msg)
        self._prefault.allocated_to(self.store.high_water)
        return effects

    def _prefetch(self, now: float, src: bytes, msg: m.Prefetch) -> Iterable[Any]:
        """What a neighbour has will be read in its store; it may have to be brought back from disk."""
        far = []
        for ref in msg.refs:
            near = [] if self.node in ref.nodes else [node for node in ref.nodes if node in self.neighbours]
            if near:
                self.router.send(raylet_of(near[0]), m.Prefetch([m.ArgRef(ref.id, ref.size, near[:1])]))
            else:
                far.append(ref)
        return self._allocate(now, src, m.Prefetch(far)) if far else _NOTHING

    def _resumed_waits(self, now: float, src: bytes, msg: m.Infeasible) -> Iterable[Any]:
        """Of an actor or a group that came back from an earlier run; the makers of all others are processes."""
        self.say(f"from the journal of an earlier run: {msg.reason}")
        return _NOTHING

    def _list_store(self, now: float, src: bytes, msg: m.ListStore) -> Iterable[Any]:
        """Somebody looks at the node's memory."""
        links = [*self.router.links.values(), *self.router.guests.values()]
        processes = [[link.proc, link.pid, link.kind] for link in links]
        value = {**self.store.snapshot(), "list": self.store.listing(msg.limit), "processes": processes}
        self.router.send(src, m.GcsReply(msg.req, True, msgspec.msgpack.encode(value)))
        return _NOTHING

    def _start_receive(self, effect: fx.StartReceive) -> None:
        try:
            self._plane(effect.node).receive(effect.node, effect.tag, effect.offset, effect.size)
        except TransportError as error:
            self.transfer_ended("received", effect.tag, str(error))

    def _start_send(self, effect: fx.StartSend) -> None:
        try:
            self._plane(effect.node).send(effect.node, effect.tag, effect.offset, effect.size)
        except TransportError as error:
            self.transfer_ended("sent", effect.tag, str(error))

    def _cancel_receive(self, effect: fx.CancelReceive) -> None:
        if self._data is None or self._data.cancel(effect.tag):
            self.transfer_ended("received", effect.tag, "cancelled")

    def _plane(self, node: int) -> DataPlane:
        if self._data is None or node >= self.seat.cluster_size:
            raise TransportError(f"this cluster has no node {node}")
        return self._data

    def say(self, text: str) -> None:
        """A line on stderr."""
        with contextlib.suppress(OSError):  # the other end of stderr may be gone, as when the launcher was killed
            print(f"hpcray: node {self.node} ({self.seat.info.host}): {text}", file=sys.stderr, flush=True)
