"""HTTP servers of uvicorn that serve processes of this user alone."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any

from hpcray.platform.sockets import is_same_user
from hpcray.platform.tcp_peers import is_own_peer


def refuse_strangers(protocol_class: Any, is_for_all: Callable[[], bool], logger: logging.Logger) -> Any:
    """A protocol of uvicorn that looks who connects, before it reads.

    Args:
        protocol_class: the protocol.
        is_for_all: whether connections of other users are served too.
        logger: gets a line for each connection that was refused.
    """

    class Checked(protocol_class):  # type: ignore[misc]
        is_refused = False

        def connection_made(self, transport: Any) -> None:
            sock, here = transport.get_extra_info("socket"), transport.get_extra_info("sockname")
            if sock.family != socket.AF_UNIX:
                # asyncio does so only for sockets that name the protocol; without it a small answer waits for 40 ms.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if is_for_all() or _is_own(sock, transport.get_extra_info("peername"), here):
                super().connection_made(transport)
                return
            self.is_refused = True
            transport.abort()
            logger.warning("refused a connection to the HTTP port %s: another user's, or closed at once", here)

        def connection_lost(self, exc: Exception | None) -> None:
            if not self.is_refused:
                super().connection_lost(exc)

    return Checked


def _is_own(sock: Any, peer: Any, here: Any) -> bool:
    """True if a process of this user is at the other end of a connection within this host."""
    if sock.family == socket.AF_UNIX:
        return is_same_user(sock)
    return bool(peer) and is_own_peer(peer[:2], here[:2])
