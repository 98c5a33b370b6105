"""The job's key-value store: bytes to bytes, in namespaces."""

from __future__ import annotations


class KeyValue:
    """What `_internal_kv` and libraries use to leave small facts for each other."""

    def __init__(self) -> None:
        self._spaces: dict[str, dict[bytes, bytes]] = {}

    def put(self, key: bytes, value: bytes, overwrite: bool, namespace: str) -> bool:
        """Store; whether the key was new. An existing value stays unless `overwrite`."""
        space = self._spaces.setdefault(namespace, {})
        new = key not in space
        if new or overwrite:
            space[key] = value
        return new

    def get(self, key: bytes, namespace: str) -> bytes | None:
        """The value, or None."""
        return self._spaces.get(namespace, {}).get(key)

    def delete(self, key: bytes, namespace: str) -> bool:
        """Remove; whether it was there."""
        return self._spaces.get(namespace, {}).pop(key, None) is not None

    def exists(self, key: bytes, namespace: str) -> bool:
        """Whether the key is there."""
        return key in self._spaces.get(namespace, {})

    def keys(self, prefix: bytes, namespace: str) -> list[bytes]:
        """All keys that begin with `prefix`, sorted."""
        return sorted(key for key in self._spaces.get(namespace, {}) if key.startswith(prefix))
