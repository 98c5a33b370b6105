"""Cyclic garbage that holds refs and actor handles is collected when what it holds is short."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from engine import ray

from hpcray.compat.names.internal_api import global_gc

pytestmark = pytest.mark.timeout(120)


class Cycle:
    def __init__(self, *held: object) -> None:
        self.held, self.cycle = held, self


@ray.remote(num_cpus=0)
class Holder:
    def __init__(self) -> None:
        gc.disable()
        self.garbage = weakref.ref(Cycle())

    def holds(self) -> bool:
        return self.garbage() is not None


@ray.remote(num_cpus=1)
class Busy:
    def ready(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_automatic_gc() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        ray.shutdown()
        gc.enable()


def wait_until_gone(*gone) -> None:
    deadline = time.monotonic() + 30
    while not all(is_gone() for is_gone in gone):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_all_processes_collect_at_least_once_an_interval():
    ray.init(num_cpus=1, _system_config={"local_gc_interval_s": 1, "local_gc_min_interval_s": 0})
    holder, here = Holder.remote(), weakref.ref(Cycle())
    wait_until_gone(lambda: here() is None, lambda: not ray.get(holder.holds.remote()))


def test_global_gc_makes_every_process_collect():
    ray.init(num_cpus=1)
    holder, here = Holder.remote(), weakref.ref(Cycle())
    assert ray.get(holder.holds.remote()) and here() is not None
    global_gc()
    wait_until_gone(lambda: here() is None, lambda: not ray.get(holder.holds.remote()))


def test_a_full_store_collects_the_garbage_whose_refs_fill_it():
    ray.init(num_cpus=1, object_store_memory=64 << 20)
    holder, here = Holder.remote(), weakref.ref(Cycle(ray.put(np.zeros(24 << 20, np.uint8))))
    assert ray.get(holder.holds.remote()) and here() is not None
    ray.put(np.zeros(48 << 20, np.uint8))
    wait_until_gone(lambda: here() is None, lambda: not ray.get(holder.holds.remote()))


@pytest.mark.slow
def test_an_actor_whose_handle_is_garbage_gives_its_cpu_to_one_that_waits():
    ray.init(num_cpus=1)
    for _ in range(2):
        actor = Busy.remote()
        assert ray.get(actor.ready.remote())
        Cycle(actor)
        del actor
    assert ray.get(Busy.remote().ready.remote(), timeout=60)
