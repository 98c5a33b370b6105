"""Kinds of values that are pickled in a way of their own: functions by value, slices of Arrow's tables and arrays."""

from __future__ import annotations

import functools
import pickle
import sys
import types
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import cloudpickle

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
    return _reduce_slice(array, _array_of, lambda pyarrow: pyarrow.record_batch([array], names=[""]))


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


def _array_of(stream: Any, schema: Any) -> Any:
    return _batch_of(stream, schema).column(0)
