"""`ray.core.generated.autoscaler_pb2`: which nodes a cluster may have.

A program that knows what its cluster may grow to can say so, and libraries read it
(`ray._private.state.state.get_max_resources_from_cluster_config()`).
"""

from __future__ import annotations

import sys

import msgspec

from hpcray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

_SPACE, _KEY = "__autoscaler", "__autoscaler_cluster_config"


class NodeGroupConfig(msgspec.Struct, kw_only=True):
    """Nodes of one kind: what each has, and how many there may be (max_count=-1: any number)."""

    resources: dict[str, int] = {}
    min_count: int = 0
    max_count: int = 0
    name: str = ""


class ClusterConfig(msgspec.Struct, kw_only=True):
    """Kinds of nodes, and limits of the whole cluster. The bytes that it becomes are not those of Ray."""

    min_resources: dict[str, int] = {}
    max_resources: dict[str, int] = {}
    node_group_configs: list[NodeGroupConfig] = []

    def SerializeToString(self) -> bytes:
        """Return the message as bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def FromString(cls, data: bytes) -> ClusterConfig:
        """Return the message that `SerializeToString` made into bytes.

        Raises:
            msgspec.DecodeError: the bytes are no such message.
        """
        return msgspec.msgpack.decode(data, type=cls)


def get_cluster_config() -> ClusterConfig | None:
    """Return the last config that was reported; None where there is none."""
    found = _internal_kv_get(_KEY, namespace=_SPACE)
    return ClusterConfig.FromString(found) if found is not None else None


def get_max_resources_from_cluster_config() -> dict[str, int] | None:
    """Return the most that the cluster may ever have of each resource; None where no kind of node is known."""
    config = get_cluster_config()
    names = {name for group in config.node_group_configs for name in group.resources} if config is not None else set()
    return {name: _most(config, name) for name in names} if config is not None and names else None


def _most(config: ClusterConfig, name: str) -> int:
    total = 0
    for group in config.node_group_configs:
        each, count = group.resources.get(name, 0), group.max_count
        if each and count:
            if -1 in (each, count):
                return sys.maxsize
            total += each * count
    return min(total, config.max_resources.get(name, sys.maxsize))


def report_cluster_config(serialized_cluster_config: bytes) -> None:
    """Make a `ClusterConfig` known to the job."""
    ClusterConfig.FromString(serialized_cluster_config)
    _internal_kv_put(_KEY, serialized_cluster_config, namespace=_SPACE)
