"""Kinds of values whose bytes travel out of band, beside those of which the libraries see to it themselves.

NumPy keeps the buffers of contiguous arrays out of band (protocol 5), pandas and Arrow build on the same. Added here:
arrays that are not contiguous, of dates, or of dtypes of other libraries; JAX's arrays; slices of Arrow data, without
the memory beside the slice; memoryviews; `bytes` and `bytearray` as such, and the memory of PyTorch's tensors, all of
which are copied once, when they are read.
"""

from __future__ import annotations

import copyreg
import functools
import mmap
import pickle
import struct
import sys
import threading
import types
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, ClassVar

import cloudpickle

from hpcray.common.exceptions import CUSTOM
from hpcray.common.memory import PARALLEL_COPY_SIZE, DeferredBytes, copy_thread_count, madvise, parallel_copy
from hpcray.protocol.storage_cache import storages

# ------------------------------------------------------------ reducers
# Kinds of values that are pickled in a way of their own: functions by value, slices of Arrow's tables and arrays.

_DROPPED = "<dynamic-code>"

_reduce_function = cloudpickle.Pickler.dispatch_table[types.CodeType]


def _is_dropped(argument: object) -> bool:
    return isinstance(argument, str) and argument == _DROPPED  # others are bytes, which `python -bb` compares to none


def reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    """Return what cloudpickle reduces `code` to, with the name of its file."""
    kind, arguments, *rest = _reduce_function(code)
    return kind, tuple(code.co_filename if _is_dropped(argument) else argument for argument in arguments), *rest


def keep_file_names() -> None:
    """Have cloudpickle keep the names of files in this process, if its version drops them."""
    cloudpickle.Pickler.dispatch_table[functools._lru_cache_wrapper] = reduce_cached
    if any(map(_is_dropped, _reduce_function(reduce_code.__code__)[1])):
        cloudpickle.Pickler.dispatch_table[types.CodeType] = reduce_code


