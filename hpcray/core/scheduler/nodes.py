"""One node as the head sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcray.base.bundle_names import CAPTURING, GROUP
from hpcray.base.labels import ACCELERATOR, NODE_ID
from hpcray.base.resources import Resources
from hpcray.wire.messages import NodeInfo, NodeView, Shape

ACCELERATOR_TYPE = "accelerator_type:"
Request = tuple[tuple[str, int], ...]


@dataclass(slots=True, eq=False)
class NodeState:
    """One live node: `available` is its last view minus what the head promised since.

    `soft` counts actors that were placed by a request they do not hold (a default actor is placed by one CPU and holds
    none); it ranks nodes for actors, and blocks nothing. `shunned`: requests it refused, until its views (`said`) show
    more than before, or the next tick. `total` includes what bundles of placement groups have here; `in_bundles`: what
    is free in them. `lasting`: what actors and bundles hold, which no patience will free. `turn`: when it was chosen
    last, as a count of choices.
    """

    info: NodeInfo
    available: Resources
    version: int = 0
    said: Resources = field(default_factory=dict)
    soft: Resources = field(default_factory=dict)
    shunned: set[Request] = field(default_factory=set)
    total: Resources = field(init=False)
    in_bundles: Resources = field(default_factory=dict)
    lasting: Resources = field(default_factory=dict)
    labels: dict[str, str] = field(init=False)
    turn: int = 0

    def __post_init__(self) -> None:
        self.total = dict(self.info.total)
        self.labels = node_labels(self.info)

    @property
    def index(self) -> int:
        return self.info.index

    def fits(self, shape: Shape) -> bool:
        """Whether the node seems to have room for one more."""
        if shape.resources in self.shunned:
            return False
        free = self.free(shape)
        return all(free.get(name, 0) >= units for name, units in shape.resources)

    def free(self, shape: Shape) -> Resources:
        """The books that a shape is about: the node's, or those of its placement groups."""
        return self.in_bundles if shape.strategy in (GROUP, CAPTURING) else self.available

    def reachable(self) -> Resources:
        """What would be free if all but actors and bundles ended."""
        return {name: units - self.lasting.get(name, 0) for name, units in self.info.total.items()}

    def capacity(self, shape: Shape) -> int:
        """How many would run at once if the node were empty (at least 1 for an empty request)."""
        total = self.total
        return min((total.get(name, 0) // units for name, units in shape.resources if units), default=1)

    def utilisation(self, shape: Shape, soft: bool = False) -> float:
        """The largest used share among the requested resources and CPU; `soft` counts soft actors too."""
        worst = 0.0
        books = self.free(shape)
        names = {name for name, _ in shape.resources}
        for name in names if books is self.in_bundles else {"CPU", *names}:
            total = self.total.get(name, 0)
            if total:
                free = books.get(name, 0) - (self.soft.get(name, 0) if soft else 0)
                worst = max(worst, 1.0 - free / total)
        return worst

    def update(self, view: NodeView) -> bool:
        """Take in a view, which says what has changed; whether the node has more of anything than we thought."""
        self.version = view.version
        available, said = self.available, self.said
        more = room = news = False
        for name, units in view.available.items():
            more = more or units > available.get(name, 0)
            news = news or units > said.get(name, 0)
            available[name] = said[name] = units
        for name, units in view.bundles.items():
            if name in self.total:  # not of a group that is removed
                room = room or units > self.in_bundles.get(name, 0)
                self.in_bundles[name] = units
        self.lasting.update(view.lasting)
        # A node that refuses for want of workers keeps saying that it has room: only news make it worth asking again.
        if self.shunned and (room or news):
            self.shunned.clear()
            return True
        return more or room


def joined(earlier: NodeView | None, view: NodeView) -> NodeView:
    """One view that says what two say, one after the other."""
    if earlier is None:
        return view
    return NodeView(
        view.node,
        view.version,
        {**earlier.available, **view.available},
        {**earlier.bundles, **view.bundles},
        {**earlier.lasting, **view.lasting},
    )


def node_labels(info: NodeInfo) -> dict[str, str]:
    """Labels of a node, those that every node has included."""
    labels = {NODE_ID: info.node_id}
    for name in info.total:
        if name.startswith(ACCELERATOR_TYPE):
            labels[ACCELERATOR] = name.removeprefix(ACCELERATOR_TYPE)
    return {**labels, **info.labels}
