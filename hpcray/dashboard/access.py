"""Access to a dashboard: browsers that came with a token that is good for one of them."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable

_TOKEN_BYTES = 32
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_BEARER = "Bearer "


class DashboardAccess:
    """The token for the next browser, and the keys of those that have come.

    A browser exchanges the token of its link for a key, which it keeps and sends with every question. The link is
    worthless afterwards, in a browser's history or elsewhere.

    Args:
        announce: is called with the first token, and with a new one each time that one was used.
    """

    def __init__(self, announce: Callable[[str], object]) -> None:
        self._announce = announce
        self._keys: set[bytes] = set()
        self._token = ""

    def open(self) -> None:
        """Make a token for the next browser."""
        self._token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._announce(self._token)

    def enter(self, token: str) -> str | None:
        """Exchange the token for a key; None where it is not the token."""
        if not self._token or not hmac.compare_digest(token.encode(), self._token.encode()):
            return None
        key = secrets.token_urlsafe(_TOKEN_BYTES)
        self._keys.add(_digest(key))
        self.open()
        return key

    def knows(self, key: str) -> bool:
        """True for the key of a browser that has entered."""
        return _digest(key) in self._keys


def bearer(header: str) -> str:
    """The token or key in a header `Authorization`; "" for none."""
    return header.removeprefix(_BEARER) if header.startswith(_BEARER) else ""


def is_loopback_host(header: str) -> bool:
    """True if the header `Host` names this machine as the user of a tunnel does.

    A page of another site whose name has come to resolve to loopback (DNS rebinding) sends its own name.
    """
    name, colon, port = header.rpartition(":")
    if not colon or header.endswith("]"):
        name, port = header, ""
    return name.lower() in _LOOPBACK_NAMES and (not port or port.isdecimal())


def is_from_here(fetch_site: str, origin: str, host: str) -> bool:
    """True unless the headers `Sec-Fetch-Site` or `Origin` say that a page of another site asks."""
    if fetch_site not in ("", "same-origin", "none"):
        return False
    return not origin or origin.partition("://")[2] == host


def _digest(key: str) -> bytes:
    """A hash, which is compared instead of the key: finding it takes the same time whatever the key begins with."""
    return hashlib.sha256(key.encode()).digest()
