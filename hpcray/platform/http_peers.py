"""HTTP servers of uvicorn that serve processes of this user alone."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

from hpcray.platform.sockets import is_same_user
from hpcray.platform.tcp_peers import is_own_peer

_INTERVAL = 60.0
"""Seconds between two lines about the same kind of refusal."""


class RefusalLog:
    """Refused connections in the log: the first one, then a line a minute with their number, which others choose.

    Args:
        logger: gets the lines.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._counts: dict[str, int] = {}
        self._due: dict[str, float] = {}

    def note(self, text: str) -> None:
        """One more of this kind."""
        count = self._counts[text] = self._counts.get(text, 0) + 1
        now = time.monotonic()
        if now < self._due.get(text, 0.0):
            return
        self._due[text] = now + _INTERVAL
        self._counts[text] = 0
        self._logger.warning("%s%s", text, f" ({count} since the last line)" if count > 1 else "")

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception handler of an event loop: where no descriptor is left for a connection, a line is enough."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            self.note(f"no connection can be accepted now: {error.strerror}; it is tried again; hint: ulimit -n")
        else:
            loop.default_exception_handler(context)


def sum_up_refusals(logger: logging.Logger) -> None:
    """Have the running event loop report connections that it has no descriptor for as `RefusalLog` does."""
    loop = asyncio.get_running_loop()
    if loop.get_exception_handler() is None:
        loop.set_exception_handler(RefusalLog(logger).handle)


def refuse_strangers(protocol_class: Any, is_for_all: Callable[[], bool], logger: logging.Logger) -> Any:
    """A protocol of uvicorn that looks who connects, before it reads.

    Args:
        protocol_class: the protocol.
        is_for_all: whether connections of other users are served too.
        logger: gets lines about connections that were refused.
    """
    log = RefusalLog(logger)

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
            log.note(f"refused a connection to the HTTP port {here}: another user's, or closed at once")

        def connection_lost(self, exc: Exception | None) -> None:
            if not self.is_refused:
                super().connection_lost(exc)

    return Checked


def _is_own(sock: Any, peer: Any, here: Any) -> bool:
    """True if a process of this user is at the other end of a connection within this host."""
    if sock.family == socket.AF_UNIX:
        return is_same_user(sock)
    return bool(peer) and is_own_peer(peer[:2], here[:2])
