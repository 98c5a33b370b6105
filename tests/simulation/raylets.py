"""Whole raylets in virtual time: real routers, cluster parts and cores, over a network that delays, loses and cuts."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import groupby
from types import SimpleNamespace
from typing import Any

from simnet import SimNet

from hpcray.autoscaler.node_autoscaling import NodeAutoscaling
from hpcray.common.config import Config
from hpcray.common.ids import HEAD, node_of, raylet_of
from hpcray.common.resources import to_units
from hpcray.core.gcs.gcs import Gcs, RecoveringGcs
from hpcray.core.gcs.node_manager import HeadFailureDetector, NodeManager
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.core.raylet.local_lease_manager import LocalLeaseManager
from hpcray.protocol import messages as m
from hpcray.protocol.frames import FrameReader, pack
from hpcray.protocol.messages import Message, decode, encode
from hpcray.runtime.node.cluster_member import ClusterMember
from hpcray.runtime.raylet.event_loop import EventLoop
from hpcray.runtime.raylet.local_processes import NodeContext
from hpcray.runtime.raylet.raylet import Raylet
from hpcray.runtime.raylet.router import HeadLocation, Router
from hpcray.transport.base import FOREVER, PeerLost

CHECK_GCS_EVERY = 10
"""Events between two checks of the leaders' GCS."""


class SimLink:
    """The connection of a process; what comes over it goes to `SimNode.said`."""

    def __init__(self, proc: bytes, kind: str, fd: int) -> None:
        self.proc, self.kind, self.fd, self.pid = proc, kind, fd, fd
        self.out: list[Any] = []
        self.peers: set[bytes] = set()
        self.blocked = self.closing = False


class SimControl:
    """One node's messages. Whoever sends to a process that is gone learns it at once; a cut link says nothing."""

    def __init__(self, world: World, rank: int) -> None:
        self.rank, self.size = rank, world.size
        self._world = world
        self.inbox: list[tuple[int, bytes]] = []
        self.forgotten: dict[int, str] = {}

    def send(self, dest: int, data: bytes, wake: bool = True) -> None:
        world, me = self._world, self.rank
        cut = bool(world.cut) and frozenset((me, dest)) in world.cut
        if dest in self.forgotten or (world.nodes[dest].ended and not cut):
            raise PeerLost(dest, self.forgotten.get(dest, "connection reset"))
        world.net.send(raylet_of(me), raylet_of(dest), lambda: world.arrive(me, dest, data))

    def poll(self) -> list[tuple[int, bytes]]:
        found, self.inbox = self.inbox, []
        return found

    def lost(self) -> list[tuple[int, str]]:
        return []

    def forget(self, rank: int, why: str) -> None:
        self.forgotten[rank] = why


class SimWires:
    """Every node can reach every other one, whenever it came."""

    def __init__(self, control: SimControl) -> None:
        self.control, self.data = control, None

    def meet(self, info: m.NodeInfo) -> None:
        pass

    def shares_mpi(self, node: int) -> bool:
        return True

    def dropped(self) -> int:
        return 0


class SimLoop(EventLoop):
    """A loop whose turns are taken when something has come, or a timer is due."""

    def __init__(self, node: SimNode, router: Router, control: SimControl) -> None:
        self.now = 0.0
        self.last_heard: dict[int, float] = {}
        self.each_turn = []
        self._node = node
        self._router = router
        self._control: Any = control
        self._data = None
        self._sharing = None
        self._links: Any = {}
        self._timers = []
        self._timer_count = 0
        self._wake_at = FOREVER
        self._running = True

    def turn(self, now: float) -> None:
        self.now = now
        self._poll_transports(self._control)
        self._run_timers()
        if self._router.deferred_to_head:
            self._read_deferred_to_head()
        if self._router.inbox:
            self._read_own_messages()
        for tell in self.each_turn:
            tell()
        self._flush()

    def next_at(self) -> float | None:
        if self._router.inbox or self._router.deferred_to_head:
            return self.now
        return self._timers[0][0] if self._timers else None

    def stop(self) -> None:
        self._node.end()

    def _write(self, link: Any) -> None:
        frames, link.out = link.out, []
        for frame in FrameReader().feed(b"".join(frames)):
            for msg in decode(frame[20:]):
                self._node.heard_by(link.proc, bytes(frame[12:20]), msg)


