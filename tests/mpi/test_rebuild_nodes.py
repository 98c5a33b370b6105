"""Objects of a node that dies, or whose copies are gone there, are made again elsewhere; a second copy saves a put."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from helpers.jobs import Job
from helpers.leaks import LeakCheck
from helpers.pids import raylet_pid

from hpcray.platform.launcher_environment import open_mpi_wheel_prefix

pytestmark = [
    pytest.mark.usefixtures("both_ways"),
    pytest.mark.skipif(not open_mpi_wheel_prefix(), reason="no Open MPI from PyPI"),
    pytest.mark.timeout(180),
]

SCRIPT = '''
import json, sys, time
import numpy as np
import hpcray as ray
from hpcray.common.ids import raylet_of
from hpcray.runtime.core_worker.core_worker import need_process
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
from hpcray.protocol import messages as m

ray.init()
process = need_process()
nodes = {n["Index"]: n["NodeID"] for n in ray.nodes()}
far = On(nodes[2], soft=True)
out = {}


def drop(node, *refs):
    """Drop the copies on a node behind their owner's back."""
    with process.engine.lock:
        process.drain()
        for ref in refs:
            process.table.unmap(ref._id)
        process.engine.send(raylet_of(node), m.Free([ref._id for ref in refs], []))
        process.engine.flush()


def places(ref):
    return sorted(process.table.entries[ref._id].nodes)


@ray.remote
def make(number):
    return np.full(300_000, number)


@ray.remote
def add(array, number):
    return array + number


@ray.remote
def slow_add(array, seconds):
    time.sleep(seconds)
    return array + 1


@ray.remote
class Reader:
    def read(self, refs):
        return int(ray.get(refs[0])[0])

    def put(self):
        self.ref = ray.put(np.full(300_000, 8))
        return [self.ref]


# Nothing dies yet: copies vanish.
two = ray.put(np.full(300_000, 5), replicas=2)
out["copies"] = len(places(two))
drop(0, two)
out["second copy"] = int(ray.get(two)[0])
lost = make.options(scheduling_strategy=far).remote(7)
ray.wait([lost], fetch_local=False)
out["lost at"] = places(lost)
drop(2, lost)
reader = Reader.options(scheduling_strategy=On(nodes[1], soft=False)).remote()
out["remote reader"] = ray.get(reader.read.remote([lost]))

# Node 2 dies, with the only copies of a chain, a task in the middle of its run, and an owner.
chain = make.options(scheduling_strategy=far).remote(1)
for _ in range(3):
    chain = add.options(scheduling_strategy=far).remote(chain, 1)
side = [add.options(scheduling_strategy=far).remote(chain, n) for n in range(4)]
ray.wait([chain, *side], num_returns=5, fetch_local=False)
out["there"] = [places(ref) for ref in (chain, *side)]
owner = Reader.options(scheduling_strategy=far).remote()
(foreign,) = ray.get(owner.put.remote())
running = [slow_add.options(scheduling_strategy=far).remote(chain, 3) for _ in range(2)]
safe = [ray.put(np.full(300_000, n), replicas=3) for n in range(2)]
out["safe"] = [len(places(ref)) for ref in safe]
time.sleep(1)
print("ready", flush=True)
out["chain"] = int(ray.get(ray.remote(lambda array: array[0]).remote(side[0])))
deadline = time.monotonic() + 60
while all(node["Alive"] for node in ray.nodes()):
    assert time.monotonic() < deadline
    time.sleep(0.02)
out["side"] = [int(array[0]) for array in ray.get(side)]
out["running"] = [int(array[0]) for array in ray.get(running)]
try:
    ray.get(foreign)
except ray.exceptions.OwnerDiedError:
    out["foreign"] = True
drop(0, *safe)
out["saved"] = [int(array[0]) for array in ray.get(safe)]
print(json.dumps(out))
'''


@pytest.mark.slow
def test_what_dies_with_a_node_is_made_again(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = tmp_path / "rebuild.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "hpcray.cli.launch", "-n", "3", "--cpus-per-node", "2", str(script)]
    with Job(command) as job:
        assert job.line() == "ready", job.wait()
        os.kill(raylet_pid(2), signal.SIGKILL)
        ended = job.wait(120)
    assert ended.code == 0, ended.err
    found = json.loads(ended.out.splitlines()[-1])
    assert found["copies"] == 2 and found["second copy"] == 5
    assert found["lost at"] == [2] and found["remote reader"] == 7
    assert [2] in found["there"], "nothing was lost"
    assert found["chain"] == 4 and found["side"] == [4, 5, 6, 7] and found["running"] == [5, 5]
    assert found["foreign"] is True
    assert found["safe"] == [3, 3] and found["saved"] == [0, 1]
    leak_check.check()
