"""Serve: deployments, handles, composition, streaming, reconfiguration, errors, cancellation, status, deletion."""

import asyncio
import json
import time

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle


@serve.deployment(user_config={"plus": 1})
class Adder:
    def __init__(self) -> None:
        self.plus = 0

    def reconfigure(self, config: dict) -> None:
        self.plus = config["plus"]

    def __call__(self, number: int) -> int:
        return number + self.plus

    def words(self, count: int):
        for index in range(count):
            yield f"word {index}"

    def fail(self) -> None:
        raise KeyError("no such key")


@serve.deployment(num_replicas=2, max_ongoing_requests=10)
class Doubler:
    async def __call__(self, number: int) -> int:
        await asyncio.sleep(0.01)
        return 2 * number

    async def who(self) -> str:
        return serve.get_replica_context().replica_id.unique_id


@serve.deployment
class Front:
    def __init__(self, add: DeploymentHandle, double: DeploymentHandle) -> None:
        self.add, self.double = add, double
        self.cancelled = False

    async def __call__(self, number: int) -> int:
        # The response of one deployment is the argument of another: its value goes from replica to replica.
        return await self.double.remote(self.add.remote(number))

    async def stream(self, count: int):
        async for word in self.add.options(stream=True).words.remote(count):
            yield word.upper()

    async def slow(self) -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def was_cancelled(self) -> bool:
        return self.cancelled


@serve.deployment
def shout(text: str) -> str:
    return text.upper()


def main():
    ray.init(num_cpus=6)
    handle = serve.run(Front.bind(Adder.bind(), Doubler.bind()), name="front", route_prefix=None)
    found = {"one": handle.remote(3).result(timeout_s=20)}
    responses = [handle.remote(number) for number in range(20)]
    found["many"] = [response.result(timeout_s=20) for response in responses]
    found["stream"] = list(handle.options(stream=True).stream.remote(3))
    doubler = serve.get_deployment_handle("Doubler", "front")
    found["replicas"] = len({doubler.who.remote().result(timeout_s=20) for _ in range(40)})
    adder = serve.get_deployment_handle("Adder", "front")
    try:
        adder.fail.remote().result(timeout_s=20)
    except Exception as error:
        found["error"] = (isinstance(error, KeyError), isinstance(error, ray.exceptions.RayTaskError))

    serve.run(
        Front.bind(Adder.options(user_config={"plus": 100}).bind(), Doubler.bind()), name="front", route_prefix=None
    )
    found["reconfigured"] = handle.remote(3).result(timeout_s=20)

    slow = handle.slow.remote()
    time.sleep(0.3)
    slow.cancel()
    try:
        slow.result(timeout_s=20)
    except Exception as error:
        found["cancelled"] = type(error).__name__
    found["told"] = handle.was_cancelled.remote().result(timeout_s=20)
    try:
        handle.slow.remote().result(timeout_s=0.2)
    except TimeoutError:
        found["timeout"] = True

    found["function"] = serve.run(shout.bind(), name="shout", route_prefix="/shout").remote("a").result(timeout_s=20)
    status = serve.status()
    found["apps"] = {name: str(app.status.value) for name, app in sorted(status.applications.items())}
    found["deployments"] = sorted(status.applications["front"].deployments)
    serve.delete("shout")
    found["left"] = sorted(serve.status().applications)
    serve.shutdown()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        free = ray.available_resources().get("CPU")
        if not names and free == ray.cluster_resources()["CPU"]:
            break
        time.sleep(0.1)
    found["after"] = (names, free == ray.cluster_resources()["CPU"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
