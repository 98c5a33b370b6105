"""Ray's jobs, submitted from the login node into a cluster that a batch job keeps up."""

from __future__ import annotations

import time

import pytest
from helpers.slurm import SRUN, Slurm

pytestmark = pytest.mark.slurm

_COUNT = "import hpcray as ray; ray.init(); print('nodes', len(ray.nodes()))"


def test_a_job_goes_into_a_batch_job_and_its_output_comes_back(slurm: Slurm) -> None:
    command = ["salloc", "-N2", "-J", "holder", *SRUN, "-N2", "python", "-m", "hpcray", "-m", "hpcray.job_submission"]
    with slurm.start(*command) as holder:
        while not (line := holder.line()).startswith("ready for jobs: "):
            assert line or holder.wait().code == 0, line
        job = slurm.said("squeue", "-h", "-n", "holder", "-o", "%A")
        ray = ["python", "-m", "hpcray.cli.ray", "job"]
        into = ["--address", f"slurm://{job}"]
        done = slurm.run(*ray, "submit", *into, "--submission-id", "count", "--", "python", "-c", _COUNT)
        assert done.code == 0, done.out + done.err
        assert "nodes 2" in done.out.splitlines() and "Job 'count' succeeded" in done.out
        failed = slurm.run(*ray, "submit", *into, "--", "sh", "-c", "exit 3")
        assert failed.code == 1 and "failed with exit code 3" in failed.out, failed.err
        assert "count" in slurm.said(*ray, "list", *into)
        slurm.said("scancel", job)
        holder.wait()
    wrong = slurm.run(*ray, "list", "--address", f"slurm://{job}")
    assert wrong.code != 0
    deadline = time.monotonic() + 60
    while slurm.said("squeue", "-h", "-n", "holder") and time.monotonic() < deadline:
        time.sleep(0.5)
    slurm.check()
