"""When the processes of the whole job collect cyclic garbage.

Python does not know what a ref or an actor handle in an unreachable cycle costs elsewhere: objects in stores, and the
resources of actors that can be called no more.
"""

from __future__ import annotations

import math

# ------------------------------------------------------------ throttler
# Limits on how often something is done.


class Throttler:
    """Lets through what is requested, at most every `min_interval`: a request that comes too early is kept until then.

    Args:
        min_interval: seconds between two.
        interval: after so many seconds without a request it is due all the same.
        now: when the first such interval begins.
    """

    def __init__(self, min_interval: float, interval: float = math.inf, now: float = 0.0) -> None:
        self._min_interval = min_interval
        self._interval = interval
        self._interval_began = now
        self._last = -math.inf
        self._requested = False

    def request(self) -> None:
        """Have it done as soon as it may be."""
        self._requested = True

    def due(self, now: float) -> bool:
        """True if it is to be done now, by the caller: the next one follows later."""
        wanted = self._requested or now - self._interval_began >= self._interval
        if not wanted or now - self._last < self._min_interval:
            return False
        self._last = self._interval_began = now
        self._requested = False
        return True


# ------------------------------------------------------------ garbage collection


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
