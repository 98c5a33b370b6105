"""The node's IP address, with and without a route."""

from __future__ import annotations

import ipaddress

import pytest

from hpcray.host import address
from hpcray.util import get_node_ip_address


def test_is_an_ipv4_address() -> None:
    assert ipaddress.IPv4Address(get_node_ip_address())


def test_interface_that_leads_to_a_peer() -> None:
    assert get_node_ip_address("127.0.0.1:80") == "127.0.0.1"


@pytest.mark.parametrize("peer", ["nonsense", "127.0.0.1:port"])
def test_unusable_peer_falls_back(peer: str) -> None:
    assert ipaddress.IPv4Address(get_node_ip_address(peer))


def test_order_of_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"_routed": "10.0.0.1", "_named": "10.0.0.2", "_first_interface": "10.0.0.3"}
    monkeypatch.setattr(address, "_routed", lambda host, port: found["_routed"])
    monkeypatch.setattr(address, "_named", lambda: found["_named"])
    monkeypatch.setattr(address, "_first_interface", lambda: found["_first_interface"])
    for name in ("_routed", "_named", "_first_interface"):
        assert address.node_ip_address() == found[name]
        found[name] = ""
    assert address.node_ip_address() == "127.0.0.1"
