"""Collective operations of a group of actors or tasks on arrays and tensors, in place, as in MPI and NCCL.

Names, arguments and errors are Ray's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcray.api.session import require_session
from hpcray.runtime.core_worker.core_worker import current
from hpcray.util.collective.groups import ReduceOp, StoreGroup, is_torch
from hpcray.util.collective.nccl import NcclGroup, nccl_available

__all__ = [
    "Backend",
    "ReduceOp",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "create_collective_group",
    "destroy_collective_group",
    "gather",
    "get_collective_group_size",
    "get_group_handle",
    "get_rank",
    "gloo_available",
    "init_collective_group",
    "is_group_initialized",
    "nccl_available",
    "recv",
    "reduce",
    "reducescatter",
    "scatter",
    "send",
]

Group = StoreGroup | NcclGroup
_TIMEOUT = 30_000  # milliseconds
_DECLARED = "hpcray.util.collective.declared"

_groups: dict[str, Group] = {}

# Ray's modules of these names.
collective = types = sys.modules[f"{__name__}.collective"] = sys.modules[f"{__name__}.types"] = sys.modules[__name__]


class Backend(str):
    """Name of a backend, in upper or lower case.

    GLOO (and CPU, the same): NumPy arrays and PyTorch tensors, through the nodes' object stores; NCCL: PyTorch tensors
    on GPUs.

    Raises:
        ValueError: the backend is unknown. RuntimeError: the backend is "mpi".
    """

    __slots__ = ()

    NCCL = "NCCL"
    GLOO = "GLOO"
    UNRECOGNIZED = "unrecognized"

    def __new__(cls, name: str) -> Backend:
        known = {"NCCL": "NCCL", "GLOO": "GLOO", "TORCH_GLOO": "GLOO", "CPU": "GLOO"}
        upper = str(name).upper()
        if upper == "MPI":
            raise RuntimeError("The MPI backend is not supported; hint: Backend.GLOO, or hpcray.mpi for MPI programs")
        if upper not in known:
            raise ValueError(f"Unrecognized backend: {str(name)!r}. Only NCCL and GLOO are supported")
        return super().__new__(cls, known[upper])


def gloo_available() -> bool:
    """Return True: CPU tensors are always supported."""
    return True


def is_group_initialized(group_name: str) -> bool:
    """Return True if this process has joined the group."""
    return group_name in _groups


def init_collective_group(
    world_size: int, rank: int, backend: str = Backend.NCCL, group_name: str = "default", gloo_timeout: int = _TIMEOUT
) -> None:
    """Join a group. Every rank calls this in its actor or task; returns when all ranks have joined.

    Args:
        world_size: number of ranks.
        rank: rank of the caller, from 0.
        backend: "nccl" (tensors on GPUs) or "gloo" (arrays and tensors in memory).
        group_name: name of the group, the same on all ranks.
        gloo_timeout: milliseconds that the other ranks may take to join, and to start each operation; with "nccl", that
            an operation may take.

    Raises:
        RuntimeError: the caller is a driver, has joined the group already, or has no GPU; or a rank did not join.
        ValueError: the backend is unknown, or the name is empty.
    """
    _check_inside_actor()
    kind = Backend(backend)
    _check_available(kind)
    if not group_name:
        raise ValueError(f"group_name '{group_name}' needs to be a string.")
    if group_name in _groups:
        raise RuntimeError("Trying to initialize a group twice.")
    if not 0 <= rank < world_size:
        raise AssertionError(f"rank {rank} of a group of {world_size}: ranks are 0 to world_size - 1")
    made = NcclGroup if kind == Backend.NCCL else StoreGroup
    _groups[group_name] = made(group_name, world_size, rank, gloo_timeout / 1000)


def create_collective_group(
    actors: Sequence[Any],
    world_size: int,
    ranks: Sequence[int],
    backend: str = Backend.NCCL,
    group_name: str = "default",
    gloo_timeout: int = _TIMEOUT,
) -> None:
    """Declare a group of actors, in the driver. Each actor joins at its first operation.

    Args:
        actors: handles of the actors.
        world_size: number of ranks, the length of `actors`.
        ranks: rank of each actor.
        backend, group_name, gloo_timeout: as in `init_collective_group`.

    Raises:
        RuntimeError: the group is declared already, or the ranks do not match the actors.
    """
    kind = Backend(backend)
    if len(ranks) != len(actors):
        raise RuntimeError(
            f"Each actor should correspond to one rank. Got '{len(ranks)}' ranks but '{len(actors)}' actors"
        )
    if set(ranks) != set(range(len(ranks))):
        raise RuntimeError(f"Ranks must be a permutation from 0 to '{len(ranks) - 1}'. Got '{list(ranks)}'.")
    if world_size <= 0:
        raise RuntimeError(f"World size must be greater than zero. Got '{world_size}'.")
    if world_size != len(ranks):
        raise RuntimeError(f"World size must be the number of ranks. Got '{world_size}' and '{len(ranks)}' ranks.")
    declaration = {
        "ranks": {actor._actor_id.hex(): rank for actor, rank in zip(actors, ranks, strict=True)},
        "world_size": world_size,
        "backend": str(kind),
        "timeout": gloo_timeout,
    }
    if not require_session().gcs.call(
        "kv_put", group_name.encode(), json.dumps(declaration).encode(), False, _DECLARED
    ):
        raise RuntimeError("Trying to initialize a group twice.")


def destroy_collective_group(group_name: str = "default") -> None:
    """Leave a group, and remove its declaration."""
    _check_inside_actor()
    group = _groups.pop(group_name, None)
    if group is not None:
        group.destroy()
    require_session().gcs.call("kv_del", group_name.encode(), _DECLARED)


def get_rank(group_name: str = "default") -> int:
    """Return the rank of this process; -1 outside the group."""
    _check_inside_actor()
    return _groups[group_name].rank if group_name in _groups else -1


def get_collective_group_size(group_name: str = "default") -> int:
    """Return the number of ranks; -1 outside the group."""
    _check_inside_actor()
    return _groups[group_name].world_size if group_name in _groups else -1


def get_group_handle(group_name: str = "default") -> Group:
    """Return the group, and join it first where it was declared.

    Raises:
        RuntimeError: the process is in no group of this name.
    """
    _check_inside_actor()
    group = _groups.get(group_name)
    if group is not None:
        return group
    process = require_session()
    stored = process.gcs.call("kv_get", group_name.encode(), _DECLARED)
    declared = json.loads(stored) if stored is not None else {"ranks": {}}
    actor = current.worker.actor if current.worker is not None else None
    rank = declared["ranks"].get(actor.spec.actor.hex()) if actor is not None else None
    if rank is None:
        raise RuntimeError(f"The collective group '{group_name}' is not initialized in the process.")
    init_collective_group(declared["world_size"], rank, declared["backend"], group_name, declared["timeout"])
    return _groups[group_name]


def allreduce(tensor: Any, group_name: str = "default", op: ReduceOp = ReduceOp.SUM) -> None:
    """Reduce the tensors of all ranks element by element, in place on every rank."""
    _check_tensor(tensor)
    get_group_handle(group_name).allreduce(tensor, op)


def reduce(tensor: Any, dst_rank: int = 0, group_name: str = "default", op: ReduceOp = ReduceOp.SUM) -> None:
    """Reduce the tensors of all ranks, in place on rank `dst_rank`; the tensors of the other ranks do not change."""
    _checked_group(tensor, group_name, dst_rank).reduce(tensor, dst_rank, op)


def broadcast(tensor: Any, src_rank: int = 0, group_name: str = "default") -> None:
    """Copy the tensor of rank `src_rank` to the tensors of all ranks."""
    _checked_group(tensor, group_name, src_rank).broadcast(tensor, src_rank)


def allgather(tensor_list: list[Any], tensor: Any, group_name: str = "default") -> None:
    """Copy the tensors of all ranks to `tensor_list`, by rank."""
    _check_tensor(tensor)
    group = get_group_handle(group_name)
    _check_tensors(tensor_list, group.world_size, "allgather")
    group.allgather(tensor_list, tensor)


def reducescatter(
    tensor: Any, tensor_list: list[Any], group_name: str = "default", op: ReduceOp = ReduceOp.SUM
) -> None:
    """Reduce the lists of all ranks element by element; `tensor` gets the result at this rank's index."""
    _check_tensor(tensor)
    group = get_group_handle(group_name)
    _check_tensors(tensor_list, group.world_size, "reducescatter")
    group.reducescatter(tensor, tensor_list, op)


