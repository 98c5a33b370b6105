"""Jobs of Slurm that have ended: what the commands say of them on the login host, when no node is left to ask."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.slurm import Slurm

pytestmark = pytest.mark.slurm

PROGRAM = """\
import sys, time
import hpcray as ray

ray.init()


@ray.remote
def short():
    return 1


@ray.remote
def failing():
    raise ValueError("the planted message 4711")


@ray.remote
def endless():
    time.sleep(600)


ray.get([short.remote() for _ in range(30)])
ray.wait([failing.remote()])
refs = [endless.remote() for _ in range(2)]
time.sleep(4)
print("runs", flush=True)
ray.get(refs)
"""


@pytest.fixture
def histories(slurm: Slurm) -> Path:
    return slurm.place / "histories"


def submit(slurm: Slurm, histories: Path, *options: str) -> str:
    """Submit the program on two nodes; returns the job's id when its tasks run."""
    program = slurm.write(PROGRAM)
    line = f"srun --mpi=pmix --ntasks-per-node=1 {slurm.python} -m hpcray {program}"
    script = slurm.write(f"#!/bin/bash\nexport HPCRAY_HISTORY_DIR={histories}\n{line}\n", "job.sh")
    job = slurm.sbatch("-N", "2", "--no-requeue", *options, "-o", slurm.place / "job-%j.out", script)
    output = slurm.place / f"job-{job}.out"
    slurm.wait(lambda: output.exists() and "runs" in output.read_text(), f"the tasks of job {job}")
    return job


def said(slurm: Slurm, histories: Path, *words: object) -> str:
    """What a command prints on the login host."""
    ended = slurm.run(
        slurm.python, "-m", "hpcray.cli", *words, environ={"HPCRAY_HISTORY_DIR": str(histories)}, timeout=60
    )
    assert ended.code == 0, (words, ended.out, ended.err)
    return ended.out


def test_cancelled_and_killed(slurm: Slurm, histories: Path) -> None:
    cancelled = submit(slurm, histories)
    slurm.said("scancel", cancelled)
    slurm.finish(cancelled)
    killed = submit(slurm, histories)
    for host in slurm.processes():
        slurm.kill(host)
    slurm.finish(killed)
    listed = said(slurm, histories, "jobs")
    assert re.search(rf"^{cancelled} .*CANCELLED", listed, re.M), listed
    assert re.search(rf"^{killed} .*(FAILED|NODE_FAIL|COMPLETED)", listed, re.M), listed
    for job, words in ((cancelled, ("Slurm: CANCELLED", "SIGTERM")), (killed, ("Slurm: ", "history: ", "heard"))):
        why = said(slurm, histories, "why", "--job", job)
        assert all(word in why for word in words), why
        assert "ValueError: the planted message 4711" in why and "2 nodes" in why, why
        counts = said(slurm, histories, "summary", "tasks", "--job", job)
        assert re.search(r"short +FINISHED: 30 ", counts) and re.search(r"endless +RUNNING: 2\b", counts), counts
        page = slurm.place / "report.html"
        said(slurm, histories, "report", "--job", job, page)
        assert "endless" in page.read_text() and "4711" in page.read_text()


@pytest.mark.slow
def test_time_limit_and_requeue(slurm: Slurm, histories: Path) -> None:
    job = submit(slurm, histories, "-t", "1", "--requeue")
    slurm.said("scontrol", "requeue", job)
    slurm.wait(lambda: len(list(histories.glob(f"{job}/*"))) == 2, "a second run", 200)
    facts = slurm.finish(job, 200)
    assert facts["JobState"] == "TIMEOUT", (facts, (slurm.place / f"job-{job}.out").read_text())
    why = said(slurm, histories, "why", "--job", job)
    assert "Slurm: TIMEOUT: it reached its time limit" in why, why
    earlier = min(histories.glob(f"{job}/*"), key=lambda path: path.stat().st_mtime).name
    assert "put it back into the queue" in said(slurm, histories, "why", "--job", earlier)
