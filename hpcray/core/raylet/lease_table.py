"""The leases and actors of one node, from the decision to serve a request to the end of the worker that serves it."""

from __future__ import annotations

from hpcray.common.ids import HEAD, node_of
from hpcray.core.effects import Effect, KillWorker, Send
from hpcray.core.raylet.lease_queue import LeaseQueue, Shortages, is_contended
from hpcray.core.raylet.lease_requests import LeaseRequest
from hpcray.core.raylet.local_resources import (
    ENDING,
    FREED,
    GRANTED,
    WAITING,
    LocalResources,
    ResourceAllocation,
    lease_id,
)
from hpcray.core.raylet.worker_pool import LEAVING, WorkerPool, WorkerProcess
from hpcray.protocol.messages import ActorGone, BecomeActor, LeaseGranted, LeaseRevoked, ReclaimIdle

MIN_RECLAIM_INTERVAL = 0.05
"""Seconds between two rounds of requests to holders for leases that they do not use."""
RECLAIM_REMINDER = 1.0
"""Seconds after which these requests are repeated while lease requests still wait."""


class LeaseTable:
    """Leases and actors of one node; those that wait for their worker are in the pool.

    Attributes:
        leases: granted leases by id. by_holder: the same, per holder.
        actors: allocations of actors by actor id, those that wait for their worker included.
        may_idle: holders of leases that were granted while no request waited for what they hold. may_idle_grants:
            number of such grants, ever.
    """

    def __init__(self, resources: LocalResources, pool: WorkerPool, shortages: Shortages) -> None:
        self._resources = resources
        self._pool = pool
        self._shortages = shortages
        self._decided = 0
        self.leases: dict[bytes, ResourceAllocation] = {}
        self.by_holder: dict[bytes, dict[bytes, ResourceAllocation]] = {}
        self.actors: dict[bytes, ResourceAllocation] = {}
        self.may_idle: dict[bytes, None] = {}
        self.may_idle_grants = 0

    def all_allocations(self) -> list[ResourceAllocation]:
        """Every allocation of the node that holds resources, each once."""
        found = [*self.leases.values(), *self.actors.values(), *self._pool.waiting()]
        found += [worker.allocation for worker in self._pool.workers.values() if worker.allocation is not None]
        return list({id(allocation): allocation for allocation in found}.values())

    # ------------------------------------------------------------ the beginning

    def allocate(self, request: LeaseRequest, out: list[Effect]) -> None:
        """Hold resources for one lease (or the actor) of `request`, and find a worker for it."""
        self._decided += 1
        spec = request.actor_spec
        allocation = ResourceAllocation(
            id=lease_id(self._resources.node, self._decided) if spec is None else spec.actor,
            lease_request=request,
            resources=request.resources,
            holder=request.holder,
            scheduling_class=request.scheduling_class,
            env=request.shape.env,
            actor_spec=spec,
            restarts=request.restarts,
        )
        self._resources.allocate(allocation)
        request.starting += 1
        request.live += 1
        if spec is not None:
            self.actors[spec.actor] = allocation
        if self._pool.assign_worker(allocation) is not None:
            self.grant(allocation, out)

    def grant(self, allocation: ResourceAllocation, out: list[Effect]) -> None:
        """The allocation has its worker: send the lease to its holder, or the actor to the worker."""
        request = allocation.lease_request
        allocation.change_state(GRANTED)
        request.starting -= 1
        request.granted += 1
        request.warned_no_worker = False
        if allocation.actor_spec is not None:
            out.append(Send(allocation.worker, BecomeActor(allocation.actor_spec, allocation.restarts)))
            return
        self.leases[allocation.id] = allocation
        self.by_holder.setdefault(allocation.holder, {})[allocation.id] = allocation
        contended = self._shortages.affect(allocation)
        if not contended:
            self.may_idle[allocation.holder] = None
            self.may_idle_grants += 1
        message = LeaseGranted(allocation.scheduling_class, allocation.id, allocation.worker, contended)
        out.append(Send(allocation.holder, message))

    def cancel_newest(self, request: LeaseRequest, count: int) -> None:
        """Cancel `count` of the request's allocations that still wait for a worker, the newest first."""
        waiting = [allocation for allocation in self._pool.waiting() if allocation.lease_request is request]
        for allocation in waiting[-count:]:
            self.cancel(allocation)

    def cancel(self, allocation: ResourceAllocation) -> None:
        """Undo an allocation that still waits for its worker."""
        self._pool.cancel_waiting(allocation)
        self.undo(allocation)

    def undo(self, allocation: ResourceAllocation) -> None:
        """Free an allocation that never got its worker, and waits for none any more."""
        allocation.lease_request.starting -= 1
        self._free(allocation)
        if allocation.actor_spec is not None:
            del self.actors[allocation.actor_spec.actor]

    def return_lease(self, now: float, allocation: ResourceAllocation, bad: bool, out: list[Effect]) -> None:
        """The holder has no task left for the lease. bad: its worker must not be reused."""
        self._end_lease(allocation)
        worker = self._pool.workers[allocation.worker]
        if bad:
            self._kill_worker(allocation, out)
            return
        if worker.state == LEAVING:
            return  # it is being killed: its death frees the resources
        self._free(allocation)
        successor = self._pool.release_worker(now, worker)
        if successor is not None:
            self.grant(successor, out)

    def release_cpu(self, proc: bytes) -> bool:
        """A worker blocks; returns whether its CPU has become free. An actor keeps what it holds, as in Ray."""
        worker = self._pool.workers.get(proc)
        if worker is None or worker.allocation is None or worker.allocation.actor_spec is not None:
            return False
        return self._resources.release_cpu(worker.allocation)

    def retire(self, proc: bytes) -> bool:
        """A worker takes no more tasks, as the holder of its lease knows, and exits when no other process refers to its
        objects. These may wait for what it holds, so free that; returns whether there was any."""
        worker = self._pool.workers.get(proc)
        if worker is None or worker.state == LEAVING or worker.allocation is None or worker.allocation.actor_spec:
            return False
        allocation, worker.allocation = worker.allocation, None
        if allocation.holder:
            self._end_lease(allocation)
        self._free(allocation)
        self._pool.mark_leaving(worker)
        return True

    def reacquire_cpu(self, proc: bytes) -> None:
        """A worker that blocked runs again."""
        worker = self._pool.workers.get(proc)
        if worker is not None and worker.allocation is not None:
            self._resources.reacquire_cpu(worker.allocation)

    def holder_died(self, holder: bytes, out: list[Effect]) -> None:
        """End all leases of a dead process, with the workers that run its tasks."""
        for allocation in self._pool.waiting():
            if allocation.holder == holder and allocation.actor_spec is None:
                self.cancel(allocation)
        for allocation in list(self.by_holder.get(holder, {}).values()):
            self._end_lease(allocation)
            allocation.kill_reason = "the process that had its lease has ended"
            self._kill_worker(allocation, out)

    def kill_actor(self, actor: bytes, no_restart: bool, reason: str, out: list[Effect]) -> None:
        """SIGKILL the actor's worker. no_restart: the actor ends for good, also while it waits for its worker."""
        allocation = self.actors.get(actor)
        if allocation is None:
            return
        if not allocation.worker:
            if no_restart:
                self.cancel(allocation)
            return
        allocation.kill_reason = reason or "it was killed"
        if no_restart:
            allocation.exit_reason = allocation.kill_reason
        self._kill_worker(allocation, out)

    def kill(self, allocation: ResourceAllocation, reason: str, out: list[Effect]) -> None:
        """SIGKILL the allocation's worker; an actor on it ends for good."""
        allocation.kill_reason = allocation.exit_reason = reason
        self._kill_worker(allocation, out)

    def worker_died(self, worker: WorkerProcess, reason: str, out: list[Effect]) -> None:
        """A worker that had joined is dead: free what it held, and report the death to the GCS or to the holder."""
        allocation = worker.allocation
        if allocation is None:
            return
        self._free(allocation)
        if allocation.actor_spec is None and allocation.kill_reason:
            reason = allocation.kill_reason
        text = f"worker process {worker.number} (pid {worker.pid}) on node {self._resources.node} died: {reason}"
        if allocation.actor_spec is not None:
            actor = allocation.actor_spec.actor
            del self.actors[actor]
            text = allocation.exit_reason or allocation.kill_reason or f"its worker process has died: {text}"
            out.append(Send(HEAD, ActorGone(actor, worker.proc, text, bool(allocation.exit_reason))))
        elif allocation.holder:
            holder = allocation.holder
            self._end_lease(allocation)
            out.append(Send(holder, LeaseRevoked(allocation.id, worker.proc, text)))

    def check_invariants(self) -> None:
        """Raise AssertionError unless each lease and actor has its worker, or waits for one, as its state says."""
        by_holder = {id(one): one for leases in self.by_holder.values() for one in leases.values()}
        assert by_holder == {id(one): one for one in self.leases.values()}, "leases and leases by holder differ"
        assert all(self.by_holder.values()), "a holder without leases is listed"
        assert self.may_idle.keys() <= self.by_holder.keys(), "a process without leases may let them idle"
        for ident, lease in self.leases.items():
            assert ident == lease.id and lease.holder and lease.actor_spec is None, f"lease {ident.hex()} is not one"
            assert self.by_holder[lease.holder][ident] is lease, f"lease {ident.hex()} is listed for another holder"
            assert node_of(ident) == self._resources.node, f"lease {ident.hex()} is returned to another node"
            assert lease.worker, f"lease {ident.hex()} was granted without a worker"
        for actor, allocation in self.actors.items():
            spec = allocation.actor_spec
            assert spec is not None and actor == spec.actor == allocation.id, f"actor {actor.hex()} is not itself"
        waiting = self._pool.waiting()
        starting: dict[int, int] = {}
        for allocation in waiting:
            assert allocation.state == WAITING, f"an allocation waits for a worker, and is {allocation.state}"
            starting[id(allocation.lease_request)] = starting.get(id(allocation.lease_request), 0) + 1
        allocations = self.all_allocations()
        for allocation in allocations:
            request = allocation.lease_request
            assert request.starting == starting.get(id(request), 0), f"{request.starting} allocations are starting"
            assert allocation.state != FREED, f"allocation {allocation.id.hex()} is freed, and still listed"
            worker = self._pool.workers.get(allocation.worker)
            if allocation.state != WAITING:
                assert worker is not None and worker.allocation is allocation, "an allocation without its worker"
                assert (allocation.state == ENDING) == (worker.state == LEAVING), (allocation.state, worker.state)

    def _end_lease(self, allocation: ResourceAllocation) -> None:
        """The holder has the lease no more; resources stay held."""
        del self.leases[allocation.id]
        leases = self.by_holder[allocation.holder]
        del leases[allocation.id]
        if not leases:
            del self.by_holder[allocation.holder]
            self.may_idle.pop(allocation.holder, None)
        allocation.holder = b""

    def _free(self, allocation: ResourceAllocation) -> None:
        allocation.change_state(FREED)
        allocation.lease_request.live -= 1
        self._resources.free(allocation)

    def _kill_worker(self, allocation: ResourceAllocation, out: list[Effect]) -> None:
        """Its resources stay held until the worker is dead."""
        allocation.change_state(ENDING)
        self._pool.mark_leaving(self._pool.workers[allocation.worker])
        out.append(KillWorker(allocation.worker))


