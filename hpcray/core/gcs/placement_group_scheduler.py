"""The choice of a node for every bundle of a placement group, from what every node has left."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from hpcray.common.labels import Place, from_strategy, tier
from hpcray.common.resources import Resources, add, fits, subtract
from hpcray.core.gcs.cluster_resources import ClusterResources
from hpcray.protocol.messages import GroupSpec, Shape

PACK, SPREAD, STRICT_PACK, STRICT_SPREAD = "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"
Bundles = Mapping[int, Resources]
Plan = dict[int, int]
"""Bundle index to node."""
NearSets = Callable[
    [Bundles, str, Mapping[int, Resources], Mapping[int, int], Mapping[int, Place]], Sequence[Collection[int]]
]
"""Sets of nodes that may hold the bundles and are near each other, the best set first. Called with the bundles that
need a place, the strategy of the group, what the nodes have left, how many bundles of the group are on which node
already, and the places of the nodes in the network, as far as they are known."""


def plan_bundles(
    bundles: Bundles, strategy: str, free: Mapping[int, Resources], used: Mapping[int, int]
) -> Plan | None:
    """A node for every bundle, or None where there is no plan. PACK and SPREAD are preferences, the others are not.

    Args:
        bundles: those that need a place, by index.
        strategy: of the group.
        free: what the candidate nodes have left.
        used: how many bundles of the group are on which node already.
    """
    planner = _PLANNERS[strategy]
    return planner(bundles, free, used)


def count_fitting(amounts: Resources, free: Resources, most: int) -> int:
    """How often the amounts fit, at most `most` times."""
    return max(0, min([most, *(free.get(name, 0) // units for name, units in amounts.items() if units)]))


def _strict_pack(bundles: Bundles, free: Mapping[int, Resources], used: Mapping[int, int]) -> Plan | None:
    """All on one node: that which has the least left besides, so that others stay whole."""
    need: Resources = {}
    for amounts in bundles.values():
        add(need, amounts)
    fitting = [node for node in (used or free) if node in free and fits(need, free[node])]
    if not fitting:
        return None
    node = min(fitting, key=lambda node: (sum(free[node].get(name, 0) for name in need), node))
    return dict.fromkeys(bundles, node)


def _pack(bundles: Bundles, free: Mapping[int, Resources], used: Mapping[int, int]) -> Plan | None:
    """On few nodes: again and again the node that takes most of what is left, first of those the group is on."""
    if len(bundles) == 1:  # most groups that are made in numbers
        ((index, amounts),) = bundles.items()
        fitting = [(-used.get(node, 0), node) for node, room in free.items() if fits(amounts, room)]
        return {index: min(fitting)[1]} if fitting else None
    kinds, planned = _kinds(bundles), Plan()
    names = {name for amounts, _ in kinds for name in amounts}
    # Of nodes that have the same free only the first can be the next one.
    turn = {node: -place for place, node in enumerate(sorted(free, key=lambda node: (-used.get(node, 0), node)))}
    equal: dict[tuple[int, ...], list[int]] = {}
    for node in reversed(turn):
        equal.setdefault(tuple(free[node].get(name, 0) for name in names), []).append(node)
    while len(planned) < len(bundles):
        best, most = (0, 0), list[int]()
        for nodes in equal.values():
            taken = _filled(kinds, free[nodes[-1]]) if nodes else []
            if any(taken) and (not most or (sum(taken), turn[nodes[-1]]) > best):
                best, most, chosen = (sum(taken), turn[nodes[-1]]), taken, nodes
        if not most:
            return None
        node = chosen.pop()
        for (_, left), count in zip(kinds, most, strict=True):
            planned |= dict.fromkeys(left[:count], node)
            del left[:count]
    return planned


def _filled(kinds: Sequence[tuple[Resources, list[int]]], free: Resources) -> list[int]:
    """How many of each kind fit on one node together, the first kinds first."""
    room, taken = dict(free), []
    for amounts, left in kinds:
        taken.append(count := count_fitting(amounts, room, len(left)))
        for name, units in amounts.items():
            room[name] = room.get(name, 0) - count * units
    return taken


def _spread(bundles: Bundles, free: Mapping[int, Resources], used: Mapping[int, int]) -> Plan | None:
    """On many nodes: each where the fewest of the group are."""
    apart = _strict_spread(bundles, free, used)
    if apart is not None:
        return apart
    room = {node: dict(amounts) for node, amounts in free.items()}
    count, planned = dict(used), Plan()
    for amounts, indices in _kinds(bundles):
        fitting = [node for node in room if fits(amounts, room[node])]
        heap = [(count.get(node, 0), -least_share(room[node], amounts), node) for node in fitting]
        heapq.heapify(heap)
        for index in indices:
            if not heap:
                return None
            most, _, node = heapq.heappop(heap)
            subtract(room[node], amounts)
            count[node], planned[index] = most + 1, node
            if fits(amounts, room[node]):
                heapq.heappush(heap, (most + 1, -least_share(room[node], amounts), node))
    return planned


def _strict_spread(bundles: Bundles, free: Mapping[int, Resources], used: Mapping[int, int]) -> Plan | None:
    """On a node each: a matching, so that where one exists it is found."""
    nodes = [node for node in free if node not in used]
    holds: dict[int, int] = {}
    for amounts, indices in _kinds(bundles) if len(bundles) <= len(nodes) else ():
        fitting = [node for node in nodes if fits(amounts, free[node])]
        fitting.sort(key=lambda node: (-least_share(free[node], amounts), node))
        if len(fitting) < len(indices):
            return None
        empty = (node for node in fitting if node not in holds)
        for index in indices:
            if (node := next(empty, -1)) >= 0:
                holds[node] = index
            elif not _match(index, fitting, bundles, free, nodes, holds):
                return None
    return {index: node for node, index in holds.items()} if len(holds) == len(bundles) else None


def _match(
    index: int, fitting: list[int], bundles: Bundles, free: Mapping[int, Resources], nodes: list[int], holds: Plan
) -> bool:
    """Find a node for one more bundle, moving others along the shortest chain (breadth first)."""
    came_from: dict[int, tuple[int, int]] = {}
    wave = [(index, fitting)]
    while wave:
        coming: list[tuple[int, list[int]]] = []
        for mover, places in wave:
            for node in places:
                if node in came_from:
                    continue
                came_from[node] = (mover, _place_of(mover, holds))
                if node not in holds:
                    _shift(node, came_from, holds)
                    return True
                other = holds[node]
                coming.append((other, [n for n in nodes if n not in came_from and fits(bundles[other], free[n])]))
        wave = coming
    return False


def _place_of(index: int, holds: Plan) -> int:
    return next((node for node, held in holds.items() if held == index), -1)


def _shift(node: int, came_from: Mapping[int, tuple[int, int]], holds: Plan) -> None:
    while node >= 0:
        mover, before = came_from[node]
        holds[node] = mover
        node = before


def least_share(free: Resources, request: Resources) -> float:
    """How often the request fits, as a fraction: room is best where this is largest."""
    return min((free.get(name, 0) / units for name, units in request.items() if units), default=0.0)


def _kinds(bundles: Bundles) -> list[tuple[Resources, list[int]]]:
    """Bundles that are alike, with their indices: those with GPUs first, then by size."""
    found: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for index in sorted(bundles):
        found.setdefault(tuple(sorted(bundles[index].items())), []).append(index)
    kinds = [(bundles[indices[0]], indices) for indices in found.values()]
    return sorted(kinds, key=lambda kind: (-kind[0].get("GPU", 0), -sum(_sizes(kind[0])), kind[1][0]))


def _sizes(amounts: Resources) -> list[int]:
    """Without bytes, which would outweigh all else."""
    return [units for name, units in amounts.items() if name not in ("memory", "object_store_memory")]


_PLANNERS: dict[str, Callable[[Bundles, Mapping[int, Resources], Mapping[int, int]], Plan | None]] = {
    PACK: _pack,
    SPREAD: _spread,
    STRICT_PACK: _strict_pack,
    STRICT_SPREAD: _strict_spread,
}


SMALL_CLUSTER = 16
"""Nodes up to which all are looked at."""
BUNDLE_KINDS = 8
"""Different bundles of a group for which good nodes are sought in a large cluster."""
_MARK = "label of bundle "
_PLENTY = 1 << 60


class _PlaceableGroup(Protocol):
    """The part of a `GcsPlacementGroup` that a plan needs."""

    spec: GroupSpec
    avoid: set[int]

    def without_node(self) -> dict[int, Resources]:
        """The bundles that have no node, by index."""

    def bundles_per_node(self) -> dict[int, int]:
        """How many bundles are on which node."""


class PlacementGroupScheduler:
    """Plans groups with what the GCS knows of every node: with a few good nodes first, with all if these do not do.

    Args:
        near_sets: None: the network makes no difference.
    """

    def __init__(self, resources: ClusterResources, near_sets: NearSets | None = None) -> None:
        self._resources = resources
        self._near_sets = near_sets
        self._failures: set[tuple[object, ...]] = set()

    def forget_failures(self) -> None:
        """There may be more room now than when no plan was found last."""
        self._failures.clear()

    def find_plan(self, group: _PlaceableGroup) -> Plan | None:
        """A plan with what is free now."""
        bundles, used = group.without_node(), group.bundles_per_node()
        if self._failures and _kind(group, bundles, used) in self._failures:
            return None
        nodes = self._resources.nodes
        if group.spec.preferred:
            first = {n: state.available for n, state in nodes.items() if state.info.node_id == group.spec.preferred}
            found = self._plan(group.spec, bundles, first, used)
            if found is not None and not group.avoid & first.keys():
                return found
        near = len(bundles) > 1 and self._is_network_known()
        if len(nodes) > SMALL_CLUSTER and not near:
            good = [n for n in self._good(group.spec, bundles, used) if n not in group.avoid]
            found = self._plan(group.spec, bundles, {n: nodes[n].available for n in good}, used)
            if found is not None:
                return found
        avoid = group.avoid
        free = {n: state.available for n, state in nodes.items() if n not in avoid}
        found = self._plan(group.spec, bundles, free, used, near)
        if found is None and not group.avoid:
            self._failures.add(_kind(group, bundles, used))
        return found

    def find_reachable_plan(self, group: _PlaceableGroup) -> Plan | None:
        """A plan with what would be free if all but actors and other groups ended."""
        free = {n: state.reachable() for n, state in self._resources.nodes.items() if n not in group.avoid}
        return self._plan(group.spec, group.without_node(), free, group.bundles_per_node(), self._is_network_known())

    def _is_network_known(self) -> bool:
        return self._near_sets is not None and len(set(self._resources.places.values())) > 1

    def is_feasible(self, group: _PlaceableGroup) -> bool:
        """Whether the cluster could hold the group if nothing else were there."""
        empty = {node: state.info.total for node, state in self._resources.nodes.items()}
        return self._plan(group.spec, dict(enumerate(group.spec.bundles)), empty, {}) is not None

    def lacks_a_kind(self, group: _PlaceableGroup) -> bool:
        """Return True if some bundle, alone, fits on no node even if nothing else is there."""
        empty = {node: state.info.total for node, state in self._resources.nodes.items()}
        return any(
            self._plan(group.spec, {index: amounts}, empty, {}) is None
            for index, amounts in enumerate(group.spec.bundles)
        )

    def _plan(
        self,
        spec: GroupSpec,
        bundles: Bundles,
        free: Mapping[int, Resources],
        used: Mapping[int, int],
        near: bool = False,
    ) -> Plan | None:
        if any(spec.selectors):
            bundles, free = self._with_labels(spec.selectors, bundles, free)
        near_sets = self._near_sets if near and len(bundles) > 1 and spec.strategy != STRICT_PACK else None
        for domain in self._domains(spec.same, free, used) if spec.same else [free]:
            there = {node: free[node] for node in domain}
            sets = near_sets(bundles, spec.strategy, there, used, self._resources.places) if near_sets else ()
            for some in (*sets, domain):
                found = plan_bundles(bundles, spec.strategy, {node: free[node] for node in some}, used)
                if found is not None:
                    return found
        return None

    def _domains(self, label: str, nodes: Iterable[int], used: Iterable[int]) -> Iterable[list[int]]:
        """The nodes by their value of a label; only those of one value where the group is on some already.

        Nodes without the label are alike where no node has it, and share nothing where one has.
        """
        labels = {node: self._resources.nodes[node].labels.get(label, "") for node in {*nodes, *used}}
        values = {labels[node] for node in used} or set(filter(None, labels.values())) or {""}
        return [[node for node in nodes if labels[node] == value] for value in sorted(values)]

    def _with_labels(
        self, selectors: Sequence[str], bundles: Bundles, free: Mapping[int, Resources]
    ) -> tuple[Bundles, Mapping[int, Resources]]:
        """A condition on labels is a resource of which the nodes that meet it have plenty."""
        requests = {index: {**amounts, _MARK + selectors[index]: 1} for index, amounts in bundles.items()}
        texts = {selectors[index] for index in bundles}
        conditions = {text: from_strategy(text)[1] for text in texts if text}
        there: dict[int, Resources] = {}
        for node, amounts in free.items():
            labels = self._resources.nodes[node].labels
            met = {text for text in texts if not text or tier(conditions[text], labels) is not None}
            there[node] = {**amounts, **dict.fromkeys((_MARK + text for text in met), _PLENTY)}
        return requests, there

    def _good(self, spec: GroupSpec, bundles: Bundles, used: Mapping[int, int]) -> Iterable[int]:
        """A few nodes that have room, with those that the group is on."""
        packs = spec.strategy in (PACK, STRICT_PACK)
        kinds: dict[Shape, None] = {}
        if packs:
            need: Resources = {}
            for amounts in bundles.values():
                add(need, amounts)
            kinds[_shape(need, "")] = None
        for index, amounts in bundles.items():
            selector = spec.selectors[index] if spec.selectors else ""
            kinds[_shape(amounts, selector or ("" if packs else "SPREAD"))] = None
            if len(kinds) > BUNDLE_KINDS:
                break
        found = {node: None for node in used if node in self._resources.nodes}
        for shape in kinds:
            found.update(dict.fromkeys(self._resources.roomy(shape, len(bundles) + 2)))
        return found


def _shape(amounts: Resources, strategy: str) -> Shape:
    return Shape(tuple(sorted(amounts.items())), strategy)


def _kind(group: _PlaceableGroup, bundles: Bundles, used: Mapping[int, int]) -> tuple[object, ...]:
    """Groups of one kind get the same plan, or none."""
    requests = tuple(tuple(sorted(amounts.items())) for amounts in bundles.values())
    selectors = tuple(group.spec.selectors[index] for index in bundles) if group.spec.selectors else ()
    return group.spec.strategy, group.spec.same, requests, selectors, tuple(sorted(used.items()))
