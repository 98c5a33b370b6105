"""The rows of `benchmarks/libraries.py`: what is timed of Ray's libraries.

A row is a generator function under `@row`. It gets the module `ray` of a job that runs, prepares, yields once, and does
what is timed after that. It returns the amount of work, in the row's unit times a second; nothing where the unit is
seconds; the figure itself where the unit is ms. What it says by `assert` holds on both engines.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Work = Generator[None, None, float | None]
MB = 1 << 20
STORE = 600 * MB
"""Bytes of the store where the data is larger than it."""


@dataclass(frozen=True)
class Row:
    """One measurement. `options`: arguments of `init`."""

    name: str
    unit: str
    work: Callable[[Any], Work]
    options: dict[str, Any] = field(default_factory=dict)


ROWS: list[Row] = []


def row(name: str, unit: str, **options: Any) -> Callable[[Callable[[Any], Work]], Callable[[Any], Work]]:
    """Add a row. Args: options: of `init`, on both engines."""

    def add(work: Callable[[Any], Work]) -> Callable[[Any], Work]:
        ROWS.append(Row(name, unit, work, options))
        return work

    return add


# -------------------------------------------------------------------- Ray Data


def quiet(ray: Any) -> Any:
    """The module `ray.data`, without progress bars."""
    data = importlib.import_module("ray.data")
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    with contextlib.suppress(AttributeError):
        context.print_on_execution_start = False
    ray.get(ray.remote(lambda: importlib.import_module("ray.data").__name__).remote())
    return data


def keys(blocks: int, size: int, payload: int) -> Callable[[Any], Any]:
    """A function of `map_batches` that makes `size` bytes a row number: random keys, each with `payload` bytes."""

    def make(batch: dict[str, Any]) -> Any:
        for number in batch["id"]:
            rng = np.random.default_rng(int(number))
            count = size // (8 + payload)
            yield {
                "key": rng.integers(0, 1 << 62, count),
                "payload": rng.integers(0, 255, (count, payload), dtype=np.uint8),
            }

    return make


@row("data: import", "s")
def data_import(ray: Any) -> Work:
    """`import ray.data` in a fresh process: Ray loads a part of what it needs with `ray`, or in `init`."""
    first = "import hpcray.compat.ray; " if "hpcray.compat.ray" in sys.modules else ""
    yield
    subprocess.run([sys.executable, "-c", f"{first}import ray, ray.data"], check=True)
    return None


@row("data: range(1000).map().take_all()", "s")
def data_small(ray: Any) -> Work:
    """The fixed costs of a pipeline: the first task that imports Ray Data has been."""
    data = quiet(ray)
    data.range(1000).map(lambda row: row).take_all()
    yield
    assert len(data.range(1000).map(lambda row: {"id": row["id"] + 1}).take_all()) == 1000
    return None


@row("data: map_batches over 1 GB", "MB/s")
def data_map_batches(ray: Any) -> Work:
    """Tensors that are made, changed and counted, in three operators of tasks that are not fused."""
    data = quiet(ray)
    blocks, size = 64, 16 * MB

    def make(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": np.ones((len(batch["id"]), size // 8), np.float64) * batch["id"][:, None]}

    def change(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": batch["x"] + 1}

    def count(batch: dict[str, Any]) -> dict[str, Any]:
        return {"sum": batch["x"].sum(axis=1)}

    yield
    made = data.range(blocks, override_num_blocks=blocks).map_batches(make, batch_size=1, num_cpus=1)
    changed = made.map_batches(change, batch_size=1, num_cpus=0.5).map_batches(count, batch_size=1, num_cpus=0.25)
    assert changed.sum("sum") == sum(n + 1 for n in range(blocks)) * (size // 8)
    return blocks * size / 1e6


@row("data: map_batches over 1 GB, 2 actors", "MB/s")
def data_actors(ray: Any) -> Work:
    """The same with a class in the middle."""
    data = quiet(ray)
    blocks, size = 64, 16 * MB

    class Change:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {"sum": (batch["x"] + 1).sum(axis=1)}

    def make(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": np.ones((len(batch["id"]), size // 8), np.float64) * batch["id"][:, None]}

    yield
    made = data.range(blocks, override_num_blocks=blocks).map_batches(make, batch_size=1)
    changed = made.map_batches(Change, batch_size=1, num_cpus=0.5, concurrency=2)
    assert changed.sum("sum") == sum(n + 1 for n in range(blocks)) * (size // 8)
    return blocks * size / 1e6


def _large(data: Any) -> tuple[Any, int, int]:
    """2 GB of keys with payloads: the dataset, its rows, its bytes."""
    blocks, size, payload = 64, 32 * MB, 120
    dataset = data.range(blocks, override_num_blocks=blocks).map_batches(keys(blocks, size, payload), batch_size=1)
    count = blocks * (size // (8 + payload))
    return dataset, count, count * (8 + payload)


@row("data: sort of 2 GB, store of 600 MB", "MB/s", object_store_memory=STORE)
def data_sort(ray: Any) -> Work:
    """Made, sorted and looked at, block by block."""
    data = quiet(ray)
    dataset, count, size = _large(data)
    yield
    last, seen = -1, 0
    for batch in dataset.sort("key").iter_batches(batch_size=None):
        found = batch["key"]
        assert found[0] >= last and (found[1:] >= found[:-1]).all()
        last, seen = found[-1], seen + len(found)
    assert seen == count
    return size / 1e6


@row("data: random_shuffle of 2 GB, store of 600 MB", "MB/s", object_store_memory=STORE)
def data_shuffle(ray: Any) -> Work:
    """Made, shuffled and counted."""
    data = quiet(ray)
    dataset, count, size = _large(data)
    yield
    assert dataset.random_shuffle(seed=1).map_batches(lambda batch: {"n": [len(batch["key"])]}).sum("n") == count
    return size / 1e6


@row("data: groupby of 2 GB, store of 600 MB", "MB/s", object_store_memory=STORE)
def data_groupby(ray: Any) -> Work:
    """Sums of 1000 groups."""
    data = quiet(ray)
    dataset, count, size = _large(data)

    def group(batch: dict[str, Any]) -> dict[str, Any]:
        return {"group": batch["key"] % 1000, "payload": batch["payload"]}

    yield
    counted = dataset.map_batches(group).groupby("group").count().take_all()
    assert sum(row["count()"] for row in counted) == count
    return size / 1e6


# -------------------------------------------------------------------- Ray Train


@row("train: two workers that report three times", "s")
def train_start(ray: Any) -> Work:
    """The second run of a trainer without a framework: the controller, the workers, their reports, the end."""
    train = importlib.import_module("ray.train")
    trainers = importlib.import_module("ray.train.v2.api.data_parallel_trainer")

    def loop() -> None:
        module = importlib.import_module("ray.train")
        for step in range(3):
            module.report({"step": step})

    with tempfile.TemporaryDirectory() as storage:

        def fit(name: str) -> None:
            config = train.RunConfig(name=name, storage_path=storage)
            scaling = train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5})
            trainers.DataParallelTrainer(loop, scaling_config=scaling, run_config=config).fit()

        fit("first")
        yield
        fit("second")
    return None


@row("train: two workers of PyTorch (gloo)", "s")
def train_torch(ray: Any) -> Work:
    """The second run of a `TorchTrainer`: workers that import PyTorch, a process group, one model made parallel."""
    torch_trainer, train = importlib.import_module("ray.train.torch"), importlib.import_module("ray.train")

    def loop() -> None:
        module, torch = importlib.import_module("ray.train"), importlib.import_module("torch")
        model = importlib.import_module("ray.train.torch").prepare_model(torch.nn.Linear(4, 1))
        model(torch.ones(2, 4)).sum().backward()
        assert torch.distributed.get_world_size() == 2
        module.report({})

    with tempfile.TemporaryDirectory() as storage:

        def fit(name: str) -> None:
            config = train.RunConfig(name=name, storage_path=storage)
            scaling = train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5})
            torch_trainer.TorchTrainer(loop, scaling_config=scaling, run_config=config).fit()

        fit("first")
        yield
        fit("second")
    return None


# --------------------------------------------------------------------- Ray Tune


@row("tune: 200 trials that do nothing", "/s")
def tune_trials(ray: Any) -> Work:
    """Trials of half a CPU that report once, after two that import Ray Tune."""
    tune = importlib.import_module("ray.tune")

    def objective(config: dict[str, Any]) -> None:
        importlib.import_module("ray.tune").report({"score": config["x"]})

    with tempfile.TemporaryDirectory() as storage:

        def fit(name: str, count: int) -> None:
            tuner = tune.Tuner(
                tune.with_resources(objective, {"CPU": 0.5}),
                param_space={"x": tune.grid_search(list(range(count)))},
                run_config=tune.RunConfig(name=name, storage_path=storage, verbose=0),
            )
            assert sum(result.metrics["score"] for result in tuner.fit()) == count * (count - 1) // 2

        fit("first", 2)
        yield
        fit("second", 200)
    return 200


# ------------------------------------------------------------------------ RLlib


@row("rllib: PPO on CartPole, environment steps", "/s")
def rllib_ppo(ray: Any) -> Work:
    """Two actors play, the driver learns; after one iteration."""
    ppo = importlib.import_module("ray.rllib.algorithms.ppo")
    batch, iterations = 2000, 10
    algorithm = (
        ppo.PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=4, num_cpus_per_env_runner=0.5)
        .training(train_batch_size_per_learner=batch, minibatch_size=250, num_epochs=4)
        .debugging(seed=1)
        .build_algo()
    )
    algorithm.train()
    yield
    for _ in range(iterations):
        algorithm.train()
    # No `algorithm.stop()`: it waits up to 0.7 s for a thread of Tune's that sleeps, on either engine.
    return batch * iterations


# -------------------------------------------------------------------- Ray Serve


def echo() -> Any:
    """An application of one deployment that does nothing."""
    serve = importlib.import_module("ray.serve")

    async def answer(request: Any) -> str:
        return "ok"

    return serve.deployment(num_replicas=1, max_ongoing_requests=100, ray_actor_options={"num_cpus": 0})(answer).bind()


@row("serve: run() of one replica", "s")
def serve_start(ray: Any) -> Work:
    """From nothing to the first answer: controller, proxy, replica."""
    serve = importlib.import_module("ray.serve")
    yield
    assert serve.run(echo(), name="echo", route_prefix=None).remote(None).result(timeout_s=120) == "ok"
    return None


@row("serve: calls of a handle, 50 at once", "/s")
def serve_handle(ray: Any) -> Work:
    """From the driver, to one replica."""
    serve = importlib.import_module("ray.serve")
    handle = serve.run(echo(), name="echo", route_prefix=None)
    count, at_once = 2000, 50

    def rounds(calls: int) -> None:
        for _ in range(calls // at_once):
            for response in [handle.remote(None) for _ in range(at_once)]:
                assert response.result(timeout_s=60) == "ok"

    rounds(200)
    yield
    rounds(count)
    return count


@row("serve: p99 of one call of a handle at a time", "ms")
def serve_latency(ray: Any) -> Work:
    """From the driver, to one replica."""
    handle = importlib.import_module("ray.serve").run(echo(), name="echo", route_prefix=None)

    def call() -> float:
        started = time.perf_counter()
        assert handle.remote(None).result(timeout_s=60) == "ok"
        return (time.perf_counter() - started) * 1e3

    for _ in range(100):
        call()
    yield
    return float(np.percentile([call() for _ in range(1000)], 99))


def _over_http(ray: Any, clients: int, requests: int) -> Generator[None, None, list[float]]:
    """Requests through the proxy of this node, on connections that stay open. Gives the milliseconds of each."""
    serve, http = importlib.import_module("ray.serve"), importlib.import_module("http.client")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"port": port})
    serve.run(echo(), name="echo", route_prefix="/")

    def client(count: int) -> list[float]:
        connection, took = http.HTTPConnection("127.0.0.1", port, timeout=60), []
        for _ in range(count):
            started = time.perf_counter()
            connection.request("GET", "/")
            assert connection.getresponse().read() == b"ok"
            took.append((time.perf_counter() - started) * 1e3)
        return took

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, [20] * clients))
        yield
        return [each for client_s in pool.map(client, [requests] * clients) for each in client_s]


@row("serve: requests over HTTP, 8 at once", "/s")
def serve_http(ray: Any) -> Work:
    """Of eight clients."""
    return len((yield from _over_http(ray, 8, 200)))


@row("serve: p99 of one request over HTTP at a time", "ms")
def serve_http_latency(ray: Any) -> Work:
    """Of one client."""
    return float(np.percentile((yield from _over_http(ray, 1, 1000)), 99))


# ------------------------------------------------------------- compiled graphs


@row("graphs: executions of two actors in a row, one at a time", "/s")
def graph_hops(ray: Any) -> Work:
    """Three hops each: from the driver to an actor, to another one, and back."""

    @ray.remote(num_cpus=0)
    class Same:
        def value(self, value: bytes) -> bytes:
            return value

    actors = [Same.remote(), Same.remote()]
    with importlib.import_module("ray.dag").InputNode() as value:
        node = value
        for actor in actors:
            node = actor.value.bind(node)
    graph, count = node.experimental_compile(), 2000

    def run(times: int) -> None:
        for _ in range(times):
            assert ray.get(graph.execute(b"ok"), timeout=60) == b"ok"

    run(100)
    yield
    run(count)
    graph.teardown()
    return count
