"""`ray._private.state`: the tables of the GCS."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec

from hpcray.api.placement_group import PlacementGroupID, placement_group_table
from hpcray.api.runtime_context import available_resources, cluster_resources, nodes
from hpcray.api.session import require_session
from hpcray.common.ids import show_proc
from hpcray.compat.names.autoscaler import (
    get_cluster_config,
    get_max_resources_from_cluster_config,
    report_cluster_config,
)
from hpcray.compat.names.ids import JobID, NodeID
from hpcray.compat.names.ray_constants import NODE_ID_PREFIX
from hpcray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_exists,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)
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
            "Timestamp": row.end_time or row.start_time or 0,
            "StartTime": row.start_time or 0,
            "EndTime": row.end_time or 0,
            "IsDead": row.status in ("STOPPED", "SUCCEEDED", "FAILED"),
            "Entrypoint": row.entrypoint,
        }
        for row in list_jobs(limit=_ALL_ROWS, detail=True)
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


_starts: dict[str, int] = {}
"""When actors have started, by id: computed once, as two computations may differ by a millisecond."""


def _actor_row(row: dict[str, Any], by_index: dict[int, dict[str, Any]]) -> dict[str, Any]:
    node, now, ident = by_index.get(row["node"], {}), time.time(), row["actor"].hex()
    if ident not in _starts and row["started_for"] is not None:
        _starts[ident] = int((now - row["started_for"]) * 1000)
    start = _starts.get(ident, 0)
    end = 0 if row["dead_for"] is None else int((now - row["dead_for"]) * 1000)
    return {
        "ActorID": ident,
        "ActorClassName": row["class_name"],
        "IsDetached": row["detached"],
        "Name": row["name"],
        "RayNamespace": row["namespace"],
        "JobID": job_of_actor(row),
        "Address": {"IPAddress": node.get("NodeManagerAddress", ""), "Port": 0, "NodeID": node.get("NodeID", "")},
        "OwnerAddress": {"WorkerID": row["owner"].hex() if row["owner"] else ""},
        "State": row["state"],
        "NumRestarts": row["restarts"],
        "Timestamp": end or start,
        "StartTime": start,
        "EndTime": end,
        "DeathCause": row["reason"],
        "Pid": row["pid"],
        "Worker": show_proc(row["worker"]) if row["worker"] else "",
    }


def _bytes(ident: Any) -> bytes:
    return bytes.fromhex(ident) if isinstance(ident, str) else bytes(ident)


# ------------------------------------------------------------ gcs client
# `ray._raylet.GcsClient`: the tables of the head, in the form that Ray's libraries read.


ALIVE, DEAD = 0, 1
"""`GcsNodeInfo.state`."""


class GcsNodeInfo(msgspec.Struct):
    """One node. instance_id: always "", as no cloud made it."""

    node_id: bytes
    node_name: str
    node_manager_address: str
    node_manager_hostname: str
    state: int
    is_head_node: bool
    labels: dict[str, str]
    resources_total: dict[str, float]
    instance_id: str = ""


class ResourcesData(msgspec.Struct):
    """Total and free resources of one node."""

    node_id: bytes
    resources_available: dict[str, float]
    resources_total: dict[str, float]


class ResourceUsageBatchData(msgspec.Struct):
    """The resources of all live nodes."""

    batch: list[ResourcesData]


class GetAllResourceUsageReply(msgspec.Struct):
    """Answer of `get_all_resource_usage`."""

    resource_usage_data: ResourceUsageBatchData


class ClientOfGcs:
    """Client of the job that this process has joined.

    Args:
        address: without effect, as is the cluster's id.

    Attributes:
        address: what `init(address=...)` takes.
    """

    def __init__(self, address: str = "", cluster_id: Any = None) -> None:
        self.address = require_session().place.session_dir

    def report_cluster_config(self, serialized_cluster_config: bytes) -> None:
        """Make a `ClusterConfig` known to the job."""
        report_cluster_config(serialized_cluster_config)

    # ------------------------------------------------------------ nodes

    def get_all_node_info(self, timeout: Any = None) -> dict[NodeID, GcsNodeInfo]:
        """Return all nodes, dead ones too."""
        process = require_session()
        return {NodeID.from_hex(row["NodeID"]): _node_info(row, process.place.head) for row in process.gcs.nodes()}

    def get_draining_nodes(self, timeout: Any = None) -> dict[str, int]:
        """Return the draining nodes, as `ray._private.state.state.get_draining_nodes`."""
        return state.get_draining_nodes()

    def get_all_resource_usage(self, timeout: Any = None) -> GetAllResourceUsageReply:
        """Return the total and free resources of the live nodes."""
        batch = [
            ResourcesData(NodeID.from_hex(node).binary(), dict(row["available"]), dict(row["total"]))
            for node, row in status_by_node().items()
        ]
        return GetAllResourceUsageReply(ResourceUsageBatchData(batch))

    def check_alive(self, node_ids: Iterable[bytes | NodeID], timeout: Any = None) -> list[bool]:
        """Return for each node whether it is alive; an unknown one is not."""
        alive = {info.node_id for info in self.get_all_node_info().values() if info.state == ALIVE}
        return [(node if isinstance(node, bytes) else node.binary()) in alive for node in node_ids]

    # ------------------------------------------------------------ key-value store

    def internal_kv_get(self, key: bytes, namespace: bytes | None = None, timeout: Any = None) -> bytes | None:
        return _internal_kv_get(key, namespace=namespace)

    def internal_kv_put(
        self, key: bytes, value: bytes, overwrite: bool = False, namespace: bytes | None = None, timeout: Any = None
    ) -> int:
        """Store a value. Returns the number of new keys, 0 or 1."""
        return int(not _internal_kv_put(key, value, overwrite, namespace=namespace))

    def internal_kv_del(
        self, key: bytes, del_by_prefix: bool = False, namespace: bytes | None = None, timeout: Any = None
    ) -> int:
        """Delete a key, or all that begin with it. Returns the number of deleted keys."""
        return _internal_kv_del(key, del_by_prefix=del_by_prefix, namespace=namespace)

    def internal_kv_exists(self, key: bytes, namespace: bytes | None = None, timeout: Any = None) -> bool:
        return _internal_kv_exists(key, namespace=namespace)

    def internal_kv_keys(self, prefix: bytes, namespace: bytes | None = None, timeout: Any = None) -> list[bytes]:
        """Return all keys that begin with `prefix`."""
        return _internal_kv_list(prefix, namespace=namespace)


GcsClient = ClientOfGcs


def _node_info(row: dict[str, Any], head: int) -> GcsNodeInfo:
    return GcsNodeInfo(
        node_id=NodeID.from_hex(row["NodeID"]).binary(),
        node_name=row["NodeName"],
        node_manager_address=row["NodeManagerAddress"],
        node_manager_hostname=row["NodeManagerHostname"],
        state=ALIVE if row["Alive"] else DEAD,
        is_head_node=row["Index"] == head,
        labels=dict(row["Labels"]),
        resources_total=dict(row["Resources"]),
    )
