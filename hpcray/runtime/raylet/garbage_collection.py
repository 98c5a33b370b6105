"""When the processes of one node collect cyclic garbage (`core.gcs.garbage_collection` says why)."""

from __future__ import annotations

from collections.abc import Iterable

from hpcray.common.config import Config
from hpcray.common.ids import HEAD
from hpcray.core.gcs.garbage_collection import Throttler
from hpcray.protocol import messages as m
from hpcray.runtime.raylet.event_loop import EventLoop
from hpcray.runtime.raylet.router import Router

_REQUEST_INTERVAL = 1.0
"""Seconds between two requests of one node to the GCS, which collects much less often."""


class NodeGarbageCollection:
    """Has the processes of this node collect: periodically, when its store is full, and when the GCS says so."""

    def __init__(self, config: Config, loop: EventLoop, router: Router) -> None:
        self._loop = loop
        self._router = router
        self._throttler = Throttler(config.gc_min_interval, config.gc_interval, loop.now)
        self._to_gcs = Throttler(_REQUEST_INTERVAL)
        self._shortages = 0

    def note_shortages(self, count: int) -> None:
        """Collect if more requests than before have found no room in the store: the owners of the objects in it may be
        anywhere.

        Args:
            count: such requests so far.
        """
        if count != self._shortages:
            self._shortages = count
            self._throttler.request()
            self._to_gcs.request()
            self.tick()

    def tick(self) -> None:
        """Send the messages that are due."""
        now = self._loop.now
        if self._to_gcs.due(now):
            self._router.send(HEAD, m.RequestGarbageCollection())
        if self._throttler.due(now):
            for proc in self._router.links:
                self._router.send(proc, m.CollectGarbage())

    def on_collect(self, now: float, src: bytes, msg: m.CollectGarbage) -> Iterable[object]:
        """The GCS has all processes of the job collect."""
        self._throttler.request()
        self.tick()
        return ()