class SimProcesses:
    """Workers that are forked at once."""

    def __init__(self, node: SimNode) -> None:
        self._node = node
        self.stopping = False

    @property
    def workers(self) -> int:
        return len(self._node.workers)

    def fork(self, number: int, env: Any) -> None:
        self._node.later(0.01, lambda: self._node.join(self._node.raylet.proc_of(number), "worker"))

    def kill(self, worker: bytes, reason: str = "") -> None:
        self._node.later(0.002, lambda: self._node.die(worker, reason or "killed by signal 9"))

    def ask_to_leave(self, code: int) -> None:
        self.stopping = True


class SimLeaving:
    """The end of a node, which takes a moment."""

    def __init__(self, node: SimNode) -> None:
        self._node = node
        self.begun = False
        self.code = 0
        self.at = self.extra_time = 0.0

    def begin(self, code: int, stop_timeout: float | None = None) -> None:
        if not self.begun:
            self.begun, self.code, self.at = True, code, self._node.world.net.now
            self._node.raylet.processes.ask_to_leave(code)
            self._node.later(0.05, self._gone)

    def _gone(self) -> None:
        self._node.workers.clear()
        self._node.cluster.processes_ended()

    def check(self) -> None:
        pass

    def watch_driver(self, driver: Any) -> None:
        pass

    def template_gone(self) -> None:
        pass


class Nothing:
    """Stands for parts that no test here looks at."""

    def __getattr__(self, name: str) -> Any:
        return Nothing()

    def __call__(self, *args: Any) -> None:
        return None


