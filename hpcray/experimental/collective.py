"""Collective operations: `allreduce.bind(nodes)` in compiled graphs, `allreduce(tensor)` in a group of actors.

Names are those of `ray.experimental.collective`.
"""

from __future__ import annotations

import contextlib
import enum
import uuid
from collections.abc import Sequence
from typing import Any

from hpcray.api.objects import get
from hpcray.common.exceptions import ActorDiedError
from hpcray.graphs.dag_node import (
    BIND_INDEX_KEY,
    COLLECTIVE_OPERATION_KEY,
    IS_CLASS_METHOD_OUTPUT_KEY,
    PARENT_CLASS_NODE_KEY,
    DAGNode,
)
from hpcray.graphs.nodes import REDUCTIONS, ClassMethodNode, CollectiveOperation
from hpcray.util import collective
from hpcray.util.collective import Backend, ReduceOp

# ------------------------------------------------------------ collective groups
# Collective groups of actors that their creator knows: made, found and ended from outside.
#
# Names are those of `ray.experimental.collective`.


class CommunicatorHandle:
    """A group of actors, in the order of their ranks.

    Attributes:
        name: of the group. backend: how its operations run.
    """

    def __init__(self, actors: Sequence[Any], name: str, backend: str) -> None:
        self._actors = list(actors)
        self.name = name
        self.backend = Backend(backend)

    @property
    def actors(self) -> list[Any]:
        """The handles of its actors."""
        return self._actors[:]

    def get_rank(self, actor: Any) -> int:
        """Return the rank of an actor; -1 for one that is not in the group."""
        return self._actors.index(actor) if actor in self._actors else -1


_groups: dict[str, CommunicatorHandle] = {}


def create_collective_group(actors: Sequence[Any], backend: str, name: str | None = None) -> CommunicatorHandle:
    """Make a group of these actors and wait until all have joined.

    Args:
        actors: handles, in the order of the ranks. backend: "gloo" or "nccl". name: of the group; None: any.

    Raises:
        RuntimeError: an actor is in a group of this backend already, or could not join.
        ValueError: the backend is unknown, or an actor is there twice.
    """
    kind = Backend(backend)
    for actor in actors:
        if get_collective_groups([actor], kind):
            raise RuntimeError(
                f"Actor {actor} already in group for backend {kind}. Actors can currently only participate in at most "
                "one group per backend. hint: destroy_collective_group"
            )
    if len(set(actors)) != len(actors):
        raise ValueError(f"All actors must be unique, got: {actors}")
    name = str(uuid.uuid4()) if name is None else name
    get([actor.__ray_call__.remote(_join, len(actors), rank, kind, name) for rank, actor in enumerate(actors)])
    made = _groups[name] = CommunicatorHandle(actors, name, kind)
    return made


def get_collective_groups(actors: Sequence[Any] | None = None, backend: str | None = None) -> list[CommunicatorHandle]:
    """Return the groups of this process that have all these actors, and this backend if one is given."""
    wanted, kind = set(actors or ()), None if backend is None else Backend(backend)
    return [
        group for group in _groups.values() if wanted.issubset(group.actors) and (kind is None or group.backend == kind)
    ]


def destroy_collective_group(group_or_name: CommunicatorHandle | str) -> None:
    """End a group; its actors can be in another one then. Dead actors are left out.

    Raises:
        ValueError: this process has made no such group.
    """
    if not isinstance(group_or_name, CommunicatorHandle | str):
        raise ValueError("Expected CommunicatorHandle or str (group name).")
    name = group_or_name if isinstance(group_or_name, str) else group_or_name.name
    group = _groups.pop(name, None)
    if group is None:
        raise ValueError(f"No group with name {name} found.")
    left = [actor.__ray_call__.options(concurrency_group="_ray_system").remote(_leave, name) for actor in group.actors]
    for ref in left:
        with contextlib.suppress(ActorDiedError):
            get(ref)


def destroy_all_collective_groups() -> None:
    """End all groups that this process has made."""
    for name in list(_groups):
        destroy_collective_group(name)


def _join(_: Any, world_size: int, rank: int, backend: str, name: str) -> None:
    collective.init_collective_group(world_size, rank, backend, name)


def _leave(_: Any, name: str) -> None:
    collective.destroy_collective_group(name)


# ------------------------------------------------------------ collective


__all__ = [
    "CommunicatorHandle",
    "allgather",
    "allreduce",
    "create_collective_group",
    "destroy_all_collective_groups",
    "destroy_collective_group",
    "get_collective_groups",
    "reducescatter",
]


class _AllGather:
    """Gathers the tensors of all actors, one behind the other."""

    def bind(self, input_nodes: Sequence[DAGNode], transport: Any = None) -> list[Any]:
        """Make the nodes of an operation: one for each actor. See `allreduce.bind`."""
        return _bind("allgather", input_nodes, "", transport)

    def __call__(self, tensor_list: list[Any], tensor: Any, group_name: str = "default") -> None:
        """Call `hpcray.util.collective.allgather`."""
        collective.allgather(tensor_list, tensor, group_name)