class LeaseReclaimer:
    """Requests holders to return leases that they do not use, while requests wait for what these hold."""

    def __init__(self, queue: LeaseQueue, leases: LeaseTable, shortages: Shortages) -> None:
        self._queue = queue
        self._leases = leases
        self._shortages = shortages
        self._due = False
        self._last_round = -RECLAIM_REMINDER
        self._considered: object = None

    def mark_due(self) -> None:
        """A request began to wait, or a lease was granted: a round may yield leases."""
        self._due = True

    def remind(self, now: float) -> None:
        """Make another round due if the last was long ago."""
        if now - self._last_round >= RECLAIM_REMINDER:
            self._due = True

    def reclaim(self, now: float, out: list[Effect]) -> None:
        """At the end of an event: ask holders for leases, if requests wait for them."""
        if self._due and self._queue.waiting and now - self._last_round >= MIN_RECLAIM_INTERVAL:
            self._reclaim_all(now, out)
        if self._leases.may_idle and self._shortages.exist():
            self._reclaim_idle(out)

    def _reclaim_all(self, now: float, out: list[Effect]) -> None:
        """Ask for every lease, except of a holder that would only make room for its own request."""
        self._due = False
        self._last_round = now
        only = self._queue.only_request()
        for holder, leases in self._leases.by_holder.items():
            classes = {lease.scheduling_class for lease in leases.values()}
            if only is None or holder != only.holder or classes != {only.scheduling_class}:
                self._leases.may_idle.pop(holder, None)
                out.append(Send(holder, ReclaimIdle()))

    def _reclaim_idle(self, out: list[Effect]) -> None:
        """Ask for leases that idle, of holders that were allowed to let them, and for those that become idle."""
        shortages = self._shortages.current()
        if self._considered == (shortages, self._leases.may_idle_grants):
            return
        self._considered = shortages, self._leases.may_idle_grants
        for holder in list(self._leases.may_idle):
            leases = self._leases.by_holder.get(holder, {})
            by_class = {lease.scheduling_class: lease for lease in leases.values()}  # leases of a class hold the same
            if any(is_contended(lease, shortages) for lease in by_class.values()):
                del self._leases.may_idle[holder]
                out.append(Send(holder, ReclaimIdle(False)))