def gather(tensor: Any, gather_list: list[Any] | None = None, dst_rank: int = 0, group_name: str = "default") -> None:
    """Copy the tensors of all ranks to `gather_list` of rank `dst_rank`, by rank. (Not in Ray.)

    Args:
        gather_list: as many tensors as ranks, on rank `dst_rank`; not looked at elsewhere.
    """
    group = _checked_group(tensor, group_name, dst_rank)
    if group.rank == dst_rank:
        _check_tensors(gather_list, group.world_size, "gather")
    group.gather(tensor, gather_list, dst_rank)


def scatter(tensor: Any, scatter_list: list[Any] | None = None, src_rank: int = 0, group_name: str = "default") -> None:
    """Copy to `tensor` that of `scatter_list` of rank `src_rank` at this rank's index. (Not in Ray.)

    Args:
        scatter_list: as many tensors as ranks, on rank `src_rank`; not looked at elsewhere.
    """
    group = _checked_group(tensor, group_name, src_rank)
    if group.rank == src_rank:
        _check_tensors(scatter_list, group.world_size, "scatter")
    group.scatter(tensor, scatter_list, src_rank)


def alltoall(output_list: list[Any], input_list: list[Any], group_name: str = "default") -> None:
    """Copy to `output_list`, by rank, what each rank has in its `input_list` at this rank's index. (Not in Ray.)"""
    group = get_group_handle(group_name)
    for tensors in (output_list, input_list):
        _check_tensors(tensors, group.world_size, "alltoall")
    group.alltoall(output_list, input_list)


