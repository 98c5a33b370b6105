"""Ranks and nodes that die under a running job: the others end in good order, and nothing is left on any of them."""

from __future__ import annotations

import os
import signal

import programs
import pytest
from helpers.leaks import wait_until
from helpers.slurm import SRUN, Slurm

pytestmark = pytest.mark.slurm


@pytest.mark.slow
def test_a_killed_step_is_swept_by_the_next_start(slurm: Slurm) -> None:
    """Where Slurm kills everything at once, nobody is left to tidy up; the user's next job on the node does."""
    busy, hosts = slurm.write(programs.BUSY), slurm.write(programs.HOSTS, "hosts.py")
    with slurm.start(*SRUN, "-N2", "-J", "killed", "python", "-m", "hpcray", busy) as started:
        assert started.line() == "ready 2", started.wait()
        nodes = slurm.said("squeue", "-h", "-n", "killed", "-o", "%N")
        slurm.said("scancel", "--full", "-s", "KILL", "-n", "killed")
        assert started.wait().code != 0
    wait_until(lambda: not slurm.said("squeue", "-h"), "the end of the job")
    assert not slurm.processes(), "a killed step leaves no process"
    assert slurm.run(*SRUN, "-w", nodes, "python", "-m", "hpcray", hosts).code == 0
    slurm.check()


def test_a_killed_raylet_is_tidied_up_on_its_node(slurm: Slurm) -> None:
    script = slurm.write(programs.BUSY)
    with slurm.start("salloc", "-Q", "-N2", "hpcray-launch", "--srun", script) as started:
        assert started.line() == "ready 2", started.wait()
        pid = slurm.processes("hpcray-raylet")["n2"][0]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: "n2" not in slurm.processes(), "the end of what was on n2")
        slurm.said("scancel", "-u", "root")
        started.wait()
    slurm.check()


def test_a_crashed_node_leaves_the_others_clean(slurm: Slurm) -> None:
    script = slurm.write(programs.BUSY)
    with slurm.start("salloc", "-Q", "-w", "n[1-3]", "--no-kill", "hpcray-launch", "--srun", script) as started:
        assert started.line() == "ready 3", started.wait()
        slurm.cluster.crash("n3")
        try:
            # What Slurm would find out in SlurmdTimeout seconds.
            slurm.said("scontrol", "update", "nodename=n3", "state=down", "reason=crashed")
            slurm.said("scancel", "-u", "root")
            started.wait()
        finally:
            wait_until(lambda: not slurm.said("squeue", "-h"), "the end of the job")
            slurm.cluster.boot("n3")
            slurm.cluster.wait_idle()
    slurm.check()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_jobs_leave_nothing(slurm: Slurm) -> None:
    script = slurm.write(programs.HOSTS)
    for number in range(50):
        job = slurm.sbatch("-N4", slurm.source / "slurm" / "cpu.sbatch", script, number)
        facts = slurm.finish(job)
        assert facts["JobState"] == "COMPLETED", slurm.output()
        slurm.check()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_time_limit_leaves_nothing(slurm: Slurm) -> None:
    script = slurm.write(programs.BUSY)
    # Without a drain of its own, that would end it earlier.
    environ = {"HPCRAY_DRAIN_MARGIN": "0"}
    job = slurm.sbatch("-N4", "-t", "1", slurm.source / "slurm" / "cpu.sbatch", script, environ=environ)
    assert slurm.finish(job, timeout=180)["JobState"] == "TIMEOUT"
    slurm.check()
