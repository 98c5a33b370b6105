"""A raylet's disk: carries out what its store decides about spilling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcray.core import effects as fx
from hpcray.host.spill_files import SpillFiles
from hpcray.wire import messages as m

if TYPE_CHECKING:
    from hpcray.runtime.raylet import Raylet


class Spilling:
    """Joins the store of a raylet to its spill files.

    Args:
        raylet: gets the carriers for the store's effects; its loop tells the store what has ended.
        files: closed with `close`.
    """

    def __init__(self, raylet: Raylet, files: SpillFiles) -> None:
        self._raylet = raylet
        self._files = files
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

    def _read(self, effect: fx.ReadSpill) -> None:
        piece = effect.piece
        self._files.read(effect.id, effect.segment, piece.offset, piece.size, piece.position)

    def _lend(self, effect: fx.LendSpilled) -> None:
        path = self._files.path(effect.segment)
        self._raylet.router.send(effect.proc, m.OnDisk(effect.id, path, effect.position, effect.size))

    def _ended(self) -> None:
        raylet = self._raylet
        now = raylet.loop.now
        for ident, error in self._files.reports():
            raylet.apply(raylet.store.restored(now, ident, error) if ident else raylet.store.spilled(now, error))
