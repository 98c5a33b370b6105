"""Use of a copy of a directory in place of the original: paths, variables, and the state of the interpreter."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence

BROADCAST_VARIABLE = "HPCRAY_BROADCAST"
"""For the driver and the workers: a JSON list of [original, copy]."""

_PATH_LISTS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_VENV = "pyvenv.cfg"


class PathRelocation:
    """Pairs of directories: the original and this node's copy. Without pairs, nothing changes.

    Args:
        pairs: (original, copy), absolute. Several originals may have one copy: a path, and what its links lead to.
    """

    def __init__(self, pairs: Sequence[Sequence[str]] = ()) -> None:
        self.pairs = [(original, copy) for original, copy in pairs]

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> PathRelocation:
        """The relocation that this process got from its parent."""
        return cls(json.loads(environ.get(BROADCAST_VARIABLE) or "[]"))

    def copy(self, path: str) -> str:
        """This node's copy of the file at `path`; the path itself if there is no copy."""
        for original, copy in self.pairs:
            if _inside(path, original):
                return copy + path[len(original) :]
        return path

    def original(self, path: str) -> str:
        """The inverse of `copy`: the path's name on all nodes."""
        for original, copy in self.pairs:
            if _inside(path, copy):
                return original + path[len(copy) :]
        return path

    def executable(self) -> str:
        """The Python to run a program with: the copy's, if that is a virtual environment that this process runs in."""
        for original, copy in self.pairs:
            if _inside(sys.executable, original) and os.path.exists(os.path.join(copy, _VENV)):
                return self.copy(sys.executable)
        return sys.executable

    def set(self, environ: MutableMapping[str, str]) -> None:
        """Make processes with this environment use the copies."""
        if not self.pairs:
            return
        for name in _PATH_LISTS:
            if name in environ:
                environ[name] = os.pathsep.join(self.copy(path) for path in environ[name].split(os.pathsep))
        environ[BROADCAST_VARIABLE] = json.dumps(self.pairs)

    def apply(self) -> None:
        """Make this interpreter import from the copies; modules that are imported already stay."""
        if not self.pairs:
            return
        sys.path[:] = [self.copy(path) for path in sys.path]
        sys.executable = self.executable()
        sys.prefix, sys.exec_prefix = self.copy(sys.prefix), self.copy(sys.exec_prefix)
        for module in list(sys.modules.values()):
            places = getattr(module, "__path__", None)
            if isinstance(places, list):  # submodules that are still to be imported come from the copy too
                places[:] = [self.copy(path) for path in places]
        sys.path_importer_cache.clear()
        self.set(os.environ)


def _inside(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory + os.sep)
