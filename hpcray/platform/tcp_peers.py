"""Whose process is at the other end of a TCP connection within this host."""

from __future__ import annotations

import os
import socket
import struct

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


def is_own_peer(peer: Address, here: Address) -> bool:
    """True if a process of this user holds the other end of a TCP connection.

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
