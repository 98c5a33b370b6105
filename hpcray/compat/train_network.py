"""Ray Train's connections between workers: on the loopback interface, where the job is on one host."""

from __future__ import annotations

import functools
import importlib
import os
import socket
from types import ModuleType
from typing import Any

from hpcray.api.runtime_context import nodes
from hpcray.platform.sockets import interface_of, node_ip_address

_GLOO = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "127.0.0.1"
_stores: list[Any] = []
"""PyTorch's stores that this process serves, to its end."""


def torch_config(module: ModuleType) -> None:
    """Amend `ray.train.torch.config`: where gloo and PyTorch's store listen.

    By itself gloo takes the interface that the host's name leads to, which no other node may reach; here it uses that
    of the node's address, or loopback. A variable GLOO_SOCKET_IFNAME is left as it is. PyTorch's store by itself takes
    all interfaces, and a port that was free a moment before.
    """
    setup: Any = module._setup_torch_process_group

    @functools.wraps(setup)
    def setup_process_group(*args: Any, **options: Any) -> Any:
        if _GLOO not in os.environ and (interface := "lo" if _on_one_host() else interface_of(node_ip_address())):
            os.environ[_GLOO] = interface
        return setup(*args, **options)

    module._setup_torch_process_group = setup_process_group  # type: ignore[attr-defined]
    module.get_address_and_port = open_store  # type: ignore[attr-defined]


def open_store() -> tuple[str, int]:
    """Start PyTorch's store in this process, the worker of rank 0, and return its address and port.

    `init_process_group` finds it: one process has one multi-tenant store at a port. So no other process can take the
    port between its choice and its use.
    """
    distributed: Any = importlib.import_module("torch.distributed")
    host = _LOOPBACK if _on_one_host() else node_ip_address()
    with socket.create_server((host, 0), backlog=socket.SOMAXCONN) as listener:
        port: int = listener.getsockname()[1]
        # Only PyTorch's older server takes a socket that listens already.
        store = distributed.TCPStore(
            host, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.fileno(),
            use_libuv=False,
        )  # fmt: skip
        listener.detach()
    _stores.append(store)
    return host, port


def _on_one_host() -> bool:
    return len({node["NodeManagerHostname"] for node in nodes() if node["Alive"]}) == 1
