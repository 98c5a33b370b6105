"""Cores, threads and RDMA adapters of a rank and its workers: the machine's NUMA topology, and the binding to it.

Only what the launcher has left open is bound (`HPCRAY_BIND=0`: nothing), and nothing on a machine with one NUMA node:

- A rank that the launcher has bound keeps its cores. Of several unbound ranks on a host, each gets NUMA nodes of its
own,
  as far as these have enough cores for the CPUs that the rank offers.
- A worker with GPUs gets the cores of its rank on the NUMA node of its GPUs, unless its task has more CPUs than these.
  Every other worker has the cores of its rank: `num_cpus` is a number to count with, and may be a fraction.
- A rank on one NUMA node uses the RDMA ports of that node, if there are others of the same kind and the site has set no
  `UCX_*` of its own.

Numerical libraries of a worker start as many threads as its task or actor has CPUs, as in Ray. `OMP_NUM_THREADS` counts
for libraries that are loaded later. Libraries that the fork server has loaded, limited to one thread each, are set by
threadpoolctl, PyTorch also by itself: it has a number of its own, for each thread that begins to compute. What the user
has set in a library's own variable, or in OpenMP's, holds for both kinds.

Source: Linux, Documentation/ABI/stable/sysfs-devices-node, sysfs-bus-pci, sysfs-class-infiniband; NVIDIA's driver,
/proc/driver/nvidia; CUDA programming guide, CUDA_DEVICE_ORDER.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

from hpcray.common.resources import UNIT
from hpcray.platform.accelerators import is_amd

ROOT = Path("/")
UNKNOWN_NODE = -1
UCX_NET_DEVICES = "UCX_NET_DEVICES"
OMP_NUM_THREADS = "OMP_NUM_THREADS"
_SUBNET_PREFIX = 19  # characters of a GID that name its subnet: four groups of four digits with colons between
_SITE_VARIABLES = (UCX_NET_DEVICES, "UCX_TLS")
"""Each of these may exclude the adapters that we would select, or those that the other one needs."""
_PLACEMENT_VARIABLES = ("OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""With one of these the program places its threads itself, and must be free to use all cores."""

CoreSet = frozenset[int]


class RdmaPort(Struct, frozen=True):
    """A port of an RDMA adapter that is up.

    Attributes:
        name: UCX's name, `mlx5_0:1`.
        node: its NUMA node, UNKNOWN_NODE if the system has no information.
        fabric: link layer, rate and subnet: equal for interchangeable ports.
    """

    name: str
    node: int
    fabric: tuple[str, str, str]


def numa_nodes() -> dict[int, frozenset[int]]:
    """The CPUs of each NUMA node that has any; empty if the system has no information."""
    found = {}
    for directory in (ROOT / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = _cpulist(_text(directory / "cpulist"))
        if cpus:
            found[int(directory.name.removeprefix("node"))] = cpus
    return dict(sorted(found.items()))


def numa_nodes_of(cpus: Iterable[int], nodes: Mapping[int, frozenset[int]]) -> set[int]:
    """The NUMA nodes that these CPUs belong to."""
    wanted = set(cpus)
    return {node for node, own in nodes.items() if wanted & own}


def numa_node_of_device(device: Path) -> int:
    """The NUMA node of a device, by its directory in /sys."""
    try:
        return int(_text(device / "numa_node"))
    except ValueError:
        return UNKNOWN_NODE


def rdma_ports() -> list[RdmaPort]:
    """The ports of RDMA adapters that are up."""
    found = []
    for adapter in sorted((ROOT / "sys/class/infiniband").glob("*")):
        for port in sorted((adapter / "ports").glob("[0-9]*")):
            if not _text(port / "state").startswith("4"):  # "4: ACTIVE"
                continue
            fabric = (_text(port / "link_layer"), _text(port / "rate"), _subnet(port))
            found.append(RdmaPort(f"{adapter.name}:{port.name}", numa_node_of_device(adapter / "device"), fabric))
    return found


def numa_nodes_of_gpus(ids: Sequence[str], amd: bool, environ: Mapping[str, str]) -> dict[str, int]:
    """The NUMA node of each of these GPUs, as far as it is certain.

    Args:
        ids: as `visible_gpus` returns them: numbers of the devices that this process may open, or UUIDs. Parts of GPUs
            (MIG) are left out.
        amd: whether they are AMD's.
        environ: the environment, which may change the order in which CUDA counts.
    """
    devices = _amd() if amd else _nvidia()
    # CUDA counts the fastest first. Only among equals is that for certain the order of the bus.
    counted = amd or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.model for gpu in devices}) == 1
    found = {}
    for ident in ids:
        if ident.isdecimal():
            mine = devices[int(ident) : int(ident) + 1] if counted else []
        else:
            mine = [gpu for gpu in devices if gpu.uuid.startswith(ident)]
        if len(mine) == 1 and mine[0].node != UNKNOWN_NODE:
            found[ident] = mine[0].node
    return found


