"""Collectives of PyTorch tensors on GPUs: `torch.distributed` with NCCL.

PyTorch's own store, by which its ranks find each other, listens on a TCP port of rank 0's node while the group lasts.
"""

from __future__ import annotations

import datetime
import time
from typing import Any

from hpcray.api.session import ensure
from hpcray.host.address import node_ip_address
from hpcray.util.collective.types import ReduceOp

_NAMESPACE = "hpcray.util.collective.nccl"
_POLL = 0.02


def available() -> bool:
    """Whether this process has PyTorch, NCCL and a GPU."""
    try:
        import torch
        import torch.distributed
    except ImportError:
        return False
    return bool(torch.cuda.is_available() and torch.distributed.is_nccl_available())


class NcclGroup:
    """One rank's membership in a group.

    Args:
        name: of the group. world_size, rank: as in MPI. timeout: seconds that the others may take to join.

    Raises:
        RuntimeError: the others did not join in time.
    """

    def __init__(self, name: str, world_size: int, rank: int, timeout: float) -> None:
        import torch.distributed as dist

        self.name, self.world_size, self.rank = name, world_size, rank
        limit = datetime.timedelta(seconds=timeout)
        host, port = node_ip_address(), 0
        key = name.encode()
        if rank == 0:
            self._store = dist.TCPStore(host, 0, world_size, True, limit, wait_for_workers=False)
            address = f"{host}:{self._store.port}"
            ensure().gcs.call("kv_put", key, address.encode(), True, _NAMESPACE)
        else:
            deadline = time.monotonic() + timeout
            while (said := ensure().gcs.call("kv_get", key, _NAMESPACE)) is None:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"rank 0 of the collective group {name!r} did not come within {timeout:g} s")
                time.sleep(_POLL)
            host, _, text = said.decode().rpartition(":")
            port = int(text)
            self._store = dist.TCPStore(host, port, world_size, False, limit)
        self._group = dist.ProcessGroupNCCL(dist.PrefixStore(name, self._store), rank, world_size)

    def destroy(self) -> None:
        """Leave the group."""
        if self.rank == 0:
            ensure().gcs.call("kv_del", self.name.encode(), _NAMESPACE)
        self._group = self._store = None

    def barrier(self) -> None:
        """Wait for all."""
        import torch

        self.allreduce(torch.zeros(1, device="cuda"), ReduceOp.SUM)
        torch.cuda.synchronize()

    def allreduce(self, tensor: Any, op: ReduceOp) -> None:
        """In place."""
        self._group.allreduce([tensor], _options("AllreduceOptions", reduceOp=_op(op))).wait()

    def reduce(self, tensor: Any, root: int, op: ReduceOp) -> None:
        """In place, on `root`."""
        self._group.reduce([tensor], _options("ReduceOptions", reduceOp=_op(op), rootRank=root)).wait()

    def broadcast(self, tensor: Any, root: int) -> None:
        """In place."""
        self._group.broadcast([tensor], _options("BroadcastOptions", rootRank=root)).wait()

    def allgather(self, tensors: list[Any], tensor: Any) -> None:
        """Into `tensors`, by rank."""
        self._group.allgather([tensors], [tensor]).wait()

    def reducescatter(self, tensor: Any, tensors: list[Any], op: ReduceOp) -> None:
        """Into `tensor`: this rank's part."""
        self._group.reduce_scatter([tensor], [tensors], _options("ReduceScatterOptions", reduceOp=_op(op))).wait()

    def send(self, tensor: Any, to: int) -> None:
        """To another rank."""
        self._group.send([tensor], to, 0).wait()

    def recv(self, tensor: Any, source: int) -> None:
        """From another rank."""
        self._group.recv([tensor], source, 0).wait()


def _op(op: ReduceOp) -> Any:
    import torch.distributed as dist

    return {
        ReduceOp.SUM: dist.ReduceOp.SUM,
        ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
        ReduceOp.MIN: dist.ReduceOp.MIN,
        ReduceOp.MAX: dist.ReduceOp.MAX,
        ReduceOp.AVERAGE: dist.ReduceOp.AVG,
    }[op]


def _options(kind: str, **values: Any) -> Any:
    import torch.distributed as dist

    options = getattr(dist, kind)()
    for name, value in values.items():
        setattr(options, name, value)
    return options
