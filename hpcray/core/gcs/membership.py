"""Who is in: gathering the ranks at start, heartbeats, deaths, and the orderly end.

Two cores. `Membership` lives in the head's raylet and knows everybody; `HeadWatch` lives in every other raylet and
knows the head. Both return effects to carry out and events to act on, in one list, in order.

Only the head declares a node dead, and it never takes that back: what the node still says is dropped everywhere, and
when it hears of its death it ends. Each death has a number, its *epoch*: the order in which all nodes learn of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Union

from hpcray.base.config import Config
from hpcray.base.ids import HEAD, node_of, raylet_of
from hpcray.core.effects import Effect, Send
from hpcray.core.gcs.silence import Complaints, Silence
from hpcray.wire import messages as m

GATHERING, CONNECTING, UP, STOPPING, STOPPED, FAILED = (
    "gathering",
    "connecting",
    "up",
    "stopping",
    "stopped",
    "failed",
)
ASKED = 8
"""Who hears nothing from the head asks so many other nodes whether they hear it."""
STOP_GRACE = 1.0
"""Nodes may take `stop_timeout` to end their processes, and this long to say so."""


@dataclass(slots=True, frozen=True)
class AllIn:
    """Every rank said hello; the table is on its way to all of them."""

    nodes: list[m.NodeInfo]


@dataclass(slots=True, frozen=True)
class ClusterUp:
    """Every rank has applied the table: `HeadCore.cluster_up`, then the driver may start."""

    nodes: list[m.NodeInfo]


@dataclass(slots=True, frozen=True)
class StartFailed:
    """The cluster did not come up. `reason` names the ranks. Everybody in has been told to stop."""

    reason: str


@dataclass(slots=True, frozen=True)
class NodeLost:
    """A node died: `HeadCore.node_died`, and `RayletCore.node_died` on the head's node (the others get NodeDied).

    It is to be told, too, if it can be: it may be alive behind a cut link, and has to end. epoch: number of this death.
    """

    node: int
    reason: str
    epoch: int


@dataclass(slots=True, frozen=True)
class AllStopped:
    """The job has ended. `missing`: nodes that did not say so in time."""

    code: int
    missing: list[int]


MemberEvent = Union[AllIn, ClusterUp, StartFailed, NodeLost, AllStopped]
Outcome = Union[Effect, MemberEvent]

HANDLES: tuple[type, ...] = (m.NodeHello, m.NodeReady, m.NodeStopped, m.Heartbeat, m.PeerFailed)
"""Message types for `Membership.handle`; the head's own raylet sends the first three too, to itself."""


