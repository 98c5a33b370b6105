"""Unmet lease requests of all nodes and where they are sent: the cluster's half of the scheduler.

`UnmetDemand` is what one process lacks for one scheduling class, as its raylet last reported. `InFlightGrant` is a
GrantLeases whose effect that report does not show yet. It is over when the node refuses it, when the reported count
goes down or the holder has received a lease, or when it has had time to arrive; so no lost or crossing message can hide
demand for good, and surplus is at most what was in flight once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import islice
from operator import itemgetter
from typing import Any

from msgspec import Struct, field

from hpcray.common.ids import node_of, raylet_of
from hpcray.common.labels import PREFIX, fails_when_busy, names_nodes, near_node, node_affinity, show_strategy
from hpcray.common.resources import REPORT_AFTER, group_of, plain, to_amounts
from hpcray.core.effects import Effect, Send
from hpcray.core.gcs.cluster_resources import REFUSED_AT_ONCE, ClusterResources
from hpcray.protocol import messages as m

DECREASE_AFTER = 2.0
"""Seconds between two broadcasts, at least, where the second one says that less is lacking."""
ENDED_AFTER = 0.1
"""The same where nothing is lacking any more, for up to 50 nodes; in proportion for more, up to DECREASE_AFTER: a lease
that is granted meanwhile is returned after each task, which makes single tasks of its class several times slower."""
_NODES_TOLD_EARLY = 50
_SHAPES_KNOWN = 1 << 14
"""Shapes whose strategies and resource names are not read again."""
NODES_SAMPLED = 4
"""Nodes on which is looked up what a request lacks."""


class ContentionBroadcaster:
    """Broadcasts which resources waiting requests lack: no node should keep an idle lease that holds these.

    A process keeps a lease for a while when it has no task for it, as its next task may come soon. That is right as
    long as no other process could use the lease, and only the GCS knows of requests that wait on other nodes. A
    broadcast goes out at once when contention begins or grows, soon when it ends, and later when it decreases: few
    messages, whatever runs.
    """

    def __init__(self, resources: ClusterResources) -> None:
        self._resources = resources
        self._sent = m.ResourceContention()
        self._sent_at = float("-inf")
        self._accounted: set[tuple[m.Shape, bytes, int]] = set()

    def no_room(self, now: float, demand: UnmetDemand, out: list[Effect]) -> None:
        """A demand has found no room."""
        sent, key = self._sent, (demand.shape, demand.holder, demand.scheduling_class)
        if key in self._accounted or (demand.shape, b"", 0) in self._accounted:
            return
        names = self._lacking(demand.shape)
        if not names:
            return
        self._accounted.add(key)
        if sent.lacking and (sent.holder, sent.scheduling_class) != key[1:]:
            self._accounted.add((demand.shape, b"", 0))
            self._broadcast(now, m.ResourceContention(sorted({*sent.lacking, *names})), out)
        else:
            self._broadcast(
                now, m.ResourceContention(sorted({*sent.lacking, *names}), demand.holder, demand.scheduling_class), out
            )

    def tick(
        self, now: float, open_demands: Mapping[m.Shape, Mapping[tuple[bytes, int], UnmetDemand]], out: list[Effect]
    ) -> None:
        """Compute the contention anew, every DECREASE_AFTER."""
        if now - self._sent_at < DECREASE_AFTER:
            return
        self._accounted.clear()
        lacking: set[str] = set()
        holders: set[tuple[bytes, int]] = set()
        for shape, waiting in open_demands.items():
            names = self._lacking(shape)
            if names:
                lacking |= names
                holders.update(_first_two(waiting.values()))
        only = next(iter(holders)) if len(holders) == 1 else (b"", 0)
        self._broadcast(now, m.ResourceContention(sorted(lacking), *only), out)

    def ended(self, now: float, out: list[Effect]) -> None:
        """No request waits any more."""
        nodes = len(self._resources.nodes)
        pause = min(DECREASE_AFTER, ENDED_AFTER * max(1.0, nodes / _NODES_TOLD_EARLY))
        if self._sent.lacking and now - self._sent_at >= pause:
            self._accounted.clear()
            self._broadcast(now, m.ResourceContention(), out)

    def forget(self) -> None:
        """Nodes came that have not been sent anything."""
        self._sent = m.ResourceContention()
        self._accounted.clear()

    def _broadcast(self, now: float, contention: m.ResourceContention, out: list[Effect]) -> None:
        self._sent_at = now
        if contention != self._sent:
            self._sent = contention
            out.extend(Send(raylet_of(node), contention) for node in self._resources.nodes)

    def _lacking(self, shape: m.Shape) -> set[str]:
        """Names of resources of which the feasible nodes have too little; none for what one node alone may serve."""
        if node_affinity(shape.strategy) is not None or near_node(shape.strategy) is not None:
            return set()
        names: set[str] = set()
        for node in self._resources.feasible(shape)[:NODES_SAMPLED]:
            free = self._resources.nodes[node].free(shape)
            names |= {name for name, units in shape.resources if free.get(name, 0) < units}
        return names


def _first_two(open_demands: Iterable[UnmetDemand]) -> set[tuple[bytes, int]]:
    found: set[tuple[bytes, int]] = set()
    for demand in open_demands:
        found.add((demand.holder, demand.scheduling_class))
        if len(found) > 1:
            break
    return found


GRANT_ARRIVES = 1.0
"""Seconds within which a GrantLeases that was not refused reaches its holder, and the holder's report the GCS."""
BOUND_GRANT_ARRIVES = 3.0
"""Seconds of the same for requests that may queue at their node, see `ASSIGNED_TIMEOUT` of the local lease manager."""
BUSY_NODE_AFTER = 1.0
"""Seconds without room after which a request queues at a busy node: local requests there must not starve it."""
QUEUED_PER_NODE, QUEUED_AT_ONCE = 4, 64
"""Requests of one shape that are queued at busy nodes per tick: per node, and in all."""
BUSY_NODE_KEPT = 30.0
"""Seconds during which a request that queues again goes to the same busy node, which reserves room longer each time."""
ROUNDS_KEPT = 2
"""Rounds of work that stay queued at the node which has the arguments, unless nothing begins there."""
DEMANDS_AT_ONCE = 32
"""Open demands that are looked at before it is determined again which are next."""
DemandKey = tuple[bytes, int]
"""Holder and scheduling class."""


