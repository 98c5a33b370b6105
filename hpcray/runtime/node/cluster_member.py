"""A raylet's part in the cluster: registration, heartbeats, deaths of nodes, and the end of the job. `HANDLERS` at the
end of this file maps each message of the cluster to its handler."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hpcray.common.ids import HEAD, number_of, raylet_of
from hpcray.core.effects import Send
from hpcray.core.gcs import drain, node_manager
from hpcray.core.gcs.gcs import Gcs, RecoveringGcs
from hpcray.core.gcs.node_manager import NO_NODE, HeadFailureDetector, NodeManager, PeerProbe
from hpcray.platform.process_tree import ProcessIdentity, reap_orphans
from hpcray.platform.session_directory import SessionDirectory
from hpcray.protocol import messages as m
from hpcray.protocol.messages import DRIVER, NodeInfo
from hpcray.runtime.node.child_process import ChildProcess, DriverChild
from hpcray.runtime.node.head_failover import (
    HeadReplicator,
    HeadStandby,
    JournalOpener,
    StateLogWriter,
    keep_state_log,
    may_have_standby,
)
from hpcray.runtime.node.joining import JoinAcceptor
from hpcray.runtime.node.node_drain import NodeDeparture, NodeDrain
from hpcray.runtime.node.node_features import NodeFeatures
from hpcray.runtime.node.node_transports import NodeTransports
from hpcray.runtime.node.raylet_signals import RayletSignals
from hpcray.runtime.node.shutdown import LoopEnd, NodeShutdown
from hpcray.runtime.raylet.event_loop import EventLoop
from hpcray.runtime.raylet.raylet import EffectHandler, Handler, Raylet
from hpcray.runtime.raylet.router import Router
from hpcray.transport.base import ControlTransport, DataPlane, TransportError
from hpcray.transport.startup import read_launch

# ------------------------------------------------------------ heartbeat loop
# The periodic heartbeats of a raylet, and its look at those of others.


_SLACK = 0.1
"""The share of its period by which a heartbeat to the head may be late, to share a wake-up."""


class HeartbeatLoop:
    """Sends heartbeats and checks those of other nodes, every `heartbeat_interval`, in the raylet's thread.

    Args:
        node_manager: on the head; None elsewhere.
        head_failure_detector: on all other nodes.
        on_check: called each time on the other nodes: with the reason why the head is dead, "" while it lives; and
            whether no other node is heard of either.

    Attributes:
        head_failure_detector: None where this node is the head.
    """

    def __init__(
        self,
        raylet: Raylet,
        node_manager: NodeManager | None,
        head_failure_detector: HeadFailureDetector | None,
        on_check: Callable[[str, bool], None],
    ) -> None:
        self._raylet = raylet
        self._node_manager = node_manager
        self.head_failure_detector = head_failure_detector
        self._on_check = on_check
        config = raylet.context.config
        self._peer_probe = PeerProbe(config.heartbeat_interval, config.node_timeout)

    def lead(self, node_manager: NodeManager) -> None:
        """This node has become the head."""
        self._node_manager, self.head_failure_detector = node_manager, None

    def head_moved(self, now: float, head: int) -> None:
        """Another node has become the head."""
        if self.head_failure_detector is not None:
            self.head_failure_detector.head_moved(now, head)

    def beat(self) -> None:
        """Send a heartbeat and schedule the next."""
        raylet, loop = self._raylet, self._raylet.loop
        now, last_heard = loop.now, loop.last_heard
        interval = raylet.context.config.heartbeat_interval
        if self._node_manager is not None:
            loop.call_at(now + interval, self.beat)
            for node, when in last_heard.items():
                self._node_manager.heard(when, node)
            raylet.apply(self._node_manager.tick(now))
        elif (detector := self.head_failure_detector) is not None:
            # The head's own heartbeat wakes this raylet at about this time.
            loop.call_at(now + interval, self.beat, _SLACK * interval)
            head = raylet.head_location.node
            detector.heard(last_heard.get(head, 0.0))
            detector.heard_other(max((when for node, when in last_heard.items() if node != head), default=0.0))
            effects, dead = detector.tick(now)
            for effect in effects:
                if isinstance(effect, Send) and isinstance(effect.msg, m.Heartbeat):
                    raylet.router.send_heartbeat(effect.msg)  # the head looks at the clock as often as this raylet
                else:
                    raylet.apply((effect,))
            self._probe_peers(head)
            self._on_check(dead, detector.alone)

    def _probe_peers(self, head: int) -> None:
        """Ping nodes that do not reply, and accuse those that do not reply to the Ping either."""
        raylet, router = self._raylet, self._raylet.router
        contacted, router.contacted = router.contacted, set()
        contacted.discard(head)
        silent, accused = self._peer_probe.tick(raylet.loop.now, contacted, raylet.loop.last_heard, router.lost_nodes)
        for node in silent:
            router.send(raylet_of(node), m.Ping(raylet.node))
        for node, seconds in accused:
            router.send(HEAD, m.PeerFailed(node, f"it has not answered for {seconds:.1f} s"))


# ------------------------------------------------------------ program
# The program of a job, where it is a child of this raylet.

_LAST_WORD, _LAST_WORD_CHECK = 10.0, 0.05
"""Seconds that the job outlives its program for the last line of what shows its progress, which may still start; and
between two looks."""


class LocalDriver:
    """The job's program as a child of this raylet, with what shows its progress; nothing where it runs elsewhere.

    Args:
        template_pid: of the template process, another child.
    """

    def __init__(self, loop: EventLoop, router: Router, template_pid: int) -> None:
        self._loop, self._router, self._template_pid = loop, router, template_pid
        self._driver: DriverChild | None = None
        self._progress: ChildProcess | None = None
        self._asked = False
        self._last_word_by = float("inf")

    def start(self, driver: DriverChild, progress: ChildProcess | None) -> None:
        """Note that the program runs. progress: what shows how far it is."""
        self._driver, self._progress = driver, progress

    @property
    def is_here(self) -> bool:
        """True if it is, or was, a child of this raylet."""
        return self._driver is not None

    @property
    def code(self) -> int | None:
        """Its exit code, once it has ended."""
        return self._driver.poll() if self._driver is not None else None

    def is_shown(self, look_again: Callable[[], None]) -> bool:
        """True if nothing shows the progress of the program, which has ended, or if its last word is out.

        Args:
            look_again: called in a moment, where it is not.
        """
        progress, now = self._progress, self._loop.now
        if progress is None or progress.ended or now >= self._last_word_by:
            return True
        if self._last_word_by == float("inf"):
            self._last_word_by = now + _LAST_WORD
        if not self._asked and any(link.pid == progress.pid for link in self._router.links.values()):
            self._asked = True
            progress.terminate()
        self._loop.call_at(now + _LAST_WORD_CHECK, look_again)
        return False

    def reap_others(self) -> None:
        """Take note of the ends of adopted children, which nothing here waits for."""
        others = [child.pid for child in (self._driver, self._progress) if child is not None]
        reap_orphans({self._template_pid, *others})


# ------------------------------------------------------------ node death
# Reports a node that has been declared dead to all parts of this raylet.


def forget_node(raylet: Raylet, control: ControlTransport | None, data: DataPlane | None, died: m.NodeDied) -> None:
    """Report a dead node to the cores, transports and processes of this node; once, as a new head repeats it."""
    node, reason, now = died.node, died.reason, raylet.loop.now
    if node in raylet.forgotten_nodes:
        return
    raylet.forgotten_nodes.add(node)
    raylet.neighbor_dirs.pop(node, None)
    raylet.loop.last_heard.pop(node, None)
    raylet.router.lose_node(node, reason, died.kept_at)
    raylet.events.inform(lambda extension: extension.node_died(node, reason))
    if raylet.head is not None:
        raylet.apply(raylet.head.node_died(now, node, reason))
    raylet.apply(raylet.lease_manager.node_died(now, node))
    # Cancels receives, so before the transports forget the node.
    raylet.apply(raylet.store.node_died(now, node, raylet.router.neighbor_links))
    raylet.introspection.node_died(now, node)
    if control is not None:
        control.forget(node, reason)
    if data is not None:
        data.forget(node, reason)
    for proc in raylet.router.links:
        raylet.router.send(proc, died)


# ------------------------------------------------------------ cluster member


_PARENT_GONE_DELAY = 0.05
_HEAD_DEATH_DELAY = 2.0
"""Seconds that a node stays after it found the head dead: mpirun silently ends all ranks when one exits with 1."""
_START_MARGIN = 2.0
_MEET_AGAIN = 0.25
"""Seconds after which a node that joins tries again to reach those that it could not."""
_HAND_OVER_TIME = 5.0
"""Seconds after which a head that leaves does not wait for its successor any more."""
_TICK_SLACK = 0.25
"""The share of its period by which a tick may be late, to share a wake-up."""
_NOTHING: tuple[()] = ()


class JobSession:
    """The session of the job, as this node knows it.

    Args:
        directory: of this node.

    Attributes:
        name: equal on all nodes; "" before the head has sent it. head_host: "" where it is not known.
        notes: those of `NodeInfo`, by node.
    """

    def __init__(self, directory: SessionDirectory) -> None:
        self._directory = directory
        self.name = self.head_host = ""
        self.notes: dict[int, str] = {}

    def learn(self, table: m.NodeTable, head: int) -> None:
        """The head has sent the node table. head: its node."""
        self.name = table.session
        self.head_host = next((info.host for info in table.nodes if info.index == head), "")
        self.notes = {info.index: info.note for info in table.nodes}

    def publish(self, info: NodeInfo, size: int, end: float) -> None:
        """Write for the commands of this machine that this node is up.

        Args:
            info: of this node. size: count of the nodes. end: of the job, Unix time.
        """
        self._directory.publish(self.name, info.index, info.node_id, size, end)


class ClusterMember:
    """One per raylet, the head's included. It implements `raylet.RayletEvents` and `head_failover.HeadSuccession`.

    Args:
        raylet: `start` it with `handlers()` and `effect_handlers()` of this object.
        watched_processes: this process and others; the node ends when the parent of one of them ends.
        node_manager: on the head; None elsewhere.
        head_failure_detector: on all other nodes.
        on_up: called on the head, and where the program runs, when all nodes are up; elsewhere when this node has the
            node table.
        open_journal: opens the journal on disk, if there is to be one.
        features: of this raylet.
        program_is_remote: whether another rank starts the program.

    Attributes:
        failure: why the cluster did not come up or this node had to give up; "" when all went well.
        came_up: whether `on_up` was called.
        broken: whether other nodes may be dead or gone, so that MPI cannot be finalized.
        drain: the announced end of the job.
        program_lost: whether the node that ran the program has died; the head then returns the job's exit code.
        fenced: whether the job goes on without this node, which was declared dead.
    """

    def __init__(
        self,
        raylet: Raylet,
        shutdown: NodeShutdown,
        session: SessionDirectory,
        template_pid: int,
        watched_processes: Sequence[ProcessIdentity],
        node_manager: NodeManager | None,
        head_failure_detector: HeadFailureDetector | None,
        wires: NodeTransports,
        on_up: Callable[[], None],
        open_journal: JournalOpener,
        features: NodeFeatures,
        program_is_remote: bool = False,
    ) -> None:
        self.failure = ""
        self.broken = self.came_up = self.program_lost = self.fenced = False
        self._raylet = raylet
        self._loop = raylet.loop
        self._router = raylet.router
        self._shutdown = shutdown
        self._session = JobSession(session)
        self._watched_processes = watched_processes
        self._node_manager = node_manager
        self._wires = wires
        self._on_up = on_up
        self._program = LocalDriver(raylet.loop, raylet.router, template_pid)
        self._end = LoopEnd(raylet.loop, read_launch(os.environ).kind == "srun")
        self._heartbeat = HeartbeatLoop(raylet, node_manager, head_failure_detector, self._head_checked)
        self._standby = HeadStandby(raylet, self, open_journal, features.near_sets)
        self._replicator: HeadReplicator | None = None
        self.drain = NodeDrain(raylet, self.end_job)
        self.departure = NodeDeparture(raylet, lambda: self._node_manager, self._can_hand_over, lambda: self.end_job(0))
        self._join_acceptor = JoinAcceptor(
            raylet, wires, lambda: self._node_manager, self._refusal, self._numbers_given, features.cancel_jobs
        )
        self.autoscaling = features.autoscaling(
            raylet, self._join_acceptor.open_job, self._leads, lambda: shutdown.begun or self.drain.announced
        )
        self._signals = RayletSignals(
            self._loop, shutdown, self.drain, self._leads, program_is_remote, self.end_job, self._leave_alone
        )
        if node_manager is not None:
            assert isinstance(raylet.head, Gcs)
            node_manager.allow(shutdown.extra_time)
            self.drain.lead(node_manager.run, raylet.head)

    def handlers(self) -> dict[type, Handler]:
        """Return `HANDLERS` bound to this object."""
        return {kind: bind(self) for kind, bind in HANDLERS.items()}

    def effect_handlers(self) -> dict[type, EffectHandler]:
        """Return `EFFECT_HANDLERS` bound to this object."""
        return {kind: bind(self) for kind, bind in EFFECT_HANDLERS.items()}

    def join(self) -> None:
        """Register at the head; `on_up` follows, or a failure. The head reads its journal first.

        Raises:
            StartupError: the journal of an earlier run cannot be read.
        """
        if self._node_manager is not None:
            writer = keep_state_log(self._raylet, self._node_manager, self._standby.open_journal())
            if writer is not None:
                assert isinstance(self._raylet.head, Gcs)
                self._replicate(self._raylet.head, self._node_manager, writer)
        self._router.send(HEAD, m.RegisterNode(self._raylet.context.info))
        self._tick()
        self._heartbeat.beat()
        if self._node_manager is None:
            limit = self._raylet.context.config.start_timeout + _START_MARGIN
            self._loop.call_at(self._loop.now + limit, self._check_registered)
        if self._heartbeat.head_failure_detector is not None and self._raylet.context.info.joined:
            # The head has sent heartbeats since it knows this node.
            self._heartbeat.head_failure_detector.begin(self._loop.now)

    def own_driver(self, driver: DriverChild, progress: ChildProcess | None = None) -> None:
        """The driver is a child of this process: its exit code is the job's. progress: what shows how far it is."""
        self._program.start(driver, progress)
        self._signals.own_driver(driver)

    def end_job(self, code: int) -> None:
        """End the job on all nodes."""
        if self._node_manager is not None:
            self._raylet.apply(self._node_manager.stop(self._loop.now, code))
            if self._node_manager.state == node_manager.FAILED:
                self._shutdown.begin(code)
        else:
            self._router.send(HEAD, m.Exit(code))

    def close(self) -> None:
        """The raylet's loop has ended."""
        self.drain.close()
        self.autoscaling.close(not self.fenced)
        self._join_acceptor.close()

    # ------------------------------------------------------------ what this process observes

    def child_ended(self) -> None:
        """Some child of this process has ended: perhaps the driver."""
        code = self._program.code
        if code is not None and (self._shutdown.begun or self._program.is_shown(self.child_ended)):
            if code:
                self._raylet.events.explain_end("exit", f"the program ended with {exit_text(code)}")
            self._driver_ended(code)
            self._shutdown.check()
        self._program.reap_others()

    def parent_gone(self) -> None:
        """The process that started this one has ended or detached. The driver's last message may still arrive."""
        self._loop.call_at(self._loop.now + _PARENT_GONE_DELAY, lambda: self._leave_alone(1))

    def user_signalled(self, number: int) -> None:
        """This process got SIGUSR1 or SIGUSR2."""
        if self._has_no_program() and number in self._raylet.run_info.signals:
            self.signalled(signal.SIGTERM)
        else:
            self._signals.user_signalled(number, self.came_up)

    def signalled(self, number: int) -> None:
        """This process got SIGINT or SIGTERM."""
        if self._end.isolated:
            self._loop.stop()
        self._raylet.events.explain_end("signal", f"the raylet was sent {signal.Signals(number).name}")
        may_leave = self._raylet.context.info.joined or (self._has_no_program() and number == signal.SIGTERM)
        if may_leave and self.came_up and not self._shutdown.begun and not self.departure.begun:
            self.departure.ask(f"it was sent {signal.Signals(number).name}")
        elif not self._shutdown.begun:
            self._signals.signalled(number, self.came_up)

    def processes_ended(self) -> None:
        """Only this process of the node is left."""
        self._end.processes_ended = True
        if not self.fenced:
            self._router.send(HEAD, m.NodeStopped(self._raylet.node))
        if self._node_manager is None:
            self._end.leave()
        elif self._node_manager.state in (node_manager.STOPPED, node_manager.FAILED):
            self._loop.stop()

    # ------------------------------------------------------------ raylet.RayletEvents

    def process_joined(self, proc: bytes) -> None:
        self.drain.process_joined(proc)

    def process_died(self) -> None:
        self.departure.process_died()
        self._shutdown.check()

    def driver_died(self, reason: str) -> None:
        if not self._program.is_here:
            how = "a signal has killed it (SIGTERM, or SIGKILL, as for lack of memory), it crashed, or called os._exit"
            self._raylet.events.explain_end("driver", f"the program's process is gone without a word: {how} ({reason})")
            self.end_job(1)

    def template_gone(self, reason: str) -> None:
        """The template process has ended, and so this node ends."""
        if not self._shutdown.begun:
            text = f"{reason}; it forks all workers, so this node ends"
            self._raylet.log(text)
            self._raylet.events.explain_end("node", text)
            self._shutdown.begin(1)
            if self._node_manager is None and self.came_up:
                self._router.send(HEAD, m.PeerFailed(self._raylet.node, reason))  # the others can go on
                self.broken = True
            else:
                self.failure, self.broken = text, self.broken or not self.came_up  # MPI_Finalize may wait for others
                self.end_job(1)
        self._shutdown.template_gone()

    def give_up(self, reason: str) -> None:
        """This node cannot go on. The job ends with code 1, but for a node that has joined it: that one ends."""
        if not self._shutdown.begun:
            self.failure = reason
            self._raylet.log(reason)
            self._raylet.events.explain_end("node", reason)
            if self._raylet.context.info.joined and self._node_manager is None:
                self._router.send(HEAD, m.PeerFailed(self._raylet.node, reason))
                self.broken = True
            else:
                self.end_job(1)
            self._shutdown.begin(1)

    def node_unreachable(self, node: int, reason: str) -> None:
        if self._node_manager is not None:
            self._raylet.apply(self._node_manager.node_failed(self._loop.now, node, reason))
        elif node == self._raylet.head_location.node:
            self.head_died(reason, True)
        else:
            reason += self._session.notes.get(node, "")
            self._router.send(HEAD, m.PeerFailed(node, reason))
            self._router.lose_node(node, reason)  # the head will declare it dead, or end this node

    # ------------------------------------------------------------ start

    def _on_node_table(self, now: float, src: bytes, msg: m.NodeTable) -> Iterable[Any]:
        raylet = self._raylet
        me = raylet.context.info
        if me.joined:
            size = max(info.index for info in msg.nodes) + 1
            if size > raylet.context.cluster_size:
                raylet.cluster_grew(size)
        else:
            try:
                connect_data_plane(self._wires.data, me, msg.nodes)
            except TransportError as error:
                self.give_up(str(error))
                return _NOTHING
        raylet.neighbor_dirs = neighbor_directories(me, msg.nodes)
        raylet.store.nodes_placed(msg.nodes)
        raylet.lease_manager.nodes_placed(msg.nodes)
        self._session.learn(msg, raylet.head_location.node)
        if self._heartbeat.head_failure_detector is not None:
            self._heartbeat.head_failure_detector.begin(now, [info.index for info in msg.nodes])
        for died in msg.dead:
            self.node_died(died)
        raylet.run_info = msg.run
        if me.joined:
            self._meet(
                [info for info in msg.nodes if info.index != me.index], now + 2 * raylet.context.config.node_timeout
            )
        else:
            self._router.send(HEAD, m.NodeReady(me.index))
        raylet.apply(raylet.lease_manager.start(now, msg.run.number))
        if self._node_manager is None and raylet.node != raylet.context.driver_rank and not me.joined:
            self._up()
        return _NOTHING

    # ------------------------------------------------------------ nodes that join the running job

    def _refusal(self) -> str:
        """Return why no node may join now."""
        return "the job drains: it is about to end" if self.drain.announced else ""

    def _meet(self, nodes: list[NodeInfo], deadline: float) -> None:
        """Connect to the nodes of the running job that this node joins. Those that cannot be reached are tried again:
        one may have died a moment ago, and the head says so soon."""
        unmet, problem = [], ""
        for info in nodes:
            if info.index not in self._router.lost_nodes:
                try:
                    self._wires.meet(info)
                except TransportError as error:
                    unmet.append(info)
                    problem = f"node {info.index} on {info.host} cannot be reached: {error}"
        if self._shutdown.begun:
            return
        if not unmet:
            self._router.send(HEAD, m.NodeReady(self._raylet.node))
        elif self._loop.now < deadline:
            self._loop.call_at(self._loop.now + _MEET_AGAIN, lambda: self._meet(unmet, deadline))
        else:
            self.give_up(f"this node has not joined the job: {problem}")

    def _on_node_joined(self, now: float, src: bytes, msg: m.NodeJoined) -> Iterable[Any]:
        """Connect to nodes that join the running job. About this node itself: it is in."""
        raylet, nodes = self._raylet, [info.index for info in msg.nodes]
        if raylet.node in nodes:
            self._up()
            return _NOTHING
        problems: dict[int, str] = {}
        for info in msg.nodes:
            try:
                self._wires.meet(info)
            except TransportError as error:
                problems[info.index] = str(error)
        met = [info for info in msg.nodes if info.index not in problems]
        self._session.notes.update((info.index, info.note) for info in met)
        raylet.neighbor_dirs.update(neighbor_directories(raylet.context.info, met))
        raylet.store.nodes_placed(met)
        raylet.lease_manager.nodes_placed(met)
        if self._heartbeat.head_failure_detector is not None:
            self._heartbeat.head_failure_detector.nodes_joined(info.index for info in met)
        if met:
            raylet.cluster_grew(max(raylet.context.cluster_size, max(nodes) + 1))
        return [Send(HEAD, m.NodeAcquainted(nodes, problems))]

    def _node_left(self, event: drain.NodeLeft) -> None:
        assert self._node_manager is not None
        if event.node != self._raylet.node:
            left = self._node_manager.node_left(self._loop.now, event.node, event.reason, event.kept_at)
            self._raylet.apply(left)
        elif self._replicator is not None and self._can_hand_over():
            self._replicator.hand_over(event.reason, event.kept_at)
            self._loop.call_at(self._loop.now + _HAND_OVER_TIME, lambda: self._fence("no node took over"))
        else:
            self.end_job(0)

    def _can_hand_over(self) -> bool:
        """Return True if this node is the head, and another one can take over."""
        return self._replicator is not None and self._replicator.can_hand_over()

    def _has_no_program(self) -> bool:
        return self._raylet.context.driver_rank == NO_NODE

    def _replicate(self, head: Gcs | RecoveringGcs, node_manager: NodeManager, writer: StateLogWriter) -> None:
        if may_have_standby(self._raylet):
            leaving = self.departure.core.leaving
            self._replicator = HeadReplicator(self._raylet, head, node_manager, writer, leaving)

    def _numbers_given(self) -> None:
        if self._replicator is not None:
            self._replicator.append([], False)

    def _choose_standby(self) -> None:
        if self._replicator is not None and self._node_manager is not None:
            self._replicator.choose()

    def _majority_lost(self, event: node_manager.MajorityLost) -> None:
        self._fence(f"{event.silent} nodes have fallen silent at once, most of the job: this node is cut off")

    def _leaving_changed(self, event: drain.LeavingChanged) -> None:
        self.drain.set_leaving(set(event.deadlines))
        self._choose_standby()

    def _nodes_came_up(self, event: node_manager.NodesAdded) -> None:
        raylet = self._raylet
        assert raylet.head is not None and self._node_manager is not None
        # The death that let them in may have been the last that the departure of one of them waited for.
        infos = [info for info in event.infos if info.index not in self._node_manager.dead]
        left = {info.index: info.end - time.time() for info in infos if info.end}
        raylet.apply(raylet.head.nodes_joined(self._loop.now, infos, left))
        for info in infos:
            self._router.send(raylet_of(info.index), m.NodeJoined([info]))
            raylet.log(f"node {info.index} ({info.host}) has joined the job")
        self._choose_standby()

    # ------------------------------------------------------------ all nodes are up

    def _cluster_up(self, event: node_manager.ClusterUp) -> None:
        head, driver_rank = self._raylet.head, self._raylet.context.driver_rank
        assert isinstance(head, Gcs)
        self._raylet.apply(head.cluster_up(self._loop.now, self._session.name, event.nodes))
        if driver_rank not in (self._raylet.node, NO_NODE):
            self._router.send(raylet_of(driver_rank), m.StartDriver())
        self._up()
        self._choose_standby()
        self.autoscaling.lead(head, self._session.name, fresh=True)

    def _on_start_driver(self, now: float, src: bytes, msg: m.StartDriver) -> Iterable[Any]:
        if not self._shutdown.begun:
            self._up()
        return _NOTHING

    def _up(self) -> None:
        context, end = self._raylet.context, self._raylet.run_info.end
        self._session.publish(context.info, context.cluster_size, end)
        self.came_up = True
        self.drain.came_up()
        self._raylet.events.inform(lambda extension: extension.came_up(self._session.name))
        self._on_up()

    def _start_failed(self, reason: str) -> None:
        self.broken = True
        self.failure = reason
        self._shutdown.begin(1)

    def _check_registered(self) -> None:
        if not self._session.name and not self._shutdown.begun:
            self._start_failed("the head did not answer; hint: see what rank 0 printed")

    # ------------------------------------------------------------ deaths of nodes

    def _leads(self) -> bool:
        return self._node_manager is not None

    def _to_node_manager(self, now: float, src: bytes, msg: m.Message) -> Iterable[Any]:
        if self._node_manager is None:
            return self._raylet.unexpected(now, src, msg)
        return self._node_manager.handle(now, src, msg)

    def _on_heartbeat(self, now: float, src: bytes, msg: m.Heartbeat) -> Iterable[Any]:
        if self._node_manager is not None:
            return self._node_manager.handle(now, src, msg)
        self._standby.on_heartbeat(src, msg)  # the loop has noted the time
        return _NOTHING

    def _on_ping(self, now: float, src: bytes, msg: m.Ping) -> Iterable[Any]:
        return [Send(src, m.Heartbeat(self._raylet.node))]

    def _on_state_log_ack(self, now: float, src: bytes, msg: m.StateLogAck) -> Iterable[Any]:
        if self._replicator is None:
            return self._raylet.unexpected(now, src, msg)
        return self._replicator.on_state_log_ack(src, msg)

    def _on_node_died(self, now: float, src: bytes, msg: m.NodeDied) -> Iterable[Any]:
        self.node_died(msg)
        return _NOTHING

    def node_died(self, died: m.NodeDied) -> None:
        """Handle the head's declaration that a node is dead; perhaps this one."""
        if died.node == self._raylet.node:
            self._fence(died.reason)
        elif not self._shutdown.begun:
            self._forget_node(died)

    def _declare_dead(self, event: node_manager.NodeLost) -> None:
        """Carry out the head's own decision. The node may live, stopped or behind a cut link: NodeDied ends it then."""
        died = m.NodeDied(event.node, event.reason, event.epoch, list(event.kept_at))
        self._router.send_now(event.node, died)
        if not self._shutdown.begun:
            assert self._node_manager is not None
            living = len(self._node_manager.alive())
            left = event.node in self.departure.core.leaving()
            if event.node == self._raylet.context.driver_rank:
                self.program_lost = True
                text = f"node {event.node} died, and with it the program: {event.reason}. The job ends"
                self._raylet.log(text)
                self._raylet.events.explain_end("node", text)
                self._driver_ended(128 + signal.SIGKILL)
            elif left:
                self._raylet.log(f"node {event.node} has left ({event.reason}). The job goes on with {living} nodes")
            else:
                self._raylet.log(f"node {event.node} died: {event.reason}. The job goes on with {living} of its nodes")
        self._forget_node(died)
        self.departure.node_died(event.node)
        self._choose_standby()

    def _forget_node(self, died: m.NodeDied) -> None:
        self.broken = self.broken or self._wires.shares_mpi(died.node)
        if self._heartbeat.head_failure_detector is not None:
            self._heartbeat.head_failure_detector.node_died(died.node)
        forget_node(self._raylet, self._wires.control, self._wires.data, died)

    def lead(self, head: RecoveringGcs, node_manager: NodeManager, writer: StateLogWriter) -> None:
        self._node_manager = node_manager
        node_manager.allow(self._shutdown.extra_time)
        self._heartbeat.lead(node_manager)
        self.drain.take_over(head.gcs)
        self._replicate(head, node_manager, writer)
        self._choose_standby()
        self._join_acceptor.take_over(head.gcs)
        self.autoscaling.lead(head.gcs, node_manager.session, fresh=False)
        self._loop.call_at(self._loop.now, self.child_ended)  # the old head may have died before it ended the job

    def head_moved(self, now: float, node: int) -> None:
        self._heartbeat.head_moved(now, node)

    def head_died(self, reason: str, certain: bool | None = None) -> None:
        """The head is lost.

        Args:
            certain: whether its process has ended, else it is only silent; None: and no standby will take over.
        """
        note = self._session.notes.get(self._raylet.head_location.node, "")
        reason += "" if note in reason else note
        if certain is not None and not self._shutdown.begun and self._standby.head_lost(reason, certain):
            return
        if self._raylet.context.info.joined and not self.came_up and not self._shutdown.begun:
            self._start_failed(
                f"this node has not joined the job: the head (node {self._raylet.head_location.node}) is lost: "
                f"{reason}; hint: join again, another node may have become the head"
            )
        elif not self._shutdown.begun:
            self.failure = (
                f"the head (node {self._raylet.head_location.node}, host {self._session.head_host or 'unknown'}) died: "
                f"{reason}. The job cannot go on without it; hint: checkpoints of actors and program are there for the "
                "next run (docs/explain/faults.md)"
            )
            self._raylet.log(self.failure)
            self._raylet.events.explain_end("head", self.failure)
            self._end.delay(_HEAD_DEATH_DELAY)
        self._leave_alone(1)

    def _head_checked(self, dead: str, alone: bool) -> None:
        """Handle a heartbeat of a node that is not the head."""
        if self._end.hears_others():
            self._reconnected()
        elif dead and alone and self._end.may_wait:
            self._isolate(dead)
        elif dead:
            self.head_died(dead, None if alone else False)

    def _fence(self, reason: str) -> None:
        """The head has declared this node dead, and the job goes on without it. That is no failure of the job."""
        if self.fenced:
            return  # each node that follows a new head tells the old one
        if self.departure.begun:
            self._raylet.log("this node has left the job")
        elif not self._shutdown.begun or self._end.isolated:
            self._raylet.log(f"the head has declared this node dead ({reason}): it ends; its work is done elsewhere")
        self.fenced = True
        self._node_manager = None  # of a head that has left or was replaced: another one ends the job
        self._leave_alone(0)
        if self._end.isolated:
            self._reconnected()

    def _isolate(self, reason: str) -> None:
        """This node hears no other node: it ends its work, and only this process waits for the network. When a rank of
        srun exits while its slurmstepd cannot report that, Slurm later kills the whole step."""
        if not self._shutdown.begun:
            self._end.isolate()
            self.failure = f"this node is cut off: neither the head ({reason}) nor any other node is heard of"
            self._raylet.log(f"{self.failure}. It ends its work, and leaves when the network is back")
            self._leave_alone(1)

    def _reconnected(self) -> None:
        """The network is back. The others have gone on without this node, which is no failure of the job."""
        self.failure = ""
        self._end.reconnect()

    # ------------------------------------------------------------ the end

    def _on_exit(self, now: float, src: bytes, msg: m.Exit) -> Iterable[Any]:
        """A driver, or another raylet, ends the job. For a driver child its exit code counts, not this message."""
        link = self._router.links.get(src)
        if number_of(src) == 0:
            self.end_job(msg.code)
        elif link is not None and link.kind == DRIVER and not self._program.is_here:
            if msg.code:
                self._raylet.events.explain_end("exit", f"the program ended with {exit_text(msg.code)}", src)
            self._driver_ended(msg.code)
        return _NOTHING

    def _on_driver_ended(self, now: float, src: bytes, msg: m.DriverEnded) -> Iterable[Any]:
        self._driver_ended(msg.code)
        return _NOTHING

    def _driver_ended(self, code: int) -> None:
        """The program has ended, here or on another node; the head ends the job."""
        if self._node_manager is None:
            self._router.send(HEAD, m.DriverEnded(code))
        elif not self.drain.driver_ended(code):
            self.end_job(code)

    def _on_stop(self, now: float, src: bytes, msg: m.Stop) -> Iterable[Any]:
        self._shutdown.begin(msg.code)
        return _NOTHING

    def _all_stopped(self, event: node_manager.AllStopped) -> None:
        self.broken = self.broken or bool(event.missing)
        if event.missing:
            self._raylet.log(f"nodes {event.missing} did not stop in time")
        self._end.stop_if_ended()

    def _leave_alone(self, code: int) -> None:
        """End this node without waiting for the others, which are gone or going."""
        if not self._shutdown.begun:
            self.broken = True
            self._shutdown.begin(code, stop_timeout=0.0)
            if self._node_manager is not None:
                self.end_job(code)

    def _tick(self) -> None:
        raylet, now = self._raylet, self._loop.now
        period = raylet.context.config.tick
        self._loop.call_at(now + period, self._tick, _TICK_SLACK * period)
        if any(process.orphaned for process in self._watched_processes):
            self._leave_alone(1)
        raylet.apply(raylet.lease_manager.tick(now, raylet.store.used))
        raylet.apply(raylet.store.tick(now))
        raylet.garbage.tick()
        self._join_acceptor.report()
        if raylet.head is not None and not self.fenced:
            raylet.apply(raylet.head.tick(now))
            self.departure.tick()
        self.drain.tick()


