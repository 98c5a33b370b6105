"""The names and addresses of a host, and the forms of a cluster's address."""

from __future__ import annotations

import socket

import pytest

from hpcray.ray_start import surroundings
from hpcray.ray_start.surroundings import ClusterAddress, is_own_address, is_this_host, parse_cluster_address


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("10.0.0.1:6379", ("", "10.0.0.1", 6379)),
        ("n1-ib0:6379", ("", "n1-ib0", 6379)),
        ("[fe80::1]:6379", ("", "fe80::1", 6379)),
        ("http://n1:8265", ("http", "n1", 8265)),
        ("https://n1.site.org:443/proxy/", ("https", "n1.site.org", 443)),
        ("http://n1", ("http", "n1", None)),
        ("ray://n1:10001", ("ray", "n1", 10001)),
        ("auto", None),
        ("4711", None),
        ("slurm://4711", None),
        ("/tmp/hpcray-0/0123abcd", None),
        ("a name:of", None),
        ("", None),
    ],
)
def test_forms(text: str, parts: tuple[str, str, int | None] | None) -> None:
    assert parse_cluster_address(text) == (ClusterAddress(*parts) if parts is not None else None)


@pytest.mark.parametrize("text", ["n1:99999", "http://n1:99999", "http://n1:port", "http://:8265", "ray://"])
def test_ports_and_hosts_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"address"):
        parse_cluster_address(text)


def test_each_address_of_this_host_is_its_own() -> None:
    for name in ("localhost", "127.0.0.1", "127.8.9.1", "0.0.0.0", "::1", socket.gethostname()):
        assert is_this_host(name), name
    # 127.8.9.1 stands for a second address of an interface: no interface lists it, and it can be bound to.
    assert is_own_address("127.8.9.1")


def test_other_hosts_are_not_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("192.0.2.199", "203.0.113.9", "2001:db8::9"):
        assert not is_this_host(name), name
    monkeypatch.setattr(surroundings.socket, "getaddrinfo", lambda *_, **__: [(2, 2, 17, "", ("203.0.113.9", 0))])
    assert not is_this_host("n1-ib0")


def test_a_second_name_of_this_host_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(2, 2, 17, "", ("203.0.113.9", 0)), (2, 2, 17, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(surroundings.socket, "getaddrinfo", lambda *_, **__: rows)
    assert is_this_host("n1-ib0")


def test_an_unknown_name_is_no_host() -> None:
    assert not is_this_host("no-such-host.invalid")
