"""Device objects on several nodes: read elsewhere, made again after the loss of their node, moved out of an actor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.jobs import Job, on_two_nodes
from helpers.leaks import LeakCheck
from helpers.scripts import write

from hpcray.platform.launcher_environment import open_mpi_wheel_prefix

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(not open_mpi_wheel_prefix(), reason="no Open MPI from PyPI"),
    pytest.mark.timeout(180),
    pytest.mark.slow,
]
PROGRAM = """
import json, os, signal, time
import torch
import hpcray as ray
from hpcray.actor import exit_actor
from hpcray.exceptions import RayActorError
from hpcray.platform.session_directory import live_sessions
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init()
here, there = [On(node["NodeID"], soft=True) for node in sorted(ray.nodes(), key=lambda node: node["Index"])]
SMALL, LARGE = 4, 1 << 20

def values(number, length):
    tensor = torch.full((length,), float(number))
    return {"tensor": tensor, "same": tensor, "node": ray.get_runtime_context().get_node_id()}

@ray.remote(tensor_transport="auto", max_retries=5)
def make(number, length):
    return values(number, length)

@ray.remote(num_cpus=0)
class Holder:
    @ray.method(tensor_transport="auto")
    def make(self, number, length):
        return values(number, length)
    def total(self, value):
        assert value["same"] is value["tensor"]
        return float(value["tensor"].sum())
    def leave(self):
        exit_actor()

def on(where):
    return Holder.options(scheduling_strategy=where)

def right(refs):
    "Both nodes and the driver read the values 1 and 2."
    readers = [on(where).remote() for where in (here, there)]
    sums = [ray.get(reader.total.remote(ref)) for ref in refs for reader in readers]
    mine = [float(ray.get(ref)["tensor"].sum()) for ref in refs]
    return sums == [float(s) for s in (SMALL, SMALL, 2 * LARGE, 2 * LARGE)] and mine == [float(SMALL), 2.0 * LARGE]

found = {}
maker, leaver = on(there).remote(), on(there).remote()
found["of an actor"] = right([maker.make.remote(1, SMALL), maker.make.remote(2, LARGE)])
moved = [leaver.make.remote(1, SMALL), leaver.make.remote(2, LARGE)]
ray.wait(moved, num_returns=2)
try:
    ray.get(leaver.leave.remote())
except RayActorError:
    found["moved"] = right(moved)
far = make.options(scheduling_strategy=there)
refs = [far.remote(1, SMALL), far.remote(2, LARGE)]
found["of tasks"] = right(refs)
was = [ray.get(ref)["node"] for ref in refs]
(raylet,) = (info.pid for info in live_sessions() if info.node == 1)
os.kill(raylet, signal.SIGKILL)
found["after the loss"] = right(refs)
found["moved here"] = [ray.get(ref)["node"] for ref in refs] == 2 * [ray.get_runtime_context().get_node_id()] != was
print(json.dumps(found))
ray.shutdown()
"""


def test_tensors_are_read_moved_and_made_again_across_nodes(leak_check: LeakCheck, tmp_path: Path) -> None:
    environ = {"HPCRAY_PRELOAD": "torch", "HPCRAY_OBJECT_STORE_MEMORY": str(256 << 20)}
    with Job(on_two_nodes(write(tmp_path, PROGRAM)), environ) as job:
        ended = job.wait(150)
    assert ended.code == 0, (ended.out, ended.err[-8000:])
    found = json.loads(ended.out.splitlines()[-1])
    assert found == dict.fromkeys(found, True) and len(found) == 5, found
