"""The version of Ray that is meant, and what stands in for it."""

from __future__ import annotations

import os
import re
import sys
from importlib.machinery import PathFinder

RAY_VERSION = "2.60.0"
"""The version of Ray whose names, defaults and messages hpcray follows."""

_CLAIMED = "HPCRAY_RAY_VERSION"

STANDIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "compat", "standin")
"""A directory for `sys.path`: a package `ray`, which is hpcray, and the metadata of a distribution "ray"."""


def claimed_version() -> str:
    """Return what `ray.__version__` is: what HPCRAY_RAY_VERSION says, for packages that skip a part of themselves at a
    version that they do not know."""
    return os.environ.get(_CLAIMED) or RAY_VERSION


def is_replaced(program: str) -> str:
    """Return a warning if a program says `import ray` and would get the real Ray; "" if not, or if that is not known.

    pip replaces the stand-in, without a word, where a package pins another version of Ray.
    """
    try:
        with open(program, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except (OSError, ValueError):
        return ""
    if not re.search(r"^[ \t]*(import|from)[ \t]+ray\b", text, re.MULTILINE) or "hpcray.compat" in text:
        return ""
    path = [os.path.dirname(os.path.abspath(program)), *sys.path]
    spec = PathFinder.find_spec("ray", path)
    where = os.path.dirname(spec.origin) if spec is not None and spec.origin else STANDIN
    if where.startswith(STANDIN) or not os.path.exists(os.path.join(where, "_version.py")):
        return ""  # another module of that name: a file of the program's
    return (
        f"{program} says `import ray`, and that is the real Ray in {where}, which starts a cluster of its own; "
        "hint: --as-ray; or pip uninstall ray, then python -m hpcray.compat install"
    )
