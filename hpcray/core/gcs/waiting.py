"""Tells the owners of actors that wait for long what they wait for."""

from __future__ import annotations

from hpcray.core.effects import Effect, Send
from hpcray.core.gcs.actor import ALIVE, DEAD, Actor
from hpcray.core.gcs.actors import ActorTable
from hpcray.core.scheduler.placement import ClusterView
from hpcray.core.scheduler.telling import REPORT_AFTER
from hpcray.core.scheduler.wants import ACTOR_KLASS
from hpcray.wire.messages import Infeasible, Shape


class WaitingActors:
    """Once per actor; actors of one owner that want the same are told together."""

    def __init__(self, view: ClusterView, table: ActorTable) -> None:
        self._view = view
        self._table = table
        self._since: dict[bytes, float] = {}

    def tick(self, now: float, out: list[Effect]) -> None:
        """Note who waits, and report who has waited for too long."""
        late: dict[tuple[bytes, Shape], list[Actor]] = {}
        for actor in self._table.waiting():
            began = self._since.setdefault(actor.spec.actor, now)
            if now - began >= REPORT_AFTER and not actor.warned:
                actor.warned = True
                late.setdefault((actor.owner, actor.spec.hold), []).append(actor)
        for ident in [ident for ident in self._since if self._has_place(ident)]:
            del self._since[ident]
        for (owner, hold), actors in late.items():
            more = f" (and {len(actors) - 1} more that want the same)" if len(actors) > 1 else ""
            text = self._view.why_waiting(hold, actors[0].title() + more)
            out.append(Send(owner, Infeasible(ACTOR_KLASS, text, waits=True)))

    def _has_place(self, ident: bytes) -> bool:
        """One that was sent to a node may come back, unserved: it still waits."""
        actor = self._table.actors.get(ident)
        return actor is None or actor.state in (ALIVE, DEAD)
