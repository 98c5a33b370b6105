"""Orders of nodes in which neighbours in the network follow each other, and the network as a tree to look at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpcray.common.labels import Place, place_of
from hpcray.core.gcs.placement_group_scheduler import PACK, near_domains

_RANKS = "ranks"
_SHOWN_LABELS = ("hpcray.io/block", "ray.io/gpu-domain", "hpcray.io/rack")


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
