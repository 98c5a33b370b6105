"""Whose the other end of a TCP connection is."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from helpers.strangers import as_stranger, needs_stranger

from hpcray.launch.tcp_peers import is_own_peer

CONNECT = """\
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
peer.sendall(b"hello")
sys.stdin.readline()
"""


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        sock = socket.create_server((request.param, 0), family=family)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with sock:
        yield sock


def test_a_connection_of_this_user(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    with socket.create_connection((host, port)):
        peer, address = listener.accept()
        with peer:
            assert is_own_peer(address[:2], peer.getsockname()[:2])
            assert not is_own_peer((host, address[1]), (host, 1)), "nobody is connected there"


def test_a_connection_that_its_peer_closed(listener: socket.socket) -> None:
    client = socket.create_connection(listener.getsockname()[:2])
    peer, address = listener.accept()
    with peer:
        client.sendall(b"x")
        client.close()
        assert not is_own_peer(address[:2], peer.getsockname()[:2]), "nobody can tell any more whose it was"


def test_a_connection_of_another_user(listener: socket.socket) -> None:
    needs_stranger()
    child = as_stranger(CONNECT, *listener.getsockname()[:2], load=["encodings.idna"])
    try:
        listener.settimeout(30)
        peer, address = listener.accept()
        with peer:
            assert peer.recv(5) == b"hello"
            assert not is_own_peer(address[:2], peer.getsockname()[:2])
    finally:
        child.communicate("\n", timeout=30)


def test_what_is_no_address() -> None:
    assert not is_own_peer(("unix", 0), ("127.0.0.1", 1))
    assert not is_own_peer(("127.0.0.1", 70_000), ("127.0.0.1", 1))
