"""The rows of the micro benchmark: those of `ray microbenchmark` and a few more, for any engine with Ray's API.

A row is a generator: it sets up, yields the function to time, and cleans up. The function returns None, or the seconds
that count when only a part of it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Timed = Callable[[], float | None]
MB = 1 << 20

LATENCY = "us"  # median of single calls, less is better
RATE = "/s"  # operations a second
BANDWIDTH = "GB/s"
BATCH = 1000
GROUPS = 100


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: as in Ray's benchmark where it is the same thing.
        unit: LATENCY, RATE or BANDWIDTH.
        amount: operations, or gigabytes, in one call of the function.
        body: sets up, yields the function, cleans up.
    """

    name: str
    unit: str
    amount: float
    body: Callable[[], Iterator[Timed]]

    def prepared(self) -> contextlib.AbstractContextManager[Timed]:
        return contextlib.contextmanager(self.body)()


def all_rows(ray: Any, clients: int, big: int, other_node: str | None) -> list[Row]:
    """Every row for one engine.

    Args:
        ray: the engine's module, initialized.
        clients: number of clients, and of servers, in the rows that have several.
        big: bytes of the large object.
        other_node: id of a node that is not the driver's, or None: the rows across nodes are left out.
    """
    rows: list[Row] = []

    def row(name: str, unit: str, amount: float = 1) -> Callable[[Callable[[], Iterator[Timed]]], None]:
        return lambda body: rows.append(Row(name, unit, amount, body))

    @ray.remote
    def small_value() -> bytes:
        return b"ok"

    @ray.remote
    def put_small(count: int) -> None:
        for _ in range(count):
            ray.put(0)

    @ray.remote
    def put_large(count: int, size: int) -> None:
        array = np.zeros(size, dtype=np.uint8)
        for _ in range(count):
            ray.put(array)

    kept: dict[int, Any] = {}  # in each worker: memory that was written before

    @ray.remote
    def copy_large(count: int, size: int) -> None:
        source = np.zeros(size, dtype=np.uint8)
        target = kept.get(size)
        if target is None:
            target = kept[size] = np.ones(size, dtype=np.uint8)
        for _ in range(count):
            np.copyto(target, source)

    @ray.remote
    def many_refs(count: int) -> list[Any]:
        return [ray.put(1) for _ in range(count)]

    @ray.remote(num_cpus=0)
    class Actor:
        def small_value(self) -> bytes:
            return b"ok"

        def small_value_arg(self, x: object) -> bytes:
            return b"ok"

        def small_value_batch(self, count: int) -> None:
            ray.get([small_value.remote() for _ in range(count)])

        def same(self, x: object) -> object:
            return x

    @ray.remote(num_cpus=0)
    class AsyncActor:
        async def small_value(self) -> bytes:
            await asyncio.sleep(0)
            return b"ok"

        async def small_value_arg(self, x: object) -> bytes:
            return b"ok"

    @ray.remote(num_cpus=0)
    class Client:
        def __init__(self, servers: list[Any]) -> None:
            self.servers = servers

        def batch(self, count: int) -> None:
            ray.get([server.small_value.remote() for server in self.servers for _ in range(count)])

        def batch_arg(self, count: int) -> None:
            x = ray.put(0)
            ray.get([server.small_value_arg.remote(x) for server in self.servers for _ in range(count)])

    @contextlib.contextmanager
    def actors(cls: Any, count: int, *args: object, **options: object) -> Iterator[list[Any]]:
        made = [(cls.options(**options) if options else cls).remote(*args) for _ in range(count)]
        try:
            yield made
        finally:
            for actor in made:
                ray.kill(actor)

    # ------------------------------------------------------------ objects

    @row("single client get calls", RATE, 100)
    def _() -> Iterator[Timed]:
        ref = ray.put(0)

        def call() -> None:
            for _ in range(100):
                ray.get(ref)

        yield call

    @row("single client put calls", RATE, 100)
    def _() -> Iterator[Timed]:
        def call() -> None:
            for _ in range(100):
                ray.put(0)

        yield call

    @row("multi client put calls", RATE, clients * BATCH)
    def _() -> Iterator[Timed]:
        yield lambda: ray.get([put_small.remote(BATCH) for _ in range(clients)]) and None

    @row("single client put gigabytes", BANDWIDTH, big / 1e9)
    def _() -> Iterator[Timed]:
        array = np.ones(big, dtype=np.uint8)

        def call() -> None:
            ray.put(array)

        yield call

    @row("(warm memcpy of the same size)", BANDWIDTH, big / 1e9)
    def _() -> Iterator[Timed]:
        source, target = np.ones(big, dtype=np.uint8), np.ones(big, dtype=np.uint8)
        yield lambda: np.copyto(target, source)

    @row("multi client put gigabytes", BANDWIDTH, clients * 10 * (big // 10) / 1e9)
    def _() -> Iterator[Timed]:
        yield lambda: ray.get([put_large.remote(10, big // 10) for _ in range(clients)]) and None

    @row("(warm memcpy by as many clients)", BANDWIDTH, clients * 10 * (big // 10) / 1e9)
    def _() -> Iterator[Timed]:
        yield lambda: ray.get([copy_large.remote(10, big // 10) for _ in range(clients)]) and None

    @row("single client get 100 MB", RATE)
    def _() -> Iterator[Timed]:
        ref = ray.put(np.ones(min(100 * MB, big), dtype=np.uint8))

        def call() -> None:
            ray.get(ref)

        yield call

    @row("single client get object containing 10k refs", RATE)
    def _() -> Iterator[Timed]:
        ref = many_refs.remote(10_000)

        def call() -> None:
            ray.get(ref)

        yield call

    @row("single client wait 1k refs", RATE)
    def _() -> Iterator[Timed]:
        def call() -> None:
            waiting = [small_value.remote() for _ in range(1000)]
            fetch = True
            while waiting:
                _, waiting = ray.wait(waiting, fetch_local=fetch)
                fetch = False

        yield call

    # ------------------------------------------------------------ tasks

    @row("single client tasks sync", LATENCY)
    def _() -> Iterator[Timed]:
        yield lambda: ray.get(small_value.remote()) and None

    @row("single client tasks async", RATE, BATCH)
    def _() -> Iterator[Timed]:
        yield lambda: ray.get([small_value.remote() for _ in range(BATCH)]) and None

    @row("multi client tasks async", RATE, clients * BATCH)
    def _() -> Iterator[Timed]:
        with actors(Actor, clients) as made:
            yield lambda: ray.get([actor.small_value_batch.remote(BATCH) for actor in made]) and None

    # ------------------------------------------------------------ actors

    @row("1:1 actor calls sync", LATENCY)
    def _() -> Iterator[Timed]:
        with actors(Actor, 1) as (actor,):
            yield lambda: ray.get(actor.small_value.remote()) and None

    @row("1:1 actor calls async", RATE, BATCH)
    def _() -> Iterator[Timed]:
        with actors(Actor, 1) as (actor,):
            yield lambda: ray.get([actor.small_value.remote() for _ in range(BATCH)]) and None

    @row("1:1 actor calls concurrent", RATE, BATCH)
    def _() -> Iterator[Timed]:
        with actors(Actor, 1, max_concurrency=16) as (actor,):
            yield lambda: ray.get([actor.small_value.remote() for _ in range(BATCH)]) and None

    @row("1:n actor calls async", RATE, clients * BATCH)
    def _() -> Iterator[Timed]:
        with actors(Actor, clients) as servers, actors(Client, 1, servers) as (client,):
            yield lambda: ray.get(client.batch.remote(BATCH))

    @row("n:n actor calls async", RATE, clients * clients * BATCH)
    def _() -> Iterator[Timed]:
        with actors(Actor, clients) as servers, actors(Client, clients, servers) as callers:
            yield lambda: ray.get([client.batch.remote(BATCH) for client in callers]) and None

    @row("n:n actor calls with arg async", RATE, clients * clients * BATCH)
    def _() -> Iterator[Timed]:
        with actors(Actor, clients) as servers, actors(Client, clients, servers) as callers:
            yield lambda: ray.get([client.batch_arg.remote(BATCH) for client in callers]) and None

    @row("1:1 async-actor calls sync", LATENCY)
    def _() -> Iterator[Timed]:
        with actors(AsyncActor, 1) as (actor,):
            yield lambda: ray.get(actor.small_value.remote()) and None

    @row("1:1 async-actor calls async", RATE, BATCH)
    def _() -> Iterator[Timed]:
        with actors(AsyncActor, 1) as (actor,):
            yield lambda: ray.get([actor.small_value.remote() for _ in range(BATCH)]) and None

    @row("1:1 async-actor calls with args async", RATE, BATCH)
    def _() -> Iterator[Timed]:
        with actors(AsyncActor, 1) as (actor,):
            yield lambda: ray.get([actor.small_value_arg.remote(i) for i in range(BATCH)]) and None

    @row("n:n async-actor calls async", RATE, clients * clients * BATCH)
    def _() -> Iterator[Timed]:
        with actors(AsyncActor, clients) as servers, actors(Client, clients, servers) as callers:
            yield lambda: ray.get([client.batch.remote(BATCH) for client in callers]) and None

    # ------------------------------------------------------------ compiled graphs

    @contextlib.contextmanager
    def chain(count: int) -> Iterator[Any]:
        dag = importlib.import_module(f"{ray.__name__}.dag")
        with actors(Actor, count) as stages:
            with dag.InputNode() as value:
                node = value
                for stage in stages:
                    node = stage.same.bind(node)
            graph = node.experimental_compile()
            yield graph
            graph.teardown()

    @row("compiled graph, one actor", LATENCY)
    def _() -> Iterator[Timed]:
        with chain(1) as graph:
            yield lambda: ray.get(graph.execute(b"ok")) and None

    @row("compiled graph, chain of two actors", LATENCY)
    def _() -> Iterator[Timed]:
        with chain(2) as graph:
            yield lambda: ray.get(graph.execute(b"ok")) and None

    @row("compiled graph, executions in flight", RATE, BATCH)
    def _() -> Iterator[Timed]:
        with chain(2) as graph:

            def call() -> None:
                pending: list[Any] = []
                for _ in range(BATCH):
                    pending.append(graph.execute(b"ok"))
                    if len(pending) == 10:
                        ray.get(pending)
                        pending.clear()

            yield call

    @row("compiled graph, 100 MB there and back", BANDWIDTH, 0.2)
    def _() -> Iterator[Timed]:
        array = np.zeros(100_000_000, np.uint8)
        with chain(1) as graph:
            yield lambda: len(ray.get(graph.execute(array))) and None

    @row("placement group create/removal", RATE, GROUPS)
    def _() -> Iterator[Timed]:
        def call() -> None:
            groups = [ray.util.placement_group([{"CPU": 0.01}]) for _ in range(GROUPS)]
            for group in groups:
                group.wait(timeout_seconds=30)
            for group in groups:
                ray.util.remove_placement_group(group)

        yield call

    @row("actors created", RATE, 10)
    def _() -> Iterator[Timed]:
        def call() -> float:
            started = time.perf_counter()
            with actors(Actor, 10) as made:
                ray.get([actor.small_value.remote() for actor in made])
                return time.perf_counter() - started

        yield call

    if other_node is None:
        return rows

    # ------------------------------------------------------------ across nodes

    there = _pinned(ray, other_node)

    @row("cross-node tasks sync", LATENCY)
    def _() -> Iterator[Timed]:
        task = small_value.options(scheduling_strategy=there)
        yield lambda: ray.get(task.remote()) and None

    @row("cross-node tasks async", RATE, BATCH)
    def _() -> Iterator[Timed]:
        task = small_value.options(scheduling_strategy=there)
        yield lambda: ray.get([task.remote() for _ in range(BATCH)]) and None

    @row("pinned tasks sync, after a batch of others", LATENCY)
    def _() -> Iterator[Timed]:
        task = small_value.options(scheduling_strategy=_pinned(ray, ray.get_runtime_context().get_node_id()))
        ray.get([small_value.remote() for _ in range(BATCH)])
        yield lambda: ray.get(task.remote()) and None

    @row("cross-node actor calls sync", LATENCY)
    def _() -> Iterator[Timed]:
        with actors(Actor, 1, scheduling_strategy=there) as (actor,):
            yield lambda: ray.get(actor.small_value.remote()) and None

    @row("cross-node actor calls async", RATE, BATCH)
    def _() -> Iterator[Timed]:
        with actors(Actor, 1, scheduling_strategy=there) as (actor,):
            yield lambda: ray.get([actor.small_value.remote() for _ in range(BATCH)]) and None

    size = min(64 * MB, big // 4)

    @row(f"cross-node get of {size // MB} MB", BANDWIDTH, size / 1e9)
    def _() -> Iterator[Timed]:
        @ray.remote(scheduling_strategy=there)
        def produce() -> np.ndarray:
            return np.full(size, os.getpid() & 0xFF, dtype=np.uint8)

        def call() -> float:
            ref = produce.remote()
            ray.wait([ref], fetch_local=False)
            started = time.perf_counter()
            ray.get(ref)
            return time.perf_counter() - started

        yield call

    return rows


def _pinned(ray: Any, node: str) -> Any:
    from importlib import import_module

    module = import_module(f"{ray.__name__}.util.scheduling_strategies")
    return module.NodeAffinitySchedulingStrategy(node, soft=False)
