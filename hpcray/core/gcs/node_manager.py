"""Membership of nodes: gathering the ranks at start, heartbeats, deaths, and the orderly end.

Two cores. `NodeManager` is in the head's raylet and knows all nodes; `HeadFailureDetector` is in every other raylet and
watches the head. Both return effects to carry out and events to act on, in one list, in order.

Only the head declares a node dead, and it never takes that back: messages of the node are dropped everywhere from then
on, and the node ends when it hears of its death. Each death has a number, its *epoch*: 1 for the first node that died,
2 for the next. All nodes learn of deaths in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Union

import msgspec

from hpcray.common.config import Config
from hpcray.common.ids import HEAD, node_of, raylet_of
from hpcray.core.effects import Effect, Send
from hpcray.protocol import messages as m
from hpcray.protocol.messages import NodeInfo

# ------------------------------------------------------------ standby
# Which raylet becomes the head when the present one dies.


NO_NODE = -1
"""In place of a node: there is none."""


def choose_standby(
    living: Iterable[NodeInfo], head: int, driver_rank: int, leaving: Container[int] = (), present: int = NO_NODE
) -> int:
    """The node whose raylet gets the head's tables, and takes over when the head dies; NO_NODE where there is none.

    Where a program runs, its node, and no other: the job ends with that node in any case. Without a program, a node of
    another world than the head's, as the nodes of one world often end together; the one that was there first. The
    present one stays, unless it is about to leave or is of the head's world, and another is not.

    Args:
        living: all living nodes that have connected, the head among them.
        driver_rank: the node of the program; NO_NODE in a job without one.
        leaving: nodes that are about to leave.
        present: the standby so far.
    """
    found = {info.index: info for info in living}
    world = found.pop(head).world
    if driver_rank != NO_NODE:
        return driver_rank if driver_rank in found else NO_NODE
    ranked = (
        (info.index in leaving, info.world == world, info.index != present, info.index) for info in found.values()
    )
    return min(ranked, default=(False, False, False, NO_NODE))[3]


def is_majority(count: int, living: int) -> bool:
    """Return True if so many nodes of those that were alive last can go on as the job; the others then do not."""
    return 2 * count > living


# ------------------------------------------------------------ node manager


_OWN_STALL = 2.0
"""If two checks are more than this many periods apart, this process itself was stopped."""
SUSPECTED_FROM = 0.5
"""Share of the timeout from which on a silent node is suspected."""
_VERDICT_AFTER = 2.0
"""Periods after an accusation in which the accused may be found dead in the usual ways."""


class HeartbeatTracker:
    """When the last heartbeat of each node came.

    A process that did not run itself (stopped, swapped out, on a machine with far more work than cores) finds all
    others silent when it wakes. So a tracker notes when it looked last: time in which it did not look does not count.

    Args:
        period: seconds between two heartbeats, and between two looks.
        timeout: seconds of silence that mean death.
    """

    def __init__(self, period: float, timeout: float) -> None:
        self._period = period
        self._timeout = timeout
        self._heard: dict[int, float] = {}
        self._looked: float | None = None

    def begin(self, now: float, nodes: Iterable[int]) -> None:
        """Expect these nodes, and no others, to be heard of from now on."""
        self._heard = dict.fromkeys(nodes, now)
        self._looked = now

    def expect(self, now: float, node: int) -> None:
        """Expect this node to be heard of from now on, if it was not expected before."""
        self._heard.setdefault(node, now)

    def expected(self) -> list[int]:
        """Nodes that are expected to be heard of."""
        return list(self._heard)

    def since(self, node: int) -> float:
        """When an expected node was last heard of, or expected first."""
        return self._heard[node]

    def heard(self, now: float, node: int) -> None:
        """A message of this node arrived."""
        if now > self._heard.get(node, now):
            self._heard[node] = now

    def forget(self, node: int) -> None:
        """The node is dead: expect nothing of it."""
        self._heard.pop(node, None)

    def silent_nodes(self, now: float) -> list[tuple[int, float]]:
        """The nodes that have been silent for longer than the timeout, and for how long."""
        missed = now - (now if self._looked is None else self._looked) - self._period
        self._looked = now
        if missed > (_OWN_STALL - 1.0) * self._period:
            self._heard = {node: min(now, when + missed) for node, when in self._heard.items()}
        return [(node, now - when) for node, when in self._heard.items() if now - when > self._timeout]

    def suspects(self, now: float) -> dict[int, float]:
        """Return the suspected nodes, with the seconds for which each has been silent."""
        limit = SUSPECTED_FROM * self._timeout
        return {node: now - when for node, when in self._heard.items() if now - when > limit}


class PeerProbe:
    """Nodes to which this one has sent messages and from which nothing has come since: the link may be cut.

    No third node can notice that; the head hears both. Not every message has an answer, so a node that is silent for a
    period is sent a Ping, and is accused when it has not answered that in time.

    Args:
        period: seconds between two looks, with which `tick` is called.
        timeout: seconds that a node has to answer.
    """

    def __init__(self, period: float, timeout: float) -> None:
        self._tracker = HeartbeatTracker(period, timeout)
        self._sent_to: dict[int, float] = {}

    def tick(
        self, now: float, sent_to: Iterable[int], heard: Mapping[int, float], dead: Container[int] = ()
    ) -> tuple[list[int], list[tuple[int, float]]]:
        """Look once.

        Args:
            sent_to: nodes to which something was sent since the last call.
            heard: when each node was last heard of.
            dead: nodes of which nothing is expected.

        Returns:
            Nodes to send a Ping; nodes to accuse, with the seconds since their first Ping.
        """
        tracker = self._tracker
        for node in tracker.expected():
            if node in dead or heard.get(node, 0.0) > tracker.since(node):
                tracker.forget(node)
        accused = tracker.silent_nodes(now)
        for node, when in self._sent_to.items():
            if node not in dead and heard.get(node, 0.0) <= when:
                tracker.expect(now, node)
        self._sent_to = dict.fromkeys(sent_to, now)
        return sorted(tracker.expected()), sorted(accused)


class _Accusation(msgspec.Struct):
    since: float
    why: dict[int, str] = msgspec.field(default_factory=dict)


class AccusationArbiter:
    """Accusations: one node could not reach another, though the head hears both.

    The two would never agree again about what was sent, so one of them has to go. Usually the accused has
    died, and the head finds that out itself within a moment. Else it is the accused, unless its accuser accuses more
    nodes than accuse it: then the accuser's own wire is what broke.
    """

    def __init__(self, period: float) -> None:
        self._grace = _VERDICT_AFTER * period
        self._accusations: dict[int, _Accusation] = {}

    def accuse(self, now: float, accuser: int, accused: int, why: str) -> None:
        """`accuser` could not reach `accused`."""
        self._accusations.setdefault(accused, _Accusation(now)).why.setdefault(accuser, why)

    def forget(self, node: int) -> None:
        """The node is dead: drop accusations of it, and by it."""
        self._accusations.pop(node, None)
        for accused in list(self._accusations):
            accusation = self._accusations[accused]
            accusation.why.pop(node, None)
            if not accusation.why:
                del self._accusations[accused]

    def verdict(self, now: float) -> tuple[int, str] | None:
        """A node that has to go, and why. Call again when it has gone; None: no accusation is due."""
        for accused, accusation in self._accusations.items():
            if now - accusation.since < self._grace:
                continue
            accuser = max(accusation.why, key=self._accuses)
            if self._accuses(accuser) > len(accusation.why):
                others = sorted(node for node, other in self._accusations.items() if accuser in other.why)
                return accuser, f"it cannot reach nodes {', '.join(map(str, others))}, which others can"
            return accused, f"node {accuser} cannot reach it: {accusation.why[accuser]}"
        return None

    def _accuses(self, node: int) -> int:
        return sum(node in accusation.why for accusation in self._accusations.values())


GATHERING, CONNECTING, UP = "gathering", "connecting", "up"
STOPPING, STOPPED, FAILED = "stopping", "stopped", "failed"
TRANSITIONS: dict[str, tuple[str, ...]] = {
    # Ranks join. A head that takes over from another one goes on from here at once.
    GATHERING: (CONNECTING, UP, STOPPING, FAILED),
    # All ranks have joined and connect their data planes.
    CONNECTING: (UP, STOPPING, FAILED),
    # All ranks are connected; work runs.
    UP: (STOPPING,),
    # Every node has been sent Stop.
    STOPPING: (STOPPED,),
    # Every living node has stopped, or the time for it is up.
    STOPPED: (),
    # The cluster did not come up.
    FAILED: (),
}
"""States of the cluster."""
ABSENT, JOINED, ALIVE, STOPPED_NODE, DEAD = "absent", "joined", "alive", "stopped", "dead"
NODE_TRANSITIONS: dict[str, tuple[str, ...]] = {
    # Its RegisterNode has not come. The number of a node that was admitted to a running job and never comes stays so.
    ABSENT: (JOINED,),
    # Its RegisterNode has come; it does not have the node table yet, or has not connected. Where the job runs already:
    # nor have all others connected to it.
    JOINED: (ALIVE, STOPPED_NODE, DEAD),
    # It has connected, and so have all others to it.
    ALIVE: (STOPPED_NODE, DEAD),
    # It has ended its processes in good order.
    STOPPED_NODE: (),
    # It was declared dead, which is final: the node is fenced.
    DEAD: (),
}
"""States of one node, see `NodeManager.node_state`."""
MOST_NODES = 0xFF00
"""Numbers that a job has for its nodes, those that have died included."""
PEERS_PINGED = 8
"""Other nodes to which a node sends a Ping while it hears nothing of the head."""
STOP_GRACE = 1.0
"""Seconds after `stop_timeout`, which nodes have to end their processes, in which their NodeStopped may arrive."""


class AllIn(msgspec.Struct, frozen=True):
    """Every rank has joined; the node table is on its way to all of them."""

    nodes: list[m.NodeInfo]


class ClusterUp(msgspec.Struct, frozen=True):
    """Every rank has applied the table: call `Gcs.cluster_up`, then the driver may start."""

    nodes: list[m.NodeInfo]


class NodesAdded(msgspec.Struct, frozen=True):
    """Nodes have joined the running job, and all others know them: call `Gcs.nodes_joined`."""

    infos: list[m.NodeInfo]


class StartFailed(msgspec.Struct, frozen=True):
    """The cluster did not come up. `reason` names the ranks. All nodes that joined have been sent Stop."""

    reason: str


class NodeLost(msgspec.Struct, frozen=True):
    """A node died: call `Gcs.node_died`, and the raylet core's on the head's node (the others get NodeDied).

    Send NodeDied to the node itself, too: it may be alive behind a cut link, and has to end. epoch: of this death.
    kept_at: see NodeDied.
    """

    node: int
    reason: str
    epoch: int
    kept_at: tuple[int, ...] = ()


class AllStopped(msgspec.Struct, frozen=True):
    """The job has ended. `missing`: nodes whose NodeStopped has not come in time."""

    code: int
    missing: list[int]


class MajorityLost(msgspec.Struct, frozen=True):
    """Most nodes have fallen silent at once: they go on without this one, under another head."""

    silent: int


NodeEvent = Union[AllIn, ClusterUp, NodesAdded, StartFailed, NodeLost, AllStopped, MajorityLost]
Outcome = Union[Effect, NodeEvent]

HANDLES: tuple[type, ...] = (
    m.RegisterNode, m.NodeReady, m.NodeStopped, m.Heartbeat, m.PeerFailed, m.NodeAcquainted,
)  # fmt: skip
"""Message types for `NodeManager.handle`; the head's own raylet sends the first three, and the last, to itself."""


