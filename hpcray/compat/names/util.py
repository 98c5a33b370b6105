"""What `ray.util` holds beside `hpcray.util`."""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "DeveloperAPI": "hpcray.compat.names.annotations",
    "PublicAPI": "hpcray.compat.names.annotations",
    "disable_log_once_globally": "hpcray.compat.names.debug",
    "enable_periodic_logging": "hpcray.compat.names.debug",
    "log_once": "hpcray.compat.names.debug",
    "deregister_serializer": "hpcray.util.serialization",
    "register_serializer": "hpcray.util.serialization",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        try:
            return getattr(importlib.import_module(_WHERE[name]), name)
        except ModuleNotFoundError:
            pass
    raise AttributeError(name)
