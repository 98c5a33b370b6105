"""A node of a running Slurm job crashes, or its cable is pulled: the job goes on without it and ends with code 0."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable

import pytest
from helpers.leaks import wait_until
from helpers.slurm import Slurm

from hpcray.cli.launch import parse_options
from hpcray.launch.launch_line import LaunchSite, compose

pytestmark = pytest.mark.slurm

# Node n3 has an actor that may restart, one that may not, running tasks and a large result, when it is lost.
LOSS = """\
import time
import numpy as np
import hpcray as ray
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init()
(lost,) = (node["NodeID"] for node in ray.nodes() if node["NodeManagerHostname"] == "n3")
soft = On(lost, soft=True)


@ray.remote(num_cpus=0)
class Home:
    def node(self):
        return ray.get_runtime_context().get_node_id()


@ray.remote
def where(seconds):
    time.sleep(seconds)
    return ray.get_runtime_context().get_node_id()


moves = Home.options(max_restarts=1, max_task_retries=-1, scheduling_strategy=soft).remote()
dies = Home.options(scheduling_strategy=soft).remote()
assert ray.get([moves.node.remote(), dies.node.remote()]) == [lost, lost]
tasks = [where.options(scheduling_strategy=soft).remote(8.0) for _ in range(3)]
time.sleep(1.0)
print("ready", flush=True)
while all(node["Alive"] for node in ray.nodes()):
    time.sleep(0.02)
print("noticed", time.time(), [node["DeathReasonMessage"] for node in ray.nodes() if not node["Alive"]], flush=True)
try:
    ray.get(dies.node.remote())
except ray.exceptions.ActorDiedError as error:
    print("died", "host n3" in str(error), flush=True)
print("moved", ray.get(moves.node.remote()) != lost, flush=True)
print("again", sum(node != lost for node in ray.get(tasks)), flush=True)
print("tasks", len(ray.get([where.remote(0.0) for _ in range(100)])), flush=True)
"""
STORY = ["died True", "moved True", "again 3", "tasks 100"]


def lose(slurm: Slurm, how: Callable[[str], None], *arguments: object) -> tuple[str, float]:
    """Submit the program, lose n3 when it is ready; the job, and the seconds until the head had noticed."""
    job = slurm.sbatch("-N4", *(arguments or (slurm.source / "slurm" / "cpu.sbatch", slurm.write(LOSS))))
    slurm.wait_output(job, "ready")
    began = time.time()
    how("n3")
    slurm.wait_output(job, "noticed")
    said = next(line for line in slurm.output().splitlines() if line.startswith("noticed"))
    assert "host n3: " in said
    return job, float(said.split()[1]) - began


def check_end(slurm: Slurm, job: str) -> None:
    slurm.complete(job)
    told = slurm.output().splitlines()
    assert [line for line in told if line in STORY] == STORY, told
    assert any("node 2 died: host n3" in line and "goes on with 3 of its nodes" in line for line in told), told


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("silent", [False, True], ids=["crash", "power loss"])
def test_a_job_survives_the_crash_of_a_node(slurm: Slurm, silent: bool) -> None:
    try:
        job, seconds = lose(slurm, lambda host: slurm.cluster.crash(host, silent=silent))
        assert seconds < 10.0, "half of it by default; the machine may be slow"
        check_end(slurm, job)
    finally:
        slurm.run("scontrol", "update", "nodename=n3", "state=down", "reason=crashed")
        wait_until(lambda: not slurm.said("squeue", "-h"), "the end of the job")
        slurm.cluster.boot("n3")
        slurm.cluster.wait_idle()
    slurm.check()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("long", [False, True], ids=["for a moment", "until it gives up"])
def test_a_node_that_is_cut_off_and_comes_back(slurm: Slurm, long: bool) -> None:
    """When its cable is in again it has been declared dead: it ends, and leaves nothing."""
    try:
        job, seconds = lose(slurm, slurm.cluster.cut)
        assert seconds < 10.0, "half of it by default; the machine may be slow"
        if long:
            wait_until(lambda: "n3" not in slurm.processes("hpcray-worker"), "the end of its work")
    finally:
        slurm.cluster.heal("n3")
    wait_until(lambda: "n3" not in slurm.processes("hpcray-raylet"), "the end of the raylet on n3")
    check_end(slurm, job)
    slurm.check()


def kill_raylet(slurm: Slurm) -> Callable[[str], None]:
    return lambda host: os.kill(slurm.processes("hpcray-raylet")[host][0], signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_survives_the_death_of_a_raylet(slurm: Slurm) -> None:
    job, _ = lose(slurm, kill_raylet(slurm))
    check_end(slurm, job)
    slurm.check()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_survives_the_death_of_a_raylet_under_mpirun_on_several_hosts(slurm: Slurm) -> None:
    """With the line that hpcray-launch composes for hosts that are named."""
    site = LaunchSite(slurm.python, "mpirun", True, {}, recovers=True)
    line = compose(parse_options(["--hosts", "n1,n2,n3,n4", str(slurm.write(LOSS))]), site)
    script = slurm.write(f"#!/bin/bash\n{shlex.join(line)}\necho code $?\n", "job.sh")
    job, _ = lose(slurm, kill_raylet(slurm), "-o", "%x-%j.out", "--exclusive", script)
    assert slurm.finish(job)["JobState"] == "COMPLETED"
    told = slurm.output().splitlines()
    assert [line for line in told if line in STORY] == STORY and "code 0" in told, told
    slurm.check()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_ranks_end_with_a_reason_when_rank_0_dies(slurm: Slurm) -> None:
    """Every other rank says why it ends, within seconds, and nothing is left."""
    job = slurm.sbatch("-N3", slurm.source / "slurm" / "cpu.sbatch", slurm.write(LOSS.replace('"n3"', '"n2"')))
    slurm.wait_output(job, "ready")
    (pid,) = slurm.processes("hpcray-raylet")["n1"]
    os.kill(pid, signal.SIGKILL)
    facts = slurm.finish(job)
    assert facts["JobState"] == "FAILED" and facts["ExitCode"] == "137:0", facts
    told = [line for line in slurm.output().splitlines() if "the head (node 0, host n1) died" in line]
    assert len(told) == 2, slurm.output()
    slurm.check()
