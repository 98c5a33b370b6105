"""Async actors: coroutines as methods, many calls at once."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time

import numpy as np
import pytest
from engine import PATIENCE, exceptions, exit_actor, hpcray_only, ray

pytestmark = pytest.mark.usefixtures("session")


@ray.remote
def echo(value, delay=0.0):
    time.sleep(delay)
    return value


@ray.remote
class Async:
    def __init__(self, value=0):
        self.value = value
        self.inside = 0
        self.most = 0
        self.event = asyncio.Event()

    async def get(self):
        await asyncio.sleep(0)
        return self.value

    async def set(self, value):
        self.value = value

    def plain(self):
        return threading.current_thread().name

    async def thread(self):
        return threading.current_thread().name

    async def wait(self, i):
        await self.event.wait()
        return i

    async def open(self):
        self.event.set()

    async def crowd(self, seconds):
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(seconds)
        self.inside -= 1
        return self.most

    async def await_ref(self, box):
        return await box[0]

    async def gather(self, refs):
        return await asyncio.gather(*refs)

    async def submit(self, value):
        return await echo.remote(value)

    async def fail(self):
        await asyncio.sleep(0)
        raise KeyError("in a coroutine")

    async def echo(self, *args, **kwargs):
        return args, kwargs

    @ray.method(num_returns=2)
    async def pair(self):
        return 1, 2

    async def leave(self):
        exit_actor()


class TestMethods:
    def test_results(self):
        actor = Async.remote(3)
        assert ray.get(actor.get.remote()) == 3
        ray.get(actor.set.remote(4))
        assert ray.get([actor.get.remote() for _ in range(20)]) == [4] * 20
        assert ray.get(actor.pair.remote()) == [1, 2]

    def test_arguments(self):
        actor = Async.remote()
        ref = ray.put("r")
        (value, array, box), keywords = ray.get(actor.echo.remote(ref, np.arange(300_000), [ref], k=echo.remote(1)))
        assert (value, array[-1], box, keywords) == ("r", 299_999, [ref], {"k": 1})

    def test_large_results(self):
        @ray.remote
        class Large:
            async def make(self, n):
                await asyncio.sleep(0)
                return np.full(200_000, n)

        large = Large.remote()
        for i, array in enumerate(ray.get([large.make.remote(i) for i in range(10)])):
            assert (array == i).all()

    def test_plain_methods_run_on_the_same_loop(self):
        actor = Async.remote()
        assert ray.get(actor.plain.remote()) == ray.get(actor.thread.remote())

    def test_exceptions(self):
        actor = Async.remote()
        with pytest.raises(KeyError, match="in a coroutine") as caught:
            ray.get(actor.fail.remote())
        assert isinstance(caught.value, exceptions.RayTaskError)
        assert "Async.fail" in str(caught.value)
        assert ray.get(actor.get.remote()) == 0

    def test_exit_actor(self):
        actor = Async.remote()
        with pytest.raises(exceptions.ActorDiedError):
            ray.get(actor.leave.remote())
        with pytest.raises(exceptions.ActorDiedError):
            ray.get(actor.get.remote())


class TestConcurrency:
    def test_a_hundred_calls_at_once(self):
        actor = Async.remote()
        refs = [actor.wait.remote(i) for i in range(100)]
        assert ray.wait(refs, timeout=0.3)[0] == []
        ray.get(actor.open.remote())
        assert ray.get(refs) == list(range(100))

    def test_they_overlap(self):
        actor = Async.remote()
        assert max(ray.get([actor.crowd.remote(0.2) for _ in range(50)])) == 50

    @pytest.mark.parametrize("limit", [1, 3])
    def test_no_more_than_max_concurrency(self, limit):
        actor = Async.options(max_concurrency=limit).remote()
        assert max(ray.get([actor.crowd.remote(0.02) for _ in range(12)])) == limit

    @hpcray_only
    def test_calls_start_in_order(self):
        @ray.remote
        class Log:
            def __init__(self):
                self.calls = []

            async def note(self, i):
                self.calls.append(i)
                await asyncio.sleep(0)

            async def read(self):
                return self.calls

        log = Log.options(max_concurrency=10).remote()
        ray.get([log.note.remote(i) for i in range(500)])
        assert ray.get(log.read.remote()) == list(range(500))

    @hpcray_only
    def test_a_call_begins_after_what_the_call_before_it_has_woken(self):
        @ray.remote(num_cpus=0, max_concurrency=2)
        class Notes:
            def __init__(self):
                self.notes, self.event = [], asyncio.Event()

            async def note(self, text, seconds=0.0):
                self.notes.append(text)
                time.sleep(seconds)  # on the loop: the calls gather
                return self.notes

            async def sleep(self):
                await self.event.wait()
                self.notes.append("awake")

            async def wake(self):
                self.event.set()

        notes = Notes.remote()
        notes.note.remote("first", 0.5)
        calls = [notes.sleep.remote(), notes.wake.remote(), notes.note.remote("next")]
        assert ray.get(calls)[2] == ["first", "awake", "next"]

    def test_a_call_that_waits_for_room_can_be_cancelled(self):
        actor = Async.options(max_concurrency=1).remote()
        waits = actor.wait.remote(1)
        late = [actor.get.remote() for _ in range(3)]
        with pytest.raises(exceptions.GetTimeoutError):
            ray.get(late[0], timeout=0.3)
        ray.cancel(late[1])
        with pytest.raises(exceptions.TaskCancelledError):
            ray.get(late[1])
        ray.cancel(waits)
        assert ray.get([late[0], late[2]]) == [0, 0]

    @hpcray_only
    def test_an_answer_does_not_wait_for_a_call_that_blocks_the_loop(self):
        """Answers of one round of the loop leave together, but not when one of the calls takes for ever."""

        @ray.remote
        class Blocking:
            def __init__(self):
                from hpcray.runtime.worker import concurrency_groups

                concurrency_groups.HOLD = (
                    1e9  # as if all came within the millisecond in which answers may wait for others
                )

            async def answer(self):
                # So long after the calls came nothing is awake in the worker that would send the answers anyway.
                await asyncio.sleep(0.3)

            async def block(self):
                await asyncio.sleep(0.3)
                time.sleep(4 * PATIENCE)

        actor = Blocking.remote()
        refs = [actor.answer.remote() for _ in range(20)]
        blocked = actor.block.remote()
        ray.get(refs, timeout=PATIENCE)
        assert ray.wait([blocked], timeout=0) == ([], [blocked])
        ray.kill(actor)

    def test_callers_of_many_kinds(self):
        actor = Async.remote()
        ask = ray.remote(lambda actor, i: ray.get(actor.wait.remote(i)))
        refs = [ask.remote(actor, i) for i in range(3)]
        mine = actor.wait.remote(3)
        ray.get(actor.open.remote())
        assert ray.get([*refs, mine]) == [0, 1, 2, 3]


class TestAwait:
    def test_a_ref_from_outside(self):
        actor = Async.remote()
        assert ray.get(actor.await_ref.remote([ray.put("p")])) == "p"
        assert ray.get(actor.await_ref.remote([echo.remote("t", 0.2)])) == "t"
        assert ray.get(actor.await_ref.remote([ray.put(np.arange(200_000))]))[-1] == 199_999

    def test_a_task_of_its_own(self):
        actor = Async.remote()
        assert ray.get([actor.submit.remote(i) for i in range(30)]) == list(range(30))

    def test_gather(self):
        actor = Async.remote()
        refs = [echo.remote(i, 0.01) for i in range(20)]
        assert ray.get(actor.gather.remote(refs)) == list(range(20))

    def test_an_error(self):
        actor = Async.remote()
        with pytest.raises(ZeroDivisionError):
            ray.get(actor.await_ref.remote([ray.remote(lambda: 1 / 0).remote()]))

    def test_another_actor(self):
        @ray.remote
        class Front:
            def __init__(self, back):
                self.back = back

            async def ask(self):
                return await self.back.get.remote() + sum(await asyncio.gather(*[self.back.get.remote()] * 3))

        assert ray.get(Front.remote(Async.remote(5)).ask.remote()) == 20

    def test_itself(self):
        """One coroutine waits for another call of the same actor."""

        @ray.remote
        class Loop:
            async def outer(self):
                me = ray.get_runtime_context().current_actor
                return await me.inner.remote() + 1

            async def inner(self):
                return 1

        assert ray.get(Loop.remote().outer.remote()) == 2

    def test_wait_for_with_a_timeout(self):
        @ray.remote
        class Impatient:
            async def try_it(self, box):
                try:
                    return await asyncio.wait_for(asyncio.wrap_future(box[0].future()), 0.2)
                except asyncio.TimeoutError:
                    return "timeout"

        never = Async.remote()
        assert ray.get(Impatient.remote().try_it.remote([never.wait.remote(1)])) == "timeout"

    def test_asyncio_wait_first_completed(self):
        @ray.remote
        class First:
            async def of(self, refs):
                waiting = [asyncio.wrap_future(ref.future()) for ref in refs]
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE)
                return done.pop().result()

        slow = Async.remote()
        assert ray.get(First.remote().of.remote([slow.wait.remote(1), echo.remote("fast")])) == "fast"

    def test_state_between_awaits(self):
        @ray.remote
        class Queue:
            def __init__(self):
                self.queue = asyncio.Queue()

            async def put(self, item):
                await self.queue.put(item)

            async def get(self):
                return await self.queue.get()

        queue = Queue.remote()
        gets = [queue.get.remote() for _ in range(5)]
        for i in range(5):
            queue.put.remote(i)
        assert sorted(ray.get(gets)) == [0, 1, 2, 3, 4]


class TestContext:
    def test_ids_of_concurrent_calls_differ(self):
        @ray.remote
        class Ids:
            async def id(self):
                before = ray.get_runtime_context().get_task_id()
                await asyncio.sleep(0.05)
                return before, ray.get_runtime_context().get_task_id()

        actor = Ids.remote()
        found = ray.get([actor.id.remote() for _ in range(20)])
        assert all(before == after for before, after in found)
        assert len({before for before, _ in found}) == 20

    def test_a_background_task_of_the_actor(self):
        @ray.remote
        class Ticker:
            def __init__(self):
                self.ticks = 0

            async def start(self):
                self.task = asyncio.get_running_loop().create_task(self.run())

            async def run(self):
                while True:
                    self.ticks += await echo.remote(1)

            async def read(self):
                return self.ticks

        ticker = Ticker.remote()
        ray.get(ticker.start.remote())
        deadline = time.monotonic() + PATIENCE
        while ray.get(ticker.read.remote()) < 3:
            assert time.monotonic() < deadline

    @hpcray_only
    def test_the_loop_is_not_blocked_by_a_pending_argument(self):
        actor = Async.remote(1)
        late = actor.echo.remote(echo.remote("late", 0.5))
        assert ray.get(late) == (("late",), {})


def test_a_plain_method_of_an_async_actor_can_return_a_ref():
    @ray.remote
    class Keeper:
        async def keep(self):
            self.ref = ray.put("kept")

        def ref_of_it(self):
            return self.ref

    keeper = Keeper.remote()
    ray.get(keeper.keep.remote())
    assert ray.get(ray.get(keeper.ref_of_it.remote())) == "kept"


def test_a_call_that_fails_leaves_no_cycle_behind():
    @ray.remote
    class Failing:
        async def call(self, _large):
            raise KeyError(1)

        async def generator(self, _large):
            raise KeyError(1)
            yield

        def garbage(self):
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            return len(gc.garbage)

    actor = Failing.remote()
    before = ray.get(actor.garbage.remote())
    for _ in range(5):
        for ref in (actor.call.remote([1]), *actor.generator.remote([1])):
            with pytest.raises(KeyError):
                ray.get(ref)
    assert ray.get(actor.garbage.remote()) == before


class TestConstructor:
    def test_it_runs_on_the_loop_of_the_methods(self):
        @ray.remote
        class OnLoop:
            def __init__(self):
                self.loop = asyncio.get_running_loop()
                self.event = asyncio.create_task(self.later())

            async def later(self):
                await asyncio.sleep(0.01)
                return "from the constructor"

            async def get(self):
                return await self.event, asyncio.get_running_loop() is self.loop

        assert ray.get(OnLoop.remote().get.remote(), timeout=PATIENCE) == ("from the constructor", True)

    def test_a_coroutine_is_awaited_before_the_first_call(self):
        @ray.remote
        class Coroutine:
            async def __init__(self, box, *, twice):
                self.steps = ["began"]
                await asyncio.sleep(0.05)
                self.steps.append(await box[0] * twice)
                self.task = ray.get_runtime_context().get_task_id()

            def get(self):
                return self.steps, self.task

        actor = Coroutine.remote([ray.put(21)], twice=2)
        steps, task = ray.get(actor.get.remote(), timeout=PATIENCE)
        assert steps == ["began", 42] and task

    @pytest.mark.parametrize("error", [KeyError, asyncio.CancelledError, KeyboardInterrupt])
    def test_whatever_it_raises_ends_the_actor(self, error):
        @ray.remote
        class Failing:
            async def __init__(self, error):
                await asyncio.sleep(0)
                raise error("no")

            async def get(self):
                pass

        with pytest.raises(exceptions.ActorDiedError, match=error.__name__):
            ray.get(Failing.remote(error).get.remote(), timeout=PATIENCE)

    def test_it_may_leave_with_exit_actor(self):
        @ray.remote
        class Leaving:
            async def __init__(self):
                exit_actor()

            async def get(self):
                pass

        with pytest.raises(exceptions.ActorDiedError):
            ray.get(Leaving.remote().get.remote(), timeout=PATIENCE)


@hpcray_only
class TestGroupsOfTheSystem:
    def test_every_actor_has_them_with_a_thread_each(self):
        @ray.remote
        class Plain:
            def thread(self):
                return threading.current_thread().name

        def thread_twice(_):
            time.sleep(0.01)
            return threading.current_thread().name

        actor = Plain.remote()
        ask = actor.__ray_call__
        names = [
            set(ray.get([ask.options(concurrency_group=group).remote(thread_twice) for _ in range(3)]))
            for group in ("_ray_system", "_ray_system_error")
        ]
        assert [len(found) for found in names] == [1, 1] and names[0] != names[1]
        assert ray.get(actor.thread.remote()) == "MainThread"

    def test_a_call_there_does_not_hold_the_others_back_nor_the_end(self):
        @ray.remote
        class Busy:
            async def leave(self):
                exit_actor()

            async def get(self):
                return 1

        async def for_ever(_):
            while True:
                await asyncio.sleep(0.01)

        actor = Busy.remote()
        looping = actor.__ray_call__.options(concurrency_group="_ray_system").remote(for_ever)
        assert ray.get(actor.get.remote(), timeout=PATIENCE) == 1
        with pytest.raises(exceptions.ActorDiedError):
            ray.get(actor.leave.remote(), timeout=PATIENCE)
        with pytest.raises(exceptions.ActorDiedError):
            ray.get(looping, timeout=PATIENCE)


def test_the_loop_takes_calls_in_whatever_else_it_waits_for():
    """Its thread waits for messages itself: timers, its own sockets and threads that wake it must work all the same."""

    @ray.remote
    class Busy:
        async def sleeps(self, seconds):
            started = time.monotonic()
            await asyncio.sleep(seconds)
            return time.monotonic() - started

        async def reads_a_pipe(self):
            reader, writer = os.pipe()
            ready = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().add_reader(reader, ready.set_result, None)
            threading.Timer(0.05, os.write, (writer, b"x")).start()
            await ready
            asyncio.get_running_loop().remove_reader(reader)
            return os.read(reader, 1)

        async def woken_by_a_thread(self):
            event, loop = asyncio.Event(), asyncio.get_running_loop()
            threading.Timer(0.05, loop.call_soon_threadsafe, (event.set,)).start()
            await event.wait()
            return "woken"

        async def spins(self, seconds):
            until, turns = time.monotonic() + seconds, 0
            while time.monotonic() < until:
                await asyncio.sleep(0)
                turns += 1
            return turns

        async def blocks(self, seconds):
            time.sleep(seconds)

        async def gets(self, box):
            return await box[0], ray.get(box[0])

        async def short(self):
            return threading.get_ident()

    busy = Busy.remote()
    thread = ray.get(busy.short.remote())
    slow = busy.sleeps.remote(0.2)
    assert ray.get(busy.reads_a_pipe.remote(), timeout=PATIENCE) == b"x"
    assert ray.get(busy.woken_by_a_thread.remote(), timeout=PATIENCE) == "woken"
    assert 0.2 <= ray.get(slow, timeout=PATIENCE) < PATIENCE
    spinning = busy.spins.remote(0.3)
    assert ray.get([busy.short.remote() for _ in range(50)], timeout=PATIENCE) == [thread] * 50
    assert not ray.wait([spinning], timeout=0)[0]
    assert ray.get(spinning, timeout=PATIENCE) > 10
    ray.get([busy.blocks.remote(0.05), busy.short.remote()], timeout=PATIENCE)
    assert ray.get(busy.gets.remote([ray.put(3)]), timeout=PATIENCE) == (3, 3)


def test_an_async_actor_that_only_computes_is_still_told_to_end():
    @ray.remote
    class Blocked:
        async def blocks(self):
            time.sleep(PATIENCE)

        async def short(self):
            return os.getpid()

    blocked = Blocked.remote()
    pid = ray.get(blocked.short.remote())
    waiting = blocked.blocks.remote()
    time.sleep(0.1)
    ray.kill(blocked)
    with pytest.raises(exceptions.ActorDiedError):
        ray.get(waiting, timeout=PATIENCE)
    until = time.monotonic() + PATIENCE
    while os.path.exists(f"/proc/{pid}/cmdline") and time.monotonic() < until:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid}/cmdline")
