"""Many nodes that want the same object at once: who of them gets it from whom.

The node that has the object (the *root*) sends it to one or two others, and sends everybody else on to nodes that have
begun to receive it, which pass each chunk on as soon as they have it. The shape follows from two costs: a node with two
children sends to each at half its speed, and each level of depth costs the time of one chunk. So the first readers form
a chain, which costs hardly more than one transfer; when it has a quarter as many links as the object has chunks, each
node gets a second child, whose chains grow likewise, and an object that one chunk holds goes down a binary tree.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heappop, heappush

ROOT = -1
"""In place of a node: the root itself sends."""

_SHARE = 4
_LEAST_DEPTH = 2

_Place = tuple[int, int, int]  # depth, order, node


class Readers:
    """The tree below one root for one object, while it is being read.

    Args:
        chunks: in how many pieces the object travels.
    """

    def __init__(self, chunks: int) -> None:
        self._depth = max(_LEAST_DEPTH, chunks // _SHARE)
        self._leaves: list[_Place] = [(0, 0, ROOT)]
        self._singles: list[_Place] = []

    def join(self, node: int, order: int, dead: Collection[int]) -> int:
        """From whom `node` gets the object: ROOT, or another node that has joined before.

        Args:
            node: index of the node that asks.
            order: its number: higher than that of any other before.
            dead: nodes that pass nothing on.
        """
        depth, parent = self._place(dead)
        heappush(self._leaves, (depth + 1, order, node))
        return parent

    def _place(self, dead: Collection[int]) -> tuple[int, int]:
        for heap in (self._leaves, self._singles):
            while heap and heap[0][2] in dead:
                heappop(heap)
        grow = self._leaves and (self._leaves[0][0] < self._depth or not self._singles)
        heap = self._leaves if grow else self._singles
        if not heap:
            return 0, ROOT  # all others are dead, and the root has two already
        place = heappop(heap)
        if grow:
            heappush(self._singles, place)
        return place[0], place[2]
