"""Serve: handles from everywhere, contexts, back-pressure, large values, local testing, the driver's event loop."""

import asyncio
import json
import time

import numpy as np
import ray
from ray import serve
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle


@serve.deployment(ray_actor_options={"num_cpus": 0.5, "runtime_env": {"env_vars": {"COLOUR": "blue"}}})
class Worker:
    def __init__(self, scale: int = 1, *, name: str = "worker") -> None:
        self.scale, self.name = scale, name

    def __call__(self, number: int) -> int:
        return number * self.scale

    def total(self, array: np.ndarray) -> float:
        return float(array.sum())

    def make(self, count: int) -> np.ndarray:
        return np.arange(count)

    async def context(self) -> dict:
        import os

        context = serve.get_replica_context()
        return {
            "app": context.app_name, "deployment": context.deployment, "same": context.servable_object is self,
            "rank": context.rank.rank, "size": context.world_size, "colour": os.environ["COLOUR"],
        }  # fmt: skip

    async def other(self) -> str:
        """Another application, found by its name."""
        return await serve.get_app_handle("greeting").remote("replica")

    def fail(self, depth: int) -> None:
        if depth:
            self.fail(depth - 1)
        raise LookupError("deep")

    def squares(self, count: int):
        for number in range(count):
            if number == 3:
                raise ArithmeticError("three")
            yield number * number


@serve.deployment
class Chain:
    """A tree of deployments; a dict and a list of handles as arguments."""

    def __init__(self, by_name: dict[str, DeploymentHandle], first: DeploymentHandle) -> None:
        self.by_name, self.first = by_name, first

    async def __call__(self, number: int) -> dict[str, int]:
        start = self.first.remote(number)
        pending = {name: handle.remote(start) for name, handle in self.by_name.items()}
        values = await asyncio.gather(*pending.values())
        return dict(zip(pending, values, strict=True))

    async def nested(self, number: int) -> list[int]:
        """Responses that are awaited one by one, and one that is never asked for."""
        self.first.remote(0)
        return [await self.first.remote(number) for number in range(number)]


@serve.deployment(max_ongoing_requests=1, max_queued_requests=2)
class Narrow:
    async def __call__(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "through"


@serve.deployment
class Nest:
    """Cancels below it what it waits for."""

    def __init__(self, narrow: DeploymentHandle) -> None:
        self.narrow, self.seen = narrow, []

    async def __call__(self) -> None:
        try:
            await self.narrow.remote(30)
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise

    def told(self) -> list[str]:
        return self.seen


@serve.deployment
async def greet(name: str) -> str:
    return f"hello {name}"


def error_of(call) -> list:
    try:
        call()
    except Exception as error:
        return [type(error).__name__.removesuffix("(LookupError)"), str(error).strip().splitlines()[-1][:60]]
    return []


async def from_a_loop(handle: DeploymentHandle) -> list:
    values = await asyncio.gather(*(handle.remote(number) for number in range(5)))
    parts = [part async for part in handle.options(method_name="squares", stream=True).remote(3)]
    try:
        await asyncio.wait_for(serve.get_app_handle("narrow").remote(20), 0.5)
    except asyncio.TimeoutError:
        return [*values, *parts, "timeout"]
    return []


def main():
    ray.init(num_cpus=6)
    found = {}
    local = serve.run(Worker.bind(4), name="local", _local_testing_mode=True)
    found["local"] = local.remote(2).result(), list(local.options(stream=True).squares.remote(3))
    serve.run(greet.bind(), name="greeting", route_prefix=None)
    handle = serve.run(Worker.options(name="Renamed").bind(3, name="w"), name="worker", route_prefix="/worker")
    found["handle"] = handle.remote(5).result(), serve.get_app_handle("worker").remote(6).result()
    found["names"] = handle.deployment_name, handle.app_name
    found["context"] = handle.context.remote().result()
    found["by name"] = (
        serve.get_deployment_handle("Renamed", "worker").options(method_name="__call__").remote(1).result()
    )
    found["other"] = handle.other.remote().result()
    array = np.ones(1_000_000)
    found["large"] = handle.total.remote(array).result(), len(handle.make.remote(500_000).result())
    found["ref"] = handle.total.remote(ray.put(array)).result()
    found["error"] = error_of(lambda: handle.fail.remote(3).result())
    found["no method"] = error_of(lambda: handle.nothing.remote().result())[:1]
    found["no app"] = error_of(lambda: serve.get_app_handle("none"))
    try:
        for _ in (parts := handle.options(stream=True).squares.remote(5)):
            pass
    except ArithmeticError as error:
        found["stream"] = [isinstance(error, ray.exceptions.RayTaskError), list(parts)]

    chain = serve.run(
        Chain.bind({"a": Worker.options(name="A").bind(10), "b": Worker.options(name="B").bind(20)}, Worker.bind(2)),
        name="chain", route_prefix=None,
    )  # fmt: skip
    found["chain"] = chain.remote(3).result(), chain.nested.remote(3).result()
    found["deployments"] = sorted(serve.status().applications["chain"].deployments)

    nest = serve.run(Nest.bind(Narrow.bind()), name="nest", route_prefix=None)
    response = nest.remote()
    time.sleep(1)
    response.cancel()
    found["cancelled"] = error_of(response.result)[:1]
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not nest.told.remote().result():
        time.sleep(0.1)
    found["nested"] = nest.told.remote().result()
    # The inner call was cancelled too: its place is free again long before its 30 seconds are over.
    found["freed"] = serve.get_deployment_handle("Narrow", "nest").remote(0).result(timeout_s=15)

    narrow = serve.run(Narrow.bind(), name="narrow", route_prefix=None)
    responses = [narrow.remote(6)]
    time.sleep(2)
    responses += [narrow.remote(0), narrow.remote(0)]
    time.sleep(1)
    last = narrow.remote(0)
    try:
        last.result()
    except BackPressureError as error:
        found["full"] = type(error).__name__
    found["through"] = [response.result() for response in responses]
    found["timeout"] = error_of(lambda: narrow.remote(5).result(timeout_s=0.3))[:1]
    found["loop"] = asyncio.run(from_a_loop(handle))
    serve.delete("worker")
    try:
        found["deleted"] = handle.remote(1).result(timeout_s=20)
    except RayServeException as error:
        found["deleted"] = type(error).__name__
    serve.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
