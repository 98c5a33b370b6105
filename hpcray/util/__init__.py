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
    from hpcray.util.check_serialize import inspect_serializability
    from hpcray.util.helpers import as_completed, map_unordered

__all__ = [
    "ActorGroup",
    "ActorPool",
    "as_completed",
    "get_current_placement_group",
    "get_node_ip_address",
    "get_placement_group",
    "inspect_serializability",
    "list_named_actors",
    "map_unordered",
    "placement_group",
    "placement_group_table",
    "remove_placement_group",
]

_WHERE = {
    "ActorGroup": "actor_group",
    "ActorPool": "actor_pool",
    "as_completed": "helpers",
    "inspect_serializability": "check_serialize",
    "map_unordered": "helpers",
}
_MODULES = {"accelerators", "dask", "joblib", "multiprocessing", "queue", "scheduling_strategies", *_WHERE.values()}


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
