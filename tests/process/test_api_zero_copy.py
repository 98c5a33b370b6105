"""Values that are read are read-only views of the node's store, and their memory stays while any view lives."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from engine import eventually, hpcray_only, ray

pytestmark = [hpcray_only, pytest.mark.usefixtures("session"), pytest.mark.timeout(180)]
STORE = 64 << 20
INIT = {"num_cpus": 2, "object_store_memory": STORE, "spill_threshold": 0.0}

N = 1 << 16
RECORD = np.dtype([("a", "i4"), ("b", "f8"), ("c", "S3")])


def process():
    from hpcray.runtime.core_worker.core_worker import current

    return current.process


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def in_store(start: int) -> bool:
    arena = process().stores.arena
    return arena.address <= start < arena.address + arena.size


def held() -> int:
    """Objects in the store, once what was dropped is known to be."""
    gc.collect()
    with process().engine.lock:
        process().drain()
        process().engine.flush()
    return process().diagnostics.list_stores(0, 30.0)[0]["objects"]


@pytest.fixture(autouse=True)
def nothing_left(session: None) -> Iterator[None]:
    yield
    eventually(lambda: held() == 0, "an empty store", 20.0)


ARRAYS = {
    "plain": lambda: np.arange(N),
    "structured": lambda: np.ones(N, RECORD),
    "fortran": lambda: np.asfortranarray(np.arange(2.0 * N).reshape(256, -1)),
    "transposed": lambda: np.arange(N).reshape(4, 8, -1).transpose(2, 0, 1),
    "strided": lambda: np.arange(4 * N)[::4],
    "dates": lambda: np.arange(N).astype("M8[s]"),
    "durations": lambda: np.arange(N).astype("m8[ms]").reshape(256, -1).T,
    "strings": lambda: np.full(N, "abcd"),
    "booleans": lambda: np.arange(4 * N) % 3 == 0,
    "half": lambda: (np.arange(2 * N) % 1000).astype("f2"),
    "big endian": lambda: np.arange(N, dtype=">i8"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_are_read_only_views(name):
    array = ARRAYS[name]()
    got = ray.get(ray.put(array))
    assert got.dtype == array.dtype and got.shape == array.shape
    assert np.array_equal(got, array)
    assert in_store(address(got))
    assert not got.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        got[0] = got[1]
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        got.flags.writeable = True


def test_order_is_kept():
    got = ray.get(ray.put(ARRAYS["fortran"]()))
    assert got.flags.f_contiguous and not got.flags.c_contiguous


def test_two_reads_share_memory_and_copies_can_be_written():
    ref = ray.put(np.arange(N))
    first, second = ray.get([ref, ref])
    assert address(first) == address(second) == address(ray.get(ref))
    mine = first.copy()
    mine[0] = 17
    assert ray.get(ref)[0] == 0


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0, 2)])
def test_arrays_without_elements(shape):
    empty, full = ray.get(ray.put([np.zeros(shape), np.ones(N)]))
    assert empty.shape == shape and empty.dtype == "f8"
    assert in_store(address(full))


def test_arrays_of_objects_are_copied():
    array = np.array([{"a": 1}, None, "x"] * N, dtype=object)
    got = ray.get(ray.put(array))
    assert got.dtype == object and got[0] == {"a": 1} and len(got) == 3 * N
    got[0] = 5  # as in Ray: it is the reader's own


def test_dates_in_records_survive():
    array = np.zeros(N, np.dtype([("when", "M8[s]"), ("what", "i8")]))
    array["when"] = np.arange(N)
    assert np.array_equal(ray.get(ray.put(array)), array)


def test_bytes_like_values():
    data = bytes(range(256)) * 1024
    text, array, view = (ray.get(ray.put(kind(data))) for kind in (bytes, bytearray, memoryview))
    assert type(text) is bytes and text == data
    assert type(array) is bytearray and array == data
    array[0] = 9  # its reader's own
    assert type(view) is memoryview and view == data and view.readonly
    assert in_store(address(np.frombuffer(view, "u1")))
    with pytest.raises(TypeError, match="read-only"):
        view[0] = 1
    got = ray.get(ray.put(pickle.PickleBuffer(data)))
    assert in_store(address(np.frombuffer(got, "u1")))


def test_memoryviews_keep_format_and_shape():
    view = memoryview(np.arange(N, dtype="f8").reshape(256, -1))
    got = ray.get(ray.put({"deep": [view]}))["deep"][0]
    assert (got.format, got.shape, got.readonly) == ("d", view.shape, True)
    assert got.tolist() == view.tolist()
    assert ray.get(ray.put(memoryview(b"abcdef")[::2])) == b"ace"
    assert ray.get(ray.put(memoryview(b""))) == b""


def test_an_error_may_carry_a_memoryview():
    @ray.remote
    def fail():
        raise ValueError(memoryview(bytes(1000)))

    with pytest.raises(ValueError):
        ray.get(fail.remote())


@ray.remote
def address_of(array):
    return array.flags.writeable, in_store(address(array)), float(array.sum())


def test_arguments_and_returns_are_views_too():
    ref = ray.put(np.ones(N))
    assert ray.get(address_of.remote(ref)) == (False, True, N)

    @ray.remote
    def make():
        return {"a": np.ones(N), "b": [np.zeros(N)]}

    got = ray.get(make.remote())
    assert in_store(address(got["a"])) and in_store(address(got["b"][0]))


# ---------------------------------------------------------------- how long memory stays


def fill_the_store() -> None:
    """Whatever may be reused is, three times over."""
    for value in range(3 * 16):
        ray.put(np.full(STORE // 16 // 8, value, dtype="i8"))


def numbers() -> np.ndarray:
    return np.random.default_rng(4).integers(0, 1 << 62, N)


VIEWS = {
    "the array": lambda array: array,
    "a slice": lambda array: array[10:20],
    "a reshaped slice of a slice": lambda array: array[8:][::2].reshape(4, -1)[1:],
    "a memoryview": lambda array: memoryview(array)[5:],
    "an array of a memoryview": lambda array: np.frombuffer(memoryview(array), "i8"),
    "an array around a buffer": lambda array: np.ndarray((100,), "i8", memoryview(array)),
    "another type": lambda array: array.view("u1"),
    "a deep container": lambda array: {"a": [(array[1:],)]},
    "an iterator": lambda array: iter(array),
}


def content(view) -> list:
    if isinstance(view, dict):
        view = view["a"][0][0]
    return view.tolist() if hasattr(view, "tolist") else list(view)


@pytest.mark.parametrize("name", VIEWS)
def test_memory_stays_while_a_view_lives(name):
    expected = content(VIEWS[name](numbers()))
    ref = ray.put(numbers())
    view = VIEWS[name](ray.get(ref))
    del ref
    gc.collect()
    fill_the_store()
    assert held() >= 1
    assert content(view) == expected
    del view
    eventually(lambda: held() == 0, "the block to be given back")


def test_a_raw_view_holds_its_memory_through_numpy():
    """`numpy.ndarray(buffer=…)` forgets the memoryview that it was given, not what that one views."""
    ref = ray.put(memoryview(numbers()))
    view = np.ndarray((N,), "i8", ray.get(ref).cast("B"))
    del ref
    fill_the_store()
    assert np.array_equal(view, numbers())
    del view


def test_each_member_of_a_container_holds_the_whole():
    ref = ray.put([numbers(), {"b": numbers() + 1}])
    first, second = ray.get(ref)
    second = second["b"]
    del ref, first
    fill_the_store()
    assert np.array_equal(second, numbers() + 1)
    del second


def test_views_of_several_reads_are_counted_apart():
    ref = ray.put(numbers())
    views = [ray.get(ref)[start:] for start in range(5)]
    del ref
    while len(views) > 1:
        views.pop(0)
        fill_the_store()
        assert held() == 1
    assert np.array_equal(views[0], numbers()[4:])


def test_a_view_may_outlive_its_thread_and_die_in_another():
    ref = ray.put(numbers())
    views: list[np.ndarray] = []
    reader = threading.Thread(target=lambda ref: views.append(ray.get(ref)[3:]), args=(ref,))
    reader.start()
    reader.join()
    del ref
    fill_the_store()
    assert np.array_equal(views[0], numbers()[3:])
    killer = threading.Thread(target=views.clear)
    killer.start()
    killer.join()


def test_a_new_ref_finds_the_views_of_the_old_one():
    @ray.remote
    class Keeper:
        def __init__(self, refs):
            self.refs = refs

        def give(self):
            return self.refs

    ref = ray.put(numbers())
    keeper = Keeper.remote([ref])
    ray.get(keeper.give.remote())
    view = ray.get(ref)
    del ref
    (again,) = ray.get(keeper.give.remote())
    assert address(ray.get(again)) == address(view)
    del keeper, again
    fill_the_store()
    assert np.array_equal(view, numbers())


def test_an_actor_keeps_a_view_as_its_state():
    @ray.remote
    class Reader:
        def __init__(self, array):
            self.part = array[1:]

        def check(self, expected):
            return bool(np.array_equal(self.part, expected[1:]))

    ref = ray.put(numbers())
    reader = Reader.remote(ref)
    ray.get(reader.check.remote(numbers()))
    del ref
    fill_the_store()
    assert ray.get(reader.check.remote(numbers()))
    ray.kill(reader)


# ---------------------------------------------------------------- libraries


def test_columns_of_a_data_frame():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": np.arange(N), "b": np.ones(N), "c": np.arange(N).astype("M8[ns]"), "d": ["x"] * N})
    ref = ray.put(frame)
    got = ray.get(ref)
    pandas.testing.assert_frame_equal(got, frame)
    assert all(in_store(address(got[name].to_numpy().view("i8"))) for name in "abc")
    with pytest.raises(ValueError, match="read-only"):
        got["a"].to_numpy()[0] = 5
    column = got["b"]
    del ref, got
    fill_the_store()
    assert column.sum() == N
    del column


def test_buffers_of_an_arrow_table():
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"x": np.arange(N), "s": [f"text {i}" for i in range(N)]})
    ref = ray.put(table)
    got = ray.get(ref)
    assert got.equals(table)
    buffers = [buffer for column in got.columns for chunk in column.chunks for buffer in chunk.buffers() if buffer]
    assert len(buffers) == 3
    assert all(in_store(buffer.address) and not buffer.is_mutable for buffer in buffers)
    column = got["s"]
    del ref, got, buffers
    fill_the_store()
    assert column[N - 1].as_py() == f"text {N - 1}"
    del column


def test_tensors_are_copies_unless_views_are_asked_for():
    torch = pytest.importorskip("torch")
    got = ray.get(ray.put(torch.arange(N)))
    assert torch.equal(got, torch.arange(N)) and not in_store(got.data_ptr())
    got[0] = 5  # its reader's own


def test_tensors_as_views():
    torch = pytest.importorskip("torch")
    from hpcray.protocol.out_of_band import view_tensors

    view_tensors(True)
    try:
        for tensor in (torch.arange(N), torch.ones(256, N // 256, dtype=torch.bfloat16), torch.arange(2 * N) % 2 == 0):
            got = ray.get(ray.put(tensor))
            assert got.dtype == tensor.dtype and got.shape == tensor.shape and torch.equal(got, tensor)
            assert in_store(got.data_ptr())
        others = [torch.arange(N)[::2], torch.zeros(0, 3), torch.ones(N, requires_grad=True), torch.tensor(3.5)]
        for tensor, got in zip(others, ray.get(ray.put(others)), strict=True):
            assert torch.equal(got, tensor) and got.requires_grad == tensor.requires_grad
        part = ray.get(ray.put(torch.arange(N)))[5:]
        fill_the_store()
        assert torch.equal(part, torch.arange(N)[5:])
        del got, part, tensor, others
    finally:
        view_tensors(False)