class SimNode:
    """One raylet and the processes of its node."""

    def __init__(self, world: World, rank: int, config: Config, first: int = 0, head: int = 0, epoch: int = 0) -> None:
        """first: the number of its world's rank 0; not 0: it joins the running job, whose head is `head`."""
        self.world, self.rank = world, rank
        self.ended = False
        self.paused_until = 0.0
        self.workers: dict[bytes, bytes] = {}
        self.control = SimControl(world, rank)
        self.obeyed: list[tuple[float, bytes, Message]] = []
        self.inboxes: dict[bytes, list[Message]] = {}
        self.on_moved: dict[bytes, Callable[[], None]] = {}
        self._wake: float | None = None
        self._fds = 0
        info = m.NodeInfo(
            rank, f"id{rank}", f"host{rank}", f"10.0.0.{rank}", 1, to_units({"CPU": 4}), b"", "mpi", 1 << 20,
            joined=first > 0, world=first,
        )  # fmt: skip
        size = rank + 1 if first else world.size
        context = NodeContext(info, size, "", config, world.driver_rank)
        self.router = Router(rank, size, self.control, HeadLocation(head, epoch))
        self.loop = SimLoop(self, self.router, self.control)
        lease_manager = LocalLeaseManager(rank, info.total, size, config)
        gcs = Gcs(config) if rank == 0 else None
        store = ObjectStore(rank, 1 << 20, spill_threshold=0.8, chunk=1 << 16, slots=4)
        self.raylet = Raylet(context, self.loop, self.router, lease_manager, store, gcs, Nothing(), None)  # type: ignore[arg-type]
        self.raylet.log = lambda text: world.said.append((world.net.now, rank, text))  # type: ignore[method-assign]
        self.raylet.attach(SimProcesses(self), Nothing(), Nothing(), Nothing(), Nothing(), Nothing(), Nothing())  # type: ignore[arg-type]
        self.loop._events = self.raylet
        self.leaving = SimLeaving(self)
        node_manager = (
            NodeManager(world.size, "session", config, 0.0, driver_rank=world.driver_rank) if rank == 0 else None
        )
        detector = HeadFailureDetector(rank, config) if rank else None
        self.cluster = ClusterMember(
            self.raylet, self.leaving, Nothing(), 0, (), node_manager, detector, SimWires(self.control), lambda: None,
            lambda: None, SimpleNamespace(autoscaling=NodeAutoscaling, near_sets=None, cancel_jobs=None), rank == 0,
        )  # type: ignore[arg-type]  # fmt: skip
        self.raylet.start(self.cluster, self.cluster.handlers(), self.cluster.effect_handlers())
        for kind in (m.StartActor, m.PrepareBundles, m.CommitBundles, m.ReturnBundles, m.GrantLeases):
            self._watch(kind)
        self.cluster.join()
        self.wake(0.0)

    def _watch(self, kind: type) -> None:
        handler = self.raylet.handlers[kind]

        def handle(now: float, src: bytes, msg: Any) -> Any:
            self.obeyed.append((now, src, msg))
            return handler(now, src, msg)

        self.raylet.handlers[kind] = handle

    # ------------------------------------------------------------ time

    def wake(self, when: float) -> None:
        if self._wake is None or when < self._wake:
            self._wake = when
            self.world.net.after(max(0.0, when - self.world.net.now), lambda: self.turn(when))

    def turn(self, when: float) -> None:
        if self._wake == when:
            self._wake = None
        now = self.world.net.now
        if self.ended:
            return
        if now < self.paused_until:
            self.wake(self.paused_until)
            return
        self.loop.turn(now)
        if HEAD in self.router.mine:
            self.world.have_led.add(self)
        self.raylet.lease_manager.check_invariants()
        following = self.loop.next_at()
        if following is not None and not self.ended:
            self.wake(max(now, following))

    def later(self, seconds: float, call: Any) -> None:
        def run() -> None:
            if not self.ended:
                call()
                self.wake(self.world.net.now)

        self.world.net.after(seconds, run)

    def end(self) -> None:
        """The process of the raylet is gone, and with it its node."""
        self.ended = True
        self.workers.clear()

    # ------------------------------------------------------------ processes

    def join(self, proc: bytes, kind: str) -> None:
        """A process of this node is welcomed."""
        self._fds += 1
        link = SimLink(proc, kind, self._fds)
        self.router.links[proc] = link  # type: ignore[assignment]
        self.loop._links[link.fd] = link
        self.workers[proc] = b""
        self.inboxes.setdefault(proc, [])
        self.raylet.joined(proc, kind, link.fd)

    def client(self) -> bytes:
        """A process that asks things."""
        proc = self.raylet.proc_of(self.raylet.new_number())
        self.join(proc, "attached")
        return proc

    def die(self, proc: bytes, reason: str) -> None:
        """A process ends."""
        if proc in self.workers:
            del self.workers[proc]
            link = self.router.links[proc]
            del self.loop._links[link.fd]
            self.router.forget(proc, reason)
            self.raylet.died(proc, "worker", reason, link.peers)

    def say(self, proc: bytes, msg: Message, dest: bytes = HEAD) -> None:
        """A process says something, a little later."""
        frame = pack(dest, proc, encode([msg]))

        def arrive() -> None:
            if proc in self.workers:
                if dest in self.router.mine:
                    self.raylet.messages(proc, decode(frame[20:]))
                else:
                    self.router.forward(dest, proc, frame)

        self.later(0.0, arrive)

    def heard_by(self, proc: bytes, src: bytes, msg: Message) -> None:
        """A process of this node reads a message."""
        self.inboxes[proc].append(msg)
        if isinstance(msg, m.BecomeActor):
            self.workers[proc] = msg.spec.actor
            self.later(0.02, lambda: self.say(proc, m.ActorReady(msg.spec.actor, b"", [])))
        elif isinstance(msg, m.HeadMoved) and proc in self.on_moved:
            self.on_moved[proc]()
        elif isinstance(msg, m.Evacuate):
            self.say(proc, m.Evacuated(msg.node), raylet_of(self.rank))
        elif isinstance(msg, m.Exit):
            self.later(0.001, lambda: self.die(proc, "exit code 0"))
        elif isinstance(msg, m.TerminateActor):
            self.say(proc, m.ProcLeaving("all handles to it are gone"), raylet_of(self.rank))
            self.later(0.005, lambda: self.die(proc, "exit code 0"))


