"""A raylet with its loop and its store, to which neighbouring processes come."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from hpcray.base.config import Config
from hpcray.base.ids import PUT_INDEX, make_proc, node_of, raylet_of
from hpcray.core.raylet import RayletCore
from hpcray.core.store.node_store import NodeStore
from hpcray.runtime.guests import Guests
from hpcray.runtime.leaving import forget_node
from hpcray.runtime.local_links import GUEST, Listener
from hpcray.runtime.raylet import Raylet, Seat
from hpcray.runtime.raylet_loop import RayletLoop
from hpcray.runtime.router import Router
from hpcray.wire import messages as m
from hpcray.wire.frames import FrameReader, pack

ME = raylet_of(1)
GUEST_OF_2, ANOTHER_OF_2, GUEST_OF_3 = make_proc(2, 7), make_proc(2, 8), make_proc(3, 7)
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

    def send(self, dest: int, data: bytes) -> None:
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

    leaving = False

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


class Node:
    """Node 1 of four: a real raylet and its loop, one turn at a time. Nodes 2 and 3 are its neighbours."""

    def __init__(self, tmp: Path) -> None:
        self.wire = Wire()
        self.path = str(tmp / "r.s")
        self.arena = os.memfd_create("arena")
        self.socks: list[socket.socket] = []
        router = Router(1, 4, self.wire)  # type: ignore[arg-type]
        self.loop = RayletLoop(router, Listener(self.path), self.wire, None)  # type: ignore[arg-type]
        info = m.NodeInfo(1, "b" * 56, "host", "10.0.0.1", 1, {}, b"", "mpi", ARENA)
        self.store = NodeStore(1, ARENA, spill_threshold=0.8)
        core = RayletCore(1, {}, 4, Config(prestart=0))
        seat = Seat(info, 4, str(tmp), Config())
        self.raylet = Raylet(seat, self.loop, router, core, self.store, None, Nothing(), None)  # type: ignore[arg-type]
        self.raylet.processes = Nothing()  # type: ignore[assignment]
        self.raylet.guests = Guests(self.raylet, self.arena)
        self.raylet.guests.limit = 3
        self.raylet.neighbours = {2: str(tmp / "2"), 3: str(tmp / "3")}
        self.loop._events = self.raylet
        self.guests = router.guests

    def turn(self, times: int = 3) -> None:
        """A connection is accepted in one turn, read in the next."""
        for _ in range(times):
            self.loop._turn(0.0)

    def knock(self, proc: bytes, *more: m.Message) -> socket.socket:
        """Somebody connects, says who he is, and does not wait with what he has to say."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socks.append(sock)
        sock.settimeout(30)
        sock.connect(self.path)
        frames = [[m.Hello(os.getpid(), GUEST, b"")], list(more)] if more else [[m.Hello(os.getpid(), GUEST, b"")]]
        sock.sendall(b"".join(pack(ME, proc, m.encode(messages)) for messages in frames))
        self.turn()
        return sock

    def enter(self, proc: bytes) -> socket.socket:
        """A guest is let in, and has read that."""
        sock = self.knock(proc)
        fds = socket.recv_fds(sock, 1 << 16, 1)[1]
        for fd in fds:
            os.close(fd)
        assert len(fds) == 1 and proc in self.guests
        return sock

    def says(self, sock: socket.socket, proc: bytes, *messages: m.Message) -> None:
        """On its link."""
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
        return self.store._objects[oid(counter)].offset

    def buries(self, node: int) -> None:
        """The head says that a node is dead."""
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
    """What has come on a link."""
    sock.setblocking(False)
    try:
        data = sock.recv(1 << 16)
    except BlockingIOError:
        return []
    return [msg for _, src, messages in read(data) for msg in messages if src == ME]
