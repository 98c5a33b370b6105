"""Sending one long byte stream from node 0 to all nodes, down a tree: who sends what to whom, and when.

A node passes a chunk on as soon as it has stored it, so all nodes receive at once. Where nothing is known of the
network the tree is binomial: node 0 sends a chunk about log2(nodes) times. Else it is that of objects, which crosses
the link of each switch once. What a child has not acknowledged yet is limited, so a slow one holds up its own subtree
and fills no memory. When every node is done, with all that is below it, node 0 says so and everybody leaves together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

from hpcray.common.labels import Place
from hpcray.core.object_store.stored_object import ROOT, BroadcastTree

WINDOW = 4
_CHUNKS = 64
"""In how many chunks the stream is thought to come, when the tree is chosen: how many are not known then."""


def parent(rank: int) -> int:
    """Who sends to `rank` (not 0)."""
    return rank & (rank - 1)


def children(rank: int, size: int) -> list[int]:
    """To whom `rank` sends, the root of the largest subtree first."""
    bit = rank & -rank if rank else 1 << (size - 1).bit_length()
    found = []
    while bit > 1:
        bit >>= 1
        if rank | bit < size:
            found.append(rank | bit)
    return found


def near_parents(places: Sequence[Place]) -> list[int]:
    """Return who sends to each rank, where the places of all ranks in the network are known; 0 for rank 0, too."""
    tree = BroadcastTree(_CHUNKS, places[0])
    found = [tree.join(rank, rank, (), places[rank]) for rank in range(1, len(places))]
    return [0, *(0 if sender == ROOT else sender for sender in found)]


def heights(parents: Sequence[int]) -> list[int]:
    """Return by rank over how many nodes the longest way down from it goes; a sender's rank is below its receivers'."""
    found = [0] * len(parents)
    for rank in range(len(parents) - 1, 0, -1):
        found[parents[rank]] = max(found[parents[rank]], found[rank] + 1)
    return found


@dataclass(frozen=True)
class Pass:
    """Send chunk `index` to `dest`."""

    dest: int
    index: int


@dataclass(frozen=True)
class End:
    """Tell `dest` that there are `count` chunks."""

    dest: int
    count: int


@dataclass(frozen=True)
class Done:
    """Tell `dest`, our parent, that this node and all below it are done."""

    dest: int


@dataclass(frozen=True)
class Go:
    """Tell `dest`, a child, that all nodes are done."""

    dest: int


@dataclass(frozen=True)
class Fail:
    """Tell `dest` why nothing comes of it."""

    dest: int
    reason: str


@dataclass(frozen=True)
class Complete:
    """This node has every chunk, and no child waits for any of them: make use of them, then call `used`."""

    count: int


Effect = Union[Pass, End, Done, Go, Fail, Complete]


class Relay:
    """One node's part. Every event returns what is to be done, in order.

    Args:
        rank: of this node.
        sender: who sends to it; for rank 0 itself.
        receivers: to whom it sends.
        known: who may not know of this tree yet, and hears of a failure too.

    Attributes:
        over: all nodes are done, or it has failed.
        failure: why, or "".
        sender, receivers: as given.
    """

    def __init__(
        self, rank: int, sender: int, receivers: Sequence[int], known: Sequence[int] = (), window: int = WINDOW
    ) -> None:
        self.over = False
        self.failure = ""
        self.sender, self.receivers = sender, list(receivers)
        self._rank = rank
        self._known = known
        self._window = window
        self._have = 0
        self._count = -1
        self._sent = dict.fromkeys(receivers, 0)
        self._acked = dict.fromkeys(self._sent, 0)
        self._ended: set[int] = set()
        self._waiting = set(self._sent)
        self._complete = False
        self._used = False

    def stored(self) -> list[Effect]:
        """The next chunk is here; they come in order."""
        self._have += 1
        return self._advance()

    def ended(self, count: int) -> list[Effect]:
        """There are `count` chunks in all."""
        self._count = count
        return self._advance()

    def acked(self, child: int) -> list[Effect]:
        """A child has stored one more chunk."""
        self._acked[child] += 1
        return self._advance()

    def used(self) -> list[Effect]:
        """This node has made use of the stream."""
        self._used = True
        return self._finish()

    def done(self, child: int) -> list[Effect]:
        """A child is done, with all below it."""
        self._waiting.discard(child)
        return self._finish()

    def go(self) -> list[Effect]:
        """All nodes are done."""
        self.over = True
        return [Go(child) for child in self._sent]

    def failed(self, reason: str, source: int = -1) -> list[Effect]:
        """A step failed here, or a neighbor reports a failure. All neighbors get the reason, once."""
        if self.over:
            return []
        self.over, self.failure = True, reason
        neighbors = dict.fromkeys([*([self.sender] if self._rank else []), *self._sent, *self._known])
        return [Fail(dest, reason) for dest in neighbors if dest != source]

    def waits_for_go(self) -> bool:
        """Return whether this node and all below it are done."""
        return self._used and not self._waiting

    def waits_for(self) -> str:
        """For whom or what, for an error message."""
        if self._have != self._count:
            return f"node {self.sender} to send chunk {self._have}" if self._rank else "the archive"
        late = [child for child in self._sent if self._acked[child] < self._have]
        if late or self._waiting:
            return "nodes " + ", ".join(str(child) for child in sorted(late or self._waiting))
        return "the other nodes" if self._used else "this node's disk"

    def _advance(self) -> list[Effect]:
        effects: list[Effect] = []
        for child in self._sent:
            while self._sent[child] < min(self._have, self._acked[child] + self._window):
                effects.append(Pass(child, self._sent[child]))
                self._sent[child] += 1
            if self._sent[child] == self._count and child not in self._ended:
                self._ended.add(child)
                effects.append(End(child, self._count))
        everywhere = all(acked == self._count for acked in self._acked.values())
        if not self._complete and self._have == self._count and everywhere:
            self._complete = True
            effects.append(Complete(self._count))
        return effects

    def _finish(self) -> list[Effect]:
        if not self._used or self._waiting or self.over:
            return []
        if self._rank:
            return [Done(self.sender)]
        return self.go()
