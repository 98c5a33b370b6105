"""A step of Slurm's on the head's host, which says that a head is up that has no bell, and whose file does not come.

Nodes whose homes are their own never see the secret of their head. Only where the directory of secrets is on a file
system of this host alone is there reason to suspect that, and so a step is started for it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from hpcray.platform.allocation import expand_nodes
from hpcray.platform.host_addresses import addresses_of
from hpcray.platform.launcher_environment import outside_of_job
from hpcray.platform.python_lines import module_line
from hpcray.ray_start.clusters import Asker, ClusterName, clusters_named, parse_cluster_name
from hpcray.ray_start.registry import nodes_here
from hpcray.ray_start.surroundings import own_names, resolve

_SHARED = (
    "9p", "afs", "beegfs", "ceph", "cifs", "dvs", "fuse", "glusterfs", "gpfs", "lustre", "nfs", "orangefs", "panfs",
    "pvfs2", "smb", "wekafs",
)  # fmt: skip
"""Beginnings of the names of file systems that hosts share."""
_PAUSE = 0.3
_LONGEST = 600.0
_TIMEOUT = 10.0


def is_of_this_host(path: str, mounts: str = "/proc/self/mounts") -> bool:
    """True if a path is on a file system that other hosts do not share, as far as its kind says."""
    path, best, kind = os.path.realpath(path), "", ""
    with contextlib.suppress(OSError), open(mounts, encoding="utf-8", errors="replace") as file:
        for line in file:
            _, place, found, *_ = line.split(" ")
            place = place.replace("\\040", " ")
            if os.path.commonpath([path, place]) == place and len(place) >= len(best):
                best, kind = place, found
    return bool(kind) and not kind.startswith(_SHARED)


class HeadProbe:
    """The step that looks for the head. `is_up` says what it has found.

    Args:
        name: H:P of the cluster.
        job, node: of Slurm's.
    """

    def __init__(self, name: ClusterName, job: str, node: str) -> None:
        line = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--quiet"]
        line += ["--mpi=none", "--export=ALL", *module_line(__name__, name.text)]
        null = subprocess.DEVNULL
        self._step = subprocess.Popen(
            line, env=outside_of_job(os.environ), stdin=null, stdout=null, stderr=null, start_new_session=True
        )

    @classmethod
    def of(cls, name: ClusterName, allocation: str, environ: Mapping[str, str]) -> HeadProbe | None:
        """Start a step on the head's host; None where there is no Slurm, or that host is not in the job of this one."""
        if shutil.which("srun") is None or name.is_local:
            return None
        job, nodes = _job_here(allocation, environ)
        wanted = {name.host, name.host.partition(".")[0], *resolve(name.host)}
        for node in nodes:
            if wanted & {node, *addresses_of(node)}:
                return cls(name, job, node)
        return None

    @property
    def is_up(self) -> bool:
        """True once the step has found the head."""
        return self._step.poll() == 0

    def close(self) -> None:
        """End the step."""
        if self._step.poll() is None:
            self._step.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._step.wait(_TIMEOUT)


def _job_here(allocation: str, environ: Mapping[str, str]) -> tuple[str, Sequence[str]]:
    """The Slurm job around this process, or the only one of this user on this host; and the names of its nodes."""
    kind, _, job = allocation.partition("-")
    if kind == "slurm" and environ.get("SLURM_JOB_ID") == job and environ.get("SLURM_JOB_NODELIST"):
        return job, expand_nodes(environ["SLURM_JOB_NODELIST"])
    which = ["--jobs", job] if kind == "slurm" else ["--me", "--nodelist", own_names()[1]]
    try:
        said = subprocess.run(
            ["squeue", "--noheader", "--states=RUNNING", "--format=%A %N", *which],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT, check=True,
        )  # fmt: skip
        ((job, names),) = [line.split() for line in said.stdout.splitlines()]
        return job, expand_nodes(names)
    except (OSError, subprocess.SubprocessError, ValueError):
        return "", []


def _look(text: str) -> bool:
    """Look on this host until a head of that name is up."""
    name = parse_cluster_name(text)
    assert name is not None
    deadline = time.monotonic() + _LONGEST
    while time.monotonic() < deadline:
        asker = Asker("", frozenset(own.lower() for own in own_names()), frozenset(resolve(name.host)))
        if clusters_named(name, [node.cluster for node in nodes_here(os.environ) if node.head], asker):
            return True
        time.sleep(_PAUSE)
    return False


if __name__ == "__main__":
    sys.exit(0 if _look(sys.argv[1]) else 1)
