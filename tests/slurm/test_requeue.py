"""slurm/requeue.sbatch: a training that is interrupted in every way that Slurm has ends as if it had not been."""

from __future__ import annotations

import re

import pytest
from helpers.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]
STEPS = 60


def begun(slurm: Slurm, run: int) -> int:
    """The step at which a run of the job began, once it has done some more; -1 before."""
    found = re.search(rf"run {run} of the job begins at step (\d+)(.*?step \d+)?", slurm.output(), re.DOTALL)
    return int(found[1]) if found and found[2] else -1


def resumed(slurm: Slurm, job: str, restarts: int) -> None:
    """Wait until the job runs again."""

    def there() -> bool:
        facts = slurm.job(job)
        return facts["Restarts"] == str(restarts) and facts["JobState"] == "RUNNING"

    slurm.wait(there, f"restart {restarts} of job {job}")


def test_signal_preemption_and_requeue_change_nothing(slurm: Slurm) -> None:
    pytest.importorskip("sklearn")
    program = [slurm.source / "examples" / "train_preemptible.py", "--steps", STEPS]
    batch = slurm.source / "slurm" / "requeue.sbatch"
    whole = slurm.run("python", *program)  # on one node, and not interrupted
    wanted = re.search(r"weights: \w+", whole.out)
    assert wanted is not None, whole.err

    job = slurm.sbatch("-N2", "-p", "scavenge", batch, *program, "--pause", "0.1")
    slurm.wait(lambda: begun(slurm, 0) == 0, "run 0")
    slurm.said("scancel", "-s", "USR1", job)
    resumed(slurm, job, 1)
    slurm.wait(lambda: begun(slurm, 1) > 0, "run 1")
    assert slurm.run("srun", "-p", "main", "-N4", "--exclusive", "sleep", "1").code == 0
    resumed(slurm, job, 2)
    assert slurm.finish(job)["JobState"] == "COMPLETED", slurm.output()
    assert begun(slurm, 2) > begun(slurm, 1), slurm.output()
    assert wanted[0] in slurm.output()
