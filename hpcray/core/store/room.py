"""Making room in a node store: what is spilled when, and who is asked to let go."""

from __future__ import annotations

from collections.abc import Callable

from hpcray.core.effects import Effect, Send
from hpcray.core.store.holdings import Holdings
from hpcray.core.store.objects import StoredObject
from hpcray.core.store.report import show_size
from hpcray.core.store.space import Space
from hpcray.core.store.spill import Spiller
from hpcray.wire import messages as m

BATCH = 128 << 20
"""Bytes that are written in one go, where there are so many; files of this size cost a disk, or a shared file system,
few operations."""
_BATCHES = 8  # a small store is not emptied by one batch
_UNPIN_PERIOD = 0.5
_UNPIN_SHARE = 4  # so much of the store is asked for at a time


class RoomMaker:
    """Starts to spill when requests wait, or before, when the store is fuller than a threshold.

    Processes keep objects pinned that they do not read, so as to read them again at no cost. When room is short they
    are asked to give such pins up (`Unpin`).

    Args:
        threshold: share of the arena; 0 switches spilling off.
        settle: called with objects that nobody reads any more, written to disk or not.

    Attributes:
        reads_stalled: whether a read of the disk has not moved for long.
        what: does not answer, and since when, while that is so.
    """

    def __init__(
        self, space: Space, holdings: Holdings, threshold: float, settle: Callable[[StoredObject, list[Effect]], None]
    ) -> None:
        self.spiller = Spiller(min(BATCH, space.blocks.size // _BATCHES), settle)
        self._space = space
        self._holdings = holdings
        self._on = threshold > 0
        self._limit = int(space.blocks.size * threshold) if self._on else space.blocks.size
        self._share = space.blocks.size // _UNPIN_SHARE
        self._asked_at = float("-inf")
        self._came = (0, 0)
        self.what = ""
        self.reads_stalled = False
        self._write_stalled = False

    def keep(self, obj: StoredObject) -> None:
        """Somebody reads the object: it must neither be evicted nor spilled."""
        self._space.keep(obj)
        self.spiller.keep(obj)

    def make(self, now: float, out: list[Effect]) -> list[Effect]:
        """Serve those that wait if there is room now; start what makes room if it is short."""
        space, spiller = self._space, self.spiller
        while space.changed:
            space.serve(now, out)
        short = space.blocks.used - space.evictable_bytes - self._limit
        waiting = space.waiting
        if waiting:
            short = max(short, next(iter(waiting.values())).size)
        if short <= 0:
            return out
        if self._on and spiller.may_try(now):
            spiller.write(short, out)
        if not self._gets_on and (waiting or not spiller.idle):
            self._ask(now, max(short, self._share), out)
        return out

    def _ask(self, now: float, size: int, out: list[Effect]) -> None:
        """Ask for pins: again only when room came of the last time, or after a while."""
        came = (self.spiller.written, self._space.evicted)
        if now >= self._asked_at + _UNPIN_PERIOD or came != self._came:
            self._asked_at, self._came = now, came
            out.extend(Send(proc, m.Unpin(size)) for proc in self._holdings.holders())

    def may_come(self, since: float) -> bool:
        """Whether spilling makes, or has made since then, room for those that wait."""
        return self._gets_on or self.spiller.progress > since

    def stall(self, write: bool, read: bool, what: str) -> None:
        """The disk has not answered for long, or answers again.

        Args:
            write: the write that is under way has not moved. read: a read has not.
            what: does not answer, and since when.
        """
        self._write_stalled, self.reads_stalled, self.what = write, read, what

    @property
    def stalled(self) -> bool:
        """Whether the disk does not answer. No process may read its files then: it could never be interrupted."""
        return self._write_stalled or self.reads_stalled

    @property
    def stuck(self) -> bool:
        """Whether nothing can be spilled now, so that only the end of a pin or of an object makes room."""
        spiller = self.spiller
        return not (spiller.busy or self.stalled) and (not self._on or bool(spiller.failure) or not spiller.idle)

    @property
    def _gets_on(self) -> bool:
        """Whether a write is under way, and moves."""
        return self.spiller.busy and not self._write_stalled

    def report(self) -> str:
        """A sentence on the state of spilling."""
        if not self._on:
            return "Spilling to disk is off (HPCRAY_SPILL_THRESHOLD=0)."
        if self.stalled:
            return f"Spilling to disk does not get on: {self.what}; another directory: HPCRAY_SPILL_DIR."
        if self.spiller.failure:
            return f"Spilling to disk failed: {self.spiller.failure}."
        return f"{show_size(self.spiller.used)} were spilled to disk, nothing else can be."
