"""Unix sockets between the processes of one host, the processes at their other ends, and the wait for them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from types import MappingProxyType

from hpcray.common.ids import NIL_PROC, raylet_of
from hpcray.common.memory import BufferPool
from hpcray.platform.sockets import SOCKET_BUFFER, bind_private
from hpcray.protocol.frames import FrameReader, pack
from hpcray.protocol.messages import Hello, Message, encode

NO_NEIGHBORS: Mapping[int, str] = MappingProxyType({})


class PeerSocket:
    """One connected Unix socket. inbox: where the next bytes are received."""

    __slots__ = ("fd", "inbox", "proc", "reader", "sock", "unsent")

    def __init__(self, sock: socket.socket, proc: bytes | None, inbox: memoryview, pool: BufferPool) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        self.sock = sock
        self.fd = sock.fileno()
        self.proc = proc
        self.inbox = inbox
        self.reader = FrameReader(pool)
        self.unsent: list[bytes | memoryview] = []

    def cannot_write(self) -> None:
        """Drop what is unsent: the other end is gone. What that sent is still to be read; reading finds the end."""
        self.unsent.clear()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)  # whatever it was that failed: they see an end too


class Peer:
    """A process we write to: directly when it is of our host, through our raylet otherwise. route: to it, from `me`."""

    __slots__ = ("dead", "dirty", "functions", "link", "out", "proc", "route")

    def __init__(self, proc: bytes, link: PeerSocket, me: bytes) -> None:
        self.proc, self.link, self.route = proc, link, proc + me
        self.out: list[Message] = []
        self.dirty = False
        self.dead = False
        self.functions: set[bytes] = set()


def listen(session_dir: str, number: int) -> socket.socket:
    """The socket on which process `number` of this node takes connections of its peers."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bind_private(sock, f"{session_dir}/{number}.s")
    sock.listen(1024)
    sock.setblocking(False)
    return sock


def greet(sock: socket.socket, hello: Hello, me: bytes = NIL_PROC) -> None:
    """Send the first frame of a connection to a raylet."""
    sock.sendall(pack(raylet_of(0), me, encode([hello])))
