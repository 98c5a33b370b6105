"""Backends and operations of `hpcray.util.collective`, by Ray's names."""

from __future__ import annotations

from enum import Enum


class Backend(str):
    """A backend by name, in any case.

    GLOO (and CPU, the same): NumPy arrays and PyTorch tensors, through the nodes' object stores; NCCL: PyTorch tensors
    on GPUs.

    Raises:
        ValueError: there is no such backend here.
    """

    __slots__ = ()

    NCCL = "nccl"
    MPI = "mpi"
    GLOO = "gloo"
    TORCH_GLOO = "torch_gloo"
    CPU = "cpu"

    def __new__(cls, name: str) -> Backend:
        known = {"nccl": "nccl", "gloo": "gloo", "torch_gloo": "gloo", "cpu": "gloo"}
        if str(name).lower() == "mpi":
            raise RuntimeError("The MPI backend is not supported; hint: Backend.GLOO, or hpcray.mpi for MPI programs")
        if str(name).lower() not in known:
            raise ValueError(f"Unrecognized backend: {name!r}. Supported ones are 'nccl' and 'gloo'.")
        return super().__new__(cls, known[str(name).lower()])


class ReduceOp(Enum):
    """How values of several ranks become one."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    AVERAGE = 4
