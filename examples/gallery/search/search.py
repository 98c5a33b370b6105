"""A search for hyper-parameters that stops bad trials early (asynchronous successive halving).

    hpcray-launch -n 4 examples/gallery/search/search.py --picture curves.png

A trial trains a small network on the handwritten digits that scikit-learn ships. It trains in rungs of 1, 3, 9 and 27
epochs: after each rung only a trial among the best third so far trains on. No trial waits for the others of its rung.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections import defaultdict
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from threadpoolctl import threadpool_limits

import hpcray as ray

RUNGS = (1, 3, 9, 27)
KEPT = 3  # one of so many goes on


@ray.remote
def train(model: MLPClassifier, epochs: int, seen: list[np.ndarray], held_out: list[np.ndarray]) -> tuple[Any, float]:
    """The model after further epochs, and its accuracy on the held-out images."""
    model = copy.deepcopy(model)  # values that were got are read-only
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(epochs):
            model.partial_fit(*seen, classes=range(10))
    return model, float(model.score(*held_out))


def choose(rng: np.random.Generator) -> dict[str, Any]:
    """One point of the space that is searched."""
    return {
        "hidden_layer_sizes": (int(rng.choice([8, 16, 32, 64])),),
        "learning_rate_init": float(10 ** rng.uniform(-4, -1)),
        "alpha": float(10 ** rng.uniform(-6, 0)),
        "batch_size": int(rng.choice([16, 32, 64])),
        "random_state": int(rng.integers(1 << 31)),
    }


def search(trials: int) -> tuple[list[dict[str, Any]], dict[int, list[float]], int]:
    """The configurations, the accuracies of each trial after its rungs, and the epochs that were trained."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.3, random_state=0, stratify=labels)
    data = [ray.put([parts[0], parts[2]]), ray.put([parts[1], parts[3]])]
    rng = np.random.default_rng(5)
    configs = [choose(rng) for _ in range(trials)]
    running = {train.remote(MLPClassifier(**each), RUNGS[0], *data): (n, 0) for n, each in enumerate(configs)}
    curves: dict[int, list[float]] = defaultdict(list)
    reached: list[list[float]] = [[] for _ in RUNGS]
    epochs = trials * RUNGS[0]
    while running:
        (ready,), _ = ray.wait(list(running))
        trial, rung = running.pop(ready)
        model, accuracy = ray.get(ready)
        curves[trial].append(accuracy)
        reached[rung].append(accuracy)
        among_best = accuracy >= np.quantile(reached[rung], 1 - 1 / KEPT)
        if among_best and rung + 1 < len(RUNGS):
            more = RUNGS[rung + 1] - RUNGS[rung]
            epochs += more
            running[train.remote(model, more, *data)] = (trial, rung + 1)
    return configs, curves, epochs


def draw(curves: dict[int, list[float]], path: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for accuracies in curves.values():
        whole = len(accuracies) == len(RUNGS)
        axes.plot(
            RUNGS[: len(accuracies)], accuracies, "o-", color="C0" if whole else "0.7", ms=3, lw=1.5 if whole else 0.7
        )
    axes.set(xscale="log", xticks=RUNGS, xticklabels=RUNGS, xlabel="epochs", ylabel="accuracy", ylim=(0, 1))
    axes.set_title("grey: stopped early; blue: trained to the end")
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=256)
    parser.add_argument("--quick", action="store_true", help="48 trials")
    parser.add_argument("--picture", metavar="FILE", help="draw the trials' accuracies")
    given = parser.parse_args()
    trials = 48 if given.quick else given.trials

    ray.init()
    begin = time.perf_counter()
    configs, curves, epochs = search(trials)
    seconds = time.perf_counter() - begin
    best = max(curves, key=lambda trial: curves[trial][-1])
    print(f"{trials} trials, {epochs} epochs instead of {trials * RUNGS[-1]}, {seconds:.1f} s")
    print(f"best accuracy {curves[best][-1]:.3f}: {configs[best]}")
    assert curves[best][-1] >= 0.95 and epochs < trials * RUNGS[-1] / 2
    if given.picture:
        draw(curves, given.picture)
    print("checked")


if __name__ == "__main__":
    main()
