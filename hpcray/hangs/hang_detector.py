"""When a job is taken for hung: the states of the watch, without a clock, a thread or a message.

Certain hangs: a circle of waits that two looks have found, at least `SECOND_LOOK` seconds apart, without a change in
between. Likely hangs: nothing in the job has gone on for `seconds`, and nothing in it may go on by itself. The time in
which a process is stopped does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcray.hangs.wait_for_graph import Circle

SECOND_LOOK = 5.0
"""Seconds between the two looks that make a circle certain."""
SHORTEST_PERIOD = 4.0
_LONGEST_PERIOD = 60.0
_SHARE = 0.001
"""Share of a core that looks may cost."""


@dataclass(frozen=True)
class CircleLook:
    """The result of one look for certain hangs.

    Attributes:
        circle: None: there is none. stamps: of the processes of the circle, what changes when they do anything.
        doubt: why it may end all the same; "": it cannot.
    """

    circle: Circle | None
    stamps: tuple[tuple[bytes, int], ...] = ()
    doubt: str = ""


class CircleDetector:
    """Decides when a circle is certain."""

    def __init__(self) -> None:
        self._first: CircleLook | None = None
        self._since = 0.0

    def looked(self, now: float, look: CircleLook) -> Circle | None:
        """Take a look in. Returns the circle that is to be ended, if it is certain now."""
        if look.circle is None or look.doubt:
            self._first = None
            return None
        first = self._first
        known = first is not None and first.circle is not None and look.circle.same_as(first.circle)
        if first is None or not known or look.stamps != first.stamps:
            self._first, self._since = look, now
            return None
        if now - self._since < SECOND_LOOK:
            return None
        self._first = None
        return look.circle

    def period(self, cost: float) -> float:
        """Return after how many seconds to look again. cost: CPU seconds of the last look."""
        if self._first is not None:
            return SECOND_LOOK
        return min(_LONGEST_PERIOD, max(SHORTEST_PERIOD, cost / _SHARE))
