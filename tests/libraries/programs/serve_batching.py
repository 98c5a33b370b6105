"""Serve: batches of calls, batches of streams, multiplexed models, autoscaling up and down."""

import asyncio
import json
import time

import ray
from ray import serve


@serve.deployment(max_ongoing_requests=100)
class Batched:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.2)
    async def squares(self, numbers: list[int]) -> list[int]:
        self.sizes.append(len(numbers))
        return [number * number for number in numbers]

    async def __call__(self, number: int) -> int:
        return await self.squares(number)

    async def largest(self) -> int:
        return max(self.sizes)

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.2)
    async def count(self, limits: list[int]):
        for step in range(max(limits)):
            yield [step if step < limit else StopIteration for limit in limits]

    async def stream(self, limit: int):
        async for value in self.count(limit):
            yield value


@serve.deployment(num_replicas=2)
class Models:
    def __init__(self) -> None:
        self.loads = 0

    @serve.multiplexed(max_num_models_per_replica=2)
    async def get_model(self, name: str):
        self.loads += 1
        await asyncio.sleep(0.05)
        return lambda text: f"{name}: {text}"

    async def __call__(self, text: str) -> str:
        model = await self.get_model(serve.get_multiplexed_model_id())
        return model(text)

    async def count(self) -> int:
        return self.loads


@serve.deployment(
    max_ongoing_requests=4,
    autoscaling_config={
        "min_replicas": 1,
        "max_replicas": 3,
        "target_ongoing_requests": 1,
        "upscale_delay_s": 0.2,
        "downscale_delay_s": 0.5,
        "metrics_interval_s": 0.1,
        "look_back_period_s": 0.5,
    },
    graceful_shutdown_timeout_s=2,
    graceful_shutdown_wait_loop_s=0.1,
)
class Elastic:
    async def __call__(self) -> str:
        await asyncio.sleep(0.5)
        return serve.get_replica_context().replica_id.unique_id


def replicas() -> int:
    states = serve.status().applications["elastic"].deployments["Elastic"].replica_states
    return sum(count for state, count in states.items() if getattr(state, "value", state) == "RUNNING")


def until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def main():
    ray.init(num_cpus=8)
    batched = serve.run(Batched.bind(), name="batched", route_prefix=None)
    responses = [batched.remote(number) for number in range(20)]
    found = {"squares": [response.result(timeout_s=20) for response in responses]}
    found["largest"] = batched.largest.remote().result(timeout_s=20)
    streams = [batched.options(stream=True).stream.remote(limit) for limit in (1, 3, 2)]
    found["streams"] = [list(stream) for stream in streams]
    serve.delete("batched")

    models = serve.run(Models.bind(), name="models", route_prefix=None)
    found["models"] = [
        models.options(multiplexed_model_id=name).remote("hello").result(timeout_s=20) for name in ("a", "b", "a", "c")
    ]
    serve.delete("models")

    elastic = serve.run(Elastic.bind(), name="elastic", route_prefix=None)
    done = []

    def grown() -> bool:
        done.extend(response.result(timeout_s=60) for response in [elastic.remote() for _ in range(12)])
        return replicas() == 3

    found["up"] = until(grown, 90)
    found["several"] = len(set(done)) > 1
    found["down"] = until(lambda: replicas() == 1, 30)
    serve.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
