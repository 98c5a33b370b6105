"""lightgbm_ray: distributed training of two actors, and prediction."""

import json

import ray
from lightgbm_ray import RayDMatrix, RayParams, predict, train
from sklearn.datasets import load_breast_cancer

ray.init(num_cpus=4)
data, target = load_breast_cancer(return_X_y=True)
matrix, result = RayDMatrix(data, target), {}
booster = train(
    {"objective": "binary", "metric": ["binary_error"]}, matrix, evals_result=result, valid_sets=[matrix],
    valid_names=["train"], verbose_eval=False, ray_params=RayParams(num_actors=2, cpus_per_actor=2),
)  # fmt: skip
predicted = predict(booster, RayDMatrix(data), ray_params=RayParams(num_actors=2))
print(json.dumps({
    "ray": ray.__file__,
    "error": float(result["train"]["binary_error"][-1]),
    "right": float(((predicted > 0.5) == target).mean()),
}))  # fmt: skip
