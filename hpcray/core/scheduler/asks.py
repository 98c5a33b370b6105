"""What one holder's class lacks, as the head knows it, and what is on its way there."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcray.core.scheduler.wants import near_node
from hpcray.wire.messages import Shape


@dataclass(slots=True)
class Flight:
    """A GrantFor whose effect no report shows yet. bound: it may queue at its node."""

    node: int
    count: int
    until: float
    bound: bool


@dataclass(slots=True, eq=False)
class Ask:
    """`began`: when it was first heard of. `hungry`: since when it has got nothing, as far as its reports show;
    reporting that begins a new wait. `parked`: the node where it queued last, `parked_at`: since when."""

    holder: bytes
    klass: int
    shape: Shape
    count: int = 0
    began: float = 0.0
    since: float = 0.0
    hungry: float = 0.0
    warned: bool = False
    parked: int = -1
    parked_at: float = 0.0
    near: int | None = None
    anywhere: Shape = field(init=False)
    flights: list[Flight] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.near = near_node(self.shape.strategy)
        self.anywhere = self.shape if self.near is None else Shape(self.shape.resources, "", self.shape.env)

    def open(self) -> int:
        """How many nobody was asked for."""
        return max(0, self.count - sum(flight.count for flight in self.flights))

    def land(self, count: int, node: int | None = None) -> None:
        """`count` of what is in flight (to `node`) has arrived or was refused; the oldest first."""
        for flight in self.flights:
            if node is None or flight.node == node:
                part = min(count, flight.count)
                flight.count -= part
                count -= part
        self.flights = [flight for flight in self.flights if flight.count]
