"""Reading in a neighbor's store: a connection to its raylet, and its arena.

A process connects to a raylet of its host, other than its own, when it first wants what is there. From then on it opens
and releases objects there as the processes of that node do; all else that it has to say to that raylet goes through its
own one. Whether it lives is not seen at this connection (`NeighborClients`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from hpcray.common.ids import node_of, raylet_of
from hpcray.platform.arena import Arena, ArenaError, OverflowMapping
from hpcray.platform.sockets import connect_private
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.context import CoreWorkerContext
from hpcray.runtime.core_worker.io_engine import monotonic
from hpcray.runtime.core_worker.peer_sockets import Peer

_ONE_DESCRIPTOR = socket.CMSG_SPACE(4)
_CONNECT_ATTEMPTS, _CONNECT_PAUSE = 50, 0.02
"""Attempts to connect to a raylet whose backlog is full, and seconds between them."""


def map_arena(fd: int, welcome: m.Welcome) -> Arena:
    """The store of the raylet that sent this, with the descriptor that came along.

    Raises:
        ArenaError: as `Arena.attach`.
    """
    arena = Arena.attach(fd, welcome.arena_size, welcome.config.get("huge_pages", "auto"), welcome.reserve)
    arena.overflow = OverflowMapping(welcome.overflow)
    return arena


class _Greeted(socket.socket):
    """A socket over which a descriptor comes with the first message; from then on it is read like any other."""

    got: int = -1
    _greeted = False

    def recv_into(self, buffer: Any, *args: Any) -> int:
        if self._greeted:
            return super().recv_into(buffer, *args)
        size, ancillary, _, _ = self.recvmsg_into([buffer], _ONE_DESCRIPTOR, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.got = int.from_bytes(data[:4], "little")
                self._greeted = True
        return size

    def take(self) -> int:
        """The descriptor; -1: none has come."""
        got, self.got = self.got, -1
        return got


class NeighborStoreClient:
    """The stores of other nodes in which one process reads; see `core.core_worker.object_pins.NeighborStores`.

    Lock held in all methods.

    Args:
        arenas: of all stores that the process reads, by node; theirs are added.
        directories: the neighbors' session directories, by node.
    """

    def __init__(self, context: CoreWorkerContext, arenas: dict[int, Arena], directories: Mapping[int, str]) -> None:
        self._context, self._arenas = context, arenas
        self._engine = context.engine
        self._directories = dict(directories)
        self._peers: dict[int, tuple[Peer, _Greeted]] = {}

    def add(self, directories: Mapping[int, str]) -> None:
        """These nodes of this host have joined the job."""
        self._directories.update(directories)

    def meet(self, node: int) -> None:
        """Connect; the result is reported to the table."""
        self._connect(node, _CONNECT_ATTEMPTS)

    def _connect(self, node: int, attempts: int) -> None:
        try:
            sock = connect_private(os.path.join(self._directories[node], "r.s"), timeout=0.0)
        except OSError as error:
            if isinstance(error, BlockingIOError) and attempts:
                self._engine.add_timer(monotonic() + _CONNECT_PAUSE, lambda now: self._connect(node, attempts - 1))
            else:  # not now: whoever asks us to connect is in the middle of something
                self._engine.add_timer(monotonic(), lambda now: self._context.table.recovery.neighbor_lost(node))
            return
        greeted = _Greeted(sock.family, sock.type, fileno=sock.detach())
        peer = self._engine.links.add_neighbor_raylet(greeted, raylet_of(node))
        self._peers[node] = (peer, greeted)
        self._engine.send_to(peer, m.Hello(os.getpid(), m.GUEST))

    def on_welcome(self, src: bytes, msg: m.Welcome) -> None:
        """Map the store of a neighbor whose raylet has accepted us."""
        node = node_of(src)
        if node not in self._peers:
            return
        _, greeted = self._peers[node]
        fd = greeted.take()
        try:
            if fd < 0:
                raise ArenaError("no descriptor came")
            self._arenas[node] = map_arena(fd, msg)
        except (ArenaError, OSError):  # our limits do not allow it
            if fd >= 0:
                os.close(fd)
            self._engine.links.drop_neighbor_raylet(self._peers.pop(node)[0])
            self._context.table.recovery.neighbor_lost(node)
            return
        self._context.table.pins.met(node)

    def send(self, node: int, msg: m.Message) -> None:
        """Send a message to a raylet that has accepted us."""
        self._engine.send_to(self._peers[node][0], msg)

    def lost(self, node: int) -> None:
        """Report to the table that the connection has ended."""
        if self._forget(node):
            self._context.table.recovery.neighbor_lost(node)

    def leave(self, node: int) -> None:
        """Unmap the store of a dead node, in which this process reads no more."""
        self._forget(node)
        arena = self._arenas.pop(node, None)
        if arena is not None:
            for extension in self._context.extensions.loaded:
                extension.arena_closed(arena)
            arena.close()

    def _forget(self, node: int) -> bool:
        _, greeted = self._peers.pop(node, (None, None))
        if greeted is not None and (fd := greeted.take()) >= 0:
            os.close(fd)
        return greeted is not None