class _Gpu(Struct, frozen=True):
    uuid: str
    model: str
    node: int


def _nvidia() -> list[_Gpu]:
    """NVIDIA's GPUs that this process may open, in the order of the bus. A cgroup or a container holds others back."""
    found = []
    for directory in sorted((ROOT / "proc/driver/nvidia/gpus").glob("*")):
        facts = _facts(directory / "information", ":")
        if os.access(ROOT / "dev" / f"nvidia{facts.get('Device Minor', '')}", os.R_OK | os.W_OK):
            node = numa_node_of_device(ROOT / "sys/bus/pci/devices" / directory.name.lower())
            found.append(_Gpu(facts.get("GPU UUID", ""), facts.get("Model", ""), node))
    return found


def _amd() -> list[_Gpu]:
    """AMD's GPUs that this process may see, in the order of the kernel's list."""
    found = []
    places = (ROOT / "sys/class/kfd/kfd/topology/nodes").glob("[0-9]*")
    for directory in sorted(places, key=lambda path: int(path.name)):
        if _text(directory / "gpu_id") in ("", "0"):
            continue  # a CPU, or not ours
        facts = _facts(directory / "properties", None)
        try:
            place, domain = int(facts["location_id"]), int(facts.get("domain", "0"))
            address = f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
            unique = f"GPU-{int(facts['unique_id']):016x}" if int(facts.get("unique_id", "0")) else ""
        except (KeyError, ValueError):
            address = unique = ""
        node = numa_node_of_device(ROOT / "sys/bus/pci/devices" / address) if address else UNKNOWN_NODE
        found.append(_Gpu(unique, "", node))
    return found


def _facts(path: Path, separator: str | None) -> dict[str, str]:
    """Lines of `name: value` (or `name value`)."""
    pairs = (line.split(separator, 1) for line in _text(path).splitlines())
    return {pair[0].strip(): pair[1].strip() for pair in pairs if len(pair) == 2}


def _subnet(port: Path) -> str:
    """The subnet of a port on InfiniBand. Elsewhere the first GID is the adapter's own address."""
    return _text(port / "gids/0")[:_SUBNET_PREFIX] if _text(port / "link_layer") == "InfiniBand" else ""


