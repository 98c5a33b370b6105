"""Objects on disk that processes of the node read from their file by themselves, since there is no room to bring them
back.

What is lent is the place on disk, not the object: that may come back into memory meanwhile, or go. The place stays
until each of its readers has read, or is dead; some were only told where it is (`wait`) and never do.
"""

from __future__ import annotations

from collections.abc import Callable

from hpcray.core.effects import Effect, LendSpilled
from hpcray.core.store.objects import Slot, StoredObject


class Lent:
    """All of one store; `count` is how often it came to that.

    Args:
        give_back: makes the effect that gives a place on disk back.

    Attributes:
        last: when it came to that last, and how many bytes of the store were in use then.
    """

    def __init__(self, give_back: Callable[[Slot], Effect]) -> None:
        self.count = 0
        self.last = (float("-inf"), 0)
        self._give_back = give_back
        self._lent: dict[bytes, dict[bytes, list[Slot]]] = {}
        self._readers: dict[int, int] = {}  # by number of the place
        self._left: set[int] = set()  # of these, what no object needs any more

    def lend(self, obj: StoredObject, proc: bytes, out: list[Effect]) -> None:
        """Let a process read an object that is on disk."""
        slot = obj.disk
        assert slot is not None
        self.count += 1
        self._lent.setdefault(proc, {}).setdefault(obj.id, []).append(slot)
        self._readers[slot.number] = self._readers.get(slot.number, 0) + 1
        out.append(LendSpilled(proc, obj.id, slot.segment, slot.offset, obj.size))

    def leave(self, slot: Slot, out: list[Effect]) -> None:
        """Its object does not need this place any more: give it back, as soon as nobody reads it."""
        if slot.number in self._readers:
            self._left.add(slot.number)
        else:
            out.append(self._give_back(slot))

    def done(self, proc: bytes, ident: bytes, out: list[Effect]) -> Slot | None:
        """It has read, or does not want to; the place that it was lent, if any."""
        objects = self._lent.get(proc, {})
        slots = objects.get(ident)
        if slots is None:
            return None
        slot = slots.pop()
        if not slots:
            del objects[ident]
        if not objects:
            del self._lent[proc]
        self._readers[slot.number] -= 1
        if not self._readers[slot.number]:
            del self._readers[slot.number]
            if slot.number in self._left:
                self._left.discard(slot.number)
                out.append(self._give_back(slot))
        return slot

    def process_died(self, proc: bytes, out: list[Effect]) -> None:
        """It reads no more."""
        for ident, slots in list(self._lent.get(proc, {}).items()):
            for _ in list(slots):
                self.done(proc, ident, out)
