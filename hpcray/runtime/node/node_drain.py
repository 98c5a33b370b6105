"""A raylet's part in the drain of its job: signals and the clock on one side, `core.gcs.drain` on the other.

Every raylet passes requests to the head, forwards the head's Drain to its processes, and starts nothing new meanwhile.
"""

from __future__ import annotations

import importlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from hpcray.common.exceptions import JobDrainingError, NotEnoughTimeError
from hpcray.common.ids import HEAD, node_of, raylet_of
from hpcray.core.gcs import drain
from hpcray.core.gcs.drain import DepartureManager
from hpcray.core.gcs.gcs import Gcs
from hpcray.core.gcs.node_manager import NO_NODE, NodeManager
from hpcray.protocol import messages as m
from hpcray.protocol.messages import DRIVER, WORKER
from hpcray.protocol.serialization import serialize_error
from hpcray.runtime.node.slurm_job import NodeQuery
from hpcray.runtime.raylet.raylet import Raylet

LEAVING_TIME = 8.0
"""Seconds that the end of all processes and of MPI may take after a drain."""
_MIN_SECONDS = 1.0
_MAX_LINES = 10
_TIME_PERIOD = 5.0
"""Seconds between two looks at how long the nodes stay."""
_EARLY = 0.5
_NOTHING: tuple[()] = ()


class SignalTarget(Protocol):
    """The driver, where it is a child of this process."""

    def forward(self, number: int) -> None:
        """Send it a signal that it has a handler for."""


