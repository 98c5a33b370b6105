"""The GCS and the cluster scheduler in one core: events in, effects out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hpcray.common.config import Config
from hpcray.common.ids import RUN_MASK, node_of, raylet_of
from hpcray.common.resources import GROUP
from hpcray.core.effects import Effect, Send
from hpcray.core.gcs import state_log as rows
from hpcray.core.gcs.actor_manager import ActorManager
from hpcray.core.gcs.cluster_resources import ClusterResources, merged_views
from hpcray.core.gcs.cluster_scheduler import ClusterScheduler
from hpcray.core.gcs.garbage_collection import GlobalGarbageCollection
from hpcray.core.gcs.node_types import NodeTypeTable, parse_node_types
from hpcray.core.gcs.placement_group_manager import PlacementGroupManager
from hpcray.core.gcs.placement_group_scheduler import NearSets
from hpcray.core.gcs.query_service import QueryService
from hpcray.core.gcs.recovery import (
    GcsTables,
    NodeRoster,
    Resumed,
    TableReader,
    load_snapshot,
    read_roster,
    resume_job,
    waits_for_resume,
)
from hpcray.core.gcs.state_log import DirtyRows, SessionRow, StateLog, TableSnapshot
from hpcray.protocol import messages as m

HANDLES: tuple[type, ...] = (
    m.CreateActor, m.WatchActor, m.KillActor, m.ActorReady, m.ActorGone, m.ActorOutOfScope, m.StartActorRefused,
    m.GcsCall, m.UnmetLeaseRequest, m.GrantLeasesRefused, m.NodeView, m.SetJob,
    m.CreateGroup, m.WatchGroup, m.RemoveGroup, m.BundlesPrepared, m.RequestGarbageCollection,
)  # fmt: skip
"""Message types for `Gcs.handle`. In the head's raylet KillActor and SetJob are for the GCS, unless their source is the
head itself."""


class Gcs:
    """Actors, placement groups, key-value store, queries, and where unmet lease requests are sent.

    Args:
        near_sets: see `PlacementGroupScheduler`.

    Attributes:
        log: of all that must not be lost with this process, see `gcs.recovery`.
        actors, garbage, groups, queries, resources, scheduler: its parts.
        run: number of the job's run; with it the ids of one run differ from those of the next.
        resumed: what came back from the run before; None until the program has sent SetJob, or if there was none.
    """

    def __init__(self, config: Config, near_sets: NearSets | None = None) -> None:
        self.config = config
        self.session = ""
        self.job: m.JobInfo | None = None
        self.run = 0
        self.resumed: Resumed | None = None
        self._earlier: TableSnapshot | None = None
        self._deferred: list[tuple[bytes, m.Message]] = []
        self._early_views: dict[int, m.NodeView] = {}
        self._dirty_rows = DirtyRows()
        self.resources = ClusterResources(
            config.spread_threshold, NodeTypeTable(parse_node_types(config.node_types), bool(config.max_nodes))
        )
        self.groups = PlacementGroupManager(self.resources, self._dirty_rows, self._group_removed, near_sets)
        self.scheduler = ClusterScheduler(self.resources, self.groups.is_removed, config.locality_wait)
        self.actors = ActorManager(self.resources, self._dirty_rows, self.groups.is_for_removed, config.dead_actors)
        self.queries = QueryService(self.resources, self.scheduler, self.actors, self.groups, self._dirty_rows)
        self.garbage = GlobalGarbageCollection(config.global_gc_min_interval)
        self._tables = GcsTables(self.resources, self.actors, self.groups, self.queries)
        reader = TableReader(self._tables, lambda: SessionRow(self.session, self.job, self.run))
        self.log = StateLog(reader.read_row, reader.all_keys, self._dirty_rows)
        self._handlers: dict[type, Callable[[float, bytes, Any], list[Effect]]] = {
            m.CreateActor: self.actors.register_actor,
            m.WatchActor: lambda now, src, msg: self.actors.watch_actor(src, msg),
            m.KillActor: lambda now, src, msg: self.actors.kill_actor(now, msg),
            m.ActorReady: self.actors.actor_ready,
            m.ActorGone: lambda now, src, msg: self.actors.actor_gone(now, node_of(src), msg),
            m.ActorOutOfScope: lambda now, src, msg: self.actors.actor_out_of_scope(now, msg),
            m.StartActorRefused: lambda now, src, msg: self.actors.start_refused(now, node_of(src), msg),
            m.GcsCall: lambda now, src, msg: [Send(src, self.queries.reply_once(src, msg, now))],
            m.UnmetLeaseRequest: self._unmet_lease_request,
            m.GrantLeasesRefused: lambda now, src, msg: self.scheduler.grant_refused(now, node_of(src), msg),
            m.NodeView: self._node_view,
            m.SetJob: self._set_job,
            m.CreateGroup: self.groups.create_group,
            m.WatchGroup: lambda now, src, msg: self.groups.watch_group(src, msg),
            m.RemoveGroup: lambda now, src, msg: self.groups.remove_group(now, msg),
            m.BundlesPrepared: self._bundles_prepared,
            m.RequestGarbageCollection: self._request_garbage_collection,
        }

    # ------------------------------------------------------------ the run

    def begin_run(self, number: int, earlier: TableSnapshot | None = None) -> int:
        """Number this run of the job, before any process is started.

        Args:
            number: of this run, where there is no state log of the run before.
            earlier: the tables of the run before. What outlives a run comes back when the program has sent SetJob:
                workers import from where it says.

        Returns:
            The number.
        """
        self._earlier = earlier
        self._set_run(number if earlier is None else read_roster(earlier).run + 1)
        return self.run

    @property
    def waits_for_resume(self) -> bool:
        """Whether the tables of the run before are still to be resumed from."""
        return self._earlier is not None

    def restore(self, now: float, snapshot: TableSnapshot) -> NodeRoster:
        """Become, before anything else, what another head was. Then call `node_died` for nodes that died since."""
        self._set_run(read_roster(snapshot).run)
        roster = load_snapshot(self._tables, now, snapshot)
        self.session, self.job = roster.session, roster.job
        return roster

    def _set_run(self, number: int) -> None:
        self.run = number
        self.actors.pending_lookups.run = number & RUN_MASK

    def reconcile(
        self, now: float, held: Mapping[int, m.NodeInventory], gone: Mapping[tuple[int, bytes], m.ActorGone]
    ) -> list[Effect]:
        """Compare restored actors and groups with what the nodes have, see `ActorManager.reconcile`."""
        return self.actors.reconcile(now, held, gone) + self.groups.reconcile(now, held)

    def cluster_up(self, now: float, session: str, nodes: list[m.NodeInfo]) -> list[Effect]:
        """Every node is in: place what waited for that."""
        self.session = session
        self.queries.set_nodes(nodes)
        self.resources.nodes_joined(nodes)
        self._dirty_rows.add(rows.SESSION, b"")
        for info in nodes:
            self._dirty_rows.add(rows.NODE, info.index.to_bytes(2, "big"))
        for view in self._early_views.values():
            self.resources.apply_view(view)
        self._early_views.clear()
        out = self.scheduler.cluster_changed(now)
        self.place_waiting(now, out)
        return out

    def nodes_joined(
        self, now: float, infos: list[m.NodeInfo], left: Mapping[int, float] | None = None
    ) -> list[Effect]:
        """Nodes have joined the running job: place there what waits. left: those that leave in so many seconds."""
        self.queries.set_nodes(infos)
        self.resources.nodes_joined(infos)
        self.resources.label_time_left(left or {})
        out: list[Effect] = []
        for info in infos:
            self._dirty_rows.add(rows.NODE, info.index.to_bytes(2, "big"))
            if self.job is not None:
                out.append(Send(raylet_of(info.index), m.SetJob(self.job)))
            view = self._early_views.pop(info.index, None)
            if view is not None:
                self.resources.apply_view(view)
        out += self.scheduler.cluster_changed(now)
        self.place_waiting(now, out)
        return out

    def handle(self, now: float, src: bytes, msg: m.Message) -> list[Effect]:
        """Handle a message of a type in `HANDLES`.

        Raises:
            KeyError: the message type is not for this core.
        """
        if self._earlier is not None and waits_for_resume(msg):
            self._deferred.append((src, msg))
            return []
        return self._handlers[type(msg)](now, src, msg)

    def node_died(self, now: float, node: int, reason: str) -> list[Effect]:
        """A node is gone, with everything on it."""
        self._early_views.pop(node, None)
        if node not in self.resources.nodes:
            return []  # it was about to join, and nothing knows of it yet
        self.resources.node_died(node, reason)
        self._dirty_rows.add(rows.NODE, node.to_bytes(2, "big"))
        groups, left = self.groups.node_died(now, node), node in self.queries.draining
        return groups + self.scheduler.node_died(now, node) + self.actors.node_died(now, node, reason, left)

    def process_died(self, now: float, proc: bytes, reason: str) -> list[Effect]:
        """A process of the cluster is gone; its node's raylet reports that."""
        self._dirty_rows.add(rows.ENDED, proc)
        self.queries.replies.forget_process(proc)
        groups = self.groups.process_died(now, proc)
        return groups + self.scheduler.holder_died(proc, reason) + self.actors.process_died(now, proc, reason)

    def set_draining(self, nodes: dict[int, int]) -> None:
        """These nodes are about to leave, at these times (Unix, in ms; 0: not known); no others are."""
        self.queries.draining, self.queries.asked_draining = nodes, False
        self.resources.set_draining(nodes)

    def set_time_left(self, nodes: dict[int, float], job: float) -> None:
        """These nodes leave in so many seconds, and the job ends; inf: not known."""
        self.resources.set_time_left(nodes, job)

    def tick(self, now: float) -> list[Effect]:
        """Housekeeping, every `config.tick`."""
        out = self.groups.tick(now)
        out += self.scheduler.tick(now)
        self.actors.tick(now, out)
        waited = max(self.actors.longest_wait(now), self.scheduler.longest_wait(now))
        return out + self._collect_garbage(now, waited)

    def place_waiting(self, now: float, out: list[Effect]) -> None:
        """Place all actors and groups that wait, as far as there is room."""
        self.actors.place_waiting(now, out)
        self.groups.place_waiting(now, out, everything=True)

    def _node_view(self, now: float, src: bytes, msg: m.NodeView) -> list[Effect]:
        if not self.queries.infos or (msg.node not in self.resources.nodes and msg.node not in self.resources.dead):
            self._early_views[msg.node] = merged_views(self._early_views.get(msg.node), msg)
            return []
        if not self.resources.apply_view(msg):
            return []
        out = self.scheduler.node_grew(now, msg.node)
        self.actors.place_waiting(now, out)
        self.groups.place_waiting(now, out)
        return out

    def _unmet_lease_request(self, now: float, src: bytes, msg: m.UnmetLeaseRequest) -> list[Effect]:
        out = self.scheduler.unmet_lease_request(now, msg)
        if msg.count and msg.shape.strategy.startswith(GROUP):
            self.groups.tell_nodes(node_of(src), msg.shape, out)
        return out

    def _bundles_prepared(self, now: float, src: bytes, msg: m.BundlesPrepared) -> list[Effect]:
        out, nodes = self.groups.bundles_prepared(now, node_of(src), msg)
        for node in nodes:
            out += self.scheduler.node_grew(now, node)
        if nodes:
            self.actors.place_waiting(now, out)
        return out

    def _group_removed(self, now: float, group: str, out: list[Effect]) -> None:
        self.scheduler.group_removed(group, out)
        self.actors.end_waiting_in_group(now, group, out)

    def _request_garbage_collection(self, now: float, src: bytes, msg: m.RequestGarbageCollection) -> list[Effect]:
        self.garbage.request()
        return self._collect_garbage(now)

    def _collect_garbage(self, now: float, waited: float = 0.0) -> list[Effect]:
        if not self.garbage.due(now, waited):
            return []
        return [Send(raylet_of(node), m.CollectGarbage()) for node in sorted(self.resources.nodes)]

    def _set_job(self, now: float, src: bytes, msg: m.SetJob) -> list[Effect]:
        self.job = msg.job
        self._dirty_rows.add(rows.SESSION, b"")
        out: list[Effect] = [Send(raylet_of(node), msg) for node in sorted(self.resources.nodes)]
        if self._earlier is not None:
            self.resumed = resume_job(self._tables, self._dirty_rows, now, self._earlier, self.run)
            self._earlier = None
            self.place_waiting(now, out)
            for asker, call in self._deferred:
                out += self.handle(now, asker, call)
            self._deferred.clear()
        return out

    def check_invariants(self) -> None:
        """Check all parts, and that they agree."""
        self.resources.check_invariants()
        self.scheduler.check_invariants()
        self.actors.check_invariants()
        self.groups.check_invariants()
        indices = [info.index for info in self.queries.infos]
        assert indices == sorted(set(indices)), f"nodes {indices}"
        assert self.resources.nodes.keys() | self.resources.dead.keys() <= set(indices)


