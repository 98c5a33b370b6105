"""A simulated cluster whose nodes crash, stop and are cut off for a while, while the head's book of nodes decides.

The network is `SimNet`, which is what MPI does, and more: a cut link loses nothing, it delivers everything late and in
order; a stopped raylet reads everything when it goes on; a crashed node is silent, and sends to it may or may not fail.
Messages that may be repeated arrive twice now and then, which MPI never does: the cores must not mind.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from simcluster import SEAT, SimCluster

from hpcray.common.config import Config
from hpcray.common.ids import HEAD, node_of, number_of, raylet_of
from hpcray.common.resources import Resources
from hpcray.core.effects import Send
from hpcray.core.gcs.node_manager import UP, HeadFailureDetector, NodeLost, NodeManager, Outcome, PeerProbe
from hpcray.protocol import messages as m

TWICE = (
    m.NodeDied, m.Heartbeat, m.PeerFailed, m.ActorReady, m.ActorGone, m.WatchActor,
    m.KillActor, m.ActorOutOfScope, m.ProcDied, m.CreateActor,
)  # fmt: skip
GIVES_UP = 30.0
"""A wire between two nodes that has been cut for this long reports an error, if anybody uses it."""

Thunk = Callable[[], object]


class FaultCluster(SimCluster):
    """All nodes up at time 0.

    Attributes:
        declared: nodes that the head has declared dead, and when.
        alone: nodes that ended because they heard nothing of the head, and whether of nobody else either.
        twice: how likely it is that a message of `TWICE` is delivered again.
    """

    def __init__(
        self,
        totals: Sequence[Resources],
        delays: Sequence[float],
        rng: random.Random,
        config: Config,
        twice: float = 0.2,
        real: bool = False,
    ) -> None:
        size = len(totals)
        self.rng = rng
        self.twice = twice
        self.wire_notices = rng.random() < 0.5
        self.declared: dict[int, float] = {}
        self.alone: dict[int, bool] = {}
        self._cut: dict[frozenset[int], tuple[float, list[Thunk]]] = {}
        self._stopped: dict[int, list[Thunk]] = {}
        self._went_on: dict[int, float] = {}
        self._lost: list[set[int]] = [set() for _ in range(size)]
        self.member = NodeManager(size, "session", config, 0.0)
        self.watches = {node: HeadFailureDetector(node, config) for node in range(1, size)}
        period, timeout = config.heartbeat_interval, config.node_timeout
        self._unanswered = {node: PeerProbe(period, timeout) for node in range(1, size)}
        self._spoken: list[set[int]] = [set() for _ in range(size)]
        self._heard: list[dict[int, float]] = [{} for _ in range(size)]
        super().__init__(totals, delays, config, real=real)
        for node in range(size):
            info = m.NodeInfo(node, f"id{node}", f"host{node}", "a", 1, {}, b"", "mpi", 0)
            self.member.handle(0.0, raylet_of(node), m.RegisterNode(info))
        for node in range(size):
            self.member.handle(0.0, raylet_of(node), m.NodeReady(node))
        assert self.member.state == UP
        for node in range(size):
            if node:
                self.watches[node].begin(0.0, range(size))
            self.beat(node)

    # ------------------------------------------------------------ what tests do

    def crash(self, node: int) -> None:
        """It vanishes, with everything on it."""
        if node not in self.dead_nodes:
            super().crash(node)

    def cut(self, one: int, other: int, seconds: float) -> None:
        """Nothing passes between the two for so long."""
        pair = frozenset((one, other))
        if pair not in self._cut:
            self._cut[pair] = (self.net.now, [])
            self.net.after(seconds, lambda: self._release(self._cut.pop(pair)[1]))

    def isolate(self, node: int, seconds: float) -> None:
        """Pull its network cable."""
        for other in range(len(self.raylets)):
            if other != node:
                self.cut(node, other, seconds)

    def stop(self, node: int, seconds: float) -> None:
        """SIGSTOP for its raylet; the processes of the node run on."""
        if node not in self._stopped:
            self._stopped[node] = []
            self.net.after(seconds, lambda: self._go_on(node))

    def _go_on(self, node: int) -> None:
        self._went_on[node] = self.net.now
        self._release(self._stopped.pop(node))

    def _release(self, waiting: list[Thunk]) -> None:
        for thunk in waiting:
            thunk()

    # ------------------------------------------------------------ membership

    def beat(self, node: int) -> None:
        """What a raylet does every `heartbeat_interval`."""
        if node in self.dead_nodes or self._waits(node, lambda: self.beat(node)):
            return
        now = self.net.now
        if node == 0:
            self.outcomes(self.member.tick(now))
        else:
            effects, dead = self.watches[node].tick(now)
            self.carry_out(raylet_of(node), effects)
            self._look_at_peers(node)
            if dead:
                self.alone[node] = self.watches[node].alone
                self.crash(node)
        self.net.after(self.config.heartbeat_interval, lambda: self.beat(node))

    def _look_at_peers(self, node: int) -> None:
        spoken, self._spoken[node] = self._spoken[node], set()
        spoken.discard(0)
        silent, accused = self._unanswered[node].tick(self.net.now, spoken, self._heard[node], self._lost[node])
        for other in silent:
            self.post(raylet_of(node), raylet_of(other), m.Ping(node))
        for other, _ in accused:
            self.post(raylet_of(node), HEAD, m.PeerFailed(other, "no answer"))

    def outcomes(self, outcomes: list[Outcome]) -> None:
        failed: list[int] = []
        for outcome in outcomes:
            if isinstance(outcome, Send):
                self.post(SEAT, outcome.dest, outcome.msg)
                if node_of(outcome.dest) in self.dead_nodes and self.wire_notices:
                    failed.append(node_of(outcome.dest))
            else:
                assert isinstance(outcome, NodeLost), outcome
                assert outcome.epoch == len(self.declared) + 1 and outcome.node not in self.declared
                self.declared[outcome.node] = self.net.now
                died = m.NodeDied(outcome.node, outcome.reason, outcome.epoch)
                self.post(SEAT, raylet_of(outcome.node), died)
                self.carry_out(SEAT, self.head.node_died(self.net.now, outcome.node, outcome.reason))
                self.unchecked += 1
                self.told(0, died)
        for node in failed:
            self.outcomes(self.member.node_failed(self.net.now, node, "MPI send failed"))

    def told(self, node: int, msg: m.NodeDied) -> None:
        """A raylet learns of a death, perhaps of its own."""
        if msg.node == node:
            self.crash(node)
        elif msg.node not in self._lost[node]:
            self._lost[node].add(msg.node)
            self.carry_out(raylet_of(node), self.raylets[node].node_died(self.net.now, msg.node))
            for proc in [proc for proc in self.submitters if node_of(proc) == node]:
                self.post(raylet_of(node), proc, msg)

    # ------------------------------------------------------------ the network

    def post(self, src: bytes, dest: bytes, msg: m.Message) -> None:
        if dest == HEAD:
            dest = SEAT
        a, b = node_of(src), node_of(dest)
        since = self._cut.get(frozenset((a, b)), (self.net.now, []))[0]
        if a != b:
            self._spoken[a].add(b)
        if b in self._lost[a] and number_of(src) == 0:  # the router knows, and says so
            super().post(raylet_of(a), src, m.Undeliverable(dest, "its node is dead"))
            return
        if a and b and a != b and b not in self._lost[a] and self.net.now - since > GIVES_UP:
            super().post(raylet_of(a), HEAD, m.PeerFailed(b, "timed out"))
        super().post(src, dest, msg)

    def deliver(self, src: bytes, dest: bytes, msg: m.Message) -> None:
        a, b = node_of(src), node_of(dest)
        held = self._held(a, b)
        if held is not None:
            held.append(lambda: self.deliver(src, dest, msg))
        else:
            self._passed(src, dest, msg)

    def _passed(self, src: bytes, dest: bytes, msg: m.Message) -> None:
        """The message has reached its node. A cut from now on does not hold it up: later ones would overtake it."""
        a, b = node_of(src), node_of(dest)
        through_raylet = a != b or number_of(dest) == 0
        if (through_raylet and self._waits(b, lambda: self._passed(src, dest, msg))) or a in self._lost[b]:
            return
        if a != b:
            self._heard[b][a] = self.net.now
        if b == 0 and a != 0:
            self.member.heard(self.net.now, a)
        elif a == 0 and b in self.watches:
            self.watches[b].heard(self.net.now)
        self.arrive(src, dest, msg)
        if isinstance(msg, TWICE) and self.rng.random() < self.twice:
            self.net.after(self.net.delay(), lambda: a in self._lost[b] or self.arrive(src, dest, msg))

    def arrive(self, src: bytes, dest: bytes, msg: m.Message) -> None:
        node = node_of(dest)
        if node in self.dead_nodes or node_of(src) in self.dead_nodes:
            return
        if number_of(dest) == 0 and node in self.watches and node_of(src) not in (0, node):
            self.watches[node].heard_other(self.net.now)
        if isinstance(msg, m.Ping):
            self.post(dest, src, m.Heartbeat(node))
        elif isinstance(msg, (m.Heartbeat, m.PeerFailed)):
            if node == 0:
                self.outcomes(self.member.handle(self.net.now, src, msg))
        elif isinstance(msg, m.NodeDied) and number_of(dest) == 0:
            self.told(node, msg)
        else:
            super().deliver(src, dest, msg)

    def _held(self, a: int, b: int) -> list[Thunk] | None:
        """What waits for the way between two nodes to be whole again; None: it is."""
        cut = self._cut.get(frozenset((a, b))) if a != b else None
        return None if cut is None else cut[1]

    def _waits(self, node: int, thunk: Thunk) -> bool:
        """Whether the raylet stands still; it will do this when it goes on."""
        waiting = self._stopped.get(node)
        if waiting is None:
            return False
        waiting.append(thunk)
        return True

    # ------------------------------------------------------------ what a raylet that stands still does later

    def tick(self, node: int) -> None:
        if not self._waits(node, lambda: self.tick(node)):
            super().tick(node)

    def join(self, proc: bytes) -> None:
        if not self._waits(node_of(proc), lambda: self.join(proc)):
            super().join(proc)

    def noticed(self, proc: bytes, reason: str) -> None:
        if not self._waits(node_of(proc), lambda: self.noticed(proc, reason)):
            super().noticed(proc, reason)

    def head_noticed(self, proc: bytes, reason: str) -> None:
        node = node_of(proc)
        held = self._held(0, node)
        if held is not None:
            held.append(lambda: self.head_noticed(proc, reason))
        else:
            self._head_was_told(proc, reason)

    def _head_was_told(self, proc: bytes, reason: str) -> None:
        if node_of(proc) not in self._lost[0] and not self._waits(0, lambda: self._head_was_told(proc, reason)):
            super().head_noticed(proc, reason)

    def task_done(self, holder: bytes, worker: bytes, task: object) -> None:
        a, b = node_of(worker), node_of(holder)
        if a != b:
            self._spoken[a].add(b)
        held = self._held(a, b)
        if held is not None:
            held.append(lambda: self.task_done(holder, worker, task))
        elif a not in self._lost[b]:
            super().task_done(holder, worker, task)  # type: ignore[arg-type]

    def pushed(self, src: bytes, proc: bytes, task: object, ident: bytes = b"") -> None:
        a, b = node_of(src), node_of(proc)
        if a != b:
            self._spoken[a].add(b)
        held = self._held(a, b)
        if held is not None:
            held.append(lambda: self.pushed(src, proc, task, ident))
        elif a not in self._lost[b]:
            super().pushed(src, proc, task, ident)  # type: ignore[arg-type]

    # ------------------------------------------------------------ what must hold

    def check(self) -> None:
        super().check()
        if self.checks % 20 == 0:
            self.member.check_invariants()
        seen: set[bytes] = set()
        for worker in self.workers.values():
            if worker.actor and node_of(worker.proc) not in self.declared and not worker.exiting:
                assert worker.actor not in seen, f"an actor lives twice at {self.net.now}"
                seen.add(worker.actor)
        for node, when in self.declared.items():
            limit = self.config.head_timeout + 2.0
            since = max(when, self._went_on.get(node, 0.0))
            late = node not in self._stopped and self.net.now - since > limit
            assert node in self.dead_nodes or not late, f"node {node} lives on, fenced"
