"""The world of the head ends five times in one job, under load.

    HPCRAY_TEST_TIMES=5 pytest -m slow tests/mpi/test_head_moves_worlds.py

does it in five jobs, at other moments and in other ways each time.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from hpcray.platform.launcher_environment import open_mpi_wheel_prefix
from hpcray.platform.private_files import write_private_file
from hpcray.platform.session_directory import SessionInfo, live_sessions
from hpcray.runtime.node.join_token import request_join_token

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not open_mpi_wheel_prefix(), reason="no Open MPI from PyPI"),
    pytest.mark.timeout(400),
]

MOVES = 5
TIMES = int(os.environ.get("HPCRAY_TEST_TIMES", "1"))
FIRST = int(os.environ.get("HPCRAY_TEST_SEED", "0"))
RANKS = (2, 1, 2, 1, 2, 1)
"""Of the worlds, in which the head is one after the other. The program's node, which comes last, is one of its own."""
SETTINGS = {"HPCRAY_HEAD_TIMEOUT": "4", "HPCRAY_NODE_TIMEOUT": "5"}

PROGRAM = """\
import sys, threading, time
import numpy as np
import hpcray as ray
from hpcray.runtime.core_worker.core_worker import need_process
from hpcray.util.placement_group import placement_group, remove_placement_group
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init(address=sys.argv[1], namespace="here")

@ray.remote(num_cpus=0.2, max_retries=-1)
def total(array, number):
    time.sleep(0.01)
    return int(array.sum()) + number

@ray.remote(num_cpus=0.2, max_retries=-1)
def make(number):
    return np.full(1 << 17, number)

@ray.remote(num_cpus=0.2, max_retries=-1)
def own(number):
    return [ray.put(np.full(1 << 16, number))]

@ray.remote(num_cpus=0)
class Keeper:
    def __init__(self):
        self.states = {}
    def load(self, name):
        return self.states.get(name, [])
    def store(self, name, state):
        self.states[name] = state

@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Counter:
    "Its state outlives its node. A call that is repeated changes nothing."
    def __init__(self, name, keeper):
        self.name, self.keeper = name, keeper
        self.seen = ray.get(keeper.load.remote(name))
    def add(self, number):
        if number == len(self.seen):
            ray.get(self.keeper.store.remote(self.name, [*self.seen, number]))
            self.seen.append(number)
        return len(self.seen)

here = On(ray.get_runtime_context().get_node_id(), soft=False)
keeper = Keeper.options(scheduling_strategy=here).remote()
spread = Counter.options(scheduling_strategy="SPREAD")
counters = [spread.remote(f"c{number}", keeper) for number in range(4)]
over, rounds, lost, failures = threading.Event(), {}, [0], []

def loads(work):
    def run():
        try:
            number = 0
            while not over.is_set():
                work(number)
                number += 1
                rounds[work.__name__] = number
        except BaseException as error:
            failures.append(f"{work.__name__}: {error!r}")
            over.set()
    thread = threading.Thread(target=run)
    thread.start()
    return thread

given = ray.put(np.ones(1 << 17))
window = []

def tasks(number):
    assert ray.get([total.remote(given, n) for n in range(8)], timeout=90) == [(1 << 17) + n for n in range(8)]

def objects(number):
    window.append((number, make.remote(number)))
    if len(window) > 20:
        old, ref = window.pop(0)
        assert ray.get(total.remote(ref, 1), timeout=90) == (old << 17) + 1
        array = ray.get(ref, timeout=90)
        assert array[0] == array[-1] == old

def actors(number):
    got = ray.get([counter.add.remote(number) for counter in counters], timeout=90)
    assert got == [number + 1] * 4, (number, got)

def owners(number):
    "Of a node that was killed: an error that says so."
    try:
        (ref,) = ray.get(own.options(scheduling_strategy="SPREAD").remote(number), timeout=90)
        time.sleep(0.5)
        assert ray.get(ref, timeout=90).sum() == number << 16
    except ray.exceptions.OwnerDiedError:
        lost[0] += 1

def names(number):
    actor = Counter.options(name=f"n{number}", num_cpus=0.1).remote(f"n{number}", keeper)
    assert ray.get(ray.get_actor(f"n{number}").add.remote(0), timeout=90) == 1
    group = placement_group([{"CPU": 0.1}] * 2)
    assert group.wait(90)
    remove_placement_group(group)
    ray.kill(actor)

threads = [loads(work) for work in (tasks, objects, actors, owners, names)]
process = need_process()
seen, before = process.place.head, dict(rounds)
print("head", seen, flush=True)
moves = 0
while moves < int(sys.argv[2]) and not over.is_set():
    if process.place.head != seen:
        time.sleep(3.0)  # under the new one
        if set(rounds) == {"tasks", "objects", "actors", "owners", "names"} and all(
            rounds[name] > before.get(name, 0) for name in rounds
        ):
            seen, before, moves = process.place.head, dict(rounds), moves + 1
            print("head", seen, flush=True)
    time.sleep(0.05)
over.set()
for thread in threads:
    thread.join()
if not failures:
    for number, ref in window:
        assert ray.get(ref, timeout=90)[-1] == number
    assert len({tuple(ray.get(counter.add.remote(-1), timeout=90) for _ in range(2)) for counter in counters}) == 1
print("over", failures, moves, rounds, lost, sum(row["Alive"] for row in ray.nodes()), flush=True)
sys.exit(bool(failures))
"""


