"""Copies vanish from the store all the time, under load, and workers die: every result comes, and is right."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from engine import hpcray_only, ray

from hpcray.common.ids import raylet_of
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.core_worker import current

pytestmark = [pytest.mark.usefixtures("session"), pytest.mark.slow, pytest.mark.timeout(400), hpcray_only]
INIT = {"num_cpus": 3, "object_store_memory": 300 << 20}
SIZE, PATIENCE, SECONDS = 30_000, 100, 15.0
AGAIN = {"max_retries": -1}


@ray.remote(**AGAIN)
def make(number):
    return np.full(SIZE, number)


@ray.remote(**AGAIN)
def add(array, number):
    return array + number


@ray.remote(num_returns=2, **AGAIN)
def two(array):
    return array, array + 1


@ray.remote(**AGAIN)
def total(*arrays):
    return int(sum(array.sum() for array in arrays))


@ray.remote(**AGAIN)
def nested(number):
    return sum(int(array[0]) for array in ray.get([add.remote(make.remote(number + i), 1) for i in range(3)]))


@ray.remote(**AGAIN)
def give(number):
    return [make.remote(number), add.remote(make.remote(number), 1)]


@ray.remote(**AGAIN)
def look(refs):
    return [int(array[0]) for array in ray.get(refs)]


@ray.remote(num_returns="streaming", **AGAIN)
def stream(number):
    for i in range(4):
        yield np.full(SIZE, number + i)


@ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0)
class Times:
    def __init__(self, array):
        self.factor = int(array[0])

    def large(self, number):
        return np.full(SIZE, number * self.factor)


class Evil(threading.Thread):
    """Drops copies that nobody has pinned; kills a worker now and then."""

    def __init__(self, kills: float) -> None:
        super().__init__(daemon=True)
        self.stop = False
        self.dropped = 0
        self._kills = kills

    def run(self) -> None:
        process = current.process
        assert process is not None
        raylet = raylet_of(process.node)
        while not self.stop:
            found = process.gcs.ask_many({raylet: partial(m.ListStore, limit=1000)}, 5.0)
            for store in found.values():
                free = [obj["id"] for obj in store["list"] if not obj["pins"]]
                chosen = random.sample(free, min(len(free), 3))
                self.dropped += len(chosen)
                with process.engine.lock:
                    process.engine.send(raylet, m.Free(chosen, []))
                    process.engine.flush()
                pids = [pid for _, pid, kind in store["processes"] if kind == "worker"]
                if pids and random.random() < self._kills:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(random.choice(pids), signal.SIGKILL)
            time.sleep(0.01)


def one_round(actors: list[Any], base: int, owners_live: bool) -> None:
    arrays = [make.remote(base + i) for i in range(8)]
    for _ in range(4):
        arrays = [add.remote(array, 1) for array in arrays]
    pairs = [two.remote(array) for array in arrays[:3]]
    sums = [total.remote(*arrays), total.remote(*arrays[::2])]
    inner = [nested.remote(base + i) for i in range(3)]
    large = [add.remote(actor.large.remote(i), 1) for i in range(3) for actor in actors]
    streams = [list(stream.remote(base + 10 * i)) for i in range(2)]
    values = [base + i + 4 for i in range(8)]
    assert ray.get(inner, timeout=PATIENCE) == [sum(base + n + i + 1 for i in range(3)) for n in range(3)]
    assert firsts(large) == [2 * i + 1 for i in range(3) for _ in actors]
    assert ray.get(sums, timeout=PATIENCE) == [SIZE * sum(values), SIZE * sum(values[::2])]
    assert firsts(arrays) == values
    for value, pair in zip(values, pairs, strict=False):
        assert firsts(pair) == [value, value + 1]
    for i, refs in enumerate(streams):
        assert firsts(refs) == [base + 10 * i + j for j in range(4)]
    if owners_live:
        given = ray.get([give.remote(base + i) for i in range(3)], timeout=PATIENCE)
        assert ray.get([look.remote(refs) for refs in given], timeout=PATIENCE) == [
            [base + i, base + i + 1] for i in range(3)
        ]


def firsts(refs: list[Any]) -> list[int]:
    return [int(array[0]) for array in ray.get(refs, timeout=PATIENCE)]


@pytest.mark.parametrize("kills", [0.0, 0.03])
def test_nothing_is_lost(kills: float) -> None:
    argument = make.remote(2)
    actors = [Times.remote(argument) for _ in range(2)]
    del argument
    evil = Evil(kills)
    evil.start()
    rounds, end = 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        one_round(actors, 100 * rounds, not kills)
        rounds += 1
    evil.stop = True
    evil.join()
    one_round(actors, 7, True)
    assert rounds and evil.dropped > 50
    table = current.process.table
    del actors
    deadline = time.monotonic() + 60
    while table.lineage.kept or table.lineage.remembered or table.has_side_records:
        assert time.monotonic() < deadline, "lineage is kept for nothing"
        ray.get(ray.put(0))
        time.sleep(0.02)