class Membership:
    """Head side.

    Args:
        size: how many ranks there are, this one included.
        session: name of the job's session, for the table.
        now: the start deadline counts from here.
        me: the node of the head.

    Attributes:
        settled: how many messages of a node to the head the head's successor would know of.
    """

    def __init__(self, size: int, session: str, config: Config, now: float, me: int = 0) -> None:
        self.size = size
        self.me = me
        self.settled: Callable[[int], int] = lambda node: 0
        self.session = session
        self.state = GATHERING
        self.code = 0
        self.run = m.RunInfo()
        self._timeout = config.start_timeout
        self._stop_timeout = config.stop_timeout
        self._deadline = now + config.start_timeout
        self._infos: dict[int, m.NodeInfo] = {}
        self._ready: set[int] = set()
        self._stopped: set[int] = set()
        self._silence = Silence(config.heartbeat_interval, config.node_timeout)
        self._complaints = Complaints(config.heartbeat_interval)
        self.dead: dict[int, str] = {}

    def resume(self, now: float, nodes: Sequence[m.NodeInfo], dead: Mapping[int, str], run: m.RunInfo) -> None:
        """Go on from what another head knew, instead of gathering. `dead`: in the order of their deaths."""
        self.state, self.run = UP, run
        self._infos = {info.index: info for info in nodes}
        self._ready = set(self._infos)
        self.dead = dict(dead)
        self._silence.begin(now, (node for node in self.alive() if node != self.me))

    # ------------------------------------------------------------ questions

    def missing(self) -> list[int]:
        """Ranks that are not in yet (while gathering), or have not applied the table yet (while connecting)."""
        done = self._ready if self.state == CONNECTING else self._infos.keys()
        return [rank for rank in range(self.size) if rank not in done]

    def alive(self) -> list[int]:
        """Nodes that are in and not dead, in order."""
        return [rank for rank in sorted(self._infos) if rank not in self.dead]

    def is_dead(self, node: int) -> bool:
        """Whether the node was declared dead. It stays so: what it still sends must be dropped."""
        return node in self.dead

    def suspects(self, now: float) -> dict[int, float]:
        """Nodes that have not been heard of for a while, and the seconds of their silence."""
        return self._silence.suspects(now)

    # ------------------------------------------------------------ events

    def handle(self, now: float, src: bytes, msg: m.Message) -> list[Outcome]:
        """Any message in `HANDLES`. A node that was declared dead and speaks again is told to end."""
        node = node_of(src)
        if node in self.dead:
            return [Send(src, m.Stop(1))]
        self._silence.heard(now, node)
        if isinstance(msg, m.NodeHello):
            return self._hello(now, msg.info)
        if isinstance(msg, m.NodeReady):
            return self._is_ready(now, msg.node)
        if isinstance(msg, m.NodeStopped):
            self._stopped.add(msg.node)
            return self._check_stopped(now)
        if isinstance(msg, m.PeerFailed) and msg.node == node:
            return self.node_failed(now, node, msg.reason)
        if isinstance(msg, m.PeerFailed) and msg.node not in self.dead:
            self._complaints.add(now, node, msg.node, msg.reason)
            return [Send(raylet_of(msg.node), self._heartbeat(msg.node))]  # fails at once if it is dead
        return []

    def heard(self, now: float, node: int) -> None:
        """Anything arrived from this node: it lives."""
        self._silence.heard(now, node)

    def node_failed(self, now: float, node: int, reason: str) -> list[Outcome]:
        """The node is gone: the transport says so, or its silence does. All who live are told."""
        if node in self.dead or node in self._stopped or self.state in (STOPPED, FAILED):
            return []
        info = self._infos.get(node)
        if self.state in (GATHERING, CONNECTING):
            return self._fail(f"rank {node}{_on(info)} died during start-up: {reason}")
        if info is not None:
            reason = f"host {info.host}: {reason}"
        self.dead[node] = reason
        self._silence.forget(node)
        self._complaints.forget(node)
        epoch = len(self.dead)
        out: list[Outcome] = [Send(raylet_of(n), m.NodeDied(node, reason, epoch)) for n in self.alive() if n != self.me]
        out.append(NodeLost(node, reason, epoch))
        return out + self._check_stopped(now)

    def allow(self, seconds: float) -> None:
        """The nodes have much to clean up: give them so much longer to stop."""
        self._stop_timeout += seconds

    def stop(self, now: float, code: int) -> list[Outcome]:
        """End the job: every raylet, node 0's too, gets Stop and answers NodeStopped."""
        if self.state in (STOPPING, STOPPED, FAILED):
            return []
        self.state = STOPPING
        self.code = code
        self._deadline = now + self._stop_timeout + STOP_GRACE
        out: list[Outcome] = [Send(raylet_of(node), m.Stop(code)) for node in self.alive()]
        return out + self._check_stopped(now)

    def tick(self, now: float) -> list[Outcome]:
        """Heartbeats and deadlines, every `config.heartbeat_interval`."""
        out: list[Outcome] = []
        if self.state in (GATHERING, CONNECTING):
            out += self._check_start(now)
        if self.state == UP:
            for node, silent in self._silence.look(now):
                out += self.node_failed(now, node, f"it was not heard of for {silent:.1f} s")
            verdict = self._complaints.verdict(now)
            if verdict is not None:
                out += self.node_failed(now, *verdict)
        if self.state in (CONNECTING, UP):
            out += [Send(raylet_of(node), self._heartbeat(node)) for node in self.alive() if node != self.me]
        return out + self._check_stopped(now)

    # ------------------------------------------------------------ inside

    def _hello(self, now: float, info: m.NodeInfo) -> list[Outcome]:
        if self.state in (STOPPING, STOPPED, FAILED):
            if self.state == STOPPING and 0 <= info.index < self.size:
                self._infos.setdefault(info.index, info)  # the end waits for it too
            return [Send(raylet_of(info.index), m.Stop(1 if self.state == FAILED else self.code))]
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
        self.state = CONNECTING
        nodes = self._table()
        out: list[Outcome] = [Send(raylet_of(n), m.NodeTable(self.session, nodes, self.run)) for n in range(self.size)]
        out.append(AllIn(nodes))
        return out

    def _is_ready(self, now: float, node: int) -> list[Outcome]:
        self._ready.add(node)
        if self.state != CONNECTING or len(self._ready) < self.size:
            return []
        self.state = UP
        self._silence.begin(now, (node for node in self._infos if node != self.me))
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
        self.state = FAILED
        out: list[Outcome] = [Send(raylet_of(node), m.Stop(1)) for node in sorted(self._infos)]
        out.append(StartFailed(reason))
        return out

    def _check_stopped(self, now: float) -> list[Outcome]:
        if self.state != STOPPING:
            return []
        missing = [node for node in self.alive() if node not in self._stopped]
        if missing and now < self._deadline:
            return []
        self.state = STOPPED
        return [AllStopped(self.code, missing)]

    def _heartbeat(self, node: int) -> m.Heartbeat:
        return m.Heartbeat(self.me, len(self.dead), self.settled(node))

    def _table(self) -> list[m.NodeInfo]:
        return [self._infos[index] for index in sorted(self._infos)]


