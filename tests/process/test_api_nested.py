"""Tasks that start tasks: deeper and wider than there are CPUs."""

from __future__ import annotations

import asyncio
import time

import pytest
from engine import eventually, exceptions, ray

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 2}


@ray.remote
def fib(n):
    return n if n < 2 else sum(ray.get([fib.remote(n - 1), fib.remote(n - 2)]))


@ray.remote
def chain(n):
    return 0 if n == 0 else ray.get(chain.remote(n - 1)) + 1


@ray.remote
def leaf(x, delay=0.0):
    time.sleep(delay)
    return x


def test_a_tree_deeper_than_the_cpus():
    assert ray.get(fib.remote(8)) == 21


def test_a_chain_deeper_than_the_cpus():
    assert ray.get(chain.remote(20)) == 20


def test_several_trees_at_once():
    assert ray.get([fib.remote(5) for _ in range(3)]) == [5] * 3


def test_as_many_parents_as_cpus_wait_for_children():
    @ray.remote
    def parent(i):
        return sum(ray.get([leaf.remote(j, 0.02) for j in range(i, i + 5)]))

    assert ray.get([parent.remote(i) for i in range(8)]) == [5 * i + 10 for i in range(8)]


def test_wait_in_a_parent_gives_its_cpu_back():
    @ray.remote
    def parent():
        pending, done = [leaf.remote(i, 0.02) for i in range(4)], 0
        while pending:
            ready, pending = ray.wait(pending)
            done += len(ready)
        return done

    assert ray.get([parent.remote() for _ in range(4)]) == [4] * 4


def test_parents_that_ask_for_every_cpu():
    @ray.remote(num_cpus=2)
    def whole(depth):
        return "bottom" if depth == 0 else ray.get(whole.remote(depth - 1))

    assert ray.get(whole.remote(3)) == "bottom"


def test_a_parent_that_waits_for_its_siblings_child():
    @ray.remote
    def submit():
        return [leaf.remote("child", 0.1)]

    @ray.remote
    def wait_for(box):
        return ray.get(box[0])

    assert ray.get([wait_for.remote(submit.remote()) for _ in range(4)]) == ["child"] * 4


def test_children_go_on_without_their_parent():
    @ray.remote
    class Sink:
        def __init__(self):
            self.got = []

        def add(self, x):
            self.got.append(x)

        def read(self):
            return self.got

    @ray.remote
    def child(sink, x):
        time.sleep(0.2)
        ray.get(sink.add.remote(x))

    @ray.remote
    def parent(sink):
        for i in range(3):
            child.remote(sink, i)

    sink = Sink.remote()
    ray.get(parent.remote(sink))
    eventually(lambda: sorted(ray.get(sink.read.remote())) == [0, 1, 2])


def test_an_actor_that_starts_tasks_and_actors():
    @ray.remote
    class Boss:
        def __init__(self, depth):
            self.below = Boss_.remote(depth - 1) if depth else None

        def work(self, x):
            x = ray.get(leaf.remote(x + 1))
            return ray.get(self.below.work.remote(x)) if self.below else x

    Boss_ = Boss
    assert ray.get(Boss.remote(3).work.remote(0)) == 4


def test_actors_that_hold_cpus_and_tasks_in_them():
    @ray.remote(num_cpus=1)
    class Holder:
        def work(self):
            return ray.get([leaf.remote(i) for i in range(5)])

    assert ray.get(Holder.remote().work.remote()) == list(range(5))


def test_a_get_with_timeout_in_a_parent_while_all_cpus_are_busy():
    @ray.remote
    def impatient():
        try:
            return ray.get(leaf.options(resources={"nowhere": 1}).remote(1), timeout=0.2)
        except exceptions.GetTimeoutError:
            return "gave up"

    assert ray.get([impatient.remote() for _ in range(4)]) == ["gave up"] * 4


def test_exceptions_come_up_through_every_level():
    @ray.remote
    def deep(n):
        if n == 0:
            raise LookupError("bottom")
        return ray.get(deep.remote(n - 1))

    with pytest.raises(LookupError, match="bottom") as caught:
        ray.get(deep.remote(5))
    assert type(caught.value.cause) is LookupError


def test_the_cpus_are_all_free_afterwards():
    eventually(lambda: ray.available_resources().get("CPU") == 2)


def test_tasks_that_block_start_later_and_hold_up_no_other_function():
    @ray.remote(num_cpus=0)
    class Gate:
        def __init__(self):
            self.open, self.waiting = False, 0

        async def wait(self):
            self.waiting += 1
            while not self.open:
                await asyncio.sleep(0.01)

        def release(self):
            self.open = True

        def count(self):
            return self.waiting

    gate = Gate.remote()

    @ray.remote
    def blocks():
        ray.get(gate.wait.remote())

    @ray.remote
    def releases():
        ray.get(gate.release.remote())

    waiting = [blocks.remote() for _ in range(40)]
    eventually(lambda: ray.get(gate.count.remote()) >= 2, "as many block as there are CPUs")
    time.sleep(0.5)
    assert ray.get(gate.count.remote()) < 6
    ray.get(releases.remote(), timeout=10)
    ray.get(waiting, timeout=30)
