"""Leases, workers and actors of one node: events in, effects out.

How a lease request reaches a worker. A process of this node sends `RequestLeases`; what fits is granted here, the rest
goes to the GCS as `UnmetLeaseRequest`. The GCS picks other nodes and sends them `GrantLeases`: a node grants what fits
at once and refuses the rest, unless the shape is bound to this very node (strategy "node:<this>"). Bound requests wait
in the queue with the others, and go back to the GCS when they were not served within `ASSIGNED_TIMEOUT`. The same holds
for `StartActor`. A lease id names the node that granted it (`ids.node_of`); `ReturnLease` goes to that node.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from msgspec import structs

from hpcray.common.config import Config
from hpcray.common.ids import HEAD, node_of, number_of, owner_of, raylet_of
from hpcray.common.labels import ACTOR_SCHEDULING_CLASS, bound_to, near_node
from hpcray.common.resources import (
    REPORT_AFTER,
    UNIT,
    Resources,
    bundle_of,
    free_of,
    outside,
    plain,
    show,
    to_amounts,
    waiting_text,
)
from hpcray.core.effects import Effect, Preload, Send
from hpcray.core.raylet.bundle_manager import BundleManager
from hpcray.core.raylet.head_reporter import SMALL_CLUSTER, HeadReporter, NodeViewReporter
from hpcray.core.raylet.lease_queue import LeaseQueue, Shortages, WorkerCap
from hpcray.core.raylet.lease_requests import LeaseRequest, LeaseRequestTable, WorkerEnv, is_bundles_env
from hpcray.core.raylet.lease_table import LeaseReclaimer, LeaseTable
from hpcray.core.raylet.local_resources import GPU, LocalResources, ResourceAllocation
from hpcray.core.raylet.peer_requests import GROUP_WAIT, PeerRequests
from hpcray.core.raylet.worker_pool import STARTING, EndedWorkers, WorkerPool, WorkerProcess
from hpcray.protocol import messages as m

ASSIGNED_TIMEOUT = 2.0
"""Seconds after which a request bound to this node goes back to the GCS unserved: another node may serve it now."""
GROUP_TIMEOUT = 4 * GROUP_WAIT
"""Seconds after which a request in a placement group goes back to its raylet, which withdraws it before."""

HANDLES: tuple[type, ...] = (
    m.RequestLeases, m.ReturnLease, m.Blocked, m.Unblocked, m.GrantLeases, m.StartActor, m.KillActor, m.ProcLeaving,
    m.SetJob, m.ExitRefused, m.ProcDied, m.Undeliverable, m.PrepareBundles, m.CommitBundles,
    m.ReturnBundles, m.ResourceContention, m.PeerLeaseRequest, m.PeerLeasesRefused, m.PlacementGroupNodes,
)  # fmt: skip
"""Message types for `LocalLeaseManager.handle`. In the head's raylet, KillActor and SetJob are for the raylet core when
their source is the head, else for the GCS core."""


class LocalLeaseManager:
    """Leases, worker pool, bundles and actors of one node. Not the object store, not membership.

    Args:
        node: index of the node.
        total: what it offers, in units; copied.
        cluster_size: number of nodes.
        config: its settings.
        gpu_ids: device ids of its GPUs, as many as `total` says; by default they are numbered.
        device_ids: the same for other accelerators, by resource.

    Attributes:
        pool: the worker processes. ended: those that have ended, and how.
        resources: what the node has, and who has what of it.
        job: the job that runs, once its driver has registered it.
    """

    def __init__(
        self,
        node: int,
        total: Resources,
        cluster_size: int,
        config: Config,
        gpu_ids: Sequence[str] = (),
        device_ids: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.node = node
        self.job: m.JobInfo | None = None
        self.pool = WorkerPool(node, total.get("CPU", 0) // UNIT, config)
        self.ended = EndedWorkers()
        self.resources = LocalResources(node, dict(total), gpu_ids, device_ids)
        self._views = NodeViewReporter(self.resources, cluster_size)
        self._cap = WorkerCap(config.worker_cap_initial_backoff, config.worker_cap_max_backoff)
        self._queue = LeaseQueue(self.resources, self._cap, config.spread_threshold)
        pool = self.resources.pool
        alone, small = cluster_size <= 1 and not config.max_nodes, cluster_size <= SMALL_CLUSTER
        self._requests = LeaseRequestTable(node, alone, pool.is_feasible, self._capacity_for, small)
        self._shortages = Shortages(self._queue)
        self._leases = LeaseTable(self.resources, self.pool, self._shortages)
        self._reclaimer = LeaseReclaimer(self._queue, self._leases, self._shortages)
        self._peers = PeerRequests(node, config.locality_wait, cluster_size, not small, not total.get(GPU))
        self._reporter = HeadReporter(self._views, self._queue, self._requests, self._reclaimer, self._peers)
        self._bundles = BundleManager(self.resources, self._queue, self._requests, self._leases, self._reporter)
        self._status = LeaseStatus(self.resources, self.pool, self._queue, self._requests, self._leases)
        self._procs: dict[bytes, tuple[str, float, str]] = {}  # its kind, when it joined, and why it leaves
        self._leaving = False
        self._handlers: dict[type, Callable[[float, bytes, Any], list[Effect]]] = {
            m.RequestLeases: self._request_leases,
            m.ReturnLease: self._return_lease,
            m.Blocked: self._worker_blocked,
            m.Unblocked: self._worker_unblocked,
            m.GrantLeases: self._grant_leases,
            m.StartActor: self._start_actor,
            m.KillActor: self._kill_actor,
            m.ProcLeaving: self._proc_leaving,
            m.SetJob: self._set_job,
            m.ExitRefused: self._exit_refused,
            m.PrepareBundles: self._bundles.prepare_bundles,
            m.CommitBundles: self._bundles.commit_bundles,
            m.ReturnBundles: self._bundles.return_bundles,
            m.ResourceContention: self._resource_contention,
            m.PeerLeaseRequest: self._peer_lease_request,
            m.PeerLeasesRefused: self._peer_leases_refused,
            m.PlacementGroupNodes: self._placement_group_nodes,
            m.ProcDied: lambda now, src, msg: self._holder_died(now, msg.proc),
            m.Undeliverable: lambda now, src, msg: self._holder_died(now, msg.proc),
        }

    def waiting_since(self) -> float | None:
        """Since when requests wait that are not served, as far as that is known; None: none does."""
        return min((one.waiting_since for one in self._requests if one.unserved()), default=None)

    def start(self, now: float, run: int = 0) -> list[Effect]:
        """The node is up: fork the first workers and report to the GCS what is free. run: number of the job's run."""
        self.pool.begin_run(run)
        return self._finish(now, self.pool.prestart_workers())

    def handle(self, now: float, src: bytes, msg: m.Message) -> list[Effect]:
        """Process any message in `HANDLES`.

        Raises:
            KeyError: the message type is not for this core.
        """
        return self._finish(now, self._handlers[type(msg)](now, src, msg))

    def process_joined(self, now: float, proc: bytes, kind: str, pid: int) -> list[Effect]:
        """A process of this node was welcomed. kind: "driver", "attached" or "worker"."""
        self._procs[proc] = kind, now, ""
        out: list[Effect] = []
        if kind == "worker":
            allocation = self.pool.worker_joined(now, proc, pid)
            if allocation is not None:
                self._leases.grant(allocation, out)
                self._reclaimer.mark_due()
        self._queue.recheck_all()
        return self._finish(now, out)

    def process_died(self, now: float, proc: bytes, reason: str) -> list[Effect]:
        """A process of this node is dead; `reason` says how it died ("killed by signal 9", "exit code 1")."""
        kind, joined, left = self._procs.pop(proc, ("", now, ""))
        if kind in (m.DRIVER, m.ATTACHED):
            self.ended.add_driver(now, proc, joined, left, reason)
        out: list[Effect] = []
        worker = self.pool.remove_worker(proc)
        if worker is not None:
            self.ended.add(now, worker, reason)
            self._queue.recheck_all()
            if worker.state == STARTING:
                self._worker_start_failed(now, worker, reason)
            else:
                self._leases.worker_died(worker, reason, out)
        out += self._peers.holder_died(proc, reason)
        out += self._holder_died(now, proc)
        return self._finish(now, out)

    def fork_failed(self, now: float, number: int, reason: str) -> list[Effect]:
        """The worker with this process number could not be forked."""
        return self.process_died(now, self.pool.proc_of(number), reason)

    def remote_process_died(self, now: float, proc: bytes) -> list[Effect]:
        """A process of another node is dead: its leases here end, with the workers that run its tasks."""
        return self._finish(now, self._holder_died(now, proc))

    def node_died(self, now: float, node: int) -> list[Effect]:
        """All processes of that node are dead."""
        out: list[Effect] = []
        for request in self._peers.node_died(node, out):
            self._reporter.request_changed(now, request)
        for holder in {*self._requests.holders(), *self._leases.by_holder}:
            if node_of(holder) == node:
                out += self._holder_died(now, holder)
        return self._finish(now, out)

    def head_moved(self, now: float) -> list[Effect]:
        """Another node is the head now: report what has begun here. What was only assigned, the new head sends anew."""
        actors = [(actor, one.worker, one.restarts) for actor, one in self._leases.actors.items()]
        self._queue.release_all(now)
        for request in [request for request in self._queue if request.assigned and request.assigned_by == HEAD]:
            if request.prepare is not None:
                self._bundles.forget_waiting(now, request.prepare.group)
                continue
            if request.actor_spec is not None:
                self._requests.actors.pop(request.actor_spec.actor, None)
            request.assigned = 0
            self._reporter.request_changed(now, request)
        for request in self._requests.reset_reported(now):
            self._reporter.request_changed(now, request)
        self._reporter.force_view()
        self._shortages.elsewhere = m.ResourceContention()
        self._views.note_contention(())
        return self._finish(now, [Send(HEAD, m.NodeInventory(self.node, actors, self._bundles.held_bundles()))])

    def cluster_grew(self, now: float, cluster_size: int) -> list[Effect]:
        """The job has so many nodes now: the GCS may serve what this node decided alone."""
        self._views.set_report_interval(cluster_size)
        self._peers.cluster_grew(cluster_size, cluster_size > SMALL_CLUSTER)
        for request in self._requests.cluster_grew(cluster_size <= SMALL_CLUSTER):
            self._reporter.request_changed(now, request)
        self._reporter.force_view()
        return self._finish(now, [])

    def nodes_placed(self, nodes: Collection[m.NodeInfo]) -> None:
        """Take note of where nodes are in the network."""
        self._peers.nodes_placed(nodes)

    def drain(self, now: float) -> list[Effect]:
        """The job is about to end: grant no lease and start no actor any more. What runs goes on."""
        self._queue.close()
        self._queue.release_all(now)
        for request in [request for request in self._queue if request.assigned]:
            self._reporter.return_assigned(now, request)
        return self._finish(now, [])

    def leave(self, now: float) -> list[Effect]:
        """This node leaves the job: it serves nothing new, what runs ends, and others serve its own processes."""
        self._leaving = True
        out = self.drain(now)
        for request in self._requests.leave():
            self._reporter.request_changed(now, request)
        return self._finish(now, out + self._reclaim_all())

    def runs_tasks(self) -> bool:
        """Return True if a lease is held here, or about to be. Actors do not count."""
        return any(one.actor_spec is None for one in self._leases.all_allocations())

    def evict_idle_workers(self, now: float) -> list[Effect]:
        """Let all idle workers exit, but for those that own objects."""
        return self._finish(now, self.pool.evict_all_idle())

    def ask_worker_to_leave(self, now: float, proc: bytes) -> list[Effect]:
        """Let an idle worker exit, unless it owns objects."""
        return self._finish(now, self.pool.ask_to_leave(proc))

    def evicts(self) -> bool:
        """Return True if a worker is being ended."""
        return self.pool.evicts

    def has_workers(self) -> bool:
        """Return True if there is any worker, at whatever work."""
        return bool(self.pool.workers)

    def _reclaim_all(self) -> list[Effect]:
        return [Send(holder, m.ReclaimIdle()) for holder, leases in self._leases.by_holder.items() if leases]

    def tick(self, now: float, store_used: int = 0) -> list[Effect]:
        """Housekeeping, every `config.tick` seconds. store_used: bytes of the object store in use."""
        self._views.note_store_use(store_used)
        out = self.pool.reap(now)
        if self._leaving:
            out += self._reclaim_all()  # a grant may have been on its way
        self._queue.recheck_all()
        self._end_sharing(now)
        self._queue.update_reservation(now)
        for request in [one for one in self._queue if one.assigned and one is not self._queue.reserved]:
            if now >= request.return_at and not self._fits(request):
                self._reporter.return_assigned(now, request)
        self._requests.forget_finished(now)
        for allocation in self.pool.drop_hopeless(now):
            self._undo(now, allocation)
        if self._queue.waiting:
            self._status.report_waiting(now, out)
            self._reclaimer.remind(now)
        return self._finish(now, out)

    def available(self) -> Resources:
        """Free units outside of bundles; CPU may be negative while resumed workers over-commit the node."""
        return dict(self.resources.pool.available)

    def snapshot(self) -> dict[str, Any]:
        """Leases, unserved requests, actors and workers, for `hpcray status` and messages."""
        return self._status.snapshot()

    def check_invariants(self) -> None:
        """Raise AssertionError, with the facts, if the parts contradict themselves or each other."""
        self.pool.check_invariants()
        self._queue.check_invariants()
        self._leases.check_invariants()
        self.resources.check_invariants(self._leases.all_allocations())
        self._peers.check_invariants(request for request in self._requests if request.local)
        queued = {id(request) for request in self._queue}
        for request in [*self._requests, *self._requests.bundles.values()]:
            request.check_invariants()
            assert (request.servable() > 0) == (id(request) in queued), (
                f"{request.servable()} leases of a request of {request.holder.hex()} are servable, "
                f"and it is{'' if id(request) in queued else ' not'} queued"
            )

    # ------------------------------------------------------------ lease requests and leases

    def _capacity_for(self, resources: Resources) -> int:
        """For how many leases of a new request this node has CPUs."""
        self.resources.pool.add_implicit(resources)
        return self.resources.pool.capacity(resources)

    def _request_leases(self, now: float, src: bytes, msg: m.RequestLeases) -> list[Effect]:
        request = self._requests.of_local_process(src, msg.scheduling_class, msg.shape)
        if msg.total == request.total:
            self._peers.nothing_coming(request)
        request.total, request.received = msg.total, max(msg.received, request.received)
        excess = request.starting - max(0, request.total - request.granted)
        if excess > 0:
            self._leases.cancel_newest(request, excess)
            self._queue.recheck_all()
        self._reporter.request_changed(now, request)
        return []

    def _return_lease(self, now: float, src: bytes, msg: m.ReturnLease) -> list[Effect]:
        out: list[Effect] = []
        lease = self._leases.leases.get(msg.lease)
        if lease is not None and lease.holder == src:
            self._leases.return_lease(now, lease, msg.bad, out)
            self._queue.recheck_all()
            if self._queue.shared:
                self._end_sharing(now)
        return out

    def _worker_blocked(self, now: float, src: bytes, msg: m.Blocked) -> list[Effect]:
        if msg.retired:
            if self._leases.retire(src):
                self._queue.recheck_all()
                if self._queue.shared:
                    self._end_sharing(now)
        elif self._leases.release_cpu(src):
            self._queue.recheck_all()
        return []

    def _worker_unblocked(self, now: float, src: bytes, msg: m.Unblocked) -> list[Effect]:
        self._leases.reacquire_cpu(src)
        return []

    def _grant_leases(self, now: float, src: bytes, msg: m.GrantLeases) -> list[Effect]:
        may_queue = bound_to(msg.shape.strategy, self.node)
        self._reporter.note_grant(msg, promised=bool(msg.count) and not may_queue)
        return self._serve_elsewhere(now, HEAD, msg, may_queue)

    def _peer_lease_request(self, now: float, src: bytes, msg: m.PeerLeaseRequest) -> list[Effect]:
        """The raylet of a process of another node requests leases that this node may serve."""
        shape = msg.shape
        if msg.count and not self._may_serve_peer(msg):
            self._reporter.refuse_leases(src, msg.holder, msg.scheduling_class, msg.count)
            return []
        if near_node(shape.strategy) is not None:
            shape = m.Shape(shape.resources, f"node:{self.node}", shape.env)
        grant = m.GrantLeases(msg.holder, msg.scheduling_class, shape, msg.count, msg.absolute)
        return self._serve_elsewhere(now, src, grant, msg.wait)

    def _may_serve_peer(self, msg: m.PeerLeaseRequest) -> bool:
        """Return True if this node could serve a request of another raylet: at once, unless that lets it wait."""
        pool, resources = self.resources.pool, dict(msg.shape.resources)
        if msg.spare_gpus and GPU not in resources and pool.total.get(GPU, 0):
            return False
        pool.add_implicit(resources)
        if not pool.is_reachable(resources):
            return False
        return msg.wait or (bundle_of(msg.shape.resources) is None and self._queue.fits(resources))

    def _peer_leases_refused(self, now: float, src: bytes, msg: m.PeerLeasesRefused) -> list[Effect]:
        out: list[Effect] = []
        request = self._peers.refused(node_of(src), msg.holder, msg.scheduling_class, msg.count, out)
        if request is not None:
            self._reporter.request_changed(now, request)
        return out

    def _placement_group_nodes(self, now: float, src: bytes, msg: m.PlacementGroupNodes) -> list[Effect]:
        self._peers.note_group_nodes(msg.groups)
        return []

    def _serve_elsewhere(self, now: float, by: bytes, msg: m.GrantLeases, may_queue: bool) -> list[Effect]:
        """Serve what the GCS, or a raylet (`by`), wants served here: now, from the queue if it may, or not at all."""
        request = self._requests.of_grant(msg)
        out: list[Effect] = []
        if request is None or (self._queue.closed and msg.count):
            self._reporter.refuse_leases(by, msg.holder, msg.scheduling_class, msg.count)
            return out
        if msg.count == 0:
            self._reporter.return_assigned(now, request, by)
            return out
        request.assigned_by = by
        needed = msg.count
        if msg.absolute:
            request.assigned = 0
        if request.local:
            needed = max(0, min(msg.count, request.unserved() - request.assigned))
        left = needed
        while left and self._fits(request):
            if request.live >= request.capacity and not self._cap.is_due(now, request):
                break
            if not self.pool.can_supply(now, request.shape.env):
                may_queue = may_queue or not self.pool.is_full(now, request.shape.env)
                break
            self._leases.allocate(request, out)
            self._queue.note_served_unqueued()
            left -= 1
        if may_queue and left:
            request.assigned += left
            request.return_at = now + (GROUP_TIMEOUT if by != HEAD and request.bundle else ASSIGNED_TIMEOUT)
            left = 0
        self._reporter.request_changed(now, request)
        if by != raylet_of(self.node):  # which knows what its own processes need no more
            left += msg.count - needed
        self._reporter.refuse_leases(by, request.holder, request.scheduling_class, left)
        return out

    def _resource_contention(self, now: float, src: bytes, msg: m.ResourceContention) -> list[Effect]:
        self._shortages.elsewhere = msg
        self._views.note_contention(msg.lacking)
        return []

    # ------------------------------------------------------------ actors

    def _start_actor(self, now: float, src: bytes, msg: m.StartActor) -> list[Effect]:
        spec = msg.spec
        self._reporter.force_view()
        out: list[Effect] = []
        if spec.actor in self._leases.actors:
            return out
        if self._queue.closed:
            self._reporter.refuse_actor(spec.actor, "")
            return out
        request = self._requests.of_actor(spec, msg.restarts)
        self.resources.pool.add_implicit(request.resources)
        if request.assigned:
            request.assigned = 0
            request.returned_at = now
            self._reporter.request_changed(now, request)
        env = request.shape.env
        may_queue = bound_to(spec.place.strategy, self.node)
        reason = ""
        if self._fits(request):
            if self.pool.can_supply(now, env):
                self._requests.actors.pop(spec.actor)
                self._leases.allocate(request, out)
                self._queue.note_served_unqueued()
                return out
            if self.pool.is_full(now, env):
                reason = self._status.no_worker_text(now, env)
            else:
                may_queue = True
        if may_queue:
            request.assigned = 1
            request.return_at = now + ASSIGNED_TIMEOUT
            self._reporter.request_changed(now, request)
        else:
            request.returned_at = now
            self._reporter.refuse_actor(spec.actor, reason)
        return out

    def _kill_actor(self, now: float, src: bytes, msg: m.KillActor) -> list[Effect]:
        out: list[Effect] = []
        request = self._requests.actors.get(msg.actor)
        if request is not None and msg.no_restart:
            del self._requests.actors[msg.actor]
            request.assigned = 0
            self._reporter.request_changed(now, request)
        self._leases.kill_actor(msg.actor, msg.no_restart, msg.reason, out)
        self._queue.recheck_all()
        self._reporter.force_view()
        return out

    def _proc_leaving(self, now: float, src: bytes, msg: m.ProcLeaving) -> list[Effect]:
        if src in self._procs:
            self._procs[src] = (*self._procs[src][:2], msg.reason)
        worker = self.pool.workers.get(src)
        if worker is not None and worker.allocation is not None:
            worker.allocation.exit_reason = msg.reason or "it ended on purpose"
        return []

    def _exit_refused(self, now: float, src: bytes, msg: m.ExitRefused) -> list[Effect]:
        out: list[Effect] = []
        allocation = self.pool.exit_refused(now, src)
        if allocation is not None:
            self._leases.grant(allocation, out)
            self._reclaimer.mark_due()
        self._queue.recheck_all()
        return out

    # ------------------------------------------------------------ the job

    def _set_job(self, now: float, src: bytes, msg: m.SetJob) -> list[Effect]:
        if number_of(src):
            return [Send(HEAD, msg)]
        before, self.job = self.job, msg.job
        out: list[Effect] = []
        if msg.job.preload and (before is None or before.preload != msg.job.preload):
            out = [Preload(msg.job.preload, msg.job.env), *self.pool.replace_idle_workers()]
        if before is None or structs.replace(before, preload=msg.job.preload) != msg.job:
            out += [Send(proc, msg) for proc, (kind, *_) in self._procs.items() if kind == m.WORKER]
        return out

    def _worker_start_failed(self, now: float, worker: WorkerProcess, reason: str) -> None:
        """A worker died before it joined: undo one allocation that waits for such a worker."""
        allocation = self.pool.start_failed(now, worker.env, reason)
        if allocation is not None:
            self._undo(now, allocation)

    def _undo(self, now: float, allocation: ResourceAllocation) -> None:
        """Undo an allocation for which no worker can be had."""
        self._leases.undo(allocation)
        text = self._status.no_worker_text(now, allocation.lease_request.shape.env)
        self._reporter.return_undone(now, allocation, text)

    def _holder_died(self, now: float, holder: bytes) -> list[Effect]:
        out: list[Effect] = []
        for request in self._requests.drop_holder(holder):
            self._reporter.request_changed(now, request)
        self._leases.holder_died(holder, out)
        self._queue.recheck_all()
        return out

    # ------------------------------------------------------------ the end of an event

    def _finish(self, now: float, out: list[Effect]) -> list[Effect]:
        """Grant what fits, fork, reclaim leases and report to the GCS, each at most once per event."""
        if self._queue.is_due:
            self._serve_queue(now, out)
        for request, slowest, wait in self._cap.take_news():
            text = self._status.cap_text(request, wait) if slowest else ""
            out.append(Send(request.holder, m.LeasesCapped(request.scheduling_class, text)))
        out += self.pool.fork_for_waiting(now)
        self._reclaimer.reclaim(now, out)
        self._reporter.flush(now, out)
        return out

    def _serve_queue(self, now: float, out: list[Effect]) -> None:
        def has_worker(env: WorkerEnv) -> bool:
            return is_bundles_env(env) or self.pool.can_supply(now, env)

        for request in self._queue.serve(now, has_worker):
            if request.assigned:
                request.assigned -= 1
            self._reporter.request_served(request)
            if request.prepare is not None:
                out.append(self._bundles.serve_waiting(now, request.prepare))
                self._reporter.force_view()
                continue
            if request.actor_spec is not None:
                self._requests.actors.pop(request.actor_spec.actor, None)
            self._leases.allocate(request, out)
        for request in self._queue.take_shared():
            self._reporter.force_view()
            self._reporter.request_changed(now, request)

    def _end_sharing(self, now: float) -> None:
        """The GCS has had its time, or this node has room again: what is left is decided here."""
        for request in self._queue.end_sharing():
            self._reporter.request_changed(now, request)

    def _fits(self, request: LeaseRequest) -> bool:
        return self._queue.fits(request.resources, request)


