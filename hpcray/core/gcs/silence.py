"""Who has been silent for too long, and whose word counts when a wire between two nodes breaks. Pure: time comes in.

A process that did not run itself (stopped, swapped out, on a machine with far more work than cores) finds everybody
silent when it wakes. So whoever looks notes when it last looked: time in which it did not look is nobody's silence.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

_MISSED = 2.0
"""Looks that come this many periods late mean that the looker itself stood still."""
SUSPECT_AT = 0.5
"""A node is suspected from this share of the timeout on."""
_GRACE = 2.0
"""Periods that a node has, after another could not reach it, to be found dead in the usual ways."""


class Silence:
    """When each node was last heard of.

    Args:
        period: seconds between two heartbeats, and between two looks.
        timeout: seconds of silence that mean death.
    """

    def __init__(self, period: float, timeout: float) -> None:
        self._period = period
        self._timeout = timeout
        self._heard: dict[int, float] = {}
        self._looked: float | None = None

    def begin(self, now: float, nodes: Iterable[int]) -> None:
        """From now on these are expected to be heard of."""
        self._heard = dict.fromkeys(nodes, now)
        self._looked = now

    def expect(self, now: float, node: int) -> None:
        """From now on this one is expected to be heard of, if it was not before."""
        self._heard.setdefault(node, now)

    def expected(self) -> list[int]:
        """Who is expected to be heard of."""
        return list(self._heard)

    def since(self, node: int) -> float:
        """When an expected node was last heard of, or expected first."""
        return self._heard[node]

    def heard(self, now: float, node: int) -> None:
        """Something of this node arrived."""
        if now > self._heard.get(node, now):
            self._heard[node] = now

    def forget(self, node: int) -> None:
        """It is dead: it is not expected any more."""
        self._heard.pop(node, None)

    def look(self, now: float) -> list[tuple[int, float]]:
        """The nodes that have been silent for longer than the timeout, and for how long."""
        missed = now - (now if self._looked is None else self._looked) - self._period
        self._looked = now
        if missed > (_MISSED - 1.0) * self._period:
            self._heard = {node: min(now, when + missed) for node, when in self._heard.items()}
        return [(node, now - when) for node, when in self._heard.items() if now - when > self._timeout]

    def suspects(self, now: float) -> dict[int, float]:
        """Nodes that may be dying, and the seconds of their silence."""
        limit = SUSPECT_AT * self._timeout
        return {node: now - when for node, when in self._heard.items() if now - when > limit}


class Unanswered:
    """Other nodes to which this one has spoken, and from which nothing has come since: perhaps the way there is cut.

    Nobody but the two can notice that: the head hears both. What was said need not want an answer, so a node that is
    silent for a period after it is asked whether it lives, and is accused when it has not answered that in time.

    Args:
        period: seconds between two looks, with which `tick` is called.
        timeout: seconds that a node has to answer.
    """

    def __init__(self, period: float, timeout: float) -> None:
        self._silence = Silence(period, timeout)
        self._spoken: dict[int, float] = {}

    def tick(
        self, now: float, spoken: Iterable[int], heard: Mapping[int, float], dead: Container[int] = ()
    ) -> tuple[list[int], list[tuple[int, float]]]:
        """A look.

        Args:
            spoken: the nodes to which something was sent since the last look. heard: when each was last heard of.

        Returns:
            Nodes to ask whether they live; nodes to accuse, with the seconds since they were asked first.
        """
        silence = self._silence
        for node in silence.expected():
            if node in dead or heard.get(node, 0.0) > silence.since(node):
                silence.forget(node)
        accused = silence.look(now)
        for node, when in self._spoken.items():
            if node not in dead and heard.get(node, 0.0) <= when:
                silence.expect(now, node)
        self._spoken = dict.fromkeys(spoken, now)
        return sorted(silence.expected()), sorted(accused)


@dataclass(slots=True)
class _Complaint:
    since: float
    why: dict[int, str] = field(default_factory=dict)


class Complaints:
    """Nodes that another one, not the head, could not reach, though the head hears both.

    The two would never agree again about what the other has said, so one of them has to go. Usually the accused has
    died, and the head finds that out itself within a moment. Else it is the accused, unless its accuser accuses more
    nodes than accuse it: then the accuser's own wire is what broke.
    """

    def __init__(self, period: float) -> None:
        self._grace = _GRACE * period
        self._about: dict[int, _Complaint] = {}

    def add(self, now: float, accuser: int, accused: int, why: str) -> None:
        """`accuser` could not reach `accused`."""
        self._about.setdefault(accused, _Complaint(now)).why.setdefault(accuser, why)

    def forget(self, node: int) -> None:
        """It is dead: nothing about it, or by it, counts any more."""
        self._about.pop(node, None)
        for accused in list(self._about):
            complaint = self._about[accused]
            complaint.why.pop(node, None)
            if not complaint.why:
                del self._about[accused]

    def verdict(self, now: float) -> tuple[int, str] | None:
        """A node that has to go, and why; ask again when it has gone."""
        for accused, complaint in self._about.items():
            if now - complaint.since < self._grace:
                continue
            accuser = max(complaint.why, key=self._accuses)
            if self._accuses(accuser) > len(complaint.why):
                others = sorted(node for node, other in self._about.items() if accuser in other.why)
                return accuser, f"it cannot reach nodes {', '.join(map(str, others))}, which others can"
            return accused, f"node {accuser} cannot reach it: {complaint.why[accuser]}"
        return None

    def _accuses(self, node: int) -> int:
        return sum(node in complaint.why for complaint in self._about.values())
