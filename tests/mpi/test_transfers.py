"""Objects between nodes: one to many at once, and more of them than the stores of all nodes hold."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.jobs import Job
from helpers.leaks import LeakCheck

COMMON = """
import json, sys
import numpy as np
import hpcray as ray
from hpcray.runtime.core_worker.core_worker import need_process

ray.init()
where = [ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(n["NodeID"], soft=False) for n in ray.nodes()]

def block(seed, size):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)

def stores():
    return need_process().diagnostics.list_stores(0, 60.0)
"""

BROADCAST = """
size = int(sys.argv[1])

@ray.remote(num_cpus=0)
class Reader:
    def ready(self):
        return True
    def read(self, refs):
        return [bool(np.array_equal(ray.get(ref), block(seed, size))) for seed, ref in enumerate(refs)]

readers = [Reader.options(scheduling_strategy=one).remote() for one in where[1:]]
ray.get([reader.ready.remote() for reader in readers])
refs = [ray.put(block(seed, size)) for seed in range(3)]
good = ray.get([reader.read.remote(refs) for reader in readers])
print(json.dumps({"good": good, "pulled": [node["pulled"] for node in stores()],
                  "sent": [node["sent"] for node in stores()], "sent_on": sum(node["sent_on"] for node in stores())}))
"""

SPILL = """
size, count = 1 << 20, int(sys.argv[1])

@ray.remote(num_cpus=0)
class Keeper:
    def fill(self, seeds):
        self.refs = [ray.put(block(seed, size)) for seed in seeds]
        return self.refs
    def check(self, seeds, refs):
        return sum(bool(np.array_equal(ray.get(ref), block(seed, size))) for seed, ref in zip(seeds, refs))

keepers = [Keeper.options(scheduling_strategy=one).remote() for one in where]
seeds = [list(range(number * count, (number + 1) * count)) for number in range(len(keepers))]
kept = ray.get([keeper.fill.remote(mine) for keeper, mine in zip(keepers, seeds)])
full = stores()
turned = [kept[(number + 1) % len(kept)] for number in range(len(kept))]
others = [seeds[(number + 1) % len(seeds)] for number in range(len(seeds))]
good = ray.get([keeper.check.remote(theirs, refs) for keeper, theirs, refs in zip(keepers, others, turned)])
print(json.dumps({"good": good, "on_disk": [node["on_disk"] for node in full],
                  "capacity": [node["capacity"] for node in full]}))
"""


VALUES = """
sizes = [99_000, 12, 70_000, 4_000, 99_000, 20_000] * 12

@ray.remote(num_cpus=0)
class Owner:
    def make(self):
        self.refs = [ray.put(block(seed, size)) for seed, size in enumerate(sizes)]
        return self.refs
    def put(self, value):
        self.last = ray.put(value)
        return [self.last]

@ray.remote(num_cpus=0)
class Reader:
    def read(self, refs):
        return all(np.array_equal(value, block(seed, sizes[seed])) for seed, value in enumerate(ray.get(refs)))
    def read_one(self, refs):
        return len(ray.get(refs[0], timeout=30)), need_process().table.entries[refs[0]._id].owner_asked

owner = Owner.options(scheduling_strategy=where[0]).remote()
reader = Reader.options(scheduling_strategy=where[1]).remote()
refs = ray.get(owner.make.remote())
good = [ray.get(reader.read.remote(refs)) for _ in range(3)]
puts = [ray.get(owner.put.remote("small")), [ray.put("short")]]
puts.append(ray.get(owner.put.remote("x" * 20_000)))
print(json.dumps({"good": good, "asked": [ray.get(reader.read_one.remote(refs)) for refs in puts]}))
"""


STOPPED = """
import os, signal

@ray.remote(num_cpus=0)
class Owner:
    def pid(self):
        return os.getpid()
    def put(self):
        return [ray.put(block(1, 3 << 20))]

@ray.remote(num_cpus=0)
class Reader:
    def read(self, refs):
        return bool(np.array_equal(ray.get(refs[0]), block(1, 3 << 20)))

owner = Owner.options(scheduling_strategy=where[0]).remote()
reader = Reader.options(scheduling_strategy=where[1]).remote()
refs, pid = ray.get([owner.put.remote(), owner.pid.remote()])
os.kill(pid, signal.SIGSTOP)
try:
    print(json.dumps({"good": ray.get(reader.read.remote(refs), timeout=60)}))
finally:
    os.kill(pid, signal.SIGCONT)
"""


AHEAD = """
import os, pathlib, time
flag, size = pathlib.Path(sys.argv[1]), 64 << 20
(there,) = [node for node in ray.nodes() if node["Index"] == 1]
near = {"scheduling_strategy": where[1], "num_cpus": there["Resources"]["CPU"]}

def busy():
    pathlib.Path(f"{flag}.busy").touch()
    while not flag.exists():
        time.sleep(0.01)

