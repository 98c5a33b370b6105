"""The ports of Ray Serve: on the loopback interface, and for processes of this user alone.

Ray's modules open them; the functions here amend these modules when they are imported (`hpcray.compat.finder`). A host
that the program names itself, other than loopback, is used as it is and open to all who reach it.
"""

from __future__ import annotations

import importlib
import inspect
import ipaddress
import logging
import socket
from types import ModuleType, SimpleNamespace
from typing import Any

from hpcray.platform.sockets import node_ip_address
from hpcray.platform.tcp_peers import Address, is_own_peer

logger = logging.getLogger("ray.serve")

_LOOPBACK = "127.0.0.1"


def http_util(module: ModuleType) -> None:
    """Amend `ray.serve._private.http_util`: its HTTP servers on loopback close connections of other users unread."""
    uvicorn: Any = importlib.import_module("uvicorn")

    class Config(uvicorn.Config):  # type: ignore[misc]
        http_protocol_class: Any

        def load(self) -> None:
            super().load()
            if _is_loopback(self.host):
                self.http_protocol_class = _for_own_user(self.http_protocol_class)

    module.uvicorn = SimpleNamespace(Config=Config, Server=uvicorn.Server)  # type: ignore[attr-defined]


def grpc_util(module: ModuleType) -> None:
    """Amend `ray.serve._private.grpc_util`: its gRPC servers refuse calls of other users."""
    start: Any = module.start_grpc_server

    async def start_grpc_server(service_handler_factory: Any, grpc_options: Any, **options: Any) -> Any:
        def factory(**of_method: Any) -> Any:
            return _own_calls(service_handler_factory(**of_method), (_LOOPBACK, grpc_options.port))

        return await start(factory, grpc_options, **options)

    module.start_grpc_server = start_grpc_server  # type: ignore[attr-defined]


def default_impl(module: ModuleType) -> None:
    """Amend `ray.serve._private.default_impl`: gRPC servers listen on loopback, where Ray's do on all interfaces."""

    def add_grpc_address(grpc_server: Any, server_address: str) -> None:
        grpc_server.add_insecure_port(f"{_LOOPBACK}:{server_address.rpartition(':')[2]}")

    module.add_grpc_address = add_grpc_address  # type: ignore[attr-defined]


def tls_utils(module: ModuleType) -> None:
    """Amend `ray._common.tls_utils`: a replica's gRPC server listens at the node's address, not on all interfaces."""
    add: Any = module.add_port_to_grpc_server

    def add_port_to_grpc_server(server: Any, address: str) -> Any:
        host, _, port = address.rpartition(":")
        return add(server, f"{node_ip_address()}:{port}" if host in ("[::]", "0.0.0.0") else address)

    module.add_port_to_grpc_server = add_port_to_grpc_server  # type: ignore[attr-defined]


def schema(module: ModuleType) -> None:
    """Amend `ray.serve.schema`: a config file without a host means loopback, as `serve.start()` does."""
    options: Any = module.HTTPOptionsSchema
    options.model_fields["host"].default = _LOOPBACK
    options.model_rebuild(force=True)
    config: Any = module.ServeDeploySchema
    config.model_fields["http_options"].default = options()
    config.model_rebuild(force=True)


def scripts(module: ModuleType) -> None:
    """Amend `ray.serve.scripts`: the config file that `serve build` writes names loopback, not all interfaces."""
    module.get_all_interfaces_ip = lambda: _LOOPBACK  # type: ignore[attr-defined]


def _is_loopback(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def _for_own_user(protocol_class: Any) -> Any:
    """A protocol of uvicorn that looks who connects, before it reads."""

    class OwnUser(protocol_class):  # type: ignore[misc]
        is_refused = False

        def connection_made(self, transport: Any) -> None:
            peer, here = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
            if peer and is_own_peer(peer[:2], here[:2]):
                # asyncio does so only for sockets that name the protocol; without it a small answer waits for 40 ms.
                transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                super().connection_made(transport)
                return
            self.is_refused = True
            transport.abort()
            logger.warning("refused a connection of another user to the HTTP port %s", here)

        def connection_lost(self, exc: Exception | None) -> None:
            if not self.is_refused:
                super().connection_lost(exc)

    return OwnUser


def _own_calls(handler: Any, here: Address) -> Any:
    """A handler of gRPC calls that refuses those of other users."""

    async def check(context: Any) -> None:
        host, _, port = context.peer().rpartition(":")  # "ipv4:127.0.0.1:54321"
        if not is_own_peer((host.partition(":")[2], int(port)), here):
            import grpc

            logger.warning("refused a call of another user to the gRPC port %s", here)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this server is for the user who started it")

    async def one(request: Any, context: Any) -> Any:
        await check(context)
        return await handler(request, context)

    async def stream(request: Any, context: Any) -> Any:
        await check(context)
        async for answer in handler(request, context):
            yield answer

    return stream if inspect.isasyncgenfunction(handler) else one
