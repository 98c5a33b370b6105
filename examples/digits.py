"""Handwritten digits on every node: a search as tasks, then synchronous SGD with a parameter server.

    hpcray-launch -n 4 examples/digits.py

The 1,797 images that scikit-learn ships (8 x 8 pixels, from the UCI machine-learning repository) are put into the
object store once. Tasks on all nodes try settings of a small neural network on a validation set. Then a parameter
server keeps the weights of the best one, a worker on each node computes gradients of its share of every batch, and
the result is judged on images that neither step has seen. Same seed, same network, however many nodes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from dataclasses import dataclass

import numpy as np
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

import hpcray as ray
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

SEED = 7
CLASSES = 10
BATCH = 96
MOMENTUM = 0.9

Weights = list[np.ndarray]


@dataclass(frozen=True)
class Settings:
    hidden: int
    learning_rate: float
    weight_decay: float


# ---------------------------------------------------------------- the network: 64 pixels, one hidden layer, 10 classes


def initial_weights(hidden: int, pixels: int) -> Weights:
    rng = np.random.default_rng(SEED)
    first = rng.normal(0, np.sqrt(2 / pixels), (pixels, hidden))
    second = rng.normal(0, np.sqrt(2 / hidden), (hidden, CLASSES))
    return [first, np.zeros(hidden), second, np.zeros(CLASSES)]


def forward(weights: Weights, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Activations of the hidden layer and probabilities of the classes."""
    hidden = np.maximum(images @ weights[0] + weights[1], 0)
    scores = hidden @ weights[2] + weights[3]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, scores / scores.sum(axis=1, keepdims=True)


def gradient(weights: Weights, images: np.ndarray, labels: np.ndarray) -> Weights:
    """Gradient of the cross-entropy, summed over the images."""
    hidden, error = forward(weights, images)
    error[np.arange(len(labels)), labels] -= 1
    back = (error @ weights[2].T) * (hidden > 0)
    return [images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]


def accuracy(weights: Weights, images: np.ndarray, labels: np.ndarray) -> float:
    return float((forward(weights, images)[1].argmax(axis=1) == labels).mean())


class Optimizer:
    """Gradient descent with momentum and weight decay."""

    def __init__(self, settings: Settings, pixels: int) -> None:
        self.settings = settings
        self.weights = initial_weights(settings.hidden, pixels)
        self.velocity = [np.zeros_like(weight) for weight in self.weights]

    def step(self, total: Weights, count: int) -> Weights:
        rate, decay = self.settings.learning_rate, self.settings.weight_decay
        for i, weight in enumerate(self.weights):
            self.velocity[i] = MOMENTUM * self.velocity[i] - rate * (total[i] / count + decay * weight)
            self.weights[i] = weight + self.velocity[i]
        return self.weights


def batches(images: int, epochs: int) -> list[np.ndarray]:
    """Indices of the images of every batch, in an order that only the seed decides."""
    rng = np.random.default_rng(SEED)
    return [
        order[start : start + BATCH]
        for order in (rng.permutation(images) for _ in range(epochs))
        for start in range(0, images, BATCH)
    ]


# ---------------------------------------------------------------- what runs on the nodes


@ray.remote
def evaluate(settings: Settings, train: tuple, validation: tuple, epochs: int) -> tuple[float, str, int]:
    """Train with these settings. Returns the validation accuracy, the node and the pid."""
    images, labels = train
    with threadpool_limits(1):
        optimizer = Optimizer(settings, images.shape[1])
        for batch in batches(len(images), epochs):
            optimizer.step(gradient(optimizer.weights, images[batch], labels[batch]), len(batch))
        result = accuracy(optimizer.weights, *validation)
    return result, ray.get_runtime_context().get_node_id(), os.getpid()


