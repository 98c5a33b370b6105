"""Actors that are not started any more, because the job is about to end or the time left is too short for them."""

from __future__ import annotations

from collections.abc import Callable

from hpcray.core.effects import Effect
from hpcray.core.gcs.actors import ALIVE, Actor, ActorTable
from hpcray.core.scheduler.placement import ClusterView
from hpcray.wire import messages as m

Refuse = Callable[[float, m.ActorSpec], "tuple[str, bytes] | None"]


class RefusingActors(ActorTable):
    """An actor table that asks before it places an actor.

    Attributes:
        refuse: given the time and an actor, why it is not started and the error that its calls get; None: it may be.
    """

    def __init__(self, view: ClusterView) -> None:
        super().__init__(view)
        self.refuse: Refuse = lambda now, spec: None

    def refuse_waiting(self, now: float) -> list[Effect]:
        """End the actors that wait for a place and would not get one any more."""
        out: list[Effect] = []
        for actor in self.waiting():
            self._place(now, actor, out)
        return out

    def living(self) -> dict[bytes, str]:
        """The workers of all actors that live, with the actor's name for people."""
        return {actor.worker: actor.title() for actor in self.actors.values() if actor.state == ALIVE}

    def _place(self, now: float, actor: Actor, out: list[Effect]) -> bool:
        refused = self.refuse(now, actor.spec)
        if refused is None:
            return super()._place(now, actor, out)
        reason, actor.error = refused
        self._dies(actor, reason, out)
        return False
