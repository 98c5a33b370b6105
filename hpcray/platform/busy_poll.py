"""A wait for sockets that polls for a short time before it sleeps (docs/decisions/0010-spinning.md)."""

from __future__ import annotations

import os
import select
from time import monotonic

# ------------------------------------------------------------ spin window
# For how long a wait polls before it sleeps (docs/decisions/0010-spinning.md).


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


# ------------------------------------------------------------ busy poll


class BusyPoll(SpinWindow):
    """`epoll.poll` that stays awake for a short while first, if its last waits were short.

    To be woken costs 20 to 100 us, to be answered 17 to 25: a wait that was answered quickly of late stays awake.

    Args:
        epoll: what to look at.
        limit: seconds, the longest time awake; 0: none at all.
    """

    __slots__ = ("_epoll",)

    def __init__(self, epoll: select.epoll, limit: float) -> None:
        super().__init__(limit)
        self._epoll = epoll

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        """Return what is ready, after at most `timeout` seconds (and the limit); negative: without end."""
        look = self._epoll.poll
        window = self._window
        began = now = monotonic()
        if window and not 0.0 <= timeout < window:
            end = began + window
            while now < end:
                events = look(0)
                before, now = now, monotonic()
                if now - before > PREEMPTED:
                    self._narrow(0.0, now)
                    return events or look(timeout)
                if events:
                    self._window = self._limit
                    self._pause = max(SHORTEST_PAUSE, self._pause * PAUSE_DECAY)
                    return events
            self._narrow(window / 2, now)
            return look(timeout)
        events = look(timeout)
        if events and not window and began >= self._not_before and monotonic() - began < self._limit:
            self._window = self._limit
        return events

    def arm(self, fd: int, again: bool) -> None:
        """Report a descriptor that is readable: once, as it may stay so for a while, and once more for each call."""
        (self._epoll.modify if again else self._epoll.register)(fd, select.EPOLLIN | select.EPOLLONESHOT)

    def stop(self) -> None:
        """Sleep at once from now on: the user's code runs in other threads, which need the interpreter."""
        self._limit = self._window = 0.0
