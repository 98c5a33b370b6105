"""Questions about actors that the GCS has not heard of yet.

A handle can be elsewhere before the actor is registered: its creator's CreateActor takes another way, and waits for the
constructor's arguments. So such questions wait for it, until the creator is known to be dead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hpcray.base.ids import node_of, owner_of
from hpcray.wire.messages import ActorState

REMEMBERED = 100_000
"""So many of the actors, and of the processes, that are over are known; who asks about earlier ones waits."""


@dataclass(slots=True)
class Early:
    """What came for one actor ahead of its creation. killed: why it is to die at once, or ""."""

    watchers: set[bytes] = field(default_factory=set)
    killed: str = ""


class EarlyQuestions:
    """By actor id."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, Early] = {}
        self._dead_creators: dict[bytes, None] = {}
        self._dead_nodes: set[int] = set()
        self._forgotten: dict[bytes, None] = {}

    def may_come(self, actor: bytes) -> bool:
        """Whether an unknown actor can still be registered."""
        creator = owner_of(actor)
        return not (actor in self._forgotten or creator in self._dead_creators or node_of(creator) in self._dead_nodes)

    def of(self, actor: bytes) -> Early:
        """What is kept for an actor that may come."""
        return self._waiting.setdefault(actor, Early())

    def take(self, actor: bytes) -> Early | None:
        """It has come: what was kept for it."""
        return self._waiting.pop(actor, None)

    def all(self) -> dict[bytes, Early]:
        """What is kept, by actor."""
        return self._waiting

    def recall(self, forgotten: Iterable[bytes], creators: Iterable[bytes], nodes: Iterable[int]) -> None:
        """What another head knew to be over: actors, processes, nodes."""
        for actor in forgotten:
            self.forget(actor)
        self._dead_creators.update(dict.fromkeys(creators))
        self._dead_nodes.update(nodes)

    @property
    def forgotten(self) -> dict[bytes, None]:
        """Actors that were dead, and are known no more; the last of them."""
        return self._forgotten

    @property
    def dead_creators(self) -> dict[bytes, None]:
        """Processes that will register nothing more."""
        return self._dead_creators

    def forget(self, actor: bytes) -> list[bytes]:
        """A dead actor leaves the table: it will not come again. Returns those of which not even this is known now."""
        self._forgotten[actor] = None
        if len(self._forgotten) <= REMEMBERED:
            return []
        oldest = next(iter(self._forgotten))
        del self._forgotten[oldest]
        return [oldest]

    def creator_died(self, proc: bytes) -> list[tuple[bytes, Early]]:
        """The process will register nothing more: the actors that were waited for, and by whom."""
        if len(self._dead_creators) >= REMEMBERED:
            del self._dead_creators[next(iter(self._dead_creators))]
        self._dead_creators[proc] = None
        for early in self._waiting.values():
            early.watchers.discard(proc)
        return [(actor, self._waiting.pop(actor)) for actor in list(self._waiting) if owner_of(actor) == proc]

    def node_died(self, node: int) -> list[tuple[bytes, Early]]:
        """The same for all processes of a node."""
        self._dead_nodes.add(node)
        return [(actor, self._waiting.pop(actor)) for actor in list(self._waiting) if node_of(actor) == node]


def unknown(actor: bytes) -> ActorState:
    """The answer about an actor that will never come."""
    return ActorState(actor, "DEAD", b"", 0, "no such actor is known in this job", b"")
