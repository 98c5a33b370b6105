"""The end of a job that Slurm announces: drained, checkpointed, requeued, resumed to the same result, nothing left."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from helpers.jobs import ROOT, Job, embedded
from helpers.slurm import SRUN, Slurm

pytest.importorskip("sklearn")
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

STEPS = 60
# Well below the site's KillWait, and enough for a machine that does other things too.
BRISK = {"HPCRAY_DRAIN_TIMEOUT": "10"}
AGAIN = {**BRISK, "HPCRAY_REQUEUE": "scontrol"}


def submit(slurm: Slurm, *options: object, pause: float = 0.0, environ: dict[str, str] | None = None) -> str:
    script = [slurm.source / "slurm" / "cpu.sbatch", slurm.source / "examples" / "train_preemptible.py"]
    given = ["--requeue", "--open-mode=append", *options, *script, "--steps", STEPS, "--pause", pause]
    return slurm.sbatch(*given, environ=environ or BRISK)


def output(slurm: Slurm, job: str) -> str:
    path = slurm.place / f"hpcray-{job}.out"
    return path.read_text(errors="replace") if path.exists() else ""


def weights(text: str) -> str:
    found = re.search(r"^weights: (\w+)$", text, re.MULTILINE)
    assert found is not None, text
    return found[1]


def begun_at(text: str, run: int) -> int:
    found = re.search(rf"^run {run} of the job begins at step (\d+)", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1])


def wait_for(slurm: Slurm, job: str, text: str) -> None:
    slurm.wait(lambda: text in output(slurm, job), f"{text!r} of job {job}", 120.0)


@pytest.fixture(scope="module")
def expected() -> str:
    """The weights of a run that nobody disturbs, on one node. What the tester's shell tells BLAS (OPENBLAS_CORETYPE)
    jobs in the cluster do not know; other kernels round otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("OPENBLAS_", "MKL_", "OMP_", "NPY_"))]:
            patch.delenv(name)
        return undisturbed()


def undisturbed() -> str:
    with Job(embedded(ROOT / "examples" / "train_preemptible.py", "--steps", str(STEPS))) as job:
        ended = job.wait(120.0)
    assert ended.code == 0, ended.err
    return weights(ended.out)


def checkpoints(slurm: Slurm, job: str) -> list[Path]:
    return sorted((slurm.place / "hpcray-checkpoints" / job / "parameters").glob("[0-9]*"))


def resumed(slurm: Slurm, job: str, least: int = 10, most: int = 1) -> str:
    """The output of a job that was interrupted after step `least`, once it has ended, after `most` restarts at most."""

    def again() -> bool:
        return slurm.job(job)["JobState"] not in ("PENDING", "RUNNING", "SIGNALING", "COMPLETING")

    slurm.wait(again, f"the end of job {job}", 600.0)
    facts = slurm.job(job)
    text = output(slurm, job)
    assert facts["JobState"] == "COMPLETED", text
    assert 1 <= int(facts["Restarts"]) <= most, facts
    assert begun_at(text, 0) == 0
    assert least <= begun_at(text, 1) < STEPS, text
    return text


# Signal and preemption, with requeue and the same result, are tested without -m slow too: test_requeue.py.
@pytest.mark.slow
@pytest.mark.parametrize("how", ["--signal=USR1", "--batch"])
def test_a_signal_has_the_job_saved_and_requeued(slurm: Slurm, how: str, expected: str) -> None:
    """What `#SBATCH --signal=USR1@60` sends to the ranks, and `--signal=B:USR1@60` to the batch script."""
    job = submit(slurm, "-N4", pause=0.2, environ=AGAIN)
    wait_for(slurm, job, "step 10\n")
    slurm.said("scancel", "--signal=USR1", *(["--batch"] if how == "--batch" else []), job)
    text = resumed(slurm, job)
    assert weights(text) == expected
    assert "the job drains (SIGUSR1 on node" in text


@pytest.mark.slow
def test_a_program_that_srun_starts_in_every_rank(slurm: Slurm, expected: str) -> None:
    line = f"{' '.join(SRUN)} python {slurm.source}/examples/train_preemptible.py --steps {STEPS} --pause 0.2"
    batch = slurm.write(
        f"#!/bin/bash\n#SBATCH --requeue --open-mode=append -o hpcray-%j.out\nexec {line}\n", "every.sh"
    )
    job = slurm.sbatch("-N2", batch, environ=AGAIN)
    wait_for(slurm, job, "step 10\n")
    slurm.said("scancel", "--signal=USR1", job)
    assert weights(resumed(slurm, job)) == expected


@pytest.mark.slow
def test_preemption_requeues_a_job_that_goes_on_afterwards(slurm: Slurm, expected: str) -> None:
    job = submit(slurm, "-N4", "-p", "scavenge", pause=0.2)
    wait_for(slurm, job, "step 10\n")
    rival = slurm.sbatch("-N4", "--exclusive", "-o", "rival.out", "--wrap", "srun -N4 hostname")
    assert slurm.finish(rival)["JobState"] == "COMPLETED"
    text = resumed(slurm, job)
    assert weights(text) == expected
    assert "the job drains (SIGTERM on node" in text


def test_scancel_saves_and_does_not_requeue(slurm: Slurm) -> None:
    job = submit(slurm, "-N2", pause=0.2, environ=AGAIN)
    wait_for(slurm, job, "step 10\n")
    slurm.said("scancel", job)
    assert slurm.finish(job)["JobState"] == "CANCELLED"
    slurm.check()
    (saved,) = checkpoints(slurm, job)
    assert (saved / "numbers.json").exists()
    assert "begins at step" not in output(slurm, job).split("step 10\n")[1]


@pytest.mark.slow
def test_without_scontrol_the_exit_code_says_that_work_is_left(slurm: Slurm) -> None:
    job = submit(slurm, "-N2", pause=0.2)
    wait_for(slurm, job, "step 10\n")
    slurm.said("scancel", "--signal=USR1", job)
    facts = slurm.finish(job)
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "75:0"), output(slurm, job)
    assert len(checkpoints(slurm, job)) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "option", [["--signal=USR1@60"], ["--signal=B:USR1@60"], []], ids=["ranks", "batch script", "own clock"]
)
def test_near_the_time_limit_a_job_is_saved_and_requeued(slurm: Slurm, option: list[str], expected: str) -> None:
    """By the signal that Slurm sends, or by hpcray's own clock."""
    job = submit(slurm, "-N4", "-t", 2, *option, pause=1.8, environ=AGAIN)
    text = resumed(slurm, job, least=1, most=9)
    assert weights(text) == expected