class NodeDrain:
    """One per raylet; on the head it decides.

    Args:
        end_job: ends the job with an exit code.

    Attributes:
        announced: whether the job drains.
        requeue: whether the batch system should run the job again (on the head, when the job is over).
    """

    def __init__(self, raylet: Raylet, end_job: Callable[[int], None]) -> None:
        self.announced = False
        self.requeue = False
        self._raylet = raylet
        self._config = raylet.context.config
        self._end_job = end_job
        self._head: Gcs
        self._deadline = 0.0
        self._reason = ""
        self._forwarded: set[int] = set()
        self._core: drain.DrainCore | None = None
        self._time_noted_at = 0.0
        self._remote_driver = b""
        self._leaving: set[int] = set()
        self._draining_hosts: set[str] = set()
        self._slurm_nodes = NodeQuery(raylet.loop, os.environ)
        raylet.head_location.listeners.append(self._register_driver)

    def lead(self, run: m.RunInfo, head: Gcs) -> None:
        """This raylet is the head."""
        self._raylet.run_info = run
        self._core = drain.DrainCore(run.exit_code, run.signals)
        self._head = head
        head.actors.admissions.append(self._refuse_actor)

    def take_over(self, head: Gcs) -> None:
        """This raylet has become the head. A drain that the old one had announced begins again, with the time left."""
        self.lead(self._raylet.run_info, head)
        left = self._deadline - self._raylet.loop.now
        if self.announced:
            self._raylet.router.send(HEAD, m.DrainRequest(self._reason, max(_MIN_SECONDS, left)))
        elif self._raylet.run_info.drain_at and self._drains_at_end():
            self._await_end()

    def came_up(self) -> None:
        """The cluster is up: schedule the drain before the end of the job's time limit."""
        if self._core is not None and self._raylet.run_info.drain_at and self._drains_at_end():
            self._await_end()

    def _drains_at_end(self) -> bool:
        """Return False in a job without a program: its nodes leave it one by one."""
        return self._raylet.context.driver_rank != NO_NODE

    # ------------------------------------------------------------ reasons to drain

    def signalled(self, number: int, driver: SignalTarget | None) -> bool:
        """Request a drain if this signal announces the end of the job. Returns whether it does."""
        if number not in self._raylet.run_info.signals:
            return False
        if driver is not None and number not in self._forwarded:
            self._forwarded.add(number)  # once: a driver without a handler of its own sends it back
            driver.forward(number)
        name = signal.Signals(number).name
        self._raylet.router.send(HEAD, m.DrainRequest(f"{name} on node {self._raylet.node}", 0.0, number))
        return True

    def _await_end(self) -> None:
        left = self._raylet.run_info.drain_at - time.time()
        if left > _EARLY:
            # The clock may be set meanwhile.
            self._raylet.loop.call_at(self._raylet.loop.now + min(left, 60.0), self._await_end)
        else:
            self._raylet.router.send(HEAD, m.DrainRequest("the end of the job's time limit"))

    def on_drain_request(self, now: float, src: bytes, msg: m.DrainRequest) -> Iterable[Any]:
        """Begin the drain, on the head."""
        if self._core is None:
            return self._raylet.unexpected(now, src, msg)
        known = self._core.begun
        brisk = msg.signal == signal.SIGTERM and not self._head.queries.watches_draining
        effects = self._core.begin(now, msg.reason, self._seconds_for(msg), brisk)
        here = any(link.kind not in (WORKER, "") for link in self._raylet.router.links.values())
        if not known and not here and not self._remote_driver:
            effects += self._core.driver_ready(now)  # there is no driver whose callbacks would run first
        return effects

    def _seconds_for(self, msg: m.DrainRequest) -> float:
        config = self._config
        if msg.signal == signal.SIGTERM:
            limit = config.drain_timeout
        else:
            limit = msg.seconds or config.drain_margin or config.drain_timeout
        if self._raylet.run_info.end:
            limit = min(limit, self._raylet.run_info.end - time.time() - LEAVING_TIME)
        return max(_MIN_SECONDS, limit)

    # ------------------------------------------------------------ every raylet

    def on_driver_registered(self, now: float, src: bytes, msg: m.DriverRegistered) -> Iterable[Any]:
        """Note the driver of another node, on the head."""
        if self._core is None:
            return self._raylet.unexpected(now, src, msg)
        self._remote_driver = msg.proc
        return _NOTHING

    def _register_driver(self) -> None:
        """Report the driver of this node to the head of another: DrainReady of attached processes does not count."""
        router = self._raylet.router
        for proc, link in router.links.items():
            if link.kind == DRIVER and router.head_location.node != self._raylet.node:
                router.send(HEAD, m.DriverRegistered(proc))

    def process_joined(self, proc: bytes) -> None:
        """A process of this node was welcomed: send it the Drain that it has missed."""
        if self._raylet.router.links[proc].kind == DRIVER:
            self._register_driver()
        if self.announced:
            left = max(0.0, self._deadline - self._raylet.loop.now)
            self._raylet.router.send(proc, m.Drain(self._reason, left))

    def on_drain(self, now: float, src: bytes, msg: m.Drain) -> Iterable[Any]:
        """Forward the head's Drain to all processes, and start nothing new."""
        raylet = self._raylet
        first, self.announced = not self.announced, True
        self._reason = msg.reason
        self._deadline = now + msg.seconds
        for proc in raylet.router.links:
            raylet.router.send(proc, msg)
        return raylet.lease_manager.drain(now) if first else _NOTHING

    def on_drain_over(self, now: float, src: bytes, msg: m.DrainOver) -> Iterable[Any]:
        """Forward the end of the drain to the drivers: what could be saved in time is."""
        for proc, link in self._raylet.router.links.items():
            if link.kind != WORKER:
                self._raylet.router.send(proc, msg)
        return _NOTHING

    # ------------------------------------------------------------ the head

    def driver_ended(self, code: int) -> bool:
        """The driver has ended. Returns whether the drain decides about the end of the job."""
        self._remote_driver = b""
        if self._core is None or self._core.state == drain.OVER:
            return False
        if not self._core.begun:
            # Slurm signals all processes of a step: the driver may be the first to end.
            if code != drain.SIGNALLED + signal.SIGUSR1 or signal.SIGUSR1 not in self._raylet.run_info.signals:
                return False
            request = m.DrainRequest("SIGUSR1 to the program", 0.0, signal.SIGUSR1)
            self._raylet.apply(self._core.begin(self._raylet.loop.now, request.reason, self._seconds_for(request)))
        self._raylet.apply(self._core.driver_ended(self._raylet.loop.now, code))
        return True

    def tick(self) -> None:
        """Advance the drain; every `config.tick`."""
        if self._core is None:
            return
        self._note_time_left()
        if self._core.begun:
            self._raylet.apply(self._core.tick(self._raylet.loop.now, self._head.actors.living_workers()))
        elif self._head.queries.asked_draining:
            self._slurm_nodes.query(self._set_draining)

    def _note_time_left(self) -> None:
        """Have the GCS know how long each node stays."""
        now, run = self._raylet.loop.now, self._raylet.run_info
        if now < self._time_noted_at + _TIME_PERIOD:
            return
        self._time_noted_at = now
        unix = time.time()
        infos = [info for info in self._head.queries.infos if info.end or (run.drain_at and not info.joined)]
        if infos:
            left = {info.index: (info.end or run.drain_at) - unix for info in infos}
            self._head.set_time_left(left, run.drain_at - unix if run.drain_at else math.inf)

    def close(self) -> None:
        """The raylet ends."""
        self._slurm_nodes.close()

    def set_leaving(self, nodes: set[int]) -> None:
        """These nodes are about to leave the job, on the head."""
        self._leaving = nodes
        self._set_draining(self._draining_hosts)

    def _set_draining(self, hosts: set[str]) -> None:
        """Make known that these hosts are to leave when their jobs have ended, whenever that is."""
        self._draining_hosts = hosts
        if self._core is None or self._core.begun:
            return
        living = [info for info in self._head.queries.infos if info.index in self._head.resources.nodes]
        leaving = [info.index for info in living if info.host.partition(".")[0] in hosts]
        # Where all are, no work can go elsewhere: it had better stay, as the job goes on.
        found = dict.fromkeys(leaving if len(leaving) < len(living) else (), 0)
        found |= {info.index: 0 for info in living if info.index in self._leaving}
        self._head.set_draining(found)

    def on_drain_ready(self, now: float, src: bytes, msg: m.DrainReady) -> Iterable[Any]:
        """The driver's callbacks have run, on the head."""
        if self._core is None:
            return self._raylet.unexpected(now, src, msg)
        link = self._raylet.router.links.get(src)
        if src != self._remote_driver and (link is None or link.kind != DRIVER):
            return _NOTHING
        return self._core.driver_ready(now, msg.interested)

    def on_actor_saved(self, now: float, src: bytes, msg: m.ActorSaved) -> Iterable[Any]:
        """An actor has written its checkpoint, or failed to, on the head."""
        if self._core is None:
            return self._raylet.unexpected(now, src, msg)
        return self._core.saved(now, src, msg.path, msg.error)

    def announce(self, effect: drain.Announce) -> None:
        """Send Drain to all nodes."""
        raylet = self._raylet
        raylet.log(text := f"the job drains ({effect.reason}): {effect.seconds:.0f} s are left, nothing new is started")
        raylet.events.explain_end("drain", text)
        nodes = sorted(self._head.resources.nodes)
        for node in nodes:
            raylet.router.send(raylet_of(node), m.Drain(effect.reason, effect.seconds))
        self._head.set_draining(dict.fromkeys(nodes, int((time.time() + effect.seconds) * 1000)))
        raylet.apply(self._head.actors.recheck_waiting(raylet.loop.now))

    def start_saving(self, effect: drain.StartSaving) -> None:
        """Have all actors write their checkpoints."""
        assert self._core is not None
        self._raylet.apply(self._core.save(self._raylet.loop.now, self._head.actors.living_workers()))

    def all_saved(self, effect: drain.AllSaved) -> None:
        """Print what was saved, and send DrainOver to all nodes."""
        raylet = self._raylet
        if effect.saved:
            raylet.log(f"checkpoints written below {self._raylet.run_info.checkpoints}, actors: {len(effect.saved)}")
        for text in effect.failed[:_MAX_LINES]:
            raylet.log(f"no checkpoint of {text}")
        if len(effect.failed) > _MAX_LINES:
            raylet.log(f"nor of {len(effect.failed) - _MAX_LINES} more actors")
        for node in sorted(self._head.resources.nodes):
            raylet.router.send(raylet_of(node), m.DrainOver())

    def end_job(self, effect: drain.EndJob) -> None:
        """End the job with the exit code of the drain."""
        if effect.late:
            self._raylet.log("the time is up and the program still runs: it is ended")
        self.requeue = effect.again
        self._end_job(effect.code)

    def _refuse_actor(self, now: float, spec: m.ActorSpec) -> tuple[str, bytes] | None:
        """Return why an actor is not started, and the error of its calls; None when it may start."""
        error: BaseException | None = None
        what = f"actor {spec.class_name}"
        if self._core is not None and self._core.begun:
            why = f"the job drains ({self._core.reason}), {max(0.0, self._core.deadline - now):.0f} s are left"
            error = JobDrainingError(f"{what} was not started: {why}; hint: end the program, the next run can start it")
        elif spec.max_runtime and self._raylet.run_info.drain_at:
            left = max(0.0, self._raylet.run_info.drain_at - time.time())
            if left < spec.max_runtime:
                error = NotEnoughTimeError(what, spec.max_runtime, left)
        if error is None:
            return None
        importlib.import_module(type(error).__module__)  # else it would be pickled as another class of that name
        return str(error), serialize_error(error)


