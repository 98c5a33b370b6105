"""Parts of the I/O engine, without the engine: connections to peers, what wakes a thread, timers, periodic calls."""

from __future__ import annotations

import errno
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hpcray.common.ids import make_proc, raylet_of
from hpcray.platform.process_tree import PrestartedThread
from hpcray.platform.sockets import SOCKET_BUFFER, connect_private
from hpcray.protocol.frames import FrameError, pack
from hpcray.protocol.messages import ProbeViaRaylet, encode
from hpcray.runtime.core_worker.io_engine import Timers
from hpcray.runtime.core_worker.peer_sockets import EventDescriptor, PeerLinks, listen
from hpcray.runtime.core_worker.threads import BackgroundThread, PeriodicCalls

ME, NEIGHBOR, FAR = make_proc(0, 5), make_proc(1, 6), make_proc(2, 7)
PATIENCE = 10.0


# ------------------------------------------------------------ peer links


@dataclass
class World:
    """The links of process 5 of node 0, its raylet, and process 6 of node 1, a neighbor, which listens."""

    links: PeerLinks
    raylet: socket.socket
    neighbor: socket.socket
    path: Path
    lost: list[tuple[bytes, str]] = field(default_factory=list)

    def comes(self) -> None:
        """Somebody connects to us."""
        with connect_private(str(self.path / "0" / "5.s")):
            assert self.links.accept()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    for node in ("0", "1"):
        (tmp_path / node).mkdir()
    ours, raylet = socket.socketpair()
    lost: list[tuple[bytes, str]] = []
    links = PeerLinks(
        ME,
        {node: str(tmp_path / str(node)) for node in (0, 1)},
        ours,
        peer_lost=lambda proc, reason: lost.append((proc, reason)),
    )
    with raylet, listen(str(tmp_path / "1"), 6) as neighbor:
        yield World(links, raylet, neighbor, tmp_path, lost)
        if not links.epoll.closed:
            links.close()


def test_who_is_of_this_host_has_a_link_of_its_own(world: World) -> None:
    links = world.links
    peer = links.peer(NEIGHBOR)
    assert links.peer(NEIGHBOR) is peer and not peer.out
    assert links.by_fd == {links.raylet.fd: links.raylet, peer.link.fd: peer.link}
    assert links.peer(FAR).link is links.raylet and not links.peer(FAR).out
    assert links.peer(raylet_of(0)).link is links.raylet
    assert links.peers_of(1) == [NEIGHBOR]


def test_who_cannot_be_reached_is_told_to_use_the_raylets_too(world: World) -> None:
    nobody = world.links.peer(make_proc(1, 8))
    assert nobody.link is world.links.raylet and nobody.out == [ProbeViaRaylet()]


def test_a_process_that_asks_for_it_is_written_to_through_the_raylet(world: World) -> None:
    links = world.links
    links.on_probe_via_raylet(NEIGHBOR)
    through = links.peers[NEIGHBOR]
    assert through.link is links.raylet
    links.on_probe_via_raylet(NEIGHBOR)
    assert links.peers[NEIGHBOR] is through
    assert links.via_raylet(NEIGHBOR) is links.peers[NEIGHBOR] is not through


def test_who_connects_is_known_by_its_first_frame(world: World) -> None:
    links = world.links
    world.comes()
    (link,) = (link for link in links.by_fd.values() if link is not links.raylet)
    assert link.proc is None
    with pytest.raises(FrameError):
        links.heard_from(link, raylet_of(1))
    links.heard_from(link, NEIGHBOR)
    assert link.proc == NEIGHBOR and links.peers[NEIGHBOR].link is link
    links.end(link, "its connection ended")
    links.end(link, "once more")
    assert world.lost == [(NEIGHBOR, "its connection ended")]
    assert NEIGHBOR not in links.peers and list(links.by_fd) == [links.raylet.fd]


def test_processes_of_a_lost_node_are_not_heard(world: World) -> None:
    links = world.links
    old = links.peer(NEIGHBOR).link
    old.proc = NEIGHBOR
    links.lose_node(1)
    assert old.fd not in links.by_fd and not world.lost
    world.comes()
    (link,) = (link for link in links.by_fd.values() if link is not links.raylet)
    with pytest.raises(FrameError):
        links.heard_from(link, NEIGHBOR)
    links.add_neighbors({1: str(world.path / "1"), 2: str(world.path / "1")})
    links.peers.clear()
    assert links.peer(NEIGHBOR).link is links.raylet
    assert links.peer(make_proc(2, 6)).link is not links.raylet, "of a node that has joined"


def test_a_dead_peer_is_forgotten_with_what_it_was_to_be_sent(world: World) -> None:
    peer = world.links.peer(NEIGHBOR)
    peer.out.append(ProbeViaRaylet())
    world.links.drop_peer(NEIGHBOR)
    world.links.drop_peer(NEIGHBOR)
    assert peer.dead and not peer.out and NEIGHBOR not in world.links.peers and peer.link.fd not in world.links.by_fd


def test_another_raylet_has_a_link_but_is_no_peer(world: World) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        peer = world.links.add_neighbor_raylet(ours, raylet_of(1))
        assert not world.links.peers and world.links.by_fd[peer.link.fd] is peer.link
        world.links.end(peer.link, "it ended")
        assert world.lost == [(raylet_of(1), "it ended")]
        world.links.drop_neighbor_raylet(peer)
        assert theirs.recv(1) == b""


