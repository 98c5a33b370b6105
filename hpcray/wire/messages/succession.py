"""Messages of the head's journal and of its succession. See `wire.messages`."""

from __future__ import annotations

from msgspec import Struct


class Change(Struct, array_like=True, frozen=True):
    """One row of the GCS's tables (`core.gcs.notes`) as it is now. row None: it is no more."""

    table: int
    key: bytes
    row: bytes | None