class _AllReduce:
    """Reduces the tensors of all actors, element by element."""

    def bind(self, input_nodes: Any, op: Any = ReduceOp.SUM, transport: Any = None) -> list[Any]:
        """Make the nodes of an operation: one for each actor.

        Args:
            input_nodes: calls, one of each actor, that return a tensor of a CPU; or several such lists.
            op: SUM, PRODUCT, MAX, MIN or AVG.
            transport: None, or a `CPUCommunicator` of these actors, which makes no difference.

        Returns:
            A node for each actor, in the order of the calls; a list of nodes for each where there are several lists.

        Raises:
            ValueError: the nodes are not as they should be.
        """
        return _bind("allreduce", input_nodes, _reduction(op), transport)

    def __call__(self, tensor: Any, group_name: str = "default", op: ReduceOp = ReduceOp.SUM) -> None:
        """Call `hpcray.util.collective.allreduce`."""
        collective.allreduce(tensor, group_name, op)


class _ReduceScatter:
    """Reduces the tensors of all actors; each gets its part of the rows."""

    def bind(self, input_nodes: Sequence[DAGNode], op: Any = ReduceOp.SUM, transport: Any = None) -> list[Any]:
        """Make the nodes of an operation: one for each actor. See `allreduce.bind`."""
        return _bind("reducescatter", input_nodes, _reduction(op), transport)

    def __call__(
        self, tensor: Any, tensor_list: list[Any], group_name: str = "default", op: ReduceOp = ReduceOp.SUM
    ) -> None:
        """Call `hpcray.util.collective.reducescatter`."""
        collective.reducescatter(tensor, tensor_list, group_name, op)


allgather, allreduce, reducescatter = _AllGather(), _AllReduce(), _ReduceScatter()


def _reduction(op: Any) -> str:
    name = {"AVERAGE": "AVG"}.get(op.name, op.name) if isinstance(op, enum.Enum) else ""
    if name not in REDUCTIONS:
        raise ValueError(f"Unexpected operation: {op}")
    return name


def _bind(kind: str, inputs: Any, reduction: str, transport: Any) -> list[Any]:
    nested = bool(inputs) and isinstance(inputs[0], list)
    if nested and kind != "allreduce":
        raise ValueError("Currently binding a nested list of dag nodes is only supported for allreduce")
    lists: list[list[Any]] = list(inputs) if nested else [list(inputs)]
    actors = _actors_of(lists)
    _check_transport(transport, actors)
    name = f"{kind}.{reduction}" if reduction else kind
    found: list[Any] = []
    for rank, actor in enumerate(actors):
        index = actor.__dict__.setdefault("_ray_dag_bind_index", 0)
        actor.__dict__["_ray_dag_bind_index"] = index + 1
        other = {
            PARENT_CLASS_NODE_KEY: actor,
            BIND_INDEX_KEY: index,
            COLLECTIVE_OPERATION_KEY: CollectiveOperation(kind, reduction, rank, len(actors)),
        }
        node = ClassMethodNode(name, tuple(each for nodes in lists for each in nodes), {}, {}, other)
        if len(lists) == 1:
            found.append(node)
            continue
        one_of = {IS_CLASS_METHOD_OUTPUT_KEY: True, PARENT_CLASS_NODE_KEY: actor, BIND_INDEX_KEY: index}
        found.append(
            [ClassMethodNode(f"return_idx_{at}", (node, at), {}, {}, dict(one_of)) for at in range(len(lists))]
        )
    return found


def _actors_of(lists: list[list[Any]]) -> list[Any]:
    """The actors of an operation, by rank.

    Raises:
        ValueError: the lists are not of calls of the same actors in the same order, one call each.
    """
    found: list[Any] = []
    for place, nodes in enumerate(lists):
        where = f" at index {place}" if len(lists) > 1 else ""
        if not nodes:
            raise ValueError(f"Expected non-empty input list{where}.")
        if not all(isinstance(node, DAGNode) for node in nodes):
            raise ValueError(f"Expected all input nodes to be DAGNode{where}, but got {nodes}.")
        if len({id(node) for node in nodes}) != len(nodes):
            raise ValueError(f"Expected unique input nodes{where}, but found duplicates: {nodes}")
        actors = [node._get_actor_handle() if node.KIND == "method" else None for node in nodes]
        if None in actors:
            raise ValueError(f"Expected an actor handle from the input node{where}")
        if len(set(actors)) != len(actors):
            raise ValueError(
                f"Expected unique actor handles{where}, but found duplicate actor handles from input nodes: {nodes}"
            )
        found = found or actors
        if len(actors) != len(found):
            raise ValueError(
                "Expected all input lists to have the same number of nodes. List at index 0 has length "
                f"{len(found)}, but list at index {place} has length {len(actors)}."
            )
        if actors != found:
            what = "order" if set(actors) == set(found) else "set"
            raise ValueError(
                f"Expected all input lists to have the same {what} of actor handles. List at index 0 has actors "
                f"{found}, but list at index {place} has actors {actors}."
            )
    return found


def _check_transport(transport: Any, actors: list[Any]) -> None:
    if transport is None or isinstance(transport, str):
        return
    if set(transport.get_actor_handles()) != set(actors):
        raise ValueError("Expected actor handles to match the custom communicator group")
    if type(transport).__name__ != "CPUCommunicator":
        raise ValueError(
            f"{type(transport).__name__}: there are no GPU channels, and no communicators; hint: leave out `transport`"
        )
