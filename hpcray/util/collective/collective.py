"""The functions of `hpcray.util.collective`. Names, arguments and errors are Ray's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hpcray.api.session import ensure
from hpcray.runtime.refs import current
from hpcray.util.collective import nccl_group
from hpcray.util.collective.store_group import StoreGroup
from hpcray.util.collective.tensors import array_of, check_tensor, check_tensors, fill, refuse_half
from hpcray.util.collective.types import Backend, ReduceOp

Group = StoreGroup | nccl_group.NcclGroup
_TIMEOUT = 30_000
_DECLARED = "hpcray.util.collective.declared"

_groups: dict[str, Group] = {}


def nccl_available() -> bool:
    """Whether this process has PyTorch, NCCL and a GPU."""
    return nccl_group.available()


def gloo_available() -> bool:
    """Whether CPU tensors can be used: always."""
    return True


def is_group_initialized(group_name: str) -> bool:
    """Whether this process is in the group."""
    return group_name in _groups


def init_collective_group(
    world_size: int,
    rank: int,
    backend: str = Backend.NCCL,
    group_name: str = "default",
    gloo_timeout: int = _TIMEOUT,
) -> None:
    """Join a group: called by each of its ranks, in its actor or task. Returns when all have.

    Args:
        world_size: how many ranks there are. rank: the caller's, from 0.
        backend: "nccl" (tensors on GPUs) or "gloo" (arrays and tensors in memory).
        group_name: the same for all.
        gloo_timeout: milliseconds that the others may take to join, and to come to each operation.

    Raises:
        RuntimeError: called in a driver; this process is in it already; there is no GPU; the others did not come.
        ValueError: there is no such backend, or the name is empty.
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
    made = nccl_group.NcclGroup if kind == Backend.NCCL else StoreGroup
    _groups[group_name] = made(group_name, world_size, rank, gloo_timeout / 1000)


def create_collective_group(
    actors: Sequence[Any],
    world_size: int,
    ranks: Sequence[int],
    backend: str = Backend.NCCL,
    group_name: str = "default",
    gloo_timeout: int = _TIMEOUT,
) -> None:
    """Declare actors to be a group, in the driver. Each joins at its first operation.

    Raises:
        RuntimeError: the group is declared already, or the ranks are not those of the actors.
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
    said = {
        "ranks": {actor._actor_id.hex(): rank for actor, rank in zip(actors, ranks, strict=True)},
        "world_size": world_size,
        "backend": str(kind),
        "timeout": gloo_timeout,
    }
    if not ensure().gcs.call("kv_put", group_name.encode(), json.dumps(said).encode(), False, _DECLARED):
        raise RuntimeError("Trying to initialize a group twice.")


def destroy_collective_group(group_name: str = "default") -> None:
    """Leave a group, and take its declaration back."""
    _check_inside_actor()
    group = _groups.pop(group_name, None)
    if group is not None:
        group.destroy()
    ensure().gcs.call("kv_del", group_name.encode(), _DECLARED)


def get_rank(group_name: str = "default") -> int:
    """This process's rank; -1 if it is not in the group."""
    _check_inside_actor()
    return _groups[group_name].rank if group_name in _groups else -1


def get_collective_group_size(group_name: str = "default") -> int:
    """How many ranks the group has; -1 if this process is not in it."""
    _check_inside_actor()
    return _groups[group_name].world_size if group_name in _groups else -1


def get_group_handle(group_name: str = "default") -> Group:
    """The group that this process is in, or was declared to be in.

    Raises:
        RuntimeError: it is in no such group.
    """
    _check_inside_actor()
    group = _groups.get(group_name)
    if group is not None:
        return group
    process = ensure()
    said = process.gcs.call("kv_get", group_name.encode(), _DECLARED)
    declared = json.loads(said) if said is not None else {"ranks": {}}
    actor = current.worker.actor if current.worker is not None else None
    rank = declared["ranks"].get(actor.spec.actor.hex()) if actor is not None else None
    if rank is None:
        raise RuntimeError(f"The collective group '{group_name}' is not initialized in the process.")
    init_collective_group(declared["world_size"], rank, declared["backend"], group_name, declared["timeout"])
    return _groups[group_name]


# -------------------------------------------------------------------- operations