class InFlightGrant(Struct):
    """A GrantLeases whose effect no report shows yet.

    Attributes:
        until: when it counts as arrived.
        bound: whether it may queue at its node.
    """

    node: int
    count: int
    until: float
    bound: bool


class OpenShape(Struct, eq=False):
    """The open demands of one shape.

    Attributes:
        order: shapes are served in the order in which they were opened.
    """

    order: int
    demands: OrderedDict[DemandKey, UnmetDemand] = field(default_factory=OrderedDict)


class OpenDemands:
    """The demands that lack leases for which nothing is in flight, by shape; and which shapes a node may serve.

    A job has as many shapes of work near its arguments as it has nodes. Almost all of them wait for that one node, so
    they are not looked at when another one has room: only if one of their demands is *patient* (see
    `UnmetDemand.patient`).
    """

    def __init__(self) -> None:
        self.by_shape: dict[m.Shape, OpenShape] = {}
        self._anywhere: dict[m.Shape, OpenShape] = {}
        self._in_group: dict[str, dict[m.Shape, OpenShape]] = {}
        self._patient: dict[m.Shape, OpenShape] = {}
        self._opened = 0

    def open(self, demand: UnmetDemand) -> None:
        """Note a demand that lacks leases."""
        shape = demand.shape
        found = self.by_shape.get(shape)
        if found is None:
            self._opened += 1
            found = self.by_shape[shape] = OpenShape(self._opened)
            if demand.near is None:
                self._index_of(shape)[shape] = found
        found.demands.setdefault(demand.key, demand)
        if demand.patient and demand.near is not None:
            self._patient[shape] = found

    def close(self, demand: UnmetDemand) -> None:
        """Forget a demand that lacks none, or for which all are in flight."""
        shape = demand.shape
        found = self.by_shape.get(shape)
        if found is None or found.demands.pop(demand.key, None) is None or found.demands:
            return
        del self.by_shape[shape]
        self._patient.pop(shape, None)
        if demand.near is None:
            index = self._index_of(shape)
            del index[shape]
            if not index and index is not self._anywhere:
                del self._in_group[_group(shape)]

    def demands(self, shape: m.Shape) -> OrderedDict[DemandKey, UnmetDemand]:
        """The open demands of a shape."""
        found = self.by_shape.get(shape)
        return OrderedDict() if found is None else found.demands

    def shapes_for(self, groups: Iterable[str]) -> list[m.Shape]:
        """The shapes that a node with bundles of these groups may serve, in order."""
        found: list[tuple[int, m.Shape]] = [(one.order, shape) for shape, one in self._anywhere.items()]
        for group in groups if self._in_group else ():
            found += [(one.order, shape) for shape, one in self._in_group.get(group, {}).items()]
        for shape, one in list(self._patient.items()):
            if any(demand.patient for demand in one.demands.values()):
                found.append((one.order, shape))
            else:
                del self._patient[shape]
        found.sort(key=itemgetter(0))
        return [shape for _, shape in found]

    def _index_of(self, shape: m.Shape) -> dict[m.Shape, OpenShape]:
        group = _group(shape)
        return self._in_group.setdefault(group, {}) if group else self._anywhere

    def check_invariants(self) -> None:
        """Check that the indexes have all shapes, and no others."""
        near = {shape: one for shape, one in self.by_shape.items() if near_node(shape.strategy) is not None}
        others = [self._anywhere, *self._in_group.values()]
        assert {s: one for index in others for s, one in index.items()} | near == self.by_shape
        for group, shapes in self._in_group.items():
            assert shapes and all(group_of(shape.resources) == group for shape in shapes), group
        for shape, one in near.items():
            if any(demand.patient for demand in one.demands.values()):
                assert self._patient[shape] is one, shape


