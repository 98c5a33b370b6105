"""Ray Train's connections between workers: on the loopback interface, where the job is on one host."""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from hpcray.api.runtime_context import nodes
from hpcray.platform.sockets import interface_of, node_ip_address

_GLOO = "GLOO_SOCKET_IFNAME"


def torch_config(module: ModuleType) -> None:
    """Amend `ray.train.torch.config`: gloo uses the interface of the node's address, or loopback.

    By itself gloo takes the one that the host's name leads to, which no other node may reach. A variable
    GLOO_SOCKET_IFNAME is left as it is.
    """
    setup: Any = module._setup_torch_process_group

    @functools.wraps(setup)
    def setup_process_group(*args: Any, **options: Any) -> Any:
        if _GLOO not in os.environ and (interface := _interface()):
            os.environ[_GLOO] = interface
        return setup(*args, **options)

    module._setup_torch_process_group = setup_process_group  # type: ignore[attr-defined]


def _interface() -> str | None:
    hosts = {node["NodeManagerHostname"] for node in nodes() if node["Alive"]}
    return "lo" if len(hosts) == 1 else interface_of(node_ip_address())
