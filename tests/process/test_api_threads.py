"""Many threads of one driver use it at once."""

from __future__ import annotations

import gc
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from engine import ray

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 4, "object_store_memory": 256 << 20}


@ray.remote
def echo(value):
    return value


@ray.remote
class Counter:
    def __init__(self):
        self.value = 0

    def add(self, amount=1):
        self.value += amount
        return self.value


def in_threads(count, work):
    """Results of `work(i)` for each thread; the first error is raised."""
    start = threading.Barrier(count)

    def run(i):
        start.wait(30)
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def test_threads_put_and_get_small_values():
    def work(i):
        refs = [ray.put((i, j)) for j in range(300)]
        return ray.get(refs) == [(i, j) for j in range(300)]

    assert all(in_threads(8, work))


def test_threads_put_and_get_arrays():
    def work(i):
        for j in range(25):
            array = np.full(200_000, i * 100 + j)
            ref = ray.put(array)
            got = ray.get(ref)
            del ref
            if not (got == array).all():
                return False
        return True

    assert all(in_threads(8, work))


def test_threads_submit_tasks():
    def work(i):
        return ray.get([echo.remote((i, j)) for j in range(250)]) == [(i, j) for j in range(250)]

    assert all(in_threads(8, work))


def test_threads_submit_tasks_one_by_one():
    def work(i):
        return all(ray.get(echo.remote((i, j))) == (i, j) for j in range(50))

    assert all(in_threads(6, work))


def test_threads_call_one_actor():
    counter = Counter.remote()

    def work(_):
        found = ray.get([counter.add.remote() for _ in range(100)])
        return found == sorted(found)

    assert all(in_threads(8, work))
    assert ray.get(counter.add.remote(0)) == 800


def test_many_threads_wait_for_one_ref():
    @ray.remote
    class Gate:
        def __init__(self):
            self.event = threading.Event()

        def wait(self):
            assert self.event.wait(30)
            return np.arange(200_000)

        def open(self):
            self.event.set()

    gate = Gate.options(max_concurrency=2).remote()
    ref = gate.wait.remote()
    timer = threading.Timer(0.3, lambda: ray.get(gate.open.remote()))
    timer.start()
    assert all(int(array[-1]) == 199_999 for array in in_threads(12, lambda _: ray.get(ref)))
    timer.join()


def test_refs_handed_between_threads():
    handed: queue.Queue = queue.Queue()

    def produce(_):
        for j in range(200):
            handed.put(ray.put(j) if j % 2 else echo.remote(j))
        return 0

    def consume(_):
        total = 0
        for _ in range(200):
            total += ray.get(handed.get(timeout=30))
            gc.collect(0)
        return total

    found = in_threads(4, lambda i: produce(i) if i % 2 else consume(i))
    assert sum(found) == 2 * sum(range(200))


def test_threads_wait_for_refs():
    def work(i):
        pending, done = [echo.remote(j) for j in range(50)], 0
        while pending:
            ready, pending = ray.wait(pending, num_returns=min(7, len(pending)))
            done += len(ready)
        return done

    assert in_threads(6, work) == [50] * 6


def test_threads_create_actors():
    def work(i):
        counter = Counter.options(num_cpus=0).remote()
        return ray.get([counter.add.remote(i), counter.add.remote(i)])

    assert in_threads(4, work) == [[i, 2 * i] for i in range(4)]


def test_many_threads_use_a_new_function_first():
    fresh = ray.remote(lambda x: x + 1)
    assert in_threads(8, lambda i: ray.get(fresh.remote(i))) == list(range(1, 9))


def test_a_get_in_one_thread_does_not_hold_up_another():
    """One thread waits for something that only another thread's work brings."""
    counter, box = Counter.remote(), []

    def work(i):
        if i == 0:
            return ray.get(box_filled().remote([echo.remote("x")]))
        return ray.get(counter.add.remote())

    def box_filled():
        return ray.remote(lambda refs: ray.get(refs[0]))

    assert in_threads(2, work) == ["x", 1]
    assert box == []


def test_threads_inside_a_task_use_the_api():
    @ray.remote
    def threaded():
        return in_threads(4, lambda i: sum(ray.get([echo.remote(i), ray.put(i)])))

    assert ray.get(threaded.remote()) == [0, 2, 4, 6]
