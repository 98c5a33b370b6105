"""What `ray` itself holds beside hpcray's API."""

from __future__ import annotations

import enum
import importlib
import logging
from typing import Any

from hpcray.compat.names.ids import (
    ActorClassID,
    ActorID,
    ClusterID,
    FunctionID,
    JobID,
    NodeID,
    PlacementGroupID,
    TaskID,
    UniqueID,
    WorkerID,
)

__all__ = [
    "LOCAL_MODE",
    "SCRIPT_MODE",
    "WORKER_MODE",
    "ActorClassID",
    "ActorID",
    "ClusterID",
    "FunctionID",
    "JobID",
    "Language",
    "NodeID",
    "PlacementGroupID",
    "TaskID",
    "UniqueID",
    "WorkerID",
    "logger",
]

SCRIPT_MODE, WORKER_MODE, LOCAL_MODE = 0, 1, 2

logger = logging.getLogger("ray")

# Where hpcray may keep what Ray has at the top.
_ELSEWHERE = {
    "LoggingConfig": ("hpcray.logging_config", "hpcray.runtime_env", "hpcray.api.logging"),
    "timeline": ("hpcray.timeline", "hpcray.util.timeline", "hpcray.state.timeline"),
    "state": ("hpcray.compat.names.private_state",),
}


class Language(enum.Enum):
    """Of workers; there are Python's only."""

    PYTHON = 0
    JAVA = 1
    CPP = 2


def __getattr__(name: str) -> Any:
    import hpcray

    if name in _ELSEWHERE and not hasattr(hpcray, name):
        for module in _ELSEWHERE[name]:
            try:
                found = importlib.import_module(module)
            except ModuleNotFoundError:
                continue
            if name == "state":
                return found.state
            if hasattr(found, name):
                return getattr(found, name)
    raise AttributeError(name)
