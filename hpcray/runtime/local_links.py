"""The Unix-socket connections of a raylet: its listening socket, and one link per process of its node, or guest."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from typing import Union

from hpcray.host.peers import bind_private, peer_of
from hpcray.wire.frames import FrameReader

RECEIVE = 256 * 1024
_SEND = 256 * 1024
_BACKLOG = 1024

WORKER, DRIVER, ATTACHED = "worker", "driver", "attached"
GUEST = "guest"
"""A process of a neighbouring node, which reads in our store."""

Piece = Union[bytes, memoryview]


class Link:
    """One connected process.

    Attributes:
        proc: its process id, NIL until it said Hello.
        kind: "driver", "attached", "worker" or "guest"; "" until it said Hello.
        pid: its pid, as the kernel knows it.
        out: frames to be sent, in order. Whoever appends to an empty list puts the link on the router's dirty list.
        blocked: the socket took not all; the rest waits for it to become writable.
        closing: no more can be sent; the raylet waits to hear how the process ended.
        peers: processes and raylets with which it exchanged frames through this raylet.
    """

    __slots__ = ("blocked", "closing", "fd", "kind", "out", "peers", "pid", "proc", "reader", "sock")

    def __init__(self, sock: socket.socket, proc: bytes, pid: int) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.proc = proc
        self.kind = ""
        self.pid = pid
        self.reader = FrameReader()
        self.out: list[Piece] = []
        self.blocked = False
        self.closing = False
        self.peers: set[bytes] = set()

    def flush(self) -> bool:
        """Send what waits, without blocking; False while something is left.

        Raises:
            OSError: the peer is gone.
        """
        out = self.out
        while out:
            count = size = 0
            for piece in out:
                count += 1
                size += len(piece)
                if size >= _SEND:
                    break
            data = out[0] if count == 1 else b"".join(out[:count])
            try:
                sent = self.sock.send(data)
            except BlockingIOError:
                sent = 0
            if sent < size:
                out[:count] = [memoryview(data)[sent:]]
                return False
            del out[:count]
        return True


class Listener:
    """The raylet's listening socket.

    Attributes:
        on_full: called when a process was turned away because no descriptor is left.
    """

    def __init__(self, path: str) -> None:
        self.on_full: Callable[[], None] = lambda: None
        self._spare = os.eventfd(0, os.EFD_CLOEXEC)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bind_private(self._sock, path)
        self._sock.listen(_BACKLOG)
        self._sock.setblocking(False)

    def fileno(self) -> int:
        """For epoll."""
        return self._sock.fileno()

    def accept(self) -> tuple[socket.socket, int] | None:
        """One new connection and the pid of who made it; None when there is none. Other users are turned away."""
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away()
                return None
            pid, uid = peer_of(sock)
            if uid == os.getuid():
                sock.setblocking(False)
                return sock, pid
            sock.close()

    def _turn_away(self) -> None:
        """One who would wait for ever hears that there is no room."""
        os.close(self._spare)
        try:
            self._sock.accept()[0].close()
        except OSError:
            pass  # it has gone
        finally:
            self._spare = os.eventfd(0, os.EFD_CLOEXEC)
        self.on_full()

    def close(self) -> None:
        """Stop listening."""
        self._sock.close()
        os.close(self._spare)
