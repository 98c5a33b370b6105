"""The input of the autoscaler: requests of the job that wait, and the use of each node; and how they are packed into
nodes, those that there are, those that are on their way, and further ones. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from hpcray.common.labels import conditions, near_node, node_affinity, to_strategy
from hpcray.common.resources import IMPLICIT, UNIT, Resources, bundle_of, to_units
from hpcray.core.gcs.actor_manager import PENDING, RESTARTING, Actor, ActorManager
from hpcray.core.gcs.cluster_resources import ClusterResources
from hpcray.core.gcs.cluster_scheduler import ClusterScheduler
from hpcray.core.gcs.node_types import TYPE_LABEL, NodeType, allows
from hpcray.core.gcs.placement_group_manager import Demand, PlacementGroupManager, group_demands
from hpcray.core.gcs.query_service import hosts_of_actors, is_idle
from hpcray.protocol.messages import Shape

_ACCELERATOR = "GPU"


class NodeStatus(Struct, frozen=True):
    """One living node as the autoscaler sees it.

    Attributes:
        instance: the batch job that the autoscaler started it by; "": it started otherwise.
        idle: whether nothing runs there, no actor either.
        leaving: whether it is about to leave.
    """

    index: int
    node_type: str
    instance: str
    total: Resources
    available: Resources
    labels: dict[str, str]
    idle: bool
    leaving: bool


def waiting_requests(scheduler: ClusterScheduler, actors: ActorManager, groups: PlacementGroupManager) -> list[Demand]:
    """Everything that waits for resources, but for what names its nodes."""
    counts = scheduler.unserved()
    for actor in _unplaced(actors):
        counts[actor.spec.place] = counts.get(actor.spec.place, 0) + 1
    found: dict[Shape, int] = {}
    for shape, count in counts.items():
        affinity = node_affinity(shape.strategy) if near_node(shape.strategy) is None else None
        if bundle_of(shape.resources) is None and (affinity is None or affinity[1]) and count > 0:
            anywhere = Shape(shape.resources, shape.strategy if affinity is None else "")
            found[anywhere] = found.get(anywhere, 0) + count
    demands = [Demand(shape, count) for shape, count in found.items()]
    for spec, bundles in groups.unplaced():
        demands += group_demands(spec, bundles)
    return demands


def _unplaced(actors: ActorManager) -> list[Actor]:
    """Actors for which there is no room: those that have no node, and those that queue at a busy one."""
    queued = [
        actor
        for actor in actors.actors.values()
        if actor.node >= 0 and actor.node == actor.queued_at_busy_node and actor.state in (PENDING, RESTARTING)
    ]
    return actors.waiting_actors() + queued


def requested(bundles: Iterable[tuple[dict[str, float], dict[str, str]]]) -> list[Demand]:
    """The bundles of `request_resources`, each with its label selector, as demands."""
    counts: dict[Shape, int] = {}
    for amounts, selector in bundles:
        strategy = to_strategy([conditions(selector)]) if selector else ""
        shape = Shape(tuple(sorted(to_units(amounts).items())), strategy)
        counts[shape] = counts.get(shape, 0) + 1
    return [Demand(shape, count) for shape, count in counts.items()]


def node_uses(resources: ClusterResources, actors: ActorManager, fixed: Collection[int]) -> list[NodeStatus]:
    """All living nodes.

    Args:
        fixed: the nodes of the head and of the program, which are never idle.
    """
    hosts = hosts_of_actors(actors)
    return [
        NodeStatus(
            index,
            state.labels.get(TYPE_LABEL, ""),
            state.info.instance,
            state.info.total,
            state.available,
            state.labels,
            is_idle(state, hosts) and index not in fixed,
            resources.is_draining(index),
        )
        for index, state in sorted(resources.nodes.items())
    ]


def read_floor(value: Any) -> list[Demand]:
    """The demands in the value that `request_resources` stores: [[amounts, selector], ...]."""
    return requested((amounts, selector) for amounts, selector in value)


# ------------------------------------------------------------ bin packing


class Bin(Struct, eq=False):
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
