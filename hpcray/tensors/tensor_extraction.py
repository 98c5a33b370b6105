"""A value without its tensors: how it is pickled, and put together again."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hpcray.protocol.out_of_band import Pickler
from hpcray.runtime.core_worker.core_worker import need_process
from hpcray.tensors.tensor_kinds import is_tensor_class


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
