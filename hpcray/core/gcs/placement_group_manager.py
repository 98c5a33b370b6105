"""All placement groups of the job: planned, prepared on every node, committed; or undone and tried again.

The GCS plans with what it knows of every node, and asks each node of the plan to hold its bundles. When all nodes have
agreed, the bundles are committed; if one refuses, dies, or does not answer in time, all are given back and the group
waits on. So a group has all its bundles or holds nothing, until a node that has some of them dies.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct, field

from hpcray.common.ids import node_of, owner_of, raylet_of
from hpcray.common.labels import ACTOR_SCHEDULING_CLASS, show_strategy
from hpcray.common.resources import ANY, LATE_BOUND_NODES, REPORT_AFTER, Resources, add, bundle_of, group_of, show
from hpcray.core.effects import Effect, Send
from hpcray.core.gcs import state_log as rows
from hpcray.core.gcs.cluster_resources import ClusterResources
from hpcray.core.gcs.placement_group_scheduler import (
    STRICT_PACK,
    STRICT_SPREAD,
    NearSets,
    PlacementGroupScheduler,
    Plan,
)
from hpcray.core.gcs.state_log import DirtyRows
from hpcray.protocol import messages as m

PENDING, CREATED, RESCHEDULING, REMOVED = "PENDING", "CREATED", "RESCHEDULING", "REMOVED"
TRANSITIONS: dict[str, tuple[str, ...]] = {
    # Registered; no bundle has a node.
    PENDING: (CREATED, REMOVED),
    # Every bundle has a living node and may be used.
    CREATED: (RESCHEDULING, REMOVED),
    # A node that had bundles has died; the other bundles stay, the lost ones are placed again.
    RESCHEDULING: (CREATED, RESCHEDULING, REMOVED),
    # Removed by a process, or with its owner; the last REMOVED_GROUPS_KEPT stay in the table.
    REMOVED: (),
}
ANSWER_TIMEOUT = 10.0
"""Seconds after which an attempt is undone whose nodes have not all answered, and the group is tried again."""
TRIED_AT_ONCE = 16
"""Waiting groups that are looked at when a node has more room; all are with every tick."""
REMOVED_GROUPS_KEPT, ENDED_IDS_KEPT = 1000, 100_000
STARVING_AFTER = 2.0
"""Seconds after which nodes reserve room for a waiting group, one group at a time: smaller requests that come again and
again must not starve it."""
FIRST_RESERVATION, LONGEST_RESERVATION = 8.0, 64.0
"""Seconds of such a reservation: the first, and at most. It doubles with each try. In between, other requests run for
as long: what is waited for may itself depend on them."""
RETRY_PAUSE = 0.05
"""Seconds between two retries in a large cluster, however many nodes report more room."""
GROUPS_TOLD = 1000
"""Groups whose nodes are sent to a raylet at once, the last ones placed."""
LARGE_CLUSTER = 64
"""Nodes from which on a cluster is a large one."""


class GcsPlacementGroup(Struct, eq=False):
    """One placement group.

    Attributes:
        nodes: the node of each bundle, -1 where it has none.
        planned, awaited: the attempt under way: which bundle is to go where, and which nodes have not answered.
        attempt, attempt_began: number of the last attempt, and its time.
        reservation: seconds for which the attempt's nodes reserve room; 0 for an attempt that must fit at once.
        next_reservation, rests_until: how long its next reserving attempt lasts, and when it may begin.
        avoid: nodes that have refused since the last tick.
        since, reported_at, reported: when it began to wait; for the report to its creator, and whether that was sent.
    """

    spec: m.GroupSpec
    state: str = PENDING
    nodes: list[int] = field(default_factory=list)
    planned: Plan = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    attempt: int = 0
    attempt_began: float = 0.0
    reservation: float = 0.0
    next_reservation: float = 0.0
    rests_until: float = 0.0
    avoid: set[int] = field(default_factory=set)
    watchers: set[bytes] = field(default_factory=set)
    since: float = 0.0
    reported_at: float = 0.0
    reported: bool = False
    reason: str = ""

    @property
    def key(self) -> str:
        return self.spec.group.hex()

    def title(self) -> str:
        name = f" {self.spec.name!r}" if self.spec.name else ""
        return f"placement group{name} {self.key}"

    def planned_on(self, node: int) -> dict[int, Resources]:
        """The bundles that the attempt under way asks of one node."""
        return {index: self.spec.bundles[index] for index, at in sorted(self.planned.items()) if at == node}

    def indices_on(self, node: int) -> list[int]:
        """The bundles that a node has."""
        return [index for index, at in enumerate(self.nodes) if at == node]

    def without_node(self) -> dict[int, Resources]:
        """The bundles that have no node, by index."""
        return {index: self.spec.bundles[index] for index, node in enumerate(self.nodes) if node < 0}

    def bundles_per_node(self) -> dict[int, int]:
        """How many bundles are on which node."""
        used: dict[int, int] = {}
        for node in self.nodes:
            if node >= 0:
                used[node] = used.get(node, 0) + 1
        return used

    def may_be_late_bound(self) -> bool:
        """Return True if requests for any of its bundles may queue at all of its nodes."""
        return len(set(self.nodes)) <= LATE_BOUND_NODES

    def describe_request(self) -> str:
        """The group and its request as text for users."""
        return f"{self.title()} asks for {self.request()}"

    def request(self) -> str:
        """The request as text for users."""
        kinds: dict[str, int] = {}
        for index, amounts in enumerate(self.spec.bundles):
            text = show(amounts)
            if self.spec.selectors and self.spec.selectors[index]:
                text += f" with {show_strategy(self.spec.selectors[index])}"
            kinds[text] = kinds.get(text, 0) + 1
        bundles = ", ".join(text if count == 1 else f"{count} x {text}" for text, count in kinds.items())
        together = f", on nodes with the same {self.spec.same}" if self.spec.same else ""
        return f"{bundles} ({self.spec.strategy}{together})"


class PlacementGroupManager:
    """Registers, places, moves and removes placement groups.

    Args:
        resources: what every node has.
        dirty_rows: where changed rows are noted for the state log.
        on_removed: called with the time, the id of a removed group in hex, and the list of effects.
        near_sets: see `PlacementGroupScheduler`.
    """

    def __init__(
        self,
        resources: ClusterResources,
        dirty_rows: DirtyRows,
        on_removed: Callable[[float, str, list[Effect]], None],
        near_sets: NearSets | None = None,
    ) -> None:
        self._resources = resources
        self._dirty_rows = dirty_rows
        self._on_removed = on_removed
        self._scheduler = PlacementGroupScheduler(resources, near_sets)
        self._retried_at = float("-inf")
        self._groups: dict[bytes, GcsPlacementGroup] = {}
        self._waiting: OrderedDict[bytes, GcsPlacementGroup] = OrderedDict()
        self._attempts: dict[bytes, GcsPlacementGroup] = {}
        self._names: dict[tuple[str, str], bytes] = {}
        self._owned: dict[bytes, set[bytes]] = {}
        self._early_watchers: dict[bytes, set[bytes]] = {}
        self._placements = 0
        self._placed: OrderedDict[int, bytes] = OrderedDict()  # the last ones
        self._told: dict[int, int] = {}  # by node: number of the last placement that its raylet knows
        self._removed: deque[bytes] = deque()
        self._removed_ids: OrderedDict[str, None] = OrderedDict()
        self._dead_processes: OrderedDict[bytes, None] = OrderedDict()
        self._reported_waits: OrderedDict[tuple[bytes, str], None] = OrderedDict()

    # ------------------------------------------------------------ messages of processes

    def create_group(self, now: float, src: bytes, msg: m.CreateGroup) -> list[Effect]:
        """Register a group and try to place it."""
        spec, out = msg.spec, list[Effect]()
        if spec.group in self._groups:  # sent again, to another head
            return [Send(src, m.GcsReply(msg.req, True, b"")), *self.watch_group(src, m.WatchGroup(spec.group))]
        if spec.name and (spec.namespace, spec.name) in self._names:
            text = (
                f"a placement group named {spec.name!r} exists in namespace {spec.namespace!r}; hint: take another "
                f"name, or get_placement_group({spec.name!r})"
            )
            return [Send(src, m.GcsReply(msg.req, False, text.encode()))] if msg.req else out
        if msg.req:
            out.append(Send(src, m.GcsReply(msg.req, True, b"")))
        group = GcsPlacementGroup(spec, nodes=[-1] * len(spec.bundles), since=now, reported_at=now)
        self._groups[spec.group] = group
        group.watchers = {src, *self._early_watchers.pop(spec.group, ())}
        self._dirty_rows.add(rows.GROUP, spec.group)
        self._dirty_rows.add(rows.GROUP_WATCH, spec.group + src)
        self._index(group)
        if group.key in self._removed_ids or (spec.owner and self._is_dead(spec.owner)):
            self._end(now, group, "it was removed before it was known, or its owner is gone", out)
        else:
            self._waiting[spec.group] = group
            self._try(now, group, out)
        return out

    def watch_group(self, src: bytes, msg: m.WatchGroup) -> list[Effect]:
        """Send the group's state to `src`, now and at each change."""
        group = self._groups.get(msg.group)
        self._dirty_rows.add(rows.GROUP_WATCH, msg.group + src)
        if group is not None:
            if group.state != REMOVED:
                group.watchers.add(src)
            return [Send(src, m.PlacementGroupStateUpdate(msg.group, group.state, group.reason))]
        if self.is_removed(msg.group.hex()):
            return [_unknown_group(src, msg.group)]
        self._early_watchers.setdefault(msg.group, set()).add(src)
        return []

    def remove_group(self, now: float, msg: m.RemoveGroup) -> list[Effect]:
        """End what runs in the group and give its bundles back."""
        out: list[Effect] = []
        group = self._groups.get(msg.group)
        if group is not None and group.state != REMOVED:
            self._end(now, group, "its placement group was removed", out)
        elif group is None and not self.is_removed(msg.group.hex()):
            # Its creation is on its way by another path: it is removed on arrival.
            self._add_removed_id(msg.group.hex())
            self._end_early_watches([msg.group], out)
        return out

    # ------------------------------------------------------------ messages of raylets

    def tell_nodes(self, node: int, shape: m.Shape, out: list[Effect]) -> None:
        """A node's raylet requests leases in a group. In a large cluster it is sent the nodes of that group, and of
        all that were placed since the last time: further requests it may send there itself."""
        if len(self._resources.nodes) <= LARGE_CLUSTER or (bundle := bundle_of(shape.resources)) is None:
            return
        group = self._groups.get(bytes.fromhex(bundle[0]))
        if group is None or group.state != CREATED or (bundle[1] == ANY and not group.may_be_late_bound()):
            return
        told = self._told.get(node, 0)
        self._told[node] = self._placements
        found = {group.spec.group: group.nodes}
        for number, ident in reversed(self._placed.items()):
            if number <= told or len(found) == GROUPS_TOLD:
                break
            other = self._groups.get(ident)
            if other is not None and other.state == CREATED and other.may_be_late_bound():
                found[ident] = other.nodes
        out.append(Send(raylet_of(node), m.PlacementGroupNodes([(ident, list(at)) for ident, at in found.items()])))

    def bundles_prepared(self, now: float, node: int, msg: m.BundlesPrepared) -> tuple[list[Effect], list[int]]:
        """A node's answer to an attempt. Returns the effects, and the nodes that have new bundles."""
        out: list[Effect] = []
        group = self._attempts.get(msg.group)
        if group is None or msg.attempt != group.attempt or node not in group.awaited:
            return out, []
        group.awaited.discard(node)
        if not msg.ok:
            group.avoid.add(node)
            self._attempt_failed(now, group, {node}, out)
            self._try(now, group, out)
            return out, []
        if group.awaited:
            return out, []
        return out, self._commit(now, group, out)

    def node_died(self, now: float, node: int) -> list[Effect]:
        """Bundles that were there get another node; attempts that count on the node are undone."""
        out: list[Effect] = []
        for watchers in self._early_watchers.values():
            watchers.difference_update({proc for proc in watchers if node_of(proc) == node})
        self._end_early_watches([ident for ident in self._early_watchers if node_of(ident) == node], out)
        for owner in [owner for owner in self._owned if node_of(owner) == node]:
            self._owner_died(now, owner, out)
        for group in list(self._groups.values()):
            group.watchers = {proc for proc in group.watchers if node_of(proc) != node}
            if group.state == REMOVED:
                continue
            if node in group.nodes:
                self._reschedule(now, group, node, f"node {node} died", out)
            if node in group.planned.values():
                self._undo(group, {node}, out)
        self.place_waiting(now, out, everything=True)
        return out

    def process_died(self, now: float, proc: bytes) -> list[Effect]:
        """A process is gone: the groups it owns end, unless they are detached."""
        out: list[Effect] = []
        self._dead_processes[proc] = None
        if len(self._dead_processes) > ENDED_IDS_KEPT:
            self._dead_processes.popitem(last=False)
        self._owner_died(now, proc, out)
        for group in self._groups.values() if self._groups else ():
            group.watchers.discard(proc)
        for watchers in self._early_watchers.values():
            watchers.discard(proc)
        self._end_early_watches([ident for ident in self._early_watchers if owner_of(ident) == proc], out)
        return out

    def place_waiting(self, now: float, out: list[Effect], everything: bool = False) -> None:
        """Place the groups that wait, the oldest first; `everything`: all of them, without RETRY_PAUSE."""
        if not everything and len(self._resources.nodes) > LARGE_CLUSTER and now - self._retried_at < RETRY_PAUSE:
            return
        self._retried_at = now
        self._scheduler.forget_failures()
        idle = [group for group in self._waiting.values() if not group.planned]
        for group in idle if everything else idle[:TRIED_AT_ONCE]:
            self._try(now, group, out)

    def tick(self, now: float) -> list[Effect]:
        """Place what waits, undo unanswered attempts, reserve room for a starving group, report long waits."""
        out: list[Effect] = []
        self._scheduler.forget_failures()
        for group in list(self._attempts.values()):
            if now - group.attempt_began > ANSWER_TIMEOUT + group.reservation:
                group.avoid |= group.awaited
                self._attempt_failed(now, group, set(), out)
            elif group.reservation and self._scheduler.find_plan(group) is not None:
                self._undo(group, set(), out)  # there is room now elsewhere
        for group in self._waiting.values():
            group.avoid.clear()
        self.place_waiting(now, out, everything=True)
        self._reserve_for_starving(now, out)
        for group in self._waiting.values():
            if now - group.reported_at >= REPORT_AFTER and not group.reported:
                group.reported = True
                self._report_wait(group, out)
        return out

    def is_removed(self, group: str) -> bool:
        """Whether the group with this id (in hex) is removed, or can never come."""
        known = self._groups.get(bytes.fromhex(group))
        if known is not None:
            return known.state == REMOVED
        return group in self._removed_ids or self._is_dead(owner_of(bytes.fromhex(group)))

    def is_for_removed(self, shape: m.Shape) -> bool:
        """Whether a request is for resources of a removed group."""
        group = group_of(shape.resources)
        return bool(group) and self.is_removed(group)

    def find_by_name(self, name: str, namespace: str) -> GcsPlacementGroup | None:
        """The group with this name."""
        ident = self._names.get((namespace, name))
        return None if ident is None else self._groups[ident]

    def find(self, group: bytes) -> GcsPlacementGroup | None:
        """The group with this id, also for a while after it was removed."""
        return self._groups.get(group)

    def in_removed_ids(self, group: str) -> bool:
        """Whether the group with this id (in hex) was removed, perhaps before it was registered."""
        return group in self._removed_ids

    def removed_ids(self) -> list[str]:
        """Ids of removed groups in hex, the oldest first."""
        return list(self._removed_ids)

    def unplaced(self) -> list[tuple[m.GroupSpec, dict[int, Resources]]]:
        """The groups for which there is no room now, each with the bundles that have no node."""
        return [
            (group.spec, group.without_node())
            for group in self._waiting.values()
            if not group.planned or group.reservation
        ]

    def early_watchers(self) -> dict[bytes, set[bytes]]:
        """Watchers of groups that are not registered yet."""
        return self._early_watchers

    def all_groups(self) -> list[GcsPlacementGroup]:
        """Every group, the last removed ones included."""
        return list(self._groups.values())

    # ------------------------------------------------------------ after another head, or another run

    def restore_group(self, group: GcsPlacementGroup) -> None:
        """Take in a group from the tables of another head. It may have all its bundles, some of them or none."""
        ident = group.spec.group
        self._groups[ident] = group
        if group.state == REMOVED:
            self._removed.append(ident)
            return
        self._index(group)
        for index, node in enumerate(group.nodes):
            if node >= 0 and node in self._resources.nodes:
                self._resources.bundle_came(node, group.key, index, group.spec.bundles[index])
        if group.state != CREATED:
            self._waiting[ident] = group

    def restore_ended(self, groups: Iterable[str], processes: Iterable[bytes]) -> None:
        """Take in what another head knew to be over: groups (ids in hex), processes."""
        self._removed_ids.update(dict.fromkeys(groups))
        self._dead_processes.update(dict.fromkeys(processes))

    def reconcile(self, now: float, held: Mapping[int, m.NodeInventory]) -> list[Effect]:
        """Compare the restored groups with the bundles that the nodes have (see `ActorManager.reconcile`)."""
        out: list[Effect] = []
        here = {node: {(ident, index) for ident, index, _ in msg.bundles} for node, msg in held.items()}
        for group in self._groups.values():
            missing = {
                node
                for index, node in enumerate(group.nodes)
                if group.state != REMOVED and node in here and (group.spec.group, index) not in here[node]
            }
            for node in sorted(missing):  # the node gives back the group's other bundles, too
                ident, indices = group.spec.group, group.indices_on(node)
                out.append(Send(raylet_of(node), m.ReturnBundles(ident, indices, "one of its bundles was lost")))
                self._reschedule(now, group, node, f"node {node} has lost it", out)
        for node, msg in held.items():
            for ident, index, usable in msg.bundles:
                known = self._groups.get(ident)
                if known is None or known.state == REMOVED or known.nodes[index] != node:
                    out.append(Send(raylet_of(node), m.ReturnBundles(ident, [index], "it was not completed")))
                elif not usable:
                    out.append(Send(raylet_of(node), m.CommitBundles(ident)))
        return out

    # ------------------------------------------------------------ placement

    def scheduling_state(self, group: GcsPlacementGroup) -> str:
        """Ray's word for what the last attempt to place the group came to."""
        if group.state in (CREATED, REMOVED):
            return "FINISHED" if group.state == CREATED else REMOVED
        if group.planned and not group.reservation:
            return "SCHEDULING_STARTED"
        return "INFEASIBLE" if self._scheduler.lacks_a_kind(group) else "NO_RESOURCES"

    def _reschedule(self, now: float, group: GcsPlacementGroup, node: int, reason: str, out: list[Effect]) -> None:
        """A node has the group's bundles no more: they wait for another node."""
        group.nodes = [-1 if at == node else at for at in group.nodes]
        self._resources.bundles_left(node, group.key)
        group.since = group.reported_at = now
        self._set_state(group, RESCHEDULING, reason, out)
        self._waiting.setdefault(group.spec.group, group)

    def _try(self, now: float, group: GcsPlacementGroup, out: list[Effect]) -> None:
        """Plan with what is free now and ask the nodes, unless there is no room."""
        plan = self._scheduler.find_plan(group)
        if plan is not None:
            self._begin_attempt(now, group, plan, 0.0, out)
        elif self._resources.nodes and not group.reported and not self._may_be_feasible(group):
            group.reported = True
            self._report(group, self._why_infeasible(group), False, out)

    def _may_be_feasible(self, group: GcsPlacementGroup) -> bool:
        """Return True if there would be room if all else had ended, or nodes came."""
        if self._scheduler.is_feasible(group):
            return True
        types = self._resources.node_types
        return types.known and all(
            types.may_come(demand.shape) for demand in group_demands(group.spec, group.without_node())
        )

    def _reserve_for_starving(self, now: float, out: list[Effect]) -> None:
        """Have nodes reserve room for the group that has starved for longest, even though there is none now."""
        if any(group.reservation for group in self._attempts.values()):
            return
        starving = [
            group
            for group in self._waiting.values()
            if not group.planned and now - group.since >= STARVING_AFTER and now >= group.rests_until
        ]
        starving.sort(key=lambda group: (group.next_reservation, group.since))
        for group in starving[:TRIED_AT_ONCE]:
            plan = self._scheduler.find_reachable_plan(group)
            if plan is not None:
                self._begin_attempt(now, group, plan, group.next_reservation or FIRST_RESERVATION, out)
                return

    def _begin_attempt(
        self, now: float, group: GcsPlacementGroup, plan: Plan, reservation: float, out: list[Effect]
    ) -> None:
        """Ask the nodes of a plan to hold the bundles.

        Args:
            reservation: how long they may reserve room until there is enough, in seconds.
        """
        group.planned = plan
        group.attempt += 1
        group.attempt_began = now
        group.reservation = reservation
        group.awaited = set(plan.values())
        self._attempts[group.spec.group] = group
        for index, node in plan.items() if not reservation else ():
            self._resources.promise(node, tuple(group.spec.bundles[index].items()))
        alone = len(group.awaited) == 1 and not reservation
        for node in sorted(group.awaited):
            msg = m.PrepareBundles(group.spec.group, group.attempt, group.planned_on(node), alone, reservation)
            out.append(Send(raylet_of(node), msg))

    def _attempt_failed(self, now: float, group: GcsPlacementGroup, without: set[int], out: list[Effect]) -> None:
        """Undo an attempt; after one with a reservation, other requests run before the next."""
        if group.reservation:
            group.rests_until = now + group.reservation
            group.next_reservation = min(LONGEST_RESERVATION, 2 * group.reservation)
        self._undo(group, without, out)

    def _undo(self, group: GcsPlacementGroup, without: set[int], out: list[Effect]) -> None:
        """Take an attempt back: its nodes return the bundles, except the nodes `without`, which hold nothing."""
        for node in sorted(set(group.planned.values()) - without):
            indices = list(group.planned_on(node))
            out.append(Send(raylet_of(node), m.ReturnBundles(group.spec.group, indices, "it was not completed")))
        self._attempt_over(group)

    def _attempt_over(self, group: GcsPlacementGroup) -> None:
        group.planned = {}
        group.awaited = set()
        group.reservation = 0.0
        self._attempts.pop(group.spec.group, None)

    def _commit(self, now: float, group: GcsPlacementGroup, out: list[Effect]) -> list[int]:
        """Use the bundles of an attempt. The group is CREATED unless another bundle was lost during the attempt."""
        nodes = sorted(set(group.planned.values()))
        for node in nodes if len(nodes) > 1 or group.reservation else ():
            out.append(Send(raylet_of(node), m.CommitBundles(group.spec.group)))
        for index, node in group.planned.items():
            group.nodes[index] = node
            self._resources.bundle_came(node, group.key, index, group.spec.bundles[index])
        self._attempt_over(group)
        group.next_reservation = group.rests_until = 0.0
        if group.without_node():
            self._dirty_rows.add(rows.GROUP, group.spec.group)
            self._try(now, group, out)
            return nodes
        self._waiting.pop(group.spec.group, None)
        group.reported = False
        self._note_placed(group)
        self._set_state(group, CREATED, "", out)
        return nodes

    def _note_placed(self, group: GcsPlacementGroup) -> None:
        self._placements += 1
        self._placed[self._placements] = group.spec.group
        if len(self._placed) > GROUPS_TOLD:
            self._placed.popitem(last=False)

    def _end(self, now: float, group: GcsPlacementGroup, reason: str, out: list[Effect]) -> None:
        self._undo(group, set(), out)
        ident = group.spec.group
        for node in sorted({node for node in group.nodes if node >= 0}):
            out.append(Send(raylet_of(node), m.ReturnBundles(ident, group.indices_on(node), reason)))
            self._resources.bundles_left(node, group.key)
        self._waiting.pop(ident, None)
        self._names.pop((group.spec.namespace, group.spec.name), None)
        mine = self._owned.get(group.spec.owner)
        if mine is not None:
            mine.discard(ident)
            if not mine:
                del self._owned[group.spec.owner]
        self._set_state(group, REMOVED, reason, out)
        for proc in group.watchers if self._dirty_rows.on else ():
            self._dirty_rows.add(rows.GROUP_WATCH, ident + proc)
        group.watchers.clear()
        self._removed.append(ident)
        self._add_removed_id(group.key)
        if len(self._removed) > REMOVED_GROUPS_KEPT:
            forgotten = self._removed.popleft()
            self._groups.pop(forgotten, None)
            self._dirty_rows.add(rows.GROUP, forgotten)
        self._on_removed(now, group.key, out)

    def _add_removed_id(self, group: str) -> None:
        self._removed_ids[group] = None
        self._dirty_rows.add(rows.GONE, bytes.fromhex(group))
        if len(self._removed_ids) > ENDED_IDS_KEPT:
            self._dirty_rows.add(rows.GONE, bytes.fromhex(self._removed_ids.popitem(last=False)[0]))

    def _owner_died(self, now: float, owner: bytes, out: list[Effect]) -> None:
        for ident in list(self._owned.get(owner, ())):
            self._end(now, self._groups[ident], "the owner of its placement group is gone", out)

    def _end_early_watches(self, groups: Iterable[bytes], out: list[Effect]) -> None:
        """Answer the watchers of groups that were never registered and whose state cannot change any more."""
        for ident in groups:
            for proc in sorted(self._early_watchers.pop(ident, ())):
                self._dirty_rows.add(rows.GROUP_WATCH, ident + proc)
                out.append(_unknown_group(proc, ident))

    def _index(self, group: GcsPlacementGroup) -> None:
        if group.spec.name:
            self._names[group.spec.namespace, group.spec.name] = group.spec.group
        if group.spec.owner:
            self._owned.setdefault(group.spec.owner, set()).add(group.spec.group)

    def _is_dead(self, proc: bytes) -> bool:
        return proc in self._dead_processes or node_of(proc) in self._resources.dead

    def _set_state(self, group: GcsPlacementGroup, state: str, reason: str, out: list[Effect]) -> None:
        assert state in TRANSITIONS[group.state], f"{group.title()}: {group.state} -> {state}"
        group.state, group.reason = state, reason
        self._dirty_rows.add(rows.GROUP, group.spec.group)
        out.extend(
            Send(proc, m.PlacementGroupStateUpdate(group.spec.group, state, reason)) for proc in sorted(group.watchers)
        )

    def _report(self, group: GcsPlacementGroup, text: str, waits: bool, out: list[Effect]) -> None:
        out.append(Send(owner_of(group.spec.group), m.Infeasible(ACTOR_SCHEDULING_CLASS, text, waits)))

    def _report_wait(self, group: GcsPlacementGroup, out: list[Effect]) -> None:
        """Report a wait, once for all groups of one creator that ask for the same: a search has many in a queue."""
        key = owner_of(group.spec.group), group.request()
        if key in self._reported_waits:
            return
        self._reported_waits[key] = None
        if len(self._reported_waits) > ENDED_IDS_KEPT:
            self._reported_waits.popitem(last=False)
        self._report(group, self._why_waiting(group), True, out)

    def _why_infeasible(self, group: GcsPlacementGroup) -> str:
        nodes, spec = self._resources.nodes, group.spec
        hint = "ask for less, or start nodes that have it"
        if spec.strategy == STRICT_SPREAD and len(spec.bundles) > len(nodes):
            hint = f"there are {len(nodes)} nodes for {len(spec.bundles)} bundles: use SPREAD"
        elif spec.strategy == STRICT_PACK:
            hint = "use PACK where it need not be one node"
        elif spec.same:
            values = Counter(state.labels.get(spec.same) or "none" for state in nodes.values())
            counts = ", ".join(f"{value}: {count}" for value, count in sorted(values.items()))
            hint = f"nodes by {spec.same}: {counts}; ask for less, or leave topology_strategy out"
        there = self._resources.describe(labels=any(spec.selectors))
        return (
            f"{group.describe_request()}, for which there is no place even when all else has ended. What there is: "
            f"{there}. hint: {hint}; it waits"
        )

    def _why_waiting(self, group: GcsPlacementGroup) -> str:
        about: Resources = {}
        for amounts in group.spec.bundles:
            add(about, amounts)
        return (
            f"{group.describe_request()} and has waited for {REPORT_AFTER:g} s, while others hold what it needs. Free "
            f"now: {self._resources.describe(about)}. hint: wait, or hold less (actors and other groups keep theirs "
            f"for life)"
        )

    def check_invariants(self) -> None:
        """Check every group, the attempts and the indices."""
        for ident, group in self._groups.items():
            assert ident == group.spec.group
            self.check_group(ident)
        for ident in (*self._waiting, *self._attempts):
            assert self._groups[ident].state in (PENDING, RESCHEDULING), self._groups[ident].title()
        for (namespace, name), ident in self._names.items():
            spec = self._groups[ident].spec
            assert (spec.namespace, spec.name) == (namespace, name), f"the name {name!r} belongs to another group"
        for owner, idents in self._owned.items():
            assert idents and all(self._groups[ident].spec.owner == owner for ident in idents), owner.hex()
        removed = sorted(ident for ident, group in self._groups.items() if group.state == REMOVED)
        assert sorted(self._removed) == removed and len(removed) <= REMOVED_GROUPS_KEPT
        living = {group.key for group in self._groups.values() if group.state != REMOVED}
        assert self._resources.nodes_of_groups.keys() <= living, "a node has bundles of a removed group"

    def check_group(self, ident: bytes) -> None:
        """Check one group, if it is in the table."""
        group = self._groups.get(ident)
        if group is None:
            return
        spec, nodes = group.spec, self._resources.nodes
        where = f"{group.title()} {group.state} on nodes {group.nodes}"
        assert group.state in TRANSITIONS and len(group.nodes) == len(spec.bundles), where
        if group.state == REMOVED:
            assert not group.planned and not group.watchers and ident not in self._waiting, where
            return
        placed = {node for node in group.nodes if node >= 0}
        assert placed <= nodes.keys(), f"{where}: a bundle is on a node that is dead"
        assert placed == set(self._resources.nodes_of_groups.get(group.key, ())), (
            f"{where}: the nodes' resources differ"
        )
        if group.state == CREATED:
            assert -1 not in group.nodes, f"{where}: a bundle of it has no node"
        else:
            assert -1 in group.nodes and ident in self._waiting, where
        assert group.state != PENDING or not placed, where
        assert bool(group.planned) == (ident in self._attempts), where
        assert group.awaited <= set(group.planned.values()) <= nodes.keys(), f"{where}: planned {group.planned}"
        assert not group.planned or group.awaited, f"{where}: all nodes of its attempt have answered"
        assert all(group.nodes[index] < 0 for index in group.planned), f"{where}: planned again: {group.planned}"
        if spec.name:
            assert self._names.get((spec.namespace, spec.name)) == ident, f"{where}: its name leads elsewhere"
        if spec.owner:
            assert ident in self._owned.get(spec.owner, ()), f"{where}: not among its owner's"


