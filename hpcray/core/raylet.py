"""Leases, workers and actors of one node: events in, effects out.

How demand reaches a worker. A process of this node reports its `Demand`; what fits is granted here, the rest goes to
the head as `Unmet`. The head picks other nodes and sends them `GrantFor`: a node serves what fits at once and refuses
the rest, unless the shape is bound to this very node (strategy "node:<this>"); bound requests queue here with everybody
else and go back to the head when they were not served within `PATIENCE`. The same holds for `StartActor`.
A lease id names its granter (`scheduler.ledger.granter_of`); that is where `LeaseReturn` must go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpcray.base.config import Config
from hpcray.base.ids import HEAD, make_proc, node_of, number_of
from hpcray.base.resources import Resources
from hpcray.core.effects import Effect, Send
from hpcray.core.pool import STARTING, Worker
from hpcray.core.scheduler.books import RECLAIM_PERIOD, Books
from hpcray.core.scheduler.wants import bound_to
from hpcray.wire import messages as m

PATIENCE = 2.0
"""A request bound to this node that is not served within this time goes back to the head, which may know better."""

HANDLES: tuple[type, ...] = (
    m.Demand, m.LeaseReturn, m.Blocked, m.Unblocked, m.GrantFor, m.StartActor, m.KillActor, m.ActorLeaving,
    m.SetJob, m.ProcDied, m.Undeliverable, m.PrepareBundles, m.CommitBundles, m.ReturnBundles, m.OthersWait,
)  # fmt: skip
"""Message types for `RayletCore.handle`. In the head's raylet, KillActor and SetJob are for the raylet core when their
source is the head, else for the head core."""


class RayletCore(Books):
    """Leases, worker pool and actors of one node. Not the object store, not membership.

    Args:
        node: its index.
        total: what it offers.
        cluster_size: number of nodes.
        config: its settings.
        gpu_ids: of its GPUs, as many as `total` says; by default they are numbered.
    """

    def __init__(
        self, node: int, total: Resources, cluster_size: int, config: Config, gpu_ids: Sequence[str] = ()
    ) -> None:
        super().__init__(node, total, cluster_size, config, gpu_ids)
        self.job: m.JobInfo | None = None
        self._procs: dict[bytes, str] = {}
        self._handlers: dict[type, Callable[[float, bytes, Any], list[Effect]]] = {
            m.Demand: self._demand,
            m.LeaseReturn: self._lease_return,
            m.Blocked: self._blocked,
            m.Unblocked: self._unblocked,
            m.GrantFor: self._grant_for,
            m.StartActor: self._start_actor,
            m.KillActor: self._kill_actor,
            m.ActorLeaving: self._actor_leaving,
            m.SetJob: self._set_job,
            **self._keeper.handlers(
                self._anything, self._owe, self._answer_last, self._changed, self._unbind, self._sent_back
            ),
            m.OthersWait: self._others_wait,
            m.ProcDied: lambda now, src, msg: self._holder_gone(now, msg.proc),
            m.Undeliverable: lambda now, src, msg: self._holder_gone(now, msg.proc),
        }

    # ------------------------------------------------------------ events

    def start(self, now: float) -> list[Effect]:
        """The node is up: fork the first workers and tell the head what there is."""
        return self._finish(now, self.pool.start())

    def handle(self, now: float, src: bytes, msg: m.Message) -> list[Effect]:
        """Any message in `HANDLES`.

        Raises:
            KeyError: the message type is not for this core.
        """
        return self._finish(now, self._handlers[type(msg)](now, src, msg))

    def process_joined(self, now: float, proc: bytes, kind: str, pid: int) -> list[Effect]:
        """A process of this node was welcomed. kind: "driver", "attached" or "worker"."""
        self._procs[proc] = kind
        out: list[Effect] = []
        if kind == "worker":
            claim = self.pool.joined(now, proc, pid)
            if claim is not None:
                self._activate(claim, out)
        self._dirty = True
        return self._finish(now, out)

    def process_died(self, now: float, proc: bytes, reason: str) -> list[Effect]:
        """A process of this node is gone; `reason` says how ("killed by signal 9", "exit code 1")."""
        self._procs.pop(proc, None)
        out: list[Effect] = []
        worker = self.pool.remove(proc)
        if worker is not None:
            self._dirty = True
            if worker.state == STARTING:
                self._start_failed(now, worker, reason)
            else:
                self._claims.worker_gone(worker, reason, out)
        out += self._holder_gone(now, proc)
        return self._finish(now, out)

    def fork_failed(self, now: float, number: int, reason: str) -> list[Effect]:
        """The worker with this process number could not be forked."""
        return self.process_died(now, make_proc(self.node, number), reason)

    def remote_process_died(self, now: float, proc: bytes) -> list[Effect]:
        """A process of another node is gone: its leases here end, with the workers that run its tasks."""
        return self._finish(now, self._holder_gone(now, proc))

    def node_died(self, now: float, node: int) -> list[Effect]:
        """All processes of that node are gone."""
        out: list[Effect] = []
        for holder in {*self._wants.holders(), *self._claims.held}:
            if node_of(holder) == node:
                out += self._holder_gone(now, holder)
        return self._finish(now, out)

    def head_moved(self, now: float) -> list[Effect]:
        """The head is another one. It hears what has begun here; what was only waiting to begin it sends anew."""
        actors = [(actor, claim.worker, claim.restarts) for actor, claim in self._claims.actors.items()]
        for want in [want for want in self._room if want.bound]:
            if want.attempt is not None:
                self._keeper.forget(now, want.attempt.group)
                continue
            if want.spec is not None:
                self._wants.actors.pop(want.spec.actor, None)
            want.bound = 0
            self._changed(now, want)
        for want in self._wants.untold():
            self._changed(now, want)
        self._owed = True
        self._crowd = m.OthersWait()
        return self._finish(now, [Send(HEAD, m.Held(self.node, actors, self._keeper.held()))])

    def drain(self, now: float) -> list[Effect]:
        """The job is about to end: no lease is granted and no actor started any more. What runs goes on."""
        self._draining = True
        for want in [want for want in self._room if want.bound]:
            self._unbind(now, want)
        return self._finish(now, [])

    def tick(self, now: float) -> list[Effect]:
        """Housekeeping, every `config.tick`."""
        out = self.pool.reap(now)
        self._dirty = True
        self._room.tick(now, self._ledger.reachable)
        for want in [want for want in self._room if want.bound and want is not self._room.reserved]:
            if now >= want.patience and not self._fits(want):
                self._unbind(now, want)
        self._wants.forget_foreign(now)
        if self._room.waiting:
            self._reports.due(now, out)
            if now - self._reclaimed_at >= RECLAIM_PERIOD:
                self._reclaim_due = True
        return self._finish(now, out)

    # ------------------------------------------------------------ questions

    def available(self) -> Resources:
        """What is free, in units; CPU may be negative while resumed workers over-commit the node."""
        return dict(self._ledger.available)

    def snapshot(self) -> dict[str, Any]:
        """Leases, pending demand, actors and workers, for `status` and messages."""
        return self._reports.snapshot()

    # ------------------------------------------------------------ demand and leases

    def _demand(self, now: float, src: bytes, msg: m.Demand) -> list[Effect]:
        want = self._wants.local(src, msg.klass, msg.shape)
        want.total = msg.total
        excess = want.starting - max(0, want.total - want.granted)
        if excess > 0:
            self._claims.shrink(want, excess)
            self._dirty = True
        self._changed(now, want)
        return []

    def _lease_return(self, now: float, src: bytes, msg: m.LeaseReturn) -> list[Effect]:
        out: list[Effect] = []
        claim = self._claims.leases.get(msg.lease)
        if claim is not None and claim.holder == src:
            self._claims.return_lease(now, claim, msg.bad, out)
            self._dirty = True
        return out

    def _blocked(self, now: float, src: bytes, msg: m.Blocked) -> list[Effect]:
        self._dirty = self._claims.lend(src) or self._dirty
        return []

    def _unblocked(self, now: float, src: bytes, msg: m.Unblocked) -> list[Effect]:
        self._claims.resume(src)
        return []

    def _grant_for(self, now: float, src: bytes, msg: m.GrantFor) -> list[Effect]:
        self._owed = True
        want = self._wants.asked_by_head(msg)
        out: list[Effect] = []
        if want is None or (self._draining and msg.count):
            self._refuse(msg.holder, msg.klass, msg.count)
            return out
        if msg.count == 0:
            self._unbind(now, want)
            return out
        needed = max(0, min(msg.count, want.missing() - want.bound)) if want.local else msg.count
        if msg.parked:
            want.bound = 0  # the same request again: it queues here still
        left = needed
        queue = bound_to(msg.shape, self.node)
        while left and self._fits(want):
            if not self.pool.can_supply(now, want.shape.env):
                queue = queue or not self.pool.full(now, want.shape.env)
                break
            self._claims.decide(want, out)
            self._room.passed()
            left -= 1
        if queue and left:
            want.bound = left if msg.parked else want.bound + left
            want.patience = now + PATIENCE
            left = 0
        self._changed(now, want)
        self._refuse(want.holder, want.klass, msg.count - needed + left)
        return out

    def _others_wait(self, now: float, src: bytes, msg: m.OthersWait) -> list[Effect]:
        self._crowd = msg
        return []

    # ------------------------------------------------------------ actors

    def _start_actor(self, now: float, src: bytes, msg: m.StartActor) -> list[Effect]:
        spec = msg.spec
        self._owed = True
        out: list[Effect] = []
        if spec.actor in self._claims.actors:
            return out
        if self._draining:
            self._refuse_actor(spec.actor, "")
            return out
        want = self._wants.actor(spec, msg.restarts)
        if want.bound:
            want.bound = 0
            want.left = now
            self._changed(now, want)
        queue = bound_to(spec.place, self.node)
        reason = ""
        if self._fits(want):
            if self.pool.can_supply(now, want.shape.env):
                self._wants.actors.pop(spec.actor)
                self._claims.decide(want, out)
                self._room.passed()
                return out
            if self.pool.full(now, want.shape.env):
                reason = self._reports.no_worker(want.shape.env)
            else:
                queue = True
        if queue:
            want.bound = 1
            want.patience = now + PATIENCE
            self._changed(now, want)
        else:
            want.left = now
            self._refuse_actor(spec.actor, reason)
        return out

    def _kill_actor(self, now: float, src: bytes, msg: m.KillActor) -> list[Effect]:
        out: list[Effect] = []
        want = self._wants.actors.get(msg.actor)
        if want is not None and msg.no_restart:
            del self._wants.actors[msg.actor]
            want.bound = 0
            self._changed(now, want)
        self._claims.kill_actor(msg.actor, msg.no_restart, msg.reason, out)
        self._dirty = self._owed = True
        return out

    def _actor_leaving(self, now: float, src: bytes, msg: m.ActorLeaving) -> list[Effect]:
        claim = self._claims.actors.get(msg.actor)
        if claim is not None and claim.worker == src:
            claim.leaving = msg.reason or "it ended on purpose"
        return []

    # ------------------------------------------------------------ the job

    def _set_job(self, now: float, src: bytes, msg: m.SetJob) -> list[Effect]:
        if number_of(src):
            return [Send(HEAD, msg)]
        self.job = msg.job
        return [Send(proc, msg) for proc in self._procs]

    # ------------------------------------------------------------ deaths

    def _start_failed(self, now: float, worker: Worker, reason: str) -> None:
        """A worker died before it joined: one claim that counted on it goes back to where it came from."""
        claim = self.pool.start_failed(now, worker.env, reason)
        if claim is None:
            return
        self._claims.undo(claim)
        self._sent_back(now, claim, self._reports.no_worker(claim.want.shape.env))

    def _holder_gone(self, now: float, holder: bytes) -> list[Effect]:
        """Nobody will use this process's leases, nor wants its results."""
        out: list[Effect] = []
        for want in self._wants.drop(holder):
            self._changed(now, want)
        self._claims.holder_gone(holder, out)
        self._dirty = True
        return out