def _cpulist(text: str) -> frozenset[int]:
    """The numbers of `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def rank_cores(mask: CoreSet, nodes: Mapping[int, CoreSet], place: int, ranks: int, cpus: float) -> CoreSet:
    """The cores of one rank.

    Args:
        mask: the cores that the rank was started with.
        nodes: the machine's NUMA nodes.
        place: its number among the ranks of this host, negative if unknown.
        ranks: how many those are.
        cpus: CPUs that it offers.

    Returns:
        `mask`, if the launcher has bound the rank or there is no choice.
    """
    everything: CoreSet = frozenset().union(*nodes.values())
    if ranks < 2 or len(nodes) < 2 or not 0 <= place < ranks or mask != everything:
        return mask
    order = sorted(nodes)
    first = place * len(order) // ranks
    last = max(first + 1, (place + 1) * len(order) // ranks)
    share: CoreSet = frozenset().union(*(nodes[node] for node in order[first:last]))
    return share if len(share) >= cpus else mask


def nearest_adapters(
    cores: CoreSet, nodes: Mapping[int, CoreSet], ports: Sequence[RdmaPort], environ: Mapping[str, str]
) -> str:
    """UCX_NET_DEVICES for a rank with these cores; "" to leave the choice to UCX.

    Args:
        cores: of the rank.
        nodes: the machine's NUMA nodes.
        ports: the RDMA ports that are up.
        environ: the environment, with the settings of the site and the user.
    """
    mine = numa_nodes_of(cores, nodes)
    if len(nodes) < 2 or len(mine) != 1 or any(name in environ for name in _SITE_VARIABLES):
        return ""
    if len({port.fabric for port in ports}) != 1 or any(port.node == UNKNOWN_NODE for port in ports):
        return ""  # one of the ports may lead to a storage network, or nowhere
    near = [port.name for port in ports if port.node in mine]
    return ",".join(near) if len(near) < len(ports) else ""


class WorkerPlan(Struct, frozen=True):
    """The cores that a node's workers are bound to.

    Attributes:
        cores: of the rank.
        near: by id of a GPU, the cores of the rank on the GPU's NUMA node; only GPUs for which these are fewer.
    """

    cores: CoreSet = frozenset()
    near: Mapping[str, CoreSet] = field(default_factory=dict)


def plan_workers(cores: CoreSet, nodes: Mapping[int, CoreSet], gpus: Mapping[str, int]) -> WorkerPlan:
    """The cores for workers with each GPU.

    Args:
        cores: of the rank.
        nodes: the machine's NUMA nodes.
        gpus: the NUMA node of each GPU, where it is known.
    """
    near = {ident: cores & nodes.get(node, frozenset()) for ident, node in gpus.items()}
    return WorkerPlan(cores, {ident: part for ident, part in near.items() if part and part != cores})


def worker_cores(plan: WorkerPlan, gpus: Sequence[str], cpus: float) -> CoreSet:
    """The cores of one worker; empty: those of its rank.

    Args:
        plan: of its node.
        gpus: ids of its GPUs.
        cpus: CPUs of its task or actor.
    """
    if not gpus or any(ident not in plan.near for ident in gpus):
        return frozenset()
    near: CoreSet = frozenset().union(*(plan.near[ident] for ident in gpus))
    return near if len(near) >= math.ceil(cpus) and near != plan.cores else frozenset()


class RankPlan(Struct, frozen=True):
    """The binding of one rank.

    Attributes:
        mask: the cores that it was started with.
        cores: the cores that it binds itself to.
        adapters: UCX_NET_DEVICES for it; "": UCX chooses.
        workers: for its workers.
    """

    mask: CoreSet
    cores: CoreSet
    adapters: str = ""
    workers: WorkerPlan = WorkerPlan()


def plan_rank(
    gpus: Sequence[str], place: int, ranks: int, cpus: float, environ: Mapping[str, str], wanted: bool = True
) -> RankPlan:
    """The binding of this rank on this machine. Reads /sys, changes nothing.

    Args:
        gpus: ids of its GPUs.
        place: its number among the ranks of this host, negative if unknown.
        ranks: how many those are.
        cpus: CPUs that it offers.
        environ: its environment.
        wanted: False: no binding.
    """
    mask: CoreSet = frozenset(os.sched_getaffinity(0))
    nodes = numa_nodes() if wanted else {}
    if len(nodes) < 2:
        return RankPlan(mask, mask)
    cores = rank_cores(mask, nodes, place, ranks, cpus)
    near = numa_nodes_of_gpus(gpus, is_amd(environ), environ)
    return RankPlan(
        mask, cores, nearest_adapters(cores, nodes, rdma_ports(), environ), plan_workers(cores, nodes, near)
    )


def bind_rank(plan: RankPlan) -> None:
    """Bind the calling thread, and so all that it starts later. Call it before the fork server is forked."""
    if plan.cores != plan.mask:
        os.sched_setaffinity(0, plan.cores)
    _ThisProcess.plan = plan.workers


class _ThisProcess:
    """State of this process: the plan of its node; in a worker, its GPUs and the cores that it was bound to."""

    plan: WorkerPlan = WorkerPlan()
    gpus: Sequence[str] = ()
    bound: CoreSet = frozenset()


def bind_worker(gpus: Sequence[str], environ: Mapping[str, str]) -> None:
    """Bind a worker that was just forked, before any code of the user's runs.

    Args:
        gpus: ids of its GPUs.
        environ: its environment.
    """
    if _ThisProcess.plan.near and gpus and not any(name in environ for name in _PLACEMENT_VARIABLES):
        _ThisProcess.gpus = gpus
        bind_worker_to_cpus(1)


def bind_worker_to_cpus(cpus: float) -> None:
    """Bind a worker whose lease changes, or that becomes an actor: it never has fewer cores than CPUs. Threads that the
    program has bound itself keep their cores."""
    if not _ThisProcess.gpus:
        return
    wanted = worker_cores(_ThisProcess.plan, _ThisProcess.gpus, cpus) or _ThisProcess.plan.cores
    before = _ThisProcess.bound or _ThisProcess.plan.cores
    if wanted == before:
        return
    _ThisProcess.bound = wanted
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):  # the thread has just ended; or a core was taken from the job
            if os.sched_getaffinity(thread) == before:
                os.sched_setaffinity(thread, wanted)


@contextlib.contextmanager
def original_affinity(mask: CoreSet) -> Iterator[None]:
    """Context manager: processes started inside have these cores, not those of the rank. The program runs once for all
    nodes."""
    own = os.sched_getaffinity(0)
    if own == mask:
        yield
        return
    os.sched_setaffinity(0, mask)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


_LIMITS = {
    "openblas": ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", OMP_NUM_THREADS),
    "mkl": ("MKL_NUM_THREADS", OMP_NUM_THREADS),
    "blis": ("BLIS_NUM_THREADS", OMP_NUM_THREADS),
    "torch": (OMP_NUM_THREADS, "MKL_NUM_THREADS"),
}
"""The variables in which libraries look up their number of threads, the first one first; others know OpenMP's alone.
Source: the manuals of OpenBLAS, MKL and BLIS; PyTorch, aten/src/ATen/ParallelCommon.cpp."""


class _ThreadLimit:
    """State of this process: the CPUs of the last request; the value of the variable that we have set, None for none;
    and the threads of loaded libraries, `_OF_USER` for what the user's variables say."""

    cpus = 0
    text: str | None = None
    loaded = 1