def exit_text(code: int) -> str:
    """How a program has ended, for people. code: as a shell gives it (128 + n for signal n)."""
    try:
        return f"signal {signal.Signals(code - 128).name}" if code > 128 else f"exit code {code}"
    except ValueError:
        return f"exit code {code}"


def neighbor_directories(me: NodeInfo, nodes: Iterable[NodeInfo]) -> dict[int, str]:
    """Return the session directories of the other nodes of this host, by node, as far as they are visible here.

    Two containers may have one host name and different `/tmp`. Where they share it, but are on two machines, no
    process replies at the sockets in it, and messages go through the raylets.
    """
    if not me.session_dir:
        return {}
    return {
        info.index: info.session_dir
        for info in nodes
        if info.index != me.index and info.host == me.host and os.path.isdir(info.session_dir or "")
    }


def connect_data_plane(data: DataPlane | None, me: NodeInfo, nodes: Sequence[NodeInfo]) -> None:
    """Make all other nodes reachable for objects.

    Raises:
        TransportError: no way to one of them; the message names it.
    """
    for info in nodes:
        if data is not None and info.index != me.index:
            try:
                data.connect(info.index, info.data_address, info.host == me.host)
            except TransportError as error:
                raise TransportError(f"no connection to node {info.index} on {info.host}: {error}") from None


