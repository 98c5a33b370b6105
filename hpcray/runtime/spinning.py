"""Waiting for descriptors: a short while awake, then asleep.

To be woken costs more than to be answered: 20 to 100 us where the processor has gone to sleep meanwhile, and a peer of
this host answers within 30. So who was answered quickly of late stays awake for a while. An idle process sleeps at
once, and so does one that has to share its processor: the scheduler prefers who has slept to who was always awake.
`transport.base.Backoff` does the same for wires that have to be polled.
"""

from __future__ import annotations

import os
import select
from time import monotonic

_LEAST = 20e-6
"""Seconds: the window (how long a wait stays awake now) is 0, or between this and the limit."""
_ROBBED = 50e-6
"""Seconds: if more than this was between two looks, somebody else had the processor."""
_SHY = (0.001, 0.25)
"""Seconds without spinning after that, or when it was in vain until the window was 0: at first, and at most. They
double each time."""
_PAID = 0.9
"""What is left of them after a wait that spinning has cut short."""


class SpinningPoll:
    """`epoll.poll` that knows how long its last waits took.

    Args:
        epoll: what to look at.
        limit: seconds, the longest time awake; 0: none at all.
    """

    __slots__ = ("_epoll", "_limit", "_not_before", "_shy", "_window")

    def __init__(self, epoll: select.epoll, limit: float) -> None:
        self._epoll = epoll
        self._limit = limit if len(os.sched_getaffinity(0)) > 1 else 0.0
        self._window = 0.0
        self._not_before = 0.0
        self._shy = _SHY[0]

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        """What is ready, after at most `timeout` seconds (and the limit); negative: without end."""
        look = self._epoll.poll
        window = self._window
        began = now = monotonic()
        if window and not 0.0 <= timeout < window:
            end = began + window
            while now < end:
                events = look(0)
                before, now = now, monotonic()
                if now - before > _ROBBED:
                    self._narrow(0.0, now)
                    return events or look(timeout)
                if events:
                    self._window = self._limit
                    self._shy = max(_SHY[0], self._shy * _PAID)
                    return events
            self._narrow(window / 2, now)
            return look(timeout)
        events = look(timeout)
        if events and not window and began >= self._not_before and monotonic() - began < self._limit:
            self._window = self._limit
        return events

    def stop(self) -> None:
        """Sleep at once from now on: the user's code runs in other threads, which need the interpreter."""
        self._limit = self._window = 0.0

    def _narrow(self, window: float, now: float) -> None:
        if window < _LEAST:
            window = 0.0
            self._not_before = now + self._shy
            self._shy = min(_SHY[1], self._shy * 2)
        self._window = window
