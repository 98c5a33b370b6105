"""A question to the head of a cluster, which only a living one answers. A process of its own asks it, and loads UCX."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial

from hpcray.common.exceptions import StartupError
from hpcray.platform.process_control import module_line

_TIMEOUT = 5.0
_CHECK = 0.02


def command(path: str) -> list[str]:
    """The command that asks the head whose join token is in a file; it succeeds if there is an answer."""
    return module_line("hpcray.ray_start.challenge", path)


def answers(path: str) -> bool:
    """True if the head whose join token is in a file answers a challenge, which proves that it knows the secret."""
    try:
        done = subprocess.run(
            command(path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=3 * _TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _ask(path: str) -> bool:
    import os
    import socket

    from hpcray.core.gcs.handshake import NONCE_BYTES, HandshakeInitiator, JoinRequest, link_key
    from hpcray.runtime.node.join_token import read_join_token
    from hpcray.runtime.node.joining import versions
    from hpcray.transport.base import TransportError
    from hpcray.transport.ucx_control import UcxControl
    from hpcray.transport.ucx_engine import UcxEngine

    try:
        token = read_join_token(path)
        engine = UcxEngine(0, token.secret, token.one_host)
        control = UcxControl(engine, partial(link_key, token.secret))
        host = socket.gethostname()
        request = JoinRequest(*versions(), os.urandom(NONCE_BYTES), engine.address(), host, 1)
        initiator = HandshakeInitiator(token.secret, request)
        control.send_handshake(token.address, token.host == host, initiator.message)
        deadline = time.monotonic() + _TIMEOUT
        while time.monotonic() < deadline and not control.fails_to_reach():
            control.poll()
            if any(initiator.receive(message) is not None for message in control.take_handshakes()):
                return True
            time.sleep(_CHECK)
    except (OSError, StartupError, TransportError):
        return False
    return False


if __name__ == "__main__":
    import os

    os._exit(0 if _ask(sys.argv[1]) else 1)  # UCX would wait for the head at its end
