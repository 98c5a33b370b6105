"""The names and addresses of this host, and of others as the system knows them."""

from __future__ import annotations

import socket

from hpcray.platform.host_addresses import addresses_of, is_loopback
from hpcray.platform.sockets import own_addresses


def own_names() -> tuple[str, ...]:
    """All names and addresses by which others may call this host."""
    name = socket.gethostname()
    return tuple(dict.fromkeys([name, name.partition(".")[0], *own_addresses()]))  # who asks resolves other names


def resolve(host: str) -> tuple[str, ...]:
    """The addresses that the system knows for a host, without those of the loopback; () for none."""
    return tuple(address for address in addresses_of(host) if not is_loopback(address))
