"""verl's resource pools and worker groups."""

import json

import ray
import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, Execute, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


@ray.remote
class Adder(Worker):
    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one(self) -> int:
        return self.start

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def zero(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"sum": data.batch["x"] + self.start + self.rank})


ray.init(num_cpus=8)
pool = RayResourcePool([2], use_gpu=False, max_colocate_count=2)
group = RayWorkerGroup(pool, RayClassWithInitArgs(Adder, start=1))
other = RayWorkerGroup(pool, RayClassWithInitArgs(Adder, start=10))
x = torch.arange(4)
data = DataProto.from_dict({"x": x})
got = group.add(data).batch["sum"].tolist()
print(json.dumps({
    "ray": ray.__file__,
    "one_to_all": group.one(),
    "other": other.one(),
    "zero": group.zero(),
    "data_parallel": got,
    "expected": [1, 2, 4, 5],
    "ranks": ray.get([worker.__ray_call__.remote(lambda self: self.rank) for worker in group.workers]),
}))  # fmt: skip
