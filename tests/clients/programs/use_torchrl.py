"""TorchRL: a collector with two remote environments, and a replay buffer that is an actor."""

import functools
import json

import ray
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.collectors.distributed import RayCollector
from torchrl.data import LazyTensorStorage, RayReplayBuffer
from torchrl.envs import GymEnv
from torchrl.envs.utils import RandomPolicy

if __name__ == "__main__":
    make = functools.partial(GymEnv, "CartPole-v1")
    resources = {"num_cpus": 1, "num_gpus": 0}
    collector = RayCollector(
        [make, make], RandomPolicy(make().action_spec), collector_class=Collector, total_frames=400,
        frames_per_batch=100, ray_init_config={"num_cpus": 4}, remote_configs={**resources, "memory": 100 << 20},
    )  # fmt: skip
    frames = sum(batch.numel() for batch in collector)
    collector.shutdown()
    ray.init(num_cpus=4, ignore_reinit_error=True)
    buffer = RayReplayBuffer(storage=functools.partial(LazyTensorStorage, 1000), batch_size=16, remote_config=resources)
    buffer.extend(TensorDict({"a": torch.arange(100)}, batch_size=[100]))
    sample = buffer.sample()
    print(json.dumps({
        "ray": ray.__file__, "frames": frames, "held": len(buffer), "sample": list(sample.shape),
        "of_the_data": bool((sample["a"] < 100).all()),
    }))  # fmt: skip
