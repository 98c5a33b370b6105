"""FLAML: its tuner with `use_ray`, and an AutoML search whose trials are Ray's; both are held to a known answer."""

import json

import ray
from flaml import AutoML, tune
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split


def loss(config):
    return {"loss": (config["x"] - 3) ** 2 + config["y"]}


if __name__ == "__main__":
    ray.init(num_cpus=2)
    space = {"x": tune.randint(0, 10), "y": tune.choice([0, 1, 2])}
    tuned = tune.run(loss, config=space, metric="loss", mode="min", num_samples=10, use_ray=True, verbose=0)
    features, labels = load_breast_cancer(return_X_y=True)
    train, test, train_labels, test_labels = train_test_split(features, labels, random_state=0)
    search = AutoML()
    search.fit(
        train, train_labels, task="classification", estimator_list=["lgbm", "rf"], max_iter=6, time_budget=60,
        n_concurrent_trials=2, use_ray=True, seed=0, verbose=0,
    )  # fmt: skip
    best = tuned.best_result
    print(json.dumps({
        "ray": ray.__file__,
        "loss": best["loss"],
        "right_loss": (best["config"]["x"] - 3) ** 2 + best["config"]["y"],
        "accuracy": float((search.predict(test) == test_labels).mean()),
    }))  # fmt: skip
