"""Processes of neighboring nodes at a raylet: which are welcomed, how they get replies, and when their pins end."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from neighbor_kit import ANOTHER_OF_2, ARENA, CLIENT_OF_2, CLIENT_OF_3, HERE, ME, SIZE, Node, heard, oid, read

from hpcray.common.ids import HEAD, NIL_PROC, make_proc, raylet_of
from hpcray.core.effects import Send
from hpcray.protocol import messages as m
from hpcray.protocol.frames import pack
from hpcray.protocol.messages import GUEST
from hpcray.runtime.raylet.local_processes import NeighborClients


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


class TestConnecting:
    def test_a_neighbors_process_gets_the_arena(self, node: Node) -> None:
        sock = node.knock(CLIENT_OF_2)
        data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 1)
        ((dest, src, (welcome,)),) = read(data)
        assert (dest, src) == (CLIENT_OF_2, ME)
        assert isinstance(welcome, m.Welcome) and welcome.proc == CLIENT_OF_2 and welcome.arena_size == ARENA
        (fd,) = fds
        assert os.fstat(fd).st_ino == os.fstat(node.arena).st_ino
        os.close(fd)
        assert list(node.clients) == [CLIENT_OF_2] and not node.raylet.router.links, "no process of this node"

    @pytest.mark.parametrize("who", [raylet_of(2), make_proc(0, 7), make_proc(9, 7), HERE, ME, HEAD, NIL_PROC])
    def test_a_process_of_no_neighbor_is_refused(self, node: Node, who: bytes) -> None:
        sock = node.knock(who)
        data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 1)
        assert (data, fds) == (b"", []) and not node.clients and node.wire.sent == []

    def test_a_process_of_a_dead_neighbor_is_refused(self, node: Node) -> None:
        node.buries(2)
        assert socket.recv_fds(node.knock(CLIENT_OF_2), 1 << 16, 1)[:2] == (b"", [])
        assert not node.clients

    def test_a_process_that_ends_before_its_welcome_leaves_nothing(self, node: Node) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(node.path)
        sock.sendall(pack(ME, CLIENT_OF_2, m.encode([m.Hello(1, GUEST)])))
        sock.close()
        node.turn()
        assert not node.clients and not node.loop._links

    def test_the_connection_is_closed_when_the_arena_cannot_be_sent(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The process would wait forever otherwise; now its own node pulls the objects."""

        def refuse(*args: Any) -> int:
            raise OSError(errno.ETOOMANYREFS, "too many descriptors are under way")

        node.put(1)
        monkeypatch.setattr(socket, "send_fds", refuse)
        sock = node.knock(CLIENT_OF_2, m.Open(oid(1), SIZE, []))
        assert sock.recv(1) == b"" and not node.clients and not node.loop._links
        assert node.pinned == 0 and node.wire.sent == []
        monkeypatch.undo()
        node.enter(CLIENT_OF_2)

    def test_the_list_of_the_store_shows_neighbors_processes(self, node: Node) -> None:
        node.enter(CLIENT_OF_2)
        node.raylet.messages(CLIENT_OF_3, [m.ListStore(4, 1)])
        node.turn(1)
        ((dest, reply),) = node.wire.sent
        assert dest == CLIENT_OF_3 and isinstance(reply, m.GcsReply)
        shown = msgspec.msgpack.decode(reply.value)["processes"]
        assert shown == [[CLIENT_OF_2, os.getpid(), GUEST]]

    def test_messages_of_a_refused_process_are_not_read(self, node: Node) -> None:
        node.put(1)
        stranger = make_proc(0, 7)
        sock = node.knock(stranger, m.Open(oid(1), SIZE, []))
        assert sock.recv(1) == b"" and node.pinned == 0 and stranger not in node.clients


class TestLimit:
    def is_refused(self, node: Node, proc: bytes, *more: m.Message) -> bool:
        """Return whether the process is refused, like one of no neighbor."""
        return node.knock(proc, *more).recv(1) == b"" and proc not in node.clients

    def test_a_process_beyond_the_limit_is_refused_with_all_its_messages(self, node: Node) -> None:
        node.put(1)
        node.raylet.neighbor_clients.limit = 1
        sock = node.enter(CLIENT_OF_2)
        assert self.is_refused(node, CLIENT_OF_3, m.Open(oid(1), SIZE, []))
        assert node.pinned == 0 and node.wire.sent == [] and len(node.loop._links) == 1
        node.says(sock, CLIENT_OF_2, m.Open(oid(1), SIZE, []))
        assert [type(msg) for msg in heard(sock)] == [m.Opened], "who is in stays"

    def test_a_process_that_disconnects_makes_room_for_another(self, node: Node) -> None:
        node.raylet.neighbor_clients.limit = 2
        sock = node.enter(CLIENT_OF_2)
        node.enter(ANOTHER_OF_2)
        assert self.is_refused(node, CLIENT_OF_3)
        node.leaves(sock)
        node.enter(CLIENT_OF_3)
        assert self.is_refused(node, CLIENT_OF_2)

    @pytest.mark.parametrize("limit", [0, -1])
    def test_a_limit_of_zero_or_less_refuses_all_neighbors_processes(self, node: Node, limit: int) -> None:
        node.raylet.neighbor_clients.limit = limit
        assert self.is_refused(node, CLIENT_OF_2)

    def test_neighbors_processes_are_refused_until_the_limit_is_set(self, node: Node) -> None:
        raylet = node.raylet
        raylet.neighbor_clients = NeighborClients(node.loop, raylet.router, node.store, node.arena, raylet)
        assert self.is_refused(node, CLIENT_OF_2)


