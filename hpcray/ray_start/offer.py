"""The CPUs that a started node offers: those of the allocation on this host, however narrow its step."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from hpcray.platform.allocation import expand_counts, expand_nodes


def cpus_of_allocation(environ: Mapping[str, str], host: str, machine: int) -> int | None:
    """CPUs that the Slurm job has on a host; None where the environment does not say.

    Args:
        environ: the environment of a step or of a batch script.
        host: name of the host.
        machine: CPUs that the machine has: a site may give Slurm a higher number.
    """
    try:
        nodes = expand_nodes(environ.get("SLURM_JOB_NODELIST", ""))
        counts = expand_counts(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    except ValueError:
        return None
    names = [environ.get("SLURMD_NODENAME", ""), host, host.partition(".")[0]]
    index = next((nodes.index(name) for name in names if name in nodes), None)
    if index is None or index >= len(counts):
        return None
    return max(1, min(counts[index], machine))


def offered_cpus(environ: Mapping[str, str]) -> tuple[int | None, str]:
    """The CPUs that this node offers, None for what it finds out by itself; and a line about a step that is bound to
    fewer, "" for none."""
    known = cpus_of_allocation(environ, socket.gethostname(), os.cpu_count() or 1)
    if known is None:
        return None, ""
    bound = len(os.sched_getaffinity(0))
    if bound >= known:
        return known, ""
    return known, (
        f"this node offers the {known} CPUs that the job has on {socket.gethostname()}, and its step is bound to "
        f"{bound}; hint: srun --cpus-per-task={known}, or --cpu-bind=none"
    )
