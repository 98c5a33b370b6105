"""Arrow data as blobs: a slice travels without the memory beside it, all else without a copy."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from hpcray.protocol.serialization import Serialized, deserialize, serialize

pa = pytest.importorskip("pyarrow")
ROWS = 30_000


class Point(pa.ExtensionType):  # type: ignore[misc]
    """A type that nobody registers."""

    def __init__(self) -> None:
        super().__init__(pa.list_(pa.float64(), 2), "tests.point")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: Any, serialized: bytes) -> Point:
        return cls()


def columns() -> dict[str, Any]:
    """One of each kind of memory layout."""
    numbers = pa.array(np.arange(ROWS), mask=np.arange(ROWS) % 7 == 0)
    points = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2.0 * ROWS)), 2)
    return {
        "numbers": numbers,
        "flags": pa.array(np.arange(ROWS) % 3 == 0),
        "text": pa.array([f"row {row}" for row in range(ROWS)]),
        "lists": pa.array([[row] * (row % 4) for row in range(ROWS)]),
        "structs": pa.StructArray.from_arrays([numbers, pa.array(np.ones(ROWS))], ["a", "b"]),
        "words": pa.array(["one", "two"] * (ROWS // 2)).dictionary_encode(),
        "points": pa.ExtensionArray.from_storage(Point(), points),
    }


def table() -> Any:
    """All columns, with metadata."""
    return pa.table(columns()).replace_schema_metadata({"made": "here"})


def size_and_copy(value: Any) -> tuple[int, Any]:
    """Bytes of the blob, and the value as another process reads it."""
    made, _ = serialize(value)
    blob = made.join() if isinstance(made, Serialized) else made
    return len(blob), deserialize(blob)


@pytest.mark.parametrize("start, length", [(0, 10), (12_341, 10), (ROWS - 5, 5), (5, 0), (3, 1000)])
def test_a_slice_travels_without_the_memory_beside_it(start: int, length: int) -> None:
    whole = table()
    sliced = whole.slice(start, length)
    batch = whole.to_batches()[0].slice(start, length)
    for value in (sliced, batch, {"rows": [sliced]}):
        size, copy = size_and_copy(value)
        assert size < 10_000 + 150 * length
        assert copy == value
    assert size_and_copy(sliced)[1].schema.equals(sliced.schema, check_metadata=True)
    for name in whole.column_names:
        for value in (sliced[name], batch[name]):
            size, copy = size_and_copy(value)
            assert size < 10_000 + 50 * length and type(copy) is type(value)
            assert copy.type == value.type and copy.to_pylist() == value.to_pylist()


def test_slices_of_several_chunks() -> None:
    whole = pa.concat_tables([table(), table(), table()])
    size, copy = size_and_copy(whole.slice(ROWS - 10, 20))
    assert size < 15_000 and copy == whole.slice(ROWS - 10, 20)


def test_what_is_no_slice_is_not_copied() -> None:
    whole = table()
    made, _ = serialize(whole)
    assert isinstance(made, Serialized) and len(made.pickle) < 10_000
    own: list[pickle.PickleBuffer] = []
    pickle.dumps(whole, 5, buffer_callback=own.append)
    content = sum(buffer.raw().nbytes for buffer in own)
    written: list[int] = []
    made.write(lambda _, buffer: written.append(memoryview(buffer).nbytes))
    assert content <= sum(written) < content + 10_000
    assert deserialize(made.join()) == whole


def test_a_null_column_and_a_view_type_have_no_known_size() -> None:
    odd = pa.table(
        {"nothing": pa.nulls(ROWS), "views": pa.array(["a view of text, not inlined"] * ROWS, pa.string_view())}
    )
    assert size_and_copy(odd.slice(5, 5))[1].to_pylist() == odd.slice(5, 5).to_pylist()
