"""The server of the API: on loopback, or, where that is asked for, on an address of this node."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import shlex
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from hpcray.dashboard.access import bearer, is_loopback_host
from hpcray.job_submission import JobSubmissionClient
from hpcray.job_submission.cluster_address import ADDRESS_VARIABLES
from hpcray.launch.tcp_peers import refuse_strangers
from hpcray.platform.private_files import CLOSED, read_private_file, write_private_file
from hpcray.platform.session_directory import read_session
from hpcray.ray_api.app import RayApi, UploadedPackages
from hpcray.ray_start.surroundings import addresses_of, is_loopback, is_own_address
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.state import attached

# ------------------------------------------------------------ gate
# The gate of the API: requests pass that show the token, to a name of this server, and from no page of a browser.

_TOKEN_HEADERS = (b"authorization", b"x-ray-authorization")


class Gate:
    """Answers requests that may not pass, before a byte of their body is read; the others go on to the API.

    Args:
        api: what is behind the gate. token: that requests have to show.
        names: by which requests may call this server besides those of loopback, in lower case.
    """

    def __init__(self, api: ASGIApp, token: str, names: Collection[str] = ()) -> None:
        self._api = api
        self._digest = _digest(token)
        self._names = frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] not in ("http", "websocket"):
            return  # no lifespan
        status, refusal = self._refusal(scope)
        if not refusal:
            await self._api(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(PlainTextResponse(refusal, status))
        else:
            # The body was not read, and is not going to be: the connection cannot serve another request.
            answer = PlainTextResponse(refusal, status, {"connection": "close"})
            await answer(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str]:
        headers: dict[bytes, str] = {name: text.decode("latin-1") for name, text in scope["headers"]}
        host = headers.get(b"host", "")
        if not is_loopback_host(host) and _name_of(host) not in self._names:
            return 403, f"Forbidden: {host!r} is no name of this server"
        if b"origin" in headers or headers.get(b"sec-fetch-site", "none") != "none":
            return 403, "Forbidden: this API is not for pages in browsers"
        given = next((headers[name] for name in _TOKEN_HEADERS if name in headers), "")
        if not given:
            return 401, "Unauthorized: Missing authentication token"
        if not hmac.compare_digest(_digest(bearer(given)), self._digest):
            return 403, "Forbidden: Invalid authentication token"
        return 200, ""


def _name_of(host: str) -> str:
    """The header `Host` without the port, in lower case; IPv6 in brackets."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()


def _digest(token: str) -> bytes:
    """A hash, which is compared instead of the token: how long that takes says nothing of the token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


# ------------------------------------------------------------ token
# The token that requests to the API show: the one that Ray's clients of this user send, or a new one.


TOKEN, TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
"""Variables of Ray's clients: the token, and the file that holds it."""
_DEFAULT_PATH = "~/.ray/auth_token"
_BYTES = 32
_SHORTEST = 16  # characters


class TokenError(ValueError):
    """The token that Ray's clients would send cannot be used."""


@dataclass(frozen=True)
class ApiToken:
    """A token.

    Attributes:
        value: the token. path: of the file that holds it; "" where it comes from the variable RAY_AUTH_TOKEN.
        is_new: whether the file was made for this server, and goes with it.
    """

    value: str
    path: str
    is_new: bool = False

    def exports(self) -> dict[str, str]:
        """Return the variables by which Ray's clients find it, beside the mode."""
        return {"RAY_AUTH_MODE": "token", **({TOKEN_PATH: self.path} if self.path else {})}


def api_token(environ: Mapping[str, str], path_of_new: str) -> ApiToken:
    """Return the token that Ray's clients of this user send: RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, or
    ~/.ray/auth_token, in this order. Where there is none, make one.

    Args:
        environ: with the variables of Ray's clients. path_of_new: the file for a new one.

    Raises:
        TokenError: it is too short to be a secret. OSError: a file that is named cannot be read.
        UntrustedPathError: other users can read or exchange the file.
    """
    if given := environ.get(TOKEN, "").strip():
        return ApiToken(_checked(given, TOKEN), "")
    named = environ.get(TOKEN_PATH, "")
    path = os.path.abspath(os.path.expanduser(named or _DEFAULT_PATH))
    if named or os.path.lexists(path):
        text = read_private_file(path, excess=CLOSED, ancestors=True).decode(errors="replace").strip()
        return ApiToken(_checked(text, path), path)
    made = secrets.token_hex(_BYTES)
    write_private_file(path_of_new, made.encode())
    return ApiToken(made, path_of_new, is_new=True)


