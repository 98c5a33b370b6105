"""What the head tells the nodes of work that finds no room: leases that hold what it lacks should not idle meanwhile.

A process keeps a lease for a while when it has nothing to do for it, as its next task may come soon. That is right
as long as nobody else could use it, and only the head knows of those who wait elsewhere. It says so to every node when
that begins, or when more is lacking than before, and that it is over with a delay: few messages, whatever runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hpcray.base.ids import raylet_of
from hpcray.core.effects import Effect, Send
from hpcray.core.scheduler.asks import Ask
from hpcray.core.scheduler.placement import ClusterView
from hpcray.core.scheduler.wants import near_node, node_affinity
from hpcray.wire.messages import OthersWait, Shape

STAYS = 2.0
"""That less is lacking, nodes are told no sooner after they were told anything."""
SAMPLE = 4
"""What a request lacks is looked up on so many nodes."""

Open = Mapping[Shape, Mapping[tuple[bytes, int], Ask]]


class Crowd:
    """What the nodes believe of it."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._told = OthersWait()
        self._since = float("-inf")
        self._known: set[tuple[Shape, bytes, int]] = set()

    def waits(self, now: float, ask: Ask, out: list[Effect]) -> None:
        """An ask has found no room."""
        told, key = self._told, (ask.shape, ask.holder, ask.klass)
        if key in self._known or (ask.shape, b"", 0) in self._known:
            return
        names = self._lacking(ask.shape)
        if not names:
            return
        self._known.add(key)
        if told.lacking and (told.holder, told.klass) != key[1:]:
            self._known.add((ask.shape, b"", 0))
            self._tell(now, OthersWait(sorted({*told.lacking, *names})), out)
        else:
            self._tell(now, OthersWait(sorted({*told.lacking, *names}), ask.holder, ask.klass), out)

    def tick(self, now: float, asks: Open, out: list[Effect]) -> None:
        """Find out anew who waits, now and then."""
        if now - self._since < STAYS:
            return
        self._known.clear()
        lacking: set[str] = set()
        holders: set[tuple[bytes, int]] = set()
        for shape, waiting in asks.items():
            names = self._lacking(shape)
            if names:
                lacking |= names
                holders.update(_first_two(waiting.values()))
        only = next(iter(holders)) if len(holders) == 1 else (b"", 0)
        self._tell(now, OthersWait(sorted(lacking), *only), out)

    def forget(self) -> None:
        """Nodes came that have not been told."""
        self._told = OthersWait()
        self._known.clear()

    def _tell(self, now: float, news: OthersWait, out: list[Effect]) -> None:
        self._since = now
        if news != self._told:
            self._told = news
            out.extend(Send(raylet_of(node), news) for node in self._view.nodes)

    def _lacking(self, shape: Shape) -> set[str]:
        """Of what nodes that could serve it have too little; nothing for what one node alone may serve."""
        if node_affinity(shape.strategy) is not None or near_node(shape.strategy) is not None:
            return set()
        names: set[str] = set()
        for node in self._view.feasible(shape)[:SAMPLE]:
            free = self._view.nodes[node].free(shape)
            names |= {name for name, units in shape.resources if free.get(name, 0) < units}
        return names


def _first_two(asks: Iterable[Ask]) -> set[tuple[bytes, int]]:
    found: set[tuple[bytes, int]] = set()
    for ask in asks:
        found.add((ask.holder, ask.klass))
        if len(found) > 1:
            break
    return found
