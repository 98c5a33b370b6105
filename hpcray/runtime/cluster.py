"""A raylet's part in the cluster: coming in, deaths of nodes, and the end of the job, whatever ends it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hpcray.base.ids import HEAD, number_of, raylet_of
from hpcray.core.effects import Send
from hpcray.core.gcs import membership as member
from hpcray.core.gcs.head import HeadCore
from hpcray.host.processes import Family, reap_orphans
from hpcray.host.session import Session
from hpcray.runtime.beats import Beats
from hpcray.runtime.drain import Drain
from hpcray.runtime.driver_child import DriverChild
from hpcray.runtime.leaving import Leaving, forget_node
from hpcray.runtime.local_links import DRIVER
from hpcray.runtime.neighbours import connect
from hpcray.runtime.raylet import Raylet
from hpcray.runtime.signals import Signals
from hpcray.transport.base import ControlTransport, DataPlane, TransportError
from hpcray.transport.startup import read_launch
from hpcray.wire import messages as m

_SOON = 0.05
_ALL_TOLD = 2.0
"""Who finds the head dead stays so long: mpirun ends all ranks, in silence, when the first leaves with an error."""
_START_MARGIN = 2.0
_NOTHING: tuple[()] = ()


class Cluster:
    """One per raylet, the head's included.

    Args:
        raylet: its tables get the handlers of this conversation.
        leaving: the end of this node.
        template_pid: the template process.
        elders: this process, and others whose parent must live as long as the node.
        membership: the head's book of nodes; None elsewhere.
        watch: the other nodes' eye on the head; None on the head.
        on_up: called on the head, and where the program runs, when all nodes are up; elsewhere when this node has the
            table.

    Attributes:
        failure: why the cluster did not come up or this node had to give up; "" when all went well.
        came_up: whether `on_up` was called.
        broken: whether other nodes may be dead or gone, so that MPI cannot be left in good order.
        drain: the announced end of the job.
        program_lost: whether the node that ran the program has died; its exit code is then the head's to tell.
        fenced: whether the job goes on without this node, which was declared dead.
        followed: given why the head is gone, and whether that is certain: whether another one takes its place.
    """

    def __init__(
        self,
        raylet: Raylet,
        leaving: Leaving,
        session: Session,
        template_pid: int,
        elders: Sequence[Family],
        membership: member.Membership | None,
        watch: member.HeadWatch | None,
        control: ControlTransport | None,
        data: DataPlane | None,
        on_up: Callable[[], None],
        program_is_far: bool = False,
    ) -> None:
        self.failure = ""
        self.broken = self.came_up = self.program_lost = self.fenced = False
        self.followed: Callable[[str, bool], bool] = lambda reason, certain: False
        self._raylet = raylet
        self._loop = raylet.loop
        self._router = raylet.router
        self._leaving = leaving
        self._session = session
        self._template_pid = template_pid
        self._membership = membership
        self._watch = watch
        self._control = control
        self._data = data
        self._on_up = on_up
        self._name = ""
        self._head_host = ""
        self._by_srun = read_launch(os.environ).kind == "srun"
        self._driver: DriverChild | None = None
        self._elders = elders
        self.beats = Beats(raylet, membership, watch, self._looked)
        self._here_gone = False
        self._stay_until = 0.0
        self._cut_off_at = 0.0
        self.drain = Drain(raylet, self.end_job)
        self._signals = Signals(
            self._loop, leaving, self.drain, self._leads, program_is_far, self.end_job, self._leave_alone
        )
        raylet.on_driver_died = self._driver_died
        raylet.on_template_gone = self._template_gone
        raylet.on_fatal = self.give_up
        raylet.on_node_lost = self._wire_lost
        raylet.on_death = leaving.check
        raylet.handlers |= {
            m.NodeTable: self._table,
            m.NodeDied: self._node_died,
            m.Stop: self._stop,
            m.Exit: self._exit,
            m.DriverMayStart: self._driver_may_start,
            m.DriverEnded: lambda now, src, msg: self._driver_ended(msg.code),
            m.Heartbeat: lambda now, src, msg: _NOTHING,  # that it came is what it says: the loop has noted that
            m.Ping: lambda now, src, msg: [Send(src, m.Heartbeat(raylet.node))],
        }
        if membership is not None:
            raylet.handlers |= dict.fromkeys(member.HANDLES, membership.handle)
        raylet.carriers |= {
            member.AllIn: lambda event: None,
            member.ClusterUp: self._cluster_up,
            member.StartFailed: lambda event: self._start_failed(event.reason),
            member.NodeLost: self._declared_dead,
            member.AllStopped: self._all_stopped,
        }

    def _leads(self) -> bool:
        return self._membership is not None

    def join(self) -> None:
        """Say hello to the head; `on_up` follows, or a failure."""
        self._router.send(HEAD, m.NodeHello(self._raylet.seat.info))
        self._tick()
        self.beats.beat()
        if self._membership is None:
            limit = self._raylet.seat.config.start_timeout + _START_MARGIN
            self._loop.call_at(self._loop.now + limit, self._check_table)

    def own_driver(self, driver: DriverChild) -> None:
        """The driver is a child of this process: its exit code is the job's."""
        self._driver = driver
        self._signals.own_driver(driver)

    def give_up(self, reason: str) -> None:
        """This node cannot go on; the job ends with code 1."""
        if not self._leaving.begun:
            self.failure = reason
            self._raylet.say(reason)
            self.end_job(1)
            self._leaving.begin(1)

    def end_job(self, code: int) -> None:
        """End the job on all nodes."""
        if self._membership is not None:
            self._raylet.apply(self._membership.stop(self._loop.now, code))
            if self._membership.state == member.FAILED:
                self._leaving.begin(code)
        else:
            self._router.send(HEAD, m.Exit(code))

    def child_ended(self) -> None:
        """Some child of this process has ended: perhaps the driver."""
        code = self._driver.poll() if self._driver is not None else None
        if code is not None:
            self._driver_ended(code)
            self._leaving.check()
        reap_orphans({self._template_pid, self._driver.pid if self._driver is not None else 0})

    def parent_gone(self) -> None:
        """Who started this process is gone, or said so. The driver's last message may still be on its way."""
        self._loop.call_at(self._loop.now + _SOON, lambda: self._leave_alone(1))

    def user_signalled(self, number: int) -> None:
        """This process got SIGUSR1 or SIGUSR2."""
        self._signals.user_signalled(number, self.came_up)

    def signalled(self, number: int) -> None:
        """This process got SIGINT or SIGTERM."""
        if self._cut_off_at:
            self._loop.stop()
        if not self._leaving.begun:
            self._signals.signalled(number, self.came_up)

    def node_gone(self) -> None:
        """Nothing of this node is left but this process."""
        self._here_gone = True
        self._router.send(HEAD, m.NodeStopped(self._raylet.node))
        if self._membership is None:
            if not self._cut_off_at:
                self._loop.call_at(max(self._loop.now, self._stay_until), self._loop.stop)
        elif self._membership.state in (member.STOPPED, member.FAILED):
            self._loop.stop()

    # ------------------------------------------------------------ coming in

    def _table(self, now: float, src: bytes, msg: m.NodeTable) -> Iterable[Any]:
        raylet = self._raylet
        me = raylet.seat.info
        try:
            raylet.neighbours = connect(self._data, me, msg.nodes)
        except TransportError as error:
            self.give_up(str(error))
            return _NOTHING
        self._name = msg.session
        self._head_host = next((info.host for info in msg.nodes if info.index == self._raylet.headship.node), "")
        if self._watch is not None:
            self._watch.begin(now, [info.index for info in msg.nodes])
        raylet.run = msg.run
        self._router.send(HEAD, m.NodeReady(me.index))
        raylet.apply(raylet.core.start(now))
        if self._membership is None and raylet.node != raylet.seat.driver_rank:
            self._up()
        return _NOTHING

    def _cluster_up(self, event: member.ClusterUp) -> None:
        head = self._raylet.head
        assert head is not None
        self._raylet.apply(head.cluster_up(self._loop.now, self._name, event.nodes))
        if self._raylet.seat.driver_rank != self._raylet.node:
            self._router.send(raylet_of(self._raylet.seat.driver_rank), m.DriverMayStart())
        self._up()

    def _driver_may_start(self, now: float, src: bytes, msg: m.DriverMayStart) -> Iterable[Any]:
        if not self._leaving.begun:
            self._up()
        return _NOTHING

    def _up(self) -> None:
        info = self._raylet.seat.info
        self._session.publish(self._name, info.index, info.node_id)
        self.came_up = True
        self.drain.came_up()
        self._on_up()

    def _start_failed(self, reason: str) -> None:
        self.broken = True
        self.failure = reason
        self._leaving.begin(1)

    def _check_table(self) -> None:
        if not self._name and not self._leaving.begun:
            self._start_failed("the head did not answer; hint: see what rank 0 printed")

    # ------------------------------------------------------------ deaths of nodes

    def _wire_lost(self, node: int, reason: str) -> None:
        if self._membership is not None:
            self._raylet.apply(self._membership.node_failed(self._loop.now, node, reason))
        elif node == self._raylet.headship.node:
            self.head_died(reason, True)
        else:
            self._router.send(HEAD, m.PeerFailed(node, reason))
            self._router.lose_node(node, reason)  # the head will say so to all, or end this node

    def _node_died(self, now: float, src: bytes, msg: m.NodeDied) -> Iterable[Any]:
        if msg.node == self._raylet.node:
            self._fenced(msg.reason)
        elif not self._leaving.begun:
            self._node_lost(msg)
        return _NOTHING

    def _declared_dead(self, event: member.NodeLost) -> None:
        """The head's own decision. The node may live, behind a cut link or stopped: then this is what ends it."""
        died = m.NodeDied(event.node, event.reason, event.epoch)
        self._router.last_word(event.node, died)
        if not self._leaving.begun:
            living = self._raylet.seat.cluster_size - event.epoch
            if event.node == self._raylet.seat.driver_rank:
                self.program_lost = True
                self._raylet.say(f"node {event.node} died, and with it the program: {event.reason}. The job ends")
                self._driver_ended(128 + signal.SIGKILL)
            else:
                self._raylet.say(f"node {event.node} died: {event.reason}. The job goes on with {living} of its nodes")
        self._node_lost(died)

    def _node_lost(self, died: m.NodeDied) -> None:
        self.broken = True
        forget_node(self._raylet, self._control, self._data, died)

    def lead(self, head: HeadCore, membership: member.Membership) -> None:
        """The head is gone, and this raylet is the next."""
        self._membership, self._watch = membership, None
        membership.allow(self._leaving.extra)
        self.beats.lead(membership)
        self._raylet.handlers |= dict.fromkeys(member.HANDLES, membership.handle)
        self.drain.take_over(head)
        self._loop.call_at(self._loop.now, self.child_ended)  # the old head may have been told, and have told nobody

    def _fenced(self, reason: str) -> None:
        """All others believe that this node is dead, and go on without it. It is no failure of the job."""
        if not self._leaving.begun or self._cut_off_at:
            self._raylet.say(f"the head has declared this node dead ({reason}): it ends; its work is done elsewhere")
        self.fenced = True
        self._leave_alone(0)
        if self._cut_off_at:
            self._connected_again()

    def _cut_off(self, reason: str) -> None:
        """This node hears nobody: it ends its work, and only this process waits for the network. A rank of srun that
        leaves while slurmstepd can tell nobody makes that kill the whole step as soon as it can."""
        if not self._leaving.begun:
            self._cut_off_at = self._loop.now
            self.failure = f"this node is cut off: neither the head ({reason}) nor any other node is heard of"
            self._raylet.say(f"{self.failure}. It ends its work, and leaves when the network is back")
            self._leave_alone(1)

    def _connected_again(self) -> None:
        """The others have gone on without this node. That is no failure of the job."""
        self.failure, self._cut_off_at = "", 0.0
        if self._here_gone:
            self._loop.stop()

    def head_died(self, reason: str, certain: bool | None = None) -> None:
        """There is no head any more. certain: whether that is so, or it is only silent; None: no other will follow."""
        if certain is not None and not self._leaving.begun and self.followed(reason, certain):
            return
        if not self._leaving.begun:
            self.failure = (
                f"the head (node {self._raylet.headship.node}, host {self._head_host or 'unknown'}) died: {reason}. "
                "The job cannot go on without it; hint: checkpoints of actors and program are there for the next run "
                "(docs/explain/faults.md)"
            )
            self._raylet.say(self.failure)
            self._stay_until = self._loop.now + _ALL_TOLD
        self._leave_alone(1)

    # ------------------------------------------------------------ the end

    def _exit(self, now: float, src: bytes, msg: m.Exit) -> Iterable[Any]:
        """A driver, or another raylet, ends the job. A driver child's exit code is what counts for the job."""
        link = self._router.links.get(src)
        if number_of(src) == 0:
            self.end_job(msg.code)
        elif link is not None and link.kind == DRIVER and self._driver is None:
            self._driver_ended(msg.code)
        return _NOTHING

    def _driver_ended(self, code: int) -> Iterable[Any]:
        """The program is over, here or on the node that says so; it is the head that ends the job."""
        if self._membership is None:
            self._router.send(HEAD, m.DriverEnded(code))
        elif not self.drain.driver_ended(code):
            self.end_job(code)
        return _NOTHING

    def _stop(self, now: float, src: bytes, msg: m.Stop) -> Iterable[Any]:
        self._leaving.begin(msg.code)
        return _NOTHING

    def _all_stopped(self, event: member.AllStopped) -> None:
        self.broken = self.broken or bool(event.missing)
        if event.missing:
            self._raylet.say(f"nodes {event.missing} did not stop in time")
        if self._here_gone:
            self._loop.stop()

    def _driver_died(self, reason: str) -> None:
        if self._driver is None:
            self.end_job(1)

    def _leave_alone(self, code: int) -> None:
        """Leave without waiting for the other nodes, which are gone or going."""
        if not self._leaving.begun:
            self.broken = True
            self._leaving.begin(code, patience=0.0)
            if self._membership is not None:
                self.end_job(code)

    def _template_gone(self, reason: str) -> None:
        if not self._leaving.begun:
            text = f"{reason}; it forks all workers, so this node ends"
            self._raylet.say(text)
            self._leaving.begin(1)
            if self._membership is None and self.came_up:
                self._router.send(HEAD, m.PeerFailed(self._raylet.node, reason))  # the others can go on
                self.broken = True
            else:
                self.failure = text
                self.end_job(1)
        self._leaving.template_gone()

    # ------------------------------------------------------------ time

    def _tick(self) -> None:
        raylet, now = self._raylet, self._loop.now
        self._loop.call_at(now + raylet.seat.config.tick, self._tick)
        if any(elder.orphaned for elder in self._elders):
            self._leave_alone(1)
        raylet.apply(raylet.core.tick(now))
        raylet.apply(raylet.store.tick(now))
        if raylet.head is not None:
            raylet.apply(raylet.head.tick(now))
        self.drain.tick()

    def _looked(self, dead: str, alone: bool) -> None:
        """The heartbeat of a node that is not the head."""
        if self._cut_off_at and max(self._loop.heard.values(), default=0.0) > self._cut_off_at:
            self._connected_again()
        elif dead and alone and self._by_srun:
            self._cut_off(dead)
        elif dead:
            self.head_died(dead, None if alone else False)
