"""Limits on how often something is done."""

from __future__ import annotations

import math


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
