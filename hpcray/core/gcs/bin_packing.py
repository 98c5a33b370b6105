"""Waiting requests packed into nodes: those that there are, those that are on their way, and further ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hpcray.common.resources import IMPLICIT, UNIT, Resources, add
from hpcray.core.gcs.node_types import NodeType, allows
from hpcray.core.gcs.placement_group_scheduler import STRICT_PACK, STRICT_SPREAD
from hpcray.protocol.messages import GroupSpec, Shape

_ACCELERATOR = "GPU"


@dataclass(slots=True)
class Demand:
    """Equal requests that wait.

    Attributes:
        apart: requests with the same word must be on different nodes; "": they may share one.
    """

    shape: Shape
    count: int
    apart: str = ""


@dataclass(slots=True, eq=False)
class Bin:
    """Room that a node has left.

    Attributes:
        used: whether anything was packed into it.
    """

    free: Resources
    labels: Mapping[str, str]
    used: bool = False
    _apart: set[str] = field(default_factory=set)

    def take(self, demand: Demand, count: int) -> int:
        """Pack as many of `count` as fit. Returns how many."""
        if demand.apart:
            count = 0 if demand.apart in self._apart else min(count, 1)
        if not count or not allows(self.labels, demand.shape.strategy):
            return 0
        for name, units in demand.shape.resources:
            if units:
                count = min(count, max(0, self.free.get(name, _unknown(name))) // units)
        if count:
            self.used = True
            self._apart.add(demand.apart)
            for name, units in demand.shape.resources:
                self.free[name] = self.free.get(name, _unknown(name)) - units * count
        return count


def _unknown(name: str) -> int:
    return UNIT if name.startswith(IMPLICIT) else 0


def group_demands(spec: GroupSpec, bundles: Mapping[int, Resources]) -> list[Demand]:
    """Bundles of a placement group as demands. PACK and SPREAD are preferences, and make no difference."""
    counts: dict[Shape, int] = {}
    if spec.strategy == STRICT_PACK:
        whole: Resources = {}
        for amounts in bundles.values():
            add(whole, amounts)
        selectors = [spec.selectors[index] for index in bundles if spec.selectors and spec.selectors[index]]
        counts[Shape(tuple(sorted(whole.items())), next(iter(selectors), ""))] = 1
    else:
        for index, amounts in bundles.items():
            shape = Shape(tuple(sorted(amounts.items())), spec.selectors[index] if spec.selectors else "")
            counts[shape] = counts.get(shape, 0) + 1
    apart = spec.group.hex() if spec.strategy == STRICT_SPREAD else ""
    return [Demand(shape, count, apart) for shape, count in counts.items()]


def pack(demands: Iterable[Demand], bins: Sequence[Bin]) -> list[Demand]:
    """Pack requests into nodes, the first that have room, and return what is left. Large requests go first."""
    left = []
    for demand in sorted(demands, key=_size, reverse=True):
        count = demand.count
        for node in bins:
            if not count:
                break
            count -= node.take(demand, count)
        if count:
            left.append(Demand(demand.shape, count, demand.apart))
    return left


def _size(demand: Demand) -> tuple[bool, int, int]:
    resources = dict(demand.shape.resources)
    return _ACCELERATOR in resources, len(resources), sum(resources.values())


def choose_types(
    demands: Sequence[Demand], room: Mapping[str, int], types: Mapping[str, NodeType], most: int
) -> list[str]:
    """The types of further nodes for what is left: again and again the type that it fills best.

    Args:
        demands: what fits on no node that there is or that will come.
        room: how many more there may be of each type.
        most: how many in all.
    """
    left, chosen, room = list(demands), list[str](), dict(room)
    while left and len(chosen) < most:
        best: tuple[tuple[bool, float, float], str, list[Demand]] | None = None
        for name, node_type in types.items():
            if room.get(name, 0) <= 0:
                continue
            node = Bin(dict(node_type.resources), node_type.all_labels)
            after = pack(left, [node])
            if node.used:
                score = _score(node_type, node.free, left, after)
                if best is None or score > best[0]:
                    best = score, name, after
        if best is None:
            break
        chosen.append(best[1])
        room[best[1]] -= 1
        left = best[2]
    return chosen


def _score(
    node_type: NodeType, free: Mapping[str, int], before: Sequence[Demand], after: Sequence[Demand]
) -> tuple[bool, float, float]:
    """How well a node is used: GPUs are not for those who ask for none; then the least and the mean used share."""
    shares = {
        name: 1 - free.get(name, 0) / units
        for name, units in node_type.resources.items()
        if units and name not in ("memory", "object_store_memory")
    }
    wasted = _ACCELERATOR in node_type.resources and not shares.get(_ACCELERATOR)
    values = list(shares.values()) or [0.0]
    return not wasted, min(values), sum(values) / len(values)
