"""For how long a wait polls before it sleeps (docs/decisions/0010-spinning.md)."""

from __future__ import annotations

import os

_MIN_WINDOW = 20e-6
"""Seconds: the window (how long a wait stays awake now) is 0, or between this and the limit."""
PREEMPTED = 50e-6
"""Seconds: if more than this was between two polls, another thread or process had the processor."""
SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.25
"""Seconds without polling after that, or when it was in vain until the window was 0. They double each time."""
PAUSE_DECAY = 0.9
"""The share of them that is left after a wait that polling has cut short."""


class SpinWindow:
    """Base class of what waits. A short sleep opens the window, a wait that polled in vain narrows it.

    Args:
        limit: seconds, the longest window; 0: none at all.
    """

    __slots__ = ("_limit", "_not_before", "_pause", "_window")

    def __init__(self, limit: float) -> None:
        self._limit = limit if len(os.sched_getaffinity(0)) > 1 else 0.0
        self._window = self._not_before = 0.0
        self._pause = SHORTEST_PAUSE

    def _narrow(self, window: float, now: float) -> None:
        if window < _MIN_WINDOW:
            window = 0.0
            self._not_before = now + self._pause
            self._pause = min(_LONGEST_PAUSE, self._pause * 2)
        self._window = window
