"""`ray._private.state`: tables of the job's nodes, actors and placement groups."""

from __future__ import annotations

from typing import Any

from hpcray.api.context import available_resources, cluster_resources, nodes
from hpcray.api.placement_group import PlacementGroupID, placement_group_table
from hpcray.api.session import ensure
from hpcray.base.ids import show_proc
from hpcray.runtime.refs import current

__all__ = [
    "GlobalState",
    "actors",
    "available_resources",
    "available_resources_per_node",
    "cluster_resources",
    "node_ids",
    "nodes",
    "state",
    "total_resources_per_node",
]


def available_resources_per_node() -> dict[str, dict[str, float]]:
    """What is free on each living node, by the node's id. What is used up is left out, as in Ray."""
    rows = _per_node("available")
    return {node: {name: amount for name, amount in row.items() if amount} for node, row in rows.items()}


def total_resources_per_node() -> dict[str, dict[str, float]]:
    """What each living node has, by the node's id."""
    return {row["NodeID"]: dict(row["Resources"]) for row in nodes() if row["Alive"]}


def actors(actor_id: str | None = None) -> dict[str, Any]:
    """All actors of the job by id, or one; {} where there is none with this id."""
    process = ensure()
    by_index = {row["Index"]: row for row in nodes()}
    found = {row["actor"].hex(): _actor_row(row, by_index) for row in process.gcs.call("actors")}
    if actor_id is not None:
        return found.get(actor_id if isinstance(actor_id, str) else actor_id.hex(), {})
    return found


def node_ids() -> list[str]:
    """The node resources (`node:<address>`) of the living nodes."""
    return [
        name
        for row in nodes()
        if row["Alive"]
        for name in row["Resources"]
        if name.startswith("node:") and name != "node:__internal_head__"
    ]


class GlobalState:
    """Ray's object behind these functions."""

    def _check_connected(self) -> None:
        ensure()

    def _really_init_global_state(self) -> None:
        ensure()

    def _initialize_global_state(self, gcs_options: Any = None) -> None:
        ensure()

    def disconnect(self) -> None:
        """Nothing to let go."""

    def node_table(self) -> list[dict[str, Any]]:
        """`nodes()`."""
        return nodes()

    def actor_table(self, actor_id: str | None = None, **_: Any) -> dict[str, Any]:
        """`actors()`."""
        return actors(actor_id)

    def placement_group_table(self, placement_group_id: Any = None) -> dict[str, Any]:
        """One group's row, or all rows by id."""
        if placement_group_id is None:
            return placement_group_table()
        return placement_group_table(PlacementGroupID(_bytes(placement_group_id)))

    def cluster_resources(self) -> dict[str, float]:
        """Total of the living nodes."""
        return cluster_resources()

    def available_resources(self) -> dict[str, float]:
        """What is free."""
        return available_resources()

    def available_resources_per_node(self) -> dict[str, dict[str, float]]:
        """What is free on each living node."""
        return available_resources_per_node()

    _available_resources_per_node = available_resources_per_node

    def total_resources_per_node(self) -> dict[str, dict[str, float]]:
        """What each living node has."""
        return total_resources_per_node()

    _total_resources_per_node = total_resources_per_node

    @property
    def global_state_accessor(self) -> Any:
        """None where this process is in no job, as in Ray."""
        return self if current.process is not None else None


state = GlobalState()


def _per_node(what: str) -> dict[str, dict[str, float]]:
    process = ensure()
    ids = {row["Index"]: row["NodeID"] for row in process.gcs.nodes()}
    status = process.gcs.call("status")
    return {ids[row["index"]]: dict(row[what]) for row in status["nodes"] if row["index"] in ids}


def _actor_row(row: dict[str, Any], by_index: dict[int, dict[str, Any]]) -> dict[str, Any]:
    node = by_index.get(row["node"], {})
    job = ensure().job
    return {
        "ActorID": row["actor"].hex(),
        "ActorClassName": row["class_name"],
        "IsDetached": row["detached"],
        "Name": row["name"],
        "RayNamespace": row["namespace"],
        "JobID": job.job_id if job else "",
        "Address": {
            "IPAddress": node.get("NodeManagerAddress", ""),
            "Port": 0,
            "NodeID": node.get("NodeID", ""),
        },
        "OwnerAddress": {"WorkerID": row["owner"].hex() if row["owner"] else ""},
        "State": row["state"],
        "NumRestarts": row["restarts"],
        "DeathCause": row["reason"],
        "Worker": show_proc(row["worker"]) if row["worker"] else "",
    }


def _bytes(ident: Any) -> bytes:
    return bytes.fromhex(ident) if isinstance(ident, str) else bytes(ident)
