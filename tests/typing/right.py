"""What a type checker accepts, and what it infers."""

from __future__ import annotations

from collections.abc import Generator

from typing_extensions import assert_type

import hpcray as ray
from hpcray import ObjectRef, ObjectRefGenerator
from hpcray.actor import ActorProxy


@ray.remote
def add(a: int, b: int = 1) -> int:
    return a + b


@ray.remote(num_cpus=2, max_retries=0)
def join(words: list[str], *more: str, sep: str = " ") -> str:
    return sep.join([*words, *more])


@ray.remote
def count(n: int) -> Generator[int, None, None]:
    yield from range(n)


@ray.remote(num_returns=2)
def pair() -> tuple[int, str]:
    return 1, "a"


def tasks() -> None:
    ref = add.remote(1, 2)
    assert_type(ref, ObjectRef[int])
    assert_type(ray.get(ref), int)
    assert_type(ray.get([ref, add.remote(1)]), list[int])
    assert_type(add.remote(ref), ObjectRef[int])
    assert_type(add.remote(ref, ref), ObjectRef[int])
    assert_type(add.remote(1, ref), ObjectRef[int])
    assert_type(add.remote(a=1, b=2), ObjectRef[int])
    assert_type(add.options(num_cpus=2).remote(1), ObjectRef[int])
    assert_type(join.remote(["a"], "b", sep="-"), ObjectRef[str])
    assert_type(ray.put("text"), ObjectRef[str])
    assert_type(ray.wait([ref]), tuple[list[ObjectRef[int]], list[ObjectRef[int]]])
    assert_type(count.remote(3), ObjectRefGenerator[int])
    assert_type(count.remote(ray.put(3)), ObjectRefGenerator[int])
    assert_type(count.options(num_cpus=2).remote(3), ObjectRefGenerator[int])
    for item in count.remote(3):
        assert_type(ray.get(item), int)
    one, two = pair.remote()
    ray.get([one, two])


class Counter:
    """Its methods know how they are called."""

    def __init__(self, start: int = 0) -> None:
        self.value = start

    @ray.method
    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    @ray.method(num_returns=1, max_task_retries=2)
    def name(self) -> str:
        assert_type(self.add(1), int)
        return f"counter {self.value}"

    @ray.method
    async def later(self, seconds: float) -> float:
        return seconds

    @ray.method
    def items(self, n: int) -> Generator[str, None, None]:
        yield from map(str, range(n))

    @ray.method(num_returns=2)
    def pair(self) -> tuple[int, str]:
        return self.value, self.name()


def actors() -> None:
    cls = ray.remote(Counter)
    assert_type(cls, ray.ActorClass[Counter])
    counter = cls.remote(1)
    assert_type(counter, ActorProxy[Counter])
    assert_type(counter.add.remote(1), ObjectRef[int])
    assert_type(ray.get(counter.add.remote(1)), int)
    assert_type(counter.add.remote(ray.put(1)), ObjectRef[int])
    assert_type(counter.add.options(concurrency_group="io").remote(1), ObjectRef[int])
    assert_type(ray.get(counter.name.remote()), str)
    assert_type(ray.get([counter.name.remote()]), list[str])
    assert_type(ray.get(counter.later.remote(0.5)), float)
    assert_type(counter.items.remote(3), ObjectRefGenerator[str])
    one, two = counter.pair.remote()
    assert_type(cls.options(name="c").remote(1), ActorProxy[Counter])
    assert_type(ray.remote(num_cpus=1)(Counter).remote(1), ActorProxy[Counter])
    untyped: ray.ActorHandle = ray.get_actor("c")
    ray.get([one, two, untyped.add.remote(1)])
    ray.kill(counter)
    ray.kill(untyped)


def covariant(ref: ObjectRef[bool]) -> ObjectRef[int]:
    return ref


async def waiting(counter: ActorProxy[Counter]) -> None:
    assert_type(await add.remote(1), int)
    assert_type(await counter.later.remote(1), float)
    async for ref in counter.items.remote(2):
        assert_type(await ref, str)
