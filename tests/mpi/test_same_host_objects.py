"""Nodes of one host read each other's objects in place: every bit, whoever dies or hangs up meanwhile."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.jobs import Ended, Job
from helpers.leaks import LeakCheck
from helpers.pids import raylet_pid
from helpers.scripts import write

from hpcray.platform.launcher_environment import open_mpi_wheel_prefix

pytestmark = [
    pytest.mark.skipif(not open_mpi_wheel_prefix(), reason="no Open MPI from PyPI"),
    pytest.mark.timeout(180),
]

COMMON = """\
import gc, json, os, pathlib, signal, sys, time
import numpy as np
import hpcray as ray
from hpcray.runtime.core_worker.core_worker import need_process
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init()
nodes = [On(node["NodeID"], soft=True) for node in sorted(ray.nodes(), key=lambda node: node["Index"])]

def block(seed, size):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)

def good(values, size):
    return [bool(np.array_equal(value, block(seed, size))) for seed, value in enumerate(values)]

def arenas():
    "How many stores this process has mapped."
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if "memfd:hpcray-arena" in line})

def stores(what):
    stores = need_process().diagnostics.list_stores(1000, 60.0)
    return [store.get(what) for store in sorted(stores, key=lambda one: one["node"])]

def wait_until(check):
    deadline = time.monotonic() + 60
    while not check() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(check())

class Node:
    def pid(self):
        return os.getpid()
    def put(self, count, size):
        return [ray.put(block(seed, size)) for seed in range(count)]
    def read(self, refs, size):
        self.views = ray.get(refs)
        return good(self.views, size)
    def again(self, size):
        return good(self.views, size)
    def forget(self):
        self.views = None
        gc.collect()
    def has_mapped(self, count):
        return wait_until(lambda: arenas() == count)
    def hang_up(self, node):
        process = need_process()
        with process.engine.lock:
            process.stores.neighbors._peers[node][1].shutdown(2)
    def run_out(self):
        "There is a descriptor for what a worker needs all the time, and none for a visit."
        import resource
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        self.files = []
        try:
            while True:
                self.files.append(open("/dev/null"))
        except OSError:
            return len(self.files) > 5

def on(number):
    return ray.remote(num_cpus=0)(Node).options(scheduling_strategy=nodes[number]).remote()
"""

BITS = """\
SIZES = [1, 64, 4097, 100_001, 131_072, 1 << 20, (1 << 20) + 1, 3_000_001, 4 << 20, (9 << 20) + 5, 64 << 20]

@ray.remote(num_cpus=0)
class Many:
    def put(self, node):
        self.refs = [ray.put(block(100 * node + number, size)) for number, size in enumerate(SIZES)]
        return self.refs
    def read(self, theirs):
        good = [
            bool(np.array_equal(value, block(100 * node + number, SIZES[number])))
            for node, refs in theirs for number, value in enumerate(ray.get(refs))
        ]
        return all(good) and len(good) == 2 * len(SIZES), arenas()

actors = [Many.options(scheduling_strategy=one).remote() for one in nodes]
refs = ray.get([actor.put.remote(node) for node, actor in enumerate(actors)])
reads = [
    actor.read.remote([(other, refs[other]) for other in range(len(nodes)) if other != node])
    for node, actor in enumerate(actors)
]
found = ray.get(reads)
print(json.dumps({
    "good": [right for right, _ in found], "arenas": [count for _, count in found], "pulled": stores("pulled"),
}))
"""

NODE_KILLED = """\
SIZE, COUNT = 24 << 20, 12

@ray.remote(num_cpus=0)
def make(seed):
    return block(seed, SIZE)

@ray.remote(num_cpus=0)
class Reader(Node):
    def read_slowly(self, refs, flag):
        self.views, right = [ray.get(refs[0])], []
        for seed, ref in enumerate(refs):
            right.append(bool(np.array_equal(ray.get(ref), block(seed, SIZE))))
            if seed == 1:
                pathlib.Path(flag).touch()
        return right
    def read_again(self, refs):
        return bool(np.array_equal(ray.get(refs[0]), self.views[0]))

