"""Which nodes are near each other: orders of nodes in which neighbours in the network follow each other, sets of nodes
for placement groups, and the network as a tree to look at."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from hpcray.common.labels import Place, place_of
from hpcray.common.resources import Resources, add, fits
from hpcray.core.gcs.placement_group_scheduler import (
    PACK,
    SPREAD,
    STRICT_SPREAD,
    Bundles,
    count_fitting,
    least_share,
)

_RANKS = "ranks"
_SHOWN_LABELS = ("hpcray.io/block", "ray.io/gpu-domain", "hpcray.io/rack")
_TINY = 1e-9
"""Shares of the bundles are sums of fractions."""


def in_order(nodes: Sequence[str], places: Mapping[str, Place]) -> list[str]:
    """Return the nodes sorted by place, those of one switch in the order in which they were given; the switches, too,
    in the order of their first nodes, as far as they can stay together."""
    first: dict[Place, int] = {}
    for number, node in enumerate(nodes):
        place = places.get(node, ())
        for level in range(len(place) + 1):
            first.setdefault(place[:level], number)

    def key(node: str) -> tuple[Any, ...]:
        place = places.get(node, ())
        if not place:
            return (1,)
        return 0, *(first[place[: level + 1]] for level in range(len(place)))

    return sorted(nodes, key=key)


def nearest_nodes(counts: Mapping[str, int], ranks: int, places: Mapping[str, Place]) -> dict[str, int]:
    """Choose nodes for ranks behind as few switches as possible, and there as few nodes as possible.

    Args:
        counts: of ranks that each node can take. ranks: that are wanted. places: of the nodes in the network.

    Returns:
        Ranks by node, neighbours next to each other; {} where they do not fit.
    """
    names = [node for node, count in counts.items() if count > 0]
    numbers = {number: {_RANKS: counts[node]} for number, node in enumerate(names)}
    where = {number: places.get(node, ()) for number, node in enumerate(names)}
    domains = near_domains({rank: {_RANKS: 1} for rank in range(ranks)}, PACK, numbers, {}, where)
    for domain in domains or [[*numbers]]:
        taken: dict[str, int] = {}
        left = ranks
        for number in sorted(domain, key=lambda number: -counts[names[number]]):
            if share := min(counts[names[number]], left):
                taken[names[number]] = share
                left -= share
        if not left:
            return {node: taken[node] for node in in_order([node for node in names if node in taken], places)}
    return {}


def network(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the network of a job as nested dicts.

    Args:
        rows: of `ray.nodes()`.

    Returns:
        {"name", "nodes": of this switch, each with "index", "host", "node_id", "alive" and "labels", "below": switches
        of the same form, and "known": whether any node knows its place}; the outermost has the name "".
    """
    top: dict[str, Any] = {"name": "", "nodes": [], "below": [], "known": False}
    for row in rows:
        at = top
        for name in place_of(row["Labels"]):
            found = next((one for one in at["below"] if one["name"] == name), None)
            if found is None:
                found = {"name": name, "nodes": [], "below": []}
                at["below"].append(found)
            at, top["known"] = found, True
        labels = {key: text for key, text in row["Labels"].items() if key in _SHOWN_LABELS}
        at["nodes"].append(
            {
                "index": row["Index"],
                "host": row["NodeManagerHostname"],
                "node_id": row["NodeID"],
                "alive": row["Alive"],
                "labels": labels,
            }
        )
    return top


def draw(found: Mapping[str, Any]) -> list[str]:
    """Draw what `network` returns: a line for each switch and each node."""
    if not found["known"]:
        names = ", ".join(_node_text(node) for node in found["nodes"])
        return [
            f"Nothing is known about the network of {names or 'this job'}.",
            "hint: Slurm says it with TopologyPlugin=topology/tree or topology/block; "
            "else HPCRAY_TOPOLOGY=FILE names a file as topology.conf",
        ]
    lines: list[str] = []
    for part in [*found["below"], *([{**found, "below": [], "name": "place unknown"}] if found["nodes"] else [])]:
        _draw(part, "", "", lines)
    return lines


def _draw(switch: Mapping[str, Any], first: str, rest: str, lines: list[str]) -> None:
    lines.append(f"{first}{switch['name']}")
    below = [*switch["below"], *switch["nodes"]]
    for number, one in enumerate(below):
        last = number == len(below) - 1
        mark, beside = ("└─ ", "   ") if last else ("├─ ", "│  ")
        if "host" in one:
            lines.append(f"{rest}{mark}{_node_text(one)}")
        else:
            _draw(one, rest + mark, rest + beside, lines)


