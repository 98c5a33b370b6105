"""Autoscaling as every raylet has it: the head of a job that may grow decides, and a node leaves if it is of no use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hpcray.common.ids import HEAD, node_of
from hpcray.core.gcs.gcs import Gcs
from hpcray.protocol import messages as m
from hpcray.protocol.messages import WORKER
from hpcray.runtime.node.node_features import OpenJob
from hpcray.runtime.raylet.raylet import Raylet

if TYPE_CHECKING:
    from hpcray.autoscaler.autoscaler_runner import AutoscalerRunner

_LOOK_INTERVAL, _LOOK_TIMEOUT = 0.05, 5.0


class NodeAutoscaling:
    """One per raylet. The autoscaler is imported where a job may grow, and there on the head alone.

    Args:
        open_job: opens the job for further nodes (`JoinAcceptor.open_job`).
        leads: returns whether this raylet is the head. ends: returns whether the job is about to end.
    """

    def __init__(
        self,
        raylet: Raylet,
        open_job: OpenJob,
        leads: Callable[[], bool],
        ends: Callable[[], bool],
    ) -> None:
        self._raylet = raylet
        self._of_job = open_job, leads, ends
        self._runner: AutoscalerRunner | None = None

    def lead(self, head: Gcs, session: str, fresh: bool) -> None:
        """This raylet is the head. fresh: of a job that has no further nodes yet."""
        if self._raylet.context.config.max_nodes:
            from hpcray.autoscaler.autoscaler_runner import AutoscalerRunner

            self._runner = AutoscalerRunner(self._raylet, head, session, fresh, *self._of_job)

    def close(self, ended: bool) -> None:
        """The raylet ends. ended: and the job with it, not only this node."""
        if self._runner is not None:
            self._runner.close(ended)

    def on_node_occupied(self, now: float, src: bytes, msg: m.NodeOccupied) -> Iterable[Any]:
        """A node that was asked to leave is of use."""
        if self._runner is not None:
            self._runner.node_occupied(now, node_of(src))
        return ()

    def on_leave_idle(self, now: float, src: bytes, msg: m.LeaveIdle) -> Iterable[Any]:
        """Let the idle workers exit; when all have, nothing is lost with this node."""
        loop = self._raylet.loop
        loop.call_at(now, lambda: self._look(now + _LOOK_TIMEOUT))
        return self._raylet.lease_manager.evict_idle_workers(now)

    def _look(self, deadline: float) -> None:
        raylet = self._raylet
        if raylet.lease_manager.evicts() and raylet.loop.now < deadline:
            raylet.loop.call_at(raylet.loop.now + _LOOK_INTERVAL, lambda: self._look(deadline))
        elif raylet.lease_manager.has_workers() or any(link.kind != WORKER for link in raylet.router.links.values()):
            raylet.router.send(HEAD, m.NodeOccupied(raylet.node))
        else:
            raylet.router.send(HEAD, m.LeaveRequest("it was idle", raylet.context.config.drain_timeout))
