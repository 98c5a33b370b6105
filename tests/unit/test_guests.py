"""Processes of neighbouring nodes at a raylet: who is let in, which way they are answered, and when they are gone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcray.base.config import Config
from hpcray.base.ids import HEAD, NIL_PROC, PUT_INDEX, make_proc, node_of, raylet_of
from hpcray.core.effects import Send
from hpcray.core.raylet import RayletCore
from hpcray.core.store.node_store import NodeStore
from hpcray.runtime.guests import Guests
from hpcray.runtime.leaving import forget_node
from hpcray.runtime.local_links import GUEST, Link, Listener
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


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


def heard(sock: socket.socket) -> list[m.Message]:
    """What has come on a link."""
    sock.setblocking(False)
    try:
        data = sock.recv(1 << 16)
    except BlockingIOError:
        return []
    return [msg for _, src, messages in read(data) for msg in messages if src == ME]


class TestComing:
    def test_a_neighbours_process_gets_the_arena(self, node: Node) -> None:
        sock = node.knock(GUEST_OF_2)
        data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 1)
        ((dest, src, (welcome,)),) = read(data)
        assert (dest, src) == (GUEST_OF_2, ME)
        assert isinstance(welcome, m.Welcome) and welcome.proc == GUEST_OF_2 and welcome.arena_size == ARENA
        (fd,) = fds
        assert os.fstat(fd).st_ino == os.fstat(node.arena).st_ino
        os.close(fd)
        assert list(node.guests) == [GUEST_OF_2] and not node.raylet.router.links, "no process of this node"

    @pytest.mark.parametrize("who", [raylet_of(2), make_proc(0, 7), make_proc(9, 7), HERE, ME, HEAD, NIL_PROC])
    def test_nobody_else_gets_it(self, node: Node, who: bytes) -> None:
        sock = node.knock(who)
        data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 1)
        assert (data, fds) == (b"", []) and not node.guests and node.wire.sent == []

    def test_nor_does_a_process_of_a_dead_neighbour(self, node: Node) -> None:
        node.buries(2)
        assert socket.recv_fds(node.knock(GUEST_OF_2), 1 << 16, 1)[:2] == (b"", [])
        assert not node.guests

    def test_who_has_gone_before_he_is_let_in_leaves_nothing(self, node: Node) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(node.path)
        sock.sendall(pack(ME, GUEST_OF_2, m.encode([m.Hello(1, GUEST, b"")])))
        sock.close()
        node.turn()
        assert not node.guests and not node.loop._links

    def test_where_the_arena_could_not_be_handed_over_nobody_is_let_in(self, node: Node) -> None:
        ours, theirs = socket.socketpair()
        theirs.close()
        link = Link(ours, GUEST_OF_2, 1)
        node.raylet.guests.hello(link)
        assert not node.guests
        ours.close()

    def test_they_are_shown_among_the_processes_of_the_store(self, node: Node) -> None:
        node.enter(GUEST_OF_2)
        node.raylet.messages(GUEST_OF_3, [m.ListStore(4, 1)])
        node.turn(1)
        ((dest, reply),) = node.wire.sent
        assert dest == GUEST_OF_3 and isinstance(reply, m.GcsReply)
        shown = msgspec.msgpack.decode(reply.value)["processes"]
        assert shown == [[GUEST_OF_2, os.getpid(), GUEST]]

    def test_what_somebody_sends_who_is_turned_away_is_not_read(self, node: Node) -> None:
        node.put(1)
        stranger = make_proc(0, 7)
        sock = node.knock(stranger, m.Open(oid(1), SIZE, []))
        assert sock.recv(1) == b"" and node.pinned == 0 and stranger not in node.guests


class TestAnswers:
    def test_the_store_answers_on_the_link(self, node: Node) -> None:
        offset, sock = node.put(1), node.enter(GUEST_OF_2)
        node.says(sock, GUEST_OF_2, m.Open(oid(1), SIZE, []), m.Open(oid(2), SIZE, []))
        opened, error = heard(sock)
        assert opened == m.Opened(oid(1), offset, SIZE, False)
        assert isinstance(error, m.StoreError) and error.id == oid(2) and error.kind == "lost"
        assert node.pinned == 1
        node.raylet.apply([Send(GUEST_OF_2, m.Unpin(100))])
        node.turn(1)
        assert heard(sock) == [m.Unpin(100)] and node.wire.sent == []
        node.says(sock, GUEST_OF_2, m.Release([oid(1)]))
        assert node.pinned == 0

    def test_all_else_comes_through_its_raylet_in_the_order_in_which_it_was_said(self, node: Node) -> None:
        sock = node.enter(GUEST_OF_2)
        said = [
            m.AddLocation(oid(1, GUEST_OF_2), 1),
            m.Kept(oid(1)),
            m.ProcDied(HERE, "killed"),
            m.GcsReply(1, True, b""),
        ]
        node.raylet.apply(Send(GUEST_OF_2, msg) for msg in said)
        node.turn(1)
        assert heard(sock) == [] and node.wire.sent == [(GUEST_OF_2, msg) for msg in said]

    def test_who_is_no_guest_is_answered_through_its_raylet(self, node: Node) -> None:
        """An owner has a copy kept here, say."""
        offset, sock = node.put(1), node.enter(GUEST_OF_2)
        node.raylet.messages(ANOTHER_OF_2, [m.Open(oid(1), SIZE, [])])
        node.turn(1)
        assert node.wire.sent == [(ANOTHER_OF_2, m.Opened(oid(1), offset, SIZE, False))] and heard(sock) == []

    def test_answers_of_one_turn_make_one_frame_for_each(self, node: Node) -> None:
        socks = {proc: node.enter(proc) for proc in (GUEST_OF_2, GUEST_OF_3)}
        for size in (1, 2):
            node.raylet.apply(Send(proc, m.Unpin(size)) for proc in socks)
        node.turn(1)
        for proc, sock in socks.items():
            assert read(sock.recv(1 << 16)) == [(proc, ME, [m.Unpin(1), m.Unpin(2)])]

    def test_after_its_link_has_ended_it_hears_through_its_raylet(self, node: Node) -> None:
        node.leaves(node.enter(GUEST_OF_2))
        node.raylet.apply([Send(GUEST_OF_2, m.Unpin(100))])
        node.turn(1)
        assert node.wire.sent == [(GUEST_OF_2, m.Unpin(100))]

    def test_what_was_to_go_out_when_the_link_ended_is_dropped(self, node: Node) -> None:
        """The guest gives back, by itself, all that it cannot know of."""
        sock = node.enter(GUEST_OF_2)
        link = node.guests[GUEST_OF_2]
        node.raylet.apply([Send(GUEST_OF_2, m.Unpin(100))])
        node.loop._lose(link, "its connection closed")
        node.turn(1)
        assert node.wire.sent == [] and sock.recv(100) == b""

    def test_what_it_says_to_others_is_passed_on(self, node: Node) -> None:
        sock = node.enter(GUEST_OF_2)
        sock.sendall(pack(GUEST_OF_3, GUEST_OF_2, m.encode([m.Knock()])))
        node.turn(1)
        assert node.wire.sent == [(GUEST_OF_3, m.Knock())]


class TestLeaving:
    def opens(self, node: Node, proc: bytes = GUEST_OF_2) -> socket.socket:
        node.put(1)
        sock = node.enter(proc)
        node.says(sock, proc, m.Open(oid(1), SIZE, []))
        assert [type(msg) for msg in heard(sock)] == [m.Opened] and node.pinned == 1
        return sock

    def test_a_link_that_ends_releases_nothing_while_its_node_lives(self, node: Node) -> None:
        """Its raylet tells how the process ended, or that it lives."""
        node.leaves(self.opens(node))
        assert not node.guests and node.pinned == 1
        node.raylet.messages(raylet_of(2), [m.ProcDied(GUEST_OF_2, "killed")])
        assert node.pinned == 0

    def test_who_lives_may_release_on_the_other_way(self, node: Node) -> None:
        node.leaves(self.opens(node))
        node.raylet.messages(GUEST_OF_2, [m.Release([oid(1)])])
        assert node.pinned == 0

    def test_a_link_that_ends_after_its_node_releases_all(self, node: Node) -> None:
        sock = self.opens(node)
        node.buries(2)
        assert node.pinned == 1 and GUEST_OF_2 in node.guests, "it may still read"
        node.leaves(sock)
        assert node.pinned == 0 and not node.guests

    def test_on_it_a_process_of_a_dead_node_is_still_heard_and_answered(self, node: Node) -> None:
        sock = self.opens(node)
        node.buries(2)
        node.says(sock, GUEST_OF_2, m.Release([oid(1)]), m.Open(oid(1), SIZE, []))
        assert [type(msg) for msg in heard(sock)] == [m.Opened] and node.pinned == 1
        node.leaves(sock)
        assert node.pinned == 0

    def test_whose_link_had_ended_before_its_node_did_goes_with_that(self, node: Node) -> None:
        node.leaves(self.opens(node))
        node.buries(2)
        assert node.pinned == 0

    def test_guests_of_other_nodes_stay(self, node: Node) -> None:
        self.opens(node, GUEST_OF_3)
        node.buries(2)
        assert node.pinned == 1 and list(node.guests) == [GUEST_OF_3]

    def test_an_older_link_of_a_guest_that_has_come_again_ends_nothing(self, node: Node) -> None:
        old = self.opens(node)
        new = node.enter(GUEST_OF_2)
        node.buries(2)
        node.leaves(old)
        assert node.pinned == 1 and GUEST_OF_2 in node.guests
        node.leaves(new)
        assert node.pinned == 0


class TestPrefetch:
    def prefetch(self, node: Node, *nodes: list[int]) -> list[tuple[bytes, m.Message]]:
        refs = [m.ArgRef(oid(counter, GUEST_OF_3), SIZE, at) for counter, at in enumerate(nodes)]
        node.raylet.messages(HERE, [m.Prefetch(refs)])
        node.turn(1)
        return node.wire.sent

    def ref(self, counter: int, nodes: list[int]) -> m.ArgRef:
        return m.ArgRef(oid(counter, GUEST_OF_3), SIZE, nodes)

    def test_what_a_neighbour_has_is_brought_back_there(self, node: Node) -> None:
        sent = self.prefetch(node, [0, 3, 2], [2])
        assert sent == [
            (raylet_of(3), m.Prefetch([self.ref(0, [3])])),
            (raylet_of(2), m.Prefetch([self.ref(1, [2])])),
        ]
        assert node.store.snapshot()["objects"] == 0, "nothing is copied"

    def test_what_only_nodes_of_other_hosts_have_is_fetched(self, node: Node) -> None:
        ((dest, asked),) = self.prefetch(node, [0])
        assert dest == raylet_of(0) and isinstance(asked, m.Pull)

    def test_what_is_here_too_is_no_neighbours_matter(self, node: Node) -> None:
        offset = node.put(1)
        node.raylet.messages(HERE, [m.Prefetch([m.ArgRef(oid(1), SIZE, [2, 1])])])
        node.turn(1)
        assert node.wire.sent == [] and node.store._objects[oid(1)].offset == offset

    def test_of_several_each_goes_its_way(self, node: Node) -> None:
        sent = self.prefetch(node, [0], [2], [0, 2])
        assert [dest for dest, msg in sent if isinstance(msg, m.Prefetch)] == [raylet_of(2)] * 2
        assert [msg.id for _, msg in sent if isinstance(msg, m.Pull)] == [oid(0, GUEST_OF_3)]

    def test_a_neighbour_does_not_pass_it_on(self, node: Node) -> None:
        """The object has gone since, say."""
        node.raylet.messages(raylet_of(2), [m.Prefetch([self.ref(0, [1])])])
        node.turn(1)
        assert node.wire.sent == [] and node.store.snapshot()["objects"] == 0

    def test_a_dead_neighbour_is_not_asked(self, node: Node) -> None:
        node.buries(2)
        assert self.prefetch(node, [2]) == []