class _LateFunction:
    """The function in a cache that is made before its function is read: that may refer to the cache, or call itself."""

    def __init__(self) -> None:
        self.functions: list[Callable[..., Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.functions[0](*args, **kwargs)


def reduce_cached(cached: Any) -> Any:
    """Return what a function with a cache reduces to: its name where others can import it, else a new one."""
    if _can_be_imported(cached):
        return cached.__qualname__
    parameters = cached.cache_parameters()
    made = parameters["maxsize"], parameters["typed"]
    return _new_cached, made, cached.__wrapped__, None, None, _fill_cached


def _can_be_imported(cached: Any) -> bool:
    name = cached.__module__
    if name in ("__main__", *cloudpickle.list_registry_pickle_by_value()):
        return False
    try:
        return bool(attrgetter(cached.__qualname__)(sys.modules[name]) is cached)
    except (AttributeError, KeyError):
        return False


def _new_cached(maxsize: int | None, typed: bool) -> Any:
    inside = _LateFunction()
    cached: Any = functools.lru_cache(maxsize, typed)(inside)
    cached._inside = inside
    return cached


def _fill_cached(cached: Any, function: Callable[..., Any]) -> None:
    vars(cached).pop("_inside").functions.append(function)
    functools.update_wrapper(cached, function)


# ------------------------------------------------------------ arrow pickling
# Slices of Arrow tables, batches and arrays, pickled without the memory beside the slice.
#
# A slice shares the memory of what it was sliced from, and Arrow's own pickle of it holds all of that memory. Ray Data
# sends each block of a shuffle as slices, one to each reducer: those would be as large as the block.


_SLACK = 4096  # bytes that travel needlessly rather than are copied


def _shares_memory(data: Any) -> bool:
    """Return True for a slice of much larger memory: Arrow's own pickle of it would hold all of that."""
    try:
        return bool(data.get_total_buffer_size() > data.nbytes * 9 // 8 + _SLACK)
    except (TypeError, NotImplementedError, ValueError):
        return False  # the size of some types is not known


def reduce_table(table: Any) -> Any:
    """The `__reduce__` of a `pyarrow.Table`."""
    return _reduce_slice(table, _table_of)


def reduce_batch(batch: Any) -> Any:
    """The `__reduce__` of a `pyarrow.RecordBatch`."""
    return _reduce_slice(batch, _batch_of)


def reduce_chunks(chunks: Any) -> Any:
    """The `__reduce__` of a `pyarrow.ChunkedArray`."""
    return _reduce_slice(chunks, _chunks_of, lambda pyarrow: pyarrow.table([chunks], names=[""]))


def reduce_array(array: Any) -> Any:
    """The `__reduce__` of an array of Arrow."""
    return _reduce_slice(array, _arrow_array_of, lambda pyarrow: pyarrow.record_batch([array], names=[""]))


def _reduce_slice(data: Any, rebuild: Callable[..., Any], as_rows: Callable[[Any], Any] | None = None) -> Any:
    """Reduce a slice to a stream that `rebuild` takes, other data as Arrow does.

    Args:
        data: what is pickled.
        rebuild: makes it of what `_stream` returned.
        as_rows: makes a table or batch of it, given the module pyarrow, if it is none.
    """
    if not _shares_memory(data):
        return data.__reduce_ex__(5)
    import pyarrow

    return rebuild, _stream(data if as_rows is None else as_rows(pyarrow))


def _stream(data: Any) -> tuple[Any, Any]:
    """Write a table or batch as a stream of Arrow's IPC format, which holds what belongs to a slice only.

    Returns:
        The stream; the schema if it has extension types: to unpickle it first imports the modules that register them.
    """
    import pyarrow

    if not data.num_rows:  # of some columns without rows Arrow writes the whole memory
        data = pyarrow.RecordBatch.from_pylist([], schema=data.schema)
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, data.schema) as writer:
        writer.write(data)
    extended = any(isinstance(kind, pyarrow.BaseExtensionType) for kind in data.schema.types)
    return pickle.PickleBuffer(sink.getvalue()), data.schema if extended else None


def _table_of(stream: Any, schema: Any) -> Any:
    import pyarrow

    table = pyarrow.ipc.open_stream(pyarrow.py_buffer(stream)).read_all()
    return table if schema is None or table.schema == schema else table.cast(schema)  # of types that nobody registers


def _batch_of(stream: Any, schema: Any) -> Any:
    import pyarrow

    batch = pyarrow.ipc.open_stream(pyarrow.py_buffer(stream)).read_next_batch()
    return batch if schema is None or batch.schema == schema else batch.cast(schema)


def _chunks_of(stream: Any, schema: Any) -> Any:
    return _table_of(stream, schema).column(0)


def _arrow_array_of(stream: Any, schema: Any) -> Any:
    return _batch_of(stream, schema).column(0)


# ------------------------------------------------------------ out of band

_DATES = "mM"
_FROM_A_LIBRARY = 2  # NumPy's mark of a dtype that is not its own, as bfloat16 of ml_dtypes
_FORMATS = frozenset("bBhHiIlLqQnNfd?")  # of which the language lets a memoryview be
_OFFSET = struct.Struct("<Q")
UNIT = 16
"""Bytes; a multiple of every element's size, so that offsets stay whole numbers of elements."""
_HUGE = 1 << 20  # bytes; from here on memory for a copy is made of huge pages


class Pickling(threading.local):
    """The value that this thread pickles.

    Attributes:
        views: whether the tensors that it unpickles may be views, as only their content is of interest.
        refs: object refs met in it, in order of appearance; None: the thread pickles nothing.
        storages: memory of its tensors, by address and size; None: none was met.
        storages_of: the `refs` of the value that `storages` is of.
    """

    refs: list[Any] | None = None
    views: bool = False
    storages: dict[tuple[int, int], _Storage] | None = None
    storages_of: list[Any] | None = None


pickling = Pickling()


class _Reducers(dict[Any, Callable[[Any], Any]]):
    """Ours and cloudpickle's, then whatever is registered with copyreg. The libraries need not be there: a raylet never
    has NumPy.

    Attributes:
        tensors_as_views: whether PyTorch's tensors are read as views.
        finders: of memory, the last one counts: see `use_transfer_memory`.
    """

    tensors_as_views = False
    finders: ClassVar[list[Callable[[Any], AbstractContextManager[Any]]]] = [nullcontext]

    def transfer_memory(self, content: Any) -> AbstractContextManager[Any]:
        """Return a context with an array of the same bytes, see `use_transfer_memory`."""
        return self.finders[-1](content)

    def __missing__(self, kind: Any) -> Callable[[Any], Any]:
        reducer = _OF_LIBRARIES.get((kind.__module__, kind.__qualname__))
        if reducer is None:
            if kind.__module__ != "pyarrow.lib" or not kind.__name__.endswith("Array"):
                return copyreg.dispatch_table[kind]
            reducer = reduce_array  # a class for each type of element
        self[kind] = reducer
        return reducer


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, with more kinds of values out of band. Use protocol 5 and a `buffer_callback`."""


class ErrorPickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """cloudpickle's, with the serializers of users."""


def view_tensors(on: bool) -> None:
    """Read PyTorch's CPU tensors as views, or as copies. Writing to a view changes the object for all who read it."""
    _reducers.tensors_as_views = on


@contextmanager
def views_of_tensors(on: bool) -> Iterator[None]:
    """Have this thread read PyTorch's CPU tensors as views of the memory that they are read from, which must not be
    written to. on: False changes nothing."""
    before, pickling.views = pickling.views, pickling.views or on
    try:
        yield
    finally:
        pickling.views = before


def use_transfer_memory(find: Callable[[Any], AbstractContextManager[Any]]) -> None:
    """Have copies between the host and a device go through the memory that `find` returns.

    Args:
        find: called with an array of bytes; a context with an array of the same bytes, from and to which the device
            copies faster, or with that array itself.
    """
    _reducers.finders[:] = [find]


def reduce_with(kind: type, reducer: Callable[[Any], Any] | None) -> None:
    """Values of exactly this class are pickled as `reducer` says (as `__reduce__` would); None: as ever. So does
    cloudpickle, as in Ray."""
    if reducer is None:
        _reducers.pop(kind, None)
        CUSTOM.pop(kind, None)
        cloudpickle.Pickler.dispatch_table.pop(kind, None)
    else:
        _reducers[kind] = reducer
        CUSTOM[kind] = reducer
        cloudpickle.Pickler.dispatch_table[kind] = reducer


def _reduce_array(array: Any) -> Any:
    if array.dtype.hasobject:
        return array.__reduce_ex__(5)
    if not array.flags.forc:
        import numpy

        array = numpy.ascontiguousarray(array)
    if array.dtype.kind in _DATES or array.dtype.isbuiltin == _FROM_A_LIBRARY:  # of these NumPy makes no buffer
        return _array_of, (array.view(f"u{array.dtype.itemsize}"), array.dtype)
    return array.__reduce_ex__(5)


def _array_of(numbers: Any, dtype: Any) -> Any:
    return numbers.view(dtype)


def _reduce_jax_array(array: Any) -> Any:
    import numpy

    if array.weak_type or not array.is_fully_addressable:
        return array.__reduce_ex__(5)
    return _jax_array_of, (numpy.asarray(array),)


def _jax_array_of(array: Any) -> Any:
    import jax

    return jax.device_put(array)  # on a CPU a view: JAX never writes to what it was given


def _reduce_memoryview(view: memoryview) -> Any:
    if not view.c_contiguous or view.format not in _FORMATS or not view.nbytes:
        return bytes, (view.tobytes(),)  # as cloudpickle does
    return _memoryview_of, (pickle.PickleBuffer(view.cast("B")), view.format, view.shape)


def _memoryview_of(buffer: Any, form: str, shape: tuple[int, ...]) -> memoryview:
    return memoryview(buffer).cast("B").cast(form, shape)  # type: ignore[call-overload,no-any-return]


class _Bytes:
    """The memory of a storage, for NumPy. `Tensor.numpy()` would forbid the storage to be resized from then on."""

    def __init__(self, storage: Any, address: int, size: int) -> None:
        self._storage = storage
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


class DeviceBytes(DeferredBytes):
    """A part of a storage on a device, in the place of a `pickle.PickleBuffer`.

    Args:
        low, high: where it begins and ends, in bytes.
    """

    def __init__(self, storage: Any, low: int, high: int) -> None:
        self.nbytes = high - low
        self._part = bytes_in(storage, low, self.nbytes)

    def raw(self) -> DeviceBytes:
        """Return itself: it is contiguous."""
        return self

    def copy_to(self, memory: memoryview) -> None:
        import numpy
        import torch

        with _reducers.transfer_memory(numpy.frombuffer(memory, numpy.uint8)) as host:
            torch.from_numpy(host).copy_(self._part)


class _Storage:
    """Memory of tensors of the value that is being pickled: they share it, and share it again where they are read.

    Only the part that they cover travels. It is known when the whole value has been pickled, so where the first tensor
    covers a part only, the offset of the part travels beside the bytes, in a buffer that is filled in then. Memory on
    a device is copied to the host when the blob is written (`DeviceBytes`).

    Args:
        device: where the memory is, "" for the host's.

    Attributes:
        low, high: the part, in bytes.
    """

    __slots__ = ("_bytes", "_device", "_storage", "_whole", "high", "low", "offset")

    def __init__(self, storage: Any, address: int, size: int, low: int, high: int, device: str) -> None:
        import numpy

        found: Any = b"" if device or not size else numpy.asarray(_Bytes(storage, address, size))
        self._bytes = found
        self._whole = pickle.PickleBuffer(self._bytes)
        self._storage, self._device = storage, device
        self.low, self.high = low, high
        self.offset = bytearray(_OFFSET.size) if device or high - low < len(self._bytes) else None

    def cover(self, low: int, high: int) -> None:
        """Another tensor uses these bytes."""
        self.low, self.high = min(self.low, low), max(self.high, high)

    def narrow(self, buffers: list[pickle.PickleBuffer]) -> None:
        """Put the covered part in the place of the whole memory in what was left out of the pickle."""
        if self.offset is not None:
            _OFFSET.pack_into(self.offset, 0, self.low)
            at = next(at for at, buffer in enumerate(buffers) if buffer is self._whole)
            if self._device:
                buffers[at] = DeviceBytes(self._storage, self.low, self.high)  # type: ignore[call-overload]
            else:
                buffers[at] = pickle.PickleBuffer(self._bytes[self.low : self.high])

    def __reduce__(self) -> Any:
        offset = None if self.offset is None else pickle.PickleBuffer(self.offset)
        return _storage_of, (self._whole, offset, self._device) if self._device else (self._whole, offset)


def _storage_part(storage: Any, low: int, high: int, device: str = "") -> _Storage:
    """The one `_Storage` of this memory in the value that is being pickled; from now on it covers these bytes too."""
    parts = pickling.storages
    if parts is None or pickling.storages_of is not pickling.refs:
        parts, pickling.storages_of = {}, pickling.refs
        pickling.storages = parts
    key = storage.data_ptr(), storage.nbytes()
    found = parts.get(key)
    if found is None:
        found = parts[key] = _Storage(storage, *key, low, high, device)
    else:
        found.cover(low, high)
    return found


def end_storages(refs: list[Any], buffers: list[pickle.PickleBuffer]) -> None:
    """The value is pickled, or cannot be: of the memory of its tensors, only what they cover stays in `buffers`."""
    if pickling.storages is None or pickling.storages_of is not refs:
        return
    for storage in pickling.storages.values() if buffers else ():
        storage.narrow(buffers)
    pickling.storages = pickling.storages_of = None


def _reduce_tensor(tensor: Any) -> Any:
    import torch

    on_host = tensor.is_cpu
    plain = tensor.layout is torch.strided and (on_host or tensor.is_cuda) and not tensor.is_quantized
    if not plain or tensor.is_conj() or tensor.is_neg() or tensor._backward_hooks or tensor.__dict__:
        return tensor.__reduce_ex__(5)  # with the memory of its parts as below
    each, first, shape, strides = tensor.element_size(), tensor.storage_offset(), tensor.size(), tensor.stride()
    if tensor.is_contiguous():
        last = first + tensor.numel()
    else:
        last = first + sum((length - 1) * step for length, step in zip(shape, strides, strict=True)) + 1
    low, high = (0, 0) if 0 in shape else (first * each // UNIT * UNIT, last * each)
    storage = _storage_part(tensor.untyped_storage(), low, high, "" if on_host else str(tensor.device))
    return _tensor_of, (storage, tensor.dtype, first, tuple(shape), strides, tensor.requires_grad)


def _tensor_of(
    loaded: tuple[Any, int], dtype: Any, first: int, shape: tuple[int, ...], strides: tuple[int, ...], grad: bool
) -> Any:
    import torch

    storage, low = loaded
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, 0 if 0 in shape else first - low // tensor.element_size(), shape, strides)
    return tensor.requires_grad_() if grad else tensor


def _reduce_untyped_storage(storage: Any) -> Any:
    if storage.device.type != "cpu":
        return storage.__reduce_ex__(5)
    return _untyped_of, (_storage_part(storage, 0, storage.nbytes()),)


def _untyped_of(loaded: tuple[Any, int]) -> Any:
    return loaded[0]


def _reduce_typed_storage(storage: Any) -> Any:
    untyped = storage._untyped_storage  # `untyped()` warns
    if untyped.device.type != "cpu":
        return storage.__reduce_ex__(5)
    return _typed_of, (untyped, storage.dtype)


def _typed_of(storage: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _use_huge_pages(address: int, size: int) -> None:
    """As NumPy does for its own memory: a copy into fresh memory is three times as fast then."""
    start, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, address + size
    madvise(start, end - start, mmap.MADV_HUGEPAGE)


def _storage_of(buffer: Any, offset: Any, device: str = "") -> tuple[Any, int]:
    """Memory for tensors, and where in the memory of the sender it began, in bytes. It is on a device where that of the
    sender was, if this process has one: the one with the same number, or the current one."""
    import numpy
    import torch

    low: int = 0 if offset is None else _OFFSET.unpack(offset)[0]
    content = numpy.frombuffer(buffer, numpy.uint8)
    number = int(device.partition(":")[2] or 0)
    on_device = bool(device) and torch.cuda.is_available()
    if on_device or _reducers.tensors_as_views or pickling.views:
        if on_device:
            with _reducers.transfer_memory(content) as host:
                there = torch_view(host).to(device if number < torch.cuda.device_count() else "cuda")
            return there.untyped_storage(), low
        return torch_view(content).untyped_storage(), low
    size = len(content)
    own = host_storage(size)
    if size:
        target = numpy.asarray(_Bytes(own, own.data_ptr(), size))
        if size >= PARALLEL_COPY_SIZE and (threads := copy_thread_count()) > 1:
            parallel_copy(numpy.copyto, target, content, threads)
        else:
            numpy.copyto(target, content)
    return own, low


def host_storage(size: int) -> Any:
    """Return a storage of `size` bytes for a copy that the program gets."""
    own, fresh = storages.take(size)
    if size >= _HUGE and fresh:
        _use_huge_pages(own.data_ptr(), size)
    return own


def bytes_in(storage: Any, first: int, size: int) -> Any:
    """Return a part of a storage as a tensor of bytes. first: where it begins."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, first, (size,), (1,))


def torch_view(content: Any) -> Any:
    """Return a tensor in the memory of an array, which may be read-only: nothing must write to the tensor then."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(content)


def _reduce_state(state: Any) -> Any:
    """State of a Starlette or FastAPI app. Its `__getattr__` needs `_state`, which pickle sets too late."""
    return type(state), (state._state,)


class _Copied:
    """Stands for a `bytes`, `bytearray` or memoryview whose content is the pickle's only buffer."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __reduce__(self) -> tuple[type, tuple[pickle.PickleBuffer]]:
        return self._kind, (pickle.PickleBuffer(b""),)


def around_buffer(kind: type) -> bytes:
    """Return the pickle of `kind(buffer)`, whose buffer is the pickle's only one."""
    return pickle.dumps(_Copied(kind), 5, buffer_callback=lambda _: None)


COPIED = {kind: around_buffer(kind) for kind in (bytes, bytearray)}
"""The pickles of a `bytes` and of a `bytearray` that are alone in their object."""

_OF_LIBRARIES: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("numpy", "ndarray"): _reduce_array,
    ("pyarrow.lib", "ChunkedArray"): reduce_chunks,
    ("pyarrow.lib", "RecordBatch"): reduce_batch,
    ("pyarrow.lib", "Table"): reduce_table,
    ("starlette.datastructures", "State"): _reduce_state,
    ("jaxlib._jax", "ArrayImpl"): _reduce_jax_array,
    ("jaxlib.xla_extension", "ArrayImpl"): _reduce_jax_array,
    ("torch", "Tensor"): _reduce_tensor,
    ("torch.storage", "TypedStorage"): _reduce_typed_storage,
    ("torch.storage", "UntypedStorage"): _reduce_untyped_storage,
}
"""By module and name of the class."""

keep_file_names()
_reducers = _Reducers(cloudpickle.Pickler.dispatch_table.maps[0])
_reducers[memoryview] = _reduce_memoryview
_reducers[_Storage] = _Storage.__reduce__  # or it is looked for in vain, for each tensor
Pickler.dispatch_table = _reducers
ErrorPickler.dispatch_table = ChainMap(CUSTOM, cloudpickle.Pickler.dispatch_table)
