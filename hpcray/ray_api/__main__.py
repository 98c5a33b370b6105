"""Ray's REST API beside a cluster of `ray start`, as HPCRAY_RAY_API=1 asks for it: a process of its own on the head's
host, which ends with its node.

    python -m hpcray.ray_api SESSION_DIRECTORY PORT

What Ray's clients need is printed; then standard output is closed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator

from hpcray.ray_api.gate import api_token
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.state import attached

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
        ConnectionError: there is no such node. ImportError: a package of the extra is missing.
    """
    from hpcray.ray_api.server import ApiAddress, path_beside, serving  # packages of the extra "observe"

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
    except (OSError, ValueError, ImportError) as error:
        hint = "; hint: pip install 'hpcray[observe]'" if isinstance(error, ImportError) else ""
        print(f"no REST API of Ray's at port {sys.argv[2]}: {error}{hint}", flush=True)
        sys.exit(1)
