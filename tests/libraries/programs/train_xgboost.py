"""Train: XGBoost and Hugging Face transformers, two workers each, on data made here."""

import json
import tempfile

import numpy as np
import ray
import ray.data
import ray.train
from ray.train import RunConfig, ScalingConfig


def boost(config):
    import xgboost
    from ray.train.xgboost import RayTrainReportCallback

    rank, size = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 4))
    y = (x[:, 0] + x[:, 1] > 0).astype(int)
    train = xgboost.DMatrix(x[rank::size], label=y[rank::size])
    check = xgboost.DMatrix(x, label=y)
    xgboost.train(
        {"objective": "binary:logistic", "eval_metric": "error", "tree_method": "hist", "nthread": 1},
        train, num_boost_round=config["rounds"], evals=[(check, "check")], verbose_eval=False,
        callbacks=[RayTrainReportCallback(frequency=5)],
    )  # fmt: skip


def main():
    from ray.train.xgboost import RayTrainReportCallback, XGBoostTrainer

    ray.init(num_cpus=4)
    with tempfile.TemporaryDirectory() as storage:
        trainer = XGBoostTrainer(
            boost, train_loop_config={"rounds": 10}, scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="boost", storage_path=storage),
        )  # fmt: skip
        result = trainer.fit()
        booster = RayTrainReportCallback.get_model(result.checkpoint)
        found = {"rounds": booster.num_boosted_rounds(), "error": result.metrics["check-error"]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
