"""The names and addresses by which a host is known, and cluster addresses that name one: `H:P`, `http://H:8265`."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

_SCHEMES = ("http", "https", "ray")
_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(\d{1,5})")


@dataclass(frozen=True)
class ClusterAddress:
    """An address of a cluster as programs and scripts of Ray write it. It is a name: nothing need listen there.

    Attributes:
        scheme: "http", "https" or "ray"; "" for `H:P`.
        host: name or address of a host. port: None where the address has none.
    """

    scheme: str
    host: str
    port: int | None


def parse_cluster_address(address: str) -> ClusterAddress | None:
    """Return the parts of an address; None where it has another form.

    Args:
        address: `H:P`, `http://H:P`, `https://H:P/path` or `ray://H:P`; H is a name or an IP address, IPv6 in brackets.

    Raises:
        ValueError: the port is none.
    """
    scheme, separator, _ = address.partition("://")
    if not separator:
        if not _HOST_AND_PORT.fullmatch(address):
            return None
        scheme, address = "", f"//{address}"
    elif scheme not in _SCHEMES:
        return None
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"address {address.removeprefix('//')!r}: {error}") from None
    if not parts.hostname:
        raise ValueError(f"address {address!r} names no host; hint: {scheme or 'http'}://HOST:PORT")
    return ClusterAddress(scheme, parts.hostname, port)


def is_this_host(name: str) -> bool:
    """Return True if a name or an IP address is one of this host, on whichever of its interfaces."""
    if is_loopback(name):
        return True
    host = socket.gethostname()
    if name.lower() in (host.lower(), host.partition(".")[0].lower()):
        return True
    return any(map(is_own_address, addresses_of(name)))


def is_loopback(name: str) -> bool:
    """Return True for the names and addresses that mean the host of who uses them."""
    if name.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def addresses_of(name: str) -> list[str]:
    """Return the IP addresses that a name has here; an address is its own, and an unknown name has none."""
    try:
        return [str(ipaddress.ip_address(name.partition("%")[0]))]
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(row[4][0]).partition("%")[0] for row in found))


def is_own_address(address: str) -> bool:
    """Return True if an interface of this host has an IP address.

    A socket can be bound to such addresses alone: so second addresses of an interface, and those of IPv6, count too.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind((address, 0))
    except OSError as error:
        # A link-local address needs the name of its interface to be bound; that it lacks one says nothing.
        return error.errno == errno.EINVAL and ipaddress.ip_address(address).is_link_local and _has_link_local(address)
    return True


def _has_link_local(address: str) -> bool:
    wanted = ipaddress.ip_address(address).packed.hex()
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            return any(line.split()[0] == wanted for line in file)
    except OSError:
        return False
