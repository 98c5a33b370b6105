"""`ray._raylet.GcsClient`: the tables of the head, in the form that Ray's libraries read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from hpcray.api.session import require_session
from hpcray.compat.names.cluster_config import report_cluster_config
from hpcray.compat.names.ids import NodeID
from hpcray.compat.names.state import state, status_by_node
from hpcray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_exists,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)

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
        self.address = require_session().session_dir

    def report_cluster_config(self, serialized_cluster_config: bytes) -> None:
        """Make a `ClusterConfig` known to the job."""
        report_cluster_config(serialized_cluster_config)

    # ------------------------------------------------------------ nodes

    def get_all_node_info(self, timeout: Any = None) -> dict[NodeID, GcsNodeInfo]:
        """Return all nodes, dead ones too."""
        process = require_session()
        return {NodeID.from_hex(row["NodeID"]): _node_info(row, process.head) for row in process.gcs.nodes()}

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
