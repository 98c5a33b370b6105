"""Train: XGBoost on the workers' parts of a dataset, a second dataset to check, a failure, and a model to predict."""

import json
import os
import tempfile

import numpy as np
import pandas as pd
import ray
import ray.data
import ray.train
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.xgboost import RayTrainReportCallback, XGBoostTrainer


def frame(seed, rows):
    random = np.random.default_rng(seed)
    found = pd.DataFrame({name: random.integers(0, 40, rows) for name in "abcd"})  # few values: the same cuts anywhere
    found["y"] = (found["a"] + 2 * found["b"] - found["c"] > 30).astype(int)
    return found


def boost(config):
    import xgboost

    shards = {name: ray.train.get_dataset_shard(name).materialize().to_pandas() for name in ("train", "check")}
    matrices = {name: xgboost.DMatrix(part.drop(columns="y"), label=part["y"]) for name, part in shards.items()}
    start, booster = 0, None
    if checkpoint := ray.train.get_checkpoint():
        booster = RayTrainReportCallback.get_model(checkpoint)
        start = booster.num_boosted_rounds()

    class Fail(xgboost.callback.TrainingCallback):
        def after_iteration(self, model, epoch, evals_log):
            if start == 0 and model.num_boosted_rounds() == 7 and ray.train.get_context().get_world_rank() == 1:
                raise RuntimeError("a worker of the first attempt")
            return False

    xgboost.train(
        {"objective": "binary:logistic", "eval_metric": ["logloss", "error"], "tree_method": "hist", "nthread": 1,
         "max_depth": 4, "eta": 0.3},
        matrices["train"], num_boost_round=config["rounds"] - start, evals=[(matrices["check"], "check")],
        verbose_eval=False, xgb_model=booster,
        callbacks=[RayTrainReportCallback(frequency=4, checkpoint_at_end=True), Fail()],
    )  # fmt: skip
    return {"start": start, "rows": len(shards["train"])}


def main():
    ray.init(num_cpus=4)
    with tempfile.TemporaryDirectory() as storage:
        train, check = ray.data.from_pandas(frame(0, 600)), ray.data.from_pandas(frame(1, 200))
        data = {"train": train.repartition(4), "check": check.repartition(2)}
        trainer = XGBoostTrainer(
            boost, train_loop_config={"rounds": 12}, scaling_config=ScalingConfig(num_workers=2),
            datasets=data,
            run_config=RunConfig(
                name="boost", storage_path=storage, failure_config=FailureConfig(max_failures=1),
                checkpoint_config=CheckpointConfig(num_to_keep=1),
            ),
        )  # fmt: skip
        result = trainer.fit()
        booster = RayTrainReportCallback.get_model(result.checkpoint)
        import xgboost

        check = frame(2, 50)
        predicted = booster.predict(xgboost.DMatrix(check.drop(columns="y")))
        found = {
            "returned": result.return_value,
            "rounds": booster.num_boosted_rounds(),
            "metrics": {name: round(float(value), 4) for name, value in sorted(result.metrics.items())},
            "predicted": [round(float(value), 3) for value in predicted[:10]],
            "right": float(((predicted > 0.5) == check["y"]).mean()),
            "kept": sum(name.startswith("checkpoint_") for name in os.listdir(result.path) if "manager" not in name),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
