"""`exit_actor` from everywhere in an actor, and what becomes of the calls around it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from engine import Marks, eventually, exceptions, exit_actor, ray

pytestmark = pytest.mark.usefixtures("session")


class Plain:
    def ping(self):
        return "pong"

    def sleep(self, marks, seconds):
        marks.add()
        time.sleep(seconds)
        return "slept"

    def raised(self):
        exit_actor()

    def caught(self):
        try:
            exit_actor()
        except BaseException:
            return "went on"

    def in_a_thread(self):
        thread = threading.Thread(target=exit_actor)
        thread.start()
        thread.join()
        return "went on"


class Async:
    async def ping(self):
        return "pong"

    async def sleep(self, marks, seconds):
        marks.add()
        await asyncio.sleep(seconds)
        return "slept"

    async def raised(self):
        exit_actor()

    async def caught(self):
        try:
            exit_actor()
        except Exception:
            return "went on"

    async def in_a_task(self):
        async def leave():
            exit_actor()

        task = asyncio.create_task(leave())
        await asyncio.sleep(0.1)
        assert task.done()
        return "went on"


def dead(ref):
    with pytest.raises(exceptions.RayActorError):
        ray.get(ref)
    return True


@pytest.mark.parametrize("method", ["raised", "caught"])
def test_calls_behind_the_exit_of_an_actor_never_run(method: str, marks: Marks):
    actor = ray.remote(Plain).remote()
    last, behind = getattr(actor, method).remote(), actor.sleep.remote(marks, 0)
    assert dead(last) and dead(behind) and dead(actor.ping.remote())
    assert marks.lines() == []


def test_a_call_whose_thread_ends_the_actor_has_its_value():
    actor = ray.remote(Plain).remote()
    assert ray.get(actor.in_a_thread.remote()) == "went on"
    assert eventually(lambda: dead(actor.ping.remote()))


@pytest.mark.parametrize("method", ["raised", "caught"])
def test_a_threaded_actor_exits_after_the_calls_that_run(method: str, marks: Marks):
    actor = ray.remote(Plain).options(max_concurrency=2).remote()
    running = actor.sleep.remote(marks, 1.5)
    eventually(marks.lines)
    last = getattr(actor, method).remote()
    assert dead(last)
    waiting = [actor.sleep.remote(marks, 0) for _ in range(20)]
    assert ray.get(running) == "slept"
    assert all(map(dead, waiting))
    assert marks.lines() == ["x"]


@pytest.mark.parametrize("method", ["raised", "caught", "in_a_task"])
def test_an_async_actor_exits_after_the_calls_that_run(method: str, marks: Marks):
    actor = ray.remote(Async).options(max_concurrency=2).remote()
    running = actor.sleep.remote(marks, 1.5)
    eventually(marks.lines)
    last, waiting = getattr(actor, method).remote(), [actor.sleep.remote(marks, 60) for _ in range(20)]
    assert dead(last)
    assert ray.get(running) == "slept"
    assert all(map(dead, waiting))
    assert len(marks.lines()) <= 2  # one may have begun with the exit


@pytest.mark.parametrize("caught", [False, True])
def test_the_constructor_can_end_its_actor(caught: bool):
    @ray.remote(max_restarts=-1)
    class Still:
        def __init__(self):
            try:
                exit_actor()
            except SystemExit:
                if not caught:
                    raise

        def ping(self):
            return "pong"

    with pytest.raises(exceptions.ActorDiedError, match="exit_actor") as raised:
        ray.get(Still.remote().ping.remote())
    assert not raised.value.actor_init_failed


def test_terminate_lets_the_calls_before_it_finish(marks: Marks):
    actor = ray.remote(Plain).remote()
    before = [actor.sleep.remote(marks, 0.1) for _ in range(3)]
    assert dead(actor.__ray_terminate__.remote()) and dead(actor.ping.remote())
    assert ray.get(before) == ["slept"] * 3


def test_exit_actor_is_for_actors():
    with pytest.raises(TypeError, match="non-actor worker"):
        exit_actor()
    with pytest.raises(TypeError, match="non-actor worker"):
        ray.get(ray.remote(lambda: exit_actor()).remote())
