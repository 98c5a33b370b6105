"""Where the head is: in raylet 0 at first, in another one when that has died and a successor has taken over.

Nobody but the router of a raylet needs to know. Everybody writes to `base.ids.HEAD`, wherever that is; while it is
nowhere, what is written waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Headship:
    """What one raylet knows of it.

    Attributes:
        node: index of the node whose raylet is the head, or was until it died.
        epoch: how often the head has moved, as far as this node knows.
        lost: the head is dead, and no successor is known yet.
        taken: how many of this node's frames to the head the present one knew of when it took over (`ToHead`).
        listeners: called after a move, in order.
    """

    def __init__(self, node: int = 0) -> None:
        self.node = node
        self.epoch = 0
        self.lost = False
        self.taken = 0
        self.listeners: list[Callable[[], None]] = []

    def gone(self) -> None:
        """The head is dead: what is written to it waits for its successor."""
        self.lost = True

    def moved_to(self, node: int, epoch: int, taken: int = 0) -> bool:
        """The raylet of `node` is the head now. Whether that is news: an older move, or the same again, is none."""
        if epoch <= self.epoch:
            return False
        self.node, self.epoch, self.taken, self.lost = node, epoch, taken, False
        for listener in self.listeners:
            listener()
        return True


class ToHead:
    """The frames of one node for the head, counted. They travel in order, so what the head has of them is a number too.

    Attributes:
        keeping: whether frames are kept until the head says that its successor would know of them (`settled`).
        taken: on the head: node to the number of its frames that have arrived here.
    """

    def __init__(self, headship: Headship) -> None:
        self.keeping = False
        self.taken: dict[int, int] = {}
        self._headship = headship
        self._kept: deque[bytes] = deque()
        self._sent = 0

    def passes(self, frame: bytes | memoryview) -> bool:
        """Another frame for the head; whether it can go to it now."""
        self._sent += 1
        lost = self._headship.lost
        if lost or self.keeping:
            self._kept.append(bytes(frame))
        elif self._kept:
            self._kept.clear()
        return not lost

    def settled(self, count: int) -> None:
        """The first `count` frames will never be asked for again."""
        kept = self._kept
        for _ in range(min(len(kept), count - (self._sent - len(kept)))):
            kept.popleft()

    def again(self) -> list[bytes]:
        """The head has moved: the frames that the new one has not seen, in order."""
        self.settled(self._headship.taken)
        return list(self._kept)

    def arrived(self, node: int) -> None:
        """A frame of this node has arrived, and this is the head."""
        self.taken[node] = self.taken.get(node, 0) + 1
