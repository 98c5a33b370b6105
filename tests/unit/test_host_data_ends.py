"""Objects between nodes of one host: deaths at each step, and peers that say what they should not."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.strangers import as_stranger, needs_stranger, stranger_says
from host_kit import BIG, SMALL, Host, copiers_of, held, make, windows

from hpcray.runtime import host_copies, host_links
from hpcray.transport.base import FOREVER

__all__ = ["held", "make"]  # fixtures


@pytest.mark.parametrize("size", [SMALL, BIG])
def test_a_sender_that_gives_the_receiver_up_makes_its_copy_an_error(
    make: Callable[..., Host], held: threading.Event, size: int
) -> None:
    """It may have given the block to others while it was copied."""
    host = make()
    host.fill(0, 1, 0, size)
    host.planes[1].receive(0, 1, 0, size)
    host.planes[0].send(1, 1, 0, size)
    host.planes[1]._watch.look()
    if size == BIG:
        host.planes[1]._copies.work()
    host.planes[0].forget(1, "declared dead")
    assert host.planes[0].progress() == [("sent", 1, 1, "declared dead")]
    held.set()
    host.run(1, until=lambda: host.reports[1])
    ((what, node, tag, error),) = host.reports[1]
    assert (what, node, tag) == ("received", 0, 1) and error and "node 0 has closed the connection" in error
    assert not host.planes[1].busy() and windows() == 0


def test_forgetting_who_sends_ends_what_is_expected_offered_and_being_copied(
    make: Callable[..., Host], held: threading.Event
) -> None:
    host = make()
    running = host_copies._AHEAD * copiers_of(host)
    for tag in range(running + 2):
        host.planes[1].receive(0, tag, tag * BIG, BIG)
        if tag <= running:
            host.planes[0].send(1, tag, 0, BIG)
    assert host.planes[1].progress() == []
    host.planes[1].forget(0, "declared dead")
    expected = {("received", 0, tag, "declared dead") for tag in (running, running + 1)}
    assert set(host.planes[1].progress()) == expected, "the others are still being written"
    assert host.planes[1].busy() and windows() == 2
    held.set()
    host.run(1, until=lambda: len(host.reports[1]) == running)
    assert set(host.reports[1]) == {("received", 0, tag, "declared dead") for tag in range(running)}
    assert not host.planes[1].busy() and windows() == 1
    host.planes[0].progress()
    host.planes[1].receive(0, 99, 0, SMALL)
    host.planes[0].send(1, 99, 0, SMALL)
    assert host.net.next_event() < FOREVER, "there is only the wire now"


def test_the_dead_do_not_come_back(make: Callable[..., Host]) -> None:
    host = make(meet=False)
    host.planes[0].forget(1, "declared dead")
    host.planes[1].meet({0: host.dirs[0]})
    for turn in range(6):
        assert host.planes[turn % 2].progress() == []
    assert not host.planes[1]._copies._sources and not host.planes[0]._offers._guests


def test_a_peer_that_is_gone_leaves_no_mapping_and_no_descriptor(make: Callable[..., Host]) -> None:
    host = make()
    host.fill(0, 1, 0, BIG)
    host.planes[1].receive(0, 1, 0, BIG)
    host.planes[0].send(1, 2, 0, BIG)
    host.end(0)
    assert host.planes[1].progress() == [] and windows() == 0
    assert host.planes[1].busy(), "the wire still expects it"
    host.planes[1].forget(0, "it is dead")
    assert [report[:3] for report in host.planes[1].progress()] == [("received", 0, 1)]


@pytest.mark.parametrize("end", ["cancelled", "forgotten", "closed"])
def test_when_all_that_waited_to_be_copied_is_dropped_the_raylet_may_sleep(
    make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(host_copies, "_SLICE", 0.0)  # one copy in each turn
    host = make()
    for tag in range(3):
        host.planes[1].receive(0, tag, tag * SMALL, SMALL)
        host.planes[0].send(1, tag, 0, SMALL)
    assert host.planes[1].progress() == [("received", 0, 0, None)]
    if end == "cancelled":
        assert [host.planes[1].cancel(tag) for tag in (1, 2)] == [True, True]
    elif end == "forgotten":
        host.planes[1].forget(0, "declared dead")
    else:
        host.end(0)
    host.planes[1].progress()
    host.planes[1].progress()
    assert not host.planes[1].busy() and host.planes[1].patience() == FOREVER


@contextlib.contextmanager
def raw(host: Host) -> Iterator[socket.socket]:
    """A connection to node 0 of somebody who speaks for himself."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(30)
        sock.connect(host.dirs[0] + "/d.s")
        yield sock


HELLO = host_links.HELLO.pack(host_links.MAGIC, 1)


