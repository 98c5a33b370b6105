"""A policy that learns from verl's `DataProto`s, exchanged as device objects or as other values."""

import hashlib
import json
import sys

import ray
import torch
from tensordict import TensorDict
from verl import DataProto

WAY = sys.argv[1] if len(sys.argv) > 1 else "auto"
STEPS, SAMPLERS, ROWS = 6, 2, 32


def policy() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


@ray.remote(num_cpus=0)
class Sampler:
    def __init__(self, rank: int) -> None:
        self.policy, self.rank = policy(), rank

    @ray.method(tensor_transport=WAY)
    def sample(self, weights: TensorDict, step: int) -> DataProto:
        self.policy.load_state_dict(dict(weights.items()))
        torch.manual_seed(1000 * step + self.rank)
        states = torch.randn(ROWS, 8)
        with torch.no_grad():
            actions = torch.distributions.Categorical(logits=self.policy(states)).sample()
        rewards = (actions == states[:, :4].argmax(1)).float()
        return DataProto.from_dict({"states": states, "actions": actions, "rewards": rewards}, meta_info={"step": step})


@ray.remote(num_cpus=0)
class Learner:
    def __init__(self) -> None:
        self.policy = policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), 0.01)

    @ray.method(tensor_transport=WAY)
    def weights(self) -> TensorDict:
        return TensorDict({name: tensor.clone() for name, tensor in self.policy.state_dict().items()}, [])

    def learn(self, step: int, *batches: DataProto) -> float:
        assert all(batch.meta_info == {"step": step} for batch in batches)
        data = DataProto.concat(list(batches)).batch
        logits = torch.distributions.Categorical(logits=self.policy(data["states"]))
        loss = -(logits.log_prob(data["actions"]) * (data["rewards"] - data["rewards"].mean())).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(data["rewards"].mean())

    def digest(self) -> str:
        found = hashlib.sha256()
        for tensor in self.policy.state_dict().values():
            found.update(tensor.numpy().tobytes())
        return found.hexdigest()


torch.set_num_threads(1)
ray.init(num_cpus=2)
learner, samplers = Learner.remote(), [Sampler.remote(rank) for rank in range(SAMPLERS)]
rewards = []
for step in range(STEPS):
    weights = learner.weights.remote()
    rewards.append(ray.get(learner.learn.remote(step, *[each.sample.remote(weights, step) for each in samplers])))
print(json.dumps({"ray": ray.__file__, "digest": ray.get(learner.digest.remote()), "rewards": rewards}))
