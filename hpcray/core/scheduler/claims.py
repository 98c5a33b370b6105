"""From the decision to serve a want to the end of the worker that serves it: the books of all claims of one node."""

from __future__ import annotations

from collections.abc import Callable

from hpcray.base.ids import HEAD
from hpcray.core.effects import Effect, KillWorker, Send
from hpcray.core.pool import Worker, WorkerPool
from hpcray.core.scheduler.ledger import Claim, Ledger, lease_id
from hpcray.core.scheduler.queue import Want
from hpcray.wire.messages import ActorGone, BecomeActor, LeaseGranted, LeaseRevoked


class ClaimBook:
    """Leases and actors of one node, those that still wait for their worker included.

    Attributes:
        wanted: whether others wait for what a lease holds.
        kept: holders of leases that may idle: nobody waited when they were granted. kept_count: of these leases, ever.
    """

    def __init__(self, node: int, ledger: Ledger, pool: WorkerPool) -> None:
        self._node = node
        self._ledger = ledger
        self._pool = pool
        self._count = 0
        self.leases: dict[bytes, Claim] = {}
        self.held: dict[bytes, dict[bytes, Claim]] = {}
        self.actors: dict[bytes, Claim] = {}
        self.wanted: Callable[[Claim], bool] = lambda claim: False
        self.kept: dict[bytes, None] = {}
        self.kept_count = 0

    def decide(self, want: Want, out: list[Effect]) -> None:
        """Hold resources for one lease (or the actor) of `want`, and find it a worker."""
        self._count += 1
        spec = want.spec
        claim = Claim(
            ident=lease_id(self._node, self._count) if spec is None else spec.actor,
            want=want,
            request=want.request,
            holder=want.holder,
            klass=want.klass,
            env=want.shape.env,
            spec=spec,
            restarts=want.restarts,
        )
        self._ledger.take(claim)
        want.starting += 1
        if spec is not None:
            self.actors[spec.actor] = claim
        if self._pool.supply(claim) is not None:
            self.activate(claim, out)

    def activate(self, claim: Claim, out: list[Effect]) -> None:
        """The claim has its worker: tell its holder, or tell the worker what it becomes."""
        want = claim.want
        want.starting -= 1
        want.granted += 1
        want.warned = False
        if claim.spec is not None:
            out.append(Send(claim.worker, BecomeActor(claim.spec, claim.restarts)))
            return
        self.leases[claim.ident] = claim
        self.held.setdefault(claim.holder, {})[claim.ident] = claim
        wanted = self.wanted(claim)
        if not wanted:
            self.kept[claim.holder] = None
            self.kept_count += 1
        out.append(Send(claim.holder, LeaseGranted(claim.klass, claim.ident, claim.worker, wanted)))

    def shrink(self, want: Want, count: int) -> None:
        """Cancel `count` of the want's claims that still wait for a worker, the newest first."""
        mine = [claim for claim in self._pool.waiting() if claim.want is want]
        for claim in mine[-count:]:
            self.cancel(claim)

    def cancel(self, claim: Claim) -> None:
        """Undo a claim that still waits for its worker."""
        self._pool.cancel(claim)
        self.undo(claim)

    def undo(self, claim: Claim) -> None:
        """A claim that never got its worker leaves the books."""
        claim.want.starting -= 1
        self._ledger.give(claim)
        if claim.spec is not None:
            del self.actors[claim.spec.actor]

    def return_lease(self, now: float, claim: Claim, bad: bool, out: list[Effect]) -> None:
        """Its holder gave the lease back; `bad`: with a worker that must not be used again."""
        self._end_lease(claim)
        worker = self._pool.workers[claim.worker]
        if bad:
            self._kill(worker, out)
            return
        self._ledger.give(claim)
        successor = self._pool.release(now, worker)
        if successor is not None:
            self.activate(successor, out)

    def lend(self, proc: bytes) -> bool:
        """A worker blocks; whether somebody may have its CPU now."""
        worker = self._pool.workers.get(proc)
        return worker is not None and worker.claim is not None and self._ledger.lend(worker.claim)

    def resume(self, proc: bytes) -> None:
        """A worker that blocked goes on."""
        worker = self._pool.workers.get(proc)
        if worker is not None and worker.claim is not None:
            self._ledger.resume(worker.claim)

    def holder_gone(self, holder: bytes, out: list[Effect]) -> None:
        """End all leases of a dead process, with the workers that run its tasks."""
        for claim in self._pool.waiting():
            if claim.holder == holder and claim.spec is None:
                self.cancel(claim)
        for claim in list(self.held.get(holder, {}).values()):
            self._end_lease(claim)
            self._kill(self._pool.workers[claim.worker], out)

    def kill_actor(self, actor: bytes, final: bool, reason: str, out: list[Effect]) -> None:
        """SIGKILL the actor's worker. `final`: it ends for good, also while it is starting."""
        claim = self.actors.get(actor)
        if claim is None:
            return
        if not claim.worker:
            if final:
                self.cancel(claim)
            return
        claim.kill_reason = reason or "it was killed"
        if final:
            claim.leaving = claim.kill_reason
        self._kill(self._pool.workers[claim.worker], out)

    def kill(self, claim: Claim, reason: str, out: list[Effect]) -> None:
        """SIGKILL the claim's worker; an actor of it ends for good."""
        claim.kill_reason = claim.leaving = reason
        self._kill(self._pool.workers[claim.worker], out)

    def worker_gone(self, worker: Worker, reason: str, out: list[Effect]) -> None:
        """A worker that had joined is dead: free what it held, and tell whom it concerns."""
        claim = worker.claim
        if claim is None:
            return
        self._ledger.give(claim)
        reason = claim.kill_reason if claim.spec is None and claim.kill_reason else reason
        text = f"worker process {worker.number} (pid {worker.pid}) on node {self._node} died: {reason}"
        if claim.spec is not None:
            del self.actors[claim.spec.actor]
            text = claim.leaving or claim.kill_reason or f"its {text}"
            out.append(Send(HEAD, ActorGone(claim.spec.actor, worker.proc, text, bool(claim.leaving))))
        elif claim.holder:
            holder = claim.holder
            self._end_lease(claim)
            out.append(Send(holder, LeaseRevoked(claim.ident, worker.proc, text)))

    def _end_lease(self, claim: Claim) -> None:
        del self.leases[claim.ident]
        mine = self.held[claim.holder]
        del mine[claim.ident]
        if not mine:
            del self.held[claim.holder]
            self.kept.pop(claim.holder, None)
        claim.holder = b""

    def _kill(self, worker: Worker, out: list[Effect]) -> None:
        """The resources stay held until the worker is really gone."""
        self._pool.doom(worker)
        out.append(KillWorker(worker.proc))