@ray.remote(num_cpus=0)
class ParameterServer:
    """Keeps the weights; applies the gradients of all workers at once."""

    def __init__(self, settings: Settings, pixels: int) -> None:
        threadpool_limits(1)
        self.optimizer = Optimizer(settings, pixels)

    def weights(self) -> Weights:
        return self.optimizer.weights

    def apply(self, count: int, *gradients: Weights) -> Weights:
        return self.optimizer.step([sum(parts) for parts in zip(*gradients, strict=True)], count)


@ray.remote
class Worker:
    """Computes gradients of its share of every batch."""

    def __init__(self, share: int, shares: int, train: tuple) -> None:
        threadpool_limits(1)
        self.share, self.shares = share, shares
        self.images, self.labels = train
        self.done = 0

    def gradient(self, weights: Weights, batch: np.ndarray) -> Weights:
        mine = batch[self.share :: self.shares]
        self.done += len(mine)
        return gradient(weights, self.images[mine], self.labels[mine])

    def report(self) -> tuple[str, int, int]:
        return ray.get_runtime_context().get_node_id(), os.getpid(), self.done


# ---------------------------------------------------------------- the program


def search(train: ray.ObjectRef, validation: ray.ObjectRef, epochs: int, index: dict[str, int]) -> Settings:
    grid = [Settings(*values) for values in itertools.product((16, 32, 64), (0.02, 0.1, 0.3), (0.0, 1e-3))]
    spread = evaluate.options(scheduling_strategy="SPREAD")
    results = ray.get([spread.remote(settings, train, validation, epochs) for settings in grid])
    best, settings = max(zip(results, grid, strict=True), key=lambda pair: pair[0][0])
    used = sorted({index[node] for _, node, _ in results})
    processes = len({(node, pid) for _, node, pid in results})
    print(f"search: {len(grid)} settings as tasks in {processes} processes on nodes {used}")
    print(
        f"best: hidden={settings.hidden} learning_rate={settings.learning_rate} "
        f"weight_decay={settings.weight_decay}, validation accuracy {best[0]:.3f}"
    )
    return settings


def train_everywhere(
    settings: Settings, train: ray.ObjectRef, images: int, pixels: int, epochs: int, index: dict[str, int]
) -> Weights:
    server = ParameterServer.remote(settings, pixels)
    workers = [
        Worker.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            i, len(index), train
        )
        for node, i in index.items()
    ]
    weights = server.weights.remote()
    steps = batches(images, epochs)
    for step, batch in enumerate(steps):
        # Nothing is waited for here: references say what needs what, and the weights never pass through the driver.
        gradients = [worker.gradient.remote(weights, batch) for worker in workers]
        weights = server.apply.remote(len(batch), *gradients)
        if step % 100 == 99:
            ray.wait([weights])
    final = ray.get(weights)
    print(f"training: {len(steps)} steps of synchronous SGD, one worker per node")
    for node, pid, done in ray.get([worker.report.remote() for worker in workers]):
        print(f"  node {index[node]}  pid {pid}  {done:,} gradients")
    return final


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training images (default 30)")
    epochs = parser.parse_args().epochs
    if epochs < 1:
        parser.error("--epochs: at least 1")

    started = time.perf_counter()
    ray.init()
    index = {node["NodeID"]: i for i, node in enumerate(node for node in ray.nodes() if node["Alive"])}
    print(f"cluster: {len(index)} nodes, {ray.cluster_resources().get('CPU', 0):g} CPUs")

    digits = load_digits()
    images, labels = digits.data / digits.images.max(), digits.target
    order = np.random.default_rng(SEED).permutation(len(images))
    test, validation, train = np.split(order, [360, 660])
    train_ref = ray.put((images[train], labels[train]))
    validation_ref = ray.put((images[validation], labels[validation]))
    settings = search(train_ref, validation_ref, max(1, epochs // 2), index)

    rest = order[360:]
    rest_ref = ray.put((images[rest], labels[rest]))
    weights = train_everywhere(settings, rest_ref, len(rest), images.shape[1], epochs, index)
    print(f"accuracy: {accuracy(weights, images[test], labels[test]):.4f} on {len(test)} held-out images")
    print(f"time: {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