class TestReplies:
    def test_the_store_replies_over_the_neighbors_connection(self, node: Node) -> None:
        offset, sock = node.put(1), node.enter(CLIENT_OF_2)
        node.says(sock, CLIENT_OF_2, m.Open(oid(1), SIZE, []), m.Open(oid(2), SIZE, []))
        opened, error = heard(sock)
        assert opened == m.Opened(oid(1), offset, SIZE, False)
        assert isinstance(error, m.StoreError) and error.id == oid(2) and error.kind == "lost"
        assert node.pinned == 1
        node.raylet.apply([Send(CLIENT_OF_2, m.Unpin(100))])
        node.turn(1)
        assert heard(sock) == [m.Unpin(100)] and node.wire.sent == []
        node.says(sock, CLIENT_OF_2, m.Release([oid(1)]))
        assert node.pinned == 0

    def test_other_messages_go_through_the_neighbors_raylet_in_order(self, node: Node) -> None:
        sock = node.enter(CLIENT_OF_2)
        said = [
            m.AddLocation(oid(1, CLIENT_OF_2), 1),
            m.ReplicaPinned(oid(1)),
            m.ProcDied(HERE, "killed"),
            m.GcsReply(1, True, b""),
        ]
        node.raylet.apply(Send(CLIENT_OF_2, msg) for msg in said)
        node.turn(1)
        assert heard(sock) == [] and node.wire.sent == [(CLIENT_OF_2, msg) for msg in said]

    def test_a_process_without_a_connection_gets_replies_through_its_raylet(self, node: Node) -> None:
        """For example an owner that has a copy pinned here."""
        offset, sock = node.put(1), node.enter(CLIENT_OF_2)
        node.raylet.messages(ANOTHER_OF_2, [m.Open(oid(1), SIZE, [])])
        node.turn(1)
        assert node.wire.sent == [(ANOTHER_OF_2, m.Opened(oid(1), offset, SIZE, False))] and heard(sock) == []

    def test_replies_of_one_turn_make_one_frame_per_process(self, node: Node) -> None:
        socks = {proc: node.enter(proc) for proc in (CLIENT_OF_2, CLIENT_OF_3)}
        for size in (1, 2):
            node.raylet.apply(Send(proc, m.Unpin(size)) for proc in socks)
        node.turn(1)
        for proc, sock in socks.items():
            assert read(sock.recv(1 << 16)) == [(proc, ME, [m.Unpin(1), m.Unpin(2)])]

    def test_replies_go_through_the_raylet_after_the_connection_has_ended(self, node: Node) -> None:
        node.leaves(node.enter(CLIENT_OF_2))
        node.raylet.apply([Send(CLIENT_OF_2, m.Unpin(100))])
        node.turn(1)
        assert node.wire.sent == [(CLIENT_OF_2, m.Unpin(100))]

    def test_unsent_replies_are_dropped_when_the_connection_ends(self, node: Node) -> None:
        """The process releases by itself the pins that it cannot know of."""
        sock = node.enter(CLIENT_OF_2)
        link = node.clients[CLIENT_OF_2]
        node.raylet.apply([Send(CLIENT_OF_2, m.Unpin(100))])
        node.loop._lose(link, "its connection closed")
        node.turn(1)
        assert node.wire.sent == [] and sock.recv(100) == b""

    def test_frames_of_a_neighbors_process_to_others_are_forwarded(self, node: Node) -> None:
        sock = node.enter(CLIENT_OF_2)
        sock.sendall(pack(CLIENT_OF_3, CLIENT_OF_2, m.encode([m.ProbeViaRaylet()])))
        node.turn(1)
        assert node.wire.sent == [(CLIENT_OF_3, m.ProbeViaRaylet())]


