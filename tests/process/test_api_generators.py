"""Generators: what a task or a method yields can be taken while it still runs."""

from __future__ import annotations

import asyncio
import gc
import os
import time

import numpy as np
import pytest
from engine import IS_HPCRAY, PATIENCE, Marks, eventually, exceptions, hpcray_only, ray

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 2, "object_store_memory": 128 << 20}


def entries():
    """Objects that this process knows."""
    from hpcray.runtime.core_worker.core_worker import current

    gc.collect()
    with current.process.engine.lock:
        current.process.drain()
        return len(current.process.table.entries)


@ray.remote
def count(n, delay=0.0):
    for i in range(n):
        time.sleep(delay)
        yield i


@ray.remote
def gated(marks, n):
    """Yields, and goes on when the marks have as many lines as it has yielded."""
    for i in range(n):
        yield i
        deadline = time.monotonic() + PATIENCE
        while len(marks.lines()) <= i:
            assert time.monotonic() < deadline
            time.sleep(0.005)


@ray.remote
def breaks(n):
    yield from range(n)
    raise KeyError("in the middle")


@ray.remote
def echo(value, delay=0.0):
    time.sleep(delay)
    return value


@ray.remote
class Plain:
    def count(self, n):
        yield from range(n)

    def breaks(self, n):
        yield from range(n)
        raise KeyError("in the middle")

    def other(self):
        return "other"

    @ray.method(num_returns=2)
    def two(self):
        yield 1
        yield 2

    def die(self):
        yield 1
        time.sleep(0.2)
        os._exit(1)


@ray.remote
class Async:
    async def count(self, n, delay=0.0):
        for i in range(n):
            await asyncio.sleep(delay)
            yield i

    async def large(self, n):
        for i in range(n):
            yield np.full(200_000, i)

    async def breaks(self, n):
        for i in range(n):
            yield i
        raise KeyError("in the middle")

    def plain(self, n):
        yield from range(n)

    async def forever(self):
        i = 0
        while True:
            await asyncio.sleep(0.001)
            yield i
            i += 1

    async def consume(self, n):
        return [await ref async for ref in count.remote(n)]


def values(generator):
    return [ray.get(ref) for ref in generator]


