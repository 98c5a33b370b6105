"""Kinds of tensors: what is one, on which device, and how much memory. Imports none of their libraries."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hpcray.protocol.out_of_band import Pickler
from hpcray.runtime.core_worker.core_worker import need_process

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


# ------------------------------------------------------------ tensor extraction
# A value without its tensors: how it is pickled, and put together again.


class ValueParts(NamedTuple):
    """A value without its tensors: its pickle, and what that left out."""

    stream: bytes
    buffers: Sequence[Any]


class WholeValue:
    """Stands for a value of which the pickle without tensors exists; it is pickled with them."""

    def __init__(self, tensors: Sequence[Any], parts: ValueParts) -> None:
        self._tensors, self._parts = tensors, parts

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        buffers = [pickle.PickleBuffer(buffer) for buffer in self._parts.buffers]
        return load_whole_value, (list(self._tensors), self._parts.stream, buffers)


class ValuePickler(Pickler):
    """Pickles a value with numbers in the places of its tensors.

    Args:
        kind: the only class of tensors; None: all that PyTorch, JAX, CuPy and Numba have, and what else DLPack knows,
            but for NumPy's arrays.
    """

    def __init__(
        self, file: io.BytesIO, tensors: list[Any], buffers: list[pickle.PickleBuffer], kind: type | None
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._kind = kind
        self._tensors = tensors
        self._numbers: dict[int, int] = {}
        self._known: dict[type, bool] = {}

    def persistent_id(self, item: Any) -> int | None:
        """Return the number of a tensor; None for all else."""
        kind = type(item)
        is_tensor = self._known.get(kind)
        if is_tensor is None:
            is_tensor = self._known[kind] = (
                is_tensor_class(kind) if self._kind is None else issubclass(kind, self._kind)
            )
        if not is_tensor:
            return None
        number = self._numbers.setdefault(id(item), len(self._tensors))
        if number == len(self._tensors):
            self._tensors.append(item)
        return number


class ValueReader(pickle.Unpickler):
    def __init__(self, stream: bytes, buffers: Sequence[Any], tensors: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(stream), buffers=buffers)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Any:
        return self._tensors[number]


def load_whole_value(tensors: Sequence[Any], stream: bytes, buffers: Sequence[Any]) -> Any:
    local = need_process().local
    placement, local.read_target = local.read_target, None  # of this value, not of others in it
    return ValueReader(stream, buffers, tensors if placement is None else placement.place(tensors)).load()
