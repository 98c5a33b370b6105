"""Train inside of Tune: each trial runs a trainer of two workers and reports its result."""

import json
import tempfile

import ray
import ray.train
from ray import tune
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer


def loop(config):
    for step in range(2):
        ray.train.report({"score": config["factor"] * (step + 1)})
    return config["factor"] * 10


def trial(config):
    trainer = DataParallelTrainer(
        loop, train_loop_config=config, scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=f"trial-{tune.get_context().get_trial_id()}", storage_path=config["storage"]),
    )  # fmt: skip
    tune.report({"value": trainer.fit().return_value})


def main():
    ray.init(num_cpus=6)
    with tempfile.TemporaryDirectory() as storage:
        tuner = tune.Tuner(
            tune.with_resources(trial, {"CPU": 1}),
            param_space={"factor": tune.grid_search([1, 2, 3]), "storage": storage},
            tune_config=tune.TuneConfig(max_concurrent_trials=2),
            run_config=tune.RunConfig(storage_path=storage, name="trials"),
        )
        results = tuner.fit()
        best = results.get_best_result("value", "max")
        print(json.dumps({"values": sorted(r.metrics["value"] for r in results), "best": best.config["factor"]}))


if __name__ == "__main__":
    main()