class TestTasks:
    @pytest.mark.parametrize("n", [0, 1, 2, 100])
    def test_all_values_in_order(self, n):
        assert values(count.remote(n)) == list(range(n))

    def test_it_is_an_iterator(self):
        generator = count.remote(2)
        assert isinstance(generator, ray.ObjectRefGenerator)
        assert iter(generator) is generator
        assert isinstance(next(generator), ray.ObjectRef)
        assert ray.get(next(generator)) == 1
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(generator)

    def test_values_come_while_it_runs(self, marks: Marks):
        generator = gated.remote(marks, 3)
        for i in range(3):
            assert ray.get(next(generator)) == i
            assert not ray.wait([generator.completed()], timeout=0)[0]
            marks.add()
        assert list(generator) == []
        ray.get(generator.completed())

    def test_large_values_and_refs(self):
        @ray.remote
        def mixed():
            yield np.arange(300_000)
            yield [ray.put("inner"), ray.put(np.ones(200_000))]
            yield np.ones(300_000)

        first, boxes, last = mixed.remote()
        assert ray.get(first)[-1] == 299_999
        box, large = ray.get(boxes)
        assert ray.get(box) == "inner"
        assert ray.get(large).sum() == 200_000
        assert ray.get(last).sum() == 300_000

    def test_refs_are_as_any_other(self):
        refs = list(count.remote(5))
        assert ray.get(refs) == list(range(5))
        assert ray.get(ray.remote(lambda *values: sum(values)).remote(*refs)) == 10

    def test_an_error_in_the_middle(self):
        for generator in (breaks.remote(2), breaks.options(max_retries=0, name="named").remote(2)):
            first, second, third = list(generator)
            assert ray.get([first, second]) == [0, 1]
            with pytest.raises(KeyError, match="in the middle"):
                ray.get(third)
            assert ray.get(generator.completed()) is None  # it has ended, and the error was among its values

    def test_an_error_before_the_first(self):
        (only,) = list(breaks.remote(0))
        with pytest.raises(KeyError):
            ray.get(only)
        (only,) = list(count.remote(ray.remote(lambda: 1 / 0).remote()))
        with pytest.raises(ZeroDivisionError):
            ray.get(only)

    def test_options(self):
        assert values(count.options(num_returns="streaming", num_cpus=0.5, name="c").remote(3)) == [0, 1, 2]
        assert ray.get(count.options(num_returns=2).remote(2)) == [0, 1]
        assert ray.get(count.options(num_returns=1).remote(1)) == 0
        with pytest.raises(ValueError, match="Task returned 0 objects, but num_returns=1"):
            ray.get(count.options(num_returns=1).remote(0))

    def test_what_is_no_generator(self):
        actor = Plain.remote()
        for kind in ("streaming", "dynamic"):
            for make in (echo.options, actor.other.options, ray.method):
                with pytest.raises(ValueError, match="can only be used with generator"):
                    made = make(num_returns=kind)
                    made(lambda self: 1)
            with pytest.raises(ValueError, match="can only be used with generator"):
                ray.remote(num_returns=kind)(lambda n: iter(range(n)))

    def test_what_a_yield_gives(self):
        @ray.remote
        def measured():
            yield (yield np.ones(300_000)).object_creation_dur_s

        assert ray.get(list(measured.remote())[1]) > 0

    def test_async_generators_are_for_actors(self):
        async def values():
            yield 1

        with pytest.raises((ValueError, TypeError)):
            ray.get(next(ray.remote(values).remote()))

    def test_they_do_not_travel(self):
        generator = count.remote(1)
        with pytest.raises(TypeError, match=r"[Gg]enerator"):
            echo.remote(generator)
        with pytest.raises(TypeError, match=r"[Gg]enerator"):
            ray.put(generator)
        assert ray.get(generator) is generator
        assert values(generator) == [0]

    def test_in_a_task(self):
        @ray.remote(num_cpus=0)
        def inner(n):
            return sum(ray.get(ref) for ref in count.remote(n))

        assert ray.get([inner.remote(n) for n in range(6)]) == [0, 0, 1, 3, 6, 10]

    def test_many_at_once(self):
        generators = [count.remote(20) for _ in range(20)]
        assert [values(generator) for generator in generators] == [list(range(20))] * 20

    def test_unused_values_are_freed(self):
        @ray.remote
        def large():
            for _ in range(5):
                yield np.ones(1_000_000)

        before = entries() if IS_HPCRAY else 0
        generator = large.remote()
        kept = next(generator)
        ray.get(generator.completed())
        if IS_HPCRAY:
            assert entries() == before + 7  # the values, the end, and that it has ended
        del generator
        gc.collect()
        if IS_HPCRAY:
            eventually(lambda: entries() == before + 1)
        assert ray.get(kept).sum() == 1_000_000
        generator = large.remote()
        next(generator)
        del generator, kept  # while it still runs
        gc.collect()
        if IS_HPCRAY:
            eventually(lambda: entries() == before)
        for _ in range(6):  # more than the store can hold
            assert len(list(large.remote())) == 5

    def test_a_dropped_generator_runs_to_its_end(self, marks: Marks):
        @ray.remote
        def noted(marks):
            for i in range(5):
                marks.add()
                yield i

        for options in ({}, {"_generator_backpressure_num_objects": 1}):
            before = len(marks.lines())
            generator = noted.options(**options).remote(marks)
            next(generator)
            del generator
            gc.collect()
            eventually(lambda before=before: len(marks.lines()) == before + 5)


class TestRetries:
    def test_a_crash(self, marks: Marks):
        @ray.remote(max_retries=2)
        def crashes(marks):
            run = marks.add()
            for i in range(6):
                if i == 3 and run == 1:
                    time.sleep(0.3)
                    os._exit(1)
                yield i, run

        found = values(crashes.remote(marks))
        assert [i for i, _ in found] == list(range(6))
        assert found[-1][1] == 2

    def test_a_crash_without_retries(self, marks: Marks):
        @ray.remote(max_retries=0)
        def crashes():
            yield 1
            os._exit(1)

        *_, last = list(crashes.remote())
        with pytest.raises(exceptions.WorkerCrashedError):
            ray.get(last)

    def test_exceptions(self, marks: Marks):
        @ray.remote(max_retries=3, retry_exceptions=[KeyError])
        def flaky(marks):
            run = marks.add()
            for i in range(4):
                if i == 2 and run < 3:
                    raise KeyError(run)
                yield i

        assert values(flaky.remote(marks)) == [0, 1, 2, 3]
        assert len(marks.lines()) == 3


