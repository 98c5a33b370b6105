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
session = read_session(need_process().place.session_dir).session
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


WORLDS = """\
import os, signal, subprocess, sys, time
import numpy as np
import hpcray as ray
from hpcray.platform.private_files import write_private_file
from hpcray.platform.session_directory import live_sessions, read_session
from hpcray.runtime.core_worker.core_worker import need_process
from hpcray.runtime.node.join_token import request_join_token
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init(num_cpus=1)
place = need_process().place.session_dir
write_private_file("token", request_join_token(place))
line = [sys.executable, "-m", "hpcray.cli.launch", "-n", "2", "--cpus-per-node", "1", "--join", "token"]
worlds = [subprocess.Popen(line) for _ in range(2)]

def alive():
    return [row["Index"] for row in ray.nodes() if row["Alive"]]

while len(alive()) < 5:
    time.sleep(0.05)
print("joined", sorted(row["Index"] for row in ray.nodes()))

@ray.remote(num_cpus=0)
class Place:
    def node(self):
        return ray.get_runtime_context().get_node_id()
    def make(self, number):
        return np.full(1 << 20, number)
    def sum(self, array):
        return int(array.sum())
    def ask(self, other, number):
        return ray.get(other.sum.remote(self.make(number)))

rows = ray.nodes()
actors = [Place.options(scheduling_strategy=On(row["NodeID"], soft=False)).remote() for row in rows]
print("there", ray.get([actor.node.remote() for actor in actors]) == [row["NodeID"] for row in rows])
right = all(
    ray.get(one.ask.remote(other, number)) == number << 20 and ray.get(other.sum.remote(one.make.remote(3))) == 3 << 20
    for number, one in enumerate(actors) for other in actors if other is not one
)
print("reached", right)
session = read_session(place).session
(victim,) = [info for info in live_sessions() if info.session == session and info.node == 2]
os.kill(victim.pid, signal.SIGKILL)
while 2 in alive():
    time.sleep(0.05)
print("left", alive(), ray.get([actors[number].node.remote() for number in (0, 1, 3, 4)]) is not None)
ray.shutdown()
for world in worlds:
    world.wait(30)
"""


def test_worlds_of_several_ranks_join(tmp_path: Path, leak_check: object) -> None:
    (tmp_path / "program.py").write_text(WORLDS)
    line = [sys.executable, "program.py"]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "joined [0, 1, 2, 3, 4]",
        "there True",
        "reached True",
        "left [0, 1, 3, 4] True",
    ], ended.stderr
