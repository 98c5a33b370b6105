"""The surroundings of a process: its batch job, the names of its host, the CPUs that the job has there."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping

from hpcray.platform.allocation import expand_counts, expand_nodes
from hpcray.platform.host_addresses import addresses_of, is_loopback
from hpcray.platform.sockets import own_addresses
from hpcray.ray_start.presence import JOB_VARIABLES

_CGROUP = re.compile(r"/job_(\d+)(?:/|$)", re.MULTILINE)
_STEP_DAEMON = re.compile(rb"slurmstepd: \[(\d+)\.")
_STEP = re.compile(r"/job_\d+/step_(?!extern\b)[^/\n]+")


def allocation_of(environ: Mapping[str, str], cgroups: str) -> str:
    """The name of the batch job around a process, such as `slurm-17`; "" where none is known.

    Args:
        environ: its environment.
        cgroups: the text of /proc/<pid>/cgroup. Slurm puts shells of ssh there too (pam_slurm_adopt).
    """
    for kind, variable in JOB_VARIABLES.items():
        if text := environ.get(variable, ""):
            return f"{kind}-{text}"
    found = _CGROUP.search(cgroups)
    return f"slurm-{found[1]}" if found else ""


def dies_with_step(cgroups: str) -> bool:
    """True if Slurm ends this process at the end of its step, whatever it detaches from."""
    return bool(_STEP.search(cgroups))


def own_allocation(environ: Mapping[str, str]) -> str:
    """`allocation_of` this process. Some scripts remove all of Slurm's variables before they start Ray: it is
    that of the slurmstepd above them then."""
    return allocation_of(environ, own_cgroups()) or allocation_of_ancestors(os.getpid())


def allocation_of_ancestors(pid: int, proc: str = "/proc") -> str:
    """The name of the batch job of a process by the slurmstepd that has started it, or its parents; "" for none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1:
            with open(f"{proc}/{pid}/stat", "rb") as file:
                name, _, fields = file.read().rpartition(b")")
            if name.endswith(b"(slurmstepd"):
                with open(f"{proc}/{pid}/cmdline", "rb") as file:
                    if found := _STEP_DAEMON.match(file.read()):
                        return f"slurm-{found[1].decode()}"
            pid = int(fields.split()[1])
    return ""


def own_cgroups() -> str:
    """The cgroups of this process; "" where the system does not show them."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def own_names() -> tuple[str, ...]:
    """All names and addresses by which others may call this host."""
    name = socket.gethostname()
    return tuple(dict.fromkeys([name, name.partition(".")[0], *own_addresses()]))  # who asks resolves other names


def resolve(host: str) -> tuple[str, ...]:
    """The addresses that the system knows for a host, without those of the loopback; () for none."""
    return tuple(address for address in addresses_of(host) if not is_loopback(address))


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


def absent_devices(environ: Mapping[str, str], devices: str = "/sys/class") -> str:
    """The value of UCX_NET_DEVICES where it names devices of which this host has none, "" else. Scripts carry such
    lines from one cluster to another; Ray's nodes never hear of them, and UCX would find no way to any other node.

    Args:
        devices: the directory in which the kernel shows them.
    """
    given = environ.get("UCX_NET_DEVICES", "")
    names = [name.partition(":")[0] for name in given.lstrip("^").split(",")]
    if not given or given.startswith("^") or "all" in names:
        return ""
    known = [os.path.join(devices, kind, name) for kind in ("net", "infiniband") for name in names if name]
    return "" if any(map(os.path.exists, known)) else given
