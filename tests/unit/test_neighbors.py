"""Nodes of one host: whose processes speak to each other directly, and until when."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcray.common.ids import make_proc
from hpcray.core.core_worker.object_table import Waiter
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.io_engine import IoEngine
from hpcray.runtime.node.cluster_member import neighbor_directories

NODE = m.NodeInfo(0, "a" * 56, "here", "10.0.0.1", 1, {}, b"", "ucx", 1 << 30)


@dataclass
class Proc:
    """A process with its engine; its raylet is a socket that the test reads."""

    engine: IoEngine
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
            self.engine.send(proc, m.ProbeViaRaylet())
            self.engine.flush()

    def buries(self, node: int, proc: bytes) -> None:
        """Its raylet says that a node is dead, and with it this process."""
        with self.engine.lock:
            self.engine.links.drop_peer(proc)
            self.engine.links.lose_node(node)

    def passes_on(self) -> bool:
        """Whether its raylet was given something."""
        try:
            return bool(self.raylet.recv(1 << 16))
        except BlockingIOError:
            return False


def begin(tmp_path: Path, node: int, number: int) -> Proc:
    """A process of one of two nodes of one host."""
    dirs = {each: tmp_path / str(each) for each in (0, 1)}
    dirs[node].mkdir(exist_ok=True)
    ours, raylet = socket.socketpair()
    raylet.setblocking(False)
    lost: list[bytes] = []
    neighbors = {1 - node: str(dirs[1 - node])}
    engine = IoEngine(
        make_proc(node, number), str(dirs[node]), ours, neighbors, peer_lost=lambda proc, reason: lost.append(proc)
    )
    proc = Proc(engine, raylet, lost=lost)
    handlers = {m.ProbeViaRaylet: lambda src, msg: proc.came.append((src, msg))}
    proc.engine.start(handlers)
    return proc


def end(proc: Proc) -> None:
    if not proc.engine.closed:
        proc.engine.close()
    proc.raylet.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Proc, Proc]]:
    """Process 5 of node 0 and process 6 of node 1."""
    made = begin(tmp_path, 0, 5), begin(tmp_path, 1, 6)
    yield made
    for proc in made:
        end(proc)


@pytest.fixture
def another(tmp_path: Path) -> Iterator[Proc]:
    """Process 7 of node 1."""
    made = begin(tmp_path, 1, 7)
    yield made
    end(made)


def test_only_what_is_seen_of_this_host_is_a_neighbor(tmp_path: Path) -> None:
    me = msgspec.structs.replace(NODE, session_dir=str(tmp_path))
    there = msgspec.structs.replace(me, index=1)
    elsewhere = msgspec.structs.replace(me, index=2, host="there")
    unseen = msgspec.structs.replace(me, index=3, session_dir=str(tmp_path / "of another container"))
    unwilling = msgspec.structs.replace(me, index=4, session_dir="")
    assert neighbor_directories(me, [me, there, elsewhere, unseen, unwilling]) == {1: str(tmp_path)}
    assert neighbor_directories(unwilling, [me, there]) == {}


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
        here.engine.reroute_via_raylet(there.engine.me)
        here.engine.flush()
    assert here.passes_on()


def test_a_process_of_a_lost_node_is_not_heard_any_more(two: tuple[Proc, Proc]) -> None:
    here, there = two
    there.says(here.engine.me)
    assert here.hears(1)
    here.buries(1, there.engine.me)
    assert there.loses(here.engine.me)
    there.says(here.engine.me)  # it connects again
    assert there.loses(here.engine.me) and not here.hears(2, 0.05)
    here.says(there.engine.me)
    assert here.passes_on(), "its raylet tells what became of it"


def test_a_connection_on_which_only_they_spoke_ends_with_their_node(two: tuple[Proc, Proc]) -> None:
    here, there = two
    with here.engine.lock:
        here.engine.reroute_via_raylet(there.engine.me)  # so that we write through the raylet
    there.says(here.engine.me)
    assert here.hears(1)
    here.buries(1, there.engine.me)
    assert there.loses(here.engine.me)


def test_answers_are_read_though_nothing_can_be_sent_any_more(two: tuple[Proc, Proc]) -> None:
    here, there = two
    here.says(there.engine.me)
    assert there.hears(1)
    with here.engine.lock:
        there.says(here.engine.me)
        there.engine.close()
        here.engine.send(there.engine.me, m.ProbeViaRaylet())
        here.engine.flush()
    assert here.hears(1)


def test_a_stale_descriptor_takes_no_other_connection_with_it(two: tuple[Proc, Proc], another: Proc) -> None:
    here, there = two
    engine = here.engine
    here.says(there.engine.me)
    assert there.hears(1)
    with engine.lock:
        there.engine.close()
        old = engine.peers[there.engine.me].link
        engine.send(there.engine.me, m.ProbeViaRaylet())  # waits, when the end of its connection is read
        taken = [os.open(os.devnull, os.O_RDONLY)]
        while taken[-1] < old.fd:
            taken.append(os.open(os.devnull, os.O_RDONLY))
        engine._read(old)
        engine.send(another.engine.me, m.ProbeViaRaylet())
        for fd in taken:
            os.close(fd)
        assert engine.peers[another.engine.me].link.fd == old.fd
        engine.flush()
    assert another.hears(1)
    another.says(here.engine.me)
    assert here.hears(1)


def test_who_sees_us_is_heard_even_where_we_do_not_see_him(two: tuple[Proc, Proc]) -> None:
    here, there = two
    there.engine.links._dirs.pop(0)
    here.says(there.engine.me)
    assert there.hears(1)


def test_last_words_are_read_from_whatever_connection_they_came_on(two: tuple[Proc, Proc]) -> None:
    here, there = two
    with here.engine.lock:
        here.engine.reroute_via_raylet(there.engine.me)
    there.says(here.engine.me)
    assert here.hears(1)
    with here.engine.lock:
        there.says(here.engine.me)
        here.engine.read_rest(there.engine.me)
        assert len(here.came) == 2


def test_who_cannot_connect_to_us_is_written_to_through_raylets(two: tuple[Proc, Proc]) -> None:
    here, there = two
    with here.engine.lock:
        here.engine.links.on_probe_via_raylet(there.engine.me)
    here.says(there.engine.me)
    assert here.passes_on() and not there.hears(1, 0.05)
