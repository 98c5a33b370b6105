"""Nodes of one host: whose processes speak to each other directly, and until when."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcray.base.ids import make_proc
from hpcray.core.owner.table import Waiter
from hpcray.runtime.engine import Engine
from hpcray.runtime.neighbours import neighbours
from hpcray.wire import messages as m

NODE = m.NodeInfo(0, "a" * 56, "here", "10.0.0.1", 1, {}, b"", "ucx", 1 << 30)


@dataclass
class Proc:
    """A process with its engine; its raylet is a socket that the test reads."""

    engine: Engine
    raylet: socket.socket
    came: list[tuple[bytes, m.Message]] = field(default_factory=list)
    lost: list[bytes] = field(default_factory=list)

    def hears(self, count: int, patience: float = 5.0) -> bool:
        """Whether so many messages come within some time."""
        return self._drive(lambda: len(self.came) >= count, patience)

    def loses(self, proc: bytes) -> bool:
        """Whether it sees a connection end."""
        return self._drive(lambda: proc in self.lost)

    def _drive(self, done: Any, patience: float = 5.0) -> bool:
        until = time.monotonic() + patience
        while not done() and time.monotonic() < until:
            with self.engine.lock:
                self.engine.wait(Waiter(), time.monotonic() + 0.01)
        return bool(done())

    def says(self, proc: bytes) -> None:
        """Send something."""
        with self.engine.lock:
            self.engine.send(proc, m.Knock())
            self.engine.flush()

    def passes_on(self) -> bool:
        """Whether its raylet was given something."""
        try:
            return bool(self.raylet.recv(1 << 16))
        except BlockingIOError:
            return False


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Proc, Proc]]:
    """Process 5 of node 0 and process 6 of node 1, on one host."""
    dirs = {node: str(tmp_path / str(node)) for node in (0, 1)}
    made = []
    for node, number in ((0, 5), (1, 6)):
        Path(dirs[node]).mkdir()
        ours, raylet = socket.socketpair()
        raylet.setblocking(False)
        others = {other: path for other, path in dirs.items() if other != node}
        proc = Proc(Engine(make_proc(node, number), dirs[node], others), raylet)
        proc.engine.start(
            ours,
            {m.Knock: lambda src, msg, proc=proc: proc.came.append((src, msg))},
            lambda lost, reason, proc=proc: proc.lost.append(lost),
            lambda: None,
        )
        made.append(proc)
    yield made[0], made[1]
    for proc in made:
        if not proc.engine.closed:
            proc.engine.close()
        proc.raylet.close()


def test_only_what_is_seen_of_this_host_is_a_neighbour(tmp_path: Path) -> None:
    me = msgspec.structs.replace(NODE, session_dir=str(tmp_path))
    there = msgspec.structs.replace(me, index=1)
    elsewhere = msgspec.structs.replace(me, index=2, host="there")
    unseen = msgspec.structs.replace(me, index=3, session_dir=str(tmp_path / "of another container"))
    unwilling = msgspec.structs.replace(me, index=4, session_dir="")
    assert neighbours(me, [me, there, elsewhere, unseen, unwilling]) == {1: str(tmp_path)}
    assert neighbours(unwilling, [me, there]) == {}


def test_they_speak_past_their_raylets(two: tuple[Proc, Proc]) -> None:
    here, there = two
    here.says(there.engine.me)
    assert there.hears(1) and there.came[0][0] == here.engine.me
    there.says(here.engine.me)
    assert here.hears(1)
    assert not here.passes_on() and not there.passes_on()


def test_who_sees_a_connection_end_asks_through_the_raylets(two: tuple[Proc, Proc]) -> None:
    here, there = two
    here.says(there.engine.me)
    assert there.hears(1)
    there.engine.close()
    assert here.loses(there.engine.me)
    with here.engine.lock:
        here.engine.knock(there.engine.me)
        here.engine.flush()
    assert here.passes_on()


def test_a_process_of_a_lost_node_is_not_heard_any_more(two: tuple[Proc, Proc]) -> None:
    here, there = two
    there.says(here.engine.me)
    assert here.hears(1)
    with here.engine.lock:
        here.engine.drop_peer(there.engine.me)
        here.engine.lose_node(1)
    assert there.loses(here.engine.me)
    there.says(here.engine.me)  # it connects again
    assert there.loses(here.engine.me) and not here.hears(2, 0.05)
    here.says(there.engine.me)
    assert here.passes_on(), "its raylet tells what became of it"


def test_a_connection_on_which_only_they_spoke_ends_with_their_node(two: tuple[Proc, Proc]) -> None:
    here, there = two
    with here.engine.lock:
        here.engine.knock(there.engine.me)  # so that we write through the raylet
    there.says(here.engine.me)
    assert here.hears(1)
    with here.engine.lock:
        here.engine.drop_peer(there.engine.me)
        here.engine.lose_node(1)
    assert there.loses(here.engine.me)
