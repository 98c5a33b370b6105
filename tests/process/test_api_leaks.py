"""Nothing is kept that nobody refers to: entries of the owner's table, room in the store, workers, descriptors."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from engine import IS_HPCRAY, eventually, exceptions, ray

pytestmark = [
    pytest.mark.usefixtures("session"),
    pytest.mark.skipif(not IS_HPCRAY, reason="looks inside"),
]
INIT = {"num_cpus": 4, "object_store_memory": 128 << 20}
LARGE = 200_000


def entries() -> int:
    """Objects that this process knows, owned or borrowed."""
    from hpcray.runtime.core_worker.core_worker import current

    assert current.process is not None
    with current.process.engine.lock:
        current.process.drain()
    return len(current.process.table.entries)


@ray.remote
def echo(*values):
    return values


@ray.remote
def boxed(value):
    return [ray.put(value), {"k": ray.put(value)}]


@ray.remote
def fail():
    raise ValueError


@ray.remote
class Actor:
    def __init__(self):
        self.kept = None

    def echo(self, *values):
        return values

    def keep(self, value):
        self.kept = value

    def put(self, value):
        return ray.put(value)

    def nested(self, n):
        return ray.get([echo.remote(i, ray.put(i)) for i in range(n)])

    def entries(self):
        gc.collect()
        return entries()


@ray.remote
class AsyncActor:
    async def echo(self, *values):
        return values

    async def gather(self, box):
        return await asyncio.gather(*box)

    async def entries(self):
        gc.collect()
        return entries()


def puts():
    for value in (1, "x", np.zeros(LARGE), [ray.put(2)]):
        ray.get([ray.put(value) for _ in range(20)])


def tasks():
    ray.get([echo.remote(i, np.zeros(10)) for i in range(200)])
    ray.get([echo.remote(np.zeros(LARGE)) for _ in range(5)])
    for _ in range(50):
        echo.remote(1)


def chains():
    ref = ray.put(0)
    for _ in range(50):
        ref = echo.remote(ref)
    ray.get(ref)


def boxes():
    ray.get([echo.remote([ray.put(i)], {"k": ray.put(np.zeros(LARGE))}) for i in range(20)])
    inner = ray.get([boxed.remote(i) for i in range(20)])
    ray.get([box[0] for box in inner])
    ray.get([echo.remote(box) for box in inner])


def failures():
    for ref in [fail.remote() for _ in range(20)] + [echo.remote(fail.remote()) for _ in range(20)]:
        with pytest.raises(ValueError):
            ray.get(ref)
    with pytest.raises(exceptions.WorkerCrashedError):
        ray.get(ray.remote(max_retries=0)(lambda _: os._exit(1)).remote([ray.put(1)]))


def waits():
    pending = [echo.remote(i) for i in range(50)]
    while pending:
        _, pending = ray.wait(pending, num_returns=min(7, len(pending)))
    for _ in range(20):
        ref = echo.options(resources={"nowhere": 1}).remote(1)
        with pytest.raises(exceptions.GetTimeoutError):
            ray.get(ref, timeout=0.001)
        ray.cancel(ref)


def cancels():
    for _ in range(10):
        ray.cancel(echo.options(resources={"nowhere": 1}).remote([ray.put(1)]))


def actors():
    actor = Actor.remote()
    ray.get([actor.echo.remote(i, [ray.put(i)], np.zeros(LARGE)) for i in range(10)])
    ray.get(actor.keep.remote([ray.put(1), ray.put(np.zeros(LARGE))]))
    ray.get([ray.get(actor.put.remote(np.zeros(LARGE))) for _ in range(5)])
    ray.get(actor.nested.remote(20))
    ray.get([Actor.remote().echo.remote(1) for _ in range(4)])


def dead_actors():
    actor = Actor.remote()
    refs = [actor.put.remote(i) for i in range(5)]
    ray.get(refs)
    ray.get(actor.keep.remote([ray.put(np.zeros(LARGE))]))
    ray.kill(actor)
    more = [actor.echo.remote([ray.put(i)]) for i in range(5)]
    for ref in more:
        try:
            ray.get(ref)
        except exceptions.RayActorError:
            pass


def awaits():
    async def main():
        await asyncio.gather(*[echo.remote(i) for i in range(20)], *[echo.remote(np.zeros(LARGE)) for _ in range(3)])

    asyncio.run(main())
    [ref.future().result() for ref in [echo.remote(i) for i in range(20)]]


@pytest.mark.parametrize(
    "work",
    [puts, tasks, chains, boxes, failures, waits, cancels, actors, dead_actors, awaits],
    ids=lambda work: work.__name__,
)
def test_the_drivers_table_is_empty_again(work: Callable[[], None]):
    gc.collect()
    before = eventually(lambda: entries() + 1) - 1
    for _ in range(2):
        work()

    def empty():
        gc.collect()
        return entries() <= before

    eventually(empty, f"{work.__name__}: {entries()} entries, {before} before")


@pytest.mark.parametrize("kind", [Actor, AsyncActor], ids=["plain", "async"])
def test_an_actors_table_is_empty_again(kind):
    actor = kind.remote()
    before = ray.get(actor.entries.remote())
    for _ in range(3):
        ray.get([actor.echo.remote(i, [ray.put(i)], ray.put(np.zeros(LARGE)), np.zeros(LARGE)) for i in range(10)])
        if kind is Actor:
            ray.get(actor.nested.remote(20))
            ray.get(ray.get(actor.put.remote(np.zeros(LARGE))))
            ray.get(actor.keep.remote([ray.put(1)]))
            ray.get(actor.keep.remote(None))
        else:
            ray.get(actor.gather.remote([echo.remote(i) for i in range(10)]))
    eventually(lambda: ray.get(actor.entries.remote()) <= before)


def test_workers_tables_are_empty_again():
    for work in (tasks, boxes, chains, failures):
        work()
    table = ray.remote(lambda: (os.getpid(), entries()))

    def empty():
        return all(count == 0 for _, count in ray.get([table.remote() for _ in range(50)]))

    eventually(empty)


def test_the_store_is_empty_again():
    """Everything that fits was put and dropped before; now an object of nearly the whole store fits."""
    for work in (puts, tasks, boxes, actors, dead_actors, awaits):
        work()
    gc.collect()

    def fits():
        return ray.get(ray.put(np.zeros(110 << 20, dtype="u1"))).nbytes

    assert fits() == 110 << 20


def test_the_drivers_descriptors_are_closed_again():
    def cycle():
        actors_ = [Actor.remote() for _ in range(4)]
        ray.get([actor.echo.remote(1) for actor in actors_])

    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    cycle()
    before = descriptors()
    for _ in range(5):
        cycle()
    gc.collect()
    eventually(lambda: descriptors() <= before + 8)


def test_a_value_that_does_not_pickle_keeps_no_ref():
    before = entries()
    refs = [ray.put(np.zeros(LARGE)), ray.put(1)]
    with pytest.raises(TypeError):
        echo.remote([refs, threading.Lock()])
    with pytest.raises(TypeError):
        ray.put({"refs": refs, "lock": threading.Lock()})
    refs.clear()
    eventually(lambda: gc.collect() >= 0 and entries() == before, "the objects to go")


class Box:
    def __init__(self, refs):
        self.refs = refs


@ray.remote
def box_of_refs(count):
    return Box([ray.put(number) for number in range(count)])


def test_a_value_whose_refs_carry_values_ends_with_its_last_name_without_gc():
    ref = box_of_refs.remote(20)
    ray.get(ref)
    gc.disable()
    try:
        value = ray.get(ref)
        alive = weakref.ref(value)
        del value
        assert alive() is None
    finally:
        gc.enable()
