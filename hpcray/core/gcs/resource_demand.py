"""The input of the autoscaler: requests of the job that wait, and the use of each node."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from hpcray.common.labels import conditions, near_node, node_affinity, to_strategy
from hpcray.common.resources import Resources, bundle_of, to_units
from hpcray.core.gcs.actor_manager import DEAD, PENDING, RESTARTING, Actor, ActorManager
from hpcray.core.gcs.bin_packing import Demand, group_demands
from hpcray.core.gcs.cluster_resources import ClusterResources, NodeResources
from hpcray.core.gcs.cluster_scheduler import ClusterScheduler
from hpcray.core.gcs.node_types import TYPE_LABEL
from hpcray.core.gcs.placement_group_manager import PlacementGroupManager
from hpcray.protocol.messages import Shape


@dataclass(frozen=True, slots=True)
class NodeStatus:
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


def hosts_of_actors(actors: ActorManager) -> set[int]:
    """The nodes that have actors, or are about to have some."""
    return {actor.node for actor in actors.actors.values() if actor.node >= 0 and actor.state != DEAD}


def requested(bundles: Iterable[tuple[dict[str, float], dict[str, str]]]) -> list[Demand]:
    """The bundles of `request_resources`, each with its label selector, as demands."""
    counts: dict[Shape, int] = {}
    for amounts, selector in bundles:
        strategy = to_strategy([conditions(selector)]) if selector else ""
        shape = Shape(tuple(sorted(to_units(amounts).items())), strategy)
        counts[shape] = counts.get(shape, 0) + 1
    return [Demand(shape, count) for shape, count in counts.items()]


def is_idle(state: NodeResources, hosts: Collection[int]) -> bool:
    """Return whether nothing runs on a node. Objects there are no obstacle.

    Args:
        hosts: the nodes that have actors.
    """
    return state.index not in hosts and all(
        state.available.get(name, 0) >= units
        for name, units in state.info.total.items()
        if name != "object_store_memory"
    )


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
