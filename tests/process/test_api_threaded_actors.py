"""Actors with max_concurrency > 1 and plain methods: calls run in threads."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from engine import PATIENCE, eventually, exceptions, hpcray_only, ray

pytestmark = pytest.mark.usefixtures("session")


@ray.remote
class Threaded:
    def __init__(self, parties=4):
        self.barrier = threading.Barrier(parties)
        self.lock = threading.Lock()
        self.event = threading.Event()
        self.inside = 0
        self.most = 0
        self.count = 0

    def meet(self):
        self.barrier.wait(PATIENCE)
        return threading.get_ident()

    def crowd(self, seconds):
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        time.sleep(seconds)
        with self.lock:
            self.inside -= 1
        return self.most

    def wait(self):
        assert self.event.wait(PATIENCE)
        return "opened"

    def open(self):
        self.event.set()

    def nested(self, i):
        box = ray.get([double.remote(i), double.remote(ray.put(i))])
        return sum(box) + ray.get(ray.put(0))

    def add(self):
        with self.lock:
            self.count += 1

    def read(self):
        return self.count

    def fail(self, i):
        raise ValueError(i)

    def crash(self):
        os._exit(1)

    def context(self):
        before = ray.get_runtime_context().get_task_id()
        time.sleep(0.02)
        return before, ray.get_runtime_context().get_task_id()


@ray.remote
def double(x):
    return x * 2


def hold_answers(_):
    """As if all that follows came within the millisecond in which answers may wait for others."""
    from hpcray.runtime.worker import concurrency_groups

    concurrency_groups.HOLD = 1e9


@hpcray_only
def test_an_answer_does_not_wait_for_calls_behind_it():
    """While calls wait for a thread answers leave together, but not when those calls take for ever."""
    actor = Threaded.options(max_concurrency=2).remote()
    ray.get(actor.__ray_call__.remote(hold_answers))
    # So long after the calls came nothing is awake in the worker that would send the answers anyway.
    refs = [actor.crowd.remote(0.2) for _ in range(4)]
    waiting = [actor.wait.remote() for _ in range(4)]
    ray.get(refs, timeout=PATIENCE / 2)
    assert ray.wait(waiting, timeout=0)[0] == []
    ray.kill(actor)


def test_calls_run_at_the_same_time():
    actor = Threaded.options(max_concurrency=4).remote()
    assert len(set(ray.get([actor.meet.remote() for _ in range(4)]))) == 4


def test_no_more_than_max_concurrency():
    actor = Threaded.options(max_concurrency=3).remote()
    assert max(ray.get([actor.crowd.remote(0.05) for _ in range(12)])) == 3


def test_one_by_default():
    actor = Threaded.remote()
    assert max(ray.get([actor.crowd.remote(0.01) for _ in range(10)])) == 1


def test_one_call_can_release_another():
    actor = Threaded.options(max_concurrency=2).remote()
    waiting = actor.wait.remote()
    ray.get(actor.open.remote())
    assert ray.get(waiting) == "opened"


def test_threads_use_ray_at_once():
    actor = Threaded.options(max_concurrency=8).remote()
    assert ray.get([actor.nested.remote(i) for i in range(40)]) == [4 * i for i in range(40)]


def test_nothing_is_lost():
    actor = Threaded.options(max_concurrency=10).remote()
    ray.get([actor.add.remote() for _ in range(1000)])
    assert ray.get(actor.read.remote()) == 1000


def test_each_call_has_its_own_exception():
    actor = Threaded.options(max_concurrency=5).remote()
    for i, ref in enumerate([actor.fail.remote(i) for i in range(10)]):
        with pytest.raises(ValueError, match=str(i)):
            ray.get(ref)


def test_a_crash_fails_all_of_them():
    actor = Threaded.options(max_concurrency=5).remote()
    refs = [actor.wait.remote() for _ in range(3)]
    refs.append(actor.crash.remote())
    for ref in refs:
        with pytest.raises(exceptions.ActorDiedError):
            ray.get(ref)


def test_each_call_has_its_own_context():
    actor = Threaded.options(max_concurrency=10).remote()
    found = ray.get([actor.context.remote() for _ in range(20)])
    assert all(before == after for before, after in found)
    assert len({before for before, _ in found}) == 20


def test_large_results_from_many_threads():
    @ray.remote(max_concurrency=4)
    class Maker:
        def make(self, i):
            return np.full(200_000, i)

    maker = Maker.remote()
    for i, array in enumerate(ray.get([maker.make.remote(i) for i in range(16)])):
        assert (array == i).all()


def test_a_thread_of_the_users_own_in_an_actor():
    @ray.remote
    class Background:
        def __init__(self):
            self.found = []
            threading.Thread(target=self.run, daemon=True).start()

        def run(self):
            for i in range(5):
                self.found.append(ray.get(double.remote(i)))

        def read(self):
            return self.found

    background = Background.remote()
    eventually(lambda: ray.get(background.read.remote()) == [0, 2, 4, 6, 8])


def test_calls_made_together_run_in_threads_of_their_own_that_stay():
    @ray.remote(max_concurrency=4)
    class Local:
        def __init__(self):
            self.own = threading.local()

        def mark(self):
            marked = hasattr(self.own, "marked")
            self.own.marked = True
            return marked

    local = Local.remote()
    assert ray.get([local.mark.remote() for _ in range(4)]) == [False] * 4
    assert ray.get([local.mark.remote() for _ in range(20)]) == [True] * 20
