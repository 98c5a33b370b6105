"""MPI inside an hpcray program: `run` calls a function on new ranks, which get a communicator.

def energy(comm, cells):
    mine = cells[comm.rank :: comm.size]
    return comm.allreduce(sum(mine))

hpcray.mpi.run(energy, ranks=4, args=([1, 2, 3, 4],))  # [10, 10, 10, 10]
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcray.api.actor import kill
from hpcray.api.decorator import remote
from hpcray.api.objects import get, wait
from hpcray.api.runtime_context import nodes
from hpcray.api.scheduling_strategies import NodeAffinitySchedulingStrategy
from hpcray.api.session import require_session
from hpcray.common.exceptions import GetTimeoutError, StartupError, TaskUnschedulableError, WorkerCrashedError
from hpcray.common.labels import NO_PLACES, Place, place_of
from hpcray.runtime.core_worker.object_refs import ObjectRef
from hpcray.topology.node_order import nearest_nodes

if TYPE_CHECKING:
    from hpcray.jobs import PickledCall
    from hpcray.mpi.nested_job import RankShare

__all__ = ["run"]

_CLOSE_TIMEOUT = 30.0  # seconds until the holders are killed


def run(
    fn: Callable[..., Any],
    ranks: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cpus_per_rank: float = 1,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `fn(comm, *args, **kwargs)` on `ranks` new MPI ranks, and return the results by rank.

    The ranks are new processes, started by mpirun, or under Slurm by srun in the allocation of the job. `comm` is their
    `mpi4py.MPI.COMM_WORLD`, which contains these ranks only. Drivers, tasks and actors can call `run`; a task lends its
    CPUs while it waits, so that the ranks can use them.

    The CPUs count in hpcray's accounting: one worker on each node holds them until the end. Ranks are placed on one
    node if they fit there, else on as few nodes as possible, all of one MPI world: those that the job began with, or
    those that have joined it together. Where they do not fit now, `run` waits for CPUs, one node
    after the other; CPUs that it has already are idle meanwhile.

    Args:
        fn: any function that cloudpickle can pickle.
        ranks: number of ranks, at least 1.
        args, kwargs: arguments of `fn`; each rank gets a copy. Top-level refs are replaced by their values.
        cpus_per_rank: number of CPUs reserved for each rank, and its OMP_NUM_THREADS. Ranks are not bound to cores.
        timeout: seconds for the whole call, including the wait for CPUs; None for no limit.
        env: further environment variables of the ranks.

    Returns:
        The results, one per rank.

    Raises:
        RayTaskError: `fn` raised on a rank; also an instance of its exception's class, with the attribute `rank`. The
            error is the first one, and the other ranks were killed.
        WorkerCrashedError: a rank ended without a result (killed, `os._exit`), and the other ranks were killed.
        TaskUnschedulableError: the nodes of no MPI world have so many CPUs together.
        GetTimeoutError: the ranks did not finish within `timeout` and were killed.
        StartupError: the launcher could not start the ranks.
        ValueError, TypeError: an argument is not valid.
    """
    from hpcray.jobs import PickledCall

    _check(fn, ranks, cpus_per_rank, timeout, env)
    require_session()
    named = {name: _value(arg) for name, arg in (kwargs or {}).items()}
    call = PickledCall.of(fn, tuple(_value(arg) for arg in args), named)
    placed = _place(ranks, cpus_per_rank)
    job = _NestedJob(call, ranks, cpus_per_rank, timeout)
    try:
        job.reserve(placed)
        return job.run({**(env or {})})
    finally:
        job.end()


def _check(fn: Any, ranks: Any, cpus_per_rank: Any, timeout: Any, env: Any) -> None:
    if not callable(fn):
        raise TypeError(f"mpi.run: {fn!r} is not callable")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"mpi.run: ranks={ranks!r} is not a positive whole number")
    if not isinstance(cpus_per_rank, int | float) or not 0 <= cpus_per_rank < float("inf"):
        raise ValueError(f"mpi.run: cpus_per_rank={cpus_per_rank!r} is not a number of CPUs")
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"mpi.run: timeout={timeout!r} is not a number of seconds; hint: None waits for ever")
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str) or not name or "=" in name:
            raise ValueError(f"mpi.run: env has {name!r}: {value!r}; hint: names and values are strings")


def _value(arg: Any) -> Any:
    return get(arg) if isinstance(arg, ObjectRef) else arg