HANDLERS: dict[type[m.Message], Callable[[ClusterMember], Handler]] = {
    # Start and end of the job.
    m.NodeTable: lambda c: c._on_node_table,
    m.StartDriver: lambda c: c._on_start_driver,
    m.DriverEnded: lambda c: c._on_driver_ended,
    m.Exit: lambda c: c._on_exit,
    m.Stop: lambda c: c._on_stop,
    # Membership; the node manager is the head's.
    m.RegisterNode: lambda c: c._to_node_manager,
    m.NodeReady: lambda c: c._to_node_manager,
    m.NodeAcquainted: lambda c: c._to_node_manager,
    m.NodeJoined: lambda c: c._on_node_joined,
    m.OpenJob: lambda c: c._join_acceptor.on_open_job,
    # Nodes that leave the running job; RemoveNode and what follows are for the head.
    m.Leave: lambda c: c.departure.on_leave,
    m.Evacuate: lambda c: c.departure.on_evacuate,
    m.Evacuated: lambda c: c.departure.on_evacuated,
    m.RemoveNode: lambda c: c.departure.on_remove_node,
    m.LeaveRequest: lambda c: c.departure.on_leave_request,
    m.NodeIdle: lambda c: c.departure.on_node_idle,
    m.LeaveIdle: lambda c: c.autoscaling.on_leave_idle,
    m.NodeOccupied: lambda c: c.autoscaling.on_node_occupied,
    m.NodeStopped: lambda c: c._to_node_manager,
    m.PeerFailed: lambda c: c._to_node_manager,
    m.Heartbeat: lambda c: c._on_heartbeat,
    m.Ping: lambda c: c._on_ping,
    m.NodeDied: lambda c: c._on_node_died,
    # Head failover.
    m.StateLogAppend: lambda c: c._standby.on_state_log_append,
    m.StateLogAck: lambda c: c._on_state_log_ack,
    m.HeadLost: lambda c: c._standby.on_head_lost,
    m.NewHead: lambda c: c._standby.on_new_head,
    # Drain; DrainRequest and what follows are for the head.
    m.Drain: lambda c: c.drain.on_drain,
    m.DrainOver: lambda c: c.drain.on_drain_over,
    m.DrainRequest: lambda c: c.drain.on_drain_request,
    m.DrainReady: lambda c: c.drain.on_drain_ready,
    m.ActorSaved: lambda c: c.drain.on_actor_saved,
    m.DriverRegistered: lambda c: c.drain.on_driver_registered,
}
"""The handler of each message of the cluster in a raylet, beside `runtime.raylet.raylet.HANDLERS`."""

EFFECT_HANDLERS: dict[type, Callable[[ClusterMember], EffectHandler]] = {
    node_manager.AllIn: lambda c: lambda event: None,
    node_manager.ClusterUp: lambda c: c._cluster_up,
    node_manager.NodesAdded: lambda c: c._nodes_came_up,
    node_manager.StartFailed: lambda c: lambda event: c._start_failed(event.reason),
    node_manager.NodeLost: lambda c: c._declare_dead,
    node_manager.AllStopped: lambda c: c._all_stopped,
    node_manager.MajorityLost: lambda c: c._majority_lost,
    drain.NodeLeft: lambda c: c._node_left,
    drain.LeavingChanged: lambda c: c._leaving_changed,
    drain.Announce: lambda c: c.drain.announce,
    drain.StartSaving: lambda c: c.drain.start_saving,
    drain.AllSaved: lambda c: c.drain.all_saved,
    drain.EndJob: lambda c: c.drain.end_job,
}
"""The handler of each effect of the node manager and of the drain core."""