def allreduce(tensor: Any, group_name: str = "default", op: ReduceOp = ReduceOp.SUM) -> None:
    """Replace the tensor by what all ranks' make, element by element."""
    check_tensor(tensor)
    group = get_group_handle(group_name)
    if isinstance(group, nccl_group.NcclGroup):
        group.allreduce(tensor, op)
        return
    refuse_half(tensor)
    fill(tensor, group.allreduce(array_of(tensor), op))


def reduce(tensor: Any, dst_rank: int = 0, group_name: str = "default", op: ReduceOp = ReduceOp.SUM) -> None:
    """The same on one rank; the tensors of the others stay as they are."""
    check_tensor(tensor)
    group = get_group_handle(group_name)
    _check_rank(group, dst_rank)
    if isinstance(group, nccl_group.NcclGroup):
        group.reduce(tensor, dst_rank, op)
        return
    refuse_half(tensor)
    result = group.reduce(array_of(tensor), dst_rank, op)
    if result is not None:
        fill(tensor, result)


def broadcast(tensor: Any, src_rank: int = 0, group_name: str = "default") -> None:
    """Replace the tensor by that of one rank."""
    check_tensor(tensor)
    group = get_group_handle(group_name)
    _check_rank(group, src_rank)
    if isinstance(group, nccl_group.NcclGroup):
        group.broadcast(tensor, src_rank)
        return
    result = group.broadcast(array_of(tensor), src_rank)
    if group.rank != src_rank:
        fill(tensor, result)


def allgather(tensor_list: list[Any], tensor: Any, group_name: str = "default") -> None:
    """Fill a list with the tensors of all ranks."""
    check_tensor(tensor)
    group = get_group_handle(group_name)
    check_tensors(tensor_list, group.world_size, "allgather")
    if isinstance(group, nccl_group.NcclGroup):
        group.allgather(tensor_list, tensor)
        return
    for mine, values in zip(tensor_list, group.allgather(array_of(tensor)), strict=True):
        fill(mine, values)


def reducescatter(
    tensor: Any, tensor_list: list[Any], group_name: str = "default", op: ReduceOp = ReduceOp.SUM
) -> None:
    """Reduce each tensor of the lists of all ranks; this rank gets the one at its place."""
    check_tensor(tensor)
    group = get_group_handle(group_name)
    check_tensors(tensor_list, group.world_size, "reducescatter")
    if isinstance(group, nccl_group.NcclGroup):
        group.reducescatter(tensor, tensor_list, op)
        return
    refuse_half(tensor)
    fill(tensor, group.reducescatter([array_of(part) for part in tensor_list], op))


def send(tensor: Any, dst_rank: int, group_name: str = "default") -> None:
    """Send to one rank, which receives with `recv`."""
    check_tensor(tensor)
    group = get_group_handle(group_name)
    _check_rank(group, dst_rank)
    if dst_rank == group.rank:
        raise RuntimeError(f"The destination rank '{dst_rank}' is self.")
    group.send(tensor if isinstance(group, nccl_group.NcclGroup) else array_of(tensor), dst_rank)


def recv(tensor: Any, src_rank: int, group_name: str = "default") -> None:
    """Receive from one rank, in the order in which it sent."""
    check_tensor(tensor)
    group = get_group_handle(group_name)
    _check_rank(group, src_rank)
    if src_rank == group.rank:
        raise RuntimeError(f"The destination rank '{src_rank}' is self.")
    if isinstance(group, nccl_group.NcclGroup):
        group.recv(tensor, src_rank)
    else:
        fill(tensor, group.recv(src_rank))


def barrier(group_name: str = "default") -> None:
    """Wait for all ranks."""
    get_group_handle(group_name).barrier()


# -------------------------------------------------------------------- checks


def _check_available(backend: Backend) -> None:
    if backend == Backend.NCCL and not nccl_available():
        raise RuntimeError(
            "NCCL is not available. hint: this process needs PyTorch with CUDA and a GPU (num_gpus=1); Backend.GLOO "
            "works with CPUs"
        )


def _check_inside_actor() -> None:
    if current.worker is None:
        raise RuntimeError("The collective APIs shall be only used inside a Ray actor or task.")


def _check_rank(group: Group, rank: int) -> None:
    if rank < 0:
        raise ValueError(f"rank '{rank}' is negative.")
    if rank >= group.world_size:
        raise ValueError(f"rank '{rank}' must be less than world size '{group.world_size}'")
