"""Whose process is at the other end of a TCP connection within this host."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from hpcray.platform.sockets import is_same_user

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_ESTABLISHED = 1
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI")
_NO_COOKIE = b"\xff" * 8
_ANSWER_UID = _HEADER.size + 64
"""`idiag_uid` in an answer: behind the netlink header, the state, the addresses and three counters."""

Address = tuple[str, int]


def is_own_connection(sock: Any) -> bool:
    """True if a process of this user holds the other end of an accepted TCP connection within this host.

    Args:
        sock: of the connection.
    """
    try:
        own = is_own_peer(sock.getpeername()[:2], sock.getsockname()[:2])
        # Whoever resets a connection frees its port. Bytes that came before can still be read, while a process of this
        # user may have the port by now, and be whom the kernel names. So the connection still has to be there.
        sock.getpeername()
    except OSError:
        return False
    return own


def is_own_peer(peer: Address, here: Address) -> bool:
    """True if a process of this user holds the other end of the TCP connection that is between two addresses now.

    The kernel is asked for the peer's socket. A connection that the peer has closed is refused: its socket has no
    owner any more. So is one of another host or network namespace, whose sockets are not visible here.

    Args:
        peer: IP address and port of the other end, from `getpeername()`.
        here: those of this end, from `getsockname()`.
    """
    return _peer_uid(peer, here) == os.getuid()


def _peer_uid(peer: Address, here: Address) -> int | None:
    """The uid that the peer's socket belongs to; None if there is no such socket."""
    try:
        family = socket.AF_INET6 if ":" in peer[0] else socket.AF_INET
        ends = [socket.inet_pton(family, end[0].partition("%")[0]).ljust(16, b"\0") for end in (peer, here)]
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
            netlink.settimeout(1.0)
            body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 1 << _ESTABLISHED)
            body += struct.pack(">HH", peer[1], here[1]) + ends[0] + ends[1] + bytes(4) + _NO_COOKIE
            netlink.send(_HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0) + body)
            answer = netlink.recv(4096)
    except (OSError, struct.error):
        return None
    if len(answer) < _ANSWER_UID + 4 or _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None  # NLMSG_ERROR: there is no such socket
    if answer[_HEADER.size + 1] != _ESTABLISHED:
        return None
    uid: int = struct.unpack_from("=I", answer, _ANSWER_UID)[0]
    return uid


# ------------------------------------------------------------ http peers
# HTTP servers of uvicorn that serve processes of this user alone.


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
            if is_for_all() or (is_same_user if sock.family == socket.AF_UNIX else is_own_connection)(sock):
                super().connection_made(transport)
                return
            self.is_refused = True
            transport.abort()
            log.note(f"refused a connection to the HTTP port {here}: another user's, or closed at once")

        def connection_lost(self, exc: Exception | None) -> None:
            if not self.is_refused:
                super().connection_lost(exc)

    return Checked
