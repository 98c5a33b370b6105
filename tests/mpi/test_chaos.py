"""Workers killed all the time, two nodes lost on the way, under load: every result comes, and is right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.jobs import Job
from helpers.leaks import LeakCheck

from hpcray.platform.launcher_environment import open_mpi_wheel_prefix

pytestmark = [
    pytest.mark.usefixtures("both_ways"),
    pytest.mark.skipif(not open_mpi_wheel_prefix(), reason="no Open MPI from PyPI"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

SCRIPT = """
import contextlib, os, random, signal, threading, time
from functools import partial
import numpy as np
import hpcray as ray
from hpcray.common.ids import raylet_of
from hpcray.platform.session_directory import live_sessions
from hpcray.runtime.core_worker.core_worker import current
from hpcray.protocol import messages as m

SIZE, PATIENCE, SECONDS = 30_000, 100, 30
ray.init()
raylets = {info.node: info.pid for info in live_sessions()}
lost, kills, stop = set(), 0, False
again = {"max_retries": -1, "scheduling_strategy": "SPREAD"}


@ray.remote(**again)
def make(number):
    time.sleep(0.003)
    return np.full(SIZE, number)


@ray.remote(**again)
def add(array, number):
    time.sleep(0.003)
    return array + number


@ray.remote(**again)
def total(*arrays):
    return int(sum(array.sum() for array in arrays))


@ray.remote(**again)
def nested(number):
    return sum(int(array[0]) for array in ray.get([add.remote(make.remote(number + i), 1) for i in range(3)]))


@ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0, scheduling_strategy="SPREAD")
class Times:
    def __init__(self, array):
        self.factor = int(array[0])

    def times(self, number):
        return self.factor * number

    def large(self, number):
        return np.full(SIZE, number)


def one_round(actors, base):
    arrays = [make.remote(base + i) for i in range(12)]
    for _ in range(3):
        arrays = [add.remote(array, 1) for array in arrays]
    sums = [total.remote(*arrays), total.remote(*arrays[::2])]
    inner = [nested.remote(base + i) for i in range(6)]
    products = [actor.times.remote(i) for i in range(8) for actor in actors]
    large = [add.remote(actor.large.remote(i), 1) for i in range(3) for actor in actors]
    values = [base + i + 3 for i in range(12)]
    assert ray.get(inner, timeout=PATIENCE) == [sum(base + n + i + 1 for i in range(3)) for n in range(6)]
    assert ray.get(products, timeout=PATIENCE) == [2 * i for i in range(8) for _ in actors]
    assert [int(a[0]) for a in ray.get(large, timeout=PATIENCE)] == [i + 1 for i in range(3) for _ in actors]
    assert ray.get(sums, timeout=PATIENCE) == [SIZE * sum(values), SIZE * sum(values[::2])]
    assert [int(a[-1]) for a in ray.get(arrays, timeout=PATIENCE)] == values


def kill_all_the_time():
    global kills
    process, began = current.process, time.monotonic()
    while not stop:
        living = {raylet_of(node): partial(m.ListStore, limit=0) for node in raylets if node not in lost}
        answers = process.gcs.ask_many(living, 5.0).values()
        pids = [pid for store in answers for _, pid, kind in store["processes"] if kind == "worker"]
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(random.choice(pids), signal.SIGKILL)
                kills += 1
        time.sleep(0.15)
        for node, when in ((3, SECONDS / 4), (2, SECONDS / 2)):
            if node not in lost and time.monotonic() - began > when:
                lost.add(node)
                os.kill(raylets[node], signal.SIGKILL)


argument = make.remote(2)
actors = [Times.remote(argument) for _ in range(4)]
del argument
killer = threading.Thread(target=kill_all_the_time, daemon=True)
killer.start()
rounds, end = 0, time.monotonic() + SECONDS
while time.monotonic() < end:
    one_round(actors, 100 * rounds)
    rounds += 1
stop = True
killer.join()
one_round(actors, 7)
print("done", rounds, kills, sorted(lost), flush=True)
"""


def test_nothing_is_lost(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = tmp_path / "chaos.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "hpcray.cli.launch", "-n", "4", "--cpus-per-node", "2", str(script)]
    with Job(command) as job:
        ended = job.wait(280)
    assert ended.code == 0, ended.err
    done, rounds, kills, *lost = ended.out.splitlines()[-1].split()
    assert done == "done" and int(rounds) >= 3 and int(kills) >= 20 and lost == ["[2,", "3]"]
    leak_check.check()
