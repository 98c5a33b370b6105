"""Reading in a neighbour's store: a connection to its raylet, and its arena.

A process connects to a raylet of its host, other than its own, when it first wants what is there. From then on it opens
and releases objects there as the processes of that node do; all else that it has to say to that raylet goes through its
own one. Whether it lives is not seen at this connection (`Guests`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpcray.base.ids import node_of, raylet_of
from hpcray.host.arena import Arena, ArenaError
from hpcray.host.peers import connect_private
from hpcray.runtime.engine import monotonic
from hpcray.runtime.links import Peer
from hpcray.runtime.local_links import GUEST
from hpcray.wire import messages as m

if TYPE_CHECKING:
    from hpcray.runtime.process import Process

_ONE = socket.CMSG_SPACE(4)
_ATTEMPTS, _AGAIN = 50, 0.02
"""How often, and after how many seconds each time, we try again to connect where others stand in line."""


def map_arena(fd: int, welcome: m.Welcome) -> Arena:
    """The store of the raylet that sent this, with the descriptor that came along.

    Raises:
        ArenaError: as `Arena.attach`.
    """
    return Arena.attach(fd, welcome.arena_size, welcome.config.get("huge_pages", "auto"))


class _Greeted(socket.socket):
    """A socket over which a descriptor comes with the first message; from then on it is read like any other."""

    got: int = -1

    def recv_into(self, buffer: Any, *args: Any) -> int:
        size, ancillary, _, _ = self.recvmsg_into([buffer], _ONE, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.got = int.from_bytes(data[:4], "little")
                self.recv_into = super().recv_into  # type: ignore[method-assign]
        return size

    def take(self) -> int:
        """The descriptor; -1: none has come."""
        got, self.got = self.got, -1
        return got


class Visiting:
    """The stores of other nodes in which one process reads; see `core.owner.pins.Visits`. Lock held in all methods.

    Args:
        directories: the neighbours' session directories, by node.
    """

    def __init__(self, process: Process, directories: Mapping[int, str]) -> None:
        self._process = process
        self._engine = process.engine
        self._directories = directories
        self._peers: dict[int, tuple[Peer, _Greeted]] = {}

    def meet(self, node: int) -> None:
        """Connect; the table is told `met` or `unmet`."""
        self._connect(node, _ATTEMPTS)

    def _connect(self, node: int, attempts: int) -> None:
        try:
            sock = connect_private(os.path.join(self._directories[node], "r.s"), timeout=0.0)
        except OSError as error:
            if isinstance(error, BlockingIOError) and attempts:
                self._engine.add_timer(monotonic() + _AGAIN, lambda now: self._connect(node, attempts - 1))
            else:  # not now: whoever asks us to connect is in the middle of something
                self._engine.add_timer(monotonic(), lambda now: self._process.table.unmet(node))
            return
        greeted = _Greeted(sock.family, sock.type, fileno=sock.detach())
        peer = self._engine.visit(greeted, raylet_of(node))
        self._peers[node] = (peer, greeted)
        self._engine.tell(peer, m.Hello(os.getpid(), GUEST, b""))

    def on_welcome(self, src: bytes, msg: m.Welcome) -> None:
        """A neighbour's raylet lets us in."""
        node = node_of(src)
        if node not in self._peers:
            return
        _, greeted = self._peers[node]
        fd = greeted.take()
        try:
            if fd < 0:
                raise ArenaError("no descriptor came")
            self._process.arenas[node] = map_arena(fd, msg)
        except (ArenaError, OSError):  # our limits do not allow it
            if fd >= 0:
                os.close(fd)
            self._engine.end_visit(self._peers.pop(node)[0])
            self._process.table.unmet(node)
            return
        self._process.table.met(node)

    def send(self, node: int, msg: m.Message) -> None:
        """Say something to a raylet that has let us in."""
        self._engine.tell(self._peers[node][0], msg)

    def lost(self, node: int) -> None:
        """The connection has ended."""
        if self._forget(node):
            self._process.table.unmet(node)

    def leave(self, node: int) -> None:
        """Nothing there is read any more, and the node is dead."""
        self._forget(node)
        arena = self._process.arenas.pop(node, None)
        if arena is not None:
            arena.close()

    def _forget(self, node: int) -> bool:
        _, greeted = self._peers.pop(node, (None, None))
        if greeted is not None and (fd := greeted.take()) >= 0:
            os.close(fd)
        return greeted is not None