@ray.remote
def hold():
    busy()

@ray.remote
def total(array):
    return int(array.sum(dtype=np.int64))

@ray.remote
class Actor:
    def hold(self):
        busy()
    def total(self, array):
        return int(array.sum(dtype=np.int64))

def copies():
    return next(node["pulled"] for node in stores() if node["node"] == 1)

def wait_for(what):
    deadline = time.monotonic() + 100
    while not what() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(what())

def course(start, ask):
    first = start()
    assert wait_for(pathlib.Path(f"{flag}.busy").exists)
    array = np.full(size, 3, np.uint8)
    before, ref = copies(), ray.put(array)
    second = ask(ref)
    came = wait_for(lambda: copies() > before)
    still = not ray.wait([first], timeout=0)[0]
    flag.touch()
    right = ray.get(second) == 3 * size
    ray.get(first)
    flag.unlink()
    os.unlink(f"{flag}.busy")
    return [came, still, right]

task = course(hold.options(**near).remote, total.options(**near).remote)
actor = Actor.options(**near).remote()
call = course(actor.hold.remote, actor.total.remote)
print(json.dumps({"task": task, "call": call}))
"""


BROKEN_LINK = """
from helpers.links import break_tcp
from helpers.pids import raylet_pid

@ray.remote(num_cpus=0)
class Holder:
    def put(self, seeds):
        self.refs = [ray.put(block(seed, 3 << 20)) for seed in seeds]
        return self.refs

holder = Holder.options(scheduling_strategy=where[1]).remote()
refs = ray.get(holder.put.remote([0, 1]))
good = [bool(np.array_equal(ray.get(refs[0]), block(0, 3 << 20)))]
broken = break_tcp(raylet_pid(0), raylet_pid(1))
good.append(bool(np.array_equal(ray.get(refs[1], timeout=60), block(1, 3 << 20))))
print(json.dumps({"broken": broken, "good": good, "alive": [node["Alive"] for node in ray.nodes()]}))
"""


REPLICAS = """
import time
size, count = 1 << 20, int(sys.argv[1])
refs = [ray.put(block(seed, size), replicas=2) for seed in range(count)]
kept = [{"node": n["node"], "on_disk": n["on_disk"], "objects": n["objects"]} for n in stores()]
good = sum(bool(np.array_equal(ray.get(ref), block(seed, size))) for seed, ref in enumerate(refs))

@ray.remote(num_cpus=0)
def read(refs):
    return sum(bool(np.array_equal(ray.get(ref), block(seed, size))) for seed, ref in enumerate(refs))

good_there = ray.get(read.options(scheduling_strategy=where[1]).remote(refs))
pulled = [node["pulled"] for node in stores()]
del refs
deadline = time.monotonic() + 60
while any(node["objects"] or node["on_disk"] for node in stores()) and time.monotonic() < deadline:
    time.sleep(0.05)
left = [node["objects"] + node["on_disk"] for node in stores()]
print(json.dumps({"kept": kept, "good": [good, good_there], "pulled": pulled, "left": left}))
"""

PAST_THE_STORE = """
import gc, time
size, count = 40 << 20, 2

@ray.remote(num_cpus=0)
class Node:
    def make(self, seeds):
        self.refs = [ray.put(block(seed, size)) for seed in seeds]
        return self.refs
    def check(self, seeds, refs):
        return [bool(np.array_equal(ray.get(ref), block(seed, size))) for seed, ref in zip(seeds, refs)]
    def drop(self):
        self.refs = None
        gc.collect()

nodes = [Node.options(scheduling_strategy=one).remote() for one in where]
seeds = [list(range(place * count, (place + 1) * count)) for place in range(len(nodes))]
kept = ray.get([node.make.remote(mine) for node, mine in zip(nodes, seeds)])
before = [node["overflow"] for node in stores()]
good = ray.get([node.check.remote(theirs, refs) for node, theirs, refs in zip(nodes, seeds[::-1], kept[::-1])])
here = [bool(np.array_equal(ray.get(ref), block(seed, size))) for seed, ref in zip(sum(seeds, []), sum(kept, []))]
kept = None
ray.get([node.drop.remote() for node in nodes])
gc.collect()
deadline = time.monotonic() + 60
while (left := [node["overflow"] for node in stores()]) != [0, 0] and time.monotonic() < deadline:
    time.sleep(0.05)
