"""The ports of Ray Serve: on the loopback interface, and for processes of this user alone.

Ray's modules open them; the functions here amend these modules when they are imported (`hpcray.compat.finder`). A host
that the program names itself, other than loopback, is used as it is and open to all who reach it, or to those who have
the job's token (`hpcray.compat.serve_http`).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import ipaddress
import logging
import os
from types import ModuleType, SimpleNamespace
from typing import Any

from hpcray.api.session import require_session
from hpcray.compat import serve_http
from hpcray.platform.sockets import node_ip_address
from hpcray.platform.tcp_peers import Address, RefusalLog, is_own_peer, refuse_strangers

logger = logging.getLogger("ray.serve")

_LOOPBACK = "127.0.0.1"


def config(module: ModuleType) -> None:
    """Amend `ray.serve.config`: HTTP options have a field `token`."""

    class HTTPOptions(module.HTTPOptions):  # type: ignore[misc, name-defined]
        __doc__ = module.HTTPOptions.__doc__
        token: bool = os.environ.get(serve_http.TOKEN_VARIABLE, "0") == "1"

    HTTPOptions.__module__, HTTPOptions.__qualname__ = module.__name__, "HTTPOptions"  # as a pickle names it
    module.HTTPOptions = HTTPOptions  # type: ignore[attr-defined]


def client(module: ModuleType) -> None:
    """Amend `ray.serve._private.client`: it names the Unix socket where an application is served at one."""

    class ServeControllerClient(module.ServeControllerClient):  # type: ignore[misc, name-defined]
        def __init__(self, controller: Any) -> None:
            super().__init__(controller)
            self._root_url: str = serve_http.url_of(self._http_config, super().root_url)

    module.ServeControllerClient = ServeControllerClient  # type: ignore[attr-defined]


def http_util(module: ModuleType) -> None:
    """Amend `ray.serve._private.http_util`: its HTTP servers close connections of other users unread.

    Those of Unix sockets and of loopback do, unless requests show a token.
    """
    uvicorn: Any = importlib.import_module("uvicorn")

    class Config(uvicorn.Config):  # type: ignore[misc]
        http_protocol_class: Any
        is_for_all = False

        def load(self) -> None:
            super().load()
            self.is_for_all |= self.uds is None and not _is_loopback(self.host)
            self.http_protocol_class = refuse_strangers(self.http_protocol_class, lambda: self.is_for_all, logger)

    module.uvicorn = SimpleNamespace(Config=Config, Server=uvicorn.Server)  # type: ignore[attr-defined]
    module.start_asgi_http_server = functools.partial(  # type: ignore[attr-defined]
        serve_http.start, module.start_asgi_http_server, module
    )


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
    default: Any = importlib.import_module("ray.serve.config").HTTPOptions()

    class HTTPOptionsSchema(module.HTTPOptionsSchema):  # type: ignore[misc, name-defined]
        __doc__ = module.HTTPOptionsSchema.__doc__
        host: str = default.host or _LOOPBACK
        token: bool = default.token

    HTTPOptionsSchema.__module__, HTTPOptionsSchema.__qualname__ = module.__name__, "HTTPOptionsSchema"
    module.HTTPOptionsSchema = HTTPOptionsSchema  # type: ignore[attr-defined]
    models: Any = module
    for model, kind in (
        (models.ServeDeploySchema, HTTPOptionsSchema),
        (models.ServeInstanceDetails, HTTPOptionsSchema | None),
    ):
        model.model_fields["http_options"].annotation = kind
        model.model_rebuild(force=True)
    models.ServeDeploySchema.model_fields["http_options"].default = HTTPOptionsSchema()
    models.ServeDeploySchema.model_rebuild(force=True)


def scripts(module: ModuleType) -> None:
    """Amend `ray.serve.scripts`: `serve build` writes the default host, and `serve status` shows Unix sockets."""
    host: Any = importlib.import_module("ray.serve.config").HTTPOptions().host
    module.get_all_interfaces_ip = lambda: host or _LOOPBACK  # type: ignore[attr-defined]
    plain: Any = module.asdict

    def asdict(status: Any) -> dict[str, Any]:
        shown: dict[str, Any] = plain(status)
        proxies = shown.get("proxies") or {}
        nodes = {row["NodeID"]: row["Index"] for row in require_session().gcs.nodes() if row["NodeID"] in proxies}
        client = importlib.import_module("ray.serve.context")._get_global_client(raise_if_no_controller_running=False)
        found = serve_http.places(client.http_config, nodes) if client is not None else {}
        return {**shown, **({"http": found} if found else {})}

    module.asdict = asdict  # type: ignore[attr-defined]


def _is_loopback(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def _own_calls(handler: Any, here: Address) -> Any:
    """A handler of gRPC calls that refuses those of other users."""
    refusals = RefusalLog(logger)

    async def check(context: Any) -> None:
        host, _, port = context.peer().rpartition(":")  # "ipv4:127.0.0.1:54321"
        if not is_own_peer((host.partition(":")[2], int(port)), here):
            import grpc

            refusals.note(f"refused a call of another user to the gRPC port {here}")
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this server is for the user who started it")

    async def one(request: Any, context: Any) -> Any:
        await check(context)
        return await handler(request, context)

    async def stream(request: Any, context: Any) -> Any:
        await check(context)
        async for answer in handler(request, context):
            yield answer

    return stream if inspect.isasyncgenfunction(handler) else one
