"""The submitter's real lease client as a process of the simulated cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcray.common.ids import node_of
from hpcray.core.core_worker.lease_manager import LeaseManager
from hpcray.core.core_worker.task import FunctionDescriptor, PendingTask
from hpcray.protocol import messages as m

if TYPE_CHECKING:
    from simcluster import SimCluster
    from submitters import SimTask


class RealSubmitter:
    """Same face as `simcluster.Submitter`, with `core.core_worker.lease_manager` inside.

    Attributes:
        period: seconds between two looks at idle leases while it has any; None: with every tick of its node.
    """

    period: float | None = None

    def __init__(self, cluster: SimCluster, proc: bytes) -> None:
        self.cluster = cluster
        self.proc = proc
        self.client = LeaseManager(
            proc, lambda dest, msg: cluster.post(proc, dest, msg), self._push, cluster.config.idle_lease_timeout
        )
        self.functions: dict[str, FunctionDescriptor] = {}
        self.tasks: dict[bytes, SimTask] = {}
        self.warnings: list[str] = []
        self.waiting_for = 0
        self.count = 0
        self.ticking = False

    @property
    def leased(self) -> dict[bytes, object]:
        return dict(self.client.workers)

    @property
    def queues(self) -> list[list[PendingTask]]:
        return [list(klass.queue) for klass in self.client.by_index]

    def submit(self, sim: SimTask) -> None:
        self.count += 1
        ident = self.proc + self.count.to_bytes(5, "big")
        self.tasks[ident] = sim
        self.waiting_for += 1
        function = self.functions.setdefault(sim.function, FunctionDescriptor(b"f" * 16, sim.function, b""))
        retries = 0 if sim.once else 3
        self.client.submit(
            PendingTask(ident, function, "", b"", 1, None, None, retries), self.client.scheduling_class(sim.shape)
        )

    def receive(self, msg: m.Message) -> None:
        if isinstance(msg, m.LeaseGranted):
            self.client.granted(msg, self.cluster.net.now)
            if self.period is not None and not self.ticking:
                self.ticking = True
                self.cluster.net.after(self.period, self._look)
        elif isinstance(msg, m.LeaseRevoked):
            self._lost(msg.worker)
        elif isinstance(msg, m.Infeasible):
            self.warnings.append(msg.reason)
        elif isinstance(msg, m.NodeDied):
            for proc in [proc for proc in self.client.workers if node_of(proc) == msg.node]:
                self._lost(proc)

    def reclaim(self, node: int, busy: bool) -> None:
        self.client.reclaim(node, busy)

    def taken_back(self, worker: bytes, msg: m.TasksReturned) -> None:
        self.client.taken_back(worker, msg.tasks)

    def finished(self, worker: bytes, sim: SimTask) -> None:
        leased = self.client.workers.get(worker)
        for ident in list(leased.inflight) if leased is not None else []:
            if self.tasks[ident] is sim:
                self.client.answered(worker, ident, int(sim.seconds * 1e6), self.cluster.net.now)
                sim.done += 1
                self.waiting_for -= 1
        self.cluster.progressed(self.proc)

    def tick(self, idle_timeout: float) -> None:
        if self.period is None:
            self.client.tick(self.cluster.net.now)

    def _look(self) -> None:
        self.ticking = self.client.tick(self.cluster.net.now)
        if self.ticking and self.period is not None:
            self.cluster.net.after(self.period, self._look)

    def _push(self, task: PendingTask, worker: bytes) -> None:
        self.cluster.push(self.proc, worker, self.tasks[task.id], task.id)

    def _lost(self, proc: bytes) -> None:
        """As `runtime.core_worker.task_submitter` does: the first of them was running, the others go elsewhere."""
        for position, task in enumerate(self.client.lost(proc)):
            assert task.scheduling_class is not None
            sim = self.tasks[task.id]
            if sim.once and position == 0:
                sim.failed += 1
                self.waiting_for -= 1
            else:
                self.client.submit(task, task.scheduling_class)