# ------------------------------------------------------------ node departure
# A raylet's part in the departure of a node from the running job; `core.gcs.drain` decides on the head.


_LOOK_INTERVAL = 0.05
_LEAST_TIME = 1.0


class NodeDeparture:
    """One per raylet.

    Args:
        node_manager: returns that of the head; None elsewhere.
        can_hand_over: returns whether the head could move to another node.
        end_job: ends it, where the node that leaves is the only one.

    Attributes:
        begun: whether this node leaves.
        core: decides, on the head.
    """

    def __init__(
        self,
        raylet: Raylet,
        node_manager: Callable[[], NodeManager | None],
        can_hand_over: Callable[[], bool],
        end_job: Callable[[], None],
    ) -> None:
        self.begun = False
        self.core = DepartureManager()
        self._raylet = raylet
        self._node_manager = node_manager
        self._can_hand_over = can_hand_over
        self._end_job = end_job
        self._deadline = 0.0
        self._looking = False
        self._awaited: dict[int, set[bytes]] = {}  # by node that leaves: processes of this node that copy its objects
        self._kept_at: set[int] = set()  # nodes that keep objects which processes of this one own
        raylet.head_location.listeners.append(self._head_moved)

    # ------------------------------------------------------------ every raylet

    def ask(self, reason: str) -> None:
        """This node has to leave: its batch job ends."""
        self._raylet.router.send(HEAD, m.LeaveRequest(reason, self._raylet.context.config.drain_timeout))

    def await_end(self, drain_at: float) -> None:
        """Leave in time before the batch job of this node ends. drain_at: Unix time; 0 for never."""
        if not drain_at or self.begun:
            return
        left = drain_at - time.time()
        if left <= 0:
            config = self._raylet.context.config
            self._raylet.router.send(HEAD, m.LeaveRequest("the end of its time limit", config.drain_margin))
        else:
            # The clock may be set meanwhile.
            self._raylet.loop.call_at(self._raylet.loop.now + min(left, 60.0), lambda: self.await_end(drain_at))

    def on_leave(self, now: float, src: bytes, msg: m.Leave) -> Iterable[Any]:
        """Start nothing new, and report when all tasks have ended."""
        raylet, first, self.begun = self._raylet, not self.begun, True
        self._deadline = now + msg.seconds
        if not self._looking:
            self._looking = True
            raylet.loop.call_at(now, self._look)
        if not first:
            return _NOTHING  # a new head has said it again
        raylet.log(f"this node leaves the job, within {msg.seconds:.0f} s")
        return raylet.lease_manager.leave(now)

    def _look(self) -> None:
        raylet = self._raylet
        self._looking = raylet.lease_manager.runs_tasks()
        if self._looking:
            raylet.loop.call_at(raylet.loop.now + _LOOK_INTERVAL, self._look)
        else:
            raylet.router.send(HEAD, m.NodeIdle(raylet.node))

    def _head_moved(self) -> None:
        """The new head, which may be this node, knows nothing of a departure that the old one had begun."""
        if self.begun:
            left = max(_LEAST_TIME, self._deadline - self._raylet.loop.now)
            self._raylet.router.send(HEAD, m.LeaveRequest("it was leaving when the head moved", left))

    def on_evacuate(self, now: float, src: bytes, msg: m.Evacuate) -> Iterable[Any]:
        """Have all processes of this node copy their objects from a node that leaves."""
        router = self._raylet.router
        self._awaited[msg.node] = set(router.links)
        for proc in router.links:
            router.send(proc, msg)
        self._check(msg.node)
        return _NOTHING

    def on_evacuated(self, now: float, src: bytes, msg: m.Evacuated) -> Iterable[Any]:
        """A process of this node has copied its objects; on the head also: all of another node have."""
        if src in self._raylet.router.links:
            self._awaited.get(msg.node, set()).discard(src)
            self._kept_at.update(msg.kept_at)
            self._check(msg.node)
            return _NOTHING
        return self.core.evacuated(node_of(src), msg.node, msg.kept_at)

    def process_died(self) -> None:
        """A process of this node is gone, and its objects with it."""
        for node in list(self._awaited):
            self._awaited[node].intersection_update(self._raylet.router.links)
            self._check(node)

    def _check(self, node: int) -> None:
        if node in self._awaited and not self._awaited[node]:
            del self._awaited[node]
            kept_at = sorted(self._kept_at) if node == self._raylet.node else []
            self._raylet.router.send(HEAD, m.Evacuated(node, kept_at))

    # ------------------------------------------------------------ the head

    def _living(self) -> list[int]:
        node_manager = self._node_manager()
        return node_manager.alive() if node_manager is not None else []

    def _members(self) -> list[int]:
        node_manager = self._node_manager()
        return [info.index for info in node_manager.ready()] if node_manager is not None else []

    def on_remove_node(self, now: float, src: bytes, msg: m.RemoveNode) -> Iterable[Any]:
        """A process wants a node to leave."""
        problem, node_manager = "", self._node_manager()
        if node_manager is not None and msg.node in node_manager.dead:
            self._raylet.router.send(src, m.GcsReply(msg.req, True, b"\xc0"))
            return _NOTHING
        if msg.node not in self._living():
            problem = f"there is no living node {msg.node}"
        elif msg.node == self._raylet.context.driver_rank:
            problem = f"node {msg.node} runs the program"
        elif msg.node == self._raylet.node and not self._can_hand_over():
            problem = f"node {msg.node} runs the head, and no other node can take over"
        if problem:
            self._raylet.router.send(src, m.GcsReply(msg.req, False, problem.encode()))
            return _NOTHING
        return self.core.request(now, msg.node, "it was removed", msg.seconds, (src, msg.req))

    def on_leave_request(self, now: float, src: bytes, msg: m.LeaveRequest) -> Iterable[Any]:
        """A node has to leave."""
        if node_of(src) not in self._living():
            return _NOTHING
        if node_of(src) == self._raylet.node and not self._can_hand_over():
            self._end_job()
            return _NOTHING
        return self.core.request(now, node_of(src), msg.reason, msg.seconds)

    def on_node_idle(self, now: float, src: bytes, msg: m.NodeIdle) -> Iterable[Any]:
        """The tasks of a node that leaves have ended."""
        return self.core.finished(msg.node, self._members())

    def node_died(self, node: int) -> None:
        """A node is dead, on the head."""
        self._raylet.apply(self.core.node_died(node))

    def tick(self) -> None:
        """Look at the deadlines, on the head; every `config.tick`."""
        self._raylet.apply(self.core.tick(self._raylet.loop.now, self._members()))
