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
    for item in count.remote(3):
        assert_type(ray.get(item), int)
    one, two = pair.remote()
    ray.get([one, two])


class Counter:
    """Its methods are plain ones."""

    def __init__(self, start: int) -> None:
        self.value = start

    def plain(self) -> int:
        return self.value


class Typed:
    """Its methods know how they are called."""

    def __init__(self) -> None:
        self.value = 0

    @ray.method
    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    @ray.method(num_returns=1)
    def name(self) -> str:
        assert_type(self.add(1), int)
        return f"counter {self.value}"

    @ray.method
    async def later(self, seconds: float) -> float:
        return seconds


def actors() -> None:
    cls = ray.remote(Counter)
    assert_type(cls, ray.ActorClass[Counter])
    counter = cls.remote(1)
    ray.get(counter.plain.remote())
    handle: ray.ActorHandle = cls.options(name="c").remote(1)
    ray.get(handle.plain.remote())
    proxy: ActorProxy[Typed] = ray.remote(Typed).remote()
    assert_type(proxy.add.remote(1), ObjectRef[int])
    assert_type(ray.get(proxy.add.remote(1)), int)
    assert_type(ray.get(proxy.name.remote()), str)
    assert_type(ray.get(proxy.later.remote(0.5)), float)
    ray.kill(handle)


async def waiting() -> None:
    assert_type(await add.remote(1), int)
