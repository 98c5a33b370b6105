"""One object in a node store: its record."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from hpcray.core.store.pulls import Pull
from hpcray.core.store.readers import Readers
from hpcray.wire.messages import Pull as PullMessage


class State(Enum):
    """Where an object of this node stands. WAITING: it has no block yet, the store is full. SPILLED: it has none, its
    bytes lie on disk."""

    WAITING = "waiting"
    CREATING = "creating"
    PULLING = "pulling"
    SEALED = "sealed"
    SPILLED = "spilled"
    RESTORING = "restoring"


@dataclass(slots=True, frozen=True)
class Slot:
    """Where an object lies on disk: segment, and bytes in it. number: in the order of writing."""

    segment: int
    offset: int
    size: int
    number: int = 0


@dataclass(slots=True, eq=False)
class Reader:
    """Another node that is being sent an object, chunk by chunk.

    Attributes:
        tag: of the first chunk that it wants; those of the others follow.
        chunk: bytes of a chunk; the last one may be shorter.
        first: number of the first chunk that it wants.
        next: the chunk that is sent next.
        order: its number among those who wait for what is still to come here.
        flying: sends under way.
        over: it gets no more.
    """

    obj: StoredObject
    node: int
    tag: int
    chunk: int
    first: int
    next: int
    order: int
    flying: int = 0
    over: bool = False


@dataclass(slots=True, eq=False)
class StoredObject:
    """What the store knows of one object.

    Attributes:
        creator: the process that fills it; None for a copy, which the data plane fills.
        since: when it began to wait for a block.
        pins: processes that may have it mapped; a set, since a process holds one pin however many views it has.
        reads: other nodes that are being sent it, and writes to disk.
        openers: processes that wait to read it, in order of asking.
        asking: other nodes' pulls that wait until it is sealed, or read back from disk.
        freed: its owner dropped it (or died): it goes with the last pin.
        pull: where to get a copy; kept for an object in creation too, in case its creator dies.
        announcer: the process that was told to tell the owner of this copy; None: nobody yet.
        disk: where its bytes lie on disk, whether or not they are in memory too.
        priority: of its pull: see `wire.messages.Open`.
        here: bytes at its front that have come, while it is received.
        readers: nodes that are being sent it, by tag.
        tree: which of them gets it from whom, while there are any.
        gone: it is no longer of this store; only sends that are not over hold its block.
        ahead: it is fetched before anybody asks for it.
        keepers: processes for which this copy of another node's object stays, in memory or on disk.
        keeping: those of `keepers` that have not heard yet that it is here, in order of asking.
        kept: this copy took the primary's place: it stays until it is freed.
    """

    id: bytes
    size: int
    creator: bytes | None
    since: float
    state: State = State.WAITING
    offset: int = -1
    pins: set[bytes] = field(default_factory=set)
    reads: int = 0
    openers: dict[bytes, None] = field(default_factory=dict)
    asking: list[tuple[int, PullMessage]] = field(default_factory=list)
    freed: bool = False
    pull: Pull | None = None
    announcer: bytes | None = None
    disk: Slot | None = None
    priority: int = 0
    here: int = 0
    readers: dict[int, Reader] = field(default_factory=dict)
    tree: Readers | None = None
    gone: bool = False
    ahead: bool = False
    keepers: set[bytes] = field(default_factory=set)
    keeping: dict[bytes, None] = field(default_factory=dict)
    kept: bool = False

    @property
    def wanted(self) -> bool:
        """Whether anybody waits for it, or soon will."""
        return bool(self.openers or self.keeping or self.asking or self.readers or self.ahead)

    def concerns(self, proc: bytes) -> bool:
        """Whether the death of this process changes anything here, were it not the owner."""
        return (
            proc in self.pins
            or proc in self.openers
            or proc in self.keepers
            or self.announcer == proc
            or (self.creator == proc and self.unfinished)
        )

    @property
    def unfinished(self) -> bool:
        """Whether its creator has not sealed it."""
        return self.disk is None and (self.state is State.WAITING or self.state is State.CREATING)

    @property
    def stays(self) -> bool:
        """Whether it goes to disk where another would be evicted."""
        return self.creator is not None or self.kept or bool(self.keepers)

    @property
    def idle(self) -> bool:
        """Sealed, and nobody reads it."""
        return self.state is State.SEALED and not self.pins and not self.reads
