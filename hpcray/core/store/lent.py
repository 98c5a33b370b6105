"""Objects on disk that processes of the node read from their file by themselves, since there is no room to bring them
back. Their place on disk stays until each of these has read, or is dead."""

from __future__ import annotations

from collections.abc import Callable

from hpcray.core.effects import Effect, LendSpilled
from hpcray.core.store.objects import StoredObject


class Lent:
    """All of one store; `count` is how often it came to that.

    Args:
        unread: called with each object that is read by one process less.

    Attributes:
        last: when it came to that last, and how many bytes of the store were in use then.
    """

    def __init__(self, unread: Callable[[StoredObject, list[Effect]], None]) -> None:
        self.count = 0
        self.last = (float("-inf"), 0)
        self._unread = unread
        self._lent: dict[bytes, dict[bytes, list[StoredObject]]] = {}

    def lend(self, obj: StoredObject, proc: bytes, out: list[Effect]) -> None:
        """Let a process read an object that is on disk."""
        assert obj.disk is not None
        self.count += 1
        obj.reads += 1
        self._lent.setdefault(proc, {}).setdefault(obj.id, []).append(obj)
        out.append(LendSpilled(proc, obj.id, obj.disk.segment, obj.disk.offset, obj.size))

    def done(self, proc: bytes, ident: bytes, out: list[Effect]) -> None:
        """It has read, or does not want to."""
        objects = self._lent.get(proc, {})
        lent = objects.get(ident)
        if lent is None:
            return
        obj = lent.pop()
        if not lent:
            del objects[ident]
        if not objects:
            del self._lent[proc]
        obj.reads -= 1
        self._unread(obj, out)

    def process_died(self, proc: bytes, out: list[Effect]) -> None:
        """It reads no more."""
        for ident, lent in list(self._lent.get(proc, {}).items()):
            for _ in list(lent):
                self.done(proc, ident, out)

    def __len__(self) -> int:
        """How many processes read something."""
        return len(self._lent)
