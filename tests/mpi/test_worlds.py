"""A job of several MPI ranks that nodes of other worlds join."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcray.platform.launcher_environment import open_mpi_wheel_prefix

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not open_mpi_wheel_prefix(), reason="no Open MPI from PyPI"),
    pytest.mark.timeout(180),
]

PROGRAM = """\
import os, signal, time
import hpcray as ray
from hpcray import cluster
from hpcray.platform.session_directory import live_sessions, read_session
from hpcray.runtime.core_worker.core_worker import need_process
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init()

@ray.remote(num_cpus=0)
class Where:
    def node(self):
        return ray.get_runtime_context().get_node_id()

def on_the_newest():
    newest = ray.nodes()[-1]["NodeID"]
    actor = Where.options(scheduling_strategy=On(newest, soft=False)).remote()
    return actor, ray.get(actor.node.remote()) == newest

cluster.scale(2, cpus=1, executor="local", wait=True)
actor, there = on_the_newest()
print("joined", len(ray.nodes()), there)
session = read_session(need_process().session_dir).session
(head,) = [info for info in live_sessions() if info.session == session and info.node == 0]
os.kill(head.pid, signal.SIGKILL)
while ray.nodes()[0]["Alive"]:
    time.sleep(0.05)
print("moved", [row["Alive"] for row in ray.nodes()], ray.get(actor.node.remote()) == ray.nodes()[-1]["NodeID"])
cluster.scale(1, cpus=1, executor="local", wait=True)
print("joined", sum(row["Alive"] for row in ray.nodes()), on_the_newest()[1])
"""


def test_nodes_that_have_joined_follow_the_head_and_others_join_the_new_one(tmp_path: Path, leak_check: object) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    line = [sys.executable, "-m", "hpcray.cli.launch", "-n", "3", "--driver-rank", "1", "--cpus-per-node", "1"]
    ended = subprocess.run([*line, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "joined 5 True",
        "moved [False, True, True, True, True] True",
        "joined 5 True",
    ]
