"""Ray Serve's HTTP servers and ports, for processes of this user alone."""

from __future__ import annotations

import asyncio
import functools
import hmac
import importlib
import inspect
import ipaddress
import logging
import os
import socket
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import quote

from hpcray.api.session import require_session
from hpcray.compat.names.raylet import job_secret
from hpcray.compat.names.utils import build_address
from hpcray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from hpcray.launch.tcp_peers import Address, RefusalLog, is_own_peer, refuse_strangers, sum_up_refusals
from hpcray.platform.private_files import write_private_file
from hpcray.platform.sockets import bind_private, node_ip_address

logger = logging.getLogger("ray.serve")

UNIX = "unix"
"""The host that stands for a Unix socket of each node."""
TOKEN_VARIABLE = "HPCRAY_SERVE_TOKEN"
"""1: `token` is True where `http_options` do not say."""
TOKEN_HEADER = "X-Serve-Token"
"""Header of a request that shows the token; `Authorization: Bearer` is another one."""

_SPACE = "hpcray-serve-http"


def socket_path(port: int) -> str:
    """Return the path of the Unix socket at which this node's server listens."""
    return os.path.join(require_session().place.session_dir, f"http-{port}.s")


def token_path(port: int) -> str:
    """Return the path of the file with the token, on this node."""
    return os.path.join(require_session().place.session_dir, f"http-{port}.token")


def url_of(options: Any, url: str) -> str:
    """Return the address of Serve on this node, in place of what Ray makes of the host "unix"."""
    if options.host != UNIX:
        return url
    return f"http+unix://{quote(socket_path(options.port), safe='')}{options.root_path}"


async def start(
    start_over_tcp: Any, module: ModuleType, app: Any, options: Any, *, event_loop: Any, **further: Any
) -> tuple[asyncio.Task[None], Any]:
    """Start the HTTP server of this process; as `start_asgi_http_server` of Ray, which is `start_over_tcp`.

    Args:
        module: `ray.serve._private.http_util`.

    Returns:
        A task that ends with the server, and the server.
    """
    sum_up_refusals(logger)
    if options.token:
        app = RequireToken(app, job_secret("http-token"))
        write_private_file(token_path(options.port), f"{TOKEN_HEADER}: {app.token}\n".encode())
    if options.host == UNIX:
        task, server = _start_over_unix(module, app, options, event_loop)
        place = f"the Unix socket {server.config.uds}"
    else:
        task, server = await start_over_tcp(app, options, event_loop=event_loop, **further)
        server.config.is_for_all = options.token
        place = build_address(options.host, options.port)
    if options.token:
        place += f"; requests need the header in {token_path(options.port)}"
    if options.token or options.host == UNIX:
        _internal_kv_put(_server_key(require_session().node, options.port), place, namespace=_SPACE)
        logger.info("HTTP is served at %s", place)
    return task, server


def places(options: Any, nodes: dict[str, int]) -> dict[str, str]:
    """Return where the nodes serve HTTP, by node id, where it is not just at a port.

    Args:
        options: Serve's HTTP options.
        nodes: indices of the nodes that have a proxy, by their ids.
    """
    if options is None or not (options.token or options.host == UNIX):
        return {}
    found = {
        ident: _internal_kv_get(_server_key(node, options.port), namespace=_SPACE) for ident, node in nodes.items()
    }
    return {ident: place.decode() for ident, place in found.items() if place is not None}


def _server_key(node: int, port: int) -> str:
    return f"{node}:{port}"


def _start_over_unix(module: Any, app: Any, options: Any, loop: Any) -> tuple[asyncio.Task[None], Any]:
    path = socket_path(options.port)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if os.path.lexists(path):
        os.unlink(path)  # of a proxy that has ended: Serve has one of a port on a node
    bind_private(sock, path)
    logging.getLogger("uvicorn.error").level = logging.CRITICAL  # else uvicorn logs each message of a request
    app = module._apply_middlewares(app, options.middlewares)
    secure = {name: value for name, value in options.model_dump().items() if name.startswith("ssl_") and value}
    config = module.uvicorn.Config(
        lambda: app, factory=True, uds=path, root_path=options.root_path, loop=loop, lifespan="off", access_log=False,
        timeout_keep_alive=options.keep_alive_timeout_s, log_level=None, log_config=None, **secure,
    )  # fmt: skip
    server = module.uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # this is not the main thread
    return loop.create_task(server.serve(sockets=[sock])), server


class RequireToken:
    """An ASGI application that lets requests through to another one if they show a token.

    Others are answered with 401 before their body is read; a WebSocket is refused.
    """

    def __init__(self, app: Any, token: str) -> None:
        self._app = app
        self.token = token
        name = TOKEN_HEADER.lower().encode()
        self._wanted = {name: token.encode(), b"authorization": f"Bearer {token}".encode()}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan" or self._is_shown(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "no token"})
        else:
            text = f"this server answers requests with its token in the header {TOKEN_HEADER}; see `serve status`\n"
            headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": text.encode()})

    def _is_shown(self, headers: Any) -> bool:
        # Every header is compared, and each in a time that does not depend on its content.
        shown = [hmac.compare_digest(value, self._wanted[name]) for name, value in headers if name in self._wanted]
        return any(shown)


# ------------------------------------------------------------ serve ports
# The ports of Ray Serve: on the loopback interface, and for processes of this user alone.
#
# Ray's modules open them; the functions here amend these modules when they are imported (`hpcray.compat.finder`). A
# host that the program names itself, other than loopback, is used as it is and open to all who reach it, or to those
# who have the job's token (`hpcray.compat.serve`).


_LOOPBACK = "127.0.0.1"


def config(module: ModuleType) -> None:
    """Amend `ray.serve.config`: HTTP options have a field `token`."""

    class HTTPOptions(module.HTTPOptions):  # type: ignore[misc, name-defined]
        __doc__ = module.HTTPOptions.__doc__
        token: bool = os.environ.get(TOKEN_VARIABLE, "0") == "1"

    HTTPOptions.__module__, HTTPOptions.__qualname__ = module.__name__, "HTTPOptions"  # as a pickle names it
    module.HTTPOptions = HTTPOptions  # type: ignore[attr-defined]


def client(module: ModuleType) -> None:
    """Amend `ray.serve._private.client`: it names the Unix socket where an application is served at one."""

    class ServeControllerClient(module.ServeControllerClient):  # type: ignore[misc, name-defined]
        def __init__(self, controller: Any) -> None:
            super().__init__(controller)
            self._root_url: str = url_of(self._http_config, super().root_url)

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
        start, module.start_asgi_http_server, module
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
        found = places(client.http_config, nodes) if client is not None else {}
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
