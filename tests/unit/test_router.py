"""Routing: order, batching, dead ends; and what a slow reader costs."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from hpcray.common.ids import HEAD, make_proc, raylet_of
from hpcray.protocol import messages as m
from hpcray.protocol.frames import FrameReader, pack
from hpcray.runtime.raylet.local_sockets import LocalSocket
from hpcray.runtime.raylet.router import Router
from hpcray.transport.base import PeerLost

ME, HERE, THERE = 1, make_proc(1, 5), make_proc(2, 7)


class Wire:
    """A control transport that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self.woken: list[int] = []
        self.dead: set[int] = set()

    def send(self, dest: int, data: bytes, wake: bool = True) -> None:
        if dest in self.dead:
            raise PeerLost(dest, "it was pulled out")
        self.sent.append((dest, data))
        if wake:
            self.woken.append(dest)


def read(data: bytes) -> list[tuple[bytes, bytes, list[m.Message]]]:
    """(destination, source, messages) of each frame."""
    return [(bytes(f[4:12]), bytes(f[12:20]), m.decode(f[20:])) for f in FrameReader().feed(data)]


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def router(wire: Wire) -> Router:
    return Router(ME, 3, wire)  # type: ignore[arg-type]


@pytest.fixture
def pair(router: Router) -> Iterator[tuple[LocalSocket, socket.socket]]:
    """A link of process HERE and its other end."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    link = LocalSocket(ours, HERE, 1)
    link.kind = "worker"
    router.links[HERE] = link
    yield link, theirs
    ours.close()
    theirs.close()


def frame(dest: bytes, src: bytes, code: int) -> bytes:
    return pack(dest, src, m.encode([m.Exit(code)]))


def test_messages_of_one_turn_make_one_frame(
    router: Router, wire: Wire, pair: tuple[LocalSocket, socket.socket]
) -> None:
    link, theirs = pair
    for code in range(3):
        router.send(HERE, m.Exit(code))
        router.send(THERE, m.Exit(code))
    router.flush()
    assert router.dirty == [link] and link.flush()
    want = [m.Exit(0), m.Exit(1), m.Exit(2)]
    assert read(theirs.recv(4096)) == [(HERE, raylet_of(ME), want)]
    assert [(node, read(data)) for node, data in wire.sent] == [(2, [(THERE, raylet_of(ME), want)])]


def test_frames_for_one_node_are_sent_in_one_batch(router: Router, wire: Wire) -> None:
    other = make_proc(2, 8)
    router.forward(THERE, HERE, frame(THERE, HERE, 1))
    router.forward(other, HERE, frame(other, HERE, 2))
    router.forward(HEAD, HERE, frame(HEAD, HERE, 3))
    router.flush()
    assert [node for node, _ in wire.sent] == [2, 0]
    assert [dest for dest, _, _ in read(wire.sent[0][1])] == [THERE, other]


def test_messages_leave_before_frames_that_arrive_later(
    router: Router, pair: tuple[LocalSocket, socket.socket]
) -> None:
    link, theirs = pair
    router.send(HERE, m.Exit(1))
    router.forward(HERE, THERE, frame(HERE, THERE, 2))
    router.send(HERE, m.Exit(3))
    router.flush()
    link.flush()
    assert [messages for _, _, messages in read(theirs.recv(4096))] == [[m.Exit(1)], [m.Exit(2)], [m.Exit(3)]]


def test_messages_of_a_raylet_to_itself_go_to_its_inbox(router: Router, wire: Wire) -> None:
    router.send(raylet_of(ME), m.Exit(1))
    assert router.inbox == [m.Exit(1)]
    assert router.flush() == [] and wire.sent == []


@pytest.mark.parametrize("nowhere", [make_proc(1, 99), make_proc(3, 1), make_proc(9, 1)])
def test_a_frame_for_an_unknown_process_is_returned_as_undeliverable(
    router: Router, pair: tuple[LocalSocket, socket.socket], nowhere: bytes
) -> None:
    link, theirs = pair
    router.forward(nowhere, HERE, frame(nowhere, HERE, 1))
    router.flush()
    link.flush()
    assert read(theirs.recv(4096))[0][2] == [m.Undeliverable(nowhere, "no such process")]


def test_undeliverable_names_the_reason_of_the_process_death(
    router: Router, wire: Wire, pair: tuple[LocalSocket, socket.socket]
) -> None:
    router.forget(HERE, "signal 9 (SIGKILL)")
    router.forward(HERE, THERE, frame(HERE, THERE, 1))
    router.flush()
    assert read(wire.sent[0][1]) == [(THERE, raylet_of(ME), [m.Undeliverable(HERE, "signal 9 (SIGKILL)")])]


def test_undeliverable_names_the_reason_of_the_node_death(
    router: Router, wire: Wire, pair: tuple[LocalSocket, socket.socket]
) -> None:
    link, theirs = pair
    router.forward(THERE, HERE, frame(THERE, HERE, 1))
    router.lose_node(2, "its power failed")
    router.forward(THERE, HERE, frame(THERE, HERE, 2))
    router.flush()
    link.flush()
    assert wire.sent == []
    assert read(theirs.recv(4096))[0][2] == [m.Undeliverable(THERE, "node 2 is dead: its power failed")]


def test_flush_returns_nodes_that_cannot_be_reached(router: Router, wire: Wire) -> None:
    wire.dead.add(2)
    router.send(THERE, m.Exit(1))
    router.send(HEAD, m.Exit(1))
    assert router.flush() == [(2, "it was pulled out")]
    assert [node for node, _ in wire.sent] == [0], "the others get theirs"


def test_a_link_notes_the_peers_of_its_process(router: Router, pair: tuple[LocalSocket, socket.socket]) -> None:
    link, _ = pair
    router.forward(HERE, THERE, frame(HERE, THERE, 1))
    assert link.peers == {THERE}


def test_slow_reader_gets_everything_in_order(router: Router, pair: tuple[LocalSocket, socket.socket]) -> None:
    link, theirs = pair
    frames = [pack(HERE, THERE, m.encode([m.Undeliverable(THERE, f"{i}" * 1000)])) for i in range(2000)]
    for one in frames:
        router.forward(HERE, THERE, one)
    assert not link.flush(), "more than a socket takes"
    got = b""
    theirs.settimeout(5)
    while len(got) < sum(map(len, frames)):
        got += theirs.recv(1 << 20)
        link.flush()
    assert got == b"".join(frames)
    assert link.flush() and link.out == []


def test_send_now_passes_messages_that_wait_and_drops_those_for_dead_nodes(router: Router, wire: Wire) -> None:
    died = m.NodeDied(2, "silent", 1)
    router.send(raylet_of(2), m.Heartbeat(1))
    router.send_now(2, died)
    assert [frame for _, data in wire.sent for frame in read(data)] == [(raylet_of(2), raylet_of(ME), [died])]
    router.lose_node(2, "silent")
    router.send_now(2, died)
    wire.dead.add(0)
    router.send_now(0, died)
    assert len(wire.sent) == 1


# ------------------------------------------------------------ the head, wherever it is


def told(wire: Wire) -> list[tuple[int, m.Message]]:
    """Return (node, message) of all messages to the head, in order."""
    return [(node, msg) for node, data in wire.sent for dest, _, found in read(data) if dest == HEAD for msg in found]


def test_frames_for_a_dead_head_wait_for_its_successor(router: Router, wire: Wire) -> None:
    router.send(HEAD, m.Exit(1))
    router.flush()
    router.head_location.gone()
    router.send(HEAD, m.Exit(2))
    router.forward(HEAD, HERE, frame(HEAD, HERE, 3))
    router.flush()
    assert told(wire) == [(0, m.Exit(1))]
    assert router.head_location.moved_to(2, 1)
    router.send(HEAD, m.Exit(4))
    router.flush()
    assert told(wire)[1:] == [(2, m.Exit(2)), (2, m.Exit(3)), (2, m.Exit(4))]
    assert not router.head_location.moved_to(0, 1), "it moves once for each epoch"
    router.flush()
    assert len(told(wire)) == 4


def test_a_new_head_gets_the_frames_that_it_has_not_received(router: Router, wire: Wire) -> None:
    router.to_head.retaining = True
    for number in range(6):
        router.send(HEAD, m.Exit(number))
        router.flush()
    router.to_head.settled(2)
    router.to_head.settled(1)
    router.head_location.gone()
    router.send(HEAD, m.Exit(6))
    router.flush()
    wire.sent.clear()
    router.head_location.moved_to(2, 1, taken=4)
    router.flush()
    assert told(wire) == [(2, m.Exit(4)), (2, m.Exit(5)), (2, m.Exit(6))]
    wire.sent.clear()
    router.head_location.moved_to(0, 2, taken=5)
    router.flush()
    assert told(wire) == [(0, m.Exit(5)), (0, m.Exit(6))], "what the first successor had not settled goes to the second"


def test_a_raylet_that_becomes_the_head_handles_deferred_frames(router: Router, wire: Wire) -> None:
    router.head_location.gone()
    router.forward(HEAD, HERE, frame(HEAD, HERE, 1))
    router.send(HEAD, m.Exit(2))
    router.flush()
    router.send(HEAD, m.Exit(3))
    router.head_location.moved_to(ME, 1)
    router.flush()
    assert [(src, m.decode(frame[20:])) for src, frame in router.deferred_to_head] == [
        (HERE, [m.Exit(1)]),
        (raylet_of(ME), [m.Exit(2)]),
        (raylet_of(ME), [m.Exit(3)]),
    ]
    router.send(HEAD, m.Exit(4))
    assert router.inbox == [m.Exit(4)] and wire.sent == [] and HEAD in router.mine


def test_a_heartbeat_does_not_wake_the_head_and_goes_with_what_does(router: Router, wire: Wire) -> None:
    beat = m.Heartbeat(ME)
    router.send_heartbeat(beat)
    assert [(node, read(data)) for node, data in wire.sent] == [(0, [(HEAD, router.me, [beat])])]
    assert wire.woken == []
    router.send(HEAD, m.Ping(ME))
    router.send_heartbeat(beat)
    router.flush()
    assert wire.woken == [0]
    assert [messages for _, data in wire.sent[1:] for *_, messages in read(data)] == [[m.Ping(ME)], [beat]]


def test_a_heartbeat_to_a_head_that_is_gone_is_reported_by_the_next_flush(router: Router, wire: Wire) -> None:
    wire.dead.add(0)
    router.send_heartbeat(m.Heartbeat(ME))
    assert router.flush() == [(0, "it was pulled out")]