class UnmetDemand(Struct, eq=False):
    """Leases that one process lacks for one scheduling class.

    Attributes:
        began: when it was first reported.
        since: when something was last sent for it.
        starving_since: since when it has got nothing, as far as its reports show; a report to the holder begins anew.
        queued_at_busy_node, queued_there_since: the busy node where it queued last (-1: none), and since when.
        shared: its own node has room, and may be chosen like any other.
        near: the node that has the arguments; `anywhere`: the shape without that wish.
        patient: other nodes may serve it: it is near none, or has waited so long, or its node cannot serve it.
        coming: how many leases are in flight.
        received: leases of other nodes that the holder has ever had.
        refused_by: the node that has refused it at once though it could have queued there (-1: none): it is not bound
            to that node again before the next tick.
    """

    holder: bytes
    scheduling_class: int
    shape: m.Shape
    count: int = 0
    began: float = 0.0
    since: float = 0.0
    starving_since: float = 0.0
    reported: bool = False
    queued_at_busy_node: int = -1
    queued_there_since: float = 0.0
    shared: bool = False
    near: int | None = None
    patient: bool = True
    coming: int = 0
    received: int = 0
    refused_by: int = -1
    anywhere: m.Shape = m.Shape(())
    in_flight: list[InFlightGrant] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.near, self.anywhere = _without_near(self.shape)
        self.patient = self.near is None

    @property
    def key(self) -> DemandKey:
        return self.holder, self.scheduling_class

    def open(self) -> int:
        """How many leases no grant in flight is for."""
        lacking = self.count - self.coming
        return lacking if lacking > 0 else 0

    def arrived(self, count: int, node: int | None = None) -> None:
        """`count` of what is in flight (to `node`) has arrived or was refused; the oldest first."""
        for grant in self.in_flight:
            if node is None or grant.node == node:
                part = min(count, grant.count)
                grant.count -= part
                count -= part
        self.keep([grant for grant in self.in_flight if grant.count])

    def refused(self, now: float, node: int) -> None:
        """A node refuses a part of what is in flight to it."""
        oldest = next((grant for grant in self.in_flight if grant.node == node), None)
        if oldest is not None and oldest.bound and now < oldest.until - BOUND_GRANT_ARRIVES + REFUSED_AT_ONCE:
            self.refused_by = node

    def keep(self, grants: list[InFlightGrant]) -> None:
        """No others are in flight any more."""
        self.in_flight = grants
        self.coming = sum(grant.count for grant in grants)


