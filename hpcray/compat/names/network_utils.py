"""`ray._common.network_utils`: addresses and ports. Also `ray._private.services`."""

from __future__ import annotations

import contextlib
import socket

from hpcray.platform.sockets import node_ip_address


def build_address(host: str, port: int | str) -> str:
    """Join host and port to `host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if is_ipv6(host) else f"{host}:{port}"


def parse_address(address: str) -> tuple[str, str] | None:
    """Split an address into (host, port). Returns None for an address without a port."""
    if ":" not in address:
        return None
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], port
    return None if ":" in host and "://" not in host else (host, port)


def is_ipv6(host: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6, host)
    except OSError:
        return False
    return True


def is_localhost(host: str) -> bool:
    """Return True for a name or address of the loopback interface."""
    return host in ("localhost", "127.0.0.1", "::1")


def get_localhost_ip() -> str:
    return "127.0.0.1"


def get_all_interfaces_ip() -> str:
    """Return the address to bind to for all interfaces: that of IPv6 where this node's address is one of IPv6."""
    return "::" if is_ipv6(node_ip_address()) else "0.0.0.0"


def find_free_port(family: socket.AddressFamily = socket.AF_INET) -> int:
    """Return a TCP port that was free at the time of the call."""
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


get_node_ip_address = node_ip_address_from_perspective = node_ip_address


def get_address_and_port() -> tuple[str, int]:
    """Return the address of this node, and a TCP port that was free at the time of the call."""
    address = get_node_ip_address()
    return address, find_free_port(socket.AF_INET6 if is_ipv6(address) else socket.AF_INET)


def find_gcs_addresses() -> set[str]:
    """Return no address: no process of a job listens on a port."""
    return set()
