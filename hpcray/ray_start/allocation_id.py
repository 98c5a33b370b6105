"""The batch job that a process belongs to, also where its shell has no variables of it."""

from __future__ import annotations

import re
from collections.abc import Mapping

_VARIABLES = {"slurm": "SLURM_JOB_ID", "pbs": "PBS_JOBID", "flux": "FLUX_JOB_ID", "lsf": "LSB_JOBID"}
_CGROUP = re.compile(r"/job_(\d+)(?:/|$)", re.MULTILINE)
_STEP = re.compile(r"/job_\d+/step_(?!extern\b)[^/\n]+")


def allocation_of(environ: Mapping[str, str], cgroups: str) -> str:
    """The name of the batch job around a process, such as `slurm-17`; "" where none is known.

    Args:
        environ: its environment.
        cgroups: the text of /proc/<pid>/cgroup. Slurm puts shells of ssh there too (pam_slurm_adopt).
    """
    for kind, variable in _VARIABLES.items():
        if text := environ.get(variable, ""):
            return f"{kind}-{text}"
    found = _CGROUP.search(cgroups)
    return f"slurm-{found[1]}" if found else ""


def dies_with_step(cgroups: str) -> bool:
    """True if Slurm ends this process at the end of its step, whatever it detaches from."""
    return bool(_STEP.search(cgroups))


def own_allocation(environ: Mapping[str, str]) -> str:
    """`allocation_of` this process."""
    return allocation_of(environ, own_cgroups())


def own_cgroups() -> str:
    """The cgroups of this process; "" where the system does not show them."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
