"""The best node for one kind of request, found in O(log nodes).

A ranking is a heap of (rank, node). Ranks of nodes that changed are made anew when the ranking is next asked, so a node
that changes often costs a ranking nobody asks nothing. Entries that are out of date are dropped when they come up.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

Rank = tuple[int, float, int, int]
"""Which of the alternatives; how much is used; when it was chosen last; the node's index. The smallest is best."""
RankOf = Callable[[int], "Rank | None"]
_SLACK = 64


class Changes:
    """Which nodes changed, in order. Rankings remember how far they have read."""

    def __init__(self) -> None:
        self._log: list[int] = []
        self._start = 0
        self._read = 0

    def __len__(self) -> int:
        return self._start + len(self._log)

    def note(self, node: int) -> None:
        """What is free on this node, or in its bundles, is different now."""
        log = self._log
        if not log or log[-1] != node or self._read == len(self):
            log.append(node)

    def since(self, position: int, most: int) -> set[int] | None:
        """The nodes that changed since; None for more than `most` changes, or for what is forgotten."""
        log = self._log
        if len(log) > 4 * most + _SLACK:
            self._start += len(log)
            log.clear()
        self._read = len(self)
        behind = len(self) - position
        if position < self._start or behind > most:
            return None
        return set(log[len(log) - behind :])


class Ranking:
    """The nodes with room for one kind of request.

    Args:
        nodes: that could serve it if they were empty.
        rank: of a node now; None where it has no room.
    """

    __slots__ = ("_changes", "_current", "_heap", "_nodes", "_rank", "_seen")

    def __init__(self, nodes: Iterable[int], rank: RankOf, changes: Changes) -> None:
        self._nodes = frozenset(nodes)
        self._rank = rank
        self._changes = changes
        self._current: dict[int, Rank] = {}
        self._heap: list[Rank] = []
        self._seen = -1

    def best(self, but: int = -1) -> int | None:
        """The best node with room, None where none has any.

        Args:
            but: not this one.
        """
        self._refresh()
        heap, aside = self._heap, None
        while heap:
            top = heap[0]
            node = top[-1]
            if self._current.get(node) != top:
                heapq.heappop(heap)
                continue
            now = self._rank(node)
            if now != top:  # it became worse, and nobody said so
                self._set(node, now)
                continue
            if node != but:
                break
            aside = heapq.heappop(heap)
        if aside is not None:
            found = heap[0][-1] if heap else None
            heapq.heappush(heap, aside)
            return found
        return heap[0][-1] if heap else None

    def some(self, count: int) -> list[int]:
        """Up to `count` nodes with room, the best first."""
        found: list[Rank] = []
        while len(found) < count and (node := self.best()) is not None:
            found.append(self._current.pop(node))
        for rank in found:
            self._current[rank[-1]] = rank
            heapq.heappush(self._heap, rank)
        return [rank[-1] for rank in found]

    def _refresh(self) -> None:
        changed = self._changes.since(self._seen, len(self._nodes))
        self._seen = len(self._changes)
        if changed is None:
            ranks = ((node, self._rank(node)) for node in self._nodes)
            self._current = {node: rank for node, rank in ranks if rank is not None}
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)
            return
        for node in changed & self._nodes:
            self._set(node, self._rank(node))
        if len(self._heap) > 4 * len(self._nodes) + _SLACK:
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)

    def _set(self, node: int, rank: Rank | None) -> None:
        if rank is None:
            self._current.pop(node, None)
        elif self._current.get(node) != rank:
            self._current[node] = rank
            heapq.heappush(self._heap, rank)
