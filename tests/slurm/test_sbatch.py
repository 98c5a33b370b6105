"""The job scripts in slurm/, submitted with sbatch."""

from __future__ import annotations

import re

import programs
import pytest
from helpers.slurm import SRUN, Slurm

pytestmark = pytest.mark.slurm


def test_cpu_trains_digits_on_four_nodes(slurm: Slurm) -> None:
    pytest.importorskip("sklearn")
    job = slurm.sbatch("-N4", slurm.source / "slurm" / "cpu.sbatch", slurm.source / "examples" / "digits.py")
    shown = slurm.complete(job)
    accuracy = re.search(r"accuracy: (\S+) on 360 held-out images", shown)
    assert accuracy is not None, shown
    assert float(accuracy[1]) >= 0.95
    assert re.findall(r"node (\d) +pid \d+ +[\d,]+ gradients", shown) == ["0", "1", "2", "3"], shown


@pytest.mark.slow
def test_a_job_ends_with_the_code_of_its_program(slurm: Slurm) -> None:
    script = slurm.write(programs.ENDING)
    job = slurm.sbatch("-N2", slurm.source / "slurm" / "cpu.sbatch", script, "7")
    facts = slurm.finish(job)
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "7:0"), slurm.output()


def test_every_task_of_an_array_is_a_job_of_its_own(slurm: Slurm) -> None:
    script = slurm.write(programs.HOSTS)
    # Two nodes each and one CPU of four: both run at once, and several on every node.
    array = slurm.sbatch("--array=0-1", "-N2", "-c1", slurm.source / "slurm" / "array.sbatch", script)
    for task in range(2):
        facts = slurm.finish(f"{array}_{task}")
        assert facts["JobState"] == "COMPLETED", slurm.output()
        shown = (slurm.place / f"hpcray-array-{array}_{task}.out").read_text()
        assert f" task {task}\n" in shown
        assert re.search(r"^hosts n\d n\d$", shown, re.MULTILINE), shown


@pytest.mark.slow
def test_scancel_of_a_batch_job_leaves_nothing(slurm: Slurm) -> None:
    script = slurm.write(programs.BUSY)
    job = slurm.sbatch("-N4", slurm.source / "slurm" / "cpu.sbatch", script)
    slurm.wait_output(job, "ready 4")
    slurm.said("scancel", job)
    assert slurm.finish(job)["JobState"] == "CANCELLED"
    slurm.check()


def test_several_jobs_in_one_allocation(slurm: Slurm) -> None:
    script = slurm.write(programs.HOSTS)
    line = f"{' '.join(SRUN)} -N2 --overlap python -m hpcray {script}"
    batch = slurm.write(f"#!/bin/bash\n{line} one & {line} two &\nwait\n", "both.sh")
    job = slurm.sbatch("-N2", "-c2", "-o", "both.out", batch)
    assert slurm.finish(job)["JobState"] == "COMPLETED"
    shown = slurm.output()
    assert shown.count("hosts n1 n2") == 2, shown
    assert {line.split()[-1] for line in shown.splitlines() if line.startswith("job ")} == {"one", "two"}


def test_two_users_on_the_same_nodes_at_once(slurm: Slurm) -> None:
    script = slurm.write(programs.BUSY)
    jobs = {}
    for user in ("ada", "bob"):
        command = [*SRUN, "-N2", "-c1", "python", "-m", "hpcray", script]
        jobs[user] = slurm.start(*command, user=user)
    with jobs["ada"] as ada, jobs["bob"] as bob:
        assert ada.line() == "ready 2", ada.wait()
        assert bob.line() == "ready 2", bob.wait()
        owners = {path.name: oct(path.stat().st_mode & 0o777) for path in slurm.tmp("n2").glob("hpcray-*")}
        assert owners == {"hpcray-6001": "0o700", "hpcray-6002": "0o700"}
        stranger = slurm.run("python", "-c", "import hpcray; hpcray.init(address='auto')", host="n2")
        assert "ConnectionError: no running hpcray node of this user" in stranger.err
        for user in jobs:
            slurm.said("scancel", "-u", user)
        slurm.check()


def test_attach_to_a_running_job(slurm: Slurm) -> None:
    """salloc, a program that runs, and a second one that joins it: as a step, and from a shell on the node."""
    hostess, visitor = slurm.write(programs.HOSTESS), slurm.write(programs.VISITOR, "visitor.py")
    command = [*SRUN, "-N2", "python", "-m", "hpcray", hostess, "2"]
    with slurm.start("salloc", "-N2", "-J", "joined", *command) as running:
        assert running.line() == "ready", running.wait()
        job, nodes = slurm.said("squeue", "-h", "-n", "joined", "-o", "%A %N").split()
        step = slurm.run("srun", f"--jobid={job}", "--overlap", "-N1", "-n1", "python", visitor, "step")
        assert step.out.splitlines() == ["nodes 2 task 42"], step.err
        shell = slurm.run(
            "python", visitor, "shell", host=slurm.said("scontrol", "show", "hostnames", nodes).split()[1]
        )
        assert shell.out.splitlines() == ["nodes 2 task 42"], shell.err
        assert running.line() == "notes step shell"
        assert running.wait().code == 0
