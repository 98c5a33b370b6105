"""Graphs and compiled graphs, as Ray's guides show them first. The same tests run on Ray itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

REAL = os.environ.get("HPCRAY_TEST_ENGINE") == "ray"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Worker:
    """An actor of the guides."""

    def __init__(self, start: int = 0) -> None:
        self.total = start

    def echo(self, value: Any) -> Any:
        return value

    def add(self, value: int) -> int:
        self.total += value
        return self.total

    def join(self, first: Any, second: Any) -> Any:
        return first, second

    def fail(self, value: Any) -> Any:
        raise ValueError(f"no {value}")

    def fail_if_odd(self, value: int) -> int:
        return self.fail(value) if value % 2 else value

    def exit(self, value: Any) -> Any:
        os._exit(1)

    def tensor(self, size: int) -> Any:
        import torch

        return torch.arange(size, dtype=torch.float32)

    def scaled(self, size: int, factor: int) -> Any:
        import torch

        return torch.arange(1, size + 1, dtype=torch.float64) * factor

    def listed(self, tensor: Any) -> list[float]:
        return tensor.tolist()

    def mean(self, tensor: Any) -> tuple[str, float]:
        return str(tensor.device), float(tensor.mean())


@pytest.fixture
def actors(ray: Any) -> Iterator[Callable[..., list[Any]]]:
    """Makes actors, which end with the test."""
    made: list[Any] = []

    def make(count: int) -> list[Any]:
        found = [ray.remote(Worker).options(num_cpus=0).remote() for _ in range(count)]
        made.extend(found)
        return found

    yield make
    for actor in made:
        ray.kill(actor)


def test_tasks_and_actors_are_bound_and_executed_later(ray: Any) -> None:
    from ray.dag import InputNode, MultiOutputNode

    @ray.remote
    def plus(first: int, second: int = 0) -> int:
        return first + second

    with InputNode() as given:
        counter = ray.remote(Worker).options(num_cpus=0).bind(10)
        shared = plus.bind(given[0], second=given.key)
        dag = plus.bind(counter.add.bind(shared), shared)
        both = MultiOutputNode([shared, dag])
    assert ray.get(dag.execute(1, key=2)) == 16
    assert ray.get(both.execute(3, key=4)) == [7, 24]
    with pytest.raises(AttributeError, match=r"\.bind\(\) cannot be used again"):
        shared.bind(1)


def test_hello_world_and_data_dependencies(ray: Any, actors: Callable[..., list[Any]]) -> None:
    from ray.dag import InputNode, MultiOutputNode

    sender, other, receiver = actors(3)
    with InputNode() as given:
        dag = receiver.join.bind(sender.echo.bind(given[0]), other.echo.bind(given.word))
        graph = MultiOutputNode([dag, sender.add.bind(given[0])]).experimental_compile()
    try:
        pending = [graph.execute(number, word=str(number)) for number in range(4)]
        found = [ray.get(refs) for refs in pending]
    finally:
        graph.teardown()
    assert found == [[(0, "0"), 0], [(1, "1"), 1], [(2, "2"), 3], [(3, "3"), 6]]
    assert ray.get(sender.add.remote(0)) == 6, "the actors are there for other calls"
    with pytest.raises(ray.exceptions.RayChannelError, match="Channel closed"):
        graph.execute(1, word="1")
    with InputNode() as given:
        again = sender.echo.bind(given).experimental_compile()
    assert ray.get(again.execute("hello")) == "hello"
    again.teardown()


def test_exceptions_and_deaths(ray: Any, actors: Callable[..., list[Any]]) -> None:
    from ray.dag import InputNode

    first, second, third = actors(3)
    with InputNode() as given:
        graph = second.echo.bind(first.fail.bind(given)).experimental_compile()
    for number in range(2):
        with pytest.raises(ValueError, match=f"no {number}") as caught:
            ray.get(graph.execute(number))
        assert isinstance(caught.value, ray.exceptions.RayTaskError)
        assert isinstance(caught.value.cause, ValueError)
    graph.teardown()
    with InputNode() as given:
        graph = second.echo.bind(third.exit.bind(given)).experimental_compile()
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(graph.execute(1))
    with pytest.raises(ray.exceptions.RayChannelError, match="Channel closed"):
        graph.execute(1)
    assert ray.get(second.echo.remote("lives")) == "lives"


def test_asyncio(ray: Any, actors: Callable[..., list[Any]]) -> None:
    from ray.dag import InputNode, MultiOutputNode

    good, bad = actors(2)

    async def main() -> list[Any]:
        with InputNode() as given:
            nodes = MultiOutputNode([good.echo.bind(given), bad.fail_if_odd.bind(given)])
            graph = nodes.experimental_compile(enable_asyncio=True)
        try:

            async def one(number: int) -> Any:
                outputs = await graph.execute_async(number)
                if number % 2:
                    for output in outputs:
                        with pytest.raises(ValueError, match=f"no {number}"):
                            await output
                    return None
                return [await output for output in outputs]

            return [await one(0), *await asyncio.gather(*(one(number) for number in range(1, 5)))]
        finally:
            graph.teardown()

    assert asyncio.run(main()) == [[0, 0], None, [2, 2], None, [4, 4]], "all outputs of an execution are its error"


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_tensors_without_gpus(ray: Any, actors: Callable[..., list[Any]], transport: str) -> None:
    pytest.importorskip("torch")
    from ray.dag import InputNode

    sender, receiver = actors(2)
    with InputNode() as given:
        graph = receiver.mean.bind(sender.tensor.bind(given).with_tensor_transport(transport)).experimental_compile()
    try:
        # The actors import PyTorch first.
        assert [ray.get(graph.execute(size), timeout=120) for size in (3, 5)] == [("cpu", 1.0), ("cpu", 2.0)]
    finally:
        graph.teardown()
    with pytest.raises(ValueError, match="Invalid device 'tpu'"), InputNode() as given:
        sender.tensor.bind(given).with_tensor_transport(transport, device="tpu")


def test_an_actor_in_two_graphs(ray: Any, actors: Callable[..., list[Any]]) -> None:
    from ray.dag import InputNode

    one, other = actors(2)
    with InputNode() as given:
        first = other.echo.bind(one.add.bind(given)).experimental_compile()
    with InputNode() as given:
        second = one.add.bind(other.echo.bind(given)).experimental_compile()
    try:
        if REAL:  # the second one waits for the first one's end
            with pytest.raises(ray.exceptions.RayChannelTimeoutError):
                ray.get(second.execute(1), timeout=2)
        else:
            found = []
            for _ in range(50):
                pending = [first.execute(1), second.execute(1)]
                found += ray.get(pending)
            assert sorted(found) == list(range(1, 101))
    finally:
        first.teardown()
        second.teardown()


@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MAX", "MIN", "AVG"])
def test_reductions_of_tensors(ray: Any, actors: Callable[..., list[Any]], op: str) -> None:
    torch = pytest.importorskip("torch")
    if REAL and op in ("MAX", "MIN"):
        pytest.skip("Ray's CPUCommunicator does not import PyTorch, and hangs")
    from ray.dag import InputNode, MultiOutputNode
    from ray.experimental.channel.cpu_communicator import CPUCommunicator
    from ray.experimental.collective import allreduce
    from ray.experimental.util.types import ReduceOp

    workers = actors(3)
    with InputNode() as given:
        tensors = [worker.scaled.bind(given, factor) for factor, worker in enumerate(workers, 2)]
        reduced = allreduce.bind(tensors, ReduceOp[op], transport=CPUCommunicator(3, workers))
        lists = [worker.listed.bind(tensor) for worker, tensor in zip(workers, reduced, strict=True)]
        graph = MultiOutputNode(lists).experimental_compile()
    try:
        all_of = torch.stack([torch.arange(1, 5, dtype=torch.float64) * factor for factor in (2, 3, 4)])
        expected = {
            "SUM": all_of.sum(0), "PRODUCT": all_of.prod(0), "MAX": all_of.amax(0), "MIN": all_of.amin(0),
            "AVG": all_of.mean(0),
        }[op].tolist()  # fmt: skip
        for _ in range(3):
            assert ray.get(graph.execute(4), timeout=120) == [expected] * 3
    finally:
        graph.teardown()


def test_what_a_collective_operation_refuses(ray: Any, actors: Callable[..., list[Any]]) -> None:
    pytest.importorskip("torch")
    from ray.dag import InputNode, MultiOutputNode
    from ray.experimental.channel.cpu_communicator import CPUCommunicator
    from ray.experimental.collective import allgather, allreduce

    one, other, third = actors(3)
    with InputNode() as given:
        nodes = [worker.scaled.bind(given, 1) for worker in (one, other)]
        for wrong, text in (
            ([], "non-empty|list index"),
            ([nodes[0], one.echo.bind(given)], "unique actor handles"),
            ([nodes[0], nodes[0]], "unique input nodes"),
            ([nodes[0], 1], "to be DAGNode"),
            ([nodes, [one.echo.bind(given)]], "same number of nodes"),
            ([nodes, [other.echo.bind(given), one.echo.bind(given)]], "same order"),
        ):
            with pytest.raises((ValueError, IndexError), match=text):
                allreduce.bind(wrong)
        with pytest.raises(ValueError, match="Unexpected operation"):
            allreduce.bind(nodes, "sum")
        with pytest.raises(ValueError, match="only supported for allreduce"):
            allgather.bind([nodes])
        with pytest.raises(ValueError, match="match the custom communicator group"):
            allreduce.bind(nodes, transport=CPUCommunicator(2, [one, third]))
    with InputNode() as given:
        texts = [worker.echo.bind(given) for worker in (one, other)]
        reduced = allreduce.bind(texts, transport=CPUCommunicator(2, [one, other]))
        graph = MultiOutputNode(reduced).experimental_compile()
    try:
        with pytest.raises(ValueError, match="Expected a torch tensor"):
            ray.get(graph.execute("text"), timeout=120)
    finally:
        graph.teardown()


@pytest.mark.skipif(REAL, reason="Ray has these on GPUs alone")
def test_collective_operations_without_a_communicator(ray: Any, actors: Callable[..., list[Any]]) -> None:
    pytest.importorskip("torch")
    from ray.dag import InputNode, MultiOutputNode
    from ray.experimental.collective import allgather, allreduce, reducescatter

    workers = actors(2)
    with InputNode() as given:
        tensors = [worker.scaled.bind(given, factor) for factor, worker in enumerate(workers, 1)]
        more = [worker.scaled.bind(given, 10 * factor) for factor, worker in enumerate(workers, 1)]
        found = []
        for operation in (allgather, reducescatter):
            found += [worker.listed.bind(node) for worker, node in zip(workers, operation.bind(tensors), strict=True)]
        for worker, (first, second) in zip(workers, allreduce.bind([tensors, more]), strict=True):
            found += [worker.listed.bind(first), worker.listed.bind(second)]
        graph = MultiOutputNode(found).experimental_compile()
    try:
        both = [1.0, 2.0, 2.0, 4.0]
        for _ in range(3):
            assert ray.get(graph.execute(2), timeout=120) == [both, both, [3.0], [6.0], *[[3.0, 6.0], [30.0, 60.0]] * 2]
        with pytest.raises(ValueError, match="divisible by the world size 2"):
            ray.get(graph.execute(3)[2])
    finally:
        graph.teardown()


def test_limits(ray: Any, actors: Callable[..., list[Any]]) -> None:
    from ray.dag import InputNode

    (actor,) = actors(1)
    with InputNode() as given:
        graph = actor.echo.bind(given).experimental_compile(_max_inflight_executions=2, _max_buffered_results=1)
    try:
        first, second = graph.execute(1), graph.execute(2)
        with pytest.raises(ray.exceptions.RayCgraphCapacityExceeded, match="more than 2 in-flight executions"):
            graph.execute(3)
        assert ray.get([first, second]) == [1, 2]
        with pytest.raises(ValueError, match="once"):
            ray.get(first)
        with pytest.raises(TypeError, match=r"wait\(\) expected a list of ray\.ObjectRef"):
            ray.wait([graph.execute(3)])
    finally:
        graph.teardown()
    with InputNode() as given, pytest.raises(NotImplementedError, match="only support actor method nodes"):
        ray.remote(lambda value: value).bind(given).experimental_compile()