_OF_USER = 0


def limit_loaded_libraries_to_one_thread() -> None:
    """Limit libraries that are loaded to one thread, here and in forked children, which raise the limit when they know
    their task. For the fork server."""
    _limit_loaded_libraries(1, {})


def requested_threads(library: str, environ: Mapping[str, str]) -> int | None:
    """Return the number of threads that the variables ask of a library; None if they leave it open.

    Args:
        library: by threadpoolctl's name, or "torch".
    """
    for name in _LIMITS.get(library, (OMP_NUM_THREADS,)):
        if name in environ:
            first = environ[name].partition(",")[0].strip()  # OpenMP has one number for each level of nesting
            # A library that cannot read its variable takes all cores; none takes more.
            cores = len(os.sched_getaffinity(0))
            return min(int(first), cores) if first.isdecimal() and int(first) else cores
    return None


def _limit_loaded_libraries(count: int, environ: Mapping[str, str]) -> None:
    """Set the threads of loaded libraries: to what the variables say, or else to `count`."""
    import threadpoolctl

    for library in threadpoolctl.ThreadpoolController().lib_controllers:
        wanted = requested_threads(library.internal_api, environ) or count
        if library.num_threads != wanted:
            library.set_num_threads(wanted)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(requested_threads("torch", environ) or count)


def thread_count_changes(units: int) -> bool:
    """True if `set_thread_count(units)` has to be called: the last call was for another number of CPUs."""
    before, _ThreadLimit.cpus = _ThreadLimit.cpus, max(1, units // UNIT)
    return before != _ThreadLimit.cpus


def set_thread_count(units: int) -> None:
    """Set the threads, and the cores, for a task or actor with `units` of CPU. Call it in the thread that will run the
    task: libraries apply a number that another thread sets to that thread only."""
    count = _ThreadLimit.cpus = max(1, units // UNIT)
    bind_worker_to_cpus(count)
    known = os.environ.get(OMP_NUM_THREADS)
    by_user = known is not None and known != _ThreadLimit.text
    if not by_user and known != str(count):
        _ThreadLimit.text = os.environ[OMP_NUM_THREADS] = str(count)
    wanted = _OF_USER if by_user else count
    if wanted != _ThreadLimit.loaded:
        ours = () if by_user else (OMP_NUM_THREADS,)
        _limit_loaded_libraries(count, {name: text for name, text in os.environ.items() if name not in ours})
        _ThreadLimit.loaded = wanted
