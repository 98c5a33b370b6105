"""What one node tells people: why somebody waits, and who has what."""

from __future__ import annotations

from typing import Any

from hpcray.base.bundle_names import bundle_of, outside, plain
from hpcray.base.ids import owner_of
from hpcray.base.resources import Resources, to_amounts
from hpcray.core.effects import Effect, Send
from hpcray.core.pool import WorkerPool
from hpcray.core.scheduler.claims import ClaimBook
from hpcray.core.scheduler.devices import GPU
from hpcray.core.scheduler.ledger import Ledger
from hpcray.core.scheduler.queue import Env, WaitingRoom, Want
from hpcray.core.scheduler.telling import REPORT_AFTER, free_of, show, waiting_text
from hpcray.core.scheduler.wants import ACTOR_KLASS, WantTable
from hpcray.wire.messages import Infeasible

WARN_AFTER = 2.0
FAILURES_TO_WARN = 3


class Reports:
    """Reads the books of one raylet core and changes none of them, but for who was warned of what."""

    def __init__(
        self, ledger: Ledger, pool: WorkerPool, room: WaitingRoom, wants: WantTable, claims: ClaimBook
    ) -> None:
        self._node = ledger.node
        self._ledger = ledger
        self._pool = pool
        self._room = room
        self._wants = wants
        self._claims = claims

    def due(self, now: float, out: list[Effect]) -> None:
        """Say to whom it concerns what it waits for: nobody may wait without knowing."""
        for want in self._room:
            if want.spec is not None and not want.warned and self._without_worker(now, want):
                want.warned = True
                text = f"actor {want.spec.class_name} waits: {self.no_worker(want.shape.env)}"
                out.append(Send(owner_of(want.spec.actor), Infeasible(ACTOR_KLASS, text)))
            if want.spec is not None or want.attempt is not None:
                continue
            if not want.warned and self._without_worker(now, want):
                want.warned = True
                out.append(Send(want.holder, Infeasible(want.klass, self.no_worker(want.shape.env))))
            elif now - max(want.since, want.told) >= REPORT_AFTER and self._wants.mine_alone(want):
                # Its holder prints one, and only while it has no lease of this class: it may wait for its own tasks.
                want.told = now
                out.append(Send(want.holder, Infeasible(want.klass, self._why(want.request), waits=True)))

    def no_worker(self, env: Env) -> str:
        """Why no worker can be had."""
        if self._pool.failures.get(env):
            return f"node {self._node} cannot start workers: {self._pool.last_failure}"
        return f"node {self._node} runs {self._pool.limit} workers, its limit{self._pool.limited_by}"

    def snapshot(self) -> dict[str, Any]:
        """Leases, pending demand, actors and workers."""
        devices = self._ledger.devices
        return {
            "node": self._node,
            "total": to_amounts(outside(self._ledger.total)),
            "available": to_amounts(self._ledger.available),
            "gpus": to_amounts(devices.left()) if devices else {},
            "leases": [
                {"holder": c.holder, "worker": c.worker, "resources": to_amounts(plain(c.request)), "blocked": c.lent}
                for c in self._claims.leases.values()
            ],
            "pending": self._wants.pending(),
            "actors": [
                {"actor": actor, "worker": c.worker, "class": c.spec.class_name if c.spec else ""}
                for actor, c in self._claims.actors.items()
            ],
            "pool": self._pool.snapshot(),
        }

    def _without_worker(self, now: float, want: Want) -> bool:
        env = want.shape.env
        late = now - want.since >= WARN_AFTER
        return self._pool.failures.get(env, 0) >= FAILURES_TO_WARN or (late and self._pool.full(now, env))

    def _why(self, request: Resources) -> str:
        ledger = self._ledger
        available = ledger.available
        if ledger.bundles is not None and bundle_of(request.items()) is not None:
            available = ledger.bundles.shown
        there = f"node {self._node}: {free_of(request, available, ledger.total)}"
        if GPU in request and ledger.devices is not None:
            there += f", of its GPUs {show(ledger.devices.left())}"
        return waiting_text("a task", request, there)
