"""The version of Ray that is meant."""

from __future__ import annotations

RAY_VERSION = "2.60.0"
"""The version of Ray whose names, defaults and messages hpcray follows."""
