"""Errors of Ray's own that happen inside of a task: the caller's task has failed with them, and has not itself died."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from engine import exceptions, ray

pytestmark = pytest.mark.usefixtures("session")


@ray.remote(num_cpus=0)
class Dead:
    def __init__(self):
        raise RuntimeError("refused")

    def ask(self):
        return 1


@ray.remote(num_cpus=0)
def endless():
    time.sleep(1000)


def ask_a_dead_actor():
    return ray.get(Dead.remote().ask.remote())


def wait_for_a_cancelled_task():
    ref = endless.remote()
    ray.cancel(ref)
    return ray.get(ref)


def raise_a_setup_error():
    raise exceptions.RuntimeEnvSetupError("of something else")


def raise_a_cancellation():
    raise exceptions.TaskCancelledError()


def raise_a_death():
    raise exceptions.ActorDiedError()


INSIDE = {
    ask_a_dead_actor: exceptions.ActorDiedError,
    wait_for_a_cancelled_task: exceptions.TaskCancelledError,
    raise_a_setup_error: exceptions.RuntimeEnvSetupError,
    raise_a_cancellation: exceptions.TaskCancelledError,
    raise_a_death: exceptions.ActorDiedError,
}
every_error = pytest.mark.parametrize("inside", INSIDE, ids=lambda function: function.__name__)


@ray.remote(num_cpus=0)
def run(function):
    return function()


@ray.remote(num_cpus=0)
def stream(function):
    yield 1
    function()


@ray.remote(num_cpus=0, num_returns=2)
def pair(function):
    yield 1
    function()


@ray.remote(num_cpus=0)
class Plain:
    def run(self, function):
        return function()

    def stream(self, function):
        yield 1
        function()


@ray.remote(num_cpus=0)
class Async:
    async def run(self, function):
        return await asyncio.to_thread(function)

    async def stream(self, function):
        yield 1
        await asyncio.to_thread(function)


def second_of(generator):
    assert ray.get(next(generator)) == 1
    return next(generator)


WAYS = {
    "task": lambda function: run.remote(function),
    "second return": lambda function: pair.remote(function)[1],
    "stream": lambda function: second_of(stream.options(num_returns="streaming").remote(function)),
    "actor": lambda function: Plain.remote().run.remote(function),
    "threaded actor": lambda function: Plain.options(max_concurrency=2).remote().run.remote(function),
    "stream of an actor": lambda function: second_of(
        Plain.remote().stream.options(num_returns="streaming").remote(function)
    ),
    "async actor": lambda function: Async.remote().run.remote(function),
    "stream of an async actor": lambda function: second_of(
        Async.remote().stream.options(num_returns="streaming").remote(function)
    ),
}


@every_error
@pytest.mark.parametrize("way", WAYS)
def test_an_error_inside_of_a_task_is_the_tasks_error(way, inside):
    ref = WAYS[way](inside)
    with pytest.raises(exceptions.RayTaskError) as raised:
        ray.get(ref)
    assert isinstance(raised.value, INSIDE[inside])  # `except ActorDiedError` goes on working
    assert isinstance(raised.value.cause, INSIDE[inside])
    assert inside.__name__ in str(raised.value)  # the text says where


def test_the_workers_own_verdicts_are_no_errors_of_the_task():
    for made, kind in (
        (lambda: Dead.remote().ask.remote(), exceptions.ActorDiedError),
        (_cancelled, exceptions.TaskCancelledError),
        (_cancelled_stream, exceptions.TaskCancelledError),
        (lambda: Leaving.remote().leave.remote(), exceptions.ActorDiedError),
    ):
        with pytest.raises(kind) as raised:
            ray.get(made())
        assert not isinstance(raised.value, exceptions.RayTaskError), made


@ray.remote(num_cpus=0)
class Leaving:
    def leave(self):
        ray.actor.exit_actor()


def _cancelled():
    ref = endless.remote()
    ray.cancel(ref)
    return ref


@ray.remote(num_cpus=0, num_returns="streaming", _generator_backpressure_num_objects=1)
def held_up():
    yield 1
    yield 2
    yield 3


def _cancelled_stream():
    values = held_up.remote()
    ray.get(next(values))
    ray.cancel(values)
    for ref in values:
        ray.get(ref)
    raise AssertionError("it was not cancelled")


def test_an_actor_that_asked_a_dead_one_is_asked_again_by_an_actor_pool():
    worker = Plain.remote()
    pool = ray.util.ActorPool([worker])
    pool.submit(lambda actor, function: actor.run.remote(function), ask_a_dead_actor)
    with pytest.raises(exceptions.ActorDiedError):
        pool.get_next()
    assert pool.has_free()
    pool.submit(lambda actor, function: actor.run.remote(function), lambda: 7)
    assert pool.get_next() == 7


def test_a_pool_process_that_asked_a_dead_actor_serves_on():
    pool = ray.util.multiprocessing.Pool(1)
    try:
        before = pool.apply(os.getpid)
        with pytest.raises(exceptions.ActorDiedError):
            pool.apply(ask_a_dead_actor)
        assert pool.apply(os.getpid) == before
    finally:
        pool.terminate()


def test_retry_exceptions_looks_at_what_happened_inside(tmp_path):
    marks = tmp_path / "runs"

    @ray.remote(num_cpus=0, max_retries=2, retry_exceptions=[exceptions.ActorDiedError])
    def again():
        with open(marks, "a") as file:
            file.write("x")
        if marks.stat().st_size < 3:
            ask_a_dead_actor()
        return marks.stat().st_size

    assert ray.get(again.remote()) == 3
