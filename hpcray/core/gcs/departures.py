"""Nodes that leave a running job in good order: first they get no more work, then their objects go elsewhere, then they
are gone. What is not done by the deadline is made again elsewhere, as after a node's death.

Objects go in two ways. Their owners on other nodes copy them; of those that processes of the leaving node own, each
borrower has its own node keep a copy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Union

from hpcray.common.ids import raylet_of
from hpcray.core.effects import Effect, Send
from hpcray.protocol import messages as m

FINISHING, EVACUATING, GONE = "finishing", "evacuating", "gone"
DEPARTURE_TRANSITIONS: dict[str, tuple[str, ...]] = {
    # It starts nothing new; its tasks end.
    FINISHING: (EVACUATING, GONE),
    # The owners of its objects have them copied to other nodes, and the borrowers of its processes keep copies.
    EVACUATING: (GONE,),
    # It is declared dead; it ends when it reads that.
    GONE: (),
}
"""States of a node that leaves."""
EVACUATION_SHARE = 0.5
"""Share of the time that is left for the objects when the tasks have ended, or must end."""
MOST_TARGETS = 64
"""Nodes among which the owners on one node choose for their objects. Those on another node choose among others."""


@dataclass(slots=True, frozen=True)
class NodeLeft:
    """A node has nothing that the job needs: declare it dead. kept_at: nodes that keep objects of its processes."""

    node: int
    reason: str
    kept_at: tuple[int, ...] = ()


@dataclass(slots=True, frozen=True)
class LeavingChanged:
    """These nodes are about to leave, by their deadlines: place nothing there."""

    deadlines: dict[int, float]


DepartureEvent = Union[NodeLeft, LeavingChanged]


@dataclass(slots=True)
class _Departure:
    reason: str
    deadline: float
    evacuate_at: float
    state: str = FINISHING
    awaited: set[int] = field(default_factory=set)
    kept_at: tuple[int, ...] = ()
    askers: list[tuple[bytes, int]] = field(default_factory=list)


class DepartureManager:
    """The head's side."""

    def __init__(self) -> None:
        self._leaving: dict[int, _Departure] = {}

    def leaving(self) -> dict[int, float]:
        """The nodes that leave, and by when."""
        return {node: departure.deadline for node, departure in self._leaving.items()}

    def request(
        self, now: float, node: int, reason: str, seconds: float, asker: tuple[bytes, int] | None = None
    ) -> list[Effect | DepartureEvent]:
        """Have a living node leave within `seconds`.

        Args:
            asker: a process, and the number of its request: it gets a GcsReply when the node is gone.
        """
        departure = self._leaving.get(node)
        if departure is not None:
            if asker is not None:
                departure.askers.append(asker)
            departure.deadline = min(departure.deadline, now + seconds)
            departure.evacuate_at = min(departure.evacuate_at, now + seconds * (1 - EVACUATION_SHARE))
            return []
        departure = _Departure(reason, now + seconds, now + seconds * (1 - EVACUATION_SHARE))
        departure.askers += [] if asker is None else [asker]
        self._leaving[node] = departure
        return [Send(raylet_of(node), m.Leave(seconds)), LeavingChanged(self.leaving())]

    def finished(self, node: int, living: Iterable[int]) -> list[Effect | DepartureEvent]:
        """A node that leaves has no task any more. living: all nodes that are in and live, it included."""
        departure = self._leaving.get(node)
        return [] if departure is None or departure.state != FINISHING else self._evacuate(node, living)

    def evacuated(self, sender: int, node: int, kept_at: Iterable[int] = ()) -> list[Effect | DepartureEvent]:
        """No process of `sender` owns an object that only `node` has; or, of `node` itself, one that others need."""
        departure = self._leaving.get(node)
        if departure is not None:
            departure.kept_at = tuple(sorted({*departure.kept_at, *kept_at}))
        if departure is None or departure.state != EVACUATING:
            return []
        departure.awaited.discard(sender)
        return [] if departure.awaited else self._leave(node)

    def node_died(self, node: int) -> list[Effect | DepartureEvent]:
        """A node is dead: one that was to leave, or one that others waited for."""
        out: list[Effect | DepartureEvent] = []
        departure = self._leaving.pop(node, None)
        if departure is not None:
            out += [Send(proc, m.GcsReply(number, True, b"\xc0")) for proc, number in departure.askers]
            out.append(LeavingChanged(self.leaving()))
        for other in list(self._leaving):
            out += self.evacuated(node, other)
        return out

    def tick(self, now: float, living: Iterable[int]) -> list[Effect | DepartureEvent]:
        """Look at the deadlines."""
        out: list[Effect | DepartureEvent] = []
        for node, departure in list(self._leaving.items()):
            if departure.state == FINISHING and now >= departure.evacuate_at:
                out += self._evacuate(node, living)
            if departure.state == EVACUATING and now >= departure.deadline:
                out += self._leave(node)
        return out

    def _evacuate(self, node: int, living: Iterable[int]) -> list[Effect | DepartureEvent]:
        departure = self._leaving[node]
        self._set_state(departure, EVACUATING)
        others = [other for other in living if other != node]
        targets = [other for other in others if other not in self._leaving]
        if not targets:
            return self._leave(node)
        departure.awaited = {*others, node}
        return [
            Send(raylet_of(one), m.Evacuate(node, _some(targets, place))) for place, one in enumerate([*others, node])
        ]

    def _leave(self, node: int) -> list[Effect | DepartureEvent]:
        departure = self._leaving[node]
        self._set_state(departure, GONE)
        return [NodeLeft(node, departure.reason, departure.kept_at)]

    def _set_state(self, departure: _Departure, state: str) -> None:
        assert state in DEPARTURE_TRANSITIONS[departure.state], f"a node that leaves: {departure.state} -> {state}"
        departure.state = state

    def check_invariants(self) -> None:
        """Check that every node that leaves waits for something."""
        for node, departure in self._leaving.items():
            assert departure.evacuate_at <= departure.deadline
            assert departure.state != EVACUATING or departure.awaited, f"node {node} waits for no answer"


def _some(targets: list[int], place: int) -> list[int]:
    """At most `MOST_TARGETS` of the targets; for each place others, in turn."""
    if len(targets) <= MOST_TARGETS:
        return targets
    begin = place * MOST_TARGETS % len(targets)
    found = targets[begin : begin + MOST_TARGETS]
    return found + targets[: MOST_TARGETS - len(found)]