class World:
    """All nodes, up once `run` has been called.

    Attributes:
        cut: pairs of nodes that cannot reach each other now.
        lossy: for each node, whether it loses what a dead one had sent and it has not read yet.
        said: what raylets told people: when, which, what.
        have_led: the nodes that have been the head.
    """

    def __init__(
        self, size: int, driver_rank: int, seed: int, config: Config | None = None, check_every: int = CHECK_GCS_EVERY
    ) -> None:
        self.random = random.Random(seed)
        self.net = SimNet([self.random.uniform(0.0002, 0.02) for _ in range(997)])
        self.size, self.driver_rank = size, driver_rank
        self.cut: set[frozenset[int]] = set()
        self.lossy = [self.random.random() < 0.5 for _ in range(size)]
        self.said: list[tuple[float, int, str]] = []
        self.checks = 0
        self._check_every = check_every
        self._held_back: list[tuple[int, int, bytes]] = []
        self.nodes: list[SimNode] = []
        self.have_led: set[SimNode] = set()
        self._config = config or Config(prestart=0)
        for rank in range(size):
            self.nodes.append(SimNode(self, rank, self._config))

    def join(self, count: int) -> list[SimNode]:
        """So many nodes join the running job as one world; not all of them at once."""
        head = self.leader()
        node_manager = head.cluster._node_manager
        assert node_manager is not None
        first = node_manager.admit(self.net.now, count)
        assert first == len(self.nodes)
        head.router.grow(first + count)
        self.lossy += [self.random.random() < 0.5 for _ in range(count)]
        place = (first, head.rank, head.raylet.head_location.epoch)
        came = [SimNode(self, number, self._config, *place) for number in range(first, first + count)]
        self.nodes += came
        return came

    def arrive(self, src: int, dest: int, data: bytes) -> None:
        if self.nodes[src].ended and self.lossy[dest]:
            return
        if self.cut and frozenset((src, dest)) in self.cut:
            self._held_back.append((src, dest, data))
        elif not self.nodes[dest].ended:
            self.nodes[dest].control.inbox.append((src, data))
            self.nodes[dest].wake(self.net.now)

    def mend(self) -> None:
        """All links work again; what was under way arrives late."""
        self.cut.clear()
        held, self._held_back = self._held_back, []
        for src, dest, data in held:
            self.arrive(src, dest, data)

    def run(self, until: float) -> None:
        self.net.run(until, lambda: False, self.check)

    def check(self) -> None:
        """At every moment: nobody obeys an older head than it has obeyed, and no two lead in one term."""
        leaders = [
            node for node in self.have_led if not node.ended and not node.leaving.begun and HEAD in node.router.mine
        ]
        terms = [node.raylet.head_location.epoch for node in leaders]
        assert len(terms) == len(set(terms)), (self.net.now, [node.rank for node in leaders])
        self.checks += 1
        for node in leaders if self.checks % self._check_every == 0 else ():
            assert node.raylet.head is not None
            node.raylet.head.check_invariants()

    def alive(self) -> list[SimNode]:
        return [node for node in self.nodes if not node.ended]

    def leader(self) -> SimNode:
        (found,) = (node for node in self.alive() if HEAD in node.router.mine and not node.leaving.begun)
        return found

    def head(self) -> Gcs:
        head = self.leader().raylet.head
        assert head is not None
        return head.gcs if isinstance(head, RecoveringGcs) else head


def obeyed_in_order(node: SimNode) -> bool:
    """Whether a node obeyed one head after the other, never the first again."""
    changes = [source for source, _ in groupby(node_of(src) for _, src, _ in node.obeyed)]
    return len(changes) == len(set(changes))
