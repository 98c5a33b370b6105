"""What travels out of band, and so comes back as a view of where it lies, beside what the libraries themselves do.

NumPy keeps the buffers of contiguous arrays out of band (protocol 5), pandas and Arrow build on the same. Added here:
arrays that are not contiguous, or of dates; memoryviews; `bytes` and `bytearray` as such, which are copied once, when
they are read; and, if enabled, PyTorch's tensors, which know no read-only memory.
"""

from __future__ import annotations

import copyreg
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle

from hpcray.common.exception_pickling import CUSTOM

_DATES = "mM"
_FORMATS = frozenset("bBhHiIlLqQnNfd?")  # of which the language lets a memoryview be


class _Reducers(dict[Any, Callable[[Any], Any]]):
    """Ours and cloudpickle's, then whatever is registered with copyreg. NumPy need not be there: a raylet never has it.

    Attributes:
        tensors: whether PyTorch's are ours; it need not have been imported yet.
    """

    tensors = False

    def __missing__(self, kind: Any) -> Callable[[Any], Any]:
        if self.tensors and kind.__module__ == "torch" and kind.__qualname__ == "Tensor":
            return _reduce_tensor
        if kind.__module__ == "numpy" and kind.__qualname__ == "ndarray":
            self[kind] = _reduce_array
            return _reduce_array
        return copyreg.dispatch_table[kind]


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, with more kinds of values out of band. Use protocol 5 and a `buffer_callback`."""


def view_tensors(on: bool) -> None:
    """Whether the bytes of PyTorch's CPU tensors travel out of band, where they are dense, contiguous and need no
    gradient. What is read is then a view: writing to it changes the object for all who read it."""
    _reducers.tensors = on


def reduce_with(kind: type, reducer: Callable[[Any], Any] | None) -> None:
    """Values of exactly this class are pickled as `reducer` says (as `__reduce__` would); None: as ever."""
    if reducer is None:
        _reducers.pop(kind, None)
        CUSTOM.discard(kind)
    else:
        _reducers[kind] = reducer
        CUSTOM.add(kind)


def _reduce_array(array: Any) -> Any:
    if array.dtype.hasobject:
        return array.__reduce_ex__(5)
    if not array.flags.forc:
        import numpy

        array = numpy.ascontiguousarray(array)
    if array.dtype.kind in _DATES:
        return _array_of_dates, (array.view("i8"), array.dtype)
    return array.__reduce_ex__(5)


def _array_of_dates(numbers: Any, dtype: Any) -> Any:
    return numbers.view(dtype)


def _reduce_memoryview(view: memoryview) -> Any:
    if not view.c_contiguous or view.format not in _FORMATS or not view.nbytes:
        return bytes, (view.tobytes(),)  # as cloudpickle does
    return _memoryview_of, (pickle.PickleBuffer(view.cast("B")), view.format, view.shape)


def _memoryview_of(buffer: Any, form: str, shape: tuple[int, ...]) -> memoryview:
    return memoryview(buffer).cast("B").cast(form, shape)  # type: ignore[call-overload,no-any-return]


def _reduce_tensor(tensor: Any) -> Any:
    import torch

    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not plain or tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        return tensor.__reduce_ex__(5)
    if not tensor.numel():
        return tensor.__reduce_ex__(5)
    raw = tensor.reshape(-1).view(torch.uint8).numpy()
    return _tensor_of, (pickle.PickleBuffer(raw), tensor.dtype, tuple(tensor.shape))


def _tensor_of(buffer: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(buffer, dtype=dtype).reshape(shape)


class _Copied:
    """Stands for a `bytes` or `bytearray` whose content is the pickle's only buffer."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __reduce__(self) -> tuple[type, tuple[pickle.PickleBuffer]]:
        return self._kind, (pickle.PickleBuffer(b""),)


COPIED = {kind: pickle.dumps(_Copied(kind), 5, buffer_callback=lambda _: None) for kind in (bytes, bytearray)}
"""The pickles of a `bytes` and of a `bytearray` that are alone in their object."""

_reducers = _Reducers(cloudpickle.Pickler.dispatch_table.maps[0])
_reducers[memoryview] = _reduce_memoryview
Pickler.dispatch_table = _reducers
