"""Which cores and which adapter a rank and its workers get where the launcher has left it open. `HPCRAY_BIND=0`: none.

Only what cannot hurt is done, and nothing on a machine with one NUMA node:

- A rank that the launcher has bound keeps its cores. Of several ranks on a host that nobody has bound, each gets NUMA
  nodes of its own, as far as there are enough cores for the CPUs that it offers.
- A worker with GPUs gets those cores of its rank that are on the NUMA node of its GPUs, unless its task has more CPUs
  than that. Every other worker has the cores of its rank: `num_cpus` is a number to count with, and may be a fraction.
- A rank on one NUMA node uses the RDMA ports of that node, where there are others of the same kind and the site has not
  chosen with a `UCX_*` of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hpcray.host.allocation_gpus import is_amd
from hpcray.host.topology import UNKNOWN, Port, gpu_nodes, nodes_of, numa_nodes, rdma_ports

ADAPTERS = "UCX_NET_DEVICES"
_CHOSEN_BY_SITE = (ADAPTERS, "UCX_TLS")
"""Either of them may leave out what we would choose, or what the other one needs."""
_PROGRAM_PLACES = ("OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""With one of these the program places its threads itself, on cores that it must then be free to use."""

Cores = frozenset[int]


# ---------------------------------------------------------------- the rank


def rank_cores(mask: Cores, nodes: Mapping[int, Cores], place: int, ranks: int, cpus: float) -> Cores:
    """The cores of one rank.

    Args:
        mask: those it was started with.
        nodes: the machine's NUMA nodes.
        place: its number among the ranks of this host, negative if unknown.
        ranks: how many those are.
        cpus: CPUs that it offers.

    Returns:
        `mask`, where the launcher has chosen, or there is nothing to choose.
    """
    everything: Cores = frozenset().union(*nodes.values())
    if ranks < 2 or len(nodes) < 2 or not 0 <= place < ranks or mask != everything:
        return mask
    order = sorted(nodes)
    first = place * len(order) // ranks
    last = max(first + 1, (place + 1) * len(order) // ranks)
    share: Cores = frozenset().union(*(nodes[node] for node in order[first:last]))
    return share if len(share) >= cpus else mask


def near_adapters(cores: Cores, nodes: Mapping[int, Cores], ports: Sequence[Port], environ: Mapping[str, str]) -> str:
    """UCX_NET_DEVICES for a rank with these cores; "" to leave the choice to UCX.

    Args:
        cores: of the rank.
        nodes: the machine's NUMA nodes.
        ports: the RDMA ports that are up.
        environ: what the site and the user have set.
    """
    mine = nodes_of(cores, nodes)
    if len(nodes) < 2 or len(mine) != 1 or any(name in environ for name in _CHOSEN_BY_SITE):
        return ""
    if len({port.fabric for port in ports}) != 1 or any(port.node == UNKNOWN for port in ports):
        return ""  # one of them may lead to a storage network, or nowhere
    near = [port.name for port in ports if port.node in mine]
    return ",".join(near) if len(near) < len(ports) else ""


# ---------------------------------------------------------------- a worker


@dataclass(frozen=True)
class WorkerPlan:
    """What a node's workers are bound to.

    Attributes:
        cores: of the rank.
        near: by id of a GPU, those of them that are on its NUMA node. Only GPUs where that is a part of them.
    """

    cores: Cores = frozenset()
    near: Mapping[str, Cores] = field(default_factory=dict)


def plan_workers(cores: Cores, nodes: Mapping[int, Cores], gpus: Mapping[str, int]) -> WorkerPlan:
    """Where workers go.

    Args:
        cores: of the rank.
        nodes: the machine's NUMA nodes.
        gpus: the NUMA node of each GPU, where it is known.
    """
    near = {ident: cores & nodes.get(node, frozenset()) for ident, node in gpus.items()}
    return WorkerPlan(cores, {ident: part for ident, part in near.items() if part and part != cores})


def worker_cores(plan: WorkerPlan, gpus: Sequence[str], cpus: float) -> Cores:
    """The cores of one worker; empty: those of its rank.

    Args:
        plan: of its node.
        gpus: ids of its GPUs.
        cpus: CPUs of its task or actor.
    """
    if not gpus or any(ident not in plan.near for ident in gpus):
        return frozenset()
    near: Cores = frozenset().union(*(plan.near[ident] for ident in gpus))
    return near if len(near) >= math.ceil(cpus) and near != plan.cores else frozenset()


# ---------------------------------------------------------------- this machine, this process


@dataclass(frozen=True)
class RankPlan:
    """What one rank does.

    Attributes:
        mask: the cores that it was started with.
        cores: those that it binds itself to.
        adapters: UCX_NET_DEVICES for it; "": UCX chooses.
        workers: for its workers.
    """

    mask: Cores
    cores: Cores
    adapters: str = ""
    workers: WorkerPlan = WorkerPlan()


def plan_rank(
    gpus: Sequence[str], place: int, ranks: int, cpus: float, environ: Mapping[str, str], wanted: bool = True
) -> RankPlan:
    """What this rank does on this machine; looks at /sys, changes nothing.

    Args:
        gpus: ids of its GPUs.
        place: its number among the ranks of this host, negative if unknown.
        ranks: how many those are.
        cpus: CPUs that it offers.
        environ: its environment.
        wanted: false: nothing at all.
    """
    mask: Cores = frozenset(os.sched_getaffinity(0))
    nodes = numa_nodes() if wanted else {}
    if len(nodes) < 2:
        return RankPlan(mask, mask)
    cores = rank_cores(mask, nodes, place, ranks, cpus)
    near = gpu_nodes(gpus, is_amd(environ), environ)
    return RankPlan(mask, cores, near_adapters(cores, nodes, rdma_ports(), environ), plan_workers(cores, nodes, near))


def bind_rank(plan: RankPlan) -> None:
    """Bind the calling thread, and with it whatever it starts. Call it before the template process is forked."""
    if plan.cores != plan.mask:
        os.sched_setaffinity(0, plan.cores)
    _Here.plan = plan.workers


class _Here:
    """This process: its node's plan, and as a worker its GPUs and the cores that we have bound it to."""

    plan: WorkerPlan = WorkerPlan()
    gpus: Sequence[str] = ()
    bound: Cores = frozenset()


def bind_worker(gpus: Sequence[str], environ: Mapping[str, str]) -> None:
    """In a worker that has just been forked, before any code of the user's.

    Args:
        gpus: ids of its GPUs.
        environ: its environment.
    """
    if _Here.plan.near and gpus and not any(name in environ for name in _PROGRAM_PLACES):
        _Here.gpus = gpus
        fit_cores(1)


def fit_cores(cpus: float) -> None:
    """In a worker whose lease changes, or that becomes an actor: never fewer cores than it has CPUs. Threads that the
    program has bound itself stay where they are."""
    if not _Here.gpus:
        return
    wanted = worker_cores(_Here.plan, _Here.gpus, cpus) or _Here.plan.cores
    before = _Here.bound or _Here.plan.cores
    if wanted == before:
        return
    _Here.bound = wanted
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):  # it has just ended; or a core was taken from the job
            if os.sched_getaffinity(thread) == before:
                os.sched_setaffinity(thread, wanted)


@contextlib.contextmanager
def as_started(mask: Cores) -> Iterator[None]:
    """What is started inside has these cores, not those of its rank: the user's program is one for all nodes."""
    own = os.sched_getaffinity(0)
    if own == mask:
        yield
        return
    os.sched_setaffinity(0, mask)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
