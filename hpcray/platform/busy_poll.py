"""A wait for sockets that polls for a short time before it sleeps (docs/decisions/0010-spinning.md)."""

from __future__ import annotations

import select
from time import monotonic

from hpcray.platform.spin_window import PAUSE_DECAY, PREEMPTED, SHORTEST_PAUSE, SpinWindow


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
