"""Directories for temporary files: what file system they are on, and whether that belongs to this node alone."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

_MOUNTS = "/proc/self/mountinfo"
_VARIABLES = ("HPCRAY_TMPDIR", "SLURM_TMPDIR", "SLURM_JOB_TMPDIR", "TMPDIR", "LOCAL_SCRATCH", "LOCALSCRATCH")
_SHARED = frozenset(
    {
        *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "9p"),
        *("afs", "panfs", "wekafs", "orangefs", "pvfs2", "glusterfs", "virtiofs", "dvs"),
    }
)
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True)
class Directory:
    """A directory that temporary files could go to.

    Attributes:
        path: where.
        variable: the variable that names it; "" for the system's own.
        kind: type of its file system, "" where unknown.
        free: bytes that this user may still write.
        writable: whether this user may make files there.
    """

    path: str
    variable: str
    kind: str
    free: int
    writable: bool

    @property
    def node_local(self) -> bool:
        """Whether no other node sees it, and no network stands between. FUSE is taken for shared."""
        return self.kind not in _SHARED and not self.kind.startswith("fuse")

    @property
    def in_memory(self) -> bool:
        """Whether what is written there takes memory."""
        return self.kind in _IN_MEMORY


def directories(environ: Mapping[str, str] | None = None) -> tuple[Directory, ...]:
    """The directories that the environment names, then /tmp; each path once, missing ones left out."""
    environ = os.environ if environ is None else environ
    named = [(environ.get(variable, ""), variable) for variable in _VARIABLES]
    found: dict[str, Directory] = {}
    for path, variable in [*named, ("/tmp", "")]:
        if path and os.path.isdir(path) and os.path.abspath(path) not in found:
            found[os.path.abspath(path)] = look_at(os.path.abspath(path), variable)
    return tuple(found.values())


def look_at(path: str, variable: str = "") -> Directory:
    """What there is to know about one directory."""
    free = 0
    with contextlib.suppress(OSError):
        state = os.statvfs(path)
        free = state.f_bavail * state.f_frsize
    return Directory(path, variable, file_system(path), free, os.access(path, os.W_OK | os.X_OK))


def file_system(path: str, mounts: str | None = None) -> str:
    """Type of the file system that holds `path`: "ext4", "nfs4", "tmpfs", ...; "" where it cannot be told.

    Args:
        mounts: what /proc/self/mountinfo says; None: read it.
    """
    if mounts is None:
        try:
            with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
                mounts = file.read()
        except OSError:
            return ""
    path = os.path.realpath(path)
    best, kind = -1, ""
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields, after = left.split(), right.split()
        if len(fields) < 5 or not after:
            continue
        point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields[4])
        # Of several at one point the last one covers the others.
        if len(point) >= best and (path == point or path.startswith(point.rstrip("/") + "/")):
            best, kind = len(point), after[0]
    return kind
