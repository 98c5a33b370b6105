"""The job's key-value store: small facts that processes leave for each other. Names and answers are Ray's."""

from __future__ import annotations

from typing import Any

from hpcray.api.session import ensure
from hpcray.runtime.refs import current

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
]

Text = str | bytes


def _internal_kv_initialized() -> bool:
    """Whether there is a job whose store this is."""
    return current.process is not None


def _initialize_internal_kv(gcs_client: Any) -> None:
    """Nothing has to be done: the store is there when the job is."""


def _internal_kv_reset() -> None:
    """Nothing has to be done."""


def _internal_kv_get_gcs_client() -> Any:
    """Who answers here; only its being there means something."""
    return ensure().gcs


def _internal_kv_get(key: Text, *, namespace: Text | None = None) -> bytes | None:
    """The value of a key, None if it is not there."""
    found: bytes | None = ensure().gcs.call("kv_get", _bytes(key), _space(namespace))
    return found


def _internal_kv_exists(key: Text, *, namespace: Text | None = None) -> bool:
    """Whether a key is there."""
    return bool(ensure().gcs.call("kv_exists", _bytes(key), _space(namespace)))


def _internal_kv_put(key: Text, value: Text, overwrite: bool = True, *, namespace: Text | None = None) -> bool:
    """Store a value.

    Returns:
        Whether the key was there already; its value is kept then unless `overwrite`.
    """
    return not ensure().gcs.call("kv_put", _bytes(key), _bytes(value), bool(overwrite), _space(namespace))


def _internal_kv_del(key: Text, *, del_by_prefix: bool = False, namespace: Text | None = None) -> int:
    """Remove a key, or all that begin with it; how many were there."""
    gcs, space = ensure().gcs, _space(namespace)
    keys = gcs.call("kv_keys", _bytes(key), space) if del_by_prefix else [_bytes(key)]
    return sum(bool(gcs.call("kv_del", found, space)) for found in keys)


def _internal_kv_list(prefix: Text, *, namespace: Text | None = None) -> list[bytes]:
    """All keys that begin with `prefix`."""
    found: list[bytes] = ensure().gcs.call("kv_keys", _bytes(prefix), _space(namespace))
    return found


def _bytes(text: Text) -> bytes:
    if isinstance(text, str):
        return text.encode()
    if not isinstance(text, bytes):
        raise TypeError(f"keys and values of the key-value store are bytes or str, got {type(text)}")
    return text


def _space(namespace: Text | None) -> str:
    return _bytes(namespace or b"").decode("utf-8", "backslashreplace")
