"""The PMIx library that belongs to an Open MPI, and whether hpcray knows how to be a server with it."""

from __future__ import annotations

import mmap
import os

TESTED = (5,)
"""Major versions that are known to work."""
NAME = b"OpenPMIx "
"""The name of the library, before its version."""
_LIBRARY = "libpmix.so.2"
_PLACES = ("lib/openmpi", "lib", "lib64")


def find_library(mpirun: str) -> str:
    """The PMIx library that belongs to an Open MPI; "" if there is none of a version that is known to work.

    Args:
        mpirun: path of its mpirun.
    """
    prefix = os.path.dirname(os.path.dirname(os.path.realpath(mpirun)))
    paths = (os.path.join(prefix, place, _LIBRARY) for place in _PLACES)
    return next((path for path in paths if _version_of(path) in TESTED), "")


def installation_of(library: str) -> str:
    """The installation that a library of `find_library` belongs to."""
    return next(
        (library.removesuffix(f"/{place}/{_LIBRARY}") for place in _PLACES if f"/{place}/{_LIBRARY}" in library), ""
    )


def _version_of(path: str) -> int | None:
    """The major version of a PMIx library, without loading it."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            start = content.find(NAME)
            text = content[start + len(NAME) : start + len(NAME) + 3].partition(b".")[0]
            return int(text) if start >= 0 and text.isdigit() else None
    except (OSError, ValueError):
        return None
