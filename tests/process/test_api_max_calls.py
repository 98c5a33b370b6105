"""max_calls: a worker leaves after so many calls of a function, and nothing is lost."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from engine import PATIENCE, Marks, alive, eventually, exceptions, ray

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 2, "num_gpus": 1}


@ray.remote(max_calls=1)
def once(value=None):
    return value, os.getpid()


@ray.remote(max_calls=3)
def thrice(path="", i=0):
    if path:
        with open(path, "a") as file:
            file.write(f"{i}\n")
    return os.getpid()


@ray.remote
def pid():
    return os.getpid()


@ray.remote
def echo(value, delay=0.0):
    time.sleep(delay)
    return value


def test_max_calls_1_gives_every_call_a_worker_of_its_own():
    found = ray.get([once.remote(i) for i in range(6)])
    assert [value for value, _ in found] == list(range(6))
    assert len({pid for _, pid in found}) == 6
    eventually(lambda: not any(alive(pid) for _, pid in found))


def test_no_worker_makes_more_than_max_calls():
    calls = Counter(ray.get([thrice.remote() for _ in range(20)]))
    assert sum(calls.values()) == 20
    assert max(calls.values()) <= 3


def test_max_calls_holds_for_calls_one_after_the_other():
    calls = Counter(ray.get(thrice.remote()) for _ in range(9))
    assert max(calls.values()) <= 3


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.slow) for turn in range(1, 5))])
def test_calls_sent_ahead_run_exactly_once_with_max_calls(turn, tmp_path: Path):
    path = tmp_path / "calls"
    ray.get([thrice.remote() for _ in range(10)])  # known to be short from now on
    ray.get([thrice.remote(str(path), i) for i in range(100)])
    assert sorted(int(line) for line in path.read_text().split()) == list(range(100))


def test_calls_of_other_functions_do_not_count_for_max_calls():
    other = {ray.get(pid.remote()) for _ in range(10)}
    assert len(other) <= 2
    first = ray.get(thrice.remote())
    assert all(alive(pid) for pid in other | {first})


def test_large_results_and_refs_outlive_a_worker_with_max_calls():
    @ray.remote(max_calls=1)
    def make():
        return np.arange(300_000), [ray.put("inner"), ray.put(np.ones(300_000)), echo.remote("late", 0.5)], os.getpid()

    ref = make.remote()
    array, inner, worker = ray.get(ref)
    assert array[-1] == 299_999
    assert ray.get(inner[0]) == "inner"
    assert ray.get(inner[1]).sum() == 300_000
    assert ray.get(inner[2]) == "late"
    assert alive(worker)  # it owns what we refer to
    del inner, ref
    eventually(lambda: not alive(worker))


def test_workers_with_max_calls_that_stay_for_their_objects_hold_no_resources():
    @ray.remote(num_gpus=1)  # its max_calls is 1
    def make(i):
        return [ray.put(i)]

    kept = [ray.get(make.remote(i), timeout=PATIENCE)[0] for i in range(6)]
    assert ray.get(kept, timeout=PATIENCE) == list(range(6))


def test_a_worker_with_max_calls_finishes_children_that_have_no_waiter(marks: Marks):
    @ray.remote
    def child():
        time.sleep(0.3)
        marks.add()

    @ray.remote(max_calls=1)
    def parent():
        parent.kept = child.remote()
        return os.getpid()

    worker = ray.get(parent.remote())
    eventually(lambda: not alive(worker))
    assert marks.lines() == ["x"]


def test_a_call_that_raises_counts_for_max_calls():
    @ray.remote(max_calls=1)
    def fail():
        raise KeyError(os.getpid())

    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            ray.get(fail.remote())
        eventually(lambda caught=caught: not alive(caught.value.args[0]))


def test_retries_of_exceptions_count_for_max_calls(marks: Marks):
    @ray.remote(max_calls=1, max_retries=3, retry_exceptions=True)
    def third_time():
        if marks.add() < 3:
            raise ValueError
        return os.getpid()

    assert ray.get(third_time.remote())
    assert len(marks.lines()) == 3


def test_max_calls_holds_for_calls_with_options_and_a_name():
    assert len({ray.get(once.options(name=f"n{i}", num_cpus=0.5).remote())[1] for i in range(3)}) == 3


def test_the_last_call_of_a_worker_can_be_cancelled(marks: Marks):
    @ray.remote(max_calls=1)
    def sleep():
        marks.add()
        while True:
            time.sleep(0.01)

    ref = sleep.remote()
    eventually(marks.lines)
    ray.cancel(ref)
    with pytest.raises(exceptions.TaskCancelledError):
        ray.get(ref)
    assert ray.get(echo.remote(1)) == 1


def test_options_refuse_max_calls():
    with pytest.raises(ValueError, match="max_calls"):
        echo.options(max_calls=1)
