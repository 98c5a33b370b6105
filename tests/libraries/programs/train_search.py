"""Train inside of Tune: workers' reports go on to the search, which stops bad trials early; checkpoints are found."""

import json
import os
import tempfile

import ray
import ray.train
from ray import tune
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.schedulers import ASHAScheduler


def loop(config):
    rank = ray.train.get_context().get_world_rank()
    for step in range(1, 5):
        with tempfile.TemporaryDirectory() as directory:
            with open(os.path.join(directory, "step"), "w") as file:
                file.write(str(step))
            checkpoint = Checkpoint.from_directory(directory) if rank == 0 else None
            ray.train.report({"score": config["factor"] * step, "step": step}, checkpoint=checkpoint)


def driver(config):
    trainer = DataParallelTrainer(
        loop, train_loop_config=config, scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(
            name=f"train-{tune.get_context().get_trial_id()}", storage_path=config["storage"],
            callbacks=[TuneReportCallback()],
        ),
    )  # fmt: skip
    trainer.fit()


def main():
    ray.init(num_cpus=4)
    with tempfile.TemporaryDirectory() as storage:
        tuner = tune.Tuner(
            tune.with_resources(driver, {"CPU": 0.5}),
            param_space={"factor": tune.grid_search([1, 2, 3]), "storage": storage},
            tune_config=tune.TuneConfig(metric="score", mode="max", max_concurrent_trials=1),
            run_config=tune.RunConfig(storage_path=storage, name="search"),
        )
        results = tuner.fit()
        best = results.get_best_result()
        with open(os.path.join(best.metrics["checkpoint_path"], "step")) as file:
            step = int(file.read())
        found = {
            "scores": sorted((each.config["factor"], each.metrics["score"]) for each in results),
            "reports": sorted((each.config["factor"], len(each.metrics_dataframe)) for each in results),
            "best": (best.config["factor"], step),
            "errors": len(results.errors),
        }
        stopped = tune.Tuner(
            tune.with_resources(driver, {"CPU": 0.5}),
            param_space={"factor": tune.grid_search([3, 1, 2]), "storage": storage},
            tune_config=tune.TuneConfig(
                metric="score", mode="max", max_concurrent_trials=1,
                scheduler=ASHAScheduler(time_attr="step", max_t=4, grace_period=2, reduction_factor=2),
            ),
            run_config=tune.RunConfig(storage_path=storage, name="stopped"),
        ).fit()  # fmt: skip
        found["stopped"] = sorted((each.config["factor"], len(each.metrics_dataframe)) for each in stopped)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
