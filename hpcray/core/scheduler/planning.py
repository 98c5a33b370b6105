"""Which node for which bundle of a placement group. Pure functions of what every node has left."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hpcray.base.resources import Resources, add, fits, subtract

PACK, SPREAD, STRICT_PACK, STRICT_SPREAD = "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"
Bundles = Mapping[int, Resources]
Plan = dict[int, int]
"""Bundle index to node."""


def plan(bundles: Bundles, strategy: str, free: Mapping[int, Resources], used: Mapping[int, int]) -> Plan | None:
    """A node for every bundle, or None where none is found. PACK and SPREAD are sought, the strict ones are held to.

    Args:
        bundles: those that need a place, by index.
        strategy: of the group.
        free: what the nodes have left that may be chosen.
        used: how many bundles of the group are on which node already.
    """
    planner = _PLANNERS[strategy]
    return planner(bundles, free, used)


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
    left, chosen = _large_first(bundles), Plan()
    open_nodes = dict(free)
    while left:
        best: list[int] = []
        best_node = -1
        for node in sorted(open_nodes, key=lambda node: (-used.get(node, 0), node)):
            taken = _filled(left, bundles, open_nodes[node])
            if len(taken) > len(best):
                best, best_node = taken, node
            if len(best) == len(left):
                break
        if not best:
            return None
        chosen |= dict.fromkeys(best, best_node)
        left = [index for index in left if index not in chosen]
        del open_nodes[best_node]
    return chosen


def _spread(bundles: Bundles, free: Mapping[int, Resources], used: Mapping[int, int]) -> Plan | None:
    """On many nodes: each where the fewest of the group are."""
    apart = _strict_spread(bundles, free, used)
    if apart is not None:
        return apart
    room = {node: dict(amounts) for node, amounts in free.items()}
    count = dict(used)
    chosen = Plan()
    for index in _large_first(bundles):
        fitting = [node for node in room if fits(bundles[index], room[node])]
        if not fitting:
            return None
        node = min(fitting, key=lambda node: (count.get(node, 0), -_least(room[node], bundles[index]), node))
        subtract(room[node], bundles[index])
        count[node] = count.get(node, 0) + 1
        chosen[index] = node
    return chosen


def _strict_spread(bundles: Bundles, free: Mapping[int, Resources], used: Mapping[int, int]) -> Plan | None:
    """On a node each: a matching, so that where one exists it is found."""
    nodes = [node for node in free if node not in used]
    if len(bundles) > len(nodes):
        return None
    holds: dict[int, int] = {}
    for index in _large_first(bundles):
        fitting = [node for node in nodes if fits(bundles[index], free[node])]
        fitting.sort(key=lambda node: (node in holds, -_least(free[node], bundles[index]), node))
        if not _match(index, fitting, bundles, free, nodes, holds):
            return None
    return {index: node for node, index in holds.items()}


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


def _filled(left: list[int], bundles: Bundles, free: Resources) -> list[int]:
    """Those of `left` that fit on one node together, in this order."""
    room = dict(free)
    taken = []
    for index in left:
        if fits(bundles[index], room):
            subtract(room, bundles[index])
            taken.append(index)
    return taken


def _least(free: Resources, request: Resources) -> float:
    """How often the request fits, as a fraction: room is best where this is largest."""
    return min((free.get(name, 0) / units for name, units in request.items() if units), default=0.0)


def _large_first(bundles: Bundles) -> list[int]:
    """Indices: GPUs first, then by size."""
    return sorted(bundles, key=lambda i: (-bundles[i].get("GPU", 0), -sum(_sizes(bundles[i])), i))


def _sizes(amounts: Resources) -> list[int]:
    """Without bytes, which would outweigh all else."""
    return [units for name, units in amounts.items() if name not in ("memory", "object_store_memory")]


_PLANNERS: dict[str, Callable[[Bundles, Mapping[int, Resources], Mapping[int, int]], Plan | None]] = {
    PACK: _pack,
    SPREAD: _spread,
    STRICT_PACK: _strict_pack,
    STRICT_SPREAD: _strict_spread,
}
