"""Actors that are not started any more, because the job is about to end or the time left is too short for them."""

from __future__ import annotations

from collections.abc import Callable

from hpcray.base.bundle_names import group_of
from hpcray.core.effects import Effect
from hpcray.core.gcs.actor import ALIVE, Actor
from hpcray.core.gcs.adopting import AdoptingActors
from hpcray.core.scheduler.placement import ClusterView
from hpcray.wire import messages as m

Refuse = Callable[[float, m.ActorSpec], "tuple[str, bytes] | None"]


class RefusingActors(AdoptingActors):
    """An actor table that asks before it places an actor.

    Attributes:
        refuse: given the time and an actor, why it is not started and the error that its calls get; None: it may be.
        group_gone: whether a shape is for a placement group that is removed.
    """

    def __init__(self, view: ClusterView) -> None:
        super().__init__(view)
        self.refuse: Refuse = lambda now, spec: None
        self.group_gone: Callable[[m.Shape], bool] = lambda shape: False

    def refuse_waiting(self, now: float) -> list[Effect]:
        """End the actors that wait for a place and would not get one any more."""
        out: list[Effect] = []
        for actor in self.waiting():
            self._place(now, actor, out)
        return out

    def end_in_group(self, now: float, group: str, out: list[Effect]) -> None:
        """A placement group is removed: end the actors that wait for a place in it."""
        for actor in self.waiting():
            if group_of(actor.spec.place.resources) == group:
                self._place(now, actor, out)

    def living(self) -> dict[bytes, str]:
        """The workers of all actors that live, with the actor's name for people."""
        return {actor.worker: actor.title() for actor in self.actors.values() if actor.state == ALIVE}

    def _place(self, now: float, actor: Actor, out: list[Effect]) -> bool:
        if self.group_gone(actor.spec.place):
            self._dies(actor, "its placement group was removed", out)
            return False
        refused = self.refuse(now, actor.spec)
        if refused is None:
            return super()._place(now, actor, out)
        reason, actor.error = refused
        self._dies(actor, reason, out)
        return False
