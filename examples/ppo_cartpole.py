"""RLlib on every node: PPO learns to balance a pole.

    python -m hpcray.compat libraries install            # once: Ray's libraries, from Ray's wheel
    pip install 'hpcray[rllib]'
    hpcray-launch -n 2 --as-ray examples/ppo_cartpole.py --runners 4 --storage /shared/directory

The program is Ray's, word for word: it runs on Ray too. Actors on all nodes play, the driver's process learns, and
every few iterations the algorithm is saved. A run that finds a checkpoint in the directory goes on from there.
"""

from __future__ import annotations

import argparse
import os

import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPOConfig

SAVE_EVERY = 5  # iterations


def algorithm(runners: int) -> Algorithm:
    """PPO for CartPole-v1."""
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=runners, num_envs_per_env_runner=4)
        .training(train_batch_size_per_learner=2000, minibatch_size=250, num_epochs=8, lr=5e-4, gamma=0.98)
        .evaluation(evaluation_interval=SAVE_EVERY, evaluation_duration=10, evaluation_num_env_runners=0)
        .debugging(seed=1)
    )
    return config.build_algo()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runners", type=int, default=2, help="actors that play (default 2)")
    parser.add_argument("--iterations", type=int, default=40, help="at most so many (default 40)")
    parser.add_argument("--enough", type=float, default=400, help="mean return to stop at (default 400)")
    parser.add_argument("--storage", default="ppo-cartpole", help="directory of the checkpoint (default ppo-cartpole)")
    options = parser.parse_args()

    ray.init()
    print(f"cluster: {len(ray.nodes())} nodes, {ray.cluster_resources().get('CPU', 0):g} CPUs")
    path = os.path.abspath(options.storage)
    learner = algorithm(options.runners)
    if os.path.isdir(path):
        learner.restore_from_path(path)
        print(f"restored: iteration {learner.iteration}")
    while learner.iteration < options.iterations:
        result = learner.train()
        mean = result["env_runners"]["episode_return_mean"]
        print(f"iteration {learner.iteration:3}  mean return {mean:7.2f}", flush=True)
        if learner.iteration % SAVE_EVERY == 0 or mean >= options.enough:
            learner.save_to_path(path)
        if mean >= options.enough:
            break
    print(f"saved: {path}")
    learner.stop()


if __name__ == "__main__":
    main()
