"""One placement group as the head knows it, and what people are told of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcray.base.labels import show_strategy
from hpcray.base.resources import Resources, add
from hpcray.core.scheduler.placement import ClusterView
from hpcray.core.scheduler.planning import STRICT_PACK, STRICT_SPREAD, Plan
from hpcray.core.scheduler.telling import REPORT_AFTER, describe, show
from hpcray.wire import messages as m

PENDING = "PENDING"


@dataclass(slots=True, eq=False)
class Group:
    """One placement group.

    Attributes:
        nodes: of each bundle, -1 where it has none.
        chosen, awaited: the attempt under way: which bundle shall go where, and which nodes have not answered.
        queued: seconds that the attempt's nodes may wait for room; 0 for one that must fit at once.
        patience, rests_until: of its next attempt that may queue.
        avoid: nodes that refused since the last tick.
    """

    spec: m.GroupSpec
    state: str = PENDING
    nodes: list[int] = field(default_factory=list)
    chosen: Plan = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    attempt: int = 0
    asked_at: float = 0.0
    queued: float = 0.0
    patience: float = 0.0
    rests_until: float = 0.0
    avoid: set[int] = field(default_factory=set)
    watchers: set[bytes] = field(default_factory=set)
    since: float = 0.0
    told: float = 0.0
    warned: bool = False
    reason: str = ""

    @property
    def key(self) -> str:
        return self.spec.group.hex()

    def title(self) -> str:
        name = f" {self.spec.name!r}" if self.spec.name else ""
        return f"placement group{name} {self.key}"

    def here(self, node: int) -> dict[int, Resources]:
        """What an attempt asks of one node."""
        return {index: self.spec.bundles[index] for index, at in sorted(self.chosen.items()) if at == node}

    def missing(self) -> dict[int, Resources]:
        """The bundles that have no place, by index."""
        return {index: self.spec.bundles[index] for index, node in enumerate(self.nodes) if node < 0}

    def used(self) -> dict[int, int]:
        """How many bundles are on which node."""
        used: dict[int, int] = {}
        for node in self.nodes:
            if node >= 0:
                used[node] = used.get(node, 0) + 1
        return used


class GroupTexts:
    """Why a group waits."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view

    def why_never(self, group: Group) -> str:
        """There is no place for it."""
        hint = "ask for less, or start nodes that have it"
        if group.spec.strategy == STRICT_SPREAD and len(group.spec.bundles) > len(self._view.nodes):
            hint = f"there are {len(self._view.nodes)} nodes for {len(group.spec.bundles)} bundles: use SPREAD"
        elif group.spec.strategy == STRICT_PACK:
            hint = "use PACK where it need not be one node"
        there = describe(self._view.nodes, labels=any(group.spec.selectors))
        return (
            f"{_asks(group)}, for which there is no place even when all else has ended. What there is: "
            f"{there}. hint: {hint}; it waits"
        )

    def why_waiting(self, group: Group) -> str:
        """Others hold what it needs."""
        about: Resources = {}
        for amounts in group.spec.bundles:
            add(about, amounts)
        return (
            f"{_asks(group)} and has waited for {REPORT_AFTER:g} s, while others hold what it needs. Free now: "
            f"{self._view.describe(about)}. hint: wait, or hold less (actors and other groups keep theirs for life)"
        )


def _asks(group: Group) -> str:
    kinds: dict[str, int] = {}
    for index, amounts in enumerate(group.spec.bundles):
        text = show(amounts)
        if group.spec.selectors and group.spec.selectors[index]:
            text += f" with {show_strategy(group.spec.selectors[index])}"
        kinds[text] = kinds.get(text, 0) + 1
    bundles = ", ".join(text if count == 1 else f"{count} x {text}" for text, count in kinds.items())
    return f"{group.title()} asks for {bundles} ({group.spec.strategy})"