class TestActors:
    def test_plain(self):
        actor = Plain.remote()
        assert values(actor.count.remote(10)) == list(range(10))
        assert ray.get(actor.two.remote()) == [1, 2]
        assert ray.get(actor.other.remote()) == "other"
        assert values(actor.count.options(num_returns="streaming", name="n").remote(2)) == [0, 1]

    def test_threaded(self):
        actor = Plain.options(max_concurrency=3).remote()
        generators = [actor.count.remote(10) for _ in range(6)]
        assert [values(generator) for generator in generators] == [list(range(10))] * 6

    def test_async(self):
        actor = Async.remote()
        assert values(actor.count.remote(10)) == list(range(10))
        assert values(actor.plain.remote(10)) == list(range(10))
        assert [array[0] for array in values(actor.large.remote(5))] == list(range(5))

    def test_async_ones_overlap(self):
        actor = Async.remote()
        endless = actor.forever.remote()
        assert ray.get(next(endless)) == 0
        assert values(actor.count.remote(3, 0.01)) == [0, 1, 2]
        assert ray.get(next(endless)) == 1
        ray.cancel(endless)
        with pytest.raises(exceptions.RayError):
            for ref in endless:
                ray.get(ref)

    def test_errors(self):
        for actor in (Plain.remote(), Async.remote()):
            first, second = list(actor.breaks.remote(1))
            assert ray.get(first) == 0
            with pytest.raises(KeyError, match="in the middle"):
                ray.get(second)
            assert values(actor.count.remote(2)) == [0, 1]

    def test_death(self):
        *_, last = list(Plain.remote().die.remote())
        with pytest.raises(exceptions.ActorDiedError):
            ray.get(last)

    def test_the_generator_keeps_the_actor(self):
        generator = Async.remote().count.remote(5, 0.05)
        gc.collect()
        assert values(generator) == list(range(5))


class TestAsyncio:
    def test_async_for(self):
        async def run():
            return [await ref async for ref in count.remote(5, 0.01)]

        assert asyncio.run(run()) == list(range(5))

    def test_several(self):
        async def one(n):
            return [await ref async for ref in count.remote(n)]

        async def run():
            return await asyncio.gather(*[one(n) for n in range(5)])

        assert asyncio.run(run()) == [list(range(n)) for n in range(5)]

    def test_in_an_actor(self):
        assert ray.get(Async.remote().consume.remote(5)) == list(range(5))

    def test_an_error(self):
        async def run():
            found = []
            async for ref in breaks.remote(1):
                try:
                    found.append(await ref)
                except KeyError:
                    found.append("error")
            return found

        assert asyncio.run(run()) == [0, "error"]


class TestWait:
    def test_it_is_ready_when_the_next_value_is(self, marks: Marks):
        generator = gated.remote(marks, 2)
        for _ in range(2):
            ready, rest = ray.wait([generator], timeout=PATIENCE)
            assert (ready, rest) == ([generator], [])
            next(generator)
            assert ray.wait([generator], timeout=0.1) == ([], [generator])
            marks.add()
        assert ray.wait([generator], timeout=PATIENCE) == ([generator], [])
        with pytest.raises(StopIteration):
            next(generator)

    def test_mixed_with_refs(self):
        slow, quick = count.remote(1, 1.0), count.remote(1)
        ref = echo.options(num_cpus=0).remote(1)
        ready, rest = ray.wait([slow, quick, ref], num_returns=2, timeout=PATIENCE)
        assert (ready, rest) == ([quick, ref], [slow])
        assert len(ray.wait([slow, quick, ref], num_returns=3, timeout=PATIENCE)[0]) == 3
        with pytest.raises(ValueError, match="unique"):
            ray.wait([slow, slow])


