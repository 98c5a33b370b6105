"""Objects: put, get, zero-copy arrays, refs as values."""

from __future__ import annotations

import copy
import gc
import pickle

import numpy as np
import pytest
from engine import hpcray_only, ray

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 4, "object_store_memory": 256 << 20}

MB10 = 10 * 2**20 // 8


@ray.remote
def echo(value):
    return value


@ray.remote
def ramp(count, start=0):
    return np.arange(start, start + count)


class Tree:
    """A class of this module: workers import it."""

    def __init__(self, *children):
        self.children = children

    def __eq__(self, other):
        return type(other) is Tree and self.children == other.children


class TestPutAndGet:
    @pytest.mark.parametrize(
        "value", [None, 0, "x", b"", [1, [2]], {"a": {1, 2}}, Tree(Tree(), Tree(1)), int, len, ValueError, 1 << 100]
    )
    def test_round_trip(self, value):
        assert ray.get(ray.put(value)) == value

    def test_a_value_is_stored_as_it_is_now(self):
        value = [1]
        ref = ray.put(value)
        value.append(2)
        assert ray.get(ref) == [1]
        ray.get(ref).append(3)
        assert ray.get(ref) == [1]

    def test_a_list_of_refs(self):
        refs = [ray.put(i) for i in range(100)]
        assert ray.get(refs) == list(range(100))
        assert ray.get(refs[::-1]) == list(range(99, -1, -1))
        assert ray.get([refs[3], refs[3]]) == [3, 3]
        assert ray.get([]) == []

    def test_small_and_large_in_one_get(self):
        refs = [ray.put(1), ramp.remote(200_000), ray.put(np.zeros(200_000)), echo.remote("t")]
        one, arange, zeros, text = ray.get(refs)
        assert (one, text) == (1, "t")
        assert arange[-1] == 199_999
        assert not zeros.any()

    def test_functions_classes_and_lambdas_are_values(self):
        class Local:
            x = 5

        assert ray.get(ray.put(lambda x: x + 1))(1) == 2
        assert ray.get(ray.put(Local)).x == 5
        assert ray.get(echo.remote(Local())).x == 5

    @pytest.mark.parametrize("size", [0, 1, 1_000, 99_000, 100 * 1024, 101 * 1024, 500_000, 5_000_000])
    def test_bytes_around_the_inline_limit(self, size):
        value = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        assert ray.get(ray.put(value)) == value
        assert ray.get(echo.remote(value)) == value
        assert ray.get(echo.remote(ray.put(value))) == value

    def test_ten_thousand_small_puts(self):
        refs = [ray.put(i) for i in range(10_000)]
        assert ray.get(refs) == list(range(10_000))

    def test_a_ref_cannot_be_put(self):
        with pytest.raises(TypeError, match=r"not allowed"):
            ray.put(ray.put(1))

    @pytest.mark.parametrize(
        ("bad", "error"), [(1, ValueError), ("ref", ValueError), ({}, ValueError), ([1], TypeError)]
    )
    def test_get_takes_refs(self, bad, error):
        with pytest.raises(error):
            ray.get(bad)

    def test_get_takes_no_tuple(self):
        with pytest.raises(ValueError):
            ray.get((ray.put(1),))


