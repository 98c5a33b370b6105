"""What `hpcray status` shows: what every node has and lends, what waits, and the placement groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST_GROUPS = 20
"""Placement groups that are shown one by one."""


def show_demand(status: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines about what waits and about placement groups; none where there is nothing to say.

    Args:
        status: the GCS's answer to "status". groups: its answer to "placement_groups".
    """
    lines = [_unmet(row) for row in status["unmet"]]
    lines += [_actor(row, count) for row, count in _alike(status["waiting_actors"])]
    if lines:
        lines.insert(0, "waiting:")
    present = [group for group in groups if group["state"] != "REMOVED"]
    if present:
        lines.append("placement groups:")
        lines += [_group(group) for group in present[:MOST_GROUPS]]
    if len(present) > MOST_GROUPS:
        lines.append(f"  and {len(present) - MOST_GROUPS} more")
    return lines


def node_columns(status: Mapping[str, Any]) -> dict[int, dict[str, str]]:
    """For each living node, by its index: what is in use of its CPUs, GPUs and the rest, and how much waits there."""
    return {
        row["index"]: {
            "CPU": _used(row, "CPU"),
            "GPU": _used(row, "GPU"),
            "others": ", ".join(f"{name} {_used(row, name)}" for name in sorted(row["total"]) if _is_other(name)),
            "waiting": str(status["demand"].get(str(row["index"]), 0) or ""),
        }
        for row in status["nodes"]
    }


def _used(row: Mapping[str, Any], name: str) -> str:
    total = row["total"].get(name, 0)
    return f"{total - row['available'].get(name, 0):g}/{total:g}" if total else ""


def _is_other(name: str) -> bool:
    return name not in ("CPU", "GPU", "memory", "object_store_memory") and not name.startswith(
        ("node:", "accelerator_type:")
    )


def _unmet(row: Mapping[str, Any]) -> str:
    where = f" on {row['strategy']}" if row["strategy"] else ""
    never = "" if row["feasible"] else ", which no node can ever serve"
    processes = "process" if row["holders"] == 1 else "processes"
    return f"  {row['count']} x {_amounts(row['resources'])}{where} for tasks of {row['holders']} {processes}{never}"


def _alike(actors: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int]]:
    found: dict[tuple[str, str, bool], list[Mapping[str, Any]]] = {}
    for row in actors:
        found.setdefault((row["class_name"], _amounts(row["resources"]), row["feasible"]), []).append(row)
    return [(rows[0], len(rows)) for rows in found.values()]


def _actor(row: Mapping[str, Any], count: int) -> str:
    never = "" if row["feasible"] else ", which no node can ever serve"
    return f"  {count} x {_amounts(row['resources'])} for actors {row['class_name']}{never}"


def _group(group: Mapping[str, Any]) -> str:
    kinds: dict[str, int] = {}
    for bundle in group["bundles"]:
        text = _amounts(bundle)
        kinds[text] = kinds.get(text, 0) + 1
    bundles = ", ".join(text if count == 1 else f"{count} x {text}" for text, count in kinds.items())
    name = group["name"] or group["group"].hex()
    nodes = sorted({node for node in group["nodes"] if node >= 0})
    where = f" on node {', '.join(map(str, nodes))}" if nodes else ""
    return f"  {name}: {group['state']}, {group['strategy']} of {bundles}{where}"


def _amounts(resources: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in sorted(resources.items())) + "}"
