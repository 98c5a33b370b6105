"""The gate of the API: requests pass that show the token, to a name of this server, and from no page of a browser."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from hpcray.dashboard.access import bearer, is_loopback_host
from hpcray.platform.private_files import CLOSED, read_private_file, write_private_file

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


# ------------------------------------------------------------ token
# The token that requests to the API show: the one that Ray's clients of this user send, or a new one.


TOKEN, TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
"""Variables of Ray's clients: the token, and the file that holds it."""
_DEFAULT_PATH = "~/.ray/auth_token"
_BYTES = 32
_SHORTEST = 16  # characters


class TokenError(ValueError):
    """The token that Ray's clients would send cannot be used."""


@dataclass(frozen=True)
class ApiToken:
    """A token.

    Attributes:
        value: the token. path: of the file that holds it; "" where it comes from the variable RAY_AUTH_TOKEN.
        is_new: whether the file was made for this server, and goes with it.
    """

    value: str
    path: str
    is_new: bool = False

    def exports(self) -> dict[str, str]:
        """Return the variables by which Ray's clients find it, beside the mode."""
        return {"RAY_AUTH_MODE": "token", **({TOKEN_PATH: self.path} if self.path else {})}


def api_token(environ: Mapping[str, str], path_of_new: str) -> ApiToken:
    """Return the token that Ray's clients of this user send: RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, or
    ~/.ray/auth_token, in this order. Where there is none, make one.

    Args:
        environ: with the variables of Ray's clients. path_of_new: the file for a new one.

    Raises:
        TokenError: it is too short to be a secret. OSError: a file that is named cannot be read.
        UntrustedPathError: other users can read or exchange the file.
    """
    if given := environ.get(TOKEN, "").strip():
        return ApiToken(_checked(given, TOKEN), "")
    named = environ.get(TOKEN_PATH, "")
    path = os.path.abspath(os.path.expanduser(named or _DEFAULT_PATH))
    if named or os.path.lexists(path):
        text = read_private_file(path, excess=CLOSED, ancestors=True).decode(errors="replace").strip()
        return ApiToken(_checked(text, path), path)
    made = secrets.token_hex(_BYTES)
    write_private_file(path_of_new, made.encode())
    return ApiToken(made, path_of_new, is_new=True)


def _checked(token: str, where: str) -> str:
    if len(token) < _SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise TokenError(
            f"{where} holds no token: {len(token)} characters; hint: at least {_SHORTEST} random ones, as of "
            "python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return token