class TestArrays:
    def test_ten_megabytes_in_and_out(self):
        array = np.random.default_rng(1).integers(0, 255, MB10)
        assert np.array_equal(ray.get(ray.put(array)), array)
        assert np.array_equal(ray.get(echo.remote(array)), array)
        assert ray.get(ramp.remote(MB10))[-1] == MB10 - 1

    @pytest.mark.parametrize("dtype", ["u1", "i2", "f4", "f8", "c16", "?", "M8[s]", "S7", "U3", "V5"])
    def test_types(self, dtype):
        array = np.zeros(100_000, dtype=dtype)
        array[7] = np.ones(1, dtype="u1").astype(dtype)[0] if dtype not in ("V5",) else b"ab"
        got = ray.get(echo.remote(array))
        assert got.dtype == array.dtype
        assert got.tobytes() == array.tobytes()

    @pytest.mark.parametrize(
        "make",
        [
            lambda a: a.reshape(100, 50, 40), lambda a: np.asfortranarray(a.reshape(400, 500)), lambda a: a[::2],
            lambda a: a.reshape(400, 500).T, lambda a: a.reshape(400, 500)[10:20, 5:], lambda a: a[:0], lambda a: a[3],
        ],
        ids=["3d", "fortran", "strided", "transposed", "slice", "empty", "scalar"],
    )  # fmt: skip
    def test_layouts(self, make):
        array = make(np.arange(200_000))
        got = ray.get(ray.put(array))
        assert got.shape == array.shape
        assert np.array_equal(got, array)

    def test_object_arrays_and_records(self):
        objects = np.array([1, "two", None, [3]], dtype=object)
        records = np.zeros(50_000, dtype=[("a", "i4"), ("b", "f8")])
        records["b"] = 1.5
        assert ray.get(echo.remote(objects)).tolist() == [1, "two", None, [3]]
        assert (ray.get(echo.remote(records))["b"] == 1.5).all()

    def test_large_ones_are_read_only_views(self):
        ref = ray.put(np.zeros(MB10))
        first, second = ray.get(ref), ray.get(ref)
        assert not first.flags.writeable
        assert not first.flags.owndata
        assert np.shares_memory(first, second)
        with pytest.raises(ValueError):
            first[0] = 1

    def test_a_result_is_a_read_only_view_too(self):
        got = ray.get(ramp.remote(MB10))
        assert not got.flags.writeable

    def test_an_argument_is_a_read_only_view(self):
        @ray.remote
        def flags(array, container):
            return array.flags.writeable, array.flags.owndata, container["k"].flags.writeable

        array = np.zeros(MB10)
        assert ray.get(flags.remote(ray.put(array), {"k": array})) == (False, False, False)
        assert array.flags.writeable

    def test_several_arrays_in_one_object(self):
        value = {"a": np.arange(100_000), "b": [np.ones(100_000), np.zeros(3)], "c": (np.arange(5), "text")}
        got = ray.get(ray.put(value))
        assert np.array_equal(got["a"], value["a"])
        assert got["b"][0].sum() == 100_000
        assert got["c"][1] == "text"
        assert got["c"][0].tolist() == [0, 1, 2, 3, 4]

    def test_arrays_are_aligned(self):
        got = ray.get(ray.put([b"odd", np.arange(100_000), b"x", np.ones(100_000, dtype="c16")]))
        assert all(array.ctypes.data % 64 == 0 for array in got[1::2])

    def test_memory_stays_valid_after_its_ref_is_gone(self):
        ref = ray.put(np.arange(MB10 // 10))
        array = ray.get(ref)
        part = array[1000:2000]
        del ref, array
        gc.collect()
        for i in range(200):  # far more than the store holds
            assert ray.get(ray.put(np.full(MB10 // 4, i)))[0] == i
        assert np.array_equal(part, np.arange(1000, 2000))

    def test_memory_of_a_task_result_stays_valid(self):
        arrays = [ray.get(ramp.remote(200_000, i)) for i in range(20)]
        gc.collect()
        for i in range(150):
            ray.put(np.full(MB10 // 4, i))
        assert [int(a[0]) for a in arrays] == list(range(20))
        assert all(int(a[-1]) == 199_999 + i for i, a in enumerate(arrays))

    def test_freed_memory_is_used_again(self):
        """Twenty times the store's size, in turn from the driver and from workers."""
        for i in range(256):
            assert ray.get(ray.put(np.full(MB10, i)))[-1] == i
        for i in range(64):
            assert ray.get(ramp.remote(MB10, i))[-1] == MB10 - 1 + i

    def test_a_kept_argument_stays_valid_in_the_worker(self):
        @ray.remote
        class Keeper:
            def keep(self, array):
                self.array = array[10:20]

            def read(self):
                return self.array.tolist()

        keeper = Keeper.remote()
        ray.get(keeper.keep.remote(np.arange(MB10 // 4)))
        for i in range(150):
            ray.put(np.full(MB10 // 4, i))
        assert ray.get(keeper.read.remote()) == list(range(10, 20))

    @hpcray_only
    def test_bytearray_and_memoryview_buffers(self):
        value = pickle.PickleBuffer(bytearray(b"z" * 300_000))
        assert bytes(ray.get(ray.put(value))) == b"z" * 300_000


class TestRefs:
    def test_equality_and_hash(self):
        one, two = ray.put(1), ray.put(1)
        again = ray.get(echo.remote([one]))[0]
        assert one == again
        assert hash(one) == hash(again)
        assert one != two
        assert one != 1
        assert {one: "a", two: "b"}[again] == "a"
        assert len({one, two, again}) == 2

    def test_names(self):
        ref = ray.put(1)
        assert ref.hex() == ref.binary().hex()
        assert len(ref.binary()) == ref.size()
        assert repr(ref) == f"ObjectRef({ref.hex()})"
        assert ref.is_nil() is False
        assert ray.ObjectRef.nil().is_nil() is True
        assert ref.task_id() is not None

    def test_ids_are_unique(self):
        refs = [ray.put(None) for _ in range(1000)] + [echo.remote(None) for _ in range(1000)]
        assert len({ref.hex() for ref in refs}) == 2000

    def test_copies_are_the_same_ref(self):
        ref = ray.put("v")
        for other in (copy.copy(ref), copy.deepcopy(ref), copy.deepcopy({"k": [ref]})["k"][0]):
            assert other == ref
            assert ray.get(other) == "v"

    def test_generic_subscript_and_alias(self):
        assert ray.ObjectRef[int] is not None
        assert isinstance(ray.put(1), ray.ObjectRef)
        assert ray.ObjectID is ray.ObjectRef

    def test_not_a_value(self):
        ref = ray.put([1, 2])
        with pytest.raises(TypeError):
            iter(ref)
        with pytest.raises(TypeError):
            ref + 1