class TestProgress:
    def test_ready_and_finished(self, marks: Marks):
        generator = gated.remote(marks, 2)
        for _ in range(2):
            assert ray.wait([generator], timeout=PATIENCE)[0]
            assert generator.next_ready()
            next(generator)
            assert not generator.next_ready()
            assert not generator.is_finished()
            marks.add()
        assert ray.wait([generator.completed()], timeout=PATIENCE)[0]
        assert generator.is_finished()
        assert not generator.next_ready()

    def test_the_error_of_a_task_is_a_value(self):
        generator = count.options(max_retries=0).remote(ray.remote(lambda: 1 / 0).remote())
        assert ray.wait([generator.completed()], timeout=PATIENCE)[0]
        assert generator.next_ready()
        assert not generator.is_finished()
        with pytest.raises(ZeroDivisionError):
            ray.get(generator.completed())
        next(generator)
        assert generator.is_finished()

    def test_next_for_some_time(self, marks: Marks):
        generator = gated.remote(marks, 2)
        assert ray.get(generator._next_sync(timeout_s=-1)) == 0
        assert generator._next_sync(timeout_s=0.01).is_nil()

        async def run():
            early = await generator._next_async(timeout_s=0.01)
            marks.add()
            late = await generator._next_async(timeout_s=PATIENCE)
            marks.add()
            return early, late

        early, late = asyncio.run(run())
        assert early.is_nil()
        assert ray.get(late) == 1
        assert list(generator) == []

    def test_refs_ahead(self, marks: Marks):
        generator = gated.remote(marks, 3)
        first, second, third, behind = generator._get_next_ref_n(4)
        assert ray.get(first) == 0
        with pytest.raises(ValueError):
            generator._consume_next_ref_n(2)
        assert generator._get_next_object_id_binary() == first.binary()
        for _ in range(3):
            marks.add()
        assert ray.get([second, third]) == [1, 2]
        with pytest.raises(exceptions.ObjectRefStreamEndOfStreamError):
            ray.get(behind)
        generator._consume_next_ref_n(2)
        assert generator._get_next_ref_n(3)[:2] == [third, behind]
        assert next(generator) == third
        assert generator._stream_exhausted()
        with pytest.raises(StopIteration):
            next(generator)

    def test_refs_behind_a_task_that_failed(self):
        generator = count.options(resources={"nowhere": 1}).remote(1)
        ahead = generator._get_next_ref_n(2)
        ray.cancel(generator)
        for ref in ahead:
            with pytest.raises(exceptions.TaskCancelledError):
                ray.get(ref)


class TestBackPressure:
    def test_no_more_than_that_is_ahead(self, marks: Marks):
        @ray.remote(_generator_backpressure_num_objects=2)
        def noted(marks):
            for i in range(8):
                marks.add()
                yield i

        generator = noted.remote(marks)
        for taken in range(1, 6):
            assert ray.get(next(generator)) == taken - 1
            eventually(lambda taken=taken: len(marks.lines()) >= taken + 2)
            time.sleep(0.05)
            assert len(marks.lines()) == taken + 2
        assert values(generator) == [5, 6, 7]

    def test_methods(self, marks: Marks):
        @ray.remote
        class Noted:
            @ray.method(_generator_backpressure_num_objects=1)
            def plain(self, marks):
                for i in range(4):
                    marks.add("p")
                    yield i

            @ray.method(_generator_backpressure_num_objects=1)
            async def coroutine(self, marks):
                for i in range(4):
                    marks.add("c")
                    yield i

            async def alive(self):
                return True

        actor = Noted.remote()
        one, two = actor.plain.remote(marks), actor.coroutine.remote(marks)
        eventually(lambda: marks.lines().count("p") >= 1 and marks.lines().count("c") >= 1)
        assert ray.get(actor.alive.remote())
        assert len(marks.lines()) <= 4
        assert values(one) == values(two) == [0, 1, 2, 3]

    def test_it_can_be_cancelled_while_it_waits(self):
        generator = count.options(_generator_backpressure_num_objects=1).remote(100)
        next(generator)
        ray.cancel(generator)
        with pytest.raises(exceptions.TaskCancelledError):
            for ref in generator:
                ray.get(ref)
        assert ray.get(echo.remote(1)) == 1


