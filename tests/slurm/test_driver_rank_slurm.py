"""`--driver-rank` on a Slurm cluster: the program runs on another host than `hpcray-launch`, and may outlive rank 0."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest
from helpers.slurm import Slurm, Started

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = """\
import os, sys, time
import hpcray as ray

ray.init()
names = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}


@ray.remote(num_cpus=0, scheduling_strategy="SPREAD")
def where(seconds=0.0):
    time.sleep(seconds)
    return names[ray.get_runtime_context().get_node_id()]


me = names[ray.get_runtime_context().get_node_id()]
print("ready", me, sys.argv[1:], sorted(set(ray.get([where.remote(0.5) for _ in range(12)]))), flush=True)
if sys.argv[2] == "wait":
    while all(node["Alive"] for node in ray.nodes()):
        time.sleep(0.02)
    print("after", len(ray.get([where.remote() for _ in range(50)])), flush=True)
    time.sleep(float(sys.argv[3]))
    print("at last", len(ray.get([where.remote() for _ in range(50)])), flush=True)
sys.exit(int(sys.argv[1]))
"""


def submit(slurm: Slurm, *arguments: str) -> str:
    script = slurm.source / "slurm" / "cpu.sbatch"
    return slurm.sbatch("-N3", script, "--driver-rank", "2", slurm.write(PROGRAM), *arguments)


@contextlib.contextmanager
def from_the_login_host(slurm: Slurm, seconds: int) -> Iterator[Started]:
    """The program on n3, which waits for the loss of a node; the batch script would go with the first one."""
    line = ("salloc", "--no-kill", "-N3", "--exclusive", "hpcray-launch", "--driver-rank", "2")
    with slurm.start(*line, slurm.write(PROGRAM), "5", "wait", seconds) as job:
        said = job.line()
        assert said.startswith("ready n3"), (said, job.wait())
        yield job


def test_the_program_runs_on_the_host_of_its_rank(slurm: Slurm) -> None:
    facts = slurm.finish(submit(slurm, "7", "go"))
    assert facts["ExitCode"] == "7:0", f"{facts}\n{slurm.output()}"
    assert "ready n3 ['7', 'go'] ['n1', 'n2', 'n3']" in slurm.output().splitlines()
    slurm.check()


def test_the_programs_exit_code_is_the_jobs_after_rank_0_has_died(slurm: Slurm) -> None:
    """srun itself ends with 137, for rank 0."""
    job = submit(slurm, "0", "wait", "0")
    slurm.wait_output(job, "ready n3")
    (pid,) = slurm.processes("hpcray-raylet")["n1"]
    os.kill(pid, signal.SIGKILL)
    facts = slurm.finish(job)
    told = slurm.output()
    assert "after 50" in told.splitlines(), told
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), f"{facts}\n{told}"
    assert not [name for name in os.listdir(slurm.place) if name.startswith(".hpcray-exit-")]
    slurm.check()


def test_the_program_on_another_node_outlives_a_crash_of_rank_0s_node(slurm: Slurm) -> None:
    """From the login host, as the batch script, which is on the first node, goes with it."""
    with from_the_login_host(slurm, seconds=0) as job:
        try:
            slurm.cluster.crash("n1", silent=False)
            ended = job.wait(120)
        finally:
            slurm.run("scontrol", "update", "nodename=n1", "state=down", "reason=crashed")
            slurm.cluster.boot("n1")
            slurm.cluster.wait_idle()
    assert "after 50" in ended.out.splitlines() and ended.code == 5, ended
    slurm.check()


def test_a_head_that_is_cut_off_does_not_end_the_job_that_goes_on(slurm: Slurm) -> None:
    """It takes the program's node for dead, and can still write to the directory of hpcray-launch."""
    with from_the_login_host(slurm, seconds=60) as job:
        slurm.cluster.cut("n1")
        try:
            ended = job.wait(200)
        finally:
            slurm.cluster.heal("n1")
            slurm.cluster.wait_idle()
    assert "at last 50" in ended.out.splitlines() and ended.code == 5, ended
    assert not [name for name in os.listdir(slurm.place) if name.startswith(".hpcray-exit-")]
    slurm.check()
