"""The Unix-socket connections of a raylet: its listening socket, and one link per connected process."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable

from hpcray.common.memory import BufferPool
from hpcray.platform.sockets import SOCKET_BUFFER, Piece, bind_private, peer_pid_and_uid, send_pieces
from hpcray.protocol.frames import FrameReader

RECEIVE = 256 * 1024
_SEND = 256 * 1024
_BACKLOG = 1024


class LocalSocket:
    """One connected process.

    Attributes:
        proc: its process id, NIL until it said Hello.
        kind: "driver", "attached", "worker" or "guest"; "" until it said Hello.
        pid: its pid, as the kernel knows it.
        out: frames to be sent, in order. A caller that appends to the empty list adds the link to `Router.dirty`.
        blocked: the socket buffer is full; the rest waits until it is writable.
        closing: no more can be sent; the report of the process's end is awaited.
        peers: processes and raylets with which it exchanged frames through this raylet.
    """

    __slots__ = ("blocked", "closing", "fd", "kind", "out", "peers", "pid", "proc", "reader", "sock")

    def __init__(self, sock: socket.socket, proc: bytes, pid: int, pool: BufferPool | None = None) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.proc = proc
        self.kind = ""
        self.pid = pid
        self.reader = FrameReader(pool)
        self.out: list[Piece] = []
        self.blocked = False
        self.closing = False
        self.peers: set[bytes] = set()

    def flush(self) -> bool:
        """Send frames of `out` without blocking. Returns False while some are left.

        Raises:
            OSError: the peer is gone.
        """
        return send_pieces(self.sock, self.out, _SEND)


class LocalListener:
    """The raylet's listening socket.

    Attributes:
        full_listeners: called when a connection was refused because no descriptor is left.
    """

    def __init__(self, path: str) -> None:
        self.full_listeners: list[Callable[[], None]] = []
        self._spare = os.eventfd(0, os.EFD_CLOEXEC)
        self._sock = _listen(path)

    def fileno(self) -> int:
        """Return the descriptor, for epoll."""
        return self._sock.fileno()

    def accept(self) -> tuple[socket.socket, int] | None:
        """Return a new connection and the pid of its peer; None when there is none. Other users are refused."""
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._refuse()
                return None
            pid, uid = peer_pid_and_uid(sock)
            if uid == os.getuid():
                sock.setblocking(False)
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
                return sock, pid
            sock.close()

    def move(self, path: str) -> None:
        """Listen on another socket instead.

        Raises:
            OSError: it cannot be made.
        """
        before, self._sock = self._sock, _listen(path)
        before.close()

    def _refuse(self) -> None:
        """Close a connection with the spare descriptor: its process would wait forever otherwise."""
        os.close(self._spare)
        try:
            self._sock.accept()[0].close()
        except OSError:
            pass  # the process has ended
        finally:
            self._spare = os.eventfd(0, os.EFD_CLOEXEC)
        for listener in self.full_listeners:
            listener()

    def close(self) -> None:
        """Stop listening."""
        self._sock.close()
        os.close(self._spare)


def _listen(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bind_private(sock, path)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
