"""A raylet's disk: carries out what its store decides about spilling."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hpcray.core import effects as fx
from hpcray.host.spill_files import SpillFiles
from hpcray.wire import messages as m

if TYPE_CHECKING:
    from hpcray.runtime.raylet import Raylet


class Spilling:
    """Joins the store of a raylet to its spill files. While anything is under way there, it looks whether that moves.

    Args:
        raylet: gets the carriers for the store's effects; its loop tells the store what has ended.
        files: closed with `close`.
    """

    def __init__(self, raylet: Raylet, files: SpillFiles) -> None:
        self._raylet = raylet
        self._files = files
        self._patience = raylet.seat.config.spill_timeout
        self._looking = False
        self._since = 0.0
        self._what = ""
        raylet.carriers |= {
            fx.WriteSpill: self._write,
            fx.ReadSpill: self._read,
            fx.LendSpilled: self._lend,
            fx.DiscardSpilled: lambda effect: files.discard(effect.segment, effect.position, effect.size, effect.last),
        }
        raylet.loop.watch(files.fileno(), lambda event: self._ended())

    def close(self) -> None:
        """Close the files; before the arena goes."""
        self._files.close()

    def _write(self, effect: fx.WriteSpill) -> None:
        pieces = [(piece.offset, piece.size, piece.position) for piece in effect.pieces]
        self._files.write(effect.segment, pieces)
        self._keep_looking()

    def _read(self, effect: fx.ReadSpill) -> None:
        piece = effect.piece
        self._files.read(effect.id, effect.segment, piece.offset, piece.size, piece.position)
        self._keep_looking()

    def _lend(self, effect: fx.LendSpilled) -> None:
        path = self._files.path(effect.segment)
        self._raylet.router.send(effect.proc, m.OnDisk(effect.id, path, effect.position, effect.size))

    def _ended(self) -> None:
        raylet = self._raylet
        now = raylet.loop.now
        for ident, error in self._files.reports():
            raylet.apply(raylet.store.restored(now, ident, error) if ident else raylet.store.spilled(now, error))
        if self._what:
            self._look()

    def _keep_looking(self) -> None:
        if not self._looking and self._patience:
            self._looking = True
            loop = self._raylet.loop
            loop.call_at(loop.now + self._raylet.seat.config.tick, self._tick)

    def _tick(self) -> None:
        self._looking = False
        self._look()
        if self._files.busy:
            self._keep_looking()

    def _look(self) -> None:
        """Tell the store what does not move; people, when that begins and when it is over."""
        raylet, directory = self._raylet, self._files.directory
        stuck, still = self._files.stuck(self._patience)
        if stuck and not self._what:
            self._since = time.time() - still
            self._what = f"{directory} has not answered since {time.strftime('%H:%M:%S', time.localtime(self._since))}"
            raylet.say(
                f"objects are spilled to disk, and {self._what} ({still:.0f} s); until it does, what does not fit into "
                "memory fails, and the rest goes on; hint: look at that disk or file server, or name another "
                "directory by HPCRAY_SPILL_DIR"
            )
        elif not stuck and self._what:
            self._what = ""
            raylet.say(f"{directory} answers again, after {time.time() - self._since:.0f} s; spilling goes on")
        elif not stuck:
            return
        raylet.apply(raylet.store.stalled(raylet.loop.now, stuck, self._what))
