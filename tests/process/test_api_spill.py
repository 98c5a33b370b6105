"""More data than the object store holds: it goes to disk and comes back as it was."""

from __future__ import annotations

import errno
import gc
import time

import numpy as np
import pytest
from engine import ray

from hpcray.runtime.core_worker import object_reader
from hpcray.runtime.core_worker.core_worker import need_process

pytestmark = [pytest.mark.usefixtures("session"), pytest.mark.timeout(180)]
STORE = 48 << 20
INIT = {"num_cpus": 2, "object_store_memory": STORE}

MB4 = (4 << 20) // 8


def block(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 62, MB4)


@ray.remote
def make(seed):
    return block(seed)


@ray.remote
def check(seed, array):
    return bool(np.array_equal(array, block(seed)))


@ray.remote
def check_all(seeds, refs):
    return all(np.array_equal(ray.get(ref), block(seed)) for seed, ref in zip(seeds, refs, strict=True))


def store() -> dict:
    (numbers,) = need_process().diagnostics.list_stores(0, 60.0)
    return numbers


def wait_until(what) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, store()
        time.sleep(0.02)


def test_puts_beyond_the_store_come_back_bit_by_bit():
    refs = [ray.put(block(seed)) for seed in range(60)]  # 240 MB
    for _ in range(2):
        for seed, ref in enumerate(refs):
            assert np.array_equal(ray.get(ref), block(seed))


def test_returns_beyond_the_store_are_arguments_of_other_tasks():
    refs = [make.remote(seed) for seed in range(60)]
    assert all(ray.get([check.remote(seed, ref) for seed, ref in enumerate(refs)]))


def test_a_task_reads_one_after_the_other_what_never_fits_together():
    refs = [ray.put(block(seed)) for seed in range(40)]
    assert ray.get(check_all.remote(list(range(40)), refs))


def test_small_and_large_objects_together():
    small = [ray.put(bytes([seed]) * 120_000) for seed in range(250)]  # 30 MB in small objects that live in the store
    large = [ray.put(block(seed)) for seed in range(20)]
    assert all(ray.get(ref) == bytes([seed]) * 120_000 for seed, ref in enumerate(small))
    assert all(np.array_equal(ray.get(ref), block(seed)) for seed, ref in enumerate(large))


def test_arrays_in_use_stay_where_they_are():
    first = [ray.get(ray.put(block(seed))) for seed in range(5)]  # 20 MB that views hold
    more = [ray.put(block(seed)) for seed in range(100, 130)]
    assert all(np.array_equal(array, block(seed)) for seed, array in enumerate(first))
    assert all(np.array_equal(ray.get(ref), block(seed)) for seed, ref in enumerate(more, 100))


def test_what_does_not_fit_at_once_is_read_past_the_store():
    refs = [ray.put(block(seed)) for seed in range(20)]  # 80 MB
    arrays = ray.get(refs)
    assert all(np.array_equal(array, block(seed)) for seed, array in enumerate(arrays))
    assert not any(array.flags.writeable for array in arrays)
    assert store()["lent"] > 0
    # The store is full of what the arrays above need, so nothing can be spilled; what is on disk is read all the same.
    del refs[10:]
    again = ray.get(refs)
    assert all(np.array_equal(array, block(seed)) for seed, array in enumerate(again))
    del arrays, again, refs
    gc.collect()
    wait_until(lambda: store()["objects"] == store()["on_disk"] == 0)


def test_a_file_that_a_process_cannot_open_is_an_error_that_says_so_and_nothing_is_lost(monkeypatch):
    refs = [ray.put(block(seed)) for seed in range(100, 110)]
    held = [ray.get(ray.put(block(seed))) for seed in range(9)]  # 36 MB that views hold
    more = [ray.get(ref) for ref in refs[5:]]

    def broken(path, position, size):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(object_reader, "read_private_copy", broken)
        with pytest.raises(ray.exceptions.ObjectStoreFullError, match=r"past the store failed.*Too many open.*hint:"):
            ray.get(refs[:5])
    arrays = ray.get(refs[:5])
    assert all(np.array_equal(array, block(seed)) for seed, array in enumerate(arrays, 100))
    del held, more


def test_wait_and_get_of_what_is_read_past_the_store():
    held = [ray.get(ray.put(block(seed))) for seed in range(9)]  # 36 MB that views hold
    refs = [ray.put(block(seed)) for seed in range(100, 110)]
    more = [ray.get(ref) for ref in refs[5:]]
    done, rest = ray.wait(refs[:5], num_returns=5, timeout=100)
    assert len(done) == 5 and not rest
    assert all(np.array_equal(ray.get(ref), block(seed)) for seed, ref in enumerate(done, 100))
    assert all(np.array_equal(array, block(seed)) for seed, array in enumerate(held))
    assert all(np.array_equal(array, block(seed)) for seed, array in enumerate(more, 105))


def test_a_get_of_a_few_survives_pressure_from_others():
    refs = [ray.put(block(seed)) for seed in range(30)]
    noise = [make.remote(seed) for seed in range(500, 540)]
    for start in range(0, 30, 5):
        arrays = ray.get(refs[start : start + 5])
        assert all(np.array_equal(array, block(start + at)) for at, array in enumerate(arrays))
        del arrays
    assert all(ray.get([check.remote(seed, ref) for seed, ref in enumerate(noise, 500)]))
