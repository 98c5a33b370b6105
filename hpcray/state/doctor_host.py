"""The doctor's look at this host: CPUs and their binding, memory, cgroups, GPUs, directories, limits."""

from __future__ import annotations

import math
import os
import platform
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata

from hpcray.base.config import Config
from hpcray.host import probe
from hpcray.host.allocation import accelerators, read_allocation, visibility_variable
from hpcray.host.allocation_tmp import Directory, directories, file_system, look_at
from hpcray.host.binding import ADAPTERS, WorkerPlan, plan_rank
from hpcray.host.session import session_root
from hpcray.host.topology import nodes_of, numa_nodes
from hpcray.state.doctor_wires import nearest_adapters, rdma_devices
from hpcray.state.findings import FAIL, NOTE, OK, WARN, Finding
from hpcray.transport.start_checks import check_shared_memory

_MB = 1 << 20
_GB = 1 << 30
_FEW_FILES = 4096
_FEW_PROCESSES = 4096
_LITTLE_LOCKED = 1 << 30
_LITTLE_TMP = 1 << 30
_LITTLE_SHARED_MEMORY = 64 << 20


def look_at_software() -> list[Finding]:
    """Versions."""
    return [
        Finding("software", "hpcray", package_version("hpcray", "from a source directory")),
        Finding("software", "Python", f"{platform.python_version()} at {sys.executable}"),
        Finding("software", "NumPy", package_version("numpy")),
        Finding("software", "environment", f"{sys.prefix} on {file_system(sys.prefix) or 'an unknown file system'}"),
    ]


