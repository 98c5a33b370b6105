"""Cancelling tasks: waiting, running, of actors."""

from __future__ import annotations

import asyncio
import ctypes
import time

import pytest
from engine import IS_HPCRAY, Marks, eventually, exceptions, ray

from hpcray.protocol import messages

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 1}


@ray.remote
def spin(marks, seconds=30.0):
    marks.add()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)
    marks.add("end")
    return "spun"


@ray.remote
def echo(value):
    return value


def assert_cancelled(ref):
    with pytest.raises(exceptions.TaskCancelledError):
        ray.get(ref)


def test_cancel_interrupts_a_running_task(marks: Marks):
    ref = spin.remote(marks)
    eventually(marks.lines)
    ray.cancel(ref)
    assert_cancelled(ref)
    assert marks.lines() == ["x"]
    assert ray.get(echo.remote(1)) == 1


def test_cancel_by_force_ends_the_worker(marks: Marks):
    ref = spin.remote(marks)
    eventually(marks.lines)
    ray.cancel(ref, force=True)
    with pytest.raises((exceptions.TaskCancelledError, exceptions.WorkerCrashedError)):
        ray.get(ref)
    assert marks.lines() == ["x"]
    assert ray.get(echo.remote(1)) == 1


def test_cancel_by_force_ends_a_worker_whose_code_lets_no_thread_run(marks: Marks):
    """C code that keeps the interpreter's lock, as MPI calls and numerical libraries may."""

    @ray.remote(max_retries=0)
    def hold():
        marks.add()
        ctypes.PyDLL(None).sleep(600)

    ref = hold.remote()
    eventually(marks.lines)
    ray.cancel(ref, force=True)
    with pytest.raises((exceptions.TaskCancelledError, exceptions.WorkerCrashedError)):
        ray.get(ref, timeout=30)
    assert ray.get(echo.remote(1)) == 1


def test_a_cancelled_waiting_task_never_runs(marks: Marks):
    running, waiting = spin.remote(marks), spin.remote(marks)
    eventually(marks.lines)
    ray.cancel(waiting)
    assert_cancelled(waiting)
    ray.cancel(running)
    assert_cancelled(running)
    assert marks.lines() == ["x"]


def test_cancel_of_a_task_that_waits_for_its_argument(marks: Marks):
    first = spin.remote(marks)
    dependent = echo.remote(first)
    eventually(marks.lines)
    ray.cancel(dependent)
    assert_cancelled(dependent)
    ray.cancel(first)
    assert_cancelled(first)


def test_tasks_that_depend_on_a_cancelled_one_fail_too(marks: Marks):
    ref = spin.remote(marks)
    dependent = echo.remote(ref)
    eventually(marks.lines)
    ray.cancel(ref)
    with pytest.raises(exceptions.RayError):
        ray.get(dependent)


def test_cancel_of_a_finished_task_keeps_its_value():
    ref = echo.remote(5)
    assert ray.get(ref) == 5
    ray.cancel(ref)
    assert ray.get(ref) == 5


def test_cancel_of_an_infeasible_task():
    ref = echo.options(resources={"nowhere": 1}).remote(1)
    ray.cancel(ref)
    assert_cancelled(ref)


def test_a_cancelled_task_is_not_retried(marks: Marks):
    ref = spin.options(max_retries=3, retry_exceptions=True).remote(marks)
    eventually(marks.lines)
    ray.cancel(ref)
    assert_cancelled(ref)
    time.sleep(0.2)
    assert marks.lines() == ["x"]


def test_cancel_interrupts_a_coroutine_of_an_actor(marks: Marks):
    @ray.remote
    class Sleeper:
        async def sleep(self):
            marks.add()
            await asyncio.sleep(60)

        async def fine(self):
            return "fine"

    sleeper = Sleeper.remote()
    ref = sleeper.sleep.remote()
    eventually(marks.lines)
    dependent = echo.remote(ref)
    ray.cancel(ref)
    with pytest.raises(exceptions.RayTaskError, match=ref.task_id().hex()) as raised:
        ray.get(ref)
    assert isinstance(raised.value, exceptions.TaskCancelledError)
    assert type(raised.value.cause) is exceptions.TaskCancelledError
    assert "At least one of the input arguments" not in str(raised.value)
    with pytest.raises(exceptions.TaskCancelledError, match="At least one of the input arguments"):
        ray.get(dependent)
    assert ray.get(sleeper.fine.remote()) == "fine"


