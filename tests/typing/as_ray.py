"""A program that says `import ray`."""

from __future__ import annotations

import ray
import ray.util.queue
from ray.actor import ActorHandle, ActorProxy
from ray.exceptions import RayTaskError
from ray.runtime_env import RuntimeEnv
from ray.util import ActorPool
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from typing_extensions import assert_type


@ray.remote(runtime_env=RuntimeEnv(env_vars={"A": "b"}))
def double(x: int) -> int:
    return 2 * x


class Adder:
    @ray.method
    def add(self, x: int) -> int:
        return x


def main(handle: ActorHandle[Adder]) -> None:
    ray.init(num_cpus=1)
    ref = double.remote(double.remote(1))
    assert_type(ref, "ray.ObjectRef[int]")
    try:
        assert_type(ray.get(ref), int)
    except RayTaskError:
        print(ray.__version__, ray.nodes())
    adder: ActorProxy[Adder] = ray.remote(Adder).remote()
    assert_type(ray.get(adder.add.remote(1)), int)
    group: PlacementGroup = placement_group([{"CPU": 1}])
    double.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group)).remote(1)
    queue = ray.util.queue.Queue(maxsize=1)
    queue.put(1)
    print(queue.get(), ActorPool([handle]), ray.get_runtime_context().get_node_id())
    double.remote("x")  # error: call-overload
    double(1)  # error: operator
