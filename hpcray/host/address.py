"""The IP address of this node."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
_LOOPBACK = "127.0.0.1"


def node_ip_address(toward: str | None = None) -> str:
    """The IPv4 address of the interface that leads to `toward` ("host:port"; default: the internet).

    No packet is sent. Nodes without a default route answer with the address of their host name or of their first
    interface; a machine without network with 127.0.0.1.
    """
    host, _, port = (toward or "8.8.8.8:53").rpartition(":")
    return _routed(host, port) or _named() or _first_interface() or _LOOPBACK


def _routed(host: str, port: str) -> str | None:
    """A connected datagram socket knows its local address without having sent anything."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((host, int(port)))
            return str(sock.getsockname()[0])
    except (OSError, ValueError):
        return None


def _named() -> str | None:
    try:
        found = socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
    return None if found.startswith("127.") else found


def _first_interface() -> str | None:
    try:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    except OSError:
        return None  # no descriptor is left; an error that is on its way must not end in this one
    with sock:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            found = socket.inet_ntoa(reply[20:24])
            if not found.startswith("127."):
                return found
    return None
