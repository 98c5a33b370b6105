"""Ray Tune on every node: ASHA searches the settings of a network that reads handwritten digits.

    python -m hpcray.compat libraries install            # once: Ray's libraries, from Ray's wheel
    pip install 'hpcray[tune]' scikit-learn
    hpcray-launch -n 4 --as-ray examples/tune_digits.py --storage /shared/directory

The program is Ray's, word for word: it runs on Ray too. Each trial trains for up to 40 epochs and reports the accuracy
on validation images after each; ASHA stops those that are behind. A trial's network is kept as a checkpoint, and what
is judged in the end is the best one, on images that no trial has seen. A run that finds a search in the directory goes
on with it; SIGUSR1, with which Slurm may announce the end of a job, has Tune save the search and end.
"""

from __future__ import annotations

import argparse
import os
import pickle
import tempfile
from typing import Any

import numpy as np
import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier
from threadpoolctl import threadpool_limits

SEED = 7
EPOCHS = 40
CHECKPOINT_EVERY = 5  # epochs
UNFINISHED = 75  # exit code, EX_TEMPFAIL: slurm/tune.sbatch has the job requeued

Part = tuple[np.ndarray, np.ndarray]


def parts_of_digits() -> tuple[Part, Part, Part]:
    """Images and labels for training, for validation, and for the final test."""
    digits = load_digits()
    images, labels = digits.data / 16, digits.target
    order = np.random.default_rng(SEED).permutation(len(images))
    test, validation, train = (images[part] for part in np.split(order, [360, 660]))
    of_test, of_validation, of_train = (labels[part] for part in np.split(order, [360, 660]))
    return (train, of_train), (validation, of_validation), (test, of_test)


def train(config: dict[str, Any], data: Part, validation: Part) -> None:
    """Train a network with these settings, from its last checkpoint if there is one."""
    network = MLPClassifier(
        (config["hidden"],), learning_rate_init=config["learning_rate"], alpha=config["decay"], random_state=SEED
    )
    first = 0
    checkpoint = tune.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory, open(os.path.join(directory, "network"), "rb") as file:
            first, network = pickle.load(file)
    with threadpool_limits(1):
        for epoch in range(first, EPOCHS):
            network.partial_fit(*data, classes=np.arange(10))
            metrics = {"accuracy": float(network.score(*validation)), "epoch": epoch}
            if epoch % CHECKPOINT_EVERY != CHECKPOINT_EVERY - 1:
                tune.report(metrics)
                continue
            with tempfile.TemporaryDirectory() as directory:
                with open(os.path.join(directory, "network"), "wb") as file:
                    pickle.dump((epoch + 1, network), file)
                tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(directory))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=40, help="settings to try (default 40)")
    parser.add_argument("--storage", default="tune-results", help="directory that all nodes see (default tune-results)")
    options = parser.parse_args()

    ray.init()
    print(f"cluster: {len(ray.nodes())} nodes, {ray.cluster_resources().get('CPU', 0):g} CPUs")
    data, validation, test = parts_of_digits()
    trainable = tune.with_parameters(train, data=data, validation=validation)
    storage = os.path.abspath(options.storage)
    if tune.Tuner.can_restore(os.path.join(storage, "digits")):
        tuner = tune.Tuner.restore(os.path.join(storage, "digits"), trainable, resume_errored=True)
    else:
        tuner = tune.Tuner(
            trainable,
            param_space={
                "hidden": tune.choice([8, 16, 32, 64]),
                "learning_rate": tune.loguniform(1e-4, 1e-1),
                "decay": tune.loguniform(1e-6, 1e-2),
            },
            tune_config=tune.TuneConfig(
                metric="accuracy",
                mode="max",
                num_samples=options.trials,
                scheduler=ASHAScheduler(max_t=EPOCHS, grace_period=CHECKPOINT_EVERY),
            ),
            run_config=tune.RunConfig(
                name="digits",
                storage_path=storage,
                failure_config=tune.FailureConfig(max_failures=2),
                verbose=1,
            ),
        )
    results = tuner.fit()
    ended = sum(bool(result.error or (result.metrics or {}).get("done")) for result in results)
    if ended < options.trials:
        print(f"{ended} of {options.trials} trials have ended: the next run goes on")
        raise SystemExit(UNFINISHED)
    best = results.get_best_result()
    epochs = sum(result.metrics["training_iteration"] for result in results)
    print(f"search: {len(results)} trials, {results.num_errors} errors, {epochs} epochs of {len(results) * EPOCHS}")
    print(f"best: {best.config}, validation accuracy {best.metrics['accuracy']:.3f}")
    with best.checkpoint.as_directory() as directory, open(os.path.join(directory, "network"), "rb") as file:
        _, network = pickle.load(file)
    print(f"accuracy: {network.score(*test):.4f} on {len(test[0])} held-out images")


if __name__ == "__main__":
    main()
