"""`ray._private.state`: the tables of the GCS."""

from __future__ import annotations

from typing import Any

from hpcray.api.placement_group import PlacementGroupID, placement_group_table
from hpcray.api.runtime_context import available_resources, cluster_resources, nodes
from hpcray.api.session import require_session
from hpcray.common.ids import show_proc
from hpcray.compat.names.cluster_config import get_cluster_config, get_max_resources_from_cluster_config
from hpcray.compat.names.ids import JobID
from hpcray.compat.names.ray_constants import NODE_ID_PREFIX
from hpcray.experimental.internal_kv import _internal_kv_put
from hpcray.platform.sockets import node_ip_address
from hpcray.runtime.core_worker.core_worker import current
from hpcray.state.aggregator import job_of_actor
from hpcray.util.state import list_jobs, list_workers

_ALL_ROWS = 10_000


def available_resources_per_node() -> dict[str, dict[str, float]]:
    """Return the free resources of each live node by node id, without resources that are used up, as in Ray."""
    return {
        node: {name: amount for name, amount in row["available"].items() if amount}
        for node, row in status_by_node().items()
    }


def total_resources_per_node() -> dict[str, dict[str, float]]:
    """Return the total resources of each live node by node id."""
    return {row["NodeID"]: dict(row["Resources"]) for row in nodes() if row["Alive"]}


def actors(actor_id: str | None = None) -> dict[str, Any]:
    """Return the rows of all actors by id, or the row of one actor; {} for an unknown id."""
    process = require_session()
    by_index = {row["Index"]: row for row in nodes()}
    found = {row["actor"].hex(): _actor_row(row, by_index) for row in process.gcs.call("actors")}
    if actor_id is not None:
        return found.get(actor_id if isinstance(actor_id, str) else actor_id.hex(), {})
    return found


def node_ids() -> list[str]:
    """Return the node resources (`node:<address>`) of the live nodes."""
    return [
        name
        for row in nodes()
        if row["Alive"]
        for name in row["Resources"]
        if name.startswith("node:") and name != "node:__internal_head__"
    ]


def workers() -> dict[str, dict[str, str]]:
    """Return the living workers by id."""
    return {
        row.worker_id: {"node_ip_address": row.ip, "plasma_store_socket": ""}
        for row in list_workers(limit=_ALL_ROWS)
        if row.is_alive and row.worker_type == "WORKER"
    }


def jobs() -> list[dict[str, Any]]:
    """Return one row for each job that can be queried."""
    return [
        {
            "JobID": row.job_id,
            "DriverIPAddress": (row.driver_info or {}).get("node_ip_address", ""),
            "DriverPid": int((row.driver_info or {}).get("pid") or 0),
            "Timestamp": 0,
            "StartTime": row.start_time or 0,
            "EndTime": row.end_time or 0,
            "IsDead": row.status in ("STOPPED", "SUCCEEDED", "FAILED"),
            "Entrypoint": row.entrypoint,
        }
        for row in list_jobs(limit=_ALL_ROWS)
    ]


def next_job_id() -> JobID:
    """Return a job id that no call has returned before."""
    number = max((JobID.from_hex(row["JobID"]).int() for row in jobs() if row["JobID"]), default=0) + 1
    while _internal_kv_put(f"{number}", b"", overwrite=False, namespace="__job_ids"):
        number += 1
    return JobID.from_int(number)


def current_node_id() -> str:
    """Return the resource that only this node has, `node:<address>`."""
    return f"{NODE_ID_PREFIX}{node_ip_address()}"


class GlobalState:
    """Ray's object with the same tables as methods."""

    def _check_connected(self) -> None:
        require_session()

    _really_init_global_state = _check_connected

    def _initialize_global_state(self, gcs_options: Any = None) -> None:
        require_session()

    def disconnect(self) -> None:
        """No effect."""

    node_table = staticmethod(nodes)
    job_table = staticmethod(jobs)
    workers = staticmethod(workers)
    next_job_id = staticmethod(next_job_id)
    get_cluster_config = staticmethod(get_cluster_config)
    get_max_resources_from_cluster_config = staticmethod(get_max_resources_from_cluster_config)
    cluster_resources = staticmethod(cluster_resources)
    available_resources = staticmethod(available_resources)
    available_resources_per_node = _available_resources_per_node = staticmethod(available_resources_per_node)
    total_resources_per_node = _total_resources_per_node = staticmethod(total_resources_per_node)

    def get_node(self, node_id: str) -> dict[str, Any] | None:
        """Return the row of one node; None for an unknown id."""
        return next((row for row in nodes() if row["NodeID"] == node_id), None)

    def get_draining_nodes(self) -> dict[str, int]:
        """Return the nodes that are about to leave, with the time in ms at which they do; 0: that is not known.

        All nodes, while the job drains; those that Slurm is to give to no other job, from a while after the first call
        on.
        """
        found: dict[str, int] = require_session().gcs.call("draining_nodes")
        return found

    def _live_node_ids(self) -> set[str]:
        return {row["NodeID"] for row in nodes() if row["Alive"]}

    def actor_table(self, actor_id: str | None = None, **_: Any) -> dict[str, Any]:
        """Return the rows of all actors, or of one, as `actors()`."""
        return actors(actor_id)

    def placement_group_table(self, placement_group_id: Any = None) -> dict[str, Any]:
        """Return the row of one placement group, or all rows by id."""
        if placement_group_id is None:
            return placement_group_table()
        return placement_group_table(PlacementGroupID(_bytes(placement_group_id)))

    @property
    def global_state_accessor(self) -> Any:
        """This object; None outside a job, as in Ray."""
        return self if current.process is not None else None


state = GlobalState()


def status_by_node() -> dict[str, dict[str, Any]]:
    """Return rows with the "total" and "available" resources of the live nodes by node id."""
    process = require_session()
    ids = {row["Index"]: row["NodeID"] for row in process.gcs.nodes()}
    return {ids[row["index"]]: row for row in process.gcs.call("status")["nodes"] if row["index"] in ids}


def _actor_row(row: dict[str, Any], by_index: dict[int, dict[str, Any]]) -> dict[str, Any]:
    node = by_index.get(row["node"], {})
    return {
        "ActorID": row["actor"].hex(),
        "ActorClassName": row["class_name"],
        "IsDetached": row["detached"],
        "Name": row["name"],
        "RayNamespace": row["namespace"],
        "JobID": job_of_actor(row),
        "Address": {"IPAddress": node.get("NodeManagerAddress", ""), "Port": 0, "NodeID": node.get("NodeID", "")},
        "OwnerAddress": {"WorkerID": row["owner"].hex() if row["owner"] else ""},
        "State": row["state"],
        "NumRestarts": row["restarts"],
        "DeathCause": row["reason"],
        "Worker": show_proc(row["worker"]) if row["worker"] else "",
    }


def _bytes(ident: Any) -> bytes:
    return bytes.fromhex(ident) if isinstance(ident, str) else bytes(ident)
