"""The server of the API: on loopback, or, where that is asked for, on an address of this node."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import uvicorn

from hpcray.job_submission import JobSubmissionClient
from hpcray.job_submission.cluster_address import ADDRESS_VARIABLES
from hpcray.platform.session_directory import read_session
from hpcray.platform.tcp_peers import refuse_strangers
from hpcray.ray_api.app import RayApi
from hpcray.ray_api.gate import Gate, api_token
from hpcray.ray_api.packages import UploadedPackages
from hpcray.ray_start.surroundings import addresses_of, is_loopback, is_own_address
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.state import attached

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
    session_dir = process.session_dir
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
