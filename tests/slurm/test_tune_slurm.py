"""Ray Tune on four nodes: a node is lost, or the job is preempted, and the search is complete."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from helpers.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]
_PATIENCE = 400.0
TRIALS, STEPS = 20, 16

# Every trial notes each of its steps: trial, step, host, time. The driver notes how the trials ended.
SEARCH = f"""\
import json, os, socket, sys, tempfile, threading, time
import ray
from ray import tune

PLACE, TRIALS, STEPS = sys.argv[1], {TRIALS}, {STEPS}


def note(*words):
    with open(os.path.join(PLACE, "notes"), "a") as file:
        file.write(json.dumps(words) + "\\n")


def train(config):
    first = 0
    if checkpoint := tune.get_checkpoint():
        with checkpoint.as_directory() as directory, open(os.path.join(directory, "step")) as file:
            first = int(file.read())
    trial = tune.get_context().get_trial_id()
    for step in range(first, STEPS):
        time.sleep(0.3)
        note("step", trial, step, socket.gethostname(), time.time())
        with tempfile.TemporaryDirectory() as directory:
            with open(os.path.join(directory, "step"), "w") as file:
                file.write(str(step + 1))
            tune.report({{"score": config["x"] * (step + 1)}}, checkpoint=tune.Checkpoint.from_directory(directory))


def watch():
    while all(node["Alive"] for node in ray.nodes()):
        time.sleep(0.05)
    note("noticed", time.time())


ray.init()
threading.Thread(target=watch, daemon=True).start()
path = os.path.join(PLACE, "search")
if tune.Tuner.can_restore(path):
    tuner = tune.Tuner.restore(path, train, resume_errored=True)
    print("restored", flush=True)
else:
    tuner = tune.Tuner(
        train,
        param_space={{"x": tune.grid_search(list(range(TRIALS)))}},
        tune_config=tune.TuneConfig(metric="score", mode="max"),
        run_config=tune.RunConfig(
            name="search", storage_path=PLACE, verbose=0, failure_config=tune.FailureConfig(max_failures=3)
        ),
    )
results = tuner.fit()
scores = sorted(result.metrics["score"] for result in results)
best = results.get_best_result().config["x"]
print("result", json.dumps([len(results), results.num_errors, scores, best]), flush=True)
"""
WHOLE = [TRIALS, 0, [x * STEPS for x in range(TRIALS)], TRIALS - 1]


class Search:
    """The program above, as a job on four nodes."""

    def __init__(self, slurm: Slurm, lent: dict[str, str], *options: object) -> None:
        self.slurm = slurm
        script = slurm.write(SEARCH)
        environ = {**lent, "HPCRAY_PRELOAD": "ray.tune", "HPCRAY_DRAIN_TIMEOUT": "10", "TUNE_GLOBAL_CHECKPOINT_S": "1"}
        batch = slurm.source / "slurm" / "cpu.sbatch"
        self.job = slurm.sbatch(
            "-N4", "--open-mode=append", *options, batch, "--as-ray", script, slurm.place, environ=environ
        )

    def notes(self, kind: str) -> list[list[Any]]:
        """What was noted of this kind, without its name."""
        path = self.slurm.place / "notes"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        notes = [json.loads(line) for line in lines if line.endswith("\n")]
        return [words for name, *words in notes if name == kind]

    def wait_underway(self, host: str) -> None:
        """Wait until trials on a host have come to their fourth step."""
        self.slurm.wait(
            lambda: any(step >= 3 and where == host for _, step, where, _ in self.notes("step")),
            f"trials on {host}",
            _PATIENCE,
        )

    def check_whole(self) -> None:
        """Wait for the end; every trial has done every step."""
        said = self.slurm.complete(self.job, _PATIENCE)
        (result,) = [line for line in said.splitlines() if line.startswith("result ")]
        assert json.loads(result.removeprefix("result ")) == WHOLE, said

    def check_resumed(self, since: float) -> None:
        """Trials that were interrupted went on from their checkpoints: they did less than half of their steps twice."""
        steps = self.notes("step")
        interrupted = {trial for trial, _, _, at in steps if at < since} & {
            trial for trial, _, _, at in steps if at > since
        }
        assert 0 <= len(steps) - TRIALS * STEPS < len(interrupted) * STEPS / 2


def test_a_search_that_loses_a_node_finishes_with_all_trials(slurm: Slurm, lent: dict[str, str]) -> None:
    search = Search(slurm, lent)
    search.wait_underway("n3")
    lost = time.time()
    on_it = {trial for trial, _, host, _ in search.notes("step") if host == "n3"}
    slurm.kill("n3")
    search.check_whole()
    search.check_resumed(lost)
    ((noticed,),) = search.notes("noticed")
    moved = [at for trial, _, host, at in search.notes("step") if trial in on_it and host != "n3" and at > lost]
    assert moved and min(moved) > noticed
    print(f"noticed after {noticed - lost:.1f} s, a trial of it went on after {min(moved) - lost:.1f} s")
    slurm.check()


def test_a_search_that_is_preempted_goes_on_in_the_next_run(slurm: Slurm, lent: dict[str, str]) -> None:
    search = Search(slurm, lent, "--requeue", "-p", "scavenge")
    search.wait_underway("n3")
    lost = time.time()
    assert slurm.run("srun", "-p", "main", "-N4", "--exclusive", "sleep", "1").code == 0
    slurm.wait(lambda: slurm.job(search.job)["Restarts"] == "1", "the requeue")
    search.check_whole()
    assert "restored" in slurm.output()
    search.check_resumed(lost)
    slurm.check()