def _checked(token: str, where: str) -> str:
    if len(token) < _SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise TokenError(
            f"{where} holds no token: {len(token)} characters; hint: at least {_SHORTEST} random ones, as of "
            "python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return token


# ------------------------------------------------------------ server

PORT = 8265
"""Port of the dashboard of Ray, whose clients look for the API there."""
LOOPBACK = "127.0.0.1"
_END_TIMEOUT = 5.0  # seconds
logger = logging.getLogger("hpcray.ray_api")


@dataclass(frozen=True)
class ApiAddress:
    """Where the server listens.

    Attributes:
        host: an address of this host. port: 0 for one that is free. cert, key: of TLS; "" for none.
    """

    host: str = LOOPBACK
    port: int = PORT
    cert: str = ""
    key: str = ""

    @property
    def is_loopback(self) -> bool:
        """True if only processes of this host reach it."""
        return is_loopback(self.host)

    def listen(self) -> socket.socket:
        """Listen there.

        Raises:
            ValueError: this is no address of this host, or all of them. OSError: another process has the port.
        """
        found = addresses_of(self.host)
        own = [address for address in found if is_own_address(address)]
        if not own or own[0] in ("0.0.0.0", "::"):
            raise ValueError(
                f"{self.host} is not one address of this host; hint: {LOOPBACK}, or an address that ip -br addr shows"
            )
        family = socket.AF_INET6 if ":" in own[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((own[0], self.port))
            sock.listen()  # before anybody is told of it
        except BaseException:
            sock.close()
            raise
        return sock

    def url(self, sock: socket.socket) -> str:
        """Return the address of the API for clients."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.cert else 'http'}://{host}:{sock.getsockname()[1]}"

    def names(self, sock: socket.socket) -> Collection[str]:
        """Return the names by which requests may call a server that is not on loopback."""
        if self.is_loopback:
            return ()
        host, address = socket.gethostname(), sock.getsockname()[0]
        known = {self.host, host, host.partition(".")[0], socket.getfqdn(), address}
        return {f"[{name}]" if ":" in name else name.lower() for name in known}


def path_beside(session_dir: str, sock: socket.socket, what: str) -> str:
    """Return the path in a session directory for something of one server, of which a node may have several."""
    return os.path.join(session_dir, f"ray-api-{sock.getsockname()[1]}-{what}")


@contextlib.contextmanager
def serving(process: CoreWorker, sock: socket.socket, place: ApiAddress, token: str) -> Iterator[None]:
    """Serve the API meanwhile, in a thread.

    Args:
        process: it is in the cluster, and is the process of this program. sock, place: where the server listens.
        token: that requests have to show.

    Raises:
        OSError, ssl.SSLError: the files of TLS cannot be used.
    """
    for name in ADDRESS_VARIABLES:
        os.environ.pop(name, None)  # they name this server, and would replace the cluster that it is for
    session_dir = process.place.session_dir
    with contextlib.closing(UploadedPackages(path_beside(session_dir, sock, "packages"))) as packages:
        api = RayApi(process, JobSubmissionClient(session_dir), packages, read_session(session_dir).session)
        config = uvicorn.Config(
            Gate(api.app, token, place.names(sock)), lifespan="off", access_log=False, log_config=None,
            timeout_graceful_shutdown=1, server_header=False, http="h11", ws="wsproto",
            ssl_certfile=place.cert or None, ssl_keyfile=place.key or None,
        )  # fmt: skip
        config.load()
        if config.ssl is not None:
            config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
        config.http_protocol_class = refuse_strangers(config.http_protocol_class, lambda: not place.is_loopback, logger)
        server = uvicorn.Server(config)  # in a thread that is not the main one it leaves signals alone
        thread = threading.Thread(target=server.run, args=([sock],), name="ray api", daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.should_exit = True
            thread.join(_END_TIMEOUT)


# ------------------------------------------------------------ beside a head of `ray start`
# A process of its own on the head's host, which ends with its node: HPCRAY_RAY_API=1 asks for it. What Ray's clients
# need is printed; then standard output is closed.
#     python -m hpcray.ray_api.server SESSION_DIRECTORY PORT


_LOOK = 0.5  # seconds


def exports_of(url: str, exports: dict[str, str]) -> Iterator[str]:
    """Yield the lines by which a shell's clients of Ray find a server."""
    yield f"Ray's REST API at {url}; for Ray's clients:"
    for name, text in {"RAY_API_SERVER_ADDRESS": url, **exports}.items():
        yield f"  export {name}={shlex.quote(text)}"


def serve(session_dir: str, port: int) -> None:
    """Serve the API until the node has ended, or a signal comes.

    Raises:
        OSError: the port is taken, or a file cannot be used. ValueError: the token cannot be used.
        ConnectionError: there is no such node.
    """
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: over.set())
    place = ApiAddress(port=port)
    with contextlib.closing(place.listen()) as sock, attached(session_dir) as process:
        token = api_token(os.environ, path_beside(session_dir, sock, "token"))
        try:
            with serving(process, sock, place, token.value):
                print(*exports_of(place.url(sock), token.exports()), sep="\n", flush=True)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                _wait(process, over)
        finally:
            if token.is_new:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(token.path)


def _wait(process: CoreWorker, over: threading.Event) -> None:
    while process.dead is None and not over.wait(_LOOK):
        pass


if __name__ == "__main__":
    try:
        serve(sys.argv[1], int(sys.argv[2]))
    except (OSError, ValueError) as error:
        print(f"no REST API of Ray's at port {sys.argv[2]}: {error}", flush=True)
        sys.exit(1)
