"""The job scripts of Ray's libraries in slurm/, submitted as their first lines say."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from helpers.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]
_PATIENCE = 300.0

Submit = Callable[..., str]


@pytest.fixture
def submit(slurm: Slurm, lent: dict[str, str]) -> Submit:
    """Submit slurm/NAME.sbatch on 4 nodes with arguments; gives what the job printed, once it has completed."""
    for name in ("examples", "slurm"):
        (slurm.place / name).symlink_to(slurm.source / name)

    def run(name: str, *arguments: object) -> str:
        job = slurm.sbatch("-N4", f"slurm/{name}.sbatch", *arguments, environ=lent)
        facts = slurm.finish(job, _PATIENCE)
        said = (slurm.place / f"hpcray-{name}-{job}.out").read_text()
        assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), said
        return said

    return run


def test_tune_searches_on_four_nodes(submit: Submit) -> None:
    pytest.importorskip("sklearn")
    said = submit("tune", "--trials", 10)
    assert "cluster: 4 nodes" in said
    assert "search: 10 trials, 0 errors" in said
    accuracy = re.search(r"accuracy: (\S+) on 360 held-out images", said)
    assert accuracy is not None and float(accuracy[1]) > 0.9, said


def test_a_search_that_slurm_announces_the_end_of_goes_on_in_the_next_run(slurm: Slurm, lent: dict[str, str]) -> None:
    pytest.importorskip("sklearn")
    (slurm.place / "examples").symlink_to(slurm.source / "examples")
    results = slurm.place / "results"
    batch = slurm.source / "slurm" / "tune.sbatch"
    job = slurm.sbatch("-N4", batch, "--trials", 30, environ={**lent, "RESULTS": str(results)})
    slurm.wait(lambda: len(list(results.glob("digits/*/result.json"))) > 4, "trials", _PATIENCE)
    slurm.said("scancel", "--signal=USR1", job)
    slurm.wait(lambda: slurm.job(job)["Restarts"] == "1", "the requeue", _PATIENCE)
    said = slurm.complete(job, _PATIENCE)
    assert "of 30 trials have ended: the next run goes on" in said and "search: 30 trials, 0 errors" in said, said


def test_train_goes_on_where_the_last_job_ended(slurm: Slurm, submit: Submit) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    runs = slurm.place / "runs"
    assert "epoch 2, started at 0: accuracy" in submit("train", "--storage", runs, "--epochs", 2)
    assert "epoch 4, started at 2: accuracy" in submit("train", "--storage", runs, "--epochs", 4)


def test_serve_answers_over_http_and_through_a_handle(submit: Submit) -> None:
    pytest.importorskip("fastapi")
    assert re.search(
        r"^90 requests, 60 good, \d+ requests/s over HTTP", submit("serve", "--requests", 90), re.MULTILINE
    )


def test_data_sorts_and_counts_on_four_nodes(submit: Submit) -> None:
    pytest.importorskip("pyarrow")
    assert "nothing lost, all in order" in submit("data", "--mb", 60)


def test_rllib_goes_on_from_its_checkpoint(slurm: Slurm, lent: dict[str, str], submit: Submit) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("gymnasium")
    lent["RESULTS"] = str(slurm.place / "ppo")
    said = submit("rllib", "--runners", 3, "--iterations", 5)
    assert "cluster: 4 nodes" in said and "iteration   5  mean return" in said
    said = submit("rllib", "--runners", 3, "--iterations", 6)
    assert "restored: iteration 5" in said and "iteration   6  mean return" in said
