"""The token that requests to the API show: the one that Ray's clients of this user send, or a new one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from hpcray.platform.private_files import CLOSED, read_private_file, write_private_file

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
