"""What a type checker refuses: every line that ends in `# error: <code>` and no other."""

from __future__ import annotations

import hpcray as ray
from hpcray import ObjectRef
from hpcray.actor import ActorProxy


@ray.remote
def add(a: int, b: int = 1) -> int:
    return a + b


class Base:
    @ray.method
    def typed(self, amount: int) -> str:
        return str(amount)

    @ray.method
    async def later(self, seconds: float) -> float:
        return seconds


def wrong() -> None:
    add.remote("x")  # error: call-overload
    add.remote()  # error: call-overload
    add.remote(1, 2, 3)  # error: call-overload
    add.remote(1, c=2)  # error: call-overload
    text: str = ray.get(add.remote(1))  # error: assignment
    ref: ObjectRef[str] = add.remote(1)  # error: assignment
    words: list[str] = ray.get([add.remote(1)])  # error: list-item
    proxy: ActorProxy[Base] = ray.remote(Base).remote()
    proxy.typed.remote("x")  # error: call-overload
    proxy.typed.remote()  # error: call-overload
    number: int = ray.get(proxy.typed.remote(1))  # error: assignment
    proxy.later.remote("x")  # error: call-overload
    proxy.missing.remote()  # error: attr-defined
    add(1)  # error: operator
    proxy.typed(1)  # error: operator
    ray.remote(Base)()  # error: operator
    print(text, ref, words, number)
