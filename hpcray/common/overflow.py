"""Offsets of objects in a node's store."""

from __future__ import annotations

OVERFLOW = 1 << 48
"""Offsets from here on are positions in a store's overflow file, not in its arena."""