class TestDisconnecting:
    def opens(self, node: Node, proc: bytes = CLIENT_OF_2) -> socket.socket:
        node.put(1)
        sock = node.enter(proc)
        node.says(sock, proc, m.Open(oid(1), SIZE, []))
        assert [type(msg) for msg in heard(sock)] == [m.Opened] and node.pinned == 1
        return sock

    def test_pins_stay_when_a_connection_ends_while_its_node_lives(self, node: Node) -> None:
        """The raylet of the process reports its death, if it is dead."""
        node.leaves(self.opens(node))
        assert not node.clients and node.pinned == 1
        node.raylet.messages(raylet_of(2), [m.ProcDied(CLIENT_OF_2, "killed")])
        assert node.pinned == 0

    def test_a_disconnected_process_can_release_through_its_raylet(self, node: Node) -> None:
        node.leaves(self.opens(node))
        node.raylet.messages(CLIENT_OF_2, [m.Release([oid(1)])])
        assert node.pinned == 0

    def test_pins_end_when_a_connection_ends_after_its_node_has_died(self, node: Node) -> None:
        sock = self.opens(node)
        node.buries(2)
        assert node.pinned == 1 and CLIENT_OF_2 in node.clients, "it may still read"
        node.leaves(sock)
        assert node.pinned == 0 and not node.clients

    def test_a_connected_process_of_a_dead_node_still_gets_replies(self, node: Node) -> None:
        sock = self.opens(node)
        node.buries(2)
        node.says(sock, CLIENT_OF_2, m.Release([oid(1)]), m.Open(oid(1), SIZE, []))
        assert [type(msg) for msg in heard(sock)] == [m.Opened] and node.pinned == 1
        node.leaves(sock)
        assert node.pinned == 0

    def test_pins_of_a_disconnected_process_end_with_its_node(self, node: Node) -> None:
        node.leaves(self.opens(node))
        node.buries(2)
        assert node.pinned == 0

    def test_pins_of_other_nodes_processes_survive_a_node_death(self, node: Node) -> None:
        self.opens(node, CLIENT_OF_3)
        node.buries(2)
        assert node.pinned == 1 and list(node.clients) == [CLIENT_OF_3]

    def test_the_end_of_an_older_connection_of_a_reconnected_process_ends_no_pin(self, node: Node) -> None:
        old = self.opens(node)
        new = node.enter(CLIENT_OF_2)
        node.buries(2)
        node.leaves(old)
        assert node.pinned == 1 and CLIENT_OF_2 in node.clients
        node.leaves(new)
        assert node.pinned == 0


class TestPrefetch:
    def prefetch(self, node: Node, *nodes: list[int]) -> list[tuple[bytes, m.Message]]:
        refs = [m.ArgRef(oid(counter, CLIENT_OF_3), SIZE, at) for counter, at in enumerate(nodes)]
        node.raylet.messages(HERE, [m.Prefetch(refs)])
        node.turn(1)
        return node.wire.sent

    def ref(self, counter: int, nodes: list[int]) -> m.ArgRef:
        return m.ArgRef(oid(counter, CLIENT_OF_3), SIZE, nodes)

    def test_prefetch_of_a_neighbors_object_is_forwarded_to_the_neighbor(self, node: Node) -> None:
        sent = self.prefetch(node, [0, 3, 2], [2])
        assert sent == [
            (raylet_of(3), m.Prefetch([self.ref(0, [3])])),
            (raylet_of(2), m.Prefetch([self.ref(1, [2])])),
        ]
        assert node.store.snapshot()["objects"] == 0, "nothing is copied"

    def test_prefetch_pulls_an_object_of_other_hosts(self, node: Node) -> None:
        ((dest, asked),) = self.prefetch(node, [0])
        assert dest == raylet_of(0) and isinstance(asked, m.Pull)

    def test_prefetch_of_a_local_object_is_not_forwarded(self, node: Node) -> None:
        offset = node.put(1)
        node.raylet.messages(HERE, [m.Prefetch([m.ArgRef(oid(1), SIZE, [2, 1])])])
        node.turn(1)
        assert node.wire.sent == [] and node.store.lifecycle.objects[oid(1)].offset == offset

    def test_prefetch_of_several_objects_forwards_or_pulls_each(self, node: Node) -> None:
        sent = self.prefetch(node, [0], [2], [0, 2])
        assert [dest for dest, msg in sent if isinstance(msg, m.Prefetch)] == [raylet_of(2)] * 2
        assert [msg.id for _, msg in sent if isinstance(msg, m.Pull)] == [oid(0, CLIENT_OF_3)]

    def test_a_neighbor_does_not_forward_a_prefetch_again(self, node: Node) -> None:
        """For example of an object that was freed meanwhile."""
        node.raylet.messages(raylet_of(2), [m.Prefetch([self.ref(0, [1])])])
        node.turn(1)
        assert node.wire.sent == [] and node.store.snapshot()["objects"] == 0

    def test_prefetch_is_not_forwarded_to_a_dead_neighbor(self, node: Node) -> None:
        node.buries(2)
        assert self.prefetch(node, [2]) == []
