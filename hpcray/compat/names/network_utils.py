"""`ray._common.network_utils`."""

from __future__ import annotations

import contextlib
import socket

from hpcray.host.address import node_ip_address

__all__ = ["build_address", "find_free_port", "get_localhost_ip", "is_ipv6", "is_localhost", "parse_address"]


def build_address(host: str, port: int | str) -> str:
    """`host:port`; an IPv6 host in brackets."""
    return f"[{host}]:{port}" if is_ipv6(host) else f"{host}:{port}"


def parse_address(address: str) -> tuple[str, str] | None:
    """(host, port) of an address; None where there is no port."""
    if ":" not in address:
        return None
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], port
    return None if ":" in host and "://" not in host else (host, port)


def is_ipv6(host: str) -> bool:
    """Whether it is an IPv6 address."""
    try:
        socket.inet_pton(socket.AF_INET6, host)
    except OSError:
        return False
    return True


def is_localhost(host: str) -> bool:
    """Whether it names this host's loopback."""
    return host in ("localhost", "127.0.0.1", "::1")


def get_localhost_ip() -> str:
    """127.0.0.1."""
    return "127.0.0.1"


def find_free_port(family: socket.AddressFamily = socket.AF_INET) -> int:
    """A TCP port that was free a moment ago."""
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def get_node_ip_address(address: str | None = None) -> str:
    """The IP address of this node."""
    return node_ip_address(address)
