"""Virtual time and a network whose delays a test chooses: per pair of processes first in, first out."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

MOST_EVENTS = 200_000


class SimNet:
    """Events in virtual time. `delays` (seconds) are used up in turn, again and again.

    Attributes:
        sent: messages so far. events: what has happened so far.
    """

    def __init__(self, delays: Sequence[float]) -> None:
        self.now = 0.0
        self._delays = list(delays) or [0.001]
        self._next = 0
        self._events: list[tuple[float, int, Callable[[], Any]]] = []
        self._serial = 0
        self._last: dict[tuple[bytes, bytes], float] = {}
        self.sent = self.events = 0
        self.most_events = MOST_EVENTS

    def delay(self) -> float:
        """The next delay of the test's choice."""
        self._next += 1
        return self._delays[self._next % len(self._delays)]

    def after(self, seconds: float, what: Callable[[], Any]) -> None:
        """Call `what` then."""
        self._at(self.now + seconds, what)

    def send(self, src: bytes, dest: bytes, deliver: Callable[[], Any]) -> None:
        """Deliver after a delay, never before an earlier message of the same pair."""
        when = max(self.now + self.delay(), self._last.get((src, dest), 0.0))
        self._last[src, dest] = when
        self.sent += 1
        self._at(when, deliver)

    def run(self, until: float, done: Callable[[], bool], check: Callable[[], None]) -> bool:
        """Run events until `done` or virtual time `until`; whether `done`."""
        for _ in range(self.most_events):
            if done():
                return True
            if not self._events:
                return False
            if self._events[0][0] > until:
                self.now = until
                return False
            self.now, _, what = heapq.heappop(self._events)
            what()
            self.events += 1
            check()
        raise AssertionError(f"livelock: {self.most_events} events up to t={self.now}")

    def _at(self, when: float, what: Callable[[], Any]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (when, self._serial, what))
