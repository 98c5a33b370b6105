"""What a simulated process asks of its cluster: shapes, tasks, and the submitter's side of leases."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpcray.common.ids import node_of, raylet_of
from hpcray.common.resources import to_units
from hpcray.protocol import messages as m

if TYPE_CHECKING:
    from simcluster import SimCluster


def shape(strategy: str = "", env: tuple[tuple[str, str], ...] = (), **amounts: float) -> m.Shape:
    """A shape from amounts."""
    return m.Shape(tuple(sorted(to_units(amounts).items())), strategy, env)


CPU1 = shape(CPU=1)


@dataclass(eq=False)
class SimTask:
    """Runs `seconds`, then submits its children and waits for them. function: whose run times its submitter knows.
    once: it must not run twice, and may fail."""

    shape: m.Shape = CPU1
    seconds: float = 0.01
    children: list[SimTask] = field(default_factory=list)
    done: int = 0
    once: bool = False
    failed: int = 0
    submitted: float = 0.0
    began: float = -1.0
    ran_on: list[int] = field(default_factory=list)
    function: str = "f"


@dataclass(eq=False)
class Leased:
    proc: bytes
    lease: bytes
    scheduling_class: int
    task: SimTask | None = None
    idle_since: float = 0.0
    last: bool = False


class Submitter:
    """A process's side of the lease protocol. `lazy`: reports demand only when it halves, doubles, begins or ends."""

    def __init__(self, cluster: SimCluster, proc: bytes, lazy: bool) -> None:
        self.cluster = cluster
        self.proc = proc
        self.lazy = lazy
        self.shapes: list[m.Shape] = []
        self.queues: list[deque[SimTask]] = []
        self.own: list[int] = []
        self.sent: list[int] = []
        self.leased: dict[bytes, Leased] = {}
        self.warnings: list[str] = []
        self.waiting_for = 0

    def submit(self, task: SimTask) -> None:
        if task.shape not in self.shapes:
            self.shapes.append(task.shape)
            self.queues.append(deque())
            self.own.append(0)
            self.sent.append(0)
        scheduling_class = self.shapes.index(task.shape)
        self.queues[scheduling_class].append(task)
        self.waiting_for += 1
        self.pump(scheduling_class)

    def pump(self, scheduling_class: int) -> None:
        queue = self.queues[scheduling_class]
        for worker in list(self.leased.values()):
            if worker.scheduling_class == scheduling_class and worker.task is None and queue:
                worker.task = queue.popleft()
                self.cluster.push(self.proc, worker.proc, worker.task)
        self.ask(scheduling_class)

    def ask(self, scheduling_class: int) -> None:
        want, have = len(self.queues[scheduling_class]), self.sent[scheduling_class] - self.own[scheduling_class]
        if want == have:
            return
        if self.lazy and not (have <= 0 or want == 0 or want >= 2 * have or 2 * want <= have):
            return
        self.sent[scheduling_class] = self.own[scheduling_class] + want
        self.cluster.post(
            self.proc,
            raylet_of(node_of(self.proc)),
            m.RequestLeases(scheduling_class, self.shapes[scheduling_class], self.sent[scheduling_class]),
        )

    def receive(self, msg: m.Message) -> None:
        now = self.cluster.net.now
        if isinstance(msg, m.LeaseGranted):
            if node_of(msg.lease) == node_of(self.proc):
                self.own[msg.scheduling_class] += 1
            assert msg.lease not in self.leased
            self.leased[msg.lease] = worker = Leased(msg.worker, msg.lease, msg.scheduling_class, idle_since=now)
            self.pump(msg.scheduling_class)
            if worker.task is None:
                self.give_back(worker)
        elif isinstance(msg, m.LeaseRevoked):
            self.lost(msg.lease)
        elif isinstance(msg, m.ReclaimIdle):
            for worker in list(self.leased.values()):
                worker.last = worker.last or msg.busy
                if worker.task is None:
                    self.give_back(worker)
        elif isinstance(msg, m.Infeasible):
            self.warnings.append(msg.reason)
        elif isinstance(msg, m.NodeDied):
            for worker in [w for w in self.leased.values() if node_of(w.proc) == msg.node]:
                self.lost(worker.lease)

    def lost(self, lease: bytes) -> None:
        worker = self.leased.pop(lease, None)
        if worker is not None:
            if worker.task is not None and worker.task.once:
                worker.task.failed += 1
                self.waiting_for -= 1
            elif worker.task is not None:
                self.queues[worker.scheduling_class].appendleft(worker.task)
            self.pump(worker.scheduling_class)

    def finished(self, worker_proc: bytes, task: SimTask) -> None:
        for worker in list(self.leased.values()):
            if worker.proc == worker_proc and worker.task is task:
                worker.task = None
                worker.idle_since = self.cluster.net.now
                task.done += 1
                self.waiting_for -= 1
                if worker.last:
                    self.give_back(worker)
                    self.pump(worker.scheduling_class)
                else:
                    self.pump(worker.scheduling_class)
        self.cluster.progressed(self.proc)

    def give_back(self, worker: Leased) -> None:
        del self.leased[worker.lease]
        self.ask(worker.scheduling_class)
        self.cluster.post(self.proc, raylet_of(node_of(worker.lease)), m.ReturnLease(worker.lease))

    def tick(self, idle_timeout: float) -> None:
        for worker in list(self.leased.values()):
            if worker.task is None and self.cluster.net.now - worker.idle_since >= idle_timeout:
                self.give_back(worker)
