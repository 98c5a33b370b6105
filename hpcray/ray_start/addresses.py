"""The names and addresses of this host, and of others as the system knows them."""

from __future__ import annotations

import socket

from hpcray.platform.sockets import own_addresses


def own_names() -> tuple[str, ...]:
    """All names and addresses by which others may call this host."""
    name = socket.gethostname()
    return tuple(dict.fromkeys([name, name.partition(".")[0], *own_addresses()]))  # who asks resolves other names


def resolve(host: str) -> tuple[str, ...]:
    """The addresses that the system knows for a host, without those of the loopback; () for none."""
    try:
        found = [str(row[4][0]) for row in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(text for text in found if not text.startswith("127.") and text != "::1"))
