"""Workers killed at random under load: every result comes, and is right."""

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

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 4, "object_store_memory": 400 << 20}
SIZE = 30_000


class Killer(threading.Thread):
    """Kills one worker after the other, as they come, until it has killed `kills`. killed: their pids."""

    def __init__(self, kills: int, pause: float) -> None:
        super().__init__(daemon=True)
        self.left, self._pause = kills, pause
        self.killed: set[int] = set()

    def run(self) -> None:
        process = current.process
        assert process is not None
        raylet = raylet_of(process.node)
        while self.left > 0:
            found = process.gcs.ask_many({raylet: partial(m.ListStore, limit=0)}, 10.0)
            listed = found[raylet]["processes"] if found else []
            pids = [pid for _, pid, kind in listed if kind == "worker" and pid not in self.killed]
            if pids:
                with contextlib.suppress(ProcessLookupError):
                    pid = random.choice(pids)
                    os.kill(pid, signal.SIGKILL)
                    self.killed.add(pid)
                    self.left -= 1
            time.sleep(self._pause)


@ray.remote(max_retries=-1)
def make(number: int) -> Any:
    time.sleep(0.002)
    return np.full(SIZE, number)


@ray.remote(max_retries=-1)
def add(array: Any, number: int) -> Any:
    time.sleep(0.002)
    return array + number


@ray.remote(max_retries=-1)
def total(*arrays: Any) -> int:
    return int(sum(array.sum() for array in arrays))


@ray.remote(max_retries=-1)
def small(number: int) -> int:
    return number * number


@ray.remote(max_retries=-1)
def nested(number: int) -> int:
    return sum(ray.get([small.remote(number + i) for i in range(3)]))


@ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0)
class Doubler:
    def double(self, number: int) -> int:
        return 2 * number


def one_round(actors: list[Any], base: int) -> None:
    first = [make.remote(base + i) for i in range(8)]
    second = [add.remote(array, 1) for array in first]
    third = [add.remote(array, 1) for array in second]
    del first, second
    sums = [total.remote(*third), total.remote(*third[::2])]
    squares = [small.remote(i) for i in range(60)]
    inner = [nested.remote(i) for i in range(4)]
    doubled = [actor.double.remote(i) for i in range(10) for actor in actors]
    assert ray.get(squares) == [i * i for i in range(60)]
    assert ray.get(inner) == [sum((n + i) ** 2 for i in range(3)) for n in range(4)]
    assert ray.get(doubled) == [2 * i for i in range(10) for _ in actors]
    values = [base + i + 2 for i in range(8)]
    assert ray.get(sums) == [SIZE * sum(values), SIZE * sum(values[::2])]
    assert [int(array[-1]) for array in ray.get(third)] == values


def run(kills: int, pause: float) -> int:
    """Rounds of work, each checked, while workers are killed; how many were."""
    actors = [Doubler.remote() for _ in range(2)]
    killer = Killer(kills, pause)
    killer.start()
    rounds = 0
    while killer.is_alive():
        one_round(actors, 100 * rounds)
        rounds += 1
    one_round(actors, 7)
    return len(killer.killed)


@pytest.mark.timeout(180)
def test_sixty_kills() -> None:
    assert run(60, 0.03) == 60


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_thousand_kills() -> None:
    assert run(1000, 0.05) == 1000
