"""The job's key-value store: bytes to bytes, in namespaces."""

from __future__ import annotations

from hpcray.core.gcs import notes
from hpcray.core.gcs.notes import Notes


class KeyValue:
    """What `_internal_kv` and libraries use to leave small facts for each other.

    Attributes:
        notes: which rows have changed, for the journal. Their keys: `row_key`.
    """

    def __init__(self) -> None:
        self.notes = Notes()
        self._spaces: dict[str, dict[bytes, bytes]] = {}

    def put(self, key: bytes, value: bytes, overwrite: bool, namespace: str) -> bool:
        """Store; whether the key was new. An existing value stays unless `overwrite`."""
        row = row_key(key, namespace)
        space = self._spaces.setdefault(namespace, {})
        new = key not in space
        if new or overwrite:
            space[key] = value
            self.notes.add(notes.VALUE, row)
        return new

    def get(self, key: bytes, namespace: str) -> bytes | None:
        """The value, or None."""
        return self._spaces.get(namespace, {}).get(key)

    def delete(self, key: bytes, namespace: str) -> bool:
        """Remove; whether it was there."""
        self.notes.add(notes.VALUE, row_key(key, namespace))
        return self._spaces.get(namespace, {}).pop(key, None) is not None

    def exists(self, key: bytes, namespace: str) -> bool:
        """Whether the key is there."""
        return key in self._spaces.get(namespace, {})

    def keys(self, prefix: bytes, namespace: str) -> list[bytes]:
        """All keys that begin with `prefix`, sorted."""
        return sorted(key for key in self._spaces.get(namespace, {}) if key.startswith(prefix))

    def row(self, row: bytes) -> bytes | None:
        """The value of a row, by its key."""
        key, namespace = _split(row)
        return self.get(key, namespace)

    def adopt(self, row: bytes, value: bytes) -> None:
        """Take in a row that another head has had."""
        key, namespace = _split(row)
        self._spaces.setdefault(namespace, {})[key] = value

    def row_keys(self) -> list[bytes]:
        """The keys of all rows."""
        return [row_key(key, namespace) for namespace, space in self._spaces.items() for key in space]


def row_key(key: bytes, namespace: str) -> bytes:
    """The key of a row: the namespace, its length before it, and the key."""
    space = namespace.encode()
    return len(space).to_bytes(4, "big") + space + key


def _split(row: bytes) -> tuple[bytes, str]:
    end = 4 + int.from_bytes(row[:4], "big")
    return row[end:], row[4:end].decode()
