"""Objects for which the store has no memory at all lie in a file that processes map: nothing fails while the disk has
room."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
from engine import ray

from hpcray.compat.names.internal_api import memory_summary
from hpcray.runtime.core_worker.core_worker import need_process
from hpcray.util.state import list_cluster_events

pytestmark = pytest.mark.timeout(180)
STORE = 32 << 20


def store() -> dict:
    (numbers,) = need_process().diagnostics.list_stores(0, 60.0)
    return numbers


def wait_until(what) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline, store()
        time.sleep(0.05)


def wait_until_empty() -> None:
    gc.collect()
    wait_until(lambda: not store()["overflow"] and not store()["objects"])


@ray.remote
def made(size, value):
    return np.full(size, value, np.uint8)


@ray.remote
def total(array):
    return int(array.sum())


@pytest.mark.usefixtures("session")
class TestWithRoomOnDisk:
    def test_an_object_larger_than_the_store_is_written_and_read_by_several_processes(self):
        ref = ray.put(np.arange(3 * STORE // 8))
        array = ray.get(ref)
        assert not array.flags.writeable and array.ctypes.data % 64 == 0
        assert np.array_equal(array, np.arange(3 * STORE // 8))
        n = 2 * STORE
        assert ray.get([total.remote(ref), total.remote(made.remote(n, 3))]) == [int(array.sum()), 3 * n]
        assert store()["overflow"] >= 3 * STORE
        del ref, array
        wait_until_empty()

    def test_arrays_in_use_that_fill_the_store_do_not_make_later_ones_fail(self):
        arrays = [ray.get(ray.put(np.full(STORE // 4, value, np.uint8))) for value in range(10)]
        assert [set(array[:: 1 << 20].tolist()) for array in arrays] == [{value} for value in range(10)]
        assert store()["overflow"] > 0
        del arrays
        wait_until_empty()

    def test_use_of_the_store_is_reported_in_rays_words(self):
        total = ray.cluster_resources()["object_store_memory"]
        ref = ray.put(np.zeros(STORE // 2, np.uint8))
        past = ray.put(np.zeros(2 * STORE, np.uint8))
        wait_until(lambda: ray.available_resources()["object_store_memory"] < 0.6 * total)
        text = memory_summary(stats_only=True)
        assert "Plasma memory usage 16 MiB, 2 objects, 50.0" in text
        assert "Plasma filesystem mmap usage: 64 MiB" in text
        assert ref.hex() in memory_summary() and past.hex() in memory_summary()
        del ref, past
        wait_until(lambda: ray.available_resources()["object_store_memory"] == total)

    def test_a_buffer_larger_than_the_store_is_filled_in_place(self):
        with ray.internal.create((2 * STORE,), "uint8") as buffer:
            buffer.array[:] = 5
            ref = buffer.seal()
        assert ray.get(total.remote(ref)) == 10 * STORE
        del ref, buffer
        wait_until_empty()

    def test_what_a_dead_worker_had_begun_is_given_back(self):
        @ray.remote(max_retries=0)
        def dies():
            import os

            ray.put(np.zeros(2 * STORE, np.uint8))
            os._exit(1)

        with pytest.raises(ray.exceptions.WorkerCrashedError):
            ray.get(dies.remote())
        wait_until_empty()


INIT = {"num_cpus": 2, "object_store_memory": STORE}


def test_a_disk_that_is_fuller_than_the_threshold_takes_nothing_more():
    ray.shutdown()
    ray.init(num_cpus=1, object_store_memory=STORE, _system_config={"local_fs_capacity_threshold": 1e-9})
    try:
        with pytest.raises(ray.exceptions.OutOfDiskError, match="HPCRAY_DISK_CAPACITY_THRESHOLD"):
            ray.put(np.zeros(2 * STORE, np.uint8))
        with pytest.raises(ray.exceptions.RayTaskError) as caught:
            ray.get(made.remote(2 * STORE, 1))
        assert isinstance(caught.value.cause, ray.exceptions.OutOfDiskError)
        event = list_cluster_events()[0]
        assert event["severity"] == "ERROR" and "will fail if spilling is required" in event["message"]
        assert ray.get(total.remote(ray.put(np.ones(STORE // 2, np.uint8)))) == STORE // 2
    finally:
        ray.shutdown()
