"""The node's IP address, with and without a route."""

from __future__ import annotations

import ipaddress

import pytest

from hpcray.platform import sockets
from hpcray.util import get_node_ip_address


def test_the_node_address_is_an_ipv4_address() -> None:
    assert ipaddress.IPv4Address(get_node_ip_address())


def test_the_node_address_is_that_of_the_interface_toward_a_peer() -> None:
    assert get_node_ip_address("127.0.0.1:80") == "127.0.0.1"


@pytest.mark.parametrize("peer", ["nonsense", "127.0.0.1:port"])
def test_the_node_address_falls_back_for_an_unusable_peer(peer: str) -> None:
    assert ipaddress.IPv4Address(get_node_ip_address(peer))


def test_the_node_address_comes_from_the_route_then_the_name_then_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"_routed": "10.0.0.1", "_named": "10.0.0.2", "_first_interface": "10.0.0.3"}
    monkeypatch.setattr(sockets, "_routed", lambda host, port: found["_routed"])
    monkeypatch.setattr(sockets, "_named", lambda: found["_named"])
    monkeypatch.setattr(sockets, "_first_interface", lambda: found["_first_interface"])
    for name in ("_routed", "_named", "_first_interface"):
        assert sockets.node_ip_address() == found[name]
        found[name] = ""
    assert sockets.node_ip_address() == "127.0.0.1"
