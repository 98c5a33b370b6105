"""The HTTP servers of Ray Serve: at a TCP port, or at a Unix socket of each node; with or without a token.

`http_options={"host": "unix"}` puts the server of a node at the socket `http-<port>.s` of its session directory, which
no other user can enter. `http_options={"token": True}` has every request show the job's token, from any process; the
file `http-<port>.token` of the session directory has it, as a header. Both end with the session directory.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
from types import ModuleType
from typing import Any
from urllib.parse import quote

from hpcray.api.session import require_session
from hpcray.compat.names.authentication import job_secret
from hpcray.compat.names.network_utils import build_address
from hpcray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from hpcray.platform.private_files import write_private_file
from hpcray.platform.sockets import bind_private
from hpcray.platform.tcp_peers import sum_up_refusals

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
    return os.path.join(require_session().session_dir, f"http-{port}.s")


def token_path(port: int) -> str:
    """Return the path of the file with the token, on this node."""
    return os.path.join(require_session().session_dir, f"http-{port}.token")


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
