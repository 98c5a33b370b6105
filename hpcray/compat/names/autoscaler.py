"""`ray.autoscaler.sdk` and `ray.core.generated.autoscaler_pb2`: what a program says of the room that it needs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hpcray.common.labels import selector_problem
from hpcray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

_SPACE, _KEY = "__autoscaler", "__autoscaler_resource_requests"


def request_resources(
    num_cpus: int | None = None,
    bundles: Sequence[Mapping[str, float]] | None = None,
    bundle_label_selectors: Sequence[Mapping[str, str]] | None = None,
) -> None:
    """Have the autoscaler start nodes until the job has room for all of this, and keep them.

    It counts whole nodes, whatever runs on them: what is busy need not be there twice. Each call replaces the one
    before; a call without arguments takes it back. A job without an autoscaler (`max_nodes`) gets no nodes.

    Args:
        num_cpus: so many times one CPU.
        bundles: resources; each bundle must fit on one node.
        bundle_label_selectors: for each bundle the labels of its node.

    Raises:
        TypeError: the number or a bundle is of another type.
        ValueError: the selectors are not as many as the bundles, or one is not valid.
    """
    if num_cpus is not None and not isinstance(num_cpus, int):
        raise TypeError("num_cpus should be of type int.")
    if bundles is not None and not isinstance(bundles, list):
        raise TypeError("bundles should be of type List")
    for bundle in bundles or ():
        if not isinstance(bundle, dict):
            raise TypeError("each bundle should be a Dict.")
        for key, value in bundle.items():
            if not isinstance(key, str):
                raise TypeError("each bundle key should be str.")
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError("each bundle value should be a number (int or float).")
    if bundle_label_selectors is not None:
        if bundles is None:
            raise ValueError("`bundles` must be provided when `bundle_label_selectors` is specified.")
        if len(bundle_label_selectors) != len(bundles):
            raise ValueError("`bundle_label_selector` must be a list with length equal to the number of bundles.")
        for selector in bundle_label_selectors:
            _check_selector(selector)
    selectors = bundle_label_selectors or [{} for _ in bundles or ()]
    wanted = [[{"CPU": 1}, {}]] * (num_cpus or 0) + [list(pair) for pair in zip(bundles or (), selectors, strict=True)]
    _internal_kv_put(_KEY, msgspec.msgpack.encode(wanted), namespace=_SPACE)


def _check_selector(selector: Any) -> None:
    problem = selector_problem(selector)
    if problem:
        raise ValueError(f"Invalid label selector provided in bundle_label_selectors list. Detailed error: '{problem}'")


# ------------------------------------------------------------ cluster config
# `ray.core.generated.autoscaler_pb2`: which nodes a cluster may have.
#
# A program that knows what its cluster may grow to can say so, and libraries read it
# (`ray._private.state.state.get_max_resources_from_cluster_config()`).


_CONFIG_KEY = "__autoscaler_cluster_config"


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
    found = _internal_kv_get(_CONFIG_KEY, namespace=_SPACE)
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
    _internal_kv_put(_CONFIG_KEY, serialized_cluster_config, namespace=_SPACE)
