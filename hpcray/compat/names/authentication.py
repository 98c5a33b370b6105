"""`ray._raylet`: the token by which processes of one job know each other over gRPC.

Replicas of Serve listen for calls of each other, and unpickle them. So a call without the job's token is refused; there
is no RAY_AUTH_MODE=disabled. The token is random, and is kept in the job's key-value store, which no other user can
read.
"""

from __future__ import annotations

import enum
import hmac
import secrets

from hpcray.api.session import require_session
from hpcray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

_KEY, _SPACE = "grpc-token", "hpcray-authentication"


def job_secret(key: str) -> str:
    """Return 256 random bits, as text, that all processes of the job read from its key-value store."""
    # Of several that ask first, one wins, and all read what it wrote.
    _internal_kv_put(key, secrets.token_hex(32), overwrite=False, namespace=_SPACE)
    return (_internal_kv_get(key, namespace=_SPACE) or b"").decode()


class AuthenticationMode(enum.IntEnum):
    """How calls are authenticated."""

    DISABLED = 0
    TOKEN = 1


class AuthenticationTokenLoader:
    """The token of the job that this process belongs to."""

    _instance: AuthenticationTokenLoader | None = None

    def __init__(self) -> None:
        self._of: object = None
        self._token = ""

    @classmethod
    def instance(cls) -> AuthenticationTokenLoader:
        """Return the loader of this process."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def has_token(self, ignore_auth_mode: bool = False) -> bool:
        """Every job has a token."""
        return True

    def get_raw_token(self, ignore_auth_mode: bool = False) -> str:
        """Return the token; the first process that asks makes it."""
        session = require_session()
        if self._of is not session:
            self._token = job_secret(_KEY)
            self._of = session
        return self._token

    def get_token_for_http_header(self) -> dict[str, str]:
        """Return the header of a call."""
        return {"authorization": f"Bearer {self.get_raw_token()}"}


def get_authentication_mode() -> AuthenticationMode:
    """Calls are always authenticated."""
    return AuthenticationMode.TOKEN


def validate_authentication_token(provided: str) -> bool:
    """True if the value of a header "authorization" holds the token of this job."""
    token = AuthenticationTokenLoader.instance().get_raw_token()
    return bool(token) and hmac.compare_digest(provided.encode(), f"Bearer {token}".encode())