refs = [make.options(scheduling_strategy=nodes[1]).remote(seed) for seed in range(COUNT)]
ray.wait(refs, num_returns=COUNT, fetch_local=False)
reader = Reader.options(scheduling_strategy=nodes[2]).remote()
read = reader.read_slowly.remote(refs, sys.argv[1])
while not os.path.exists(sys.argv[1]):
    time.sleep(0.001)
print("reading", flush=True)
right = ray.get(read)
kept = ray.get([reader.again.remote(SIZE), reader.read_again.remote(refs)])
ray.get(reader.forget.remote())
print(json.dumps({
    "good": right, "kept": kept, "unmapped": ray.get(reader.has_mapped.remote(2)),
    "alive": sum(node["Alive"] for node in ray.nodes()),
}))
"""

READER_KILLED = """\
SIZE = 3 << 20
refs = [ray.put(block(seed, SIZE)) for seed in range(4)]
readers = [on(1), on(1)]
right = ray.get([reader.read.remote(refs, SIZE) for reader in readers])
pins = stores("pinned")
os.kill(ray.get(readers[0].pid.remote()), signal.SIGKILL)
del refs
gc.collect()
time.sleep(1.0)
held = stores("objects")  # the other one still looks at them
again = ray.get(readers[1].again.remote(SIZE))
ray.get(readers[1].forget.remote())
print(json.dumps({
    "good": right, "pinned": pins, "held": held, "again": again,
    "gone": wait_until(lambda: not sum(stores("objects"))), "used": stores("used"),
}))
"""

NODE_OF_READER_KILLED = """\
SIZE = 3 << 20
refs = [ray.put(block(seed, SIZE)) for seed in range(4)]
reader = on(1)
right = ray.get(reader.read.remote(refs, SIZE))
print("read", flush=True)
wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 1)
del refs
gc.collect()
print(json.dumps({"good": right, "gone": wait_until(lambda: not stores("objects")[0])}))
"""

HUNG_UP = """\
SIZE = 3 << 20
refs = [ray.put(block(seed, SIZE)) for seed in range(4)]
reader = on(1)
right = ray.get(reader.read.remote(refs, SIZE))
before = stores("pulled")
ray.get(reader.hang_up.remote(0))
more = [ray.put(block(seed, SIZE)) for seed in range(4)]
later = ray.get(reader.read.remote(more, SIZE))
after = stores("pulled")
del refs, more
ray.get(reader.forget.remote())
print(json.dumps({
    "good": right, "later": later, "pulled": [before, after], "gone": wait_until(lambda: not sum(stores("objects"))),
}))
"""

NO_DESCRIPTORS = """\
SIZE = 3 << 20
refs = [ray.put(block(seed, SIZE)) for seed in range(4)]
reader = on(1)
out = ray.get(reader.run_out.remote())
print(json.dumps({"out": out, "good": ray.get(reader.read.remote(refs, SIZE)), "pulled": stores("pulled")}))
"""

LARGER_THAN_A_STORE = """\
SIZE, COUNT = 2 << 20, 24

maker, reader = on(0), on(1)
refs = ray.get(maker.put.remote(COUNT, SIZE))
singly = [ray.get(reader.read.remote([ref], SIZE)) for ref in refs[:1]]

@ray.remote(num_cpus=0)
def check(seed, value):
    return bool(np.array_equal(value, block(seed, SIZE)))

