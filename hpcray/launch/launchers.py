"""Launchers beside srun and Open MPI's mpirun: which one is here, and its line that starts one process per node.

Each is a `Launcher`. What was tried with the real thing: docs/how-to/mpi.md.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, get_args

from hpcray.common.config import LauncherName

OPEN_MPI, MPICH, INTEL_MPI, PALS, FLUX, SRUN, AUTO = "openmpi", "mpich", "intelmpi", "pals", "flux", "srun", "auto"
NAMES: tuple[str, ...] = get_args(LauncherName)
"""The names for `--launcher`. MVAPICH has MPICH's launcher."""
_BANNERS = {
    "open mpi": OPEN_MPI,
    "open-mpi": OPEN_MPI,
    "openrte": OPEN_MPI,
    "prte": OPEN_MPI,
    "intel": INTEL_MPI,
    "hydra": MPICH,
    "pals": PALS,
}
_QUERY_TIMEOUT = 20.0  # seconds


@dataclass(frozen=True)
class Placement:
    """The places of a launch's ranks.

    Attributes:
        program: path of the launcher.
        nodes: number of ranks; None: one for each host that the launcher knows of.
        hosts: host names, in order; empty: those that the launcher knows of, or this host.
        hostfile: a file that lists them, or "".
        allocated: whether the hosts are those of a batch job, one rank on each.
        export: names of variables that the user wants on all hosts.
    """

    program: str
    nodes: int | None = None
    hosts: tuple[str, ...] = ()
    hostfile: str = ""
    allocated: bool = False
    export: tuple[str, ...] = ()


class Launcher(Protocol):
    """One kind of launcher."""

    def line(self, where: Placement, command: Sequence[str]) -> list[str]:
        """The line that starts `command` once per node. Pure."""


class HydraLauncher:
    """mpiexec of MPICH, MVAPICH and Intel MPI. It passes the whole environment on.

    Args:
        intel: whether it is Intel's, which binds ranks by default.
    """

    def __init__(self, intel: bool) -> None:
        self._intel = intel

    def line(self, where: Placement, command: Sequence[str]) -> list[str]:
        line = [where.program]
        # The ranks that live go on when one has died: MPICH's option, not Intel's.
        line += ["-genv", "I_MPI_PIN", "0"] if self._intel else ["-disable-auto-cleanup", "-bind-to", "none"]
        if where.hostfile:
            line += ["-f", where.hostfile]
        elif where.hosts:
            line += ["-hosts", ",".join(where.hosts)]
        elif not where.allocated:
            line += ["-hosts", "localhost"]
        if where.allocated or where.hosts or where.hostfile:
            line += ["-ppn", "1"]
        count = where.nodes or len(where.hosts) or (None if where.allocated else 1)
        return [*line, *(["-n", str(count)] if count else []), *command]


class PalsLauncher:
    """mpiexec of Cray's PALS, beside Cray MPICH, in a PBS job or with a list of hosts."""

    def line(self, where: Placement, command: Sequence[str]) -> list[str]:
        line = [where.program, "--no-abort-on-failure", "--cpu-bind", "none", "--genvall"]
        if where.hostfile:
            line += ["--hostfile", where.hostfile]
        elif where.hosts:
            line += ["--hosts", ",".join(where.hosts)]
        count = where.nodes or len(where.hosts) or 1
        return [*line, "-n", str(count), "--ppn", "1", *command]


class FluxLauncher:
    """`flux run` in a Flux instance, which gives each rank a whole node."""

    def line(self, where: Placement, command: Sequence[str]) -> list[str]:
        # Without these Flux ends the job half a minute after the first rank has left, or at once when one fails.
        line = [where.program, "run", "--exclusive", "-o", "cpu-affinity=off", "-o", "exit-timeout=none"]
        line += [f"--requires=hosts:{','.join(where.hosts)}"] if where.hosts else []
        count = str(where.nodes or len(where.hosts) or 1)
        return [*line, "-N", count, "-n", count, *command]


LAUNCHERS: dict[str, Launcher] = {
    MPICH: HydraLauncher(intel=False),
    INTEL_MPI: HydraLauncher(intel=True),
    PALS: PalsLauncher(),
    FLUX: FluxLauncher(),
}
"""By name. Open MPI's and srun's lines are in `launch_line`."""


def in_flux(environ: Mapping[str, str]) -> bool:
    """True inside a Flux instance."""
    return bool(environ.get("FLUX_URI")) and shutil.which("flux", path=environ.get("PATH")) is not None


def flux_nodes(program: str = "flux") -> int | None:
    """The number of nodes of the Flux instance around; None where it does not say."""
    text = _output([program, "getattr", "size"]).strip()
    return int(text) if text.isdecimal() else None


def recognise(program: str) -> str:
    """The name of the launcher that an mpirun or mpiexec is, by what it says about itself; Open MPI's by default."""
    text = _output([program, "--version"]).lower()
    return next((name for mark, name in _BANNERS.items() if mark in text), OPEN_MPI)


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_QUERY_TIMEOUT,
            env=dict(os.environ),
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