RECOVERING_HANDLES: tuple[type, ...] = (*HANDLES, m.NodeInventory)
"""Message types for `RecoveringGcs.handle`."""

_Event = tuple[Callable[..., list[Effect]], tuple[Any, Any]]


class RecoveringGcs:
    """Stands before a `Gcs` that goes on from another one's tables, and passes events on when these are reconciled.

    Until every living node has sent its inventory nothing is decided: what arrives meanwhile is deferred, in order.
    Then the tables are compared with the nodes, the old head's death is handled, and everything deferred follows.

    Attributes:
        gcs: the GCS itself.
        awaited: nodes whose inventories have not come yet.
    """

    def __init__(self, config: Config, near_sets: NearSets | None = None) -> None:
        self.gcs = Gcs(config, near_sets)
        self.awaited: set[int] = set()
        self._held: dict[int, m.NodeInventory] = {}
        self._deferred: list[_Event] = []

    def take_over(self, now: float, snapshot: TableSnapshot, old: int) -> NodeRoster:
        """Begin. `old`: the node of the head that has died; call `node_died` for it afterwards."""
        roster = self.gcs.restore(now, snapshot)
        self.awaited = {info.index for info in roster.infos if info.index not in roster.dead} - {old}
        return roster

    def handle(self, now: float, src: bytes, msg: m.Message) -> list[Effect]:
        """Handle a message of a type in `RECOVERING_HANDLES`."""
        if isinstance(msg, m.NodeInventory):
            return self._inventory(now, msg)
        if self.awaited:
            self._deferred.append((self.gcs.handle, (src, msg)))
            return []
        return self.gcs.handle(now, src, msg)

    def nodes_joined(
        self, now: float, infos: list[m.NodeInfo], left: Mapping[int, float] | None = None
    ) -> list[Effect]:
        """Nodes have joined the running job."""
        if not self.awaited:
            return self.gcs.nodes_joined(now, infos, left)
        self._deferred.append((self.gcs.nodes_joined, (infos, left)))
        return []

    def node_died(self, now: float, node: int, reason: str) -> list[Effect]:
        """A node is gone, with everything on it."""
        if not self.awaited:
            return self.gcs.node_died(now, node, reason)
        self._deferred.append((self.gcs.node_died, (node, reason)))
        self.awaited.discard(node)
        return self._reconcile_if_complete(now)

    def process_died(self, now: float, proc: bytes, reason: str) -> list[Effect]:
        """A process of the cluster is gone."""
        if not self.awaited:
            return self.gcs.process_died(now, proc, reason)
        self._deferred.append((self.gcs.process_died, (proc, reason)))
        return []

    def tick(self, now: float) -> list[Effect]:
        """Housekeeping, every `config.tick`."""
        return [] if self.awaited else self.gcs.tick(now)

    def check_invariants(self) -> None:
        """Check the GCS once its tables are reconciled."""
        assert self.awaited or not (self._deferred or self._held)
        if not self.awaited:
            self.gcs.check_invariants()

    def _inventory(self, now: float, msg: m.NodeInventory) -> list[Effect]:
        if msg.node not in self.awaited:
            return []
        self._held[msg.node] = msg
        self.awaited.discard(msg.node)
        return self._reconcile_if_complete(now)

    def _reconcile_if_complete(self, now: float) -> list[Effect]:
        """Go on as a GCS, once all inventories have come."""
        if self.awaited:
            return []
        gcs, (deferred, self._deferred) = self.gcs, (self._deferred, [])
        messages = [(node_of(args[0]), args[1]) for _, args in deferred if isinstance(args[0], bytes)]
        for _, msg in messages:
            if isinstance(msg, m.NodeView):
                gcs.resources.apply_view(msg)
        gone = {(node, msg.actor): msg for node, msg in messages if isinstance(msg, m.ActorGone)}
        out = gcs.reconcile(now, self._held, gone)
        out += [Send(raylet_of(node), m.SetJob(gcs.job)) for node in sorted(self._held) if gcs.job is not None]
        for call, args in _without_superseded(deferred):
            out += call(now, *args)
        out += gcs.actors.kill_unregistered()
        self._held = {}
        gcs.place_waiting(now, out)
        return out


def _without_superseded(deferred: list[_Event]) -> Iterable[_Event]:
    """Drop reports of unmet requests that later ones follow: they are absolute, so only the last one counts."""
    last = {
        (args[1].holder, args[1].scheduling_class): place
        for place, (_, args) in enumerate(deferred)
        if isinstance(args[1], m.UnmetLeaseRequest)
    }
    for place, (call, args) in enumerate(deferred):
        msg = args[1]
        if not isinstance(msg, m.UnmetLeaseRequest) or last[msg.holder, msg.scheduling_class] == place:
            yield call, args