def test_a_frame_that_comes_in_two_parts_is_gathered(world: World) -> None:
    link, frame = world.links.raylet, pack(ME, raylet_of(0), encode([ProbeViaRaylet()]))
    for part, whole in ((frame[:10], []), (frame[10:], [frame])):
        link.inbox[: len(part)] = part
        assert [bytes(each) for each in world.links.gather(link, len(part))] == whole


def test_what_the_kernel_does_not_take_is_written_later(world: World) -> None:
    links, link, frame = world.links, world.links.raylet, bytes(range(256)) * (8 * SOCKET_BUFFER // 256)
    links.keep_rest(link, frame, link.sock.send(frame))
    assert link.unsent and not links.epoll.poll(0), "there is no room yet"
    links.write_all(0.01)
    assert link.unsent
    came = bytearray()

    def read() -> None:
        while len(came) < len(frame):
            came.extend(world.raylet.recv(1 << 20))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    links.write_all(PATIENCE)
    reader.join(PATIENCE)
    assert came == frame and not link.unsent


def test_spare_descriptors_are_given_to_peers_when_all_others_are_taken(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def accept(self) -> None:
            raise OSError(errno.EMFILE, "no descriptors")

        def close(self) -> None:
            """It is not open."""

    world.links.listener.close()
    monkeypatch.setattr(world.links, "listener", Full())
    assert world.links._spare_fds
    assert not world.links.accept() and not world.links._spare_fds


def test_nothing_is_left_of_what_is_closed(world: World) -> None:
    path = world.path / "0" / "5.s"
    assert path.exists()
    world.links.close()
    assert not path.exists() and world.links.epoll.closed and world.raylet.recv(1) == b""


# ------------------------------------------------------------ event descriptor


def test_a_sleep_ends_when_it_is_set_until_that_is_cleared() -> None:
    with select.epoll() as epoll:
        event = EventDescriptor(epoll)
        assert not event.is_set and not epoll.poll(0)
        event.set()
        event.set()
        assert event.is_set and epoll.poll(0) == [(event.fd, select.EPOLLIN)]
        event.clear()
        event.clear()
        assert not event.is_set and not epoll.poll(0)
        event.close()
        assert event.is_set, "nobody writes to it any more"


# ------------------------------------------------------------ timers


def test_timers_are_called_in_their_order_once_they_are_due() -> None:
    timers, called = Timers(), []
    for when, name in ((3.0, "last"), (1.0, "first"), (2.0, "second"), (2.0, "third")):
        timers.add(when, lambda now, name=name: called.append((name, now)))  # type: ignore[misc]
    assert timers[0][0] == 1.0
    timers.run(0.5)
    assert not called
    timers.run(2.5)
    assert called == [("first", 2.5), ("second", 2.5), ("third", 2.5)] and timers[0][0] == 3.0
    timers.run(3.0)
    assert called[3:] == [("last", 3.0)] and not timers


def test_a_timer_may_add_one_that_is_due_at_once() -> None:
    timers, called = Timers(), []
    timers.add(1.0, lambda now: timers.add(now, called.append))
    timers.run(1.0)
    assert called == [1.0] and not timers


def test_timers_that_come_after_one_that_fails_are_called_next_time() -> None:
    timers, called = Timers(), []
    timers.add(1.0, lambda now: [][0])
    timers.add(1.0, called.append)
    with pytest.raises(IndexError):
        timers.run(1.0)
    timers.run(2.0)
    assert called == [2.0]


# ------------------------------------------------------------ periodic calls


def test_all_are_made_with_the_shortest_period(capfd: pytest.CaptureFixture[str]) -> None:
    periodic, called = PeriodicCalls(3600.0), []
    before = time.monotonic()
    assert periodic.due >= before + 3000
    periodic.add(50.0, lambda: called.append("one") or [][0])  # type: ignore[func-returns-value]
    periodic.add(400.0, lambda: called.append("two"))
    assert before + 40 <= periodic.due <= time.monotonic() + 50
    periodic.run()
    assert called == ["one", "two"] and before + 40 <= periodic.due <= time.monotonic() + 50
    assert "IndexError" in capfd.readouterr().err


# ------------------------------------------------------------ background thread


def test_a_thread_sleeps_between_its_looks_until_it_is_called() -> None:
    looks: list[bool] = []
    thread = BackgroundThread(lambda: looks.append(thread.pause(PATIENCE)))
    thread.call()
    thread.call()
    thread.start()
    thread.join(PATIENCE)
    assert looks == [True] and not thread.thread.is_alive()
    assert not thread.pause(0.0), "one call ends one pause"


def test_a_thread_that_is_parked_sleeps_until_it_is_unparked() -> None:
    woken: list[bool] = []
    thread = BackgroundThread(lambda: woken.append(thread.sleep(PATIENCE)))
    thread.unpark()
    assert not thread.is_parked and not thread.sleep(0.0), "it was not parked"
    thread.park()
    assert thread.is_parked and not thread.sleep(0.0)
    thread.start()
    thread.unpark()
    thread.unpark()
    thread.join(PATIENCE)
    assert woken == [True] and not thread.is_parked and not thread.sleep(0.0)


def test_a_thread_that_was_started_before_is_used() -> None:
    who: list[threading.Thread] = []
    prestarted = PrestartedThread("hpcray-test")

    def run() -> None:
        who.append(threading.current_thread())
        thread.join(PATIENCE)  # of itself: returns at once

    thread = BackgroundThread(run, prestarted)
    assert thread.thread is prestarted.thread
    thread.start()
    thread.join(PATIENCE)
    assert who == [prestarted.thread] and not prestarted.thread.is_alive()
