"""A learner and four samplers of reinforcement learning exchange weights and batches of PyTorch tensors.

    python examples/rollout.py
    python examples/rollout.py --device-objects
    hpcray-launch -n 4 examples/rollout.py --iterations 60

The task: push a point on a line to the origin and keep it there, in 40 steps. Each sampler plays many episodes at once
with the newest weights it was given and returns a batch; the learner takes the batches of the samplers in turn,
improves the policy (REINFORCE, with the mean return of each step as the baseline) and returns the new weights, which
each sampler gets when its turn comes.

With `--device-objects` weights and batches stay in the process that made them until another one reads them, on its GPU
where it has one (`--device cuda`). The weights are the same either way: the last line is a digest of them.
"""

from __future__ import annotations

import argparse
import hashlib

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
        device: where they are played.
    """

    def __init__(self, seed: int, episodes: int, device: str) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.episodes, self.device = episodes, device
        self.policy = make_policy().to(device)

    def sample(self, weights: Weights) -> Batch:
        """Play with these weights. Returns states, actions and rewards, each [steps, episodes, ...]."""
        self.policy.load_state_dict(weights)
        place = 2 * torch.rand(self.episodes, generator=self.generator, device=self.device) - 1
        speed = torch.zeros(self.episodes, device=self.device)
        effects = ACTIONS.to(self.device)
        states, actions, rewards = [], [], []
        with torch.no_grad():
            for _ in range(STEPS):
                state = torch.stack([place, speed], dim=1)
                odds = self.policy(state).softmax(dim=1)
                action = torch.multinomial(odds, 1, generator=self.generator).squeeze(1)
                speed = 0.9 * speed + 0.1 * effects[action]
                place = place + speed
                states.append(state)
                actions.append(action)
                rewards.append(-place.abs())
        return {"states": torch.stack(states), "actions": torch.stack(actions), "rewards": torch.stack(rewards)}


@ray.remote
class Learner:
    """Holds the policy and improves it. device: where."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.policy = make_policy().to(device)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.01)

    def weights(self) -> Weights:
        """The weights of the policy, by name: copies, for a sampler may read them while the next step changes them."""
        return {name: tensor.clone() for name, tensor in self.policy.state_dict().items()}

    def learn(self, batch: Batch) -> tuple[Weights, float]:
        """One step of gradient descent. Returns the new weights and the mean reward of the batch."""
        batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
        rewards = batch["rewards"]
        returns = rewards.flip(0).cumsum(0).flip(0)
        advantage = returns - returns.mean(dim=1, keepdim=True)
        scores = self.policy(batch["states"]).log_softmax(dim=2)
        chosen = scores.gather(2, batch["actions"].unsqueeze(2)).squeeze(2)
        loss = -(chosen * advantage / advantage.std()).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return self.weights(), float(rewards.mean())


def digest(weights: Weights) -> str:
    """A digest of every bit of the weights."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode() + weights[name].cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samplers", type=int, default=4)
    parser.add_argument("--episodes", type=int, default=256, help="that a sampler plays at once (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=200, help="batches to learn from (default: %(default)s)")
    parser.add_argument("--device-objects", action="store_true", help="tensors stay where they are made until read")
    parser.add_argument("--device", default="cpu", help='"cuda" gives each process a share of a GPU (default: cpu)')
    options = parser.parse_args()

    ray.init()
    way = "auto" if options.device_objects else "object_store"
    gpus = 1 / (options.samplers + 1) if options.device == "cuda" else 0
    learner = Learner.options(num_gpus=gpus).remote(options.device)
    weights = learner.weights.options(tensor_transport=way).remote()
    samplers = [
        Sampler.options(num_cpus=0.25, num_gpus=gpus).remote(seed, options.episodes, options.device)
        for seed in range(options.samplers)
    ]
    batches = [sampler.sample.options(tensor_transport=way).remote(weights) for sampler in samplers]
    for iteration in range(1, options.iterations + 1):
        turn = (iteration - 1) % options.samplers
        learn = learner.learn.options(num_returns=2, tensor_transport=way)
        weights, reward = learn.remote(batches[turn])
        batches[turn] = samplers[turn].sample.options(tensor_transport=way).remote(weights)
        if iteration % 25 == 0 or iteration == options.iterations:
            print(f"batch {iteration:4}  mean reward {ray.get(reward):7.3f}", flush=True)
    print(f"weights {digest(ray.get(weights))}", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
