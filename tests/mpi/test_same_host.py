"""Two nodes of one host: their processes speak to each other directly, and what a raylet knows is still heard."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.jobs import Job, as_module
from helpers.leaks import LeakCheck
from helpers.scripts import write

from hpcray.host.launcher import open_mpi_wheel

pytestmark = [
    pytest.mark.skipif(not open_mpi_wheel(), reason="no Open MPI from PyPI"),
    pytest.mark.timeout(120),
]

COMMON = """\
import os, signal, time
import numpy as np
import hpcray as ray
from hpcray.runtime.refs import need_process
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init()
here = ray.get_runtime_context().get_node_id()
other = next(node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)

@ray.remote(num_cpus=0)
class Actor:
    def where(self):
        return os.getpid(), need_process().me
    def links(self, proc):
        engine = need_process().engine
        return engine.peers[proc].link is not engine._raylet
    def read(self, refs):
        return [len(value) for value in ray.get(refs)]
    def keep(self, size):
        self.ref = ray.put(bytes(size))
        return [self.ref]
    def stay(self):
        time.sleep(100)

actor = Actor.options(scheduling_strategy=On(other, False)).remote()
pid, proc = ray.get(actor.where.remote())
"""

DIRECT = (
    COMMON
    + """\
me = need_process()
direct = me.engine.peers[proc].link is not me.engine._raylet
print("ours", direct, "theirs", ray.get(actor.links.remote(me.me)))
small = [ray.put(bytes(size)) for size in (1, 1000, 100_000)]
print("read there", ray.get(actor.read.remote(small)))
print("read here", len(ray.get(ray.get(actor.keep.remote(100_000))[0])))
"""
)

KILLED = (
    COMMON
    + """\
kept = ray.get(actor.keep.remote(100))[0]
call = actor.stay.remote()
time.sleep(0.2)
os.kill(pid, signal.SIGKILL)
for what in (call, kept):
    try:
        ray.get(what, timeout=30)
    except ray.exceptions.RayError as error:
        print(type(error).__name__, "signal 9" in str(error), flush=True)

@ray.remote(max_retries=0)
def die():
    os.kill(os.getpid(), signal.SIGKILL)

try:
    ray.get(die.options(scheduling_strategy=On(other, False)).remote(), timeout=30)
except ray.exceptions.WorkerCrashedError as error:
    print(type(error).__name__, "signal 9" in str(error))
"""
)


@pytest.mark.parametrize(("same_host", "direct"), [("1", True), ("0", False)])
def test_processes_of_two_nodes_speak_directly_unless_told_otherwise(
    leak_check: LeakCheck, tmp_path: Path, same_host: str, direct: bool
) -> None:
    with Job(as_module(2, write(tmp_path, DIRECT)), {"HPCRAY_SAME_HOST": same_host}) as job:
        ended = job.wait(60)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == [
        f"ours {direct} theirs {direct}",
        "read there [1, 1000, 100000]",
        "read here 100000",
    ]


@pytest.mark.parametrize("same_host", ["1", "0"])
def test_how_a_process_died_is_told_by_its_raylet(leak_check: LeakCheck, tmp_path: Path, same_host: str) -> None:
    with Job(as_module(2, write(tmp_path, KILLED)), {"HPCRAY_SAME_HOST": same_host}) as job:
        ended = job.wait(60)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["ActorDiedError True", "OwnerDiedError True", "WorkerCrashedError True"]
