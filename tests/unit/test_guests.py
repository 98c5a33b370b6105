"""Processes of neighbouring nodes at a raylet: who is let in, which way they are answered, and when they are gone."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from guests_kit import ANOTHER_OF_2, ARENA, GUEST_OF_2, GUEST_OF_3, HERE, ME, SIZE, Node, heard, oid, read

from hpcray.base.ids import HEAD, NIL_PROC, make_proc, raylet_of
from hpcray.core.effects import Send
from hpcray.runtime.guests import Guests
from hpcray.runtime.local_links import GUEST
from hpcray.wire import messages as m
from hpcray.wire.frames import pack


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


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

    def test_where_the_arena_cannot_be_handed_over_the_link_is_closed(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Who has come would wait for ever; so it has its own node pull what is here."""

        def refuse(*args: Any) -> int:
            raise OSError(errno.ETOOMANYREFS, "too many descriptors are under way")

        node.put(1)
        monkeypatch.setattr(socket, "send_fds", refuse)
        sock = node.knock(GUEST_OF_2, m.Open(oid(1), SIZE, []))
        assert sock.recv(1) == b"" and not node.guests and not node.loop._links
        assert node.pinned == 0 and node.wire.sent == []
        monkeypatch.undo()
        node.enter(GUEST_OF_2)

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


class TestLimit:
    def turned_away(self, node: Node, proc: bytes, *more: m.Message) -> bool:
        """As a stranger is."""
        return node.knock(proc, *more).recv(1) == b"" and proc not in node.guests

    def test_who_is_beyond_it_is_turned_away_with_all_that_it_has_sent(self, node: Node) -> None:
        node.put(1)
        node.raylet.guests.limit = 1
        sock = node.enter(GUEST_OF_2)
        assert self.turned_away(node, GUEST_OF_3, m.Open(oid(1), SIZE, []))
        assert node.pinned == 0 and node.wire.sent == [] and len(node.loop._links) == 1
        node.says(sock, GUEST_OF_2, m.Open(oid(1), SIZE, []))
        assert [type(msg) for msg in heard(sock)] == [m.Opened], "who is in stays"

    def test_one_that_leaves_makes_room_for_another(self, node: Node) -> None:
        node.raylet.guests.limit = 2
        sock = node.enter(GUEST_OF_2)
        node.enter(ANOTHER_OF_2)
        assert self.turned_away(node, GUEST_OF_3)
        node.leaves(sock)
        node.enter(GUEST_OF_3)
        assert self.turned_away(node, GUEST_OF_2)

    @pytest.mark.parametrize("limit", [0, -1])
    def test_where_the_workers_need_all_nobody_is_let_in(self, node: Node, limit: int) -> None:
        node.raylet.guests.limit = limit
        assert self.turned_away(node, GUEST_OF_2)

    def test_nobody_is_let_in_before_it_is_known(self, node: Node) -> None:
        node.raylet.guests = Guests(node.raylet, node.arena)
        assert self.turned_away(node, GUEST_OF_2)


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
