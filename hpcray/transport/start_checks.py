"""Set-ups that cannot work, or only until something dies: each found before `MPI_Init`, each with what to do instead.

What MPI itself says to them is a line from its inside (`unsupported PMI version`), a rank that believes to be alone, or
nothing until the first node is lost.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Collection, Mapping

from hpcray.transport.base import StartError
from hpcray.transport.startup import Launch, OnlyHere, SaidByRank0

_SHARED_MEMORY = "/dev/shm"
_LITTLE_SHARED_MEMORY = 4 << 20
_FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"
_YES = frozenset({"1", "t", "true", "y", "yes", "enabled", "on"})
_OPEN_MPI = re.compile(r"Open MPI v(\d+)")
_SIBLINGS = "/sys/devices/system/cpu/cpu0/topology/thread_siblings_list"
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def pmi_offered(environ: Mapping[str, str]) -> str:
    """The start-up protocol that srun offers its tasks: "pmix", "pmi2" or "none"."""
    if "PMIX_RANK" in environ or "PMIX_NAMESPACE" in environ:
        return "pmix"
    return "pmi2" if "PMI_FD" in environ or "PMI_RANK" in environ else "none"


def check_protocol(launch: Launch, library: str, environ: Mapping[str, str]) -> str:
    """What is wrong between srun's start-up protocol and the MPI library; "" where they fit, or nobody can know.

    Args:
        launch: what the launcher says.
        library: all that the library says about itself.
        environ: the environment of a rank.
    """
    if launch.kind != "srun" or launch.size == 1:
        return ""
    offered = pmi_offered(environ)
    first = library.split("\n")[0].strip("\0 ").split(", package")[0]
    open_mpi = _OPEN_MPI.match(first)
    mpich = first.startswith("MPICH Version")
    if open_mpi and offered != "pmix" and (int(open_mpi[1]) >= 5 or offered == "none"):
        speaks, flag = "PMIx", "--mpi=pmix"
    elif mpich and (offered == "none" or (offered == "pmix" and "pmix" not in library.lower())):
        speaks, flag = "PMI-2", "--mpi=pmi2"
    else:
        return ""
    name = re.sub(r"\s+", " ", first).replace("Version: ", "").strip()
    given = {"pmix": "PMIx", "pmi2": "PMI-2", "none": "no start-up protocol"}[offered]
    return (
        f"{name} speaks {speaks}, but srun gave its {launch.size} tasks {given}: each of them would be alone; "
        f"hint: srun {flag} (srun --mpi=list shows what this Slurm has)"
    )


def check_fault_tolerance(launch: Launch, environ: Mapping[str, str]) -> str:
    """Why Open MPI's own fault tolerance (ULFM) must not be on under srun; "" where it is not."""
    if launch.kind != "srun" or environ.get(_FAULT_TOLERANCE, "").strip().lower() not in _YES:
        return ""
    return (
        f"{_FAULT_TOLERANCE}={environ[_FAULT_TOLERANCE]} under srun: Slurm's PMIx plugin then ends the whole step when "
        f"a rank is lost, which hpcray survives without it; hint: unset {_FAULT_TOLERANCE} (--with-ft is for mpirun)"
    )


def check_shared_memory(path: str = _SHARED_MEMORY) -> str:
    """Why MPI and UCX would die of a bus error in /dev/shm; "" where there is room."""
    try:
        state = os.statvfs(path)
    except OSError as error:
        return f"{path} cannot be used ({error.strerror}): MPI and UCX need it; hint: mount it in the container"
    free = state.f_bavail * state.f_frsize
    if free >= _LITTLE_SHARED_MEMORY:
        return ""
    return (
        f"{path} on {socket.gethostname()} has {free >> 10} KB free of {state.f_blocks * state.f_frsize >> 10} KB, MPI "
        f"and UCX need {_LITTLE_SHARED_MEMORY >> 10} KB; hint: remove what dead jobs left there, or start the "
        "container with --shm-size=1g"
    )


def check_import_order() -> str:
    """Why UCX cannot be loaded any more; "" where it can."""
    if "mpi4py.MPI" not in sys.modules or "ucxx" in sys.modules:
        return ""
    return (
        "mpi4py was imported before hpcray could load UCX, and the UCX inside Open MPI does not fit ucxx; hint: a "
        "sitecustomize module or a .pth file imports it: let that import ucxx first"
    )


def several_tasks(launch: Launch) -> str:
    """What to know about several tasks of one step on a host; "" with one."""
    if launch.kind != "srun" or launch.here <= 1:
        return ""
    return (
        f"{launch.here} tasks of this step run on {socket.gethostname()}, each as a node of its own with a part of the "
        "CPUs; Slurm ends the step when one of them dies; hint: srun --ntasks-per-node=1, and --cpus-per-task for the "
        "cores"
    )


def few_cores(launch: Launch, meant: int | None, mask: Collection[int], threads: int) -> str:
    """What to know where Slurm has bound the only task of a host to a part of the CPUs that were meant for it; "" else.

    `srun --exclusive` gives a task one core, and since Slurm 22.05 srun does not take `--cpus-per-task` from the job.

    Args:
        launch: what the launcher says.
        meant: CPUs that were asked for the task, or else those of the job on this host; None if unknown.
        mask: the CPUs that this process may use.
        threads: CPUs of a core; `--hint=nomultithread` leaves out all but the first, and that is no mistake.
    """
    meant = min(meant or 0, os.cpu_count() or 1)  # a site may tell Slurm more CPUs than there are
    if launch.kind != "srun" or launch.here != 1 or len(mask) * threads >= meant:
        return ""
    return (
        f"the one task on {socket.gethostname()} may use {len(mask)} of the {meant} CPUs that the job has for it; "
        f"hint: srun --cpus-per-task={meant} (srun does not take it from the job), or hpcray-launch"
    )


def threads_of_a_core() -> int:
    """CPUs that one core of this machine counts as; 1 where the system does not tell."""
    try:
        with open(_SIBLINGS, encoding="ascii") as file:
            text = file.read()
    except OSError:
        return 1
    return sum(int(last or first) - int(first) + 1 for first, last in _RANGE.findall(text)) or 1


def require(problem: str, launch: Launch, everywhere: bool) -> None:
    """Nothing without a problem.

    Args:
        everywhere: every rank has the same problem, so one is enough to tell it.

    Raises:
        SaidByRank0: there is one, of every rank, and this is not rank 0.
        OnlyHere: there is one, of this rank alone or of some.
        StartError: there is one, of every rank.
    """
    if problem and not everywhere:
        raise OnlyHere(problem)
    if problem and launch.rank != 0:
        raise SaidByRank0(problem)
    if problem:
        raise StartError(problem)
