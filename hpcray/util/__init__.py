"""Helpers around the core API."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hpcray.api.named import list_named_actors
from hpcray.host.address import node_ip_address
from hpcray.util.placement_group import (
    get_current_placement_group,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

if TYPE_CHECKING:
    from hpcray.util.actor_group import ActorGroup
    from hpcray.util.actor_pool import ActorPool
    from hpcray.util.annotations import DeveloperAPI, PublicAPI
    from hpcray.util.check_serialize import inspect_serializability
    from hpcray.util.debug import disable_log_once_globally, enable_periodic_logging, log_once
    from hpcray.util.helpers import as_completed, map_unordered
    from hpcray.util.serialization import deregister_serializer, register_serializer

__all__ = [
    "ActorGroup",
    "ActorPool",
    "DeveloperAPI",
    "PublicAPI",
    "as_completed",
    "deregister_serializer",
    "disable_log_once_globally",
    "enable_periodic_logging",
    "get_current_placement_group",
    "get_node_ip_address",
    "get_placement_group",
    "inspect_serializability",
    "list_named_actors",
    "log_once",
    "map_unordered",
    "placement_group",
    "placement_group_table",
    "register_serializer",
    "remove_placement_group",
]

_WHERE = {
    "ActorGroup": "actor_group",
    "ActorPool": "actor_pool",
    "as_completed": "helpers",
    "deregister_serializer": "serialization",
    "disable_log_once_globally": "debug",
    "enable_periodic_logging": "debug",
    "log_once": "debug",
    "register_serializer": "serialization",
    "DeveloperAPI": "annotations",
    "PublicAPI": "annotations",
    "inspect_serializability": "check_serialize",
    "map_unordered": "helpers",
}
_MODULES = {
    *("accelerators", "annotations", "collective", "dask", "debug", "joblib", "metrics", "multiprocessing", "queue"),
    *("scheduling_strategies", "serialization", "state", "timer", *_WHERE.values()),
}


def __getattr__(name: str) -> Any:
    # Not before it is asked for: `import hpcray` is on the way of every worker and every command.
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_node_ip_address(address: str | None = None) -> str:
    """The IP address of this node, as other nodes see it.

    Args:
        address: "host:port" of a peer; the interface that leads there is chosen. No packet is sent.
    """
    return node_ip_address(address)
