"""When the processes of the whole job collect cyclic garbage.

Python does not know what a ref or an actor handle in an unreachable cycle costs elsewhere: objects in stores, and the
resources of actors that can be called no more.
"""

from __future__ import annotations

import math

from hpcray.core.throttler import Throttler

PATIENCE = 2.0
"""Seconds that a request for resources waits before garbage is looked for that may hold them."""


class GlobalGarbageCollection:
    """Collects on request, and while requests for resources wait: then at longer and longer intervals, since most jobs
    that wait have no garbage.

    Args:
        min_interval: seconds between two collections.
    """

    def __init__(self, min_interval: float) -> None:
        self._throttler = Throttler(min_interval)
        self._first_pause = self._pause = max(PATIENCE, min_interval)
        self._again_at = -math.inf

    def request(self) -> None:
        """Have all processes collect, as soon as they may."""
        self._throttler.request()

    def due(self, now: float, waited: float = 0.0) -> bool:
        """True if all processes are to collect now.

        Args:
            waited: for so many seconds a request for resources has waited.
        """
        if waited >= PATIENCE and now >= self._again_at:
            quiet = now - self._again_at >= self._pause
            self._pause = self._first_pause if quiet else 2 * self._pause
            self._again_at = now + self._pause
            self.request()
        return self._throttler.due(now)
