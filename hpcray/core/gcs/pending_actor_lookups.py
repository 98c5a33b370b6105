"""Questions about actors that are not registered yet, and what is known of actors that will never come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hpcray.common.ids import node_of, owner_of, run_of
from hpcray.protocol.messages import ActorStateUpdate

ENDED_KEPT = 100_000
"""Forgotten actors, and dead processes, that are remembered; a question about an earlier one waits for ever."""


@dataclass(slots=True)
class PendingLookup:
    """Messages about one actor that came ahead of its registration.

    Attributes:
        watchers: processes that wait for its state.
        killed: why it is to die as soon as it is registered, or "".
    """

    watchers: set[bytes] = field(default_factory=set)
    killed: str = ""


class PendingActorLookups:
    """Lookups of actors that are not registered yet, and what is known of actors that will never come.

    A handle can reach a process before the actor is registered: the creator's CreateActor takes another way, and waits
    for the constructor's arguments. A lookup is pending until the actor is registered or its creator is dead.

    Attributes:
        pending: by actor id.
        dead_creators: processes that will register nothing more.
        run: of this job; a handle that was kept from another run (in a pickle) is of an actor that will never come.
        forgotten: the last actors that were dead and have left the table.
    """

    def __init__(self) -> None:
        self.pending: dict[bytes, PendingLookup] = {}
        self.dead_creators: dict[bytes, None] = {}
        self.run = 0
        self._dead_nodes: set[int] = set()
        self.forgotten: dict[bytes, None] = {}

    def may_come(self, actor: bytes) -> bool:
        """Whether an actor that is not in the table can still be registered."""
        creator = owner_of(actor)
        ended = actor in self.forgotten or creator in self.dead_creators or node_of(creator) in self._dead_nodes
        return not ended and run_of(creator) == self.run

    def lookup_of(self, actor: bytes) -> PendingLookup:
        """The lookup of an actor that may come; made if there is none."""
        return self.pending.setdefault(actor, PendingLookup())

    def restore_ended(self, forgotten: Iterable[bytes], creators: Iterable[bytes], nodes: Iterable[int]) -> None:
        """Take in actors, processes and nodes that another head knew to be over."""
        for actor in forgotten:
            self.forget_actor(actor)
        self.dead_creators.update(dict.fromkeys(creators))
        self._dead_nodes.update(nodes)

    def forget_actor(self, actor: bytes) -> list[bytes]:
        """A dead actor leaves the table and will not come again. Returns the ids that are dropped here in turn."""
        self.forgotten[actor] = None
        if len(self.forgotten) <= ENDED_KEPT:
            return []
        oldest = next(iter(self.forgotten))
        del self.forgotten[oldest]
        return [oldest]

    def creator_died(self, proc: bytes) -> list[tuple[bytes, PendingLookup]]:
        """The process will register nothing more. Returns the lookups that waited for its actors."""
        if len(self.dead_creators) >= ENDED_KEPT:
            del self.dead_creators[next(iter(self.dead_creators))]
        self.dead_creators[proc] = None
        for lookup in self.pending.values():
            lookup.watchers.discard(proc)
        return [(actor, self.pending.pop(actor)) for actor in list(self.pending) if owner_of(actor) == proc]

    def node_died(self, node: int) -> list[tuple[bytes, PendingLookup]]:
        """No process of the node will register anything more. Returns the lookups that waited for their actors."""
        self._dead_nodes.add(node)
        for lookup in self.pending.values():
            lookup.watchers = {proc for proc in lookup.watchers if node_of(proc) != node}
        return [(actor, self.pending.pop(actor)) for actor in list(self.pending) if node_of(actor) == node]


def unknown_actor(actor: bytes) -> ActorStateUpdate:
    """The answer about an actor that will never be registered."""
    return ActorStateUpdate(actor, "DEAD", b"", 0, "no such actor is known in this job", b"")


def killed_unregistered(actor: bytes, lookup: PendingLookup) -> ActorStateUpdate:
    """The state of an actor that was killed and whose creator has not registered it yet."""
    return ActorStateUpdate(actor, "DEAD", b"", 0, lookup.killed, b"")
