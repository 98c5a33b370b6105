"""`ray._private.collections_utils`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def split(items: Sequence[Any], chunk_size: int) -> Iterator[Any]:
    """Yield slices of `chunk_size` items; the last one may be shorter."""
    assert chunk_size > 0, "Chunk size has to be > 0"
    for start in range(0, len(items), chunk_size):
        yield items[start : start + chunk_size]