WARN_AFTER = 2.0
"""Seconds that a request waits for a worker, with the node full, before its holder is warned."""
FAILURES_TO_WARN = 3
"""Failed starts of workers in a row after which holders are warned."""


class LeaseStatus:
    """Reports to holders why their requests wait, and lists leases, requests, actors and workers."""

    def __init__(
        self,
        resources: LocalResources,
        pool: WorkerPool,
        queue: LeaseQueue,
        requests: LeaseRequestTable,
        leases: LeaseTable,
    ) -> None:
        self._resources = resources
        self._pool = pool
        self._queue = queue
        self._requests = requests
        self._leases = leases

    def report_waiting(self, now: float, out: list[Effect]) -> None:
        """Send to the holders of requests that have waited for long what they wait for, each report once."""
        for request in self._queue:
            spec = request.actor_spec
            if spec is not None and not request.warned_no_worker and self._lacks_worker(now, request):
                request.warned_no_worker = True
                text = f"actor {spec.class_name} waits: {self.no_worker_text(now, request.shape.env)}"
                out.append(Send(owner_of(spec.actor), m.Infeasible(ACTOR_SCHEDULING_CLASS, text)))
            if spec is not None or request.prepare is not None:
                continue
            index = request.scheduling_class
            if not request.warned_no_worker and self._lacks_worker(now, request):
                request.warned_no_worker = True
                out.append(Send(request.holder, m.Infeasible(index, self.no_worker_text(now, request.shape.env))))
                continue
            reported_at = max(request.waiting_since, request.reported_waiting_at)
            if now - reported_at >= REPORT_AFTER and self._requests.is_for_this_node_only(request):
                # The holder prints it only while it has no lease of this class: it may wait for tasks of its own.
                request.reported_waiting_at = now
                out.append(Send(request.holder, m.Infeasible(index, self._waiting_text(request.resources), waits=True)))

    def no_worker_text(self, now: float, env: WorkerEnv) -> str:
        """Why no worker with this environment can be had."""
        node = self._resources.node
        if self._pool.failures.get(env):
            return f"node {node} cannot start workers: {self._pool.last_failure}"
        owners = self._pool.owners(now)
        idle = f" ({owners} of them have no task, and own objects)" if owners else ""
        return f"node {node} runs {self._pool.limit} workers, its limit{idle}{self._pool.limit_reason}"

    def cap_text(self, request: LeaseRequest, wait: float) -> str:
        """Why a request gets no further lease now, although there is room."""
        return (
            f"a task waits: {request.live} like it, more than node {self._resources.node} has CPUs for, are blocked in "
            f"get() or wait(). The next one starts in {wait:g} s. hint: pass refs as arguments instead of calling "
            "get() in tasks; HPCRAY_WORKER_CAP_INITIAL_BACKOFF=0 starts all of them at once"
        )

    def snapshot(self) -> dict[str, Any]:
        """Amounts, leases, unserved requests, actors and workers; amounts in the units of users."""
        pool = self._resources.pool
        return {
            "node": self._resources.node,
            "total": to_amounts(outside(pool.total)),
            "available": to_amounts(pool.available),
            "gpus": to_amounts(pool.devices[GPU].free_by_id()) if GPU in pool.devices else {},
            "leases": [
                {
                    "holder": one.holder,
                    "worker": one.worker,
                    "resources": to_amounts(plain(one.resources)),
                    "blocked": one.cpu_released,
                }
                for one in self._leases.leases.values()
            ],
            "pending": self._requests.snapshot(),
            "actors": [
                {"actor": actor, "worker": one.worker, "class": one.actor_spec.class_name if one.actor_spec else ""}
                for actor, one in self._leases.actors.items()
            ],
            "pool": self._pool.snapshot(),
            "bundles": self._resources.bundles.snapshot(),
        }

    def _lacks_worker(self, now: float, request: LeaseRequest) -> bool:
        env = request.shape.env
        if self._pool.failures.get(env, 0) >= FAILURES_TO_WARN:
            return True
        return now - request.waiting_since >= WARN_AFTER and self._pool.is_at_limit(now, env)

    def _waiting_text(self, resources: Resources) -> str:
        pool = self._resources.pool
        available = pool.available
        if bundle_of(resources.items()) is not None:
            available = self._resources.bundles.available
        there = f"node {self._resources.node}: {free_of(resources, available, pool.total)}"
        for name, devices in pool.devices.items():
            if name in resources:
                there += f", of its {name}s {show(devices.free_by_id())}"
        return waiting_text("a task", resources, there)