there = check.options(scheduling_strategy=nodes[1])
each = ray.get([there.remote(seed, ref) for seed, ref in enumerate(refs)])
print(json.dumps({"good": singly == [[True]] and all(each), "on_disk": stores("on_disk")[0]}))
"""

STORE = {"HPCRAY_OBJECT_STORE_MEMORY": str(512 << 20), "HPCRAY_PRESTART": "0"}


def job(tmp_path: Path, ranks: int, script: str, *args: str, **environ: str) -> Job:
    command = [sys.executable, "-m", "hpcray.cli.launch", "-n", str(ranks), "--cpus-per-node", "2"]
    return Job([*command, str(write(tmp_path, COMMON + script)), *args], {**STORE, **environ})


def found(ended: Ended) -> Any:
    assert ended.code == 0, ended.out + ended.err
    return json.loads(ended.out.splitlines()[-1])


@pytest.mark.parametrize("plane", ["ucx", "mpi"])
@pytest.mark.parametrize("same_host", ["1", "0"])
def test_every_bit_comes_and_is_copied_only_when_asked_for(
    leak_check: LeakCheck, tmp_path: Path, same_host: str, plane: str
) -> None:
    environ = {"HPCRAY_SAME_HOST": same_host, "HPCRAY_DATA_PLANE": plane, "HPCRAY_INLINE_LIMIT": "0"}
    with job(tmp_path, 3, BITS, **environ) as running:
        told = found(running.wait(150))
    assert told["good"] == [True] * 3
    assert told["arenas"] == [3 if same_host == "1" else 1] * 3
    assert [bool(pulled) for pulled in told["pulled"]] == [same_host == "0"] * 3


def test_a_node_is_killed_while_others_read_in_its_store(leak_check: LeakCheck, tmp_path: Path) -> None:
    with job(tmp_path, 3, NODE_KILLED, str(tmp_path / "flag")) as running:
        assert running.line() == "reading", running.wait()
        os.kill(raylet_pid(1), signal.SIGKILL)
        told = found(running.wait(150))
    assert told["good"] == [True] * 12
    assert told["kept"][0] == [True] and told["kept"][1] is True, "what is being looked at stays as it is"
    assert told["unmapped"], "its memory is given back when nobody looks at it any more"
    assert told["alive"] == 2


def test_who_reads_in_place_and_dies_or_forgets_leaves_nothing_pinned(leak_check: LeakCheck, tmp_path: Path) -> None:
    with job(tmp_path, 2, READER_KILLED) as running:
        told = found(running.wait(150))
    assert told["good"] == [[True] * 4] * 2
    assert told["pinned"] == [4, 0]
    assert told["held"] == [4, 0] and told["again"] == [True] * 4, "a view keeps it, though nobody refers to it"
    assert told["gone"] and told["used"] == [0, 0]


def test_the_pins_of_a_dead_node_go_with_it(leak_check: LeakCheck, tmp_path: Path) -> None:
    with job(tmp_path, 2, NODE_OF_READER_KILLED) as running:
        assert running.line() == "read", running.wait()
        os.kill(raylet_pid(1), signal.SIGKILL)
        told = found(running.wait(150))
    assert told == {"good": [True] * 4, "gone": True}


def test_without_the_connection_objects_come_as_from_far(leak_check: LeakCheck, tmp_path: Path) -> None:
    with job(tmp_path, 2, HUNG_UP) as running:
        told = found(running.wait(150))
    assert told == {"good": [True] * 4, "later": [True] * 4, "pulled": [[0, 0], [0, 4]], "gone": True}


def test_who_has_no_descriptor_left_reads_all_the_same(leak_check: LeakCheck, tmp_path: Path) -> None:
    with job(tmp_path, 2, NO_DESCRIPTORS) as running:
        told = found(running.wait(150))
    assert told == {"out": True, "good": [True] * 4, "pulled": [0, 4]}


def test_what_its_node_has_on_disk_is_read_there_too(leak_check: LeakCheck, tmp_path: Path) -> None:
    with job(tmp_path, 2, LARGER_THAN_A_STORE, HPCRAY_OBJECT_STORE_MEMORY=str(16 << 20)) as running:
        told = found(running.wait(150))
    assert told["good"] and told["on_disk"] > 16 << 20, told
