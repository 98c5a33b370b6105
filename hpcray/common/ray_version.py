"""The version of Ray that is meant, and what stands in for it."""

from __future__ import annotations

import os

RAY_VERSION = "2.60.0"
"""The version of Ray whose names, defaults and messages hpcray follows."""

STANDIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "compat", "standin")
"""A directory for `sys.path`: a package `ray`, which is hpcray, and the metadata of a distribution "ray"."""