def package_version(name: str, otherwise: str = "not installed") -> str:
    """Version of an installed package, or `otherwise`."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return otherwise


def look_at_cpus(environ: Mapping[str, str]) -> list[Finding]:
    """CPUs that this process may use and what limits them."""
    given = read_allocation(environ)
    machine, mask, quota = os.cpu_count() or 1, sorted(os.sched_getaffinity(0)), probe.cgroup_cpus()
    limits = [f"affinity {len(mask)}"]
    limits += [f"cgroup {quota:g}"] if quota < math.inf else []
    limits += [f"Slurm {given.cpus_here}"] if given.cpus_here else []
    usable = probe.usable_cpus()
    few = given.in_step and usable == 1 < machine
    hint = "one core for a whole node: ask with srun --cpus-per-task, or start with hpcray-launch" if few else ""
    return [Finding("host", "CPUs", f"{usable} of {machine} usable ({', '.join(limits)})", WARN if few else OK, hint)]


def look_at_binding(environ: Mapping[str, str]) -> list[Finding]:
    """Where the cores of this process lie, and with several NUMA nodes what hpcray would add to the launcher's binding
    for the workers of a rank here, and for its adapters."""
    mask, nodes = frozenset(os.sched_getaffinity(0)), numa_nodes()
    mine = nodes_of(mask, nodes)
    place = f"cores {runs(sorted(mask))}"
    place += f", NUMA node{'s' * (len(mine) > 1)} {runs(sorted(mine))}" if mine else ""
    cards = nearest_adapters(mine)
    place += f", network {', '.join(cards)}" if cards else ""
    found = [Finding("host", "binding", place)]
    wanted = _settings(environ).bind
    plan = plan_rank(accelerators(environ), -1, 1, 0, environ, wanted)
    if len(nodes) > 1:
        value = _worker_places(plan.workers) if wanted else "the cores of their rank (HPCRAY_BIND=0)"
        found.append(Finding("host", "workers", value))
    if ADAPTERS in environ:
        found.append(Finding("host", "RDMA ports", f"{environ[ADAPTERS]} ({ADAPTERS} of the site or the user)"))
    elif plan.adapters:
        found.append(Finding("host", "RDMA ports", f"{plan.adapters} ({ADAPTERS}, if UCX has them)"))
    return found


def _worker_places(plan: WorkerPlan) -> str:
    gpus: dict[str, list[str]] = {}
    for ident, cores in plan.near.items():
        gpus.setdefault(runs(sorted(cores)), []).append(ident)
    places = [f"with GPU {', '.join(ids)}: cores {cores}" for cores, ids in gpus.items()]
    return "; ".join([*places, "others: the cores of their rank" if places else "the cores of their rank"])


def _settings(environ: Mapping[str, str]) -> Config:
    try:
        return Config.from_env(environ)
    except ValueError:
        return Config()  # a job says what is wrong


def runs(numbers: Sequence[int]) -> str:
    """`0-3,8` for 0 1 2 3 8."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def look_at_memory(environ: Mapping[str, str]) -> list[Finding]:
    """Memory that the node's processes may use together and what limits it, /dev/shm, and stores that stay apart."""
    usable, machine = probe.usable_memory(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cgroup, given = probe.cgroup_memory(), read_allocation(environ).memory_here
    limits = [f"machine {size(machine)}"]
    limits += [f"cgroup {size(cgroup)}"] if cgroup is not None and cgroup < machine else []
    limits += [f"Slurm {size(given)}"] if given else []
    value = f"{size(usable)} usable ({', '.join(limits)}); the object stores take 30 % of it by default"
    found = [Finding("host", "memory", value), look_at_shared_memory()]
    if not _settings(environ).same_host:
        text = "nodes of this host do not read in each other's stores: objects go over the wires (HPCRAY_SAME_HOST=0)"
        found.append(Finding("host", "neighbours", text, NOTE))
    return found


def look_at_shared_memory(path: str = "/dev/shm") -> Finding:
    """/dev/shm: MPI's and UCX's segments are there. The object store is not."""
    problem = check_shared_memory(path)
    if problem:
        what, _, hint = problem.partition("; hint: ")
        return Finding("host", path, what, FAIL, hint)
    state = os.statvfs(path)
    total, free = state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
    little = free < _LITTLE_SHARED_MEMORY
    hint = "tight for several ranks on this host: remove what dead jobs left there, or --shm-size=1g for a container"
    return Finding("host", path, f"{size(free)} free of {size(total)}", WARN if little else OK, hint if little else "")


def size(amount: float) -> str:
    """Bytes for people."""
    return f"{amount / _GB:.1f} GB" if amount >= _GB else f"{amount / _MB:.0f} MB"


def look_at_gpus(environ: Mapping[str, str]) -> list[Finding]:
    """Ids of the GPUs that a node here would offer."""
    ids = accelerators(environ)
    if ids:
        return [Finding("host", "GPUs", f"{len(ids)}: {', '.join(ids)} ({visibility_variable(environ)})", OK)]
    hidden = "SLURM_JOB_ID" in environ and bool(accelerators({}))
    hint = "the machine has GPUs, this job was given none: ask with --gpus-per-node" if hidden else ""
    return [Finding("host", "GPUs", "none", NOTE, hint)]


def look_at_directories(environ: Mapping[str, str]) -> list[Finding]:
    """Where the session directory goes, and the directories for temporary files with their file systems."""
    root = session_root(environ)
    parent = os.path.dirname(root)
    wanted = environ.get("HPCRAY_TMPDIR") or environ.get("SLURM_TMPDIR") or environ.get("TMPDIR") or parent
    home = look_at(parent)
    level, hint = OK, ""
    if not home.writable:
        level, hint = FAIL, f"{parent} is not writable; set HPCRAY_TMPDIR"
    elif os.path.abspath(wanted) != parent:
        level = WARN
        hint = f"{wanted} does not exist or is too long for sockets; set HPCRAY_TMPDIR to a short node-local path"
    elif not home.node_local:
        level = WARN
        hint = f"{parent} is on {home.kind}, which all nodes share and which is slow: set HPCRAY_TMPDIR to a local disk"
    found = [Finding("host", "session directory", f"{root} on {home.kind or 'an unknown file system'}", level, hint)]
    return found + [_temporary(entry) for entry in directories(environ)]


def _temporary(entry: Directory) -> Finding:
    where = "shared" if not entry.node_local else "memory" if entry.in_memory else "node-local"
    value = f"{entry.path}: {entry.kind or 'unknown'} ({where}), {_free(entry.free)} free"
    name = entry.variable or "tmp"
    if not entry.writable:
        return Finding(
            "host", name, value, WARN, f"not writable: set {entry.variable or 'TMPDIR'} to another directory"
        )
    if entry.free < _LITTLE_TMP:
        return Finding("host", name, value, WARN, "nearly full: spilled objects and logs go there")
    return Finding("host", name, value)


def _free(amount: int) -> str:
    """Two digits: nodes whose disks differ a little are one row."""
    if amount < _GB:
        return size(amount)
    digits = max(0, len(str(amount // _GB)) - 2)
    return f"{amount // _GB // 10**digits * 10**digits} GB"


def look_at_limits(getrlimit: Callable[[int], tuple[int, int]], rdma: bool) -> list[Finding]:
    """Soft limits that stop large jobs, with what they stop.

    Args:
        getrlimit: `resource.getrlimit`.
        rdma: whether there is an adapter, which needs locked memory.
    """
    cases = [
        ("open files", resource.RLIMIT_NOFILE, _FEW_FILES, "ulimit -n 65536: each process holds a socket to its peers"),
        ("processes", resource.RLIMIT_NPROC, _FEW_PROCESSES, "ulimit -u: every worker is a process with threads"),
        ("locked memory", resource.RLIMIT_MEMLOCK, _LITTLE_LOCKED if rdma else 0, "ulimit -l unlimited for RDMA"),
    ]
    found = []
    for name, number, few, hint in cases:
        soft, _ = getrlimit(number)
        unlimited = soft == resource.RLIM_INFINITY
        shown = "unlimited" if unlimited else size(soft) if number == resource.RLIMIT_MEMLOCK else str(soft)
        enough = unlimited or soft >= few
        found.append(Finding("limits", name, shown, OK if enough else WARN, "" if enough else hint))
    return found


def look_at_host(environ: Mapping[str, str]) -> list[Finding]:
    """All of it."""
    return [
        *look_at_cpus(environ),
        *look_at_binding(environ),
        *look_at_memory(environ),
        *look_at_gpus(environ),
        *look_at_directories(environ),
        *look_at_limits(resource.getrlimit, bool(rdma_devices())),
    ]
