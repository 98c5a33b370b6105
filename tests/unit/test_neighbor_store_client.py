"""A process connects to a neighbor's raylet: the arena comes, or does not, and nothing is left of what failed."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcray.common.ids import make_proc, node_of, raylet_of
from hpcray.core.core_worker.object_table import Waiter
from hpcray.platform.arena import Arena
from hpcray.protocol import messages as m
from hpcray.protocol.frames import FrameReader, pack
from hpcray.protocol.messages import GUEST
from hpcray.runtime.core_worker.io_engine import IoEngine
from hpcray.runtime.core_worker.neighbor_store_client import NeighborStoreClient

ME = make_proc(0, 5)
SIZE = 1 << 20
NAME = "arena-of-a-neighbor"


class Table:
    """What a visit tells the table."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.pins = self.recovery = self

    def met(self, node: int) -> None:
        self.told.append(f"met {node}")

    def neighbor_lost(self, node: int) -> None:
        self.told.append(f"unmet {node}")


class World:
    """A process of node 0, and the raylet of node 1 as far as it matters."""

    def __init__(self, tmp: Path) -> None:
        self.path = tmp / "1"
        self.path.mkdir()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(self.path / "r.s"))
        self.listener.listen()
        self.listener.settimeout(30)
        ours, self.own_raylet = socket.socketpair()
        self.engine = IoEngine(
            ME, str(tmp), ours, {1: str(self.path)}, peer_lost=lambda proc, why: self.visiting.lost(node_of(proc))
        )
        self.table, self.heard = Table(), []
        unused = SimpleNamespace(loaded=())
        process: Any = SimpleNamespace(me=ME, engine=self.engine, table=self.table, extensions=unused)
        self.arenas: dict[int, Arena] = {}
        self.visiting = NeighborStoreClient(process, self.arenas, {1: str(self.path)})
        handlers = {m.Welcome: self.visiting.on_welcome, m.Unpin: lambda src, msg: self.heard.append((src, msg))}
        self.engine.start(handlers)
        self.raylet: socket.socket

    def meet(self) -> None:
        """It knocks, and the raylet hears who it is."""
        with self.engine.lock:
            self.visiting.meet(1)
            self.engine.flush()
        self.raylet, _ = self.listener.accept()
        (frame,) = FrameReader().feed(self.raylet.recv(1 << 16))
        (hello,) = m.decode(frame[20:])
        assert bytes(frame[12:20]) == ME and hello == m.Hello(os.getpid(), GUEST)

    def welcome(self, size: int = SIZE) -> bytes:
        config = {"huge_pages": "off"}
        return pack(ME, raylet_of(1), m.encode([m.Welcome(ME, "b" * 56, "dir", size, 2, "host", None, config)]))

    def drive(self, done: Any) -> bool:
        until = time.monotonic() + 30
        while not done() and time.monotonic() < until:
            with self.engine.lock:
                self.engine.wait(Waiter(), time.monotonic() + 0.01)
        return bool(done())

    def tells(self, *told: str) -> bool:
        return self.drive(lambda: len(self.table.told) >= len(told)) and self.table.told == list(told)

    def close(self) -> None:
        self.engine.close()
        for arena in self.arenas.values():
            arena.close()
        for sock in (self.own_raylet, self.listener):
            sock.close()


def descriptors() -> int:
    """Of arenas, in this process; the fixture has one."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += NAME in os.readlink(f"/proc/self/fd/{fd}")
    return found


@pytest.fixture
def arena() -> Iterator[int]:
    fd = os.memfd_create(NAME)
    os.ftruncate(fd, SIZE)
    os.pwrite(fd, b"hello", 4096)
    yield fd
    os.close(fd)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def test_a_neighbors_arena_comes_with_the_welcome_and_messages_after_it(world: World, arena: int) -> None:
    world.meet()
    socket.send_fds(world.raylet, [world.welcome()], [arena])
    world.raylet.sendall(pack(ME, raylet_of(1), m.encode([m.Unpin(7)])))
    assert world.tells("met 1") and world.drive(lambda: world.heard)
    assert world.heard == [(raylet_of(1), m.Unpin(7))]
    assert bytes(world.arenas[1].view(4096, 5)) == b"hello"
    with world.engine.lock:
        world.visiting.send(1, m.Open(b"x" * 16, 1, []))
        world.engine.flush()
    (frame,) = FrameReader().feed(world.raylet.recv(1 << 16))
    assert bytes(frame[4:20]) == raylet_of(1) + ME and m.decode(frame[20:]) == [m.Open(b"x" * 16, 1, [])]


def test_a_neighbors_welcome_may_come_in_two_halves(world: World, arena: int) -> None:
    world.meet()
    frame = world.welcome()
    socket.send_fds(world.raylet, [frame[:9]], [arena])
    assert world.drive(lambda: world.visiting._peers[1][1].got >= 0)
    assert world.table.told == []
    world.raylet.sendall(frame[9:])
    assert world.tells("met 1")


def test_a_neighbor_that_does_not_listen_is_reported_unmet_later(world: World) -> None:
    """The answer comes later: who asks is in the middle of something."""
    os.unlink(world.path / "r.s")
    with world.engine.lock:
        world.visiting.meet(1)
        assert world.table.told == []
    assert world.tells("unmet 1")


@pytest.mark.parametrize("what", ["nothing", "half a welcome", "a descriptor and half a welcome"])
def test_a_connection_that_ends_before_the_welcome_is_reported_unmet(world: World, arena: int, what: str) -> None:
    world.meet()
    if what == "half a welcome":
        world.raylet.sendall(world.welcome()[:9])
    elif what != "nothing":
        socket.send_fds(world.raylet, [world.welcome()[:9]], [arena])
    world.raylet.close()
    assert world.tells("unmet 1") and not world.arenas
    assert descriptors() == 1


@pytest.mark.parametrize("what", ["no descriptor", "too small"])
def test_a_neighbor_whose_arena_cannot_be_mapped_is_reported_unmet(world: World, arena: int, what: str) -> None:
    world.meet()
    if what == "no descriptor":  # this process may not open any more
        world.raylet.sendall(world.welcome())
    else:
        socket.send_fds(world.raylet, [world.welcome(2 * SIZE)], [arena])
    assert world.tells("unmet 1") and not world.arenas
    assert world.raylet.recv(1) == b"", "the raylet need not wait for it"
    world.raylet.close()
    assert descriptors() == 1


def test_the_arena_stays_mapped_when_the_connection_to_a_neighbor_ends(world: World, arena: int) -> None:
    world.meet()
    socket.send_fds(world.raylet, [world.welcome()], [arena])
    assert world.tells("met 1")
    world.raylet.close()
    assert world.tells("met 1", "unmet 1")
    assert bytes(world.arenas[1].view(4096, 5)) == b"hello"


def test_nothing_is_left_of_a_dead_neighbor_that_is_not_read_any_more(world: World, arena: int) -> None:
    world.meet()
    socket.send_fds(world.raylet, [world.welcome()], [arena])
    assert world.tells("met 1")
    with world.engine.lock:
        world.engine.links.lose_node(1)
        world.visiting.leave(1)
    world.raylet.close()
    assert not world.arenas and descriptors() == 1
    assert world.table.told == ["met 1"]
