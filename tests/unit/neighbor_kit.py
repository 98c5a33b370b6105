"""A raylet with its loop and its store, to which processes of neighboring nodes connect."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from hpcray.common.config import Config
from hpcray.common.ids import PUT_INDEX, make_proc, node_of, raylet_of
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.core.raylet.local_lease_manager import LocalLeaseManager
from hpcray.protocol import messages as m
from hpcray.protocol.frames import FrameReader, pack
from hpcray.protocol.messages import GUEST
from hpcray.runtime.node.cluster_member import forget_node
from hpcray.runtime.raylet.event_loop import EventLoop
from hpcray.runtime.raylet.local_processes import NeighborClients, NodeContext
from hpcray.runtime.raylet.local_sockets import LocalListener
from hpcray.runtime.raylet.raylet import Raylet
from hpcray.runtime.raylet.router import Router

ME = raylet_of(1)
CLIENT_OF_2, ANOTHER_OF_2, CLIENT_OF_3 = make_proc(2, 7), make_proc(2, 8), make_proc(3, 7)
HERE = make_proc(1, 5)
ARENA, SIZE = 1 << 16, 1 << 14


def oid(counter: int, owner: bytes = HERE) -> bytes:
    return owner + counter.to_bytes(5, "big") + PUT_INDEX


def read(data: bytes) -> list[tuple[bytes, bytes, list[m.Message]]]:
    """(destination, source, messages) of each frame."""
    return [(bytes(f[4:12]), bytes(f[12:20]), m.decode(f[20:])) for f in FrameReader().feed(data)]


class Wire:
    """A control transport that keeps what is sent, as (destination, message)."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, m.Message]] = []

    def fileno(self) -> None:
        return None

    def send(self, dest: int, data: bytes, wake: bool = True) -> None:
        for to, _, messages in read(data):
            assert node_of(to) == dest
            self.sent += [(to, msg) for msg in messages]

    def poll(self) -> list[Any]:
        return []

    lost = poll

    def forget(self, node: int, reason: str) -> None:
        pass


class Nothing:
    """Stands for parts that no test here looks at."""

    stopping = False
    overflow_path = ""

    @property
    def figures(self) -> Nothing:
        """Figures of the node."""
        return self

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


class Node:
    """Node 1 of four: a real raylet and its loop, one turn at a time. Nodes 2 and 3 are its neighbors."""

    def __init__(self, tmp: Path) -> None:
        self.wire = Wire()
        self.path = str(tmp / "r.s")
        self.arena = os.memfd_create("arena")
        self.socks: list[socket.socket] = []
        router = Router(1, 4, self.wire)  # type: ignore[arg-type]
        self.loop = EventLoop(router, LocalListener(self.path), self.wire, None)  # type: ignore[arg-type]
        info = m.NodeInfo(1, "b" * 56, "host", "10.0.0.1", 1, {}, b"", "mpi", ARENA)
        self.store = ObjectStore(1, ARENA, spill_threshold=0.8)
        lease_manager = LocalLeaseManager(1, {}, 4, Config(prestart=0))
        context = NodeContext(info, 4, str(tmp), Config())
        self.raylet = Raylet(context, self.loop, router, lease_manager, self.store, None, Nothing(), None)  # type: ignore[arg-type]
        clients = NeighborClients(self.loop, router, self.store, self.arena, self.raylet)
        clients.limit = 3
        self.raylet.attach(Nothing(), clients, Nothing(), Nothing(), Nothing(), Nothing(), Nothing())  # type: ignore[arg-type]
        self.raylet.start(Nothing())  # type: ignore[arg-type]
        self.raylet.neighbor_dirs = {2: str(tmp / "2"), 3: str(tmp / "3")}
        self.loop._events = self.raylet
        self.clients = router.neighbor_links

    def turn(self, times: int = 3) -> None:
        """A connection is accepted in one turn, read in the next."""
        for _ in range(times):
            self.loop._turn(0.0)

    def knock(self, proc: bytes, *more: m.Message) -> socket.socket:
        """Connect as this process, and send its messages without waiting for the Welcome."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socks.append(sock)
        sock.settimeout(30)
        sock.connect(self.path)
        frames = [[m.Hello(os.getpid(), GUEST)], list(more)] if more else [[m.Hello(os.getpid(), GUEST)]]
        sock.sendall(b"".join(pack(ME, proc, m.encode(messages)) for messages in frames))
        self.turn()
        return sock

    def enter(self, proc: bytes) -> socket.socket:
        """Connect as this process, and read its Welcome."""
        sock = self.knock(proc)
        fds = socket.recv_fds(sock, 1 << 16, 1)[1]
        for fd in fds:
            os.close(fd)
        assert len(fds) == 1 and proc in self.clients
        return sock

    def says(self, sock: socket.socket, proc: bytes, *messages: m.Message) -> None:
        """Send messages over its connection."""
        sock.sendall(pack(ME, proc, m.encode(list(messages))))
        self.turn(1)

    def leaves(self, sock: socket.socket) -> None:
        sock.close()
        self.turn(1)

    def put(self, counter: int) -> int:
        """A process of this node puts an object."""
        for msg in (m.Create(oid(counter), SIZE), m.Seal(oid(counter)), m.Release([oid(counter)])):
            self.raylet.messages(HERE, [msg])
        self.turn(1)
        self.wire.sent.clear()
        return self.store.lifecycle.objects[oid(counter)].offset

    def buries(self, node: int) -> None:
        """The head declares a node dead."""
        forget_node(self.raylet, self.wire, None, m.NodeDied(node, "silent", 1))  # type: ignore[arg-type]
        self.turn(1)

    @property
    def pinned(self) -> int:
        found: int = self.store.snapshot()["pinned"]
        return found

    def close(self) -> None:
        for sock in self.socks:
            sock.close()
        self.loop.close()
        os.close(self.arena)


def heard(sock: socket.socket) -> list[m.Message]:
    """Return the messages that have arrived on a connection."""
    sock.setblocking(False)
    try:
        data = sock.recv(1 << 16)
    except BlockingIOError:
        return []
    return [msg for _, src, messages in read(data) for msg in messages if src == ME]
