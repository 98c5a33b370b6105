"""The key-value store of the job, for small values that processes exchange. Names and results are Ray's."""

from __future__ import annotations

from typing import Any

from hpcray.api.session import require_session
from hpcray.common.exceptions import RaySystemError
from hpcray.runtime.core_worker.core_worker import current

__all__ = [
    "_initialize_internal_kv",
    "_internal_kv_del",
    "_internal_kv_exists",
    "_internal_kv_get",
    "_internal_kv_get_gcs_client",
    "_internal_kv_initialized",
    "_internal_kv_list",
    "_internal_kv_put",
    "_internal_kv_reset",
    "internal_kv_get_gcs_client",
]

Text = str | bytes


def _internal_kv_initialized() -> bool:
    return current.process is not None


_RESERVED = b"@namespace_"


def _initialize_internal_kv(gcs_client: Any) -> None:
    """No effect: every job has a store."""


def _internal_kv_reset() -> None:
    """No effect."""


def _internal_kv_get_gcs_client() -> Any:
    return require_session().gcs


def _internal_kv_get(key: Text, *, namespace: Text | None = None) -> bytes | None:
    """Return the value of a key; None for an unknown key."""
    found: bytes | None = require_session().gcs.call("kv_get", _key(key), _space(namespace))
    return found


def _internal_kv_exists(key: Text, *, namespace: Text | None = None) -> bool:
    return bool(require_session().gcs.call("kv_exists", _key(key), _space(namespace)))


def _internal_kv_put(key: Text, value: Text, overwrite: bool = True, *, namespace: Text | None = None) -> bool:
    """Store a value.

    Args:
        key: name of the value.
        value: bytes or text.
        overwrite: replace the value of an existing key.
        namespace: key space.

    Returns:
        True if the key existed already.
    """
    return not require_session().gcs.call("kv_put", _key(key), _bytes(value), bool(overwrite), _space(namespace))


def _internal_kv_del(key: Text, *, del_by_prefix: bool = False, namespace: Text | None = None) -> int:
    """Delete a key, or with `del_by_prefix` all keys that begin with it. Returns the number of deleted keys."""
    gcs, space = require_session().gcs, _space(namespace)
    keys = gcs.call("kv_keys", _key(key), space) if del_by_prefix else [_key(key)]
    return sum(bool(gcs.call("kv_del", found, space)) for found in keys)


def _internal_kv_list(prefix: Text, *, namespace: Text | None = None) -> list[bytes]:
    """Return all keys that begin with `prefix`."""
    found: list[bytes] = require_session().gcs.call("kv_keys", _key(prefix), _space(namespace))
    return found


def _key(text: Text) -> bytes:
    key = _bytes(text)
    if key.startswith(_RESERVED):
        raise RaySystemError(f"Key can't start with {_RESERVED.decode()}")
    return key


def _bytes(text: Text) -> bytes:
    if isinstance(text, str):
        return text.encode()
    if not isinstance(text, bytes):
        raise TypeError(f"keys and values of the key-value store are bytes or str, got {type(text)}")
    return text


def _space(namespace: Text | None) -> str:
    return _bytes(namespace or b"").decode("utf-8", "backslashreplace")


internal_kv_get_gcs_client = _internal_kv_get_gcs_client
