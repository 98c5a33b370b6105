"""`import ray` is hpcray for some tests, and not there before and after."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def lent_libraries() -> str:
    """The directory that lends Ray's libraries: what HPCRAY_RAY_LIBRARIES names, else the user's cache, into which they
    are downloaded once. Skips the test where that does not succeed."""
    from hpcray.compat.finder import LENT, RAY_VERSION
    from hpcray.compat.libraries import InstallError, install

    if named := os.environ.get(LENT):
        return named
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        return str(install(str(cache / "hpcray" / f"ray-{RAY_VERSION}")))
    except InstallError as error:
        pytest.skip(str(error))


def imported_ray(libraries: str = "") -> Iterator[Any]:
    """Give the module `ray`, not initialized; with HPCRAY_TEST_ENGINE=ray the real one. Body of a fixture.

    Args:
        libraries: a directory that lends Ray's libraries, or "".
    """
    if os.environ.get("HPCRAY_TEST_ENGINE") == "ray":
        yield importlib.import_module("ray")
        return
    from hpcray.compat import finder

    given = {name: os.environ.get(name) for name in ("RAY_DEDUP_LOGS", finder.LENT)}
    os.environ[finder.LENT] = libraries
    yield importlib.import_module("hpcray.compat.ray")  # not `import`: linters sort that behind `import ray`
    _unload()
    for name, text in given.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text


def _unload() -> None:
    from hpcray.compat.finder import FINDER, STANDIN

    FINDER.lent = ""
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not FINDER]
    sys.path[:] = [path for path in sys.path if path != STANDIN]
    for name in [name for name in sys.modules if name == "ray" or name.startswith("ray.")]:
        del sys.modules[name]
    sys.modules.pop("hpcray.compat.ray", None)
    logging.getLogger("hpcray").parent = logging.getLogger()
