"""Objects between nodes of one host are copied out of the other node's store, bit by bit, also when that node dies."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from helpers.jobs import Job, as_module
from helpers.leaks import LeakCheck
from helpers.pids import raylet_pid
from helpers.scripts import write

from hpcray.host.launcher import open_mpi_wheel

pytestmark = [
    pytest.mark.skipif(not open_mpi_wheel(), reason="no Open MPI from PyPI"),
    pytest.mark.timeout(180),
]

COMMON = """\
import json, os, pathlib, sys, time
import numpy as np
import hpcray as ray
from hpcray.host.session import live_sessions
from hpcray.runtime.host_data import LEAST
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init()
nodes = [On(node["NodeID"], soft=True) for node in sorted(ray.nodes(), key=lambda node: node["Index"])]

def block(seed, size):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)

def windows(node):
    "Bytes that the raylet of a node has read in the arena of each of the others."
    (pid,) = (info.pid for info in live_sessions() if info.node == node)
    found, ours = [], False
    for line in pathlib.Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = " r--s " in line and "memfd:hpcray-arena" in line
        elif ours and line.startswith("Rss:"):
            found.append(int(line.split()[1]) * 1024)
    return found
"""

BITS = (
    COMMON
    + """\
SIZES = [1, 64, 4097, 100_001, 131_072, 1 << 20, (1 << 20) + 1, 3_000_001, 4 << 20, (9 << 20) + 5, 64 << 20]

@ray.remote(num_cpus=0)
class Node:
    def put(self, node):
        self.refs = [ray.put(block(100 * node + number, size)) for number, size in enumerate(SIZES)]
        return self.refs
    def read(self, theirs):
        return [
            bool(np.array_equal(value, block(100 * node + number, SIZES[number])))
            for node, refs in theirs for number, value in enumerate(ray.get(refs))
        ]

actors = [Node.options(scheduling_strategy=one).remote() for one in nodes]
refs = ray.get([actor.put.remote(node) for node, actor in enumerate(actors)])
reads = [
    actor.read.remote([(other, refs[other]) for other in range(len(nodes)) if other != node])
    for node, actor in enumerate(actors)
]
good = [all(read) and len(read) == 2 * len(SIZES) for read in ray.get(reads)]
large = sum(size for size in SIZES if size >= LEAST)
print(json.dumps({"good": good, "windows": [windows(node) for node in range(len(nodes))], "bytes": large}))
"""
)

KILLED = (
    COMMON
    + """\
SIZE, COUNT = 24 << 20, 12

@ray.remote(num_cpus=0)
def make(seed):
    return block(seed, SIZE)

@ray.remote(num_cpus=0)
class Reader:
    def read(self, refs, flag):
        good = []
        for seed, ref in enumerate(refs):
            good.append(bool(np.array_equal(ray.get(ref), block(seed, SIZE))))
            if seed == 1:
                pathlib.Path(flag).touch()
        return good

refs = [make.options(scheduling_strategy=nodes[1]).remote(seed) for seed in range(COUNT)]
ray.wait(refs, num_returns=COUNT, fetch_local=False)
reader = Reader.options(scheduling_strategy=nodes[2]).remote()
read = reader.read.remote(refs, sys.argv[1])
while not os.path.exists(sys.argv[1]):
    time.sleep(0.001)
print("reading", flush=True)
good = ray.get(read)
deadline = time.monotonic() + 60
while len(windows(2)) > 1 and time.monotonic() < deadline:
    time.sleep(0.01)
print(json.dumps({"good": good, "windows": len(windows(2)), "alive": sum(node["Alive"] for node in ray.nodes())}))
"""
)

STORE = {"HPCRAY_OBJECT_STORE_MEMORY": str(512 << 20), "HPCRAY_PRESTART": "0"}


@pytest.mark.parametrize("plane", ["ucx", "mpi"])
@pytest.mark.parametrize("same_host", ["1", "0"])
def test_every_bit_comes_and_the_wire_is_used_only_when_asked_for(
    leak_check: LeakCheck, tmp_path: Path, same_host: str, plane: str
) -> None:
    environ = {"HPCRAY_SAME_HOST": same_host, "HPCRAY_DATA_PLANE": plane, "HPCRAY_INLINE_LIMIT": "0", **STORE}
    with Job(as_module(3, write(tmp_path, BITS)), environ) as job:
        ended = job.wait(150)
    assert ended.code == 0, ended.err
    found = json.loads(ended.out.splitlines()[-1])
    assert found["good"] == [True] * 3
    if same_host == "0":
        assert found["windows"] == [[]] * 3
    else:
        assert [len(read) for read in found["windows"]] == [2] * 3
        # Of two that read the same object, one may get it from the other.
        assert min(sum(read) for read in found["windows"]) >= 2 * found["bytes"], "all of it was read there"


def test_a_node_is_killed_while_others_read_in_its_store(leak_check: LeakCheck, tmp_path: Path) -> None:
    script, flag = write(tmp_path, KILLED), str(tmp_path / "flag")
    command = [sys.executable, "-m", "hpcray.cluster.launch", "-n", "3", "--cpus-per-node", "2", str(script), flag]
    with Job(command, STORE) as job:
        assert job.line() == "reading", job.wait()
        os.kill(raylet_pid(1), signal.SIGKILL)
        ended = job.wait(150)
    assert ended.code == 0, ended.err
    found = json.loads(ended.out.splitlines()[-1])
    assert found == {"good": [True] * 12, "windows": 1, "alive": 2}, ended.err