class _JoiningNodes(msgspec.Struct, eq=False):
    """Nodes that join the running job together.

    Attributes:
        nodes: those of them that live.
        others: earlier nodes that have not connected to them yet.
        connecting: those of `nodes` that have not connected to all nodes of their table yet.
    """

    nodes: set[int]
    others: set[int]
    connecting: set[int]

    def over(self) -> bool:
        """Return True if no node is awaited, or none is left that waits."""
        return not self.nodes or not (self.others or self.connecting)

    def forget(self, node: int) -> None:
        """The node is dead."""
        for some in (self.nodes, self.others, self.connecting):
            some.discard(node)


class NodeManager:
    """The head's side: which nodes are in, which are dead.

    Args:
        size: how many ranks there are, this one included. Nodes that join the running job have higher numbers.
        session: name of the job's session, for the node table.
        now: the start deadline counts from here.
        me: the node of the head.
        run: facts about this run of the job, for the node table.
        driver_rank: the node of the program; NO_NODE in a job without one.

    Attributes:
        state: of the cluster, see TRANSITIONS.
        dead: why nodes died, in the order of their deaths.
        standby: the node that succeeds the head, which heartbeats carry; NO_NODE: none.
    """

    def __init__(
        self,
        size: int,
        session: str,
        config: Config,
        now: float,
        me: int = 0,
        run: m.RunInfo | None = None,
        driver_rank: int = 0,
    ) -> None:
        self.size = size
        self.me = me
        self.session = session
        self.state = GATHERING
        self.code = 0
        self.run = run if run is not None else m.RunInfo()
        self.standby = NO_NODE
        self._by_majority = driver_rank == NO_NODE
        self.settled_counts: list[Callable[[int], int]] = []
        self._timeout = config.start_timeout
        self._stop_timeout = config.stop_timeout
        self._deadline = now + config.start_timeout
        self._infos: dict[int, m.NodeInfo] = {}
        self._ready: set[int] = set()
        self._stopped: set[int] = set()
        self._admitted: dict[int, float] = {}  # numbers of nodes that have not registered; when they were given
        self._newcomers: list[int] = []  # have registered; no other node has been told of them
        self._introductions: list[_JoiningNodes] = []
        self._tracker = HeartbeatTracker(config.heartbeat_interval, config.node_timeout)
        self._arbiter = AccusationArbiter(config.heartbeat_interval)
        self.dead: dict[int, str] = {}
        self._kept_at: dict[int, tuple[int, ...]] = {}

    def begin_run(self, number: int) -> None:
        """Number this run of the job, before the node table is sent."""
        self.run = msgspec.structs.replace(self.run, number=number)

    def resume(
        self,
        now: float,
        nodes: Sequence[m.NodeInfo],
        dead: Mapping[int, str],
        run: m.RunInfo,
        kept_at: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Go on from what another head knew, instead of gathering. `dead`: in the order of the deaths. `kept_at`: by
        node that has left, see NodeDied."""
        self._set_state(UP)
        self.run = run
        self._infos = {info.index: info for info in nodes}
        self.size = max(self.size, *(info.index + 1 for info in nodes))
        self._ready = set(self._infos)
        self.dead = dict(dead)
        self._kept_at = {node: tuple(keepers) for node, keepers in (kept_at or {}).items()}
        self._tracker.begin(now, (node for node in self.alive() if node != self.me))

    def admit(self, now: float, count: int = 1) -> int | None:
        """The first number of `count` nodes that join the running job as one world, the others follow it; None while
        the job starts or ends. No number is given twice: that of a node that does not come is lost."""
        if self.state != UP or not 1 <= count <= MOST_NODES - self.size:
            return None
        first, self.size = self.size, self.size + count
        self._admitted.update(dict.fromkeys(range(first, self.size), now))
        return first

    def missing(self) -> list[int]:
        """Ranks that are not in yet (while gathering), or have not applied the table yet (while connecting)."""
        done = self._ready if self.state == CONNECTING else self._infos.keys()
        return [rank for rank in range(self.size) if rank not in done]

    def alive(self) -> list[int]:
        """Nodes that are in and not dead, in order."""
        return [rank for rank in sorted(self._infos) if rank not in self.dead]

    def ready(self) -> list[m.NodeInfo]:
        """Living nodes that are connected to all others, in order."""
        return [self._infos[node] for node in self.alive() if node in self._ready]

    def deaths(self) -> list[m.NodeDied]:
        """All deaths of nodes, in order."""
        return [
            m.NodeDied(node, reason, epoch, list(self._kept_at.get(node, ())))
            for epoch, (node, reason) in enumerate(self.dead.items(), 1)
        ]

    def announce_standby(self, standby: int) -> list[Outcome]:
        """This node succeeds the head from now on: send all nodes a heartbeat that says so."""
        self.standby = standby
        return [Send(raylet_of(node), self._heartbeat(node)) for node in self.alive() if node != self.me]

    def node_state(self, node: int) -> str:
        """The state of one node, see NODE_TRANSITIONS."""
        if node in self.dead:
            return DEAD
        if node in self._stopped:
            return STOPPED_NODE
        if node not in self._infos:
            return ABSENT
        return ALIVE if node in self._ready else JOINED

    def suspects(self, now: float) -> dict[int, float]:
        """Nodes that have not been heard of for a while, and the seconds of their silence."""
        return self._tracker.suspects(now)

    def handle(self, now: float, src: bytes, msg: m.Message) -> list[Outcome]:
        """Any message in `HANDLES`. A node that was declared dead and speaks again is sent Stop."""
        node = node_of(src)
        if node in self.dead:
            return [Send(src, m.Stop(1))]
        self._tracker.heard(now, node)
        if isinstance(msg, m.RegisterNode):
            return self._hello(now, msg.info)
        if isinstance(msg, m.NodeReady):
            return self._is_ready(now, msg.node)
        if isinstance(msg, m.NodeAcquainted):
            return self._acquainted(now, node, msg)
        if isinstance(msg, m.NodeStopped) and self.state == UP and node != self.me:
            return self.node_failed(now, node, "it has ended by itself")  # as it had lost this node, for one
        if isinstance(msg, m.NodeStopped):
            self._stopped.add(msg.node)
            return self._check_stopped(now)
        if isinstance(msg, m.PeerFailed) and msg.node == node:
            return self.node_failed(now, node, msg.reason)
        if isinstance(msg, m.PeerFailed) and msg.node not in self.dead:
            self._arbiter.accuse(now, node, msg.node, msg.reason)
            return [Send(raylet_of(msg.node), self._heartbeat(msg.node))]  # fails at once if it is dead
        return []

    def heard(self, now: float, node: int) -> None:
        """A message arrived from this node: it lives."""
        self._tracker.heard(now, node)

    def node_left(self, now: float, node: int, reason: str, kept_at: Sequence[int]) -> list[Outcome]:
        """A node has left in good order. kept_at: nodes that keep objects which its processes own."""
        if kept_at:
            self._kept_at[node] = tuple(kept_at)
        return self.node_failed(now, node, reason, ordered=True)

    def node_failed(self, now: float, node: int, reason: str, ordered: bool = False) -> list[Outcome]:
        """The transport or the tracker found the node gone, or it has left in order: declare it dead, and notify all
        living nodes."""
        if node in self.dead or node in self._stopped or self.state in (STOPPED, FAILED):
            return []
        self._admitted.pop(node, None)
        if node not in self._infos and self.state not in (GATHERING, CONNECTING):
            return []  # it was let in and has not registered: no other node has heard of it
        info = self._infos.get(node)
        if self.state in (GATHERING, CONNECTING):
            return self._fail(f"rank {node}{_on(info)} died during start-up: {reason}")
        if info is not None:
            reason = f"host {info.host}: {reason}{'' if ordered or info.note in reason else info.note}"
        self.dead[node] = reason
        self._tracker.forget(node)
        self._arbiter.forget(node)
        epoch, kept_at = len(self.dead), self._kept_at.get(node, ())
        died = m.NodeDied(node, reason, epoch, list(kept_at))
        out: list[Outcome] = [Send(raylet_of(n), died) for n in self.alive() if n != self.me]
        out.append(NodeLost(node, reason, epoch, kept_at))
        if node in self._newcomers:
            self._newcomers.remove(node)
        for introduction in self._introductions:
            introduction.forget(node)
        return out + self._go_on_introducing() + self._check_stopped(now)

    def allow(self, seconds: float) -> None:
        """Give the nodes so many more seconds to stop: they have much to clean up."""
        self._stop_timeout += seconds

    def stop(self, now: float, code: int) -> list[Outcome]:
        """End the job with this exit code: every raylet, the head's too, gets Stop and answers NodeStopped."""
        if self.state in (STOPPING, STOPPED, FAILED):
            return []
        self._set_state(STOPPING)
        self.code = code
        self._deadline = now + self._stop_timeout + STOP_GRACE
        out: list[Outcome] = [Send(raylet_of(node), m.Stop(code)) for node in self.alive()]
        return out + self._check_stopped(now)

    def tick(self, now: float) -> list[Outcome]:
        """Send heartbeats and check deadlines, every `config.heartbeat_interval`."""
        out: list[Outcome] = []
        if self.state in (GATHERING, CONNECTING):
            out += self._check_start(now)
        if self.state == UP:
            self._drop_absent(now)
            silent_nodes = self._tracker.silent_nodes(now)
            suspects = len(self._tracker.suspects(now)) if silent_nodes and self._by_majority else 0
            if is_majority(suspects, len(self.alive())):
                return [MajorityLost(suspects)]
            for node, silent in silent_nodes:
                out += self.node_failed(now, node, f"it was not heard of for {silent:.1f} s")
            verdict = self._arbiter.verdict(now)
            if verdict is not None:
                out += self.node_failed(now, *verdict)
        if self.state in (CONNECTING, UP):
            out += [Send(raylet_of(node), self._heartbeat(node)) for node in self.alive() if node != self.me]
        return out + self._check_stopped(now)

    def _hello(self, now: float, info: m.NodeInfo) -> list[Outcome]:
        if self.state in (STOPPING, STOPPED, FAILED):
            if self.state == STOPPING and 0 <= info.index < self.size:
                self._infos.setdefault(info.index, info)  # the end waits for it too
            return [Send(raylet_of(info.index), m.Stop(1 if self.state == FAILED else self.code))]
        if self.state == UP:
            return self._join(now, info)
        if not 0 <= info.index < self.size:
            return self._fail(f"a rank {info.index} on host {info.host} joined, but there are only {self.size} ranks")
        known = self._infos.get(info.index)
        if known is not None:
            if known == info:
                return []
            return self._fail(
                f"two processes say they are rank {info.index}: pid {known.pid} on {known.host} and "
                f"pid {info.pid} on {info.host}; hint: start one rank per node"
            )
        self._infos[info.index] = info
        if len(self._infos) < self.size:
            return []
        self._set_state(CONNECTING)
        nodes = self._table()
        out: list[Outcome] = [Send(raylet_of(n), m.NodeTable(self.session, nodes, self.run)) for n in range(self.size)]
        out.append(AllIn(nodes))
        return out

    def _join(self, now: float, info: m.NodeInfo) -> list[Outcome]:
        """A node that was admitted has registered: all nodes connect to it, and it to all of them.

        Nodes that register while others still connect to earlier ones are introduced together afterwards: a world
        costs every node a few messages, however many ranks it has.
        """
        if self._admitted.pop(info.index, None) is None:
            return []
        self._infos[info.index] = info
        self._tracker.expect(now, info.index)
        self._newcomers.append(info.index)
        return self._go_on_introducing()

    def _acquainted(self, now: float, node: int, msg: m.NodeAcquainted) -> list[Outcome]:
        out: list[Outcome] = []
        for other, problem in msg.problems.items():
            if any(other in introduction.nodes for introduction in self._introductions):
                out += self.node_failed(now, other, f"node {node} cannot reach it: {problem}")
        for introduction in self._introductions:
            if not introduction.nodes.isdisjoint(msg.nodes):
                introduction.others.discard(node)
        return out + self._go_on_introducing()

    def _go_on_introducing(self) -> list[Outcome]:
        """Let in those whom all have connected to, and introduce those who wait for that."""
        out: list[Outcome] = []
        for introduction in [one for one in self._introductions if one.over()]:
            self._introductions.remove(introduction)
            self._ready |= introduction.nodes
            if introduction.nodes:
                out.append(NodesAdded([self._infos[node] for node in sorted(introduction.nodes)]))
        if not self._newcomers or self.state != UP or any(one.others for one in self._introductions):
            return out
        nodes, self._newcomers = set(self._newcomers), []
        living = self.alive()
        introduction = _JoiningNodes(nodes, set(living) - nodes, set(nodes))
        self._introductions.append(introduction)
        joined = m.NodeJoined([self._infos[node] for node in sorted(nodes)])
        table = m.NodeTable(self.session, [self._infos[node] for node in living], self.run, self.deaths())
        out += [Send(raylet_of(node), joined) for node in sorted(introduction.others)]
        return out + [Send(raylet_of(node), table) for node in sorted(nodes)]

    def _drop_absent(self, now: float) -> None:
        for node in [node for node, since in self._admitted.items() if now - since > self._timeout]:
            del self._admitted[node]

    def _is_ready(self, now: float, node: int) -> list[Outcome]:
        if self.state == UP:
            for introduction in self._introductions:
                introduction.connecting.discard(node)
            return self._go_on_introducing()
        self._ready.add(node)
        if self.state != CONNECTING or len(self._ready) < self.size:
            return []
        self._set_state(UP)
        self._tracker.begin(now, (node for node in self._infos if node != self.me))
        return [ClusterUp(self._table())]

    def _check_start(self, now: float) -> list[Outcome]:
        if now < self._deadline:
            return []
        gone = self.missing()
        what = "did not join" if self.state == GATHERING else "joined but did not connect"
        names = ", ".join(f"rank {rank}{_on(self._infos.get(rank))}" for rank in gone[:16])
        more = f" and {len(gone) - 16} more" if len(gone) > 16 else ""
        known = ", ".join(f"{info.index} on {info.host}" for info in self._table()[:16]) or "none"
        return self._fail(
            f"{names}{more} {what} within {self._timeout:g} s ({len(gone)} of {self.size} ranks; in: {known}); "
            f"hint: look at the output of these ranks, or raise HPCRAY_START_TIMEOUT"
        )

    def _fail(self, reason: str) -> list[Outcome]:
        self._set_state(FAILED)
        out: list[Outcome] = [Send(raylet_of(node), m.Stop(1)) for node in sorted(self._infos)]
        out.append(StartFailed(reason))
        return out

    def _check_stopped(self, now: float) -> list[Outcome]:
        if self.state != STOPPING:
            return []
        missing = [node for node in self.alive() if node not in self._stopped]
        if missing and now < self._deadline:
            return []
        self._set_state(STOPPED)
        return [AllStopped(self.code, missing)]

    def _heartbeat(self, node: int) -> m.Heartbeat:
        settled = max((count(node) for count in self.settled_counts), default=0)
        return m.Heartbeat(self.me, len(self.dead), settled, self.standby)

    def _set_state(self, state: str) -> None:
        assert state in TRANSITIONS[self.state], f"the cluster: {self.state} -> {state}"
        self.state = state

    def _table(self) -> list[m.NodeInfo]:
        return [self._infos[index] for index in sorted(self._infos)]

    def check_invariants(self) -> None:
        """Check the nodes' states against the cluster's."""
        assert self.state in TRANSITIONS
        assert self._infos.keys() <= set(range(self.size)), f"there are no such ranks: {sorted(self._infos)}"
        assert self._ready <= self._infos.keys(), f"ready, but not in: {self._ready - self._infos.keys()}"
        assert not self.dead.keys() & self._tracker.expected(), "a dead node is expected to be heard of"
        assert self.me not in self.dead, "the head has declared itself dead"
        if self.state in (GATHERING, CONNECTING):
            assert not self.dead and (len(self._infos) == self.size) == (self.state == CONNECTING)
        if self.state == UP:
            living = {node for node in range(self.size) if self.node_state(node) in (JOINED, ALIVE, STOPPED_NODE)}
            assert living == set(self.alive()) and self.dead.keys() <= self._infos.keys()
            assert not self._admitted.keys() & self._infos.keys(), "a node that has registered is waited for"
            coming = [*self._newcomers, *(node for one in self._introductions for node in one.nodes)]
            assert sorted(coming) == sorted(node for node in living if self.node_state(node) == JOINED)
            for introduction in self._introductions:
                assert introduction.nodes and not introduction.over(), "nodes that all have connected to are not in"
                assert introduction.connecting <= introduction.nodes <= living >= introduction.others
            assert not self._newcomers or any(one.others for one in self._introductions), "nobody is introduced"
            assert set(self._tracker.expected()) == living - {self.me}


class HeadFailureDetector:
    """The side of all other raylets: sends heartbeats, and notices when the head is dead.

    It starts to watch when the node table has come. Until then the head may wait for other ranks, for which it has a
    deadline.

    Attributes:
        alone: whether no other node was heard of while the head was silent: this node is cut off.
    """

    def __init__(self, node: int, config: Config) -> None:
        self._node = node
        self._tracker = HeartbeatTracker(config.heartbeat_interval, config.head_timeout)
        self._head = 0
        self._nodes: set[int] = set()
        self._pinged_at = float("inf")
        self.alone = True

    def begin(self, now: float, nodes: Sequence[int] = ()) -> None:
        """The head has sent the node table."""
        self._nodes = set(nodes)
        self.head_moved(now, self._head)

    def nodes_joined(self, nodes: Iterable[int]) -> None:
        """Others have joined the job: they may be sent a Ping too."""
        self._nodes.update(nodes)

    def node_died(self, node: int) -> None:
        """Another node is dead, and answers no Ping."""
        self._nodes.discard(node)

    def head_moved(self, now: float, head: int) -> None:
        """Another node is the head from now on."""
        self._head = head
        self._tracker.begin(now, (head,))
        self._pinged_at, self.alone = float("inf"), True

    def heard_other(self, now: float) -> None:
        """A message arrived from another node than the head."""
        if now > self._pinged_at:
            self.alone = False

    def heard(self, now: float) -> None:
        """A message arrived from the head."""
        self._tracker.heard(now, self._head)

    def tick(self, now: float) -> tuple[list[Effect], str]:
        """Send a heartbeat and look at the head, every `config.heartbeat_interval`.

        Returns:
            Effects to carry out, and why the head counts as dead; "" while it lives.
        """
        for _, silent in self._tracker.silent_nodes(now):
            return [], f"it was not heard of for {silent:.1f} s"
        out: list[Effect] = [Send(HEAD, m.Heartbeat(self._node))]
        if self._tracker.suspects(now):
            self._pinged_at = min(self._pinged_at, now)
            out += [Send(raylet_of(node), m.Ping(self._node)) for node in self._peers()]
        else:
            self._pinged_at, self.alone = float("inf"), True
        return out, ""

    def _peers(self) -> list[int]:
        """The next nodes after this one."""
        others = sorted(self._nodes - {self._head, self._node}, key=lambda node: (node < self._node, node))
        return others[:PEERS_PINGED]


def _on(info: m.NodeInfo | None) -> str:
    return f" (host {info.host}, pid {info.pid})" if info is not None else ""
