"""What a launcher leaves to its ranks: variables, which must not reach user processes, and its session directory."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from hpcray.host.processes import Family

_FOREIGN = ("PMIX_", "OMPI_", "PMI_", "PRTE_")
_DIRECTORY = "PMIX_SERVER_TMPDIR"
_OF_ONE_PROCESS = re.compile(r"(?:ompi|prte|prterun)\.([1-9]\d*)")


def strip_launcher(environ: MutableMapping[str, str]) -> None:
    """Remove the variables that make a process take itself for an MPI rank."""
    for name in [name for name in environ if name.startswith(_FOREIGN)]:
        del environ[name]


@dataclass(frozen=True)
class LauncherDirectory:
    """The session directory of the mpirun (or its daemon on this node) that started this rank. Open MPI 5 names it
    after that process, which removes it at its end unless it is killed.

    Attributes:
        path: the directory.
        pid: the process that it belongs to.
        started: when that started, in clock ticks since boot.
    """

    path: str
    pid: int
    started: int

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> LauncherDirectory | None:
        """The directory that the environment tells of; None where it is not certain whose it is."""
        path = environ.get(_DIRECTORY, "")
        found = _OF_ONE_PROCESS.fullmatch(os.path.basename(path))
        if found is None or not os.path.isabs(path):
            return None
        owner = Family.of(int(found[1]))
        return None if owner is None else cls(path, owner.pid, owner.started)

    def remove_if_abandoned(self) -> None:
        """Remove it when its process is gone and nobody but this user could have put anything in it."""
        owner = Family.of(self.pid)
        if owner is not None and owner.started == self.started:
            return
        try:
            state = os.lstat(self.path)
        except OSError:
            return
        if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o077:
            shutil.rmtree(self.path, ignore_errors=True)
