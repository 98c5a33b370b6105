"""Who is at the other end of a Unix socket, as the kernel knows it."""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process that connected, or, seen from there, of the one that listens.

    Raises:
        OSError: it is no connected Unix socket.
    """
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def is_ours(sock: socket.socket) -> bool:
    """Whether the other end belongs to this user. A connection for which it does not is closed unread."""
    try:
        return peer_of(sock)[1] == os.getuid()
    except OSError:
        return False


def connect_private(path: str, timeout: float | None = None) -> socket.socket:
    """A socket that is connected to what this user listens with at `path`.

    Args:
        path: of a Unix socket.
        timeout: as for `socket.settimeout`, from before the connection on; seconds.

    Raises:
        OSError: nobody listens there, or another user does; nothing was left behind.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(path)
        if not is_ours(sock):
            raise PermissionError("who listens there is another user")
    except BaseException:
        sock.close()
        raise
    return sock


def bind_private(sock: socket.socket, path: str) -> None:
    """Bind a Unix socket to a path that nobody else may connect to, from the first moment on.

    Raises:
        OSError: the path cannot be made.
    """
    os.fchmod(sock.fileno(), 0o600)  # Linux gives the file the mode of the socket
    sock.bind(path)