class ClusterScheduler:
    """Sends unmet demand to nodes that can serve it.

    Args:
        resources: what every node has.
        group_is_removed: whether the placement group with this id (in hex) is removed.
        locality_wait: seconds for which work waits for the node that has its arguments, however idle others are.
    """

    def __init__(
        self, resources: ClusterResources, group_is_removed: Callable[[str], bool], locality_wait: float = 1.0
    ) -> None:
        self._resources = resources
        self._group_is_removed = group_is_removed
        self._locality_wait = locality_wait
        self._demands: dict[DemandKey, UnmetDemand] = {}
        self._open = OpenDemands()
        self._impatient: deque[UnmetDemand] = deque()  # near some node; the oldest first
        self._sent_to: dict[bytes, set[int]] = {}
        self._last_busy_node = -1
        self._contention = ContentionBroadcaster(resources)

    def unmet_lease_request(self, now: float, msg: m.UnmetLeaseRequest) -> list[Effect]:
        """A raylet reports what one of its processes lacks; a count of 0 withdraws the request."""
        key = (msg.holder, msg.scheduling_class)
        demand = self._demands.get(key)
        out: list[Effect] = []
        if msg.count == 0:
            if demand is not None:
                self._withdraw(demand, out)
                self._forget(key)
                if not self._demands:
                    self._contention.ended(now, out)
            return out
        if demand is None:
            demand = self._demands[key] = UnmetDemand(
                msg.holder,
                msg.scheduling_class,
                msg.shape,
                began=now - msg.waited,
                since=now,
                starving_since=now - msg.unserved_for,
                received=msg.received,
            )
            if demand.near is not None:
                self._note_impatient(demand)
        arrived = max(demand.count - msg.count, msg.received - demand.received)
        if arrived > 0:
            demand.arrived(arrived)
            demand.received = max(msg.received, demand.received)
            demand.starving_since = now
            demand.queued_there_since = now
        demand.count, demand.shared = msg.count, msg.shared
        self._place(now, demand, None, out)
        out = _merged(out)
        if demand.open():
            self._contention.no_room(now, demand, out)
        return out

    def grant_refused(self, now: float, node: int, msg: m.GrantLeasesRefused) -> list[Effect]:
        """A node could not serve what it was sent."""
        out: list[Effect] = []
        demand = self._demands.get((msg.holder, msg.scheduling_class))
        if demand is not None:
            demand.refused(now, node)
            demand.arrived(msg.count, node)
            self._resources.rejected(node, demand.shape)
            self._place(now, demand, None, out)
            if demand.open():
                self._contention.no_room(now, demand, out)
        return out

    def node_grew(self, now: float, node: int) -> list[Effect]:
        """A node has more room than the GCS knew."""
        out: list[Effect] = []
        impatient = self._impatient
        while impatient and now - impatient[0].began >= self._locality_wait:
            demand = impatient.popleft()
            if self._demands.get(demand.key) is demand:
                self._make_patient(demand)
        fits = self._resources.nodes[node].fits
        for shape in self._open.shapes_for(self._resources.groups_at(node)):
            if fits(shape):
                self._share(now, shape, node, out)
        return out

    def tick(self, now: float) -> list[Effect]:
        """Forget what has arrived, send what is open again, queue what has waited for long at busy nodes."""
        out: list[Effect] = []
        self._resources.forget_rejections()
        for demand in self._demands.values():
            demand.refused_by = -1
            if demand.in_flight and any(grant.until <= now for grant in demand.in_flight):
                demand.keep([grant for grant in demand.in_flight if grant.until > now])
                self._index(demand)
            if now - demand.starving_since < REPORT_AFTER:
                continue
            feasible = self._resources.feasible(demand.shape)
            if feasible or self._resources.node_types.may_come(demand.anywhere):
                demand.starving_since = now
                why = self._resources.why_waiting if feasible else self._resources.why_pending
                reason = why(demand.shape, "a task")
                out.append(Send(demand.holder, m.Infeasible(demand.scheduling_class, reason, waits=True)))
        self._retry(now, out)
        for waiting in list(self._open.by_shape.values()):
            stale = [
                demand
                for demand in waiting.demands.values()
                if now - demand.since >= BUSY_NODE_AFTER and self._may_queue_at_busy_node(now, demand)
            ]
            for demand in stale[: min(QUEUED_AT_ONCE, QUEUED_PER_NODE * len(self._resources.nodes))]:
                self._queue_at_busy_node(now, demand, out)
        if not self._demands:
            self._contention.ended(now, out)
        self._contention.tick(now, {shape: one.demands for shape, one in self._open.by_shape.items()}, out)
        return out

    def longest_wait(self, now: float) -> float:
        """For how many seconds a process has got no lease although it waits for some; 0: none waits."""
        began = (d.starving_since for waiting in self._open.by_shape.values() for d in waiting.demands.values())
        return now - min(began, default=now)

    def cluster_changed(self, now: float) -> list[Effect]:
        """Nodes came: place everything again."""
        self._contention.forget()
        out: list[Effect] = []
        self._retry(now, out)
        return out

    def holder_died(self, holder: bytes, reason: str) -> list[Effect]:
        """A process is gone. The nodes that were sent grants for it are sent its death from here, after the grants."""
        for key in [key for key in self._demands if key[0] == holder]:
            self._forget(key)
        nodes = self._sent_to.pop(holder, set()) - {node_of(holder)}
        return [Send(raylet_of(n), m.ProcDied(holder, reason)) for n in sorted(nodes) if n in self._resources.nodes]

    def node_died(self, now: float, node: int) -> list[Effect]:
        """A node is gone, with its processes and the grants on their way to it."""
        out: list[Effect] = []
        for key in [key for key in self._demands if node_of(key[0]) == node]:
            self._forget(key)
        for holder in [holder for holder in self._sent_to if node_of(holder) == node]:
            del self._sent_to[holder]
        for demand in self._demands.values():
            demand.keep([grant for grant in demand.in_flight if grant.node != node])
            self._index(demand)
        self._retry(now, out)
        return out

    def unmet_by_shape(self) -> list[dict[str, Any]]:
        """Unmet lease requests by shape; counts are those that raylets report, coarse above 64."""
        rows: dict[m.Shape, dict[str, Any]] = {}
        for demand in self._demands.values():
            row = rows.get(demand.anywhere)
            if row is None:
                row = rows[demand.anywhere] = {
                    "resources": to_amounts(plain(dict(demand.shape.resources))),
                    "strategy": _show_strategy(demand.anywhere.strategy),
                    "count": 0,
                    "holders": 0,
                    "feasible": bool(self._resources.feasible(demand.anywhere))
                    or self._resources.node_types.may_come(demand.anywhere),
                }
            row["count"] += demand.count
            row["holders"] += 1
        return list(rows.values())

    def unserved(self) -> dict[m.Shape, int]:
        """How many leases of each kind no grant is on its way for; what queues at busy nodes is not served."""
        found: dict[m.Shape, int] = {}
        for demand in self._demands.values():
            coming = sum(grant.count for grant in demand.in_flight if not grant.bound)
            found[demand.anywhere] = found.get(demand.anywhere, 0) + max(0, demand.count - coming)
        return found

    def unmet_by_node(self) -> dict[int, int]:
        """How many leases the processes of each node lack."""
        found: dict[int, int] = {}
        for demand in self._demands.values():
            found[node_of(demand.holder)] = found.get(node_of(demand.holder), 0) + demand.count
        return found

    def _retry(self, now: float, out: list[Effect]) -> None:
        for shape in list(self._open.by_shape):
            if not self._resources.feasible(shape):
                self._report_infeasible(shape, out)
            elif _bound(shape) or self._resources.any_room(shape):
                self._share(now, shape, None, out)

    def _share(self, now: float, shape: m.Shape, only: int | None, out: list[Effect]) -> None:
        """Serve all open demands of a shape: one alone gets all it can, several get one each, round after round.

        Those that get nothing stay in front, those that get one go to the end. A node has room for few as a rule, so
        few of them are looked at.
        """
        demands = self._open.demands(shape)
        bound = _bound(shape)
        passed, progress = 0, False
        while demands:
            batch = list(islice(demands, passed, passed + DEMANDS_AT_ONCE))
            if not batch:
                if not progress:
                    break
                passed, progress = 0, False
            for key in batch:
                demand = demands.get(key)
                if demand is None:
                    continue
                limit = None if len(demands) == 1 else 1
                if self._place(now, demand, only, out, limit):
                    progress = True
                    if key in demands:
                        demands.move_to_end(key)
                elif demand.open() and not bound and not self._has_room(shape, only):
                    out[:] = _merged(out)
                    return
                elif key in demands:
                    passed += 1
        out[:] = _merged(out)

    def _has_room(self, shape: m.Shape, only: int | None) -> bool:
        return self._resources.any_room(shape) if only is None else self._resources.nodes[only].fits(shape)

    def _place(
        self, now: float, demand: UnmetDemand, only: int | None, out: list[Effect], limit: int | None = None
    ) -> int:
        """Send what is open of a demand to nodes with room (or to `only`). Returns how many were sent."""
        self._index(demand)
        count = demand.open() if limit is None else min(limit, demand.open())
        if not count:
            return 0
        shape = demand.shape
        feasible = self._resources.feasible(shape)
        if not feasible:
            self._report_infeasible(shape, out)
            return 0
        affinity = node_affinity(shape.strategy)
        if fails_when_busy(shape.strategy) and not self._resources.nodes[feasible[0]].fits(shape):
            self._fail(demand, out)
            return 0
        if affinity is not None and feasible == [affinity[0]]:
            return self._bind(now, demand, affinity[0], count, out)
        if demand.near is not None:
            if self._fits_near(demand):
                return self._place_near(now, demand, demand.near, count, only, out)
            if not demand.patient:
                self._make_patient(demand)
        # A process's own node decides by itself what goes there, or leaves it to us.
        anywhere = demand.shared or demand.anywhere.strategy or demand.near is not None
        home = -1 if anywhere else node_of(demand.holder)
        return self._spread(now, demand, count, only, home, out)

    def _spread(
        self, now: float, demand: UnmetDemand, count: int, only: int | None, but: int, out: list[Effect]
    ) -> int:
        sent = 0
        # Near the arguments; else near who waits for the result, where that makes no difference otherwise.
        near, idle = (node_of(demand.holder), True) if demand.near is None else (demand.near, False)
        for node, part in self._resources.choose(demand.anywhere, count, only, but, near, idle):
            self._send(now, demand, node, part, demand.anywhere, False, out)
            sent += part
        return sent

    def _fits_near(self, demand: UnmetDemand) -> bool:
        state = self._resources.nodes.get(demand.near if demand.near is not None else -1)
        if state is None or self._resources.is_draining(state.index):
            return False
        total, lasting = state.total, state.lasting
        return all(total.get(name, 0) - lasting.get(name, 0) >= units for name, units in demand.shape.resources)

    def _place_near(
        self, now: float, demand: UnmetDemand, near: int, count: int, only: int | None, out: list[Effect]
    ) -> int:
        """Queue where the arguments are; what that node cannot begin soon may go where there is room."""
        starving = now - demand.starving_since >= self._locality_wait
        sent = self._spread(now, demand, count, only, near, out) if starving else 0
        if near != node_of(demand.holder):
            sent += self._bind(now, demand, near, count - sent, out)
        spare = demand.open() - ROUNDS_KEPT * self._resources.nodes[near].capacity(demand.shape)
        if starving or now - demand.began < self._locality_wait or spare <= 0:
            return sent
        return sent + self._spread(now, demand, min(count - sent, spare), only, near, out)

    def _bind(self, now: float, demand: UnmetDemand, node: int, count: int, out: list[Effect]) -> int:
        """Queue at the one node that may serve the demand, never more than it can run at once."""
        count = min(count, self._resources.nodes[node].capacity(demand.shape) - demand.coming)
        if count <= 0 or node == demand.refused_by:
            return 0
        shape = (
            demand.shape if demand.near is None else m.Shape(demand.shape.resources, f"node:{node}", demand.shape.env)
        )
        self._send(now, demand, node, count, shape, True, out)
        return count

    def _may_queue_at_busy_node(self, now: float, demand: UnmetDemand) -> bool:
        """Whether a demand that finds no room queues at a busy node. Work that is near its arguments waits there."""
        if any(grant.bound for grant in demand.in_flight):
            return False
        wait = max(REPORT_AFTER / 2, self._locality_wait)
        return demand.near is None or now - demand.starving_since >= wait or not self._fits_near(demand)

    def _queue_at_busy_node(self, now: float, demand: UnmetDemand, out: list[Effect]) -> None:
        """Queue one request at a busy node: at the one where it queued before, for others the nodes in turn."""
        nodes = self._resources.feasible(demand.anywhere)
        home = -1 if demand.anywhere.strategy else node_of(demand.holder)
        node = demand.queued_at_busy_node
        if now - demand.queued_there_since >= BUSY_NODE_KEPT or node not in self._resources.nodes:
            after = bisect_right(nodes, self._last_busy_node)
            turns = [nodes[(after + step) % len(nodes)] for step in range(min(2, len(nodes)))]
            node = next((n for n in turns if n != home), -1)
            if node < 0:
                return
            self._last_busy_node = demand.queued_at_busy_node = node
            demand.queued_there_since = now
        shape = m.Shape(demand.shape.resources, f"node:{node}", demand.shape.env)
        self._send(now, demand, node, 1, shape, True, out, parked=True)

    def _send(
        self, now: float, demand: UnmetDemand, node: int, count: int, shape: m.Shape, bound: bool, out: list[Effect],
        parked: bool = False,
    ) -> None:  # fmt: skip
        until = now + (BOUND_GRANT_ARRIVES if bound else GRANT_ARRIVES)
        last = demand.in_flight[-1] if demand.in_flight else None
        if last is not None and (last.node, last.until, last.bound) == (node, until, bound):
            last.count += count
        else:
            demand.in_flight.append(InFlightGrant(node, count, until, bound))
        demand.coming += count
        demand.since = now
        self._sent_to.setdefault(demand.holder, set()).add(node)
        out.append(Send(raylet_of(node), m.GrantLeases(demand.holder, demand.scheduling_class, shape, count, parked)))
        self._index(demand)

    def _withdraw(self, demand: UnmetDemand, out: list[Effect]) -> None:
        """The holder lacks nothing any more: take back what queues at nodes."""
        nodes = {grant.node for grant in demand.in_flight if grant.bound}
        if demand.queued_at_busy_node in self._resources.nodes:
            nodes.add(demand.queued_at_busy_node)
        out.extend(
            Send(raylet_of(node), m.GrantLeases(demand.holder, demand.scheduling_class, demand.shape, 0))
            for node in sorted(nodes)
        )

    def group_removed(self, group: str, out: list[Effect]) -> None:
        """A placement group is removed: processes that wait for leases in it are sent that."""
        for shape in list(self._open.by_shape):
            if group_of(shape.resources) == group:
                self._report_infeasible(shape, out)

    def _report_infeasible(self, shape: m.Shape, out: list[Effect]) -> None:
        group = group_of(shape.resources)
        if group and self._group_is_removed(group):
            state = m.PlacementGroupStateUpdate(bytes.fromhex(group), "REMOVED", "it was removed")
            out.extend(Send(holder, state) for holder in {key[0]: None for key in self._open.demands(shape)})
            return
        if not self._resources.is_hopeless(shape):
            return
        fails = names_nodes(shape.strategy) or self._resources.node_types.known
        for demand in self._open.demands(shape).values():
            if fails:
                self._fail(demand, out)
            elif not demand.reported:
                demand.reported = True
                reason = self._resources.why_infeasible(shape, "a task")
                out.append(Send(demand.holder, m.Infeasible(demand.scheduling_class, reason)))

    def _fail(self, demand: UnmetDemand, out: list[Effect]) -> None:
        """Report that no node which the tasks of a demand name can run them.

        The report is repeated until the demand is withdrawn: more tasks of the class may have been submitted meanwhile.
        """
        reason = self._resources.why_infeasible(demand.shape, "a task")
        out.append(Send(demand.holder, m.Infeasible(demand.scheduling_class, reason, fails=True)))

    def _note_impatient(self, demand: UnmetDemand) -> None:
        impatient, at = self._impatient, len(self._impatient)
        while at and impatient[at - 1].began > demand.began:
            at -= 1
        impatient.insert(at, demand)

    def _make_patient(self, demand: UnmetDemand) -> None:
        demand.patient = True
        self._index(demand)

    def _index(self, demand: UnmetDemand) -> None:
        if demand.open():
            self._open.open(demand)
        else:
            self._open.close(demand)

    def _forget(self, key: DemandKey) -> None:
        demand = self._demands.pop(key)
        demand.count = 0
        self._index(demand)

    def check_invariants(self) -> None:
        """Check every demand, its grants in flight, and the index of open ones."""
        nodes, impatient = self._resources.nodes, set(map(id, self._impatient))
        for key, demand in self._demands.items():
            where = f"demand of {demand.holder.hex()} class {demand.scheduling_class}: {demand.count}"
            assert key == demand.key and demand.count > 0, where
            assert node_of(demand.holder) not in self._resources.dead, f"{where}: its holder's node is dead"
            assert demand.coming == sum(grant.count for grant in demand.in_flight), where
            for grant in demand.in_flight:
                assert grant.count > 0 and grant.node in nodes, f"{where}: {grant}"
                assert grant.node in self._sent_to.get(demand.holder, ()), f"{where}: {grant} is not noted as sent"
            assert (demand.open() > 0) == (key in self._open.demands(demand.shape)), f"{where}: open {demand.open()}"
            assert demand.patient or id(demand) in impatient, f"{where}: it would wait for its node alone for ever"
        for shape, waiting in self._open.by_shape.items():
            known = [self._demands.get(key) is demand for key, demand in waiting.demands.items()]
            assert known and all(known), shape
        self._open.check_invariants()


