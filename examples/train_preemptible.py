"""Training that may be interrupted at any time: the next run of the job resumes from the checkpoint.

    hpcray-launch -n 4 examples/train_preemptible.py

A parameter server, one actor, trains a small network on the handwritten digits that scikit-learn ships; tasks on all
nodes compute the gradients. When Slurm announces the end of the job (`--signal=USR1@60`, preemption, scancel), the
actor's state is saved between two steps and the program ends with exit code 75. The job's next run restores it. A run
that was interrupted, however often, ends with exactly the weights of one that was not: both print the same digest.

Outside Slurm the same can be seen by hand, with a directory for the checkpoints:

    export HPCRAY_CHECKPOINT_DIR=/tmp/digits HPCRAY_DRAIN_SIGNALS=USR1
    hpcray-launch -n 4 examples/train_preemptible.py     # elsewhere: kill -USR1 <pid of a hpcray-raylet>
    hpcray-launch -n 4 examples/train_preemptible.py     # resumes
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

import hpcray as ray

SEED = 11
CLASSES, HIDDEN = 10, 48
BATCH, SHARDS = 96, 4
RATE, MOMENTUM = 0.002, 0.9

Weights = list[np.ndarray]


def forward(weights: Weights, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Activations of the hidden layer and probabilities of the classes."""
    hidden = np.maximum(images @ weights[0] + weights[1], 0)
    scores = hidden @ weights[2] + weights[3]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, scores / scores.sum(axis=1, keepdims=True)


@ray.remote
def gradient(weights: Weights, images: np.ndarray, labels: np.ndarray) -> Weights:
    """Gradient of the cross-entropy, summed over the images."""
    with threadpool_limits(1):  # one thread adds in one order, on every machine
        hidden, error = forward(weights, images)
        error[np.arange(len(labels)), labels] -= 1
        back = (error @ weights[2].T) * (hidden > 0)
        return [images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]


@ray.remote
class ParameterServer:
    """Weights, momentum, and the random numbers that choose the batches: all that a later run needs."""

    def __init__(self, pixels: int, images: int) -> None:
        self.rng = np.random.default_rng(SEED)
        first = self.rng.normal(0, np.sqrt(2 / pixels), (pixels, HIDDEN))
        second = self.rng.normal(0, np.sqrt(2 / HIDDEN), (HIDDEN, CLASSES))
        self.weights = [first, np.zeros(HIDDEN), second, np.zeros(CLASSES)]
        self.velocity = [np.zeros_like(weight) for weight in self.weights]
        self.images = images
        self.steps = 0
        self.batch = self.rng.integers(images, size=BATCH)

    def state(self) -> tuple[int, Weights, np.ndarray]:
        """Steps done, weights, and the images of the next step."""
        return self.steps, self.weights, self.batch

    def step(self, parts: list[Weights]) -> None:
        """Take the gradients of one batch, in the order of its shards."""
        for i, weight in enumerate(self.weights):
            total = parts[0][i]
            for part in parts[1:]:
                total = total + part[i]
            self.velocity[i] = MOMENTUM * self.velocity[i] - RATE * total
            self.weights[i] = weight + self.velocity[i]
        self.batch = self.rng.integers(self.images, size=BATCH)
        self.steps += 1

    def __hpcray_checkpoint__(self, directory: str) -> None:
        arrays = {f"weight{i}": array for i, array in enumerate(self.weights)}
        arrays |= {f"velocity{i}": array for i, array in enumerate(self.velocity)}
        np.savez(Path(directory, "arrays.npz"), batch=self.batch, **arrays)
        numbers = {"steps": self.steps, "rng": self.rng.bit_generator.state}
        Path(directory, "numbers.json").write_text(json.dumps(numbers))

    def __hpcray_restore__(self, directory: str) -> None:
        with np.load(Path(directory, "arrays.npz")) as arrays:
            self.weights = [arrays[f"weight{i}"] for i in range(len(self.weights))]
            self.velocity = [arrays[f"velocity{i}"] for i in range(len(self.velocity))]
            self.batch = arrays["batch"]
        numbers = json.loads(Path(directory, "numbers.json").read_text())
        self.steps, self.rng.bit_generator.state = numbers["steps"], numbers["rng"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait after each step, as larger ones take")
    given = parser.parse_args()

    ray.init()
    images, labels = load_digits(return_X_y=True)
    images = images / 16.0
    train, held_out = slice(0, 1500), slice(1500, None)
    server = ParameterServer.options(name="parameters", num_cpus=0).remote(images.shape[1], train.stop)
    steps, weights, batch = ray.get(server.state.remote())
    print(f"run {ray.restart_count()} of the job begins at step {steps} of {given.steps}", flush=True)
    while steps < given.steps:
        # When the job drains, one of these raises JobDrainingError: the program ends, with the exit code for that.
        shards = np.array_split(batch, SHARDS)
        parts = ray.get([gradient.remote(weights, images[shard], labels[shard]) for shard in shards])
        ray.get(server.step.remote(parts))
        steps, weights, batch = ray.get(server.state.remote())
        if steps % 10 == 0:
            print(f"step {steps}", flush=True)
        time.sleep(given.pause)
    accuracy = (forward(weights, images[held_out])[1].argmax(axis=1) == labels[held_out]).mean()
    digest = hashlib.sha256(b"".join(weight.tobytes() for weight in weights)).hexdigest()
    print(f"accuracy on {len(labels) - train.stop} held-out images: {accuracy:.3f}")
    print(f"weights: {digest[:16]}")


if __name__ == "__main__":
    main()