class Yielding:
    def numbers(self, marks):
        try:
            for number in range(1000):
                yield number
                time.sleep(0.01)
        finally:
            marks.add("closed")


class AsyncYielding(Yielding):
    async def others(self):
        pass


@pytest.mark.parametrize("window", [-1, 2])
@pytest.mark.parametrize("kind", ["one at a time", "threads", "async"])
def test_a_generator_of_an_actor_that_is_cancelled_ends_where_it_yields(kind: str, window: int, marks: Marks):
    options = {"max_concurrency": 2} if kind == "threads" else {}
    actor = ray.remote(AsyncYielding if kind == "async" else Yielding).options(num_cpus=0, **options).remote()
    method = actor.numbers.options(num_returns="streaming", _generator_backpressure_num_objects=window)
    generator = method.remote(marks)
    assert ray.get(next(generator)) == 0
    time.sleep(0.1)  # with a window it waits now
    ray.cancel(generator)
    with pytest.raises(exceptions.TaskCancelledError):
        for ref in generator:
            ray.get(ref)
    with pytest.raises(StopIteration):
        next(generator)
    assert eventually(marks.lines) == ["closed"]


def test_a_cancelled_waiting_call_of_an_actor_never_runs(marks: Marks):
    @ray.remote
    class Slow:
        def sleep(self, seconds):
            marks.add()
            time.sleep(seconds)
            return "slept"

    slow = Slow.remote()
    first, second = slow.sleep.remote(1.0), slow.sleep.remote(0)
    eventually(marks.lines)
    ray.cancel(second)
    assert_cancelled(second)
    assert ray.get(first) == "slept"
    if IS_HPCRAY:  # Ray runs it all the same
        assert marks.lines() == ["x"]


@pytest.mark.skipif(not IS_HPCRAY, reason="changes a message")
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_call_of_an_actor_that_was_cancelled_before_its_value_came_ends_in_the_error(size: int, monkeypatch):
    @ray.remote
    class Slow:
        def value(self, size, seconds):
            time.sleep(seconds)
            return bytes(size), ray.put(size)

    slow = Slow.remote()
    ray.get(slow.value.remote(1, 0))
    free = ray.available_resources()["object_store_memory"]
    ref = slow.value.remote(size, 0.5)
    # As if the value was on its way already: the actor never hears of the cancellation.
    cancel_task = messages.CancelTask
    monkeypatch.setattr(messages, "CancelTask", lambda task, *rest: cancel_task(bytes(len(task)), *rest))
    ray.cancel(ref)
    monkeypatch.undo()
    assert_cancelled(ref)
    del ref
    assert eventually(lambda: ray.available_resources()["object_store_memory"] == free)


def test_cancel_takes_only_refs():
    with pytest.raises(TypeError):
        ray.cancel(1)


def test_cancelled_children(marks: Marks):
    @ray.remote(num_cpus=0)
    def parent():
        return ray.get(spin.remote(marks))

    ref = parent.remote()
    eventually(marks.lines)
    ray.cancel(ref)
    assert_cancelled(ref)
    assert ray.get(echo.remote("the child has let go of the only CPU")) is not None
    assert marks.lines() == ["x"]


def test_a_borrower_can_cancel_a_task(marks: Marks):
    @ray.remote(num_cpus=0)
    def cancel(box):
        ray.cancel(box[0])

    ref = spin.remote(marks)
    eventually(marks.lines)
    ray.get(cancel.remote([ref]))
    assert_cancelled(ref)


def test_cancel_ends_children_with_their_parent(marks: Marks):
    @ray.remote(num_cpus=0)
    def child(first):
        marks.add("child")
        try:
            while True:
                time.sleep(0.01)
        finally:
            marks.add("stopped")

    @ray.remote(num_cpus=0)
    def parent():
        refs = [child.remote(1), child.options(resources={"nowhere": 1}).remote(2)]
        marks.add("parent")
        ray.get(refs)

    ref = parent.remote()
    eventually(lambda: sorted(marks.lines()) == ["child", "parent"])
    ray.cancel(ref)
    assert_cancelled(ref)
    eventually(lambda: sorted(marks.lines()) == ["child", "parent", "stopped"])


