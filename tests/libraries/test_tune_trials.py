"""Ray Tune, lent from Ray's wheel: trials, what they need, how they end, fail and go on."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")
for needed in ("pandas", "pyarrow", "fsspec", "requests"):
    pytest.importorskip(needed)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def tune(ray: Any) -> Any:
    from ray import tune

    return tune


def test_parameters_and_resources_are_given_to_trials(ray: Any, tune: Any, tmp_path: Path) -> None:
    table = np.arange(1_000_000, dtype=np.int64)

    def objective(config: dict[str, Any], data: Any) -> None:
        @ray.remote(num_cpus=1)
        def part(values: Any) -> int:
            return int(values.sum())

        halves = ray.get([part.remote(data[:500_000]), part.remote(data[500_000:])])
        group = ray.util.get_current_placement_group()
        tune.report({"total": sum(halves) * config["factor"], "bundles": str(group.bundle_specs), "shared": data.sum()})

    trainable = tune.with_resources(
        tune.with_parameters(objective, data=table), tune.PlacementGroupFactory([{"CPU": 1}, {"CPU": 1}])
    )
    results = tune.Tuner(
        trainable,
        param_space={"factor": tune.grid_search([1, 2])},
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    ).fit()
    assert results.num_errors == 0, results.errors
    assert sorted(result.metrics["total"] for result in results) == [int(table.sum()), 2 * int(table.sum())]
    assert {result.metrics["bundles"] for result in results} == {"[{'CPU': 1.0}, {'CPU': 1.0}]"}

    simple = tune.with_resources(
        lambda config: {"cpus": ray.get_runtime_context().get_assigned_resources()["CPU"]}, {"cpu": 2}
    )
    found = tune.Tuner(simple, run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0)).fit()
    assert found[0].metrics["cpus"] == 2


def test_a_trial_that_fails_goes_on_from_its_checkpoint(tune: Any, tmp_path: Path) -> None:
    def objective(config: dict[str, Any]) -> None:
        start = 0
        checkpoint = tune.get_checkpoint()
        if checkpoint:
            with checkpoint.as_directory() as directory:
                start = int(Path(directory, "step").read_text()) + 1
        for step in range(start, 6):
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "step").write_text(str(step))
                tune.report({"step": step, "from": start}, checkpoint=tune.Checkpoint.from_directory(directory))
            if step == config["fails_after"] and start == 0:
                if config["how"] == "raise":
                    raise RuntimeError("as the test wants it")
                os._exit(1)

    results = tune.Tuner(
        objective,
        param_space={"fails_after": 3, "how": tune.grid_search(["raise", "exit"])},
        run_config=tune.RunConfig(
            storage_path=str(tmp_path), verbose=0, failure_config=tune.FailureConfig(max_failures=1)
        ),
    ).fit()
    assert results.num_errors == 0, results.errors
    for result in results:
        assert result.metrics["step"] == 5
        assert result.metrics["from"] >= 3, "it went on where it was"
        assert Path(result.checkpoint.path, "step").read_text() == "5"


def test_an_experiment_is_restored(tune: Any, tmp_path: Path) -> None:
    marker = tmp_path / "mended"

    def objective(config: dict[str, Any]) -> None:
        if config["x"] == 2 and not marker.exists():
            raise ValueError("x is 2")
        tune.report({"score": config["x"]})

    config = tune.RunConfig(name="restored", storage_path=str(tmp_path), verbose=0)
    first = tune.Tuner(objective, param_space={"x": tune.grid_search([1, 2, 3])}, run_config=config).fit()
    assert first.num_errors == 1
    assert "x is 2" in str(first.errors[0])
    path = str(tmp_path / "restored")
    assert tune.Tuner.can_restore(path)
    marker.touch()
    again = tune.Tuner.restore(path, trainable=objective, restart_errored=True).fit()
    assert again.num_errors == 0
    assert sorted(result.metrics["score"] for result in again) == [1, 2, 3]
    assert len(tune.ExperimentAnalysis(path).trials) == 3


def test_stoppers_end_trials_and_experiments(tune: Any, tmp_path: Path) -> None:
    from ray.tune.stopper import CombinedStopper, MaximumIterationStopper, TrialPlateauStopper

    def endless(config: dict[str, Any]) -> None:
        step = 0
        while True:
            step += 1
            time.sleep(0.01)
            tune.report({"value": min(step, config["flat_from"])})

    def iterations(stop: Any, **options: Any) -> dict[int, int]:
        results = tune.Tuner(
            endless,
            param_space={"flat_from": tune.grid_search([3, 1000])},
            tune_config=tune.TuneConfig(**options),
            run_config=tune.RunConfig(storage_path=str(tmp_path), stop=stop, verbose=0),
        ).fit()
        assert results.num_errors == 0
        return {result.config["flat_from"]: result.metrics["training_iteration"] for result in results}

    assert iterations({"training_iteration": 5}) == {3: 5, 1000: 5}
    assert iterations(lambda trial_id, result: result["value"] >= 3) == {3: 3, 1000: 3}
    plateau = TrialPlateauStopper("value", std=1e-3, num_results=4, grace_period=4)
    assert iterations(CombinedStopper(MaximumIterationStopper(20), plateau)) == {3: 6, 1000: 20}
    started = time.monotonic()
    assert all(iterations(None, time_budget_s=15).values()), "endless trials end, with what they had reported by then"
    assert 15 < time.monotonic() - started < 200


def test_callbacks_see_what_happens(tune: Any, tmp_path: Path) -> None:
    class Seen(tune.Callback):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            self.events: list[str] = []

        def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            self.events.append("start")

        def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: Any, **info: Any) -> None:
            self.events.append(f"result {result['step']}")

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            self.events.append("complete")

        def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
            self.events.append("end")

    def objective(config: dict[str, Any]) -> None:
        for step in range(2):
            tune.report({"step": step})

    seen = Seen()
    tune.Tuner(objective, run_config=tune.RunConfig(storage_path=str(tmp_path), callbacks=[seen], verbose=0)).fit()
    assert seen.events == ["start", "result 0", "result 1", "complete", "end"]


def test_class_trainables_keep_checkpoints(tune: Any, tmp_path: Path) -> None:
    class Counter(tune.Trainable):  # type: ignore[misc,name-defined]
        def setup(self, config: dict[str, Any]) -> None:
            self.count = config["start"]

        def step(self) -> dict[str, Any]:
            self.count += 1
            return {"count": self.count, "done": self.count >= 10}

        def save_checkpoint(self, checkpoint_dir: str) -> dict[str, int]:
            return {"count": self.count}

        def load_checkpoint(self, checkpoint: dict[str, int]) -> None:
            self.count = checkpoint["count"]

    results = tune.Tuner(
        Counter,
        param_space={"start": tune.grid_search([0, 5])},
        run_config=tune.RunConfig(
            storage_path=str(tmp_path),
            checkpoint_config=tune.CheckpointConfig(
                checkpoint_frequency=2, checkpoint_at_end=True, num_to_keep=3, checkpoint_score_attribute="count"
            ),
            verbose=0,
        ),
    ).fit()
    assert sorted(result.metrics["training_iteration"] for result in results) == [5, 10]
    for result in results:
        assert result.metrics["count"] == 10
        assert len(result.best_checkpoints) == 3
        assert result.get_best_checkpoint("count", "max").path == result.checkpoint.path


def test_the_older_interface(tune: Any, tmp_path: Path) -> None:
    analysis = tune.run(
        lambda config: {"score": config["x"] ** 2},
        config={"x": tune.grid_search([1, 2, 3])},
        metric="score",
        mode="max",
        storage_path=str(tmp_path),
        verbose=0,
    )
    assert analysis.best_config == {"x": 3}
    assert sorted(analysis.dataframe()["score"]) == [1, 4, 9]


def test_the_paths_that_are_printed_stay(run: Any, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_FAILING.format(storage=str(tmp_path / "results")))
    said = run(program)
    (error,) = set(re.findall(r"(/\S*error\.txt)", said))
    (shown,) = re.findall(r"tensorboard --logdir (\S+?)`", said)
    assert "boom" in Path(error).read_text()
    assert list(Path(shown).rglob("events.out.tfevents*")) or list(Path(shown).rglob("error.txt"))


_FAILING = """
from ray import tune

def bad(config):
    raise ValueError("boom")

tune.Tuner(bad, run_config=tune.RunConfig(storage_path={storage!r}, verbose=1)).fit()
"""
