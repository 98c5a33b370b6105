"""A drain of two nodes: a signal to either of them, in both ways to start them, saves the actors of both."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from helpers.jobs import Job, as_module, under_mpirun
from helpers.leaks import LeakCheck
from helpers.pids import raylet_pid
from helpers.scripts import write

pytestmark = [
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun"),
    pytest.mark.timeout(180),
]

# An actor on each node, which count until they are interrupted.
COUNTERS = """\
import time
import hpcray as ray
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On


@ray.remote(num_cpus=0)
class Counter:
    def __init__(self):
        self.n = 0

    def add(self):
        self.n += 1
        return self.n

    def __hpcray_checkpoint__(self, directory):
        open(directory + "/n", "w").write(str(self.n))


ray.init()
counters = [
    Counter.options(name=f"c{node['Index']}", scheduling_strategy=On(node["NodeID"], soft=False)).remote()
    for node in ray.nodes()
]
last = ray.get([counter.add.remote() for counter in counters])
print("ready", flush=True)
try:
    while True:
        last = [ray.get(counter.add.remote()) for counter in counters]
        time.sleep(0.01)
finally:
    print("last", *last, flush=True)
"""


@pytest.mark.parametrize("mode", ["python -m hpcray", "init() in every rank"])
@pytest.mark.parametrize("node", [0, 1])
def test_a_signal_to_any_node_saves_all(leak_check: LeakCheck, tmp_path: Path, mode: str, node: int) -> None:
    script, kept = write(tmp_path, COUNTERS), tmp_path / "kept"
    command = as_module(2, script) if mode == "python -m hpcray" else under_mpirun(2, script)
    environ = {"HPCRAY_DRAIN_SIGNALS": "USR1,TERM", "HPCRAY_CHECKPOINT_DIR": str(kept)}
    with Job(command, environ) as job:
        assert job.line() == "ready", job.wait().err
        os.kill(raylet_pid(node), signal.SIGTERM)
        ended = job.wait(120.0)
    assert ended.code == 75, ended.err
    assert f"the job drains (SIGTERM on node {node})" in ended.err
    (line,) = (line for line in ended.out.splitlines() if line.startswith("last "))
    counts = [int((kept / f"c{index}" / "000001" / "n").read_text()) for index in range(2)]
    for answered, saved in zip(map(int, line.split()[1:]), counts, strict=True):
        assert 0 <= saved - answered <= 1, "one call of each may have been answered after the last round that ended"
    leak_check.check()
