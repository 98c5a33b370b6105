"""Settings of the commands that start and submit jobs, and of a node's place; in one dataclass, read like `Config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from hpcray.common.config import PREFIX, convert

LauncherName = Literal["auto", "srun", "openmpi", "mpich", "intelmpi", "pals", "flux"]
"""Launcher of the nodes of a job."""
ExecutorName = Literal["auto", "slurm", "pbs", "flux", "local"]
"""Place of submitted jobs."""


@dataclass(frozen=True)
class LaunchConfig:
    """Text, most of it; "" where the site and the user say nothing.

    Attributes:
        launcher: what `hpcray-launch` starts nodes with, as its `--launcher`. "srun" and "flux" count only inside a job
            of Slurm or Flux, and nothing does where the command line names hosts or an mpirun.
        mpirun: the mpirun or mpiexec to use: a path, or a name on PATH; "": the one beside this Python, or on PATH.
        executor: where `submit` and `nodes add` run jobs, as their `--executor`.
        partition: of the jobs that they submit, where these name none.
        account: of these jobs, likewise.
        constraint: of these jobs, likewise: features that nodes must have.
        jobs: folder of submitted jobs, on a file system that all nodes share; "": `.hpcray-jobs` in the working
            directory.
        tmpdir: node-local directory, with a short path, for session directories and other temporary files; "": the
            batch system's, else the system's.
        start_dir: the directory of the secrets of clusters that `ray start` makes, of the user alone, on a file system
            that all nodes see; "": `clusters` in `~/.hpcray`.
        start_bell: whether the head of such a cluster lets scripts test the port that `--port` gives; it says nothing
            there.
        head_wait: seconds that `ray start --address` waits for its head.
        join_wait: seconds that `init()` waits for a node that `ray start` was called for.
        safe_directories: directories of other users that this user trusts, separated by ":": session directories and
            secrets may lie below them. Those of root and the user's own need no mention.
        network_devices: network devices for MPI and UCX, as `UCX_NET_DEVICES`, which comes first where it is set; "":
            those of the rank's NUMA node, or those that UCX chooses.
        ray_api: whether `hpcray dashboard` serves Ray's REST API for jobs too, as with its `--ray-api`, and `ray start
            --head` beside its node.
    """

    launcher: LauncherName = "auto"
    mpirun: str = ""
    executor: ExecutorName = "auto"
    partition: str = ""
    account: str = ""
    constraint: str = ""
    jobs: str = ""
    tmpdir: str = ""
    start_dir: str = ""
    start_bell: bool = True
    head_wait: float = 300.0
    join_wait: float = 30.0
    safe_directories: str = ""
    network_devices: str = ""
    ray_api: bool = False

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> LaunchConfig:
        """Defaults, overridden by `HPCRAY_*` variables; an empty variable counts as none.

        Raises:
            ValueError: a variable is not valid; the message names it.
        """
        names = {field.name: PREFIX + field.name.upper() for field in fields(cls)}
        texts = {field: environ[name] for field, name in names.items() if environ.get(name)}
        sources = {field: f"{names[field]}={text!r}" for field, text in texts.items()}
        return cls(**convert(cls, texts, sources, strict=False))