print(json.dumps({"before": before, "good": good, "here": here, "left": left}))
"""


def run(tmp_path: Path, ranks: int, script: str, *args: str, **environ: str) -> dict[str, Any]:
    path = tmp_path / "script.py"
    path.write_text(COMMON + script)
    command = [sys.executable, "-m", "hpcray.cli.launch", "-n", str(ranks), str(path), *args]
    with Job(command, {"HPCRAY_PRESTART": "0", **environ}) as job:
        ended = job.wait(200)
    assert ended.code == 0, ended.out + ended.err
    found: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
    return found


@pytest.mark.timeout(210)
@pytest.mark.usefixtures("both_ways")
def test_a_job_with_five_times_the_data_that_its_stores_hold(tmp_path: Path, leak_check: LeakCheck) -> None:
    store = 8 << 20
    found = run(tmp_path, 4, SPILL, "40", HPCRAY_OBJECT_STORE_MEMORY=str(store), HPCRAY_TRANSFER_CHUNK=str(256 << 10))
    assert found["capacity"] == [store] * 4
    assert found["good"] == [40] * 4, "every block came back bit by bit, from another node's disk"
    assert min(found["on_disk"]) >= 3 * store


@pytest.mark.timeout(210)
@pytest.mark.parametrize(("same_host", "plane"), [("0", "ucx"), ("0", "mpi"), ("1", "ucx")])
def test_objects_larger_than_every_store(tmp_path: Path, leak_check: LeakCheck, same_host: str, plane: str) -> None:
    environ = {"HPCRAY_SAME_HOST": same_host, "HPCRAY_DATA_PLANE": plane}
    found = run(tmp_path, 2, PAST_THE_STORE, HPCRAY_OBJECT_STORE_MEMORY=str(16 << 20), **environ)
    assert min(found["before"]) >= 80 << 20, "they lie in files of their nodes"
    assert found["good"] == [[True] * 2] * 2 and found["here"] == [True] * 4
    assert found["left"] == [0, 0]


@pytest.mark.timeout(210)
def test_an_owner_sends_its_long_values_in_large_messages_and_the_driver_a_small_one_with_its_ref(
    tmp_path: Path, leak_check: LeakCheck
) -> None:
    found = run(tmp_path, 2, VALUES, HPCRAY_SAME_HOST="0")
    assert found == {"good": [True] * 3, "asked": [[5, False], [5, False], [20_000, True]]}


@pytest.mark.timeout(210)
def test_an_owner_that_does_not_answer_holds_up_nobody_who_was_told_where_its_object_is(
    tmp_path: Path, leak_check: LeakCheck
) -> None:
    assert run(tmp_path, 2, STOPPED)["good"] is True


@pytest.mark.timeout(210)
def test_an_object_with_one_holder_is_fetched_after_the_link_to_that_node_broke(
    tmp_path: Path, leak_check: LeakCheck
) -> None:
    environ = {"HPCRAY_SAME_HOST": "0", "HPCRAY_DATA_PLANE": "ucx", "UCX_TLS": "tcp,self"}
    tests = Path(__file__).resolve().parents[1]
    found = run(tmp_path, 2, BROKEN_LINK, **environ, PYTHONPATH=f"{tests}:{tests.parent}")
    assert found["broken"] > 0, "there was a link, and it broke"
    assert found["good"] == [True, True] and found["alive"] == [True, True]


@pytest.mark.slow
@pytest.mark.timeout(210)
def test_second_copies_go_to_disk_where_there_is_no_room_for_them(tmp_path: Path, leak_check: LeakCheck) -> None:
    store = 8 << 20
    found = run(tmp_path, 2, REPLICAS, "40", HPCRAY_OBJECT_STORE_MEMORY=str(store))
    assert [node["objects"] for node in found["kept"]] == [40, 40], "each node has a copy of each"
    assert min(node["on_disk"] for node in found["kept"]) >= 3 * store
    assert found["good"] == [40, 40]
    assert sorted(found["pulled"]) == [0, 40], "nobody had to be asked for what was on the own disk"
    assert found["left"] == [0, 0]


@pytest.mark.timeout(210)
def test_arguments_travel_while_the_worker_is_still_busy_with_something_else(
    tmp_path: Path, leak_check: LeakCheck
) -> None:
    environ = {"HPCRAY_OBJECT_STORE_MEMORY": str(256 << 20), "HPCRAY_SAME_HOST": "0"}
    found = run(tmp_path, 2, AHEAD, str(tmp_path / "flag"), **environ)
    assert found == {"task": [True, True, True], "call": [True, True, True]}


@pytest.mark.slow
@pytest.mark.timeout(210)
@pytest.mark.parametrize("plane", ["ucx", "mpi"])
def test_eight_ranks_get_the_same_objects_at_once(tmp_path: Path, plane: str, leak_check: LeakCheck) -> None:
    size, store = 40 << 20, 256 << 20
    environ = {"HPCRAY_OBJECT_STORE_MEMORY": str(store), "HPCRAY_DATA_PLANE": plane, "HPCRAY_SAME_HOST": "0"}
    found = run(tmp_path, 8, BROADCAST, str(size), **environ)
    assert found["good"] == [[True] * 3] * 7
    assert found["pulled"] == [0] + [3] * 7
    assert found["sent_on"] > 0 and max(found["sent"]) < 3 * 7, "nobody sent them to everybody"
