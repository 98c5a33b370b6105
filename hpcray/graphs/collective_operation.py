"""Collective operations on tensors in compiled graphs, without a communicator of their own.

The tensors of all actors travel to each of them over the graph's channels, in shared memory on one node, and each
reduces them itself, in the order of the actors, so that all get the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_REDUCTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "SUM": lambda torch, total, tensor: total.add_(tensor),
    "AVG": lambda torch, total, tensor: total.add_(tensor),
    "PRODUCT": lambda torch, total, tensor: total.mul_(tensor),
    "MAX": lambda torch, total, tensor: torch.maximum(total, tensor, out=total),
    "MIN": lambda torch, total, tensor: torch.minimum(total, tensor, out=total),
}
REDUCTIONS = frozenset(_REDUCTIONS)


@dataclass(frozen=True)
class CollectiveOperation:
    """The part of one actor in a collective operation.

    Attributes:
        kind: "allreduce", "allgather" or "reducescatter".
        reduction: one of `REDUCTIONS`; "" for "allgather".
        rank, size: of the actor, and of all of them.
    """

    kind: str
    reduction: str
    rank: int
    size: int

    def __call__(self, *tensors: Any) -> Any:
        """Return the result of this actor; a tuple where there are several tensors of each.

        Args:
            tensors: those of all actors, by rank; then the second ones of all, and so on.

        Raises:
            ValueError: one is no tensor of a CPU, or does not fit.
        """
        torch = sys.modules.get("torch")
        if torch is None or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise ValueError("Expected a torch tensor for each input node")
        if any(tensor.device.type != "cpu" for tensor in tensors):
            raise ValueError("there are no GPU channels; hint: move tensors to the CPU in the methods")
        lists = [tensors[start : start + self.size] for start in range(0, len(tensors), self.size)]
        types = [found[self.rank].dtype for found in lists]
        if len(set(types)) > 1:
            raise ValueError(f"Expected all input tensors to have the same dtype, but got {types}")
        results = tuple(self._one(torch, found) for found in lists)
        return results if len(results) > 1 else results[0]

    def _one(self, torch: Any, tensors: tuple[Any, ...]) -> Any:
        if self.kind == "allgather":
            return torch.cat(tensors)
        if self.kind == "reducescatter":
            rows = tensors[0].shape[0]
            if rows % self.size:
                raise ValueError(
                    "Expected the first dimension of the input tensor to be divisible by the world size "
                    f"{self.size}, but it is {rows}"
                )
            tensors = tuple(tensor.chunk(self.size)[self.rank] for tensor in tensors)
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            _REDUCTIONS[self.reduction](torch, total, tensor)
        return (total / self.size).to(total.dtype) if self.reduction == "AVG" else total
