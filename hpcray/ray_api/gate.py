"""The gate of the API: requests pass that show the token, to a name of this server, and from no page of a browser."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from hpcray.dashboard.access import bearer, is_loopback_host

_TOKEN_HEADERS = (b"authorization", b"x-ray-authorization")


class Gate:
    """Answers requests that may not pass, before a byte of their body is read; the others go on to the API.

    Args:
        api: what is behind the gate. token: that requests have to show.
        names: by which requests may call this server besides those of loopback, in lower case.
    """

    def __init__(self, api: ASGIApp, token: str, names: Collection[str] = ()) -> None:
        self._api = api
        self._digest = _digest(token)
        self._names = frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] not in ("http", "websocket"):
            return  # no lifespan
        status, refusal = self._refusal(scope)
        if not refusal:
            await self._api(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(PlainTextResponse(refusal, status))
        else:
            # The body was not read, and is not going to be: the connection cannot serve another request.
            answer = PlainTextResponse(refusal, status, {"connection": "close"})
            await answer(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str]:
        headers: dict[bytes, str] = {name: text.decode("latin-1") for name, text in scope["headers"]}
        host = headers.get(b"host", "")
        if not is_loopback_host(host) and _name_of(host) not in self._names:
            return 403, f"Forbidden: {host!r} is no name of this server"
        if b"origin" in headers or headers.get(b"sec-fetch-site", "none") != "none":
            return 403, "Forbidden: this API is not for pages in browsers"
        given = next((headers[name] for name in _TOKEN_HEADERS if name in headers), "")
        if not given:
            return 401, "Unauthorized: Missing authentication token"
        if not hmac.compare_digest(_digest(bearer(given)), self._digest):
            return 403, "Forbidden: Invalid authentication token"
        return 200, ""


def _name_of(host: str) -> str:
    """The header `Host` without the port, in lower case; IPv6 in brackets."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()


def _digest(token: str) -> bytes:
    """A hash, which is compared instead of the token: how long that takes says nothing of the token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
