"""NumPy arrays and PyTorch tensors as the operations see them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def check_tensor(tensor: Any) -> None:
    """Raise RuntimeError unless it is an array or a tensor."""
    if not isinstance(tensor, np.ndarray) and not _is_torch(tensor):
        raise RuntimeError(f"Unrecognized tensor type '{type(tensor)}'. Supported types are: np.ndarray, torch.Tensor.")


def check_tensors(tensors: Any, world_size: int, what: str) -> None:
    """Raise RuntimeError unless it is a list of as many tensors as there are ranks."""
    if not isinstance(tensors, list):
        raise RuntimeError(f"The input must be a list of tensors. Got '{type(tensors)}'.")
    if not tensors:
        raise RuntimeError("Got an empty list of tensors.")
    for tensor in tensors:
        check_tensor(tensor)
    if len(tensors) != world_size:
        raise RuntimeError(f"The length of the tensor list operands to {what} must be equal to world_size.")


def array_of(tensor: Any) -> Any:
    """The values as a NumPy array: where it can be a view, it is one."""
    if not _is_torch(tensor):
        return tensor
    plain = tensor.detach().cpu()
    torch = sys.modules["torch"]
    return (plain.view(torch.int16) if plain.dtype is torch.bfloat16 else plain).numpy()


def fill(tensor: Any, values: Any) -> None:
    """Write values into a tensor.

    Raises:
        RuntimeError: it is read-only, as what `get` returns is. ValueError: it is of another shape.
    """
    if _is_torch(tensor):
        torch = sys.modules["torch"]
        new = torch.from_numpy(np.array(values)).reshape(tensor.shape)
        with torch.no_grad():
            tensor.copy_(new.view(torch.bfloat16) if tensor.dtype is torch.bfloat16 else new)
        return
    if not tensor.flags.writeable:
        raise RuntimeError(
            "the array is read-only, and the result has to be written into it; hint: arrays that get() returned are "
            "views of the object store: use a copy, np.array(x)"
        )
    if tensor.size != np.size(values):
        raise ValueError(f"an array of shape {tensor.shape} cannot take values of shape {np.shape(values)}")
    np.copyto(tensor, np.reshape(values, tensor.shape), casting="unsafe")


def refuse_half(tensor: Any) -> None:
    """Raise RuntimeError for bfloat16, which NumPy cannot reduce."""
    if _is_torch(tensor) and tensor.dtype is sys.modules["torch"].bfloat16:
        raise RuntimeError("bfloat16 cannot be reduced on CPUs by this backend; hint: tensor.float()")


def _is_torch(tensor: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)