def until_up(processes: Iterable[subprocess.Popen[bytes]], count: int, known: set[int]) -> list[SessionInfo]:
    """The new nodes of this job, once there are so many of them."""
    deadline = time.monotonic() + 90.0
    while len(found := [info for info in live_sessions() if info.pid not in known]) < count:
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes), found
        time.sleep(0.05)
    known.update(info.pid for info in found)
    return found


@pytest.mark.parametrize("seed", range(FIRST, FIRST + TIMES))
def test_the_world_of_the_head_ends_five_times_under_load(tmp_path: Path, leak_check: object, seed: int) -> None:
    rng = random.Random(seed)
    token, environ = tmp_path / "token", {**os.environ, **SETTINGS}
    known = {info.pid for info in live_sessions()}
    launch = [sys.executable, "-m", "hpcray.cli.launch", "--cpus-per-node", "1", "--object-store-memory", "268435456"]
    started: list[subprocess.Popen[bytes]] = []
    worlds: list[list[SessionInfo]] = []
    try:
        for number, ranks in enumerate((*RANKS, 1)):
            how = ["--join", str(token)] if number else ["--no-program"]
            started.append(subprocess.Popen([*launch, "-n", str(ranks), *how], env=environ))
            worlds.append(until_up(started, ranks, known))
            if not number:
                write_private_file(str(token), request_join_token(worlds[0][0].path, path=str(token)))
        (tmp_path / "program.py").write_text(PROGRAM)
        line = [sys.executable, str(tmp_path / "program.py"), worlds[-1][0].path, str(MOVES)]
        world_of = {info.node: infos for infos in worlds for info in infos}
        ways: list[str] = []
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environ) as program:
            started.append(program)  # type: ignore[arg-type]
            assert program.stdout is not None
            stopped: list[int] = []
            for said in program.stdout:
                if not said.startswith("head ") or len(ways) == MOVES:
                    break
                time.sleep(rng.uniform(0.0, 3.0))
                for pid in stopped:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
                # Of the last four nodes, two are no majority: they would not take over from two that are only silent.
                ways.append(rng.choice(("SIGTERM", "SIGKILL", "SIGSTOP")[: 3 if len(ways) < MOVES - 1 else 2]))
                pids = [info.pid for info in world_of[int(said.split()[1])]]
                stopped = pids if ways[-1] == "SIGSTOP" else []
                for pid in pids:
                    os.kill(pid, signal.Signals[ways[-1]])
            out = said if said.startswith("over") else ""
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            out += program.stdout.read()
        print(ways, out)
        assert program.returncode == 0 and f"over [] {MOVES} " in out, (ways, out)
        last = [info.pid for info in worlds[-1]] + [info.pid for info in worlds[-2]]
        for pid in last:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        assert [process.wait(60) for process in started[len(RANKS) - 1 : -1]] == [0, 0]
        for process in started:
            process.wait(60)
    finally:
        for process in started:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for infos in worlds:
            for info in infos:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(info.pid, signal.SIGKILL)
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
