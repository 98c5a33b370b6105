"""MPI inside of an hpcray program: `run` calls a function on some ranks with a communicator of their own.

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

if TYPE_CHECKING:
    from hpcray.cluster.mpi_job import Share

__all__ = ["run"]

_END_PATIENCE = 30.0


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
    """Call `fn(comm, *args, **kwargs)` on `ranks` new MPI ranks, and return what each of them returned, by rank.

    The ranks are processes of their own, started by mpirun, or under Slurm by srun inside of the job's allocation.
    `comm` is their `mpi4py.MPI.COMM_WORLD`: it holds these ranks and nobody else. The driver, tasks and actors may call
    this; a task that waits here lends its CPUs, so that the ranks may use them.

    The CPUs come out of hpcray's accounting: one worker on each node used holds them until the end. Ranks are placed on
    one node if they fit there, else on as few as possible; where they do not fit now, `run` waits for CPUs, one node
    after the other (there are no placement groups yet: what it has got already idles meanwhile).

    Args:
        fn: any function that cloudpickle can pickle.
        ranks: number of ranks, at least 1.
        args, kwargs: of `fn`; each rank gets a copy. Top-level refs are replaced by their values.
        cpus_per_rank: CPUs that are reserved for each rank, and its OMP_NUM_THREADS. Ranks are not bound to cores.
        timeout: seconds for everything, the wait for CPUs too; None: no limit.
        env: further variables of the ranks.

    Returns:
        The results, one per rank.

    Raises:
        RayTaskError: `fn` raised on a rank; also an instance of its exception's class, with the attribute `rank`. The
            other ranks were ended. If several raised, it is the first one's.
        WorkerCrashedError: a rank ended without a word (killed, `os._exit`), and the others were ended.
        TaskUnschedulableError: all nodes together have not so many CPUs.
        GetTimeoutError: not done in time; the ranks were ended.
        StartupError: the launcher could not start the ranks.
        ValueError, TypeError: an argument is wrong.
    """
    from hpcray.api.session import ensure
    from hpcray.cluster.outcome import Call

    _check(fn, ranks, cpus_per_rank, timeout, env)
    ensure()
    call = Call.of(fn, tuple(_value(arg) for arg in args), {name: _value(arg) for name, arg in (kwargs or {}).items()})
    placed = _place(ranks, cpus_per_rank)
    job = _Job(call, ranks, cpus_per_rank, timeout)
    try:
        job.reserve(placed)
        code, tail = job.launch({**(env or {})})
        return job.results(code, tail)
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
    from hpcray.api.objects import get
    from hpcray.runtime.refs import ObjectRef

    return get(arg) if isinstance(arg, ObjectRef) else arg


class _Job:
    """One run: its holders, in the order of their ranks."""

    def __init__(self, call: Any, ranks: int, cpus_per_rank: float, timeout: float | None) -> None:
        self._call = call
        self._ranks = ranks
        self._cpus = cpus_per_rank
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._holders: list[Any] = []
        self._shares: list[Share] = []
        self._doing = "waiting for CPUs"

    def reserve(self, placed: list[tuple[str | None, int]]) -> None:
        """Take the CPUs of one node after the other, always in the order of the nodes: two runs that want the same
        nodes then wait for one another, and never in a circle."""
        from hpcray.api.decorator import remote
        from hpcray.api.scheduling import NodeAffinitySchedulingStrategy
        from hpcray.cluster.mpi_job import Holder, Share

        token = os.urandom(4).hex()
        blob = pickle.dumps(self._call)
        actor: Any = remote(Holder)
        for node_id, ranks in placed:
            options: dict[str, Any] = {"num_cpus": ranks * self._cpus, "max_concurrency": 2, "max_restarts": 0}
            if node_id is not None:
                options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
            holder = actor.options(**options).remote()
            self._holders.append(holder)
            host, directory = self._get(holder.prepare.remote(f"{token}-{len(self._holders)}", blob))
            self._shares.append(Share(host, directory, sum(share.ranks for share in self._shares), ranks))

    def launch(self, env: dict[str, str]) -> tuple[int, str]:
        """Run the ranks to their end: the launcher's exit code and last words."""
        self._doing = "running"
        code, tail = self._get(self._holders[0].launch.remote(self._shares, env, self._cpus))
        return code, tail

    def results(self, code: int, tail: str) -> list[Any]:
        """What the ranks returned; raises what they raised."""
        from hpcray.base.errors import StartupError, WorkerCrashedError

        found: dict[int, tuple[Any, ...]] = {}
        for part in self._get([holder.collect.remote() for holder in self._holders]):
            found.update(part)
        errors = sorted((told[2], rank) for rank, told in found.items() if told[0] == "error")
        if errors:
            raise pickle.loads(found[errors[0][1]][1]).as_instanceof_cause()
        missing = [rank for rank in range(self._ranks) if rank not in found]
        if missing:
            hosts = ", ".join(dict.fromkeys(share.host for share in self._shares))
            last = f"; its last words:\n{tail.strip()}" if tail.strip() else ""
            text = f"{self._name()} on {hosts}: no result from rank {', '.join(map(str, missing))}; "
            text += f"the launcher ended with code {code}{last}"
            raise (StartupError if code == 127 else WorkerCrashedError)(text)
        return [pickle.loads(found[rank][1]) for rank in range(self._ranks)]

    def end(self) -> None:
        """End what runs, everywhere, and give the CPUs back."""
        from hpcray.api.actor import kill
        from hpcray.api.objects import wait

        try:
            # A holder that is not ready has nothing to close, or its death closes it.
            closing = [holder.close.remote() for holder in self._holders[: len(self._shares)]]
            if closing:
                wait(closing, num_returns=len(closing), timeout=_END_PATIENCE)
        finally:
            for holder in self._holders:
                kill(holder)

    def _get(self, refs: Any) -> Any:
        from hpcray.api.objects import get
        from hpcray.base.errors import GetTimeoutError

        try:
            return get(refs, timeout=None if self._deadline is None else max(0.0, self._deadline - time.monotonic()))
        except GetTimeoutError:
            raise GetTimeoutError(
                f"{self._name()} is not done within {self._timeout:g} s: it was {self._doing}; it was ended"
            ) from None

    def _name(self) -> str:
        return f"mpi.run({self._call.name}, ranks={self._ranks})"