def send(tensor: Any, dst_rank: int, group_name: str = "default") -> None:
    """Send a tensor to a rank, which receives it with `recv`."""
    _checked_group(tensor, group_name, dst_rank, other=True).send(tensor, dst_rank)


def recv(tensor: Any, src_rank: int, group_name: str = "default") -> None:
    """Receive the next tensor that rank `src_rank` sent, into `tensor`."""
    _checked_group(tensor, group_name, src_rank, other=True).recv(tensor, src_rank)


def barrier(group_name: str = "default") -> None:
    """Wait for all ranks."""
    get_group_handle(group_name).barrier()


def _check_available(backend: Backend) -> None:
    if backend == Backend.NCCL and not nccl_available():
        raise RuntimeError(
            "NCCL is not available. hint: this process needs PyTorch with CUDA and a GPU (num_gpus=1); Backend.GLOO "
            "works with CPUs"
        )


def _check_inside_actor() -> None:
    if current.worker is None:
        raise RuntimeError("The collective APIs shall be only used inside a Ray actor or task.")


def _checked_group(tensor: Any, group_name: str, rank: int, other: bool = False) -> Group:
    """Return the group, after checks of the tensor and of the rank; with `other` the rank must not be the caller's."""
    _check_tensor(tensor)
    group = get_group_handle(group_name)
    if rank < 0:
        raise ValueError(f"rank '{rank}' is negative.")
    if rank >= group.world_size:
        raise ValueError(f"rank '{rank}' must be less than world size '{group.world_size}'")
    if other and rank == group.rank:
        raise RuntimeError(f"The destination rank '{rank}' is self.")
    return group


def _check_tensor(tensor: Any) -> None:
    if not isinstance(tensor, np.ndarray) and not is_torch(tensor):
        raise RuntimeError(f"Unrecognized tensor type '{type(tensor)}'. Supported types are: np.ndarray, torch.Tensor.")


def _check_tensors(tensors: Any, world_size: int, what: str) -> None:
    if not isinstance(tensors, list):
        raise RuntimeError(f"The input must be a list of tensors. Got '{type(tensors)}'.")
    if not tensors:
        raise RuntimeError("Got an empty list of tensors.")
    for tensor in tensors:
        _check_tensor(tensor)
    if len(tensors) != world_size:
        raise RuntimeError(f"The length of the tensor list operands to {what} must be equal to world_size.")
