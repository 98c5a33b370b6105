"""Reinforcement learning: samplers on all nodes play Gymnasium's CartPole, a learner improves their policy.

    hpcray-launch -n 4 examples/gallery/rollouts/rollouts.py --picture returns.png

Each sampler is an actor with environments of its own. The learner, an actor too, holds the policy: a logistic function
of the observation, improved by policy gradients (REINFORCE with a baseline, Adam). The new weights are one object that
all samplers read; the batches go from samplers to learner without passing through the program.
"""

from __future__ import annotations

import argparse
import time

import gymnasium
import numpy as np

import hpcray as ray

DISCOUNT, RATE = 0.98, 0.5


@ray.remote
class Sampler:
    """Plays whole episodes."""

    def __init__(self, seed: int) -> None:
        self.environment = gymnasium.make("CartPole-v1")
        self.rng = np.random.default_rng(seed)
        self.seed = seed

    def play(self, weights: np.ndarray, episodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[float]]:
        """Observations, actions and discounted sums of the following rewards; and the reward of each episode."""
        seen, done, values, rewards = [], [], [], []
        for _ in range(episodes):
            self.seed += 1_000
            observation, _ = self.environment.reset(seed=self.seed)
            over, steps = False, 0
            while not over:
                chance = 1 / (1 + np.exp(-weights @ [*observation, 1.0]))
                action = int(self.rng.random() < chance)
                seen.append([*observation, 1.0])
                done.append(action)
                observation, _, ended, cut, _ = self.environment.step(action)
                over, steps = ended or cut, steps + 1
            values += [(1 - DISCOUNT ** (steps - step)) / (1 - DISCOUNT) for step in range(steps)]
            rewards.append(float(steps))
        return np.array(seen), np.array(done), np.array(values), rewards


@ray.remote
class Learner:
    """The policy and its optimizer."""

    def __init__(self) -> None:
        self.weights = np.zeros(5)
        self.mean, self.square, self.steps = np.zeros(5), np.zeros(5), 0

    def improve(self, *batches: tuple[np.ndarray, np.ndarray, np.ndarray, list[float]]) -> tuple[np.ndarray, float]:
        """One step along the gradient of all batches. The new weights, and the mean reward of an episode."""
        seen, done, values = (np.concatenate([batch[part] for batch in batches]) for part in range(3))
        advantage = (values - values.mean()) / (values.std() + 1e-8)
        chance = 1 / (1 + np.exp(-seen @ self.weights))
        gradient = ((done - chance) * advantage) @ seen / len(seen)
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        step = self.mean / (1 - 0.9**self.steps) / (np.sqrt(self.square / (1 - 0.999**self.steps)) + 1e-8)
        self.weights = self.weights + RATE * step
        return self.weights, float(np.mean([reward for batch in batches for reward in batch[3]]))


def draw(returns: list[float], path: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(returns)
    axes.axhline(475, color="0.6", ls=":")
    axes.set(xlabel="iteration", ylabel="steps of an episode", ylim=(0, 510), title="dotted: CartPole counts as solved")
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--samplers", type=int, default=4)
    parser.add_argument("--episodes", type=int, default=8, help="of each sampler in an iteration")
    parser.add_argument("--quick", action="store_true", help="18 iterations")
    parser.add_argument("--picture", metavar="FILE", help="draw the rewards")
    given = parser.parse_args()
    iterations = 18 if given.quick else given.iterations

    ray.init()
    samplers = [Sampler.options(scheduling_strategy="SPREAD").remote(seed) for seed in range(given.samplers)]
    learner = Learner.options(num_cpus=0).remote()
    weights = ray.put(np.zeros(5))
    begin = time.perf_counter()
    returns = []
    for _ in range(iterations):
        batches = [sampler.play.remote(weights, given.episodes) for sampler in samplers]
        weights, reward = learner.improve.options(num_returns=2).remote(*batches)
        returns.append(ray.get(reward))
    seconds = time.perf_counter() - begin
    steps = sum(returns) * given.samplers * given.episodes
    print(f"{steps:.0f} steps in {seconds:.1f} s: {steps / seconds:.0f} a second")
    print(f"an episode lasts {returns[0]:.0f} steps at first, {returns[-1]:.0f} at last")
    assert returns[-1] > (5 * returns[0] if given.quick else 400)
    if given.picture:
        draw(returns, given.picture)
    print("checked")


if __name__ == "__main__":
    main()
