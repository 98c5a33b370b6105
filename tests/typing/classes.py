"""What the plugin makes of actor classes: lines of which mypy complains with it only (`# plugin: <code>`), without it
only (`# plain: <code>`), or in both cases (`# error: <code>`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from typing_extensions import assert_type

import hpcray as ray
from hpcray import ActorHandle, ObjectRef, ObjectRefGenerator
from hpcray.actor import ActorProxy

T = TypeVar("T")


@ray.remote
class Counter:
    """Its methods are plain ones, but for one."""

    def __init__(self, start: int, name: str = "") -> None:
        self.value = start

    def add(self, amount: int, *more: int, times: int = 1) -> int:
        return self.value + self.marked(amount)

    @ray.method
    def marked(self, amount: int) -> int:
        return amount

    async def later(self) -> str:
        return ""

    def items(self) -> Iterator[int]:
        yield 1

    async def async_items(self) -> AsyncIterator[str]:
        yield ""

    @staticmethod
    def of_none(text: str) -> bytes:
        return text.encode()

    @classmethod
    def of_class(cls, text: str) -> bytes:
        return text.encode()

    def itself(self) -> ActorHandle[Counter]:
        return ray.get_actor("me")


def with_decorator() -> None:
    counter = Counter.remote(1)  # plain: attr-defined
    assert_type(counter, ActorHandle[Counter])  # plain: assert-type
    assert_type(counter.add.remote(1, 2, times=3), ObjectRef[int])  # plain: assert-type
    assert_type(ray.get(counter.add.remote(1)), int)  # plain: assert-type
    assert_type(counter.add.options(name="x").remote(1), ObjectRef[int])  # plain: assert-type
    assert_type(counter.marked.remote(1), ObjectRef[int])  # plain: assert-type
    assert_type(counter.later.remote(), ObjectRef[str])  # plain: assert-type
    assert_type(counter.items.remote(), ObjectRefGenerator[int])  # plain: assert-type
    assert_type(counter.async_items.remote(), ObjectRefGenerator[str])  # plain: assert-type
    assert_type(counter.of_none.remote(""), ObjectRef[bytes])  # plain: assert-type
    assert_type(counter.of_class.remote(""), ObjectRef[bytes])  # plain: assert-type
    assert_type(ray.get(counter.itself.remote()), ActorHandle[Counter])  # plain: assert-type
    counter.add.remote(counter.marked.remote(1), ray.put(2), times=ray.put(3))
    ray.get(counter.__ray_ready__.remote())
    ray.kill(counter)
    Counter.options(name="c").remote(1, name=ray.put(""))  # plain: attr-defined
    counter.add.remote("x")  # plugin: call-overload
    counter.add.remote(counter.later.remote())  # plugin: arg-type
    counter.add(1)  # plugin: operator
    counter.missing.remote()  # plugin: attr-defined
    print(counter.value)  # plugin: attr-defined
    number: str = ray.get(counter.add.remote(1))  # plugin: assignment
    print(number)


def constructors() -> None:
    Counter.remote("x")  # error: plugin arg-type, plain attr-defined
    Counter.remote(1, 2)  # error: plugin arg-type, plain attr-defined
    Counter.options(name="c").remote()  # error: plugin call-arg, plain attr-defined
    Counter(1)  # plugin: call-arg
    ray.remote(Data).remote(1, b="x")
    ray.remote(Data).remote()  # plugin: call-arg


class Derived(Counter):  # plugin: misc
    pass


@dataclass
class Data:
    a: int
    b: str = ""

    def sum(self) -> int:
        return self.a


class Box(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value

    def get(self) -> T:
        return self.value


class Numbers(Box[int]):
    @ray.method
    def marked(self) -> int:
        return self.value


def plain_classes(data: ActorProxy[Data], box: ActorHandle[Box[str]]) -> None:
    numbers = ray.remote(Numbers).remote(1)
    assert_type(numbers.get.remote(), ObjectRef[int])  # error: plain attr-defined, plain assert-type
    assert_type(numbers.marked.remote(), ObjectRef[int])
    assert_type(data.sum.remote(), ObjectRef[int])  # error: plain attr-defined, plain assert-type
    assert_type(box.get.remote(), ObjectRef[str])  # plain: assert-type
    handle: ActorHandle[Data] = ray.remote(Data).remote(1)  # plain: assignment
    untyped: ActorHandle = handle
    untyped.anything.remote(1, 2, x=3)


@ray.remote
def length(words: list[str], factor: float = 1) -> float:
    return len(words) * factor


def references() -> None:
    words = ray.put(["a"])
    assert_type(length.remote(words, length.remote(words)), ObjectRef[float])
    length.remote(words, factor=ray.put(2.0))
    length.remote(ray.put(1.5))  # plugin: arg-type
    length.remote([], words)  # plugin: arg-type
    length([])  # error: operator
