"""One actor as the head knows it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hpcray.base.ids import owner_of
from hpcray.base.resources import Resources
from hpcray.wire import messages as m

PENDING, ALIVE, RESTARTING, DEAD = "PENDING", "ALIVE", "RESTARTING", "DEAD"


@dataclass(slots=True, eq=False)
class Actor:
    """One actor. `node` is where it was sent, -1 while it waits for a place; `worker` is known once it is ALIVE.

    complete: False as long as its creator waits for the constructor's arguments; until then it has only a name.
    parked: the busy node where it queued last, `parked_at`: since when it has queued at that one.
    """

    spec: m.ActorSpec
    state: str = PENDING
    node: int = -1
    worker: bytes = b""
    restarts: int = 0
    reason: str = ""
    error: bytes = b""
    watchers: set[bytes] = field(default_factory=set)
    out_of_scope: bool = False
    complete: bool = True
    since: float = 0.0
    refusals: int = 0
    retry_at: float = 0.0
    warned: bool = False
    parked: int = -1
    parked_at: float = 0.0
    former: deque[bytes] = field(default_factory=lambda: deque(maxlen=16))
    soft: Resources = field(init=False)

    def __post_init__(self) -> None:
        hold = dict(self.spec.hold.resources)
        place = self.spec.place.resources
        self.soft = {name: units - hold.get(name, 0) for name, units in place if units > hold.get(name, 0)}

    @property
    def owner(self) -> bytes:
        return owner_of(self.spec.actor)

    def title(self) -> str:
        name = f" {self.spec.name!r}" if self.spec.name else ""
        return f"actor {self.spec.class_name}{name}"