class HeadWatch:
    """The other side, in all other raylets: says that it lives, and notices when the head does not.

    It judges from the table on: before that the head waits for others, and has a deadline for it.

    Attributes:
        alone: whether no other node was heard of either while the head was silent: this node is cut off.
    """

    def __init__(self, node: int, config: Config) -> None:
        self._node = node
        self._silence = Silence(config.heartbeat_interval, config.head_timeout)
        self._head = 0
        self._nodes: Sequence[int] = ()
        self._peers: list[int] = []
        self._asked_at = float("inf")
        self.alone = True

    def begin(self, now: float, nodes: Sequence[int] = ()) -> None:
        """The head has sent the table."""
        self._nodes = nodes
        self.moved(now, self._head)

    def moved(self, now: float, head: int) -> None:
        """From now on this node is the head."""
        self._head = head
        self._silence.begin(now, (head,))
        others = [node for node in self._nodes if node != head]
        after = [node for node in others if node > self._node] + [node for node in others if node < self._node]
        self._peers = after[:ASKED]
        self._asked_at, self.alone = float("inf"), True

    def heard_other(self, now: float) -> None:
        """Something arrived from another node than the head."""
        if now > self._asked_at:
            self.alone = False

    def heard(self, now: float) -> None:
        """Anything arrived from the head."""
        self._silence.heard(now, self._head)

    def tick(self, now: float) -> tuple[list[Effect], str]:
        """Every `config.heartbeat_interval`.

        Returns:
            Effects to carry out, and why the head counts as dead; "" while it lives.
        """
        for _, silent in self._silence.look(now):
            return [], f"it was not heard of for {silent:.1f} s"
        out: list[Effect] = [Send(HEAD, m.Heartbeat(self._node))]
        if self._silence.suspects(now):
            self._asked_at = min(self._asked_at, now)
            out += [Send(raylet_of(node), m.Ping(self._node)) for node in self._peers]
        else:
            self._asked_at, self.alone = float("inf"), True
        return out, ""


def _on(info: m.NodeInfo | None) -> str:
    return f" (host {info.host}, pid {info.pid})" if info is not None else ""
