"""What `init` returns: where the session is."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from hpcray.host.address import node_ip_address
from hpcray.runtime.process import Process

RAY_VERSION = "2.60.0"
"""The version of Ray whose names, defaults and messages hpcray follows."""


class ClientContext(Mapping[str, Any]):
    """Where the session is. Usable as a context manager that shuts down at its end.

    Attributes:
        address_info: addresses and directories by Ray's names; the context can be read like this dict too.
        dashboard_url: "", there is none.
        python_version, ray_version, ray_commit: what runs.
    """

    def __init__(self, process: Process) -> None:
        self.dashboard_url = ""
        self.python_version = "{}.{}.{}".format(*sys.version_info[:3])
        self.ray_version = RAY_VERSION
        self.ray_commit = ""
        address = node_ip_address()
        self.address_info: dict[str, Any] = {
            "node_ip_address": address,
            "raylet_ip_address": address,
            "redis_address": None,
            "object_store_address": None,
            "raylet_socket_name": os.path.join(process.session_dir, "r.s"),
            "webui_url": "",
            "session_dir": process.session_dir,
            "metrics_export_port": 0,
            "gcs_address": process.session_dir,
            "address": process.session_dir,
            "dashboard_agent_listen_port": 0,
            "node_id": process.node_id,
        }

    def __getitem__(self, key: str) -> Any:
        return self.address_info[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.address_info)

    def __len__(self) -> int:
        return len(self.address_info)

    def __enter__(self) -> ClientContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    def disconnect(self) -> None:
        """Shut down."""
        from hpcray.api.session import shutdown  # which needs this module

        shutdown()

    def __repr__(self) -> str:
        return f"ClientContext(session={self.address_info['session_dir']!r})"