def test_cancel_without_recursive_leaves_children(marks: Marks):
    @ray.remote(num_cpus=0)
    def child():
        marks.add("began")
        time.sleep(0.5)
        marks.add("ended")

    @ray.remote(num_cpus=0)
    def parent():
        ray.get(child.remote())

    ref = parent.remote()
    eventually(marks.lines)
    ray.cancel(ref, recursive=False)
    assert_cancelled(ref)
    eventually(lambda: marks.lines() == ["began", "ended"])


@ray.remote(num_cpus=0)
class Branch:
    """Actors in a chain: the last one waits."""

    def __init__(self, marks, child=None):
        self.marks, self.child, self.ref = marks, child, None

    def run(self):
        self.marks.add()
        if self.child is None:
            time.sleep(5)
            return "done"
        self.ref = self.child.run.remote()
        return ray.get(self.ref)

    def child_ref(self):
        return [self.ref]


@ray.remote(num_cpus=0)
class AsyncBranch:
    def __init__(self, marks, child=None):
        self.marks, self.child, self.ref = marks, child, None

    async def run(self):
        self.marks.add()
        if self.child is None:
            await asyncio.sleep(5)
            return "done"
        self.ref = self.child.run.remote()
        return await self.ref

    def child_ref(self):
        return [self.ref]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "threads", "async"])
@pytest.mark.parametrize("recursive", [True, False])
def test_cancel_goes_down_a_chain_of_actors(kind: str, recursive: bool, marks: Marks):
    branch = {"plain": Branch, "threads": Branch.options(max_concurrency=3), "async": AsyncBranch}[kind]
    leaf = AsyncBranch.remote(marks)
    middle = branch.remote(marks, leaf)
    top = branch.remote(marks, middle)
    ref = top.run.remote()
    eventually(lambda: len(marks.lines()) == 3)
    ray.cancel(ref, recursive=recursive)
    assert_cancelled(ref)
    (of_leaf,) = ray.get(middle.child_ref.remote())
    if recursive:
        assert_cancelled(of_leaf)
    else:
        assert ray.get(of_leaf) == "done"


def test_cancel_leaves_the_children_of_other_calls(marks: Marks):
    @ray.remote(num_cpus=0)
    class Parent:
        async def run(self):
            ref = nap.remote()
            marks.add()
            return await ref

    @ray.remote(num_cpus=0)
    def nap():
        time.sleep(2)
        return "slept"

    parent = Parent.remote()
    first, second = parent.run.remote(), parent.run.remote()
    eventually(lambda: len(marks.lines()) == 2)
    ray.cancel(first)
    assert_cancelled(first)
    assert ray.get(second) == "slept"


@pytest.mark.parametrize("outcome", ["a value", "an error"])
def test_a_coroutine_cannot_undo_its_cancellation(outcome: str, marks: Marks):
    @ray.remote
    class Stubborn:
        async def sleep(self):
            try:
                marks.add()
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if outcome == "an error":
                    raise ValueError("of another kind") from None
                return outcome

    ref = Stubborn.remote().sleep.remote()
    eventually(marks.lines)
    ray.cancel(ref)
    with pytest.raises(exceptions.TaskCancelledError, match=ref.task_id().hex()) as raised:
        ray.get(ref)
    assert isinstance(raised.value, exceptions.RayTaskError)
    if IS_HPCRAY:
        assert ("of another kind" in str(raised.value)) == (outcome == "an error")


def test_the_error_names_the_cancelled_task(marks: Marks):
    running, waiting = spin.remote(marks), spin.remote(marks)
    eventually(marks.lines)
    for ref in (waiting, running):
        ray.cancel(ref)
        with pytest.raises(exceptions.TaskCancelledError, match=rf"{ref.task_id().hex()}\)? was cancelled"):
            ray.get(ref)
