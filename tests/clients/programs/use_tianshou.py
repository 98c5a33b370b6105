"""Tianshou's vector of environments, each an actor."""

import json

import gymnasium
import numpy as np
import ray
from tianshou.env import RayVectorEnv

ray.init(num_cpus=4)


def make():
    return gymnasium.make("CartPole-v1")


environments = RayVectorEnv([make] * 3)
environments.seed(1)
first, _ = environments.reset()
steps = [environments.step(np.array([0, 1, 0])) for _ in range(5)]
some = RayVectorEnv([make] * 3, wait_num=2)
some.reset()
print(json.dumps({
    "ray": ray.__file__,
    "shape": list(np.asarray(first).shape),
    "rewards": float(sum(np.asarray(step[1]).sum() for step in steps)),
    "two_of_three": len(some.step(np.array([0, 1, 0]))[0]),
}))  # fmt: skip
environments.close()
some.close()
