"""Many processes on one machine: a job of 64 ranks, and a thousand actors on one node. Minutes, and some GB of memory.

Nothing here says how fast it is: `benchmarks` do. `pytest -m slow -s tests/mpi/test_many_processes.py` prints figures.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from helpers.jobs import Job, embedded
from helpers.leaks import LeakCheck
from helpers.scripts import write

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun"),
    pytest.mark.timeout(900),
]

RANKS, TASKS = 64, 100_000

# Runs the tasks from one driver, on whatever nodes there are, and says where they ran.
MANY_TASKS = """\
import collections, json, sys, time
import hpcray as ray
began = time.monotonic()
ray.init()
nodes = len(ray.nodes())
@ray.remote
def work(x):
    return x * x % 1009, ray.get_runtime_context().get_node_id()
@ray.remote(scheduling_strategy="SPREAD")
def where():
    time.sleep(0.2)
    return ray.get_runtime_context().get_node_id()
spread = len(set(ray.get([where.remote() for _ in range(4 * nodes)])))
started = time.monotonic()
total, ran = 0, collections.Counter()
for value, node in ray.get([work.remote(x) for x in range(int(sys.argv[1]))]):
    total += value
    ran[node] += 1
ended = time.monotonic()
print("facts", json.dumps({
    "nodes": nodes, "spread": spread, "cpus": ray.cluster_resources()["CPU"], "total": total, "ran": sum(ran.values()),
    "ran_on": len(ran), "first": started - began, "seconds": ended - started,
}), flush=True)
"""

ACTORS = 1000

MANY_ACTORS = """\
import json, os, sys, time
from pathlib import Path
import hpcray as ray
count = int(sys.argv[1])
began = time.monotonic()
ray.init(num_cpus=2)
@ray.remote(num_cpus=0)
class Counter:
    def __init__(self, number):
        self.number, self.calls = number, 0
    def add(self, x):
        self.calls += 1
        return self.number + x, self.calls, os.getpid()
actors = [Counter.remote(number) for number in range(count)]
first = ray.get([actor.add.remote(1) for actor in actors])
started = time.monotonic()
second = ray.get([actor.add.remote(2) for actor in actors for _ in range(3)])
called = time.monotonic()
pids = [pid for _, _, pid in first]
memory = 0
for pid in pids:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    memory += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) << 10
raylet = Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1]
handles = {pid: len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (os.getpid(), pids[0], pids[-1])}
del actors
print("facts", json.dumps({
    "values": [value for value, _, _ in first] == [number + 1 for number in range(count)],
    "calls": [calls for _, calls, _ in second] == [2, 3, 4] * count, "processes": len(set(pids)),
    "seconds": started - began, "calls_seconds": called - started, "pss_each": memory // count,
    "descriptors": {"driver": handles[os.getpid()], "first": handles[pids[0]], "last": handles[pids[-1]]},
}), flush=True)
"""


def facts_of(out: str) -> dict[str, object]:
    """What a program printed."""
    (line,) = (line for line in out.splitlines() if line.startswith("facts "))
    found: dict[str, object] = json.loads(line.removeprefix("facts "))
    print(line)
    return found


def test_a_job_of_64_ranks_runs_100_000_tasks_and_leaves_nothing(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = write(tmp_path, MANY_TASKS)
    command = [sys.executable, "-m", "hpcray.cli.launch", "-n", str(RANKS), "--cpus-per-node", "1"]
    with Job([*command, "--object-store", "16m", str(script), str(TASKS)]) as job:
        ended = job.wait(800)
    assert ended.code == 0, ended.err
    facts = facts_of(ended.out)
    assert (facts["nodes"], facts["cpus"], facts["spread"]) == (RANKS, RANKS, RANKS)
    assert (facts["ran"], facts["total"]) == (TASKS, sum(x * x % 1009 for x in range(TASKS)))


def test_a_thousand_actors_on_one_node_and_nothing_is_left(leak_check: LeakCheck, tmp_path: Path) -> None:
    with Job([*embedded(write(tmp_path, MANY_ACTORS)), str(ACTORS)]) as job:
        ended = job.wait(800)
    assert ended.code == 0, ended.err
    facts = facts_of(ended.out)
    assert facts["values"] and facts["calls"] and facts["processes"] == ACTORS
