"""Coming up: who was started with us, who has come, and an end to the wait for those who do not.

`MPI_Init` blocks, inside MPI, until every rank has called it. So every rank shows itself to the others of its host
before it calls `MPI_Init`, by the name of a socket; when the time is up, a thread that needs no MPI reads who has come,
names who has not, and ends the process. (A socket in the abstract namespace is no file: it goes with its process.)
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcray.transport.base import StartError

EXIT_START_FAILED = 78
_GRACE = 1.0


@dataclass(frozen=True)
class Launch:
    """What the launcher says about this process.

    Attributes:
        kind: "mpirun", "srun" or "pmi"; "" without a launcher.
        rank: own rank.
        size: number of ranks that were started.
        job: a name that the ranks of one job step share and no other job has.
        here: ranks started on this host, 0 if unknown.
        hosts: all hosts as the launcher writes them, "" if unknown.
    """

    kind: str = ""
    rank: int = 0
    size: int = 1
    job: str = ""
    here: int = 0
    hosts: str = ""


def read_launch(environ: Mapping[str, str]) -> Launch:
    """What the environment says. A process in a batch script, outside srun and mpirun, has no launcher."""
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return Launch(
            "mpirun",
            int(environ.get("OMPI_COMM_WORLD_RANK", "0")),
            int(environ["OMPI_COMM_WORLD_SIZE"]),
            environ.get("PMIX_NAMESPACE", "") or environ.get("OMPI_MCA_ess_base_jobid", ""),
            int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "0")),
        )
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ and environ.get("SLURM_STEP_NUM_TASKS"):
        here = re.match(r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        uniform = "," not in environ.get("SLURM_STEP_TASKS_PER_NODE", ",")
        return Launch(
            "srun",
            int(environ["SLURM_PROCID"]),
            int(environ["SLURM_STEP_NUM_TASKS"]),
            f"slurm-{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}",
            int(here.group()) if here and uniform else 0,
            environ.get("SLURM_STEP_NODELIST", ""),
        )
    if "PMI_SIZE" in environ:
        return Launch("pmi", int(environ.get("PMI_RANK", "0")), int(environ["PMI_SIZE"]), environ.get("PMI_JOBID", ""))
    return Launch()


class SaidByRank0(StartError):
    """Every rank has found the same; rank 0 tells it, the others leave without a word."""


class OnlyHere(StartError):
    """This rank has found something that others may not have: they wait for it."""


def singleton_hint(launch: Launch) -> str:
    """What to tell a user whose ranks came up each in an MPI world of its own."""
    if launch.kind == "srun":
        return (
            "the MPI library and srun speak different start-up protocols: use `srun --mpi=pmix` with Open MPI, "
            "`srun --mpi=pmi2` with MPICH (`srun --mpi=list` shows what this Slurm has)"
        )
    return "mpirun belongs to another MPI than mpi4py: use the mpirun of the MPI that `hpcray doctor` shows"


class RollCall:
    """How the ranks of one host see each other before MPI does. A context manager: it holds while ranks come up.

    Args:
        launch: what the launcher says.
        timeout: seconds until the process is ended with exit code 78.
    """

    def __init__(self, launch: Launch, timeout: float) -> None:
        self._launch = launch
        self._timeout = timeout
        key = hashlib.sha256(launch.job.encode()).hexdigest()[:16]
        self._name = f"hpcray-{os.getuid()}-{key}-"
        self._up = threading.Event()
        self._step = "start"
        self._socket: socket.socket | None = None

    def step(self, what: str) -> None:
        """Note what is being waited for, for the report."""
        self._step = what

    def __enter__(self) -> RollCall:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.bind(f"\0{self._name}{self._launch.rank}")
        except OSError:
            pass  # the launcher gave no name that only this job has; the report will miss us, nothing else
        threading.Thread(target=self._watch, name="hpcray-start", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._up.set()
        if self._socket is not None:
            self._socket.close()

    def came(self) -> list[int]:
        """Ranks of this job that are on this host now, and still starting."""
        sockets = Path("/proc/net/unix").read_text(errors="replace")
        return sorted({int(rank) for rank in re.findall(rf"@{self._name}(\d+)$", sockets, re.MULTILINE)})

    def _watch(self) -> None:
        if self._up.wait(self._timeout):
            return
        sys.stderr.write(self.report(self.came()) + "\n")
        sys.stderr.flush()
        # The first to give up must not look absent to the others of this host.
        time.sleep(_GRACE)
        os._exit(EXIT_START_FAILED)

    def report(self, came: list[int]) -> str:
        """The message of a failed start.

        Args:
            came: ranks seen on this host.
        """
        launch = self._launch
        host = socket.gethostname()
        lines = [
            f"hpcray: rank {launch.rank} of {launch.size} on {host}: the cluster was not up after "
            f"{self._timeout:g} s, waiting in {self._step}.",
            f"  on this host came: {_ranks(came)}" + (f" of {launch.here} started here" if launch.here else ""),
        ]
        absent = [rank for rank in range(launch.size) if rank not in came]
        if launch.here and launch.here == launch.size:
            lines.append(f"  missing on {host}: {_ranks(absent)}" if absent else "  all ranks came: one hangs in MPI")
        elif launch.here and len(came) >= launch.here:
            lines.append(f"  this host is complete; missing on another host (of {launch.hosts or 'the job'}), some of:")
            lines.append(f"  {_ranks(absent)}")
        else:
            lines.append(f"  not seen on {host}: {_ranks(absent)}; hosts of the job: {launch.hosts or 'unknown'}")
        lines.append("  hint: see what those ranks printed; HPCRAY_START_TIMEOUT sets the time in seconds")
        return "\n".join(lines)


def _ranks(ranks: list[int]) -> str:
    """`ranks 0-2, 5`: runs shortened."""
    if not ranks:
        return "no rank"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    names = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(names)