def _show_strategy(strategy: str) -> str:
    return show_strategy(strategy) if PREFIX in strategy else strategy


@lru_cache(maxsize=_SHAPES_KNOWN)
def _without_near(shape: m.Shape) -> tuple[int | None, m.Shape]:
    """The node that has the arguments, and the shape without that wish."""
    near = near_node(shape.strategy)
    return near, shape if near is None else m.Shape(shape.resources, "", shape.env)


@lru_cache(maxsize=_SHAPES_KNOWN)
def _group(shape: m.Shape) -> str:
    """The group (id in hex) in whose bundles it is, or ""."""
    return group_of(shape.resources)


@lru_cache(maxsize=_SHAPES_KNOWN)
def _bound(shape: m.Shape) -> bool:
    """Return True if it may be sent to a node that has no room."""
    return node_affinity(shape.strategy) is not None or near_node(shape.strategy) is not None


def _merged(out: list[Effect]) -> list[Effect]:
    """One GrantLeases of those that differ only in their count."""
    merged: dict[tuple[bytes, bytes, int, m.Shape], m.GrantLeases] = {}
    rest: list[Effect] = []
    for effect in out:
        if not isinstance(effect, Send) or not isinstance(effect.msg, m.GrantLeases) or not effect.msg.count:
            rest.append(effect)
            continue
        msg = effect.msg
        known = merged.get((effect.dest, msg.holder, msg.scheduling_class, msg.shape))
        if known is None:
            merged[effect.dest, msg.holder, msg.scheduling_class, msg.shape] = msg
            rest.append(effect)
        else:
            known.count += msg.count
    return rest
