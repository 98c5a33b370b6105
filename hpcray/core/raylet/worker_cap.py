"""How many tasks of one kind run at once although those that run have lent their CPUs.

A task that waits in `get` lends its CPU, and the next one of its kind may wait for the same: without a limit ten
thousand tasks that call `get` become ten thousand processes. So a request that has as many leases as the node has CPUs
for gets further ones after 1 s, 2 s, 4 s, … as in Ray. Each process's request counts alone: the tasks for which others
wait, which are those of another process, are not held back.
"""

from __future__ import annotations

from hpcray.core.raylet.lease_requests import NEVER, LeaseRequest

_MOST_DOUBLINGS = 30


class WorkerCap:
    """Requests that are held back, and until when.

    Args:
        initial: seconds until the first lease above the capacity; the next waits twice as long. 0: no request is ever
            held back.
        longest: seconds that one waits at most.
    """

    def __init__(self, initial: float, longest: float) -> None:
        self._initial = initial
        self._longest = max(initial, longest)
        self._held: dict[int, LeaseRequest] = {}
        self._news: list[tuple[LeaseRequest, float]] = []

    def is_due(self, now: float, request: LeaseRequest) -> bool:
        """True if a request at or above its capacity may have one more lease."""
        if not self._initial:
            return True
        if request.admit_at == NEVER:
            wait = min(self._longest, self._initial * 2 ** min(request.live - request.capacity, _MOST_DOUBLINGS))
            request.admit_at = now + wait
            self._news.append((request, wait))
        return now >= request.admit_at

    def hold(self, request: LeaseRequest) -> None:
        """Hold the request back; nothing of it is servable until `released` returns it."""
        request.capped = True
        self._held[id(request)] = request

    def released(self, now: float) -> list[LeaseRequest]:
        """The requests that are held back no more: their time has come, or they have ended leases."""
        found = [one for one in self._held.values() if now >= one.admit_at or one.live < one.capacity]
        for request in found:
            del self._held[id(request)]
            request.capped = False
            if request.live < request.capacity:
                request.admit_at = NEVER
        return found

    def release_all(self) -> list[LeaseRequest]:
        """All requests that are held back; none is any more."""
        found = list(self._held.values())
        self._held.clear()
        for request in found:
            request.capped = False
        return found

    def take_news(self) -> list[tuple[LeaseRequest, bool, float]]:
        """The requests that began to wait since the last call: whether for the longest time, and the seconds."""
        if not self._news:
            return []
        news = [(request, wait >= self._longest, wait) for request, wait in self._news]
        self._news.clear()
        return news
