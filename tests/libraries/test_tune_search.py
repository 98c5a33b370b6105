"""Ray Tune, lent from Ray's wheel: searches and schedulers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcray.compat.__main__ import commands
from hpcray.compat.finder import LENT, STANDIN

for needed in ("pandas", "pyarrow", "fsspec", "requests"):
    pytest.importorskip(needed)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def tune(ray: Any) -> Any:
    from ray import tune

    return tune


def test_a_grid_and_random_samples_are_tried(tune: Any, tmp_path: Path) -> None:
    def objective(config: dict[str, Any]) -> None:
        for step in range(3):
            tune.report({"score": config["a"] * 10 + config["b"] + step / 10})

    tuner = tune.Tuner(
        objective,
        param_space={"a": tune.grid_search([1, 2, 3]), "b": tune.uniform(0, 1), "c": tune.sample_from(lambda spec: 7)},
        tune_config=tune.TuneConfig(num_samples=2, metric="score", mode="max"),
        run_config=tune.RunConfig(name="grid", storage_path=str(tmp_path), verbose=0),
    )
    results = tuner.fit()
    assert (len(results), results.num_errors, results.num_terminated) == (6, 0, 6)
    assert sorted(result.config["a"] for result in results) == [1, 1, 2, 2, 3, 3]
    assert all(result.config["c"] == 7 and 0 <= result.config["b"] <= 1 for result in results)
    best = results.get_best_result()
    assert best.config["a"] == 3
    assert best.metrics["training_iteration"] == 3
    assert best.metrics["score"] == pytest.approx(30.2 + best.config["b"])
    frame = results.get_dataframe()
    assert len(frame) == 6
    assert frame["score"].max() == best.metrics["score"]
    assert list(best.metrics_dataframe["training_iteration"]) == [1, 2, 3]
    lines = Path(best.path, "result.json").read_text().splitlines()
    assert [json.loads(line)["training_iteration"] for line in lines] == [1, 2, 3]
    assert Path(best.path, "progress.csv").exists()


def test_asha_stops_trials_that_do_badly(tune: Any, tmp_path: Path) -> None:
    from ray.tune.schedulers import ASHAScheduler

    def objective(config: dict[str, Any]) -> None:
        for step in range(1, 17):
            tune.report({"loss": config["level"] + 1 / step})

    tuner = tune.Tuner(
        objective,
        param_space={"level": tune.grid_search(list(range(8)))},
        tune_config=tune.TuneConfig(
            metric="loss", mode="min", scheduler=ASHAScheduler(max_t=16, grace_period=2, reduction_factor=2)
        ),
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    )
    results = tuner.fit()
    iterations = {result.config["level"]: result.metrics["training_iteration"] for result in results}
    assert iterations[0] == 16, "the best trial runs to the end"
    assert min(iterations.values()) < 16, "a bad trial is stopped"
    assert results.get_best_result().config["level"] == 0


def test_pbt_copies_what_does_well(tune: Any, tmp_path: Path) -> None:
    from ray.tune.schedulers import PopulationBasedTraining

    class Climber(tune.Trainable):  # type: ignore[misc,name-defined]
        def setup(self, config: dict[str, Any]) -> None:
            self.height = 0.0
            self.rate = config["rate"]

        def step(self) -> dict[str, Any]:
            time.sleep(0.01)
            self.height += self.rate
            return {"height": self.height}

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            Path(checkpoint_dir, "height").write_text(str(self.height))

        def load_checkpoint(self, checkpoint_dir: str) -> None:
            self.height = float(Path(checkpoint_dir, "height").read_text())

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            self.rate = new_config["rate"]
            return True

    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=4,
        hyperparam_mutations={"rate": [0.01, 1.0]},
        synch=True,
    )
    tuner = tune.Tuner(
        Climber,
        param_space={"rate": tune.grid_search([0.01, 1.0])},
        tune_config=tune.TuneConfig(metric="height", mode="max", scheduler=scheduler, reuse_actors=True),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path),
            stop={"training_iteration": 20},
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=4, num_to_keep=4),
            verbose=0,
        ),
    )
    results = tuner.fit()
    assert results.num_errors == 0
    assert scheduler._num_perturbations >= 1
    # By itself the slow trial would have climbed 0.2; it took over what the other one had reached.
    assert min(result.metrics["height"] for result in results) > 3
    for result in results:
        assert 1 <= len(list(Path(result.path).glob("checkpoint_*"))) <= 4


def test_a_searcher_proposes_from_what_it_has_seen(tune: Any, tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    from ray.tune.search import ConcurrencyLimiter
    from ray.tune.search.optuna import OptunaSearch

    def objective(config: dict[str, Any]) -> dict[str, float]:
        return {"loss": (config["x"] - 2) ** 2 + (0.0 if config["kind"] == "right" else 1.0)}

    searcher = OptunaSearch(seed=1)
    tuner = tune.Tuner(
        objective,
        param_space={"x": tune.uniform(-10, 10), "kind": tune.choice(["right", "wrong"])},
        tune_config=tune.TuneConfig(
            metric="loss", mode="min", num_samples=25, search_alg=ConcurrencyLimiter(searcher, max_concurrent=2)
        ),
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    )
    results = tuner.fit()
    assert len(results) == 25
    assert results.get_best_result().metrics["loss"] < 4
    assert len(searcher._ot_study.trials) == 25


@pytest.mark.parametrize("name", ["hyperband", "median_stopping_rule"])
def test_further_schedulers(tune: Any, tmp_path: Path, name: str) -> None:
    def objective(config: dict[str, Any]) -> None:
        for step in range(1, 10):
            tune.report({"score": config["slope"] * step})

    options = {"hyperband": {"max_t": 9}, "median_stopping_rule": {"grace_period": 1, "min_samples_required": 2}}[name]
    if name == "median_stopping_rule":
        options["time_attr"] = "training_iteration"
    scheduler = tune.create_scheduler(name, metric="score", mode="max", **options)
    tuner = tune.Tuner(
        objective,
        param_space={"slope": tune.grid_search([1, 2, 3, 4])},
        tune_config=tune.TuneConfig(scheduler=scheduler, max_concurrent_trials=2),
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    )
    results = tuner.fit()
    assert (len(results), results.num_errors) == (4, 0)
    assert results.get_best_result("score", "max").config["slope"] == 4


def test_the_command_tune_lists_the_trials_of_a_search(tune: Any, tmp_path: Path, libraries: str) -> None:
    def objective(config: dict[str, Any]) -> None:
        tune.report({"score": config["a"]})

    tune.Tuner(
        objective, param_space={"a": tune.grid_search([1, 2])},
        run_config=tune.RunConfig(name="listed", storage_path=str(tmp_path), verbose=0),
    ).fit()  # fmt: skip
    (text,) = (text for path, text in commands().items() if path.endswith("/tune"))
    command = tmp_path / "tune"
    command.write_text(text)
    environ = {**os.environ, LENT: libraries, "PYTHONPATH": os.pathsep.join([STANDIN, *sys.path])}
    line = ["sh", str(command), "ls", str(tmp_path / "listed"), "--columns", "config/a,score"]
    shown = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("|") >= 6, (shown.stdout, shown.stderr)
