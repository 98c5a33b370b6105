"""The autoscaler's shell, on the head of a job that may grow."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable

import msgspec

from hpcray.autoscaler.autoscaler import (
    Action,
    Autoscaler,
    AutoscalerSpec,
    InstanceState,
    RemoveIdleNode,
    Report,
    StartNodes,
    Terminate,
)
from hpcray.autoscaler.node_provider import JobNodeProvider, LocalNodeProvider, NodeProvider, has_slurm
from hpcray.autoscaler.resource_demand import node_uses, read_floor, waiting_requests
from hpcray.common.config import Config
from hpcray.common.ids import raylet_of
from hpcray.core.gcs.gcs import Gcs
from hpcray.core.gcs.placement_group_manager import Demand
from hpcray.protocol import messages as m
from hpcray.runtime.node.join_token import join_token_path, write_join_token
from hpcray.runtime.node.node_features import OpenJob
from hpcray.runtime.raylet.raylet import Raylet

PERIOD = 1.0
"""Seconds between two decisions."""
_FIRST_POLL, _LONGEST_POLL, _SLOWER = 2.0, 30.0, 1.5
"""Seconds between two questions to the batch system: at first, and while nothing changes."""
SPACE, FLOOR_KEY = "__autoscaler", b"__autoscaler_resource_requests"
"""Where `request_resources` stores its bundles in the key-value store."""


class AutoscalerRunner:
    """Carries out what the autoscaler decides, while this raylet is the head.

    Args:
        head: the tables and the scheduler of the job.
        session: its name. fresh: whether it has no further nodes yet.
        open_job: opens the job for further nodes (`JoinAcceptor.open_job`).
        leads: returns whether this raylet is the head. ends: returns whether the job is about to end.
    """

    def __init__(
        self,
        raylet: Raylet,
        head: Gcs,
        session: str,
        fresh: bool,
        open_job: OpenJob,
        leads: Callable[[], bool],
        ends: Callable[[], bool],
    ) -> None:
        config = raylet.context.config
        self._raylet = raylet
        self._open_job = open_job
        self._leads = leads
        self._ends = ends
        self._opened = self._stopped = False
        self._poll_at = 0.0
        self._poll_pause = _FIRST_POLL
        self._known: dict[str, str] = {}
        self._floor: tuple[bytes | None, list[Demand]] = (None, [])
        self._head = head
        self._core: Autoscaler | None = Autoscaler(
            AutoscalerSpec(config.min_nodes, config.max_nodes, config.idle_node_timeout, config.upscaling_speed),
            head.resources.node_types,
        )
        head.queries.autoscalers.append(lambda: self._core.describe(raylet.loop.now) if self._core else None)
        self._token, self._provider = self._make_provider(config, session, fresh)
        if fresh:
            self._core.polled(raylet.loop.now, {})
        raylet.loop.call_at(raylet.loop.now, self._turn)

    def _make_provider(self, config: Config, session: str, fresh: bool) -> tuple[str, NodeProvider]:
        """Return the path of the join token too."""
        kind = config.node_provider
        if kind == "slurm" or (kind == "auto" and has_slurm(os.environ)):
            token = join_token_path(session)
            end = self._raylet.run_info.end
            return token, JobNodeProvider(self._raylet.loop, session, token, end, os.environ, not fresh)
        token = os.path.join(self._raylet.context.session_dir, f"{session}.join-token")
        return token, LocalNodeProvider(token)

    def _turn(self) -> None:
        core, loop, context = self._core, self._raylet.loop, self._raylet.context
        if core is None or self._stopped:
            return
        if not self._leads():
            self._core = None  # another head goes on with all that there is
            return
        loop.call_at(loop.now + PERIOD, self._turn)
        if self._ends():
            self.stop()
            return
        head = self._head
        uses = node_uses(head.resources, head.actors, (self._raylet.node, context.driver_rank))
        demands = waiting_requests(head.scheduler, head.actors, head.groups)
        self._carry_out(core.update(loop.now, uses, demands, self._read_floor()))
        self._poll(core)

    def _read_floor(self) -> list[Demand]:
        stored = self._head.queries.kv.get(FLOOR_KEY, SPACE)
        if stored != self._floor[0]:
            floor = []
            if stored is not None:
                try:
                    floor = read_floor(msgspec.msgpack.decode(stored))
                except (msgspec.DecodeError, TypeError, ValueError) as error:
                    self._raylet.log(f"request_resources: {error}")
            self._floor = stored, floor
        return self._floor[1]

    def _poll(self, core: Autoscaler) -> None:
        """Ask the batch system, seldom while nothing changes."""
        now = self._raylet.loop.now
        states = {name: instance.state for name, instance in core.instances.items()}
        if states != self._known:
            self._known = states
            self._poll_pause = _FIRST_POLL
            self._poll_at = min(self._poll_at, now + _FIRST_POLL)
        if now < self._poll_at or not (states or not core.surveyed):
            return
        self._poll_at = now + self._poll_pause
        self._poll_pause = min(_LONGEST_POLL, self._poll_pause * _SLOWER)
        self._provider.poll(self._polled)

    def _polled(self, rows: dict[str, InstanceState]) -> None:
        if self._core is not None:
            self._carry_out(self._core.polled(self._raylet.loop.now, rows))

    def _carry_out(self, actions: Iterable[Action]) -> None:
        raylet = self._raylet
        for action in actions:
            if isinstance(action, StartNodes):
                self._launch(action)
            elif isinstance(action, Terminate):
                self._provider.terminate(action.instances)
            elif isinstance(action, RemoveIdleNode):
                raylet.router.send(raylet_of(action.node), m.LeaveIdle())
            elif isinstance(action, Report):
                raylet.log(action.text)

    def _launch(self, launch: StartNodes) -> None:
        if self._opened:
            self._start(launch)
            return
        remote = isinstance(self._provider, JobNodeProvider)

        def opened(token: bytes, problem: str) -> None:
            try:
                if not problem and not self._opened:
                    write_join_token(self._token, token)
                    self._opened = True
            except OSError as error:
                self._refused(launch, f"the join token cannot be written: {error}", False)
                return
            if problem:
                self._refused(launch, problem, True)
            else:
                self._start(launch)

        self._open_job(remote, self._token if remote else "", opened)

    def _start(self, launch: StartNodes) -> None:
        node_type = self._head.resources.node_types.all()[launch.node_type]
        try:
            self._provider.launch(node_type, launch.count, lambda *answer: self._launched(launch, *answer))
        except OSError as error:
            self._refused(launch, str(error), False)

    def _refused(self, launch: StartNodes, reason: str, permanent: bool) -> None:
        assert self._core is not None
        self._carry_out(self._core.launch_failed(self._raylet.loop.now, launch.request, reason, permanent))

    def _launched(self, launch: StartNodes, names: list[str], reason: str, permanent: bool) -> None:
        core, now = self._core, self._raylet.loop.now
        if core is None:
            return
        if names:
            core.launched(now, launch.request, names)
            if self._stopped:
                self._provider.terminate(tuple(names))
        else:
            self._refused(launch, reason, permanent)

    def stop(self) -> None:
        """The job ends: no further nodes, and those that wait in the queue are cancelled."""
        if self._core is not None and not self._stopped:
            self._stopped = True
            self._carry_out(self._core.stop(self._raylet.loop.now))

    def close(self, ended: bool) -> None:
        """The raylet ends. ended: and the job with it, not only this node."""
        if self._core is None:
            return
        if ended:
            self.stop()
        self._provider.close(ended)
        if ended and self._opened:
            with contextlib.suppress(OSError):
                os.unlink(self._token)

    def node_occupied(self, now: float, node: int) -> None:
        """A node that was asked to leave is of use."""
        if self._core is not None:
            self._core.stays(now, node)