class _NestedJob:
    """One run, and the actors that hold its CPUs, in the order of their ranks."""

    def __init__(self, call: PickledCall, ranks: int, cpus_per_rank: float, timeout: float | None) -> None:
        self._call = call
        self._ranks = ranks
        self._cpus = cpus_per_rank
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._holders: list[Any] = []
        self._shares: list[RankShare] = []
        self._doing = "waiting for CPUs"

    def reserve(self, placed: list[tuple[str | None, int]]) -> None:
        """Reserve the CPUs of one node after the other, in the order of the nodes, so that two runs cannot deadlock."""
        from hpcray.mpi.nested_job import RankHolder, RankShare

        token = os.urandom(4).hex()
        blob = pickle.dumps(self._call)
        actor: Any = remote(RankHolder)
        for node_id, ranks in placed:
            options: dict[str, Any] = {"num_cpus": ranks * self._cpus, "max_concurrency": 2, "max_restarts": 0}
            if node_id is not None:
                options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
            holder = actor.options(**options).remote()
            self._holders.append(holder)
            host, directory = self._get(holder.prepare.remote(f"{token}-{len(self._holders)}", blob))
            self._shares.append(RankShare(host, directory, sum(share.ranks for share in self._shares), ranks))

    def run(self, env: dict[str, str]) -> list[Any]:
        """Run the ranks and return their results, or raise the first exception."""
        self._doing = "running"
        code, tail = self._get(self._holders[0].launch.remote(self._shares, env, self._cpus))
        found: dict[int, tuple[Any, ...]] = {}
        for part in self._get([holder.collect.remote() for holder in self._holders]):
            found.update(part)
        if errors := sorted((result[2], rank) for rank, result in found.items() if result[0] == "error"):
            raise pickle.loads(found[errors[0][1]][1]).as_instanceof_cause()
        if missing := [rank for rank in range(self._ranks) if rank not in found]:
            hosts = ", ".join(dict.fromkeys(share.host for share in self._shares))
            last = f"; its last words:\n{tail.strip()}" if tail.strip() else ""
            text = f"{self._name()} on {hosts}: no result from rank {', '.join(map(str, missing))}; "
            text += f"the launcher ended with code {code}{last}"
            raise (StartupError if code == 127 else WorkerCrashedError)(text)
        return [pickle.loads(found[rank][1]) for rank in range(self._ranks)]

    def end(self) -> None:
        try:
            # A holder that is not ready has no ranks, or they end with it.
            closing = [holder.close.remote() for holder in self._holders[: len(self._shares)]]
            if closing:
                wait(closing, num_returns=len(closing), timeout=_CLOSE_TIMEOUT)
        finally:
            for holder in self._holders:
                kill(holder)

    def _get(self, refs: Any) -> Any:
        try:
            return get(refs, timeout=None if self._deadline is None else max(0.0, self._deadline - time.monotonic()))
        except GetTimeoutError:
            raise GetTimeoutError(
                f"{self._name()} is not done within {self._timeout:g} s: it was {self._doing}; it was ended"
            ) from None

    def _name(self) -> str:
        return f"mpi.run({self._call.name}, ranks={self._ranks})"


def _place(ranks: int, cpus_per_rank: float) -> list[tuple[str | None, int]]:
    """Choose the nodes: (node id or None for any, number of ranks), in the order of the nodes.

    Nodes with free CPUs come first: one node, then several; then nodes that have enough CPUs in total.

    Raises:
        TaskUnschedulableError: the nodes of no MPI world have so many CPUs together.
    """
    alive = [row for row in nodes() if row["Alive"]]
    ids, labels = {row["Index"]: row["NodeID"] for row in alive}, {row["Index"]: row["Labels"] for row in alive}
    rows = [row for row in require_session().gcs.call("status")["nodes"] if row["index"] in ids]
    free = {ids[row["index"]]: _capacity(row["available"].get("CPU", 0.0), cpus_per_rank, ranks) for row in rows}
    total = {ids[row["index"]]: _capacity(row["total"].get("CPU", 0.0), cpus_per_rank, ranks) for row in rows}
    worlds = {ids[row["index"]]: row["world"] for row in rows}
    places = {ids[row["index"]]: place_of(labels[row["index"]]) for row in rows}
    found = place(ranks, free, total, worlds, places)
    if found:
        return found
    have: dict[int, list[str]] = {}
    for row in rows:
        have.setdefault(row["world"], []).append(f"{row['total'].get('CPU', 0.0):g}")
    text = f"mpi.run: {ranks} ranks with {cpus_per_rank:g} CPUs each do not fit: the nodes have "
    if len(have) == 1:
        text += f"{', '.join(*have.values())} CPUs; hint: fewer ranks, a smaller cpus_per_rank, or more nodes"
    else:
        text += (
            f"{' | '.join(', '.join(world) for world in have.values())} CPUs, in {len(have)} MPI worlds. MPI ends at "
            "the nodes of one: those that the job began with, or that have joined it together; hint: fewer ranks, or "
            "further nodes as one batch job: hpcray nodes add -N"
        )
    raise TaskUnschedulableError(text)


def place(
    ranks: int,
    free: Mapping[str, int],
    total: Mapping[str, int],
    worlds: Mapping[str, int],
    places: Mapping[str, Place] = NO_PLACES,
) -> list[tuple[str | None, int]]:
    """Choose nodes of one world from the number of ranks that each can take now and in total; [] where the ranks do not
    fit into any. They are behind as few switches as possible, and in an order in which neighbours follow each other.
    """
    for counts in (free, total):
        if any(count >= ranks for count in counts.values()):
            return [(None, ranks)]
        for world in dict.fromkeys(worlds.values()):
            inside = {node: count for node, count in counts.items() if worlds[node] == world}
            if taken := nearest_nodes(inside, ranks, places):
                return list(taken.items())
    return []


def _capacity(cpus: float, cpus_per_rank: float, ranks: int) -> int:
    return ranks if not cpus_per_rank else min(ranks, max(0, int(cpus / cpus_per_rank + 1e-9)))
