"""Distributed training of xgboost_ray."""

import json

import numpy as np
import ray
from sklearn.datasets import load_breast_cancer
from xgboost_ray import RayDMatrix, RayParams, predict, train

ray.init(num_cpus=4)
data, labels = load_breast_cancer(return_X_y=True)
params = RayParams(num_actors=2, cpus_per_actor=1)
result: dict = {}
model = train(
    {"objective": "binary:logistic", "eval_metric": ["logloss", "error"]},
    RayDMatrix(data, labels),
    evals_result=result,
    evals=[(RayDMatrix(data, labels), "train")],
    num_boost_round=10,
    ray_params=params,
    verbose_eval=False,
)
guess = predict(model, RayDMatrix(data), ray_params=params)
print(json.dumps({
    "ray": ray.__file__, "accuracy": float(np.mean((guess > 0.5) == labels)), "predicted": len(guess),
    "rows": len(data),
}))  # fmt: skip
