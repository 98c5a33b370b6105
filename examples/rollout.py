"""A learner and four samplers of reinforcement learning exchange weights and batches of PyTorch tensors.

    python examples/rollout.py
    hpcray-launch -n 4 examples/rollout.py --iterations 60

The task: push a point on a line to the origin and keep it there, in 40 steps. Each sampler plays many episodes at once
with the newest weights it was given and returns a batch; the learner takes the batches as they come, improves the
policy (REINFORCE, with the mean return of each step as the baseline) and puts the new weights into the object store
once for all samplers.
"""

from __future__ import annotations

import argparse

import torch

import hpcray as ray

STEPS = 40
ACTIONS = torch.tensor([-1.0, 0.0, 1.0])

Weights = dict[str, torch.Tensor]
Batch = dict[str, torch.Tensor]


def make_policy() -> torch.nn.Module:
    """From position and speed to the scores of the actions."""
    return torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, len(ACTIONS)))


@ray.remote
class Sampler:
    """Plays episodes.

    Args:
        seed: of the random numbers.
        episodes: how many are played at once.
    """

    def __init__(self, seed: int, episodes: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.episodes = episodes
        self.policy = make_policy()

    def sample(self, weights: Weights) -> Batch:
        """Play with these weights. Returns states, actions and rewards, each [steps, episodes, ...]."""
        self.policy.load_state_dict(weights)
        place = 2 * torch.rand(self.episodes, generator=self.generator) - 1
        speed = torch.zeros(self.episodes)
        states, actions, rewards = [], [], []
        with torch.no_grad():
            for _ in range(STEPS):
                state = torch.stack([place, speed], dim=1)
                odds = self.policy(state).softmax(dim=1)
                action = torch.multinomial(odds, 1, generator=self.generator).squeeze(1)
                speed = 0.9 * speed + 0.1 * ACTIONS[action]
                place = place + speed
                states.append(state)
                actions.append(action)
                rewards.append(-place.abs())
        return {"states": torch.stack(states), "actions": torch.stack(actions), "rewards": torch.stack(rewards)}


@ray.remote
class Learner:
    """Holds the policy and improves it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.policy = make_policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.01)

    def weights(self) -> Weights:
        """The weights of the policy, by name."""
        return self.policy.state_dict()

    def learn(self, batch: Batch) -> tuple[Weights, float]:
        """One step of gradient descent. Returns the new weights and the mean reward of the batch."""
        rewards = batch["rewards"]
        returns = rewards.flip(0).cumsum(0).flip(0)
        advantage = returns - returns.mean(dim=1, keepdim=True)
        scores = self.policy(batch["states"]).log_softmax(dim=2)
        chosen = scores.gather(2, batch["actions"].unsqueeze(2)).squeeze(2)
        loss = -(chosen * advantage / advantage.std()).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return self.policy.state_dict(), float(rewards.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samplers", type=int, default=4)
    parser.add_argument("--episodes", type=int, default=256, help="that a sampler plays at once (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=200, help="batches to learn from (default: %(default)s)")
    options = parser.parse_args()

    ray.init()
    learner = Learner.remote()
    weights = learner.weights.remote()
    samplers = [Sampler.options(num_cpus=0.25).remote(seed, options.episodes) for seed in range(options.samplers)]
    playing = {sampler.sample.remote(weights): sampler for sampler in samplers}
    for iteration in range(1, options.iterations + 1):
        (batch,), _ = ray.wait(list(playing))
        sampler = playing.pop(batch)
        weights, reward = learner.learn.options(num_returns=2).remote(batch)
        playing[sampler.sample.remote(weights)] = sampler
        if iteration % 25 == 0 or iteration == options.iterations:
            print(f"batch {iteration:4}  mean reward {ray.get(reward):7.3f}", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
