"""A raylet that dies or stands still under `hpcray-launch`: the job goes on without its node, and ends as it should."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from helpers.jobs import Job
from helpers.leaks import LeakCheck, wait_until
from helpers.pids import parent_of, raylet_pid

from hpcray.platform.launcher_environment import open_mpi_wheel_prefix

pytestmark = [
    pytest.mark.usefixtures("both_ways"),
    pytest.mark.skipif(not open_mpi_wheel_prefix(), reason="no Open MPI from PyPI"),
    pytest.mark.timeout(180),
]

# Says "ready", waits until one node is dead, and tells what became of everything.
LOSS = """\
import sys, time
import numpy as np
import hpcray as ray
from hpcray.util.placement_group import placement_group
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init()
lost = ray.nodes()[2]["NodeID"]
soft, hard = On(lost, soft=True), On(lost, soft=False)


@ray.remote(num_cpus=0)
class Home:
    def __init__(self, table):
        self.mark = int(table[-1])

    def node(self):
        return self.mark, ray.get_runtime_context().get_node_id()


@ray.remote
def where(seconds=0.0):
    time.sleep(seconds)
    return ray.get_runtime_context().get_node_id()


@ray.remote
def table(value):
    return np.full(200_000, value)


# The only copies of their arguments are on the node that will be lost.
moves = Home.options(max_restarts=1, scheduling_strategy=soft).remote(table.options(scheduling_strategy=soft).remote(7))
dies = Home.options(scheduling_strategy=soft).remote(table.options(scheduling_strategy=soft).remote(8))
large = table.options(scheduling_strategy=soft).remote(9)
ray.wait([large], fetch_local=False)
group = placement_group([{"CPU": 1}] * 2, strategy="PACK")
assert ray.get([moves.node.remote(), dies.node.remote()]) == [(7, lost), (8, lost)]
assert group.wait(30)
before = ray.cluster_resources()["CPU"]
slow = [where.options(scheduling_strategy=soft).remote(2.0) for _ in range(2)]
time.sleep(0.5)
print("ready", flush=True)
deadline = time.monotonic() + 60
while all(node["Alive"] for node in ray.nodes()):
    assert time.monotonic() < deadline
    time.sleep(0.02)
(dead,) = (node for node in ray.nodes() if not node["Alive"])
print("dead", dead["Index"], dead["DeathReasonMessage"], flush=True)
print("cpus", before - ray.cluster_resources()["CPU"], flush=True)
print("slow", sum(node != lost for node in ray.get(slow)), flush=True)
print("large", int(ray.get(large)[-1]), flush=True)
mark, node = ray.get(moves.node.options(max_task_retries=-1).remote())
print("moved", mark, node != lost, flush=True)
try:
    ray.get(dies.node.remote())
except ray.exceptions.ActorDiedError as error:
    print("died", "node 2 died: host" in str(error), flush=True)
print("tasks", sum(node != lost for node in ray.get([where.remote() for _ in range(20)])), flush=True)
print("group", group.wait(30), flush=True)
sys.exit(7)
"""


def start(tmp_path: Path, **environ: str) -> Job:
    script = tmp_path / "loss.py"
    script.write_text(LOSS)
    command = [sys.executable, "-m", "hpcray.cli.launch", "-n", "3", "--cpus-per-node", "2", str(script)]
    return Job(command, environ)


def check_story(out: list[str]) -> None:
    dead, cpus, slow, large, moved, died, tasks, group = out
    assert dead.startswith("dead 2 host "), dead
    assert cpus == "cpus 2.0" and slow == "slow 2"
    assert large == "large 9" and moved == "moved 7 True" and died == "died True"
    assert tasks == "tasks 20" and group == "group True"


def test_a_killed_raylet_takes_its_node_along_and_nothing_else(leak_check: LeakCheck, tmp_path: Path) -> None:
    with start(tmp_path) as job:
        assert job.line() == "ready", job.wait()
        victim = raylet_pid(2)
        os.kill(victim, signal.SIGKILL)
        ended = job.wait(120)
    check_story(ended.out.splitlines())
    assert ended.code == 7, ended.err
    assert "node 2 died: host" in ended.err and "The job goes on with 2 of its nodes" in ended.err
    leak_check.check()


@pytest.mark.slow
def test_a_killed_template_costs_one_node(leak_check: LeakCheck, tmp_path: Path) -> None:
    with start(tmp_path) as job:
        assert job.line() == "ready", job.wait()
        templates = leak_check.processes("hpcray-template")
        (victim,) = (pid for pid in templates if parent_of(pid) == raylet_pid(2))
        os.kill(victim, signal.SIGKILL)
        ended = job.wait(120)
    check_story(ended.out.splitlines())
    assert ended.code == 7, ended.err
    assert "the template process ended with signal 9 (SIGKILL); it forks all workers, so this node ends" in ended.err
    leak_check.check()


@pytest.mark.slow
def test_a_raylet_that_stood_still_too_long_is_fenced(leak_check: LeakCheck, tmp_path: Path) -> None:
    """When it goes on it finds itself declared dead, and ends, while the job lives."""
    with start(tmp_path, HPCRAY_NODE_TIMEOUT="1.5", HPCRAY_HEARTBEAT_INTERVAL="0.2") as job:
        assert job.line() == "ready", job.wait()
        victim = raylet_pid(2)
        os.kill(victim, signal.SIGSTOP)
        try:
            dead = job.line()
        finally:
            os.kill(victim, signal.SIGCONT)
        wait_until(lambda: victim not in leak_check.processes(), "the end of the fenced raylet")
        ended = job.wait(120)
    check_story([dead, *ended.out.splitlines()])
    assert "it was not heard of for" in dead
    assert ended.code == 7, ended.err
    assert "the head has declared this node dead" in ended.err
    leak_check.check()


def test_the_heads_death_is_told_by_all_and_leaves_nothing(leak_check: LeakCheck, tmp_path: Path) -> None:
    with start(tmp_path) as job:
        assert job.line() == "ready", job.wait()
        os.kill(raylet_pid(0), signal.SIGKILL)
        ended = job.wait(60)
    assert ended.code == 137, ended.err
    told = [line for line in ended.err.splitlines() if "the head (node 0, host" in line and "died" in line]
    assert len(told) == 2, ended.err
    leak_check.check()
