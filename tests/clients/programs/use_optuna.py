"""Optuna and Hyperopt as search algorithms of Ray Tune; each result is computed again from its parameters."""

import json
import tempfile

import ray
from ray import tune
from ray.tune.search.hyperopt import HyperOptSearch
from ray.tune.search.optuna import OptunaSearch


def loss(config):
    tune.report({"loss": (config["x"] - 3) ** 2 + config["y"]})


def search(algorithm):
    tuner = tune.Tuner(
        loss,
        tune_config=tune.TuneConfig(
            metric="loss", mode="min", search_alg=algorithm, num_samples=16, max_concurrent_trials=2
        ),
        run_config=tune.RunConfig(storage_path=tempfile.mkdtemp(), verbose=0),
        param_space={"x": tune.uniform(0, 10), "y": tune.choice([0, 1])},
    )
    found = [(result.metrics["loss"], result.config) for result in tuner.fit()]
    return {
        "trials": len(found),
        "best": min(loss for loss, _ in found),
        "error": max(abs(loss - (config["x"] - 3) ** 2 - config["y"]) for loss, config in found),
    }


if __name__ == "__main__":
    ray.init(num_cpus=2)
    algorithms = {"optuna": OptunaSearch(seed=0), "hyperopt": HyperOptSearch(random_state_seed=0)}
    print(json.dumps({"ray": ray.__file__, **{name: search(algorithm) for name, algorithm in algorithms.items()}}))