class TestCancel:
    def test_a_running_one(self):
        @ray.remote
        def endless():
            while True:
                time.sleep(0.01)
                yield 1

        generator = endless.remote()
        next(generator)
        ray.cancel(generator)
        with pytest.raises(exceptions.TaskCancelledError):
            for ref in generator:
                ray.get(ref)
        with pytest.raises(exceptions.TaskCancelledError):
            ray.get(generator.completed())

    def test_a_waiting_one(self):
        generator = count.options(resources={"nowhere": 1}).remote(1)
        ray.cancel(generator)
        with pytest.raises(exceptions.TaskCancelledError):
            ray.get(next(generator))


class TestDynamic:
    def test_one_ref_of_all(self):
        dynamic = count.options(num_returns="dynamic")
        for n in (0, 1, 5):
            assert values(ray.get(dynamic.remote(n))) == list(range(n))

    def test_large_values_and_a_task_that_takes_it(self):
        @ray.remote(num_returns="dynamic")
        def split(array, parts):
            yield from np.split(array, parts)

        @ray.remote
        def total(refs):
            return sum(ray.get(ref).sum() for ref in refs)

        assert ray.get(total.remote(split.remote(np.ones(400_000), 4))) == 400_000

    def test_an_error_is_the_last_ref(self):
        first, last = ray.get(breaks.options(num_returns="dynamic").remote(1))
        assert ray.get(first) == 0
        with pytest.raises(KeyError):
            ray.get(last)

    def test_methods(self):
        assert values(ray.get(Plain.remote().count.options(num_returns="dynamic").remote(3))) == [0, 1, 2]


class TestSeveralObjectsPerYield:
    def test_each_is_a_ref_of_its_own_and_counts_for_back_pressure(self, marks: Marks):
        @ray.remote(_num_objects_per_yield=2, _generator_backpressure_num_objects=4)
        def pairs(count):
            for i in range(count):
                marks.add()
                yield i, np.full(200_000, i)

        stream = pairs.remote(5)
        time.sleep(0.5)
        assert len(marks.lines()) == 2
        assert [int(np.max(ray.get(ref))) for ref in stream] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]

    def test_methods_plain_and_async(self):
        @ray.remote
        class Both:
            @ray.method(_num_objects_per_yield=2)
            def plain(self):
                yield [1, 2]

            @ray.method(_num_objects_per_yield=3)
            async def coroutine(self):
                yield 1, 2, 3

        actor = Both.remote()
        assert values(actor.plain.remote()) == [1, 2] and values(actor.coroutine.remote()) == [1, 2, 3]
        with pytest.raises(ValueError, match="cannot be overridden"):
            actor.plain.options(_num_objects_per_yield=2)

    @pytest.mark.parametrize(
        ("wrong", "kind", "words"),
        [((1, 2, 3), ValueError, "yielded 3 objects"), ("ab", TypeError, "must yield a tuple or list of length 2")],
    )
    def test_what_is_not_so_many_ends_the_stream(self, wrong, kind, words):
        @ray.remote(_num_objects_per_yield=2)
        def pairs():
            yield 1, 2
            yield wrong

        first, second, error = pairs.remote()
        assert ray.get([first, second]) == [1, 2]
        with pytest.raises(kind, match=words):
            ray.get(error)
        with pytest.raises(ValueError, match="cannot be overridden"):
            pairs.options(_num_objects_per_yield=3)


@hpcray_only
def test_batches_of_several_generators_are_taken_whole(marks: Marks):
    from hpcray.compat.names.worker import wait_for_batches

    slow, quick = gated.remote(marks, 3), count.remote(4)
    ((first, refs),) = wait_for_batches([(slow, [True, True]), (quick, [True, False, True])], timeout=PATIENCE)
    assert first is quick and ray.get(refs) == [0, 1, 2] and values(quick) == [3]
    assert wait_for_batches([(slow, [True, True])], timeout=0.1) == []
    marks.add()
    ((_, refs),) = wait_for_batches([(slow, [True, True])], timeout=PATIENCE)
    assert ray.get(refs) == [0, 1]
    marks.add()
    marks.add()
    assert values(slow) == [2]
    for wrong in ([slow], [(slow, [])], [(slow, [1])], [(slow, [True]), (slow, [True])]):
        with pytest.raises((TypeError, ValueError)):
            wait_for_batches(wrong)


@hpcray_only
def test_options_that_are_not_supported():
    with pytest.raises(NotImplementedError, match="_actor_generator_backpressure"):
        Plain.options(_actor_generator_backpressure_num_objects=2).remote()
