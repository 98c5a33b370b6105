"""Resources of every node as the GCS knows them, and the choice of a node for a request."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping

from msgspec import Struct, field

from hpcray.common.labels import (
    ACCELERATOR,
    NODE_ID,
    PREFIX,
    TIME_LEFT,
    Place,
    fails_when_busy,
    from_strategy,
    names_nodes,
    near_node,
    nearest_nodes,
    node_affinity,
    place_of,
    show_strategy,
    tier,
    time_left_label,
    without_time_left,
)
from hpcray.common.resources import (
    ACCELERATOR_TYPE,
    ADDRESS_PREFIX,
    ALL_SLOTS,
    ANY,
    GROUP,
    SLOTS,
    UNIT,
    Resources,
    add,
    bundle_of,
    fits,
    free_of,
    implicit,
    name_in,
    plain,
    show,
    subtract,
    waiting_text,
)
from hpcray.core.gcs.node_types import TYPE_LABEL, NodeTypeTable
from hpcray.protocol.messages import NodeInfo, NodeView, Shape

Rank = tuple[int, float, int, int]
"""Index of the alternative (label tiers; nodes whose GPUs are not asked for come later); used share; number of the last
choice of the node; the node. The smallest is best."""
RankOf = Callable[[int], "Rank | None"]
_SLACK = 64
"""Entries of a heap or a log, above four times its live ones, before it is compacted."""


class NodeChangeLog:
    """Nodes that changed, in order. Each ranking remembers how far it has read."""

    def __init__(self) -> None:
        self._log: list[int] = []
        self._start = 0
        self._read = 0
        self._most = 0

    def __len__(self) -> int:
        return self._start + len(self._log)

    def add(self, node: int) -> None:
        """Note that what is free on this node, or in its bundles, has changed."""
        log = self._log
        if not log or log[-1] != node or self._read == len(self):
            log.append(node)

    def since(self, position: int, most: int) -> set[int] | None:
        """The nodes that changed since; None for more than `most` changes, or for what is forgotten."""
        log = self._log
        self._most = max(self._most, most)  # a ranking of few nodes must not forget what others have not read
        if len(log) > 4 * self._most + _SLACK:
            self._start += len(log)
            log.clear()
        self._read = len(self)
        behind = len(self) - position
        if position < self._start or behind > most:
            return None
        return set(log[len(log) - behind :])


class NodeRanking:
    """The nodes with room for one kind of request: finds the best in O(log nodes).

    A ranking is a heap of (rank, node). Ranks of nodes that changed are computed again when the ranking is next read,
    so a node that changes often costs nothing in a ranking that is not read. Entries that are out of date are dropped
    when they come up.

    Args:
        nodes: that could serve it if they were empty.
        rank: of a node now; None where it has no room.
    """

    __slots__ = ("_changes", "_current", "_heap", "_nodes", "_rank", "_seen")

    def __init__(self, nodes: Iterable[int], rank: RankOf, changes: NodeChangeLog) -> None:
        self._nodes = frozenset(nodes)
        self._rank = rank
        self._changes = changes
        self._current: dict[int, Rank] = {}
        self._heap: list[Rank] = []
        self._seen = -1

    def best(self, but: int = -1) -> int | None:
        """The best node with room, None where none has any.

        Args:
            but: not this one.
        """
        self._refresh()
        heap, aside = self._heap, None
        while heap:
            top = heap[0]
            node = top[-1]
            if self._current.get(node) != top:
                heapq.heappop(heap)
                continue
            now = self._rank(node)
            if now != top:  # it became worse without a change being noted
                self._set(node, now)
                continue
            if node != but:
                break
            aside = heapq.heappop(heap)
        if aside is not None:
            found = heap[0][-1] if heap else None
            heapq.heappush(heap, aside)
            return found
        return heap[0][-1] if heap else None

    def none_better(self, node: int, most: float) -> bool:
        """Return True if this node has room and no node is better but for its use.

        Args:
            most: used share of this node: if it is larger, the best node must not be used less.
        """
        rank, best = self._rank(node) if node in self._nodes else None, self.best()
        if rank is None or best is None:
            return False
        return rank[0] <= self._current[best][0] and rank[1] <= max(most, self._current[best][1])

    def some(self, count: int) -> list[int]:
        """At most `count` nodes with room, the best first."""
        found: list[Rank] = []
        while len(found) < count and (node := self.best()) is not None:
            found.append(self._current.pop(node))
        for rank in found:
            self._current[rank[-1]] = rank
            heapq.heappush(self._heap, rank)
        return [rank[-1] for rank in found]

    def _refresh(self) -> None:
        changed = self._changes.since(self._seen, len(self._nodes))
        self._seen = len(self._changes)
        if changed is None:
            ranks = ((node, self._rank(node)) for node in self._nodes)
            self._current = {node: rank for node, rank in ranks if rank is not None}
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)
            return
        for node in changed & self._nodes:
            self._set(node, self._rank(node))
        if len(self._heap) > 4 * len(self._nodes) + _SLACK:
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)

    def _set(self, node: int, rank: Rank | None) -> None:
        if rank is None:
            self._current.pop(node, None)
        elif self._current.get(node) != rank:
            self._current[node] = rank
            heapq.heappush(self._heap, rank)


REFUSED_AT_ONCE = 1.0
"""Seconds within which a node refuses a request that may queue there only because it takes nothing, as it leaves or the
job drains: it would refuse the same again at once, for ever, so it is asked again at the next tick."""
RANKINGS_KEPT = 256
"""Kinds of requests that are kept ranked; for others the ranking is made again when they come back."""
_IN_RAYS_WORDS = (
    ". The node specified via NodeAffinitySchedulingStrategy doesn't exist any more or is infeasible, and soft=False "
    "was specified"
)
_NODES_SHOWN, _HOSTS_SHOWN = 16, 4
"""Node indices and host names that one group of equal nodes lists."""
Request = tuple[tuple[str, int], ...]


class NodeResources(Struct, eq=False):
    """One live node. Amounts in units.

    Attributes:
        available: what its last view says is free, minus what the GCS has promised since.
        version: number of that view.
        last_view: what its views showed as free, without the promises.
        soft: what actors are placed by that they do not hold (a default actor is placed by one CPU and holds none). The
            amounts rank nodes for actors, and block nothing.
        rejected_shapes: requests that the node has refused, until its views show more than before, or the next tick.
        total: what the node has, bundles of placement groups included.
        in_bundles: what is free in these bundles.
        lasting: what actors and bundles hold, which no waiting will free.
        implicit: what it has because an actor asked for it.
        turn: number of the last choice that took this node.
    """

    info: NodeInfo
    available: Resources
    version: int = 0
    last_view: Resources = field(default_factory=dict)
    soft: Resources = field(default_factory=dict)
    rejected_shapes: set[Request] = field(default_factory=set)
    total: Resources = field(default_factory=dict)
    in_bundles: Resources = field(default_factory=dict)
    lasting: Resources = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    implicit: Resources = field(default_factory=dict)
    turn: int = 0

    def __post_init__(self) -> None:
        self.total = dict(self.info.total)
        self.labels = node_labels(self.info)

    @property
    def index(self) -> int:
        return self.info.index

    def units_of(self, name: str) -> int:
        """What there is of a resource of the node, used or not; bundles of placement groups are a part of it."""
        return self.info.total.get(name, 0) or self.implicit.get(name, 0)

    def fits(self, shape: Shape) -> bool:
        """Whether the node seems to have room for one more."""
        if self.rejected_shapes and shape.resources in self.rejected_shapes:
            return False
        free = self.in_bundles if shape.strategy.startswith(GROUP) else self.available
        for name, units in shape.resources:  # noqa: SIM110  # a generator takes twice as long, and this is the inner loop
            if free.get(name, 0) < units:
                return False
        return True

    def free(self, shape: Shape) -> Resources:
        """Free amounts of the resources that a shape is about: the node's, or those in its bundles."""
        return self.in_bundles if shape.strategy.startswith(GROUP) else self.available

    def reachable(self) -> Resources:
        """Amounts that would be free if all tasks ended; actors and bundles stay."""
        own = {**self.info.total, **self.implicit} if self.implicit else self.info.total
        return {name: units - self.lasting.get(name, 0) for name, units in own.items()}

    def add_implicit(self, names: Iterable[str]) -> None:
        """Have 1 of each of these resources from now on."""
        for name in names:
            for amounts in (self.implicit, self.total, self.available):
                amounts.setdefault(name, UNIT)

    def capacity(self, shape: Shape) -> int:
        """How many would run at once if the node were empty (at least 1 for an empty request)."""
        total = self.total
        return min((total.get(name, 0) // units for name, units in shape.resources if units), default=1)

    def utilisation(self, shape: Shape, soft: bool = False) -> float:
        """The largest used share among the requested resources and CPU; `soft` counts soft actors too."""
        worst, amounts = 0.0, self.total
        free_amounts = self.free(shape)
        pairs = shape.resources if free_amounts is self.in_bundles else (("CPU", 0), *shape.resources)
        for name, _ in pairs:
            total = amounts.get(name, 0)
            if total:
                free = free_amounts.get(name, 0) - (self.soft.get(name, 0) if soft else 0)
                used = 1.0 - free / total
                if used > worst:
                    worst = used
        return worst

    def use_with_room(self, shape: Shape) -> float | None:
        """The `utilisation` for a shape outside of placement groups; None without room for one more."""
        if self.rejected_shapes and shape.resources in self.rejected_shapes:
            return None
        free, total = self.available, self.total
        cpus = total.get("CPU", 0)
        worst = 1.0 - free.get("CPU", 0) / cpus if cpus else 0.0
        for name, units in shape.resources:
            left = free.get(name, 0)
            if left < units:
                return None
            if name != "CPU" and (most := total.get(name, 0)):
                worst = max(worst, 1.0 - left / most)
        return worst if worst > 0.0 else 0.0

    def apply_view(self, view: NodeView) -> bool:
        """Apply a view: what has changed. Returns whether the node has more of anything than the GCS knew."""
        self.version = view.version
        available, last_view = self.available, self.last_view
        more = room = increased = False
        for name, units in view.available.items():
            more = more or units > available.get(name, 0)
            increased = increased or units > last_view.get(name, 0)
            available[name] = last_view[name] = units
        for name, units in view.bundles.items():
            if name in self.total:  # not of a group that is removed
                room = room or units > self.in_bundles.get(name, 0)
                self.in_bundles[name] = units
        self.lasting.update(view.lasting)
        # A node that refuses for want of workers keeps reporting room: only an increase makes it worth another request.
        if self.rejected_shapes and (room or increased):
            self.rejected_shapes.clear()
            return True
        return more or room


class ClusterResources:
    """All live nodes, and why the others died.

    Args:
        spread_threshold: used share up to which the hybrid policy fills nodes in index order; then it takes the least
            used node.
        node_types: of the nodes that may come.

    Attributes:
        nodes: by index.
        dead: reasons by node, in the order of the deaths.
        node_types: of the nodes that may come.
        places: in the network, of those nodes whose labels say it.
    """

    def __init__(self, spread_threshold: float = 0.5, node_types: NodeTypeTable | None = None) -> None:
        self.node_types = node_types if node_types is not None else NodeTypeTable({}, False)
        self._spread_threshold = spread_threshold
        self.nodes: dict[int, NodeResources] = {}
        self.dead: dict[int, str] = {}
        self.places: dict[int, Place] = {}
        self._draining: set[int] = set()
        self._nearest: dict[int, list[int]] = {}
        self._feasible: dict[Shape, list[int]] = {}
        self._of_group: dict[str, list[Shape]] = {}
        self._names: dict[str, dict[int, set[str]]] = {}
        self._groups_at: dict[int, set[str]] = {}
        self._changes = NodeChangeLog()
        self._rankings: OrderedDict[tuple[Shape, Shape, bool], NodeRanking] = OrderedDict()
        self._turns = 0

    def nodes_joined(self, nodes: Iterable[NodeInfo]) -> None:
        """Add nodes, with all that they have free."""
        nodes = list(nodes)
        for info in nodes:
            self.nodes[info.index] = NodeResources(info, dict(info.total))
            if place := place_of(info.labels):
                self.places[info.index] = place
        self.node_types.nodes_joined(nodes)
        self._forget_all()

    def restore_nodes(self, nodes: Iterable[NodeInfo], dead: Mapping[int, str]) -> None:
        """Take in what another head knew of the nodes."""
        self.nodes_joined(nodes)
        self.dead.update(dead)

    def node_died(self, node: int, reason: str) -> None:
        """A node died."""
        self.nodes.pop(node, None)
        self.places.pop(node, None)
        for there in self._names.values():
            there.pop(node, None)
        self._groups_at.pop(node, None)
        self.dead[node] = reason
        self._forget_all()

    def apply_view(self, view: NodeView) -> bool:
        """Apply a view unless it is stale. Returns whether the node has more of anything than the GCS knew."""
        state = self.nodes.get(view.node)
        if state is None or view.version <= state.version:
            return False
        self._changes.add(view.node)
        return state.apply_view(view)

    def rejected(self, node: int, shape: Shape) -> None:
        """The node refused a request: it gets no more of this kind until `forget_rejections`, or until it has more."""
        state = self.nodes.get(node)
        if state is not None:
            state.rejected_shapes.add(shape.resources)

    def forget_rejections(self) -> None:
        """Time has passed: nodes that refused a request may be sent it again."""
        for node, state in self.nodes.items():
            if state.rejected_shapes:
                state.rejected_shapes.clear()
                self._changes.add(node)

    def feasible(self, shape: Shape) -> list[int]:
        """Nodes that could run the shape if they were empty, in index order: of these the node that a soft affinity
        prefers, alone; nodes that are about to leave only where no others could."""
        found = self._feasible.get(shape)
        if found is None:
            found = self._find_feasible(shape)
            if self._draining:
                found = self._staying(shape, found) or found
            self._feasible[shape] = found
        return found

    def _staying(self, shape: Shape, found: list[int]) -> list[int]:
        """Drop the nodes that are about to leave. Where they are what a soft affinity prefers: return all others that
        could run the shape."""
        staying = [node for node in found if node not in self._draining]
        affinity = node_affinity(shape.strategy)
        if staying or not found or affinity is None or not affinity[1]:
            return staying
        return [node for node in self.feasible(Shape(shape.resources, "", shape.env)) if node not in self._draining]

    def set_draining(self, nodes: Iterable[int]) -> None:
        """These nodes are about to leave, no others."""
        draining = set(nodes)
        if draining != self._draining:
            self._draining = draining
            self._forget_all()

    def set_time_left(self, nodes: Mapping[int, float], job: float) -> None:
        """These nodes leave in so many seconds, and the job ends; inf: not known."""
        changed = self.node_types.set_time_left(
            {self.nodes[node].labels.get(TYPE_LABEL, ""): left for node, left in nodes.items() if node in self.nodes},
            job,
        )
        if self.label_time_left(nodes) or changed:
            self._forget_all()

    def label_time_left(self, nodes: Mapping[int, float]) -> bool:
        """These nodes leave in so many seconds. Returns whether a label changes."""
        changed = False
        for node, left in nodes.items():
            if node in self.nodes:
                labels, label = self.nodes[node].labels, time_left_label(left)
                changed = changed or labels.get(TIME_LEFT) != label
                labels[TIME_LEFT] = label
        return changed

    def is_decided(self, shape: Shape) -> bool:
        """Whether what serves no request of this kind are the nodes, not a placement group that has no bundles yet."""
        bundle = bundle_of(shape.resources)
        return bundle is None or (PREFIX in shape.strategy and bundle[0] in self._names)

    def is_hopeless(self, shape: Shape) -> bool:
        """Return True if no node can serve the request, and none will come that could."""
        return bool(self.nodes) and self.is_decided(shape) and not self.node_types.may_come(shape)

    def is_draining(self, node: int) -> bool:
        """Return True if the node is about to leave."""
        return node in self._draining

    def servers(self, place: Shape, hold: Shape) -> list[int]:
        """The feasible nodes where only tasks are in the way; all feasible ones if there are no such nodes."""
        nodes = self.feasible(place)
        held = dict(hold.resources)
        free = [node for node in nodes if fits(held, self.nodes[node].reachable())]
        return free or nodes

    def _find_feasible(self, shape: Shape) -> list[int]:
        if near_node(shape.strategy) is not None:  # any node will do, at worst
            return self.feasible(Shape(shape.resources, "", shape.env))
        request = dict(shape.resources)
        bundle = bundle_of(shape.resources)
        nodes: Iterable[int] = self.nodes
        if bundle is not None:
            nodes = self._names.get(bundle[0], ())
            self._of_group.setdefault(bundle[0], []).append(shape)
        if names := implicit(request):
            for state in self.nodes.values():
                state.add_implicit(names)
        found = [node for node in sorted(nodes) if fits(request, self.nodes[node].total)]
        if PREFIX in shape.strategy:
            _, tiers = from_strategy(shape.strategy)
            fitting = [node for node in found if tier(tiers, self.nodes[node].labels) is not None]
            if fitting or TIME_LEFT not in shape.strategy or self.node_types.may_come(shape):
                return fitting
            tiers = without_time_left(tiers)  # it may end in time nevertheless
            return [node for node in found if tier(tiers, self.nodes[node].labels) is not None]
        affinity = node_affinity(shape.strategy)
        if affinity is None:
            return found
        only, soft = affinity
        return [only] if only in found else found if soft else []

    def bundle_came(self, node: int, group: str, index: int, amounts: Resources) -> None:
        """A node has a bundle that may be used, and is empty. Later the node's views say what is free in it."""
        state, names = self.nodes[node], self._names.setdefault(group, {}).setdefault(node, set())
        self._groups_at.setdefault(node, set()).add(group)
        for name, units in {**amounts, SLOTS: ALL_SLOTS}.items():
            for shown in (name_in(group, index, name), name_in(group, ANY, name)):
                for figures in (state.total, state.in_bundles):
                    figures[shown] = figures.get(shown, 0) + units
                names.add(shown)
        self._changes.add(node)
        self._group_changed(group)

    def bundles_left(self, node: int, group: str) -> None:
        """A node has no bundle of the group any more."""
        state, there = self.nodes.get(node), self._names.get(group, {})
        names = there.pop(node, ())
        self._groups_at.get(node, set()).discard(group)
        if not there:
            self._names.pop(group, None)
        if state is not None:
            total, in_bundles, free = state.total, state.in_bundles, state.available
            for name in names:
                if in_bundles.get(name) != total.get(name):
                    break
            else:
                # Nothing runs in them: what is placed next need not go elsewhere because a view is still on its way.
                # Where the node has given them back by now, they are free already.
                suffix = name_in(group, ANY, "")
                for name in names:
                    if name.endswith(suffix) and (inside := name.removesuffix(suffix)) != SLOTS:
                        free[inside] = min(free.get(inside, 0) + total[name], state.units_of(inside))
                self._changes.add(node)
            for name in names:
                total.pop(name, None)
                in_bundles.pop(name, None)
        self._group_changed(group)

    def groups_at(self, node: int) -> set[str]:
        """The groups (their ids in hex) that have bundles on this node."""
        return self._groups_at.get(node, set())

    @property
    def nodes_of_groups(self) -> Mapping[str, Collection[int]]:
        """The nodes that have bundles of each group that has any, by the group's id in hex."""
        return self._names

    def promise(self, node: int, request: Request) -> None:
        """Promise resources of a node; its next view corrects."""
        subtract(self.nodes[node].available, dict(request))
        self._changes.add(node)

    def take_soft(self, node: int, amount: Resources) -> None:
        """Count an actor that was placed by more than it holds."""
        if node in self.nodes:
            add(self.nodes[node].soft, amount)
            self._changes.add(node)

    def give_soft(self, node: int, amount: Resources) -> None:
        """Such an actor left."""
        if node in self.nodes:
            subtract(self.nodes[node].soft, amount)
            self._changes.add(node)

    # ------------------------------------------------------------ choosing

    def any_room(self, shape: Shape) -> bool:
        """Whether some node seems to have room for one more."""
        return self._ranking(shape, shape).best() is not None

    def choose(
        self, shape: Shape, count: int, only: int | None = None, but: int = -1, near: int = -1, idle: bool = True
    ) -> list[tuple[int, int]]:
        """Spread up to `count` requests over nodes that have room, and take the resources.

        Args:
            only: on this node alone. but: not on this one.
            near: nodes near this one come first, as long as no other is used less; idle=False: as they have room.

        Returns:
            (node, how many) pairs; together perhaps fewer than `count`.
        """
        given: dict[int, int] = {}
        if only is not None:
            while count and only != but and self._is_candidate(only, shape):
                self._take_for(self.nodes[only], shape)
                given[only] = given.get(only, 0) + 1
                count -= 1
            return list(given.items())
        ranking = self._ranking(shape, shape)
        by_place = near in self.places and not shape.strategy and (shape.resources or not idle)
        for other in self._nearest_to(near) if by_place else ():
            while count and other != but and ranking.none_better(other, 0.0 if idle else 1.0):
                self._take_for(self.nodes[other], shape)
                given[other] = given.get(other, 0) + 1
                count -= 1
        for _ in range(count):
            node = ranking.best(but)
            if node is None:
                break
            self._take_for(self.nodes[node], shape)
            given[node] = given.get(node, 0) + 1
        return sorted(given.items())

    def _nearest_to(self, node: int) -> list[int]:
        if node not in self._nearest:
            self._nearest[node] = nearest_nodes(node, {other: self.places.get(other, ()) for other in self.nodes})
        return self._nearest[node]

    def choose_for_actor(self, place: Shape, hold: Shape) -> int | None:
        """The node for one actor, and take what it holds: `place` ranks the nodes, `hold` must fit now."""
        node = self._ranking(place, hold, actor=True).best()
        if node is not None:
            self._take_for(self.nodes[node], hold)
        return node

    def roomy(self, shape: Shape, count: int) -> list[int]:
        """At most `count` nodes with room for one, the best first."""
        return self._ranking(shape, shape).some(count)

    def _is_candidate(self, node: int, shape: Shape) -> bool:
        state = self.nodes.get(node)
        if state is None or not state.fits(shape):
            return False
        feasible = self.feasible(shape)
        at = bisect_left(feasible, node)
        return at < len(feasible) and feasible[at] == node

    def _take_for(self, state: NodeResources, shape: Shape) -> None:
        self._turns += 1
        state.turn = self._turns
        subtract(state.free(shape), dict(shape.resources))
        self._changes.add(state.index)

    def _ranking(self, place: Shape, hold: Shape, actor: bool = False) -> NodeRanking:
        if place.strategy.startswith(GROUP):  # on few nodes, and gone with its group
            return self._make_ranking(place, hold, actor)
        key = (place, hold, actor)
        found = self._rankings.get(key)
        if found is None:
            found = self._rankings[key] = self._make_ranking(place, hold, actor)
            if len(self._rankings) > RANKINGS_KEPT:
                self._rankings.popitem(last=False)
        else:
            self._rankings.move_to_end(key)
        return found

    def _make_ranking(self, place: Shape, hold: Shape, actor: bool) -> NodeRanking:
        by_labels = PREFIX in place.strategy
        spread, conditions = from_strategy(place.strategy) if by_labels else (place.strategy == "SPREAD", ())
        threshold = self._spread_threshold
        nodes = self.feasible(place)
        tiers = {node: tier(conditions, self.nodes[node].labels) or 0 for node in nodes} if by_labels else {}
        if not spread and "GPU" not in plain(dict(place.resources)) and "GPU" not in plain(dict(hold.resources)):
            # GPUs are kept free for those who ask for them, where other nodes have room.
            tiers = {node: 2 * tiers.get(node, 0) + (self.nodes[node].info.total.get("GPU", 0) > 0) for node in nodes}

        alike = place is hold and not actor and not place.strategy.startswith(GROUP)

        def rank(node: int) -> Rank | None:
            state = self.nodes[node]
            if alike:
                share = state.use_with_room(hold)
                if share is None:
                    return None
                used = share
            else:
                if not state.fits(hold):
                    return None
                used = state.utilisation(place, actor)
            if used < threshold and not spread:
                return tiers.get(node, 0), 0.0, 0, node
            return tiers.get(node, 0), used, state.turn, node

        return NodeRanking(nodes, rank, self._changes)

    def _group_changed(self, group: str) -> None:
        for shape in self._of_group.pop(group, ()):
            self._feasible.pop(shape, None)

    def _forget_all(self) -> None:
        self._nearest.clear()
        self._feasible.clear()
        self._of_group.clear()
        self._rankings.clear()

    # ------------------------------------------------------------ sentences for users

    def describe(self, about: Resources | None = None, labels: bool = False, addresses: bool = False) -> str:
        """The resources of every node, in one line; nodes that have the same are listed together.

        Args:
            about: show only these resources, and how much of them is free.
            labels: show the labels that users gave to the nodes, too. addresses: and their resources for addresses.
        """
        groups: dict[str, list[int]] = {}
        for index, state in sorted(self.nodes.items()):
            if about is None:
                text = show(state.info.total, addresses)
            else:
                text = free_of(about, {**state.available, **state.in_bundles}, state.total)
            if labels:
                given = ", ".join(f"{key}={value}" for key, value in sorted(state.info.labels.items()))
                text += f" labels ({given})"
            groups.setdefault(text, []).append(index)
        parts = []
        for text, nodes in groups.items():
            hosts = sorted({self.nodes[index].info.host for index in nodes})
            where = f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(map(str, nodes[:_NODES_SHOWN]))}"
            more = " …" if len(nodes) > _NODES_SHOWN else ""
            more_hosts = " …" if len(hosts) > _HOSTS_SHOWN else ""
            parts.append(f"{where}{more} ({', '.join(hosts[:_HOSTS_SHOWN])}{more_hosts}): {text}")
        if about is None and self.dead:
            last = [f"node {index} ({reason})" for index, reason in list(self.dead.items())[-_NODES_SHOWN:]]
            parts.append(f"{'… ' * (len(self.dead) > _NODES_SHOWN)}{', '.join(last)} ended")
        return "; ".join(parts) or "there is no node"

    def why_infeasible(self, shape: Shape, requester: str) -> str:
        """The report for a request that no node can ever serve.

        Args:
            requester: the grammatical subject, "a task" or "actor X".
        """
        if bundle_of(shape.resources) is not None:
            requester += " in a placement group"
        text = f"{requester} asks for {show(dict(shape.resources))}"
        by_labels = PREFIX in shape.strategy
        affinity = node_affinity(shape.strategy)
        if by_labels:
            text += f" on a node with {show_strategy(shape.strategy)}, which no node can serve"
        elif affinity is not None:
            index = affinity[0]
            died = f" (it died: {self.dead[index]})" if index in self.dead else ""
            busy = fails_when_busy(shape.strategy) and self.feasible(shape)
            text += f" on node {index}{died}, which {'has no room for' if busy else 'cannot serve'} it"
            text += "" if busy else _IN_RAYS_WORDS
        else:
            missing = [name for name in plain(dict(shape.resources)) if not self._is_anywhere(name)]
            text += ", which no node can serve" + (f": none has {', '.join(missing)}" if missing else "")
        if self.node_types.known and affinity is None:
            text += f", nor any that may come (node types {', '.join(self.node_types.all())})"
            return f"{text}. What there is: {self.describe(labels=by_labels)}. hint: ask for less, or --node-types"
        hint = "ask for less, or start nodes that have it"
        addresses = any(name.startswith(ADDRESS_PREFIX) for name in plain(dict(shape.resources)))
        end = "soft=True lets another node serve it" if names_nodes(shape.strategy) else f"{hint}; it waits"
        return f"{text}. What there is: {self.describe(labels=by_labels, addresses=addresses)}. hint: {end}"

    def _is_anywhere(self, name: str) -> bool:
        return any(state.total.get(name) for state in self.nodes.values())

    def why_waiting(self, shape: Shape, requester: str) -> str:
        """The report for a request that waits for others to end."""
        request = dict(shape.resources)
        return waiting_text(requester, request, self.describe(request))

    def why_pending(self, shape: Shape, requester: str) -> str:
        """The report for a request that waits for a node which may come."""
        return f"{requester} asks for {show(dict(shape.resources))} and waits for a further node; hint: hpcray status"

    def check_invariants(self) -> None:
        """Check the amounts of every node. A node may report less than nothing free of CPU, as blocked tasks resume."""
        assert not self.nodes.keys() & self.dead.keys()
        for node, state in self.nodes.items():
            assert node == state.index
            assert all(units >= 0 for units in (*state.total.values(), *state.soft.values())), f"node {node}: {state}"
            for name, units in state.available.items():
                assert units <= state.units_of(name), f"node {node}: more {name} is free than it has"
            for name, units in state.in_bundles.items():
                assert units <= state.total.get(name, 0), f"node {node}: more {name} is free than bundles have"
        at = {node: {group for group, there in self._names.items() if node in there} for node in self._groups_at}
        assert at == self._groups_at and set().union(*at.values()) == self._names.keys(), "groups by node"
        for group, there in self._names.items():
            for node, names in there.items():
                state = self.nodes[node]
                assert names <= state.total.keys() & state.in_bundles.keys(), f"node {node}: bundles of group {group}"


def merged_views(earlier: NodeView | None, view: NodeView) -> NodeView:
    """One view with the effect of two, one after the other."""
    if earlier is None:
        return view
    return NodeView(
        view.node,
        view.version,
        {**earlier.available, **view.available},
        {**earlier.bundles, **view.bundles},
        {**earlier.lasting, **view.lasting},
    )


def node_labels(info: NodeInfo) -> dict[str, str]:
    """Labels of a node, those that every node has included."""
    labels = {NODE_ID: info.node_id}
    for name in info.total:
        if name.startswith(ACCELERATOR_TYPE):
            labels[ACCELERATOR] = name.removeprefix(ACCELERATOR_TYPE)
    return {**labels, **info.labels}