def _unknown_group(dest: bytes, group: bytes) -> Send:
    return Send(dest, m.PlacementGroupStateUpdate(group, REMOVED, "it was removed"))


class Demand(Struct):
    """Equal requests that wait.

    Attributes:
        apart: requests with the same word must be on different nodes; "": they may share one.
    """

    shape: m.Shape
    count: int
    apart: str = ""


def group_demands(spec: m.GroupSpec, bundles: Mapping[int, Resources]) -> list[Demand]:
    """Bundles of a placement group as demands. PACK and SPREAD are preferences, and make no difference."""
    counts: dict[m.Shape, int] = {}
    if spec.strategy == STRICT_PACK:
        whole: Resources = {}
        for amounts in bundles.values():
            add(whole, amounts)
        selectors = [spec.selectors[index] for index in bundles if spec.selectors and spec.selectors[index]]
        counts[m.Shape(tuple(sorted(whole.items())), next(iter(selectors), ""))] = 1
    else:
        for index, amounts in bundles.items():
            shape = m.Shape(tuple(sorted(amounts.items())), spec.selectors[index] if spec.selectors else "")
            counts[shape] = counts.get(shape, 0) + 1
    apart = spec.group.hex() if spec.strategy == STRICT_SPREAD else ""
    return [Demand(shape, count, apart) for shape, count in counts.items()]
