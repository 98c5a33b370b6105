"""Kinds of tensors: what is one, on which device, and how much memory. Imports none of their libraries."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

_DLPACK_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 8: "vulkan", 10: "rocm", 11: "cpu", 13: "cuda", 14: "xpu"}
"""Kinds of devices by their numbers in DLPack; 3 and 11 are memory of the host that a device can read."""


def is_tensor_class(kind: type) -> bool:
    """Return True for the classes whose instances stay where they are made: tensors, and arrays on devices."""
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        return True
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, (numpy.ndarray, numpy.generic)):
        return False
    return hasattr(kind, "__cuda_array_interface__") or (
        hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__")
    )


def device_of(tensor: Any) -> str:
    """Return the device of a tensor or array: its kind and, where there are several, its number, as in `cuda:0`."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return str(tensor.device)
    if hasattr(tensor, "__dlpack_device__"):
        kind, number = tensor.__dlpack_device__()
        name = _DLPACK_DEVICES.get(int(kind), f"dlpack-{int(kind)}")
        return name if name == "cpu" else f"{name}:{number}"
    return "cuda"


def sizes_of(tensors: Sequence[Any]) -> Mapping[str, int]:
    """Return the bytes of tensors by device. Memory that several tensors share counts once, where PyTorch says so."""
    sizes: dict[str, int] = {}
    seen: set[tuple[str, int]] = set()
    for tensor in tensors:
        device, size = device_of(tensor), int(getattr(tensor, "nbytes", 0))
        if hasattr(tensor, "untyped_storage"):
            try:
                storage = tensor.untyped_storage()
                place, size = (device, storage.data_ptr()), storage.nbytes()
            except (NotImplementedError, RuntimeError):  # sparse and nested tensors have several
                place = device, id(tensor)
            if place in seen:
                continue
            seen.add(place)
        sizes[device] = sizes.get(device, 0) + size
    return sizes


def version_of(tensors: Sequence[Any]) -> int:
    """Return PyTorch's count of the writes to tensors."""
    return sum(int(getattr(tensor, "_version", 0)) for tensor in tensors)