def _place(ranks: int, cpus_per_rank: float) -> list[tuple[str | None, int]]:
    """(node id or None for any, its ranks), in the order of the nodes.

    Where they fit now comes first: on one node, then on several; then where they fit at all.

    Raises:
        TaskUnschedulableError: they fit nowhere.
    """
    from hpcray.api.context import nodes
    from hpcray.api.session import ensure
    from hpcray.base.errors import TaskUnschedulableError

    ids = {row["Index"]: row["NodeID"] for row in nodes() if row["Alive"]}
    rows = [row for row in ensure().gcs.call("status")["nodes"] if row["index"] in ids]
    free = {ids[row["index"]]: _capacity(row["available"].get("CPU", 0.0), cpus_per_rank, ranks) for row in rows}
    total = {ids[row["index"]]: _capacity(row["total"].get("CPU", 0.0), cpus_per_rank, ranks) for row in rows}
    found = place(ranks, free, total)
    if not found:
        have = ", ".join(f"{row['total'].get('CPU', 0.0):g}" for row in rows)
        raise TaskUnschedulableError(
            f"mpi.run: {ranks} ranks with {cpus_per_rank:g} CPUs each do not fit: the nodes have {have} CPUs; "
            "hint: fewer ranks, a smaller cpus_per_rank, or more nodes"
        )
    return found


def place(ranks: int, free: Mapping[str, int], total: Mapping[str, int]) -> list[tuple[str | None, int]]:
    """`_place` on numbers: how many ranks each node can take now, and at all; [] where they fit nowhere."""
    if any(count >= ranks for count in free.values()):
        return [(None, ranks)]
    for counts in (free, total):
        if counts is total and any(count >= ranks for count in total.values()):
            return [(None, ranks)]
        taken: dict[str, int] = {}
        for node, count in sorted(counts.items(), key=lambda item: -item[1]):
            share = min(count, ranks - sum(taken.values()))
            if share > 0:
                taken[node] = share
        if sum(taken.values()) == ranks:
            return [(node, taken[node]) for node in counts if node in taken]
    return []


def _capacity(cpus: float, cpus_per_rank: float, ranks: int) -> int:
    return ranks if not cpus_per_rank else min(ranks, max(0, int(cpus / cpus_per_rank + 1e-9)))