@pytest.mark.parametrize(
    "packets",
    [
        [b"x"],
        [HELLO[:-1]],
        [host_links.HELLO.pack(b"hpcray/0", 1)],
        [host_links.HELLO.pack(host_links.MAGIC, 0)],
        [HELLO, b"x"],
        [HELLO, b"ready", b"x"],
        [HELLO, b"ready", host_links.ACK.pack(5)],
        [HELLO, b"ready", b"ready"],
        [],
        [HELLO],
        [HELLO, b"ready"],
    ],
)
def test_a_stranger_in_speech_is_turned_away_by_who_sends(make: Callable[..., Host], packets: list[bytes]) -> None:
    host = make(meet=False)
    ends = packets in ([], [HELLO], [HELLO, b"ready"])
    with raw(host) as sock:
        for packet in packets:
            sock.send(packet)
            host.planes[0].progress()
        if packets[1:2] == [b"ready"] and ends:
            host.planes[0].send(1, 3, 0, SMALL)
        host.planes[0].progress()
        if not ends:
            with contextlib.suppress(ConnectionError):
                while sock.recv(100):
                    pass
    told = host.planes[0].progress()
    assert [report[:3] for report in told] == ([("sent", 1, 3)] if packets == [HELLO, b"ready"] else [])
    assert all(report[3] for report in told)
    assert not host.planes[0]._offers._guests and not host.planes[0]._offers._readers
    host.meet()
    host.planes[0].send(1, 4, 0, SMALL)
    assert host.planes[0]._offers.flying == 1, "the right one is welcome"


GREETING = host_links.GREETING.pack(host_links.MAGIC, 0, 1 << 20)


@pytest.mark.parametrize(
    ("greeting", "fds", "offer"),
    [
        (b"", 0, b""),
        (GREETING, 0, b""),
        (GREETING, 2, b""),
        (GREETING[:-1], 1, b""),
        (host_links.GREETING.pack(host_links.MAGIC, 2, 1 << 20), 1, b""),
        (host_links.GREETING.pack(host_links.MAGIC, 0, 2 << 20), 1, b""),
        (host_links.GREETING.pack(host_links.MAGIC, 0, 0), 1, b""),
        (GREETING, 1, b""),
        (GREETING, 1, b"x"),
        (GREETING, 1, host_links.OFFER.pack(1, (1 << 20) - 9, 10)),
        (GREETING, 1, host_links.OFFER.pack(1, 1 << 63, 10)),
        (GREETING, 1, host_links.OFFER.pack(1, 0, 0)),
    ],
)
def test_a_stranger_in_speech_is_left_alone_by_who_receives(
    make: Callable[..., Host], tmp_path: Path, greeting: bytes, fds: int, offer: bytes
) -> None:
    host = make(meet=False)
    (tmp_path / "impostor").mkdir()
    fd = os.memfd_create("arena")
    os.ftruncate(fd, 1 << 20)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "impostor" / "d.s"))
        listener.listen()
        host.planes[1].meet({0: str(tmp_path / "impostor")})
        host.planes[1].receive(0, 1, 0, 10)
        peer, _ = listener.accept()
        with peer:
            peer.settimeout(30)
            assert peer.recv(100) == HELLO
            if greeting:
                socket.send_fds(peer, [greeting], [fd] * fds)
            host.planes[1].progress()
            if offer:
                assert peer.recv(100) == b"ready"
                peer.send(offer)
        assert host.planes[1].progress() == []
    os.close(fd)
    os.unlink(tmp_path / "impostor" / "d.s")
    assert not host.planes[1]._copies._sources and windows() == 0
    host.planes[0].send(1, 1, 0, 10)
    host.net.advance(1.0)
    assert host.planes[1].progress() == [("received", 0, 1, None)], "the wire carries it"


GUEST = """\
import socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.settimeout(60)
try:
    sock.connect(sys.argv[1])
    sock.send(bytes.fromhex(sys.argv[2]))
    print("came", flush=True)
    print(socket.recv_fds(sock, 100, 1)[:2])
except OSError as error:
    print(type(error).__name__)
"""

IMPOSTOR = """\
import os, socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
listener.listen()
print("listening", flush=True)
listener.settimeout(60)
peer, _ = listener.accept()
peer.settimeout(60)
print("got", peer.recv(100))
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that everybody may look into."""
    needs_stranger()
    with tempfile.TemporaryDirectory(prefix="hct-", dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


def test_another_user_gets_no_descriptor(public: Path, make: Callable[..., Host]) -> None:
    host = make(meet=False, below=public)
    os.chmod(host.dirs[0], 0o755)
    path = host.dirs[0] + "/d.s"
    assert stranger_says(GUEST, path, HELLO.hex(), load=["array", "socket"]) == "PermissionError\n"
    os.chmod(path, 0o777)
    child = as_stranger(GUEST, path, HELLO.hex(), load=["array", "socket"])
    assert child.stdout is not None and child.stdout.readline() == "came\n"
    host.planes[0].progress()
    assert child.communicate(timeout=60)[0] in ("(b'', [])\n", "ConnectionResetError\n")
    assert not host.planes[0]._offers._guests


def test_another_user_who_stands_in_for_a_node_hears_nothing(public: Path, make: Callable[..., Host]) -> None:
    host = make(meet=False, below=public)
    public.chmod(0o777)
    child = as_stranger(IMPOSTOR, public / "d.s", load=["socket"])
    assert child.stdout is not None and child.stdout.readline() == "listening\n"
    host.planes[1].meet({0: str(public)})
    assert not host.planes[1]._copies._sources
    assert child.communicate(timeout=60)[0] == "got b''\n"


def test_closing_waits_for_the_threads(make: Callable[..., Host], held: threading.Event) -> None:
    host = make()
    data = host.fill(0, 1, 0, BIG)
    host.planes[1].receive(0, 1, 0, BIG)
    host.planes[0].send(1, 1, 0, BIG)
    host.planes[1].progress()
    threading.Timer(0.05, held.set).start()
    host.end(1)
    assert host.arenas[1][:BIG] == data and windows() == 1
