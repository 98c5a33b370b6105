"""Refs in results that do not arrive as they were first made: a worker dies at its reply, a later return fails."""

from __future__ import annotations

import gc
import os
import signal

import numpy as np
import pytest
from engine import PATIENCE, eventually, hpcray_only, ray

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 2, "object_store_memory": 64 << 20}
LARGE = 200_000


def borrowers(ref):
    """Who else holds an object of ours, as our table says."""
    from hpcray.runtime.core_worker.core_worker import current

    gc.collect()
    with current.process.engine.lock:
        current.process.drain()
        return dict(current.process.table.entries[ref._id].borrowers or {})


@ray.remote(max_retries=2)
def dies_at_its_first_reply(flag):
    from hpcray.runtime.worker.replies import Replies

    if not os.path.exists(flag):
        with open(flag, "w"):
            pass
        Replies._send = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        return np.zeros(LARGE), ray.put("of the first attempt")
    return np.ones(2 * LARGE), ray.put("of the second attempt")


def test_what_an_attempt_left_in_the_store_is_replaced(tmp_path):
    """Its refs are those of a dead worker, and its size need not be the same."""
    array, inner = ray.get(dies_at_its_first_reply.remote(str(tmp_path / "flag")), timeout=PATIENCE)
    assert (array.shape, array[0]) == ((2 * LARGE,), 1)
    assert ray.get(inner, timeout=PATIENCE) == "of the second attempt"


def test_what_attempts_left_does_not_fill_the_store(tmp_path):
    for i in range(30):
        array, _ = ray.get(dies_at_its_first_reply.remote(str(tmp_path / f"{i}")), timeout=PATIENCE)
        del array


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not this one")


@ray.remote(num_returns=2)
def second_fails(box):
    return [np.zeros(LARGE), box], Unpicklable()


def test_refs_of_a_return_are_taken_back_when_the_next_one_fails():
    ref = ray.put("x")
    for _ in range(60):  # more than the store holds of what the first returns leave
        first, second = second_fails.remote([ref])
        for failed in (first, second):
            with pytest.raises(TypeError, match="could not serialize"):
                ray.get(failed, timeout=PATIENCE)
        del first, second, failed
    eventually(lambda: not borrowers(ref))


@ray.remote(num_returns=2)
def yields_refs_that_die_at_once(box):
    ref = box[0]
    box.clear()
    yield [ref]
    del ref
    yield ray.put("other")


def test_the_submitters_own_comes_back_though_the_worker_dropped_it_first():
    for _ in range(50):
        first, second = yields_refs_that_die_at_once.remote([ray.put("mine")])
        (mine,) = ray.get(first, timeout=PATIENCE)
        assert ray.get(mine, timeout=PATIENCE) == "mine"
        assert ray.get(ray.get(second, timeout=PATIENCE), timeout=PATIENCE) == "other"
