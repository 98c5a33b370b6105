"""A disk that does not answer: who waits for it is told so, and everything in memory goes on.

What the disk was told to write or read may still be done, at any time: its blocks stay as they are until its end is
reported. The objects that are being written are in memory as before; those that lie on disk can be had again when the
disk answers.
"""

from __future__ import annotations

from hpcray.core.effects import Effect, Send
from hpcray.core.store.lives import ObjectLives
from hpcray.core.store.objects import State, StoredObject
from hpcray.core.store.report import show_size
from hpcray.wire import messages as m

_HINT = "hint: get it when the disk answers again; HPCRAY_SPILL_DIR names another one for the next job"


class StallingLives(ObjectLives):
    """Objects on a disk that may not answer."""

    def stalled(self, now: float, stuck: list[bytes], what: str) -> list[Effect]:
        """WriteSpill (b"") and ReadSpills (their names) that have not moved for long; none: the disk answers again.

        Call it again and again while there are any: who comes later waits no longer than until the next call.

        Args:
            what: does not answer, and since when.
        """
        out: list[Effect] = []
        reads = [ident for ident in stuck if ident]
        self._room.stall(len(reads) < len(stuck), bool(reads), what)
        if reads:
            self._straight.stalled(reads, f"node {self._node}: {what}; {_HINT}", out)
            on_disk = [obj for obj in self._space.waiting.values() if obj.disk is not None]
            for obj in [self._objects[ident] for ident in reads if ident in self._objects] + on_disk:
                self._tell_stalled(obj, what, out)
        return self._room.make(now, out)

    def _want_back(self, now: float, obj: StoredObject, out: list[Effect]) -> None:
        if self._room.reads_stalled and obj.state is State.SPILLED:
            # One more read that does not end would only take one more block.
            self._tell_stalled(obj, self._room.what, out)
        else:
            super()._want_back(now, obj, out)

    def _tell_stalled(self, obj: StoredObject, what: str, out: list[Effect]) -> None:
        """Nobody waits for this object any longer. A block that is being read into stays its own."""
        reason = (
            f"object {obj.id.hex()} of {show_size(obj.size)} lies on disk on node {self._node}, and {what}; {_HINT}"
        )
        if obj.state is State.WAITING:
            self._fail(obj, "full", reason, out)
            return
        waiters = list(obj.openers)
        self._counts["failed"] += bool(waiters)
        out.extend(Send(proc, m.StoreError(obj.id, "full", reason)) for proc in waiters)
        obj.openers.clear()
        for proc in waiters:
            self._holdings.let_go(proc, obj)
        self._turn_away(obj, reason, out, full=True)
