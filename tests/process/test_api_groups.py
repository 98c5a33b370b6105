"""Concurrency groups; and which calls may overtake which."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from engine import PATIENCE, eventually, exceptions, hpcray_only, ray

pytestmark = pytest.mark.usefixtures("session")


@ray.remote(concurrency_groups={"io": 2, "compute": 4})
class Async:
    def __init__(self):
        self.inside = {}
        self.most = {}

    async def crowd(self, kind):
        self.inside[kind] = self.inside.get(kind, 0) + 1
        self.most[kind] = max(self.most.get(kind, 0), self.inside[kind])
        await asyncio.sleep(0.03)
        self.inside[kind] -= 1
        return self.most[kind]

    @ray.method(concurrency_group="io")
    async def io(self):
        return await self.crowd("io")

    @ray.method(concurrency_group="compute")
    async def compute(self):
        return await self.crowd("compute")

    async def default(self):
        return await self.crowd("default")

    async def block(self):
        time.sleep(1.0)
        return time.monotonic()

    @ray.method(concurrency_group="io")
    async def healthy(self):
        return time.monotonic()

    @ray.method(concurrency_group="io")
    async def where(self):
        return threading.current_thread().name


@ray.remote(concurrency_groups={"io": 2})
class Threaded:
    def __init__(self):
        self.event = threading.Event()
        self.barrier = threading.Barrier(2)

    def wait(self):
        assert self.event.wait(PATIENCE)
        return "opened"

    @ray.method(concurrency_group="io")
    def open(self):
        self.event.set()

    @ray.method(concurrency_group="io")
    def meet(self):
        return self.barrier.wait(PATIENCE)

    def thread(self):
        return threading.get_ident()


@ray.remote
def echo(value, delay=0.0):
    time.sleep(delay)
    return value


class TestGroups:
    def test_each_concurrency_group_has_its_limit(self):
        actor = Async.remote()
        assert max(ray.get([actor.io.remote() for _ in range(10)])) == 2
        assert max(ray.get([actor.compute.remote() for _ in range(12)])) == 4
        assert max(ray.get([actor.default.remote() for _ in range(12)])) == 12

    def test_max_concurrency_is_that_of_the_default_group(self):
        actor = Async.options(max_concurrency=3).remote()
        assert max(ray.get([actor.default.remote() for _ in range(9)])) == 3
        assert max(ray.get([actor.compute.remote() for _ in range(9)])) == 4

    def test_a_concurrency_group_can_be_given_at_the_call(self):
        actor = Async.remote()
        assert max(ray.get([actor.io.options(concurrency_group="compute").remote() for _ in range(12)])) == 4
        assert max(ray.get([actor.io.remote() for _ in range(6)])) == 4  # `most` of the calls above

    def test_a_blocked_loop_does_not_block_another_group(self):
        actor = Async.remote()
        ray.get(actor.healthy.remote())
        blocked = actor.block.remote()
        assert ray.get(actor.healthy.remote()) < ray.get(blocked)

    def test_concurrency_groups_of_a_threaded_actor_have_their_limits(self):
        actor = Threaded.remote()
        waiting = actor.wait.remote()
        ray.get(actor.open.remote())
        assert ray.get(waiting) == "opened"
        assert sorted(ray.get([actor.meet.remote(), actor.meet.remote()])) == [0, 1]

    def test_the_default_group_of_a_plain_actor_runs_one_at_a_time(self):
        actor = Threaded.remote()
        assert len(set(ray.get([actor.thread.remote() for _ in range(5)]))) == 1

    def test_concurrency_groups_apply_to_named_actors_and_handles_in_tasks(self):
        actor = Threaded.options(name="grouped").remote()
        waiting = ray.get_actor("grouped").wait.remote()
        ray.get(ray.remote(lambda actor: ray.get(actor.open.remote())).remote(actor))
        assert ray.get(waiting) == "opened"

    def test_an_actor_with_groups_ends_when_its_calls_are_done(self):
        actor = Threaded.remote()
        refs = [actor.meet.remote(), actor.meet.remote(), actor.thread.remote()]
        actor.__ray_terminate__.remote()
        assert len(ray.get(refs)) == 3
        with pytest.raises(exceptions.ActorDiedError):
            ray.get(actor.thread.remote())

    @hpcray_only
    def test_an_unknown_concurrency_group_is_refused(self):
        @ray.remote
        class Plain:
            def f(self):
                return 1

        with pytest.raises(ValueError, match="no concurrency group 'nope'"):
            ray.get(Threaded.remote().thread.options(concurrency_group="nope").remote())
        with pytest.raises(ValueError, match="no concurrency group 'io'"):
            ray.get(Plain.remote().f.options(concurrency_group="io").remote())

        @ray.remote
        class Undeclared:
            @ray.method(concurrency_group="io")
            def f(self):
                pass

        with pytest.raises(ValueError, match="concurrency group 'io'"):
            Undeclared.remote()

    @pytest.mark.parametrize("groups", [{"io": "2"}, {"": 1}, {1: 1}, ["io"]], ids=str)
    def test_invalid_concurrency_groups_of_an_actor_are_refused(self, groups):
        with pytest.raises((ValueError, TypeError, AssertionError)):
            ray.remote(concurrency_groups=groups)(type("A", (), {})).remote()


class TestOptionsOfMethods:
    def test_retry_exceptions_of_a_method_repeat_its_calls(self):
        @ray.remote
        class Flaky:
            def __init__(self):
                self.calls = 0

            @ray.method(retry_exceptions=[KeyError], max_task_retries=5)
            def third_time(self):
                self.calls += 1
                if self.calls % 3:
                    raise KeyError(self.calls)
                return self.calls

            def plain(self, error):
                self.calls += 1
                raise error

            def count(self):
                return self.calls

        actor = Flaky.remote()
        assert ray.get(actor.third_time.remote()) == 3
        with pytest.raises(ValueError, match="plain"):
            ray.get(actor.plain.remote(ValueError("plain")))
        assert ray.get(actor.count.remote()) == 4
        retried = actor.plain.options(retry_exceptions=True, max_task_retries=2)
        with pytest.raises(ValueError, match="again"):
            ray.get(retried.remote(ValueError("again")))
        assert ray.get(actor.count.remote()) == 7
        with pytest.raises(KeyError):
            ray.get(actor.third_time.options(max_task_retries=0).remote())

    def test_a_call_of_a_method_can_have_a_name(self):
        @ray.remote
        class Named:
            def f(self):
                return ray.get_runtime_context().get_task_name()

            async def g(self):
                return ray.get_runtime_context().get_task_name()

        actor = Named.remote()
        names = ray.get([actor.f.options(name="own").remote(), actor.g.options(name="mine").remote(), actor.f.remote()])
        assert names == ["own", "mine", "Named.f"]


class TestOrder:
    @staticmethod
    def order(*calls, **options):
        @ray.remote
        class Log:
            def __init__(self):
                self.calls = []

            def note(self, value):
                self.calls.append(value)
                return value

            def read(self):
                return self.calls

        log = Log.options(**options).remote()
        ray.get([log.note.remote(call) for call in calls])
        return ray.get(log.read.remote())

    def test_calls_of_an_actor_run_in_order_by_default(self):
        assert self.order(echo.remote("late", 0.5), 1, 2) == ["late", 1, 2]

    def test_calls_may_overtake_one_that_waits_for_its_arguments(self):
        assert self.order(echo.remote("late", 1.0), 1, 2, allow_out_of_order_execution=True) == [1, 2, "late"]

    def test_calls_of_threaded_actors_overtake_by_default(self):
        assert self.order(echo.remote("late", 1.0), 1, max_concurrency=2) == [1, "late"]

    def test_calls_of_async_actors_overtake_by_default(self):
        @ray.remote
        class Eager:
            async def note(self, value):
                return time.monotonic()

        actor = Eager.remote()
        late, soon = actor.note.remote(echo.remote("late", 0.5)), actor.note.remote(1)
        assert ray.get(soon) < ray.get(late)

    @pytest.mark.parametrize("options", [{"max_concurrency": 2}], ids=str)
    def test_in_order_execution_of_overlapping_calls_is_refused(self, options):
        with pytest.raises(ValueError, match="order"):
            Threaded.options(allow_out_of_order_execution=False, **options).remote()
        with pytest.raises(ValueError, match="order"):
            Async.options(allow_out_of_order_execution=False).remote()

    def test_a_call_that_waits_for_arguments_keeps_its_actor(self):
        @ray.remote(allow_out_of_order_execution=True)
        class Kept:
            def note(self, value):
                return value

        ref = Kept.remote().note.remote(echo.remote("late", 0.3))
        assert ray.get(ref) == "late"

    def test_a_call_whose_argument_failed_raises_its_error(self):
        @ray.remote(allow_out_of_order_execution=True)
        class Kept:
            def note(self, value):
                return value

        kept = Kept.remote()
        bad = kept.note.remote(ray.remote(lambda: 1 / 0).remote())
        good = [kept.note.remote(echo.remote(i, 0.1)) for i in range(3)]
        with pytest.raises(ZeroDivisionError):
            ray.get(bad)
        assert ray.get(good) == [0, 1, 2]

    def test_the_death_of_an_actor_ends_calls_that_wait_for_arguments(self):
        @ray.remote(allow_out_of_order_execution=True)
        class Kept:
            def note(self, value):
                return value

        kept = Kept.remote()
        ray.get(kept.note.remote(0))
        ref = kept.note.remote(echo.remote("late", 30))
        ray.kill(kept)
        with pytest.raises(exceptions.ActorDiedError):
            ray.get(ref, timeout=PATIENCE)

    @hpcray_only
    def test_calls_that_wait_for_arguments_count_as_pending(self):
        @ray.remote(allow_out_of_order_execution=True, max_pending_calls=2)
        class Kept:
            def note(self, value):
                return value

        kept = Kept.remote()
        slow = echo.remote(0, 0.5)
        refs = [kept.note.remote(slow) for _ in range(2)]
        with pytest.raises(exceptions.PendingCallsLimitExceeded):
            kept.note.remote(1)
        assert ray.get(refs) == [0, 0]
        assert ray.get(kept.note.remote(1)) == 1


class TestCancel:
    @hpcray_only
    def test_a_call_that_waits_for_a_thread_never_starts(self):
        actor = Threaded.remote()
        waiting, doomed = actor.wait.remote(), actor.wait.remote()
        ray.get([actor.meet.remote(), actor.meet.remote()])  # both have been accepted by now
        ray.cancel(doomed)
        ray.get(actor.open.remote())
        assert ray.get(waiting) == "opened"
        with pytest.raises(exceptions.TaskCancelledError):
            ray.get(doomed)

    def test_a_plain_method_can_ask_if_its_call_is_cancelled(self):
        @ray.remote
        class Patient:
            def __init__(self):
                self.started = False

            def work(self):
                self.started = True
                deadline = time.monotonic() + PATIENCE
                while not ray.get_runtime_context().is_canceled():
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                return "stopped"

            def is_started(self):
                return self.started

        patient = Patient.options(max_concurrency=2).remote()
        ref = patient.work.remote()
        eventually(lambda: ray.get(patient.is_started.remote()))
        ray.cancel(ref)
        try:
            assert ray.get(ref) == "stopped"
        except exceptions.TaskCancelledError:
            pass  # Ray turns the value into this
        assert ray.get(patient.is_started.remote())

    def test_cancelled_coroutines_that_have_not_begun_never_start(self):
        @ray.remote(max_concurrency=1)
        class Slow:
            async def sleep(self, seconds):
                await asyncio.sleep(seconds)
                return seconds

        slow = Slow.remote()
        first, *others = [slow.sleep.remote(0.5) for _ in range(5)]
        for ref in others:
            ray.cancel(ref)
        for ref in others:
            with pytest.raises(exceptions.TaskCancelledError):
                ray.get(ref, timeout=PATIENCE)
        assert ray.get(first) == 0.5

    @hpcray_only
    def test_cancel_with_force_is_refused_for_actor_calls(self):
        actor = Threaded.remote()
        ref = actor.wait.remote()
        with pytest.raises(ValueError, match="force"):
            ray.cancel(ref, force=True)
        ray.get(actor.open.remote())
        assert ray.get(ref) == "opened"


def test_an_async_actor_runs_a_thousand_coroutines_at_once_and_no_more():
    @ray.remote(concurrency_groups={"control": 1})
    class Gate:
        def __init__(self):
            self.inside = 0
            self.most = 0
            self.opened = False

        async def enter(self):
            self.inside += 1
            self.most = max(self.most, self.inside)
            while not self.opened:
                await asyncio.sleep(0.05)
            self.inside -= 1

        @ray.method(concurrency_group="control")
        async def count(self):
            return self.inside

        @ray.method(concurrency_group="control")
        async def open(self):
            self.opened = True

    gate = Gate.remote()
    refs = [gate.enter.remote() for _ in range(1010)]
    eventually(lambda: ray.get(gate.count.remote()) == 1000)
    assert ray.wait(refs, timeout=0.2)[0] == []
    ray.get(gate.open.remote())
    ray.get(refs)
    assert ray.get(gate.__ray_call__.remote(lambda self: self.most)) == 1000


def test_a_group_without_room_ends_its_actor():
    @ray.remote(concurrency_groups={"io": 0})
    class Closed:
        def ping(self):
            return "pong"

    with pytest.raises(exceptions.ActorDiedError, match="max_concurrency must be greater than 0"):
        ray.get(Closed.remote().ping.remote())
