"""A whole cluster in one process: real raylet and head cores, fake workers and submitters, a fake network."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from realclient import RealSubmitter
from simnet import SimNet
from submitters import SimTask, Submitter

from hpcray.common.config import Config
from hpcray.common.ids import HEAD, make_proc, node_of, number_of, raylet_of
from hpcray.common.resources import Resources
from hpcray.core.effects import Effect, ForkWorker, KillWorker, Preload, Send
from hpcray.core.gcs import gcs as gcs_module
from hpcray.core.gcs.gcs import Gcs
from hpcray.core.raylet.local_lease_manager import HANDLES as RAYLET_HANDLES
from hpcray.core.raylet.local_lease_manager import LocalLeaseManager
from hpcray.core.raylet.local_resources import ResourceAllocation
from hpcray.protocol import messages as m

SEAT = raylet_of(0)
"""The raylet that is the head."""


def allocations_of(raylet: LocalLeaseManager) -> list[ResourceAllocation]:
    """All allocations of a node, from the decision to the end of their worker, each once."""
    leases, pool = raylet._leases, raylet.pool
    found = [*leases.leases.values(), *leases.actors.values(), *pool.waiting()]
    found += [worker.allocation for worker in pool.workers.values() if worker.allocation is not None]
    return list({id(one): one for one in found}.values())


@dataclass(eq=False)
class SimWorker:
    """A worker process: runs one task at a time, or is an actor."""

    proc: bytes
    queue: deque[tuple[bytes, SimTask, bytes]] = field(default_factory=deque)
    running: tuple[bytes, SimTask] | None = None
    blocked: bool = False
    was_blocked: bool = False
    actor: bytes = b""
    exiting: bool = False


class SimCluster:
    """Nodes with these resources, all up at time 0."""

    def __init__(
        self,
        totals: Sequence[Resources],
        delays: Sequence[float] = (0.001,),
        config: Config | None = None,
        lazy: bool = False,
        failing_forks: Sequence[int] = (),
        real: bool = False,
        net: SimNet | None = None,
        paths: Sequence[str] = (),
    ) -> None:
        self.config = config or Config(prestart=0)
        self.net = net or SimNet(delays)
        self.lazy = lazy
        self.real = real
        self.totals = [dict(total) for total in totals]
        self.raylets = [LocalLeaseManager(n, dict(t), len(totals), self.config) for n, t in enumerate(totals)]
        self.head = Gcs(self.config)
        self.workers: dict[bytes, SimWorker] = {}
        self.submitters: dict[bytes, Submitter | RealSubmitter] = {}
        self.on_node: list[dict[bytes, Submitter | RealSubmitter]] = [{} for _ in totals]
        self.inbox: dict[bytes, list[m.Message]] = {}
        self.dead: set[bytes] = set()
        self.dead_nodes: set[int] = set()
        self.failing_forks = set(failing_forks)
        self.forks = 0
        self.checks = 0
        self.unchecked = 0
        self.touched: set[int] = set()
        self.constructor_errors: dict[bytes, bytes] = {}
        infos = [
            m.NodeInfo(n, f"id{n}", f"host{n}", f"10.0.0.{n}", 100 + n, dict(t), b"", "mpi", 0, labels)
            for n, t in enumerate(totals)
            for labels in [{"hpcray.io/switch-path": paths[n]} if paths and paths[n] else {}]
        ]
        self.carry_out(SEAT, self.head.cluster_up(0.0, "session", infos))
        for node, raylet in enumerate(self.raylets):
            raylet.nodes_placed(infos)
            self.carry_out(raylet_of(node), raylet.start(0.0))
            self.net.after(self.net.delay(), lambda node=node: self.tick(node))

    # ------------------------------------------------------------ the network

    def post(self, src: bytes, dest: bytes, msg: m.Message) -> None:
        if dest == HEAD:
            dest = SEAT
        body = m.encode([msg])
        self.net.send(src, dest, lambda: self.deliver(src, dest, m.decode(body)[0]))

    def push(self, src: bytes, worker: bytes, task: SimTask, ident: bytes = b"") -> None:
        self.net.send(src, worker, lambda: self.pushed(src, worker, task, ident))

    def deliver(self, src: bytes, dest: bytes, msg: m.Message) -> None:
        if node_of(dest) in self.dead_nodes or node_of(src) in self.dead_nodes:
            return
        if number_of(dest) == 0:
            self.deliver_to_raylet(src, node_of(dest), msg)
        elif dest in self.dead:
            if src != dest and number_of(src) == 0:
                self.post(raylet_of(node_of(dest)), src, m.Undeliverable(dest, "it is dead"))
        else:
            self.deliver_to_process(src, dest, msg)

    def deliver_to_raylet(self, src: bytes, node: int, msg: m.Message) -> None:
        now = self.net.now
        to_head = type(msg) in gcs_module.HANDLES
        if type(msg) in RAYLET_HANDLES and to_head:
            to_head = node == 0 and src != SEAT
        if to_head:
            self.carry_out(SEAT, self.head.handle(now, src, msg))
            _check_touched(self.head, msg)
            self.unchecked += 1
        elif not isinstance(msg, m.CollectGarbage):  # for the raylet's shell
            self.carry_out(raylet_of(node), self.raylets[node].handle(now, src, msg))

    def deliver_to_process(self, src: bytes, dest: bytes, msg: m.Message) -> None:
        self.inbox.setdefault(dest, []).append(msg)
        worker = self.workers.get(dest)
        if worker is not None:
            if isinstance(msg, m.Exit):
                worker.exiting = True
                self.die(dest, "exit code 0")
                return
            if isinstance(msg, m.BecomeActor):
                assert not worker.actor and worker.running is None
                worker.actor = msg.spec.actor
                error = self.constructor_errors.get(msg.spec.actor, b"")
                self.net.after(
                    self.net.delay(), lambda: self.if_alive(dest, HEAD, m.ActorReady(msg.spec.actor, error, []))
                )
                return
            if isinstance(msg, m.ReturnTasks):
                self.give_back(worker, src)
                return
            if isinstance(msg, m.TerminateActor):
                self.post(dest, raylet_of(node_of(dest)), m.ProcLeaving("all handles to it are gone"))
                self.net.after(self.net.delay() * 3 + 0.01, lambda: self.die(dest, "exit code 0"))
                return
        submitter = self.submitters.get(dest)
        if isinstance(submitter, RealSubmitter) and isinstance(msg, m.ReclaimIdle):
            submitter.reclaim(node_of(src), msg.busy)
        elif isinstance(submitter, RealSubmitter) and isinstance(msg, m.TasksReturned):
            submitter.taken_back(src, msg)
        elif submitter is not None:
            submitter.receive(msg)

    def if_alive(self, src: bytes, dest: bytes, msg: m.Message) -> None:
        if src not in self.dead:
            self.post(src, dest, msg)

    def carry_out(self, src: bytes, effects: list[Effect]) -> None:
        node = node_of(src)
        self.touched.add(node)
        for effect in effects:
            if isinstance(effect, Send):
                self.post(src, effect.dest, effect.msg)
            elif isinstance(effect, ForkWorker):
                self.fork(node, effect.number)
            elif isinstance(effect, Preload):
                pass
            elif isinstance(effect, KillWorker):
                worker = effect.worker
                self.net.after(self.net.delay(), lambda worker=worker: self.die(worker, "killed by signal 9"))
            else:
                raise AssertionError(f"unexpected effect {effect}")

    # ------------------------------------------------------------ processes

    def fork(self, node: int, number: int) -> None:
        self.forks += 1
        proc = make_proc(node, number)
        if self.forks in self.failing_forks:
            self.net.after(self.net.delay(), lambda: self.fork_failed(node, number))
            return
        self.net.after(self.net.delay(), lambda: self.join(proc))

    def fork_failed(self, node: int, number: int) -> None:
        if node not in self.dead_nodes:
            self.carry_out(
                raylet_of(node),
                self.raylets[node].fork_failed(self.net.now, number, "Resource temporarily unavailable"),
            )

    def join(self, proc: bytes) -> None:
        node = node_of(proc)
        if node in self.dead_nodes:
            return
        self.workers[proc] = SimWorker(proc)
        self.submitters[proc] = self.on_node[node][proc] = self.submitter(proc)
        self.carry_out(
            raylet_of(node), self.raylets[node].process_joined(self.net.now, proc, "worker", number_of(proc))
        )

    def submitter(self, proc: bytes) -> Submitter | RealSubmitter:
        return RealSubmitter(self, proc) if self.real else Submitter(self, proc, self.lazy)

    def driver(self, node: int = 0) -> Submitter | RealSubmitter:
        raylet = self.raylets[node]
        proc = make_proc(node, raylet.pool.new_number())
        submitter = self.submitters[proc] = self.on_node[node][proc] = self.submitter(proc)
        self.carry_out(raylet_of(node), raylet.process_joined(self.net.now, proc, "driver", 1))
        return submitter

    def die(self, proc: bytes, reason: str) -> None:
        """The process ends now; its raylet notices after a delay."""
        node = node_of(proc)
        if proc in self.dead or node in self.dead_nodes:
            return
        self.dead.add(proc)
        self.workers.pop(proc, None)
        self.submitters.pop(proc, None)
        self.on_node[node].pop(proc, None)
        self.net.send(proc, raylet_of(node), lambda: self.noticed(proc, reason))

    def noticed(self, proc: bytes, reason: str) -> None:
        node = node_of(proc)
        if node in self.dead_nodes:
            return
        self.carry_out(raylet_of(node), self.raylets[node].process_died(self.net.now, proc, reason))
        self.net.send(raylet_of(node), SEAT, lambda: self.head_noticed(proc, reason))

    def head_noticed(self, proc: bytes, reason: str) -> None:
        if node_of(proc) not in self.dead_nodes:
            self.carry_out(SEAT, self.head.process_died(self.net.now, proc, reason))
            self.unchecked += 1

    def kill_node(self, node: int) -> None:
        """The node vanishes; the head notices, then everybody."""
        assert node != 0
        self.crash(node)
        self.net.after(self.net.delay(), lambda: self.node_noticed(node))

    def crash(self, node: int) -> None:
        """It vanishes, with everything on it."""
        self.dead_nodes.add(node)
        for proc in [p for p in {*self.workers, *self.submitters} if node_of(p) == node]:
            self.workers.pop(proc, None)
            self.submitters.pop(proc, None)
            self.dead.add(proc)

    def node_noticed(self, node: int) -> None:
        self.carry_out(SEAT, self.head.node_died(self.net.now, node, "heartbeat lost"))
        self.unchecked += 1
        for other in range(len(self.raylets)):
            if other not in self.dead_nodes:
                self.net.send(SEAT, raylet_of(other), lambda other=other: self.node_told(other, node))

    def node_told(self, other: int, node: int) -> None:
        if other in self.dead_nodes:
            return
        self.carry_out(raylet_of(other), self.raylets[other].node_died(self.net.now, node))
        for proc in list(self.on_node[other]):
            self.post(raylet_of(other), proc, m.NodeDied(node, "heartbeat lost"))

    # ------------------------------------------------------------ tasks

    def pushed(self, src: bytes, proc: bytes, task: SimTask, ident: bytes) -> None:
        worker = self.workers.get(proc)
        if worker is None:
            return
        assert not worker.actor, "a task was pushed to an actor's worker"
        worker.queue.append((src, task, ident))
        self.run_next(worker)

    def give_back(self, worker: SimWorker, asked_by: bytes | None) -> None:
        """Return what has not started: to one submitter that asked, or to all because it blocks."""
        back: dict[bytes, list[bytes]] = {} if asked_by is None else {asked_by: []}
        kept: deque[tuple[bytes, SimTask, bytes]] = deque()
        for item in worker.queue:
            if asked_by in (None, item[0]):
                back.setdefault(item[0], []).append(item[2])
            else:
                kept.append(item)
        worker.queue = kept
        for holder, tasks in back.items():
            self.post(worker.proc, holder, m.TasksReturned(tasks, asked_by is not None))

    def run_next(self, worker: SimWorker) -> None:
        if worker.running is not None or not worker.queue:
            return
        worker.running = worker.queue.popleft()[:2]
        task = worker.running[1]
        task.ran_on.append(node_of(worker.proc))
        task.began = self.net.now
        self.net.after(task.seconds, lambda: self.computed(worker.proc, task))

    def computed(self, proc: bytes, task: SimTask) -> None:
        worker = self.workers.get(proc)
        if worker is None or worker.running is None or worker.running[1] is not task:
            return
        children = [child for child in task.children if not child.done]
        if not children:
            self.complete(worker)
            return
        submitter = self.submitters[proc]
        for child in children:
            child.submitted = self.net.now
            submitter.submit(child)
        worker.blocked = worker.was_blocked = True
        self.give_back(worker, None)
        self.post(proc, raylet_of(node_of(proc)), m.Blocked())

    def progressed(self, proc: bytes) -> None:
        worker = self.workers.get(proc)
        submitter = self.submitters.get(proc)
        if worker is not None and submitter is not None and worker.blocked and submitter.waiting_for == 0:
            worker.blocked = False
            self.post(proc, raylet_of(node_of(proc)), m.Unblocked())
            self.complete(worker)

    def complete(self, worker: SimWorker) -> None:
        assert worker.running is not None
        holder, task = worker.running
        worker.running = None
        self.net.send(raylet_of(node_of(worker.proc)), holder, lambda: self.task_done(holder, worker.proc, task))
        self.run_next(worker)

    def task_done(self, holder: bytes, worker: bytes, task: SimTask) -> None:
        submitter = self.submitters.get(holder)
        if submitter is not None and node_of(worker) not in self.dead_nodes:
            submitter.finished(worker, task)

    # ------------------------------------------------------------ time

    def tick(self, node: int) -> None:
        if node in self.dead_nodes:
            return
        now = self.net.now
        if node == 0:
            self.carry_out(SEAT, self.head.tick(now))
            self.unchecked += 1
        self.carry_out(raylet_of(node), self.raylets[node].tick(now))
        for submitter in list(self.on_node[node].values()):
            submitter.tick(self.config.idle_lease_timeout)
        self.net.after(self.config.tick, lambda: self.tick(node))

    def run(self, seconds: float = 600.0) -> bool:
        """Until every task is done and every lease is back, or this much virtual time has passed."""
        return self.net.run(self.net.now + seconds, self.quiet, self.check)

    def run_for(self, seconds: float) -> None:
        self.net.run(self.net.now + seconds, lambda: False, self.check)

    def living(self) -> list[LocalLeaseManager]:
        return [raylet for node, raylet in enumerate(self.raylets) if node not in self.dead_nodes]

    def quiet(self) -> bool:
        if any(s.waiting_for or s.leased or any(s.queues) for s in self.submitters.values()):
            return False
        if any(raylet.available() != self.totals[raylet.node] for raylet in self.living()):
            return False
        return not self.head.scheduler.unmet_by_shape() and all(r._queue.waiting == 0 for r in self.living())

    def check_head(self) -> None:
        """The head's invariants, after each event it has had; in large clusters after some of them."""
        if self.unchecked > 0 and (len(self.raylets) <= 20 or self.unchecked >= 200):
            self.unchecked = 0
            self.head.check_invariants()

    def check_touched(self) -> None:
        """The invariants of the raylets that made decisions since the last call."""
        for node in self.touched - self.dead_nodes:
            self.raylets[node].check_invariants()
        self.touched.clear()

    def check(self) -> None:
        """What must hold at every moment; looked at now and then in large clusters."""
        self.checks += 1
        self.check_head()
        self.check_touched()
        if len(self.raylets) > 20 and self.checks % 100:
            return
        for raylet in self.living():
            total = self.totals[raylet.node]
            unique = [one for one in allocations_of(raylet) if one.bundle is None]
            for name, units in total.items():
                held = sum(c.resources.get(name, 0) for c in unique if not (c.cpu_released and name == "CPU"))
                held += sum(bundle.resources.get(name, 0) for bundle in raylet.resources.bundles)
                assert raylet.available().get(name, 0) == units - held, (raylet.node, name)
                if held > units:
                    assert name == "CPU", f"node {raylet.node} over-committed {name}"
                    resumed = sum(
                        c.resources.get(name, 0)
                        for c in unique
                        if (w := self.workers.get(c.worker)) is None or w.was_blocked
                    )
                    assert held - units <= resumed, f"node {raylet.node} over-committed CPU without Unblocked"
            counts = raylet.pool._counts
            assert all(n >= 0 for n in counts.values()), counts
            assert sum(counts.values()) == len(raylet.pool.workers)
            assert len(raylet.pool.workers) <= raylet.pool.limit

    def explain(self) -> str:
        """Why it is not quiet, for a failing test."""
        lines = [f"t={self.net.now:.3f}"]
        lines += [str(raylet.snapshot()) for raylet in self.living()]
        lines.append(str(self.head.scheduler.unmet_by_shape()))
        for proc, s in self.submitters.items():
            if s.waiting_for or s.leased:
                lines.append(f"{proc.hex()} waits for {s.waiting_for}, queues {[len(q) for q in s.queues]}, {s.leased}")
        return "\n".join(lines)


def _check_touched(head: Gcs, msg: m.Message) -> None:
    """Check the actor or group that a message to the head is about: a part of `check_invariants` for large clusters."""
    if isinstance(msg, (m.ActorReady, m.ActorGone, m.ActorOutOfScope, m.StartActorRefused, m.KillActor)):
        head.actors.check_actor(msg.actor)
    elif isinstance(msg, m.CreateActor):
        head.actors.check_actor(msg.spec.actor)
    elif isinstance(msg, (m.BundlesPrepared, m.RemoveGroup)):
        head.groups.check_group(msg.group)
    elif isinstance(msg, m.CreateGroup):
        head.groups.check_group(msg.spec.group)
