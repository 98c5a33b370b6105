"""A raylet's part in the departure of a node from the running job; `core.gcs.departures` decides on the head."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from hpcray.common.ids import HEAD, node_of
from hpcray.core.gcs.departures import DepartureManager
from hpcray.core.gcs.node_manager import NodeManager
from hpcray.protocol import messages as m
from hpcray.runtime.raylet.raylet import Raylet

_LOOK_INTERVAL = 0.05
_LEAST_TIME = 1.0
_NOTHING: tuple[()] = ()


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
