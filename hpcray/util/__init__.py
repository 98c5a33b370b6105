"""Utilities on top of the core API, by Ray's names."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hpcray.api.actor import list_named_actors
from hpcray.api.session import start_hooks as _start_hooks
from hpcray.platform.sockets import node_ip_address
from hpcray.util.placement_group import (
    get_current_placement_group,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcray.runtime.core_worker.core_worker import CoreWorker
    from hpcray.util.actor_pool import ActorGroup, ActorPool
    from hpcray.util.annotations import DeveloperAPI, PublicAPI
    from hpcray.util.debug import disable_log_once_globally, enable_periodic_logging, log_once
    from hpcray.util.helpers import as_completed, map_unordered, rank_order
    from hpcray.util.serialization import deregister_serializer, inspect_serializability, register_serializer

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
    "rank_order",
    "register_serializer",
    "remove_placement_group",
]

_WHERE = {
    "ActorGroup": "actor_pool",
    "ActorPool": "actor_pool",
    "DeveloperAPI": "annotations",
    "PublicAPI": "annotations",
    "as_completed": "helpers",
    "deregister_serializer": "serialization",
    "disable_log_once_globally": "debug",
    "enable_periodic_logging": "debug",
    "inspect_serializability": "serialization",
    "log_once": "debug",
    "map_unordered": "helpers",
    "rank_order": "helpers",
    "register_serializer": "serialization",
}
_ALIASES = {"actor_group": "actor_pool", "check_serialize": "serialization", "timer": "debug"}
"""Ray's modules whose names are in another module here."""
_MODULES = {
    *(
        "accelerators",
        "collective",
        "dask",
        "joblib",
        "metrics",
        "multiprocessing",
        "queue",
        "scheduling_strategies",
    ),
    *("state", "tracing", *_WHERE.values(), *_ALIASES),
}
_OTLP_HOOK = "hpcray.util.tracing.tracing_helper:set_up"


class _AliasModule(ModuleType):
    """A module whose names are those of another module, which is imported at the first use."""

    def __init__(self, name: str, target: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self._target = target

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # what walks through sys.modules reads such names
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(self._target), name)

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(self._target))


_LIBRARIES = ("air", "data", "rllib", "serve", "tune")


class _NoLibrary:
    """Says of `import hpcray.tune` and `from hpcray import tune` where Ray's libraries are. The last finder."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raise an ImportError for such a module."""
        if name.startswith("hpcray.") and name.partition(".")[2] in _LIBRARIES:
            library = name.partition(".")[2]
            raise ImportError(
                f"hpcray has no module {library!r}: it is Ray's own; hint: `hpcray-launch --as-ray` runs programs that "
                f"say `from ray import {library}` (docs/how-to/ray-libraries.md)",
                name=name,
            )


sys.meta_path.append(_NoLibrary)

for _alias, _target in _ALIASES.items():
    sys.modules[f"{__name__}.{_alias}"] = _AliasModule(f"{__name__}.{_alias}", f"{__name__}.{_target}")


def __getattr__(name: str) -> Any:
    # Imported at the first use, since every worker and every command imports `hpcray`.
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _start_tracing(process: CoreWorker, settings: Mapping[str, Any]) -> None:
    """Open spans in a driver whose `init`, or whose setting `trace`, asks for it."""
    if hook := settings.get("_tracing_startup_hook") or (_OTLP_HOOK if process.config.trace else ""):
        from hpcray.util.tracing.tracing_helper import start  # loads OpenTelemetry

        start(hook)


_start_hooks.append(_start_tracing)


def get_node_ip_address(address: str | None = None) -> str:
    """Return the IP address of this node that other nodes connect to.

    Args:
        address: "host:port" of a peer; selects the interface with the route to it. No packet is sent.
    """
    return node_ip_address(address)