def _node_text(node: Mapping[str, Any]) -> str:
    more = [f"{key.rpartition('/')[2]} {text}" for key, text in sorted(node["labels"].items())]
    state = [] if node["alive"] else ["dead"]
    return f"{node['host']} (node {node['index']}{''.join(', ' + text for text in [*more, *state])})"


# ------------------------------------------------------------ placement groups
# Nodes that are near each other, for the bundles of a placement group.


def near_domains(
    bundles: Bundles, strategy: str, free: Mapping[int, Resources], used: Mapping[int, int], places: Mapping[int, Place]
) -> list[list[int]]:
    """Return sets of nodes that may hold the bundles, behind as few leaf switches as possible; the best set first.

    Sets behind equally few leaves are ranked by how deep in the network they have a switch in common, and then by the
    room that they leave, so that larger groups find whole switches later. The number of leaves is the least possible
    where all bundles are alike; else room is estimated, and the next sets are as many leaves, those with most room, and
    then further leaves.

    Args:
        bundles, strategy, free, used: as `plan_bundles` takes them.
        places: of the nodes; those without a place count as one leaf.
    """
    one_each = strategy in (SPREAD, STRICT_SPREAD)
    shares = _shares(bundles, free, one_each)
    if strategy == STRICT_SPREAD:
        shares = {node: share for node, share in shares.items() if node not in used}
    leaves: dict[Place, list[int]] = {}
    room: dict[Place, float] = {}
    for node, share in shares.items():
        place = places.get(node, ())
        leaves.setdefault(place, []).append(node)
        room[place] = room.get(place, 0.0) + share
    own = {places.get(node, ()) for node in used} & leaves.keys()
    ranked = sorted(room, key=lambda place: (place not in own, -room[place], place))
    below: dict[Place, list[Place]] = {}
    for place in ranked:
        for depth in range(len(place) + 1):
            below.setdefault(place[:depth], []).append(place)
    found = []
    for switch, candidates in below.items():
        chosen = _fewest(candidates, room, own, leaves)
        if chosen:
            new = sum(place not in own for place in chosen)
            spare = sum(room[place] for place in chosen)
            nodes = sum(len(leaves[place]) for place in chosen)
            found.append((new, -len(switch), spare, nodes, chosen))
    if not found:
        return []
    best = min(found)[-1]
    rest = [place for place in ranked if place not in best]
    # Where the estimate was too good, leaves with more room or one leaf more mostly do.
    more = [[*best, *rest[:count]] for count in sorted({1, 2, 3, len(best)})]
    sets = [best, ranked[: len(best)], *more, ranked]
    return [[node for place in some for node in leaves[place]] for i, some in enumerate(sets) if some not in sets[:i]]


def _shares(bundles: Bundles, free: Mapping[int, Resources], one_each: bool) -> dict[int, float]:
    """For each node with room, the part of all bundles that it can take."""
    kinds = {tuple(sorted(amounts.items())): amounts for amounts in bundles.values()}
    if len(kinds) == 1:
        (amounts,) = kinds.values()
        part = 1 / len(bundles)
        counts = {node: count_fitting(amounts, have, len(bundles)) for node, have in free.items()}
        return {node: part * (1 if one_each else count) for node, count in counts.items() if count}
    need: Resources = {}
    for amounts in bundles.values():
        add(need, amounts)
    if one_each:
        some = list(kinds.values())
        part = 1 / len(bundles)
        return {node: part for node, have in free.items() if any(fits(amounts, have) for amounts in some)}
    shares = {node: min(1.0, least_share(have, need)) for node, have in free.items()}
    return {node: share for node, share in shares.items() if share > 0}


def _fewest(
    candidates: Sequence[Place],
    room: Mapping[Place, float],
    own: Collection[Place],
    leaves: Mapping[Place, Sequence[int]],
) -> list[Place]:
    """The fewest of these leaves, sorted by room, that have room for everything; [] where all have too little."""
    chosen: list[Place] = []
    left = 1.0 - _TINY
    for number, place in enumerate(candidates):
        if room[place] >= left and place not in own:
            # The last one: the smallest that is large enough, and that with the larger nodes of several.
            enough = [leaf for leaf in candidates[number:] if room[leaf] >= left]
            return [*chosen, min(enough, key=lambda leaf: (room[leaf], len(leaves[leaf]), leaf))]
        chosen.append(place)
        left -= room[place]
        if left <= 0:
            return chosen
    return []
