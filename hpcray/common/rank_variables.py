"""The variables with which launchers number their ranks: Open MPI's mpirun; Hydra (MPICH, Intel MPI, MVAPICH), Cray's
PALS and everything else that speaks PMI; MVAPICH's mpirun_rsh; Flux. (srun's step needs more: `platform.allocation`,
`transport.startup`.)"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class RankVariables(Struct, frozen=True):
    """The variables of one family of launchers.

    Attributes:
        kind: "mpirun" (Open MPI), "pmi" or "flux".
        rank, size: names of the variables with the own rank and the number of ranks.
        here: names that one launcher or another gives the number of ranks on this host.
        job: names that one or another gives the name of the job step.
        nodes: name of the variable with the number of nodes, on which the ranks are distributed evenly; "" for none.
    """

    kind: str
    rank: str
    size: str
    here: tuple[str, ...]
    job: tuple[str, ...]
    nodes: str = ""


class RankFacts(Struct, frozen=True):
    """One rank: `kind` as in `RankVariables`; `here` is 0 and `job` "" where the launcher does not say."""

    kind: str
    rank: int
    size: int
    here: int
    job: str


OPEN_MPI = RankVariables(
    "mpirun",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
FLUX = RankVariables("flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", (), ("FLUX_JOB_ID",), "FLUX_JOB_NNODES")
PMI = RankVariables(
    "pmi", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"), ("PMI_JOBID", "PALS_APID", "PBS_JOBID")
)
# mpirun_rsh sets no PMI_RANK; it is MVAPICH's, before version 3 and since.
_MVAPICH = tuple(
    RankVariables("pmi", f"{prefix}_RANK", f"{prefix}_SIZE", (f"{prefix}_LOCAL_SIZE",), ())
    for prefix in ("MV2_COMM_WORLD", "MVP_COMM_WORLD")
)
_OTHERS = (PMI, *_MVAPICH)
LAUNCHER_PREFIXES = (
    "PMIX_", "OMPI_", "PMI_", "PRTE_", "PALS_", "HYDI_", "HYDRA_", "MPI_LOCAL", "MPISPAWN_", "MV2_COMM_WORLD_",
    "MVP_COMM_WORLD_", "FLUX_TASK_",
)  # fmt: skip
"""Prefixes of variables by which a process takes itself for a rank; processes of the user must not have them."""


def read_rank(variables: RankVariables, environ: Mapping[str, str]) -> RankFacts | None:
    """The rank that these variables describe; None where they are not set."""
    if variables.size not in environ or variables.rank not in environ:
        return None
    rank, size = _number(environ, variables.rank, 0), _number(environ, variables.size, 1)
    here = next((found for name in variables.here if (found := _number(environ, name, 0))), 0)
    nodes = _number(environ, variables.nodes, 0)
    if not here and nodes and size % nodes == 0:
        here = size // nodes
    job = next((text for name in variables.job if (text := environ.get(name, ""))), "")
    return RankFacts(variables.kind, rank, size, here, job)


def read_other_rank(environ: Mapping[str, str]) -> RankFacts | None:
    """The rank that anything but Open MPI, Flux and srun describes; None where none is set."""
    return next((found for variables in _OTHERS if (found := read_rank(variables, environ))), None)


def _number(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else otherwise
