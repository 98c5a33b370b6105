"""`exit_actor` from everywhere in an actor, and what becomes of the calls around it."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import sys
import threading
import time

import pytest
from engine import Marks, alive, eventually, exceptions, exit_actor, hpcray_only, ray, run_script

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

    def pid(self):
        return os.getpid()

    def leave(self):
        sys.exit(0)

    def signal(self, number):
        os.kill(os.getpid(), number)
        return "sent"

    def get_later(self, marks, refs):
        marks.add()
        eventually(lambda: len(marks.lines()) > 1)
        return ray.get(refs[0])

    def signal_oneself_once(self, marks):
        if marks.lines():
            return "second"
        atexit.register(marks.add, "atexit")
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            marks.add("finally")

    def in_a_thread(self):
        thread = threading.Thread(target=exit_actor)
        thread.start()
        thread.join()
        return "went on"


class Async:
    pid, in_a_thread = Plain.pid, Plain.in_a_thread

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

    async def signal(self, number):
        os.kill(os.getpid(), number)
        return "sent"

    async def get_later(self, marks, refs):
        marks.add()
        while len(marks.lines()) < 2:
            await asyncio.sleep(0.01)
        return await refs[0]

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


@pytest.mark.parametrize(("kind", "limit"), [(Plain, 1), (Plain, 2), (Async, 2)])
def test_a_call_whose_thread_ends_the_actor_has_its_value(kind: type, limit: int, capfd):
    actor = ray.remote(kind).options(max_concurrency=limit, name="threads", lifetime="detached").remote()
    pid = ray.get(actor.pid.remote())
    assert ray.get(actor.in_a_thread.remote()) == "went on"
    eventually(lambda: not alive(pid))
    assert dead(actor.ping.remote())
    assert "Traceback" not in "".join(capfd.readouterr())


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


def test_tasks_that_an_actor_has_left_end_before_it_does(marks: Marks):
    @ray.remote
    def mark():
        time.sleep(0.5)
        marks.add()

    class Leaver:
        def leave(self):
            mark.remote()
            exit_actor()

    assert dead(ray.remote(Leaver).remote().leave.remote())
    assert eventually(lambda: marks.lines() == ["x"])


@pytest.mark.parametrize("code", [0, 1])
def test_an_actor_ends_that_has_not_taken_what_a_generator_yields(code: int, marks: Marks):
    @ray.remote(_generator_backpressure_num_objects=1, num_cpus=0)
    def yields():
        yield from range(5)
        marks.add()

    @ray.remote
    class Caller:
        def take(self):
            values = yields.remote()
            assert ray.get(next(values)) == 0
            sys.exit(code)

    assert dead(Caller.remote().take.remote())
    assert eventually(lambda: marks.lines() == ["x"])


@hpcray_only
def test_the_worker_of_a_task_outlives_the_actor_that_has_submitted_it_and_left():
    @ray.remote(num_cpus=0.25)
    def pid():
        return os.getpid()

    class Leaver:
        def of_task(self):
            return os.getpid(), ray.get(pid.remote())

    actor = ray.remote(Leaver).options(num_cpus=0).remote()
    own, ran = ray.get(actor.of_task.remote())
    assert dead(actor.__ray_terminate__.remote())
    assert eventually(lambda: not alive(own))
    assert ray.get(pid.remote()) == ran, "the last one that was used is the first that is taken"


def test_a_reply_with_the_ref_of_another_owner_comes_from_an_actor_that_leaves():
    class Owner:
        def make(self):
            self.ref = ray.put("kept")
            return [self.ref]

    class Keeper:
        def take(self, refs):
            self.refs = refs

        def give(self):
            return self.refs

    owner = ray.remote(Owner).remote()
    refs = ray.get(owner.make.remote())
    for _ in range(10):
        keeper = ray.remote(Keeper).remote()
        ray.get(keeper.take.remote(refs))
        given, end = keeper.give.remote(), keeper.__ray_terminate__.remote()
        assert ray.get(ray.get(given)) == ["kept"] and dead(end)


def test_exit_actor_is_for_actors():
    with pytest.raises(TypeError, match="non-actor worker"):
        exit_actor()
    with pytest.raises(TypeError, match="non-actor worker"):
        ray.get(ray.remote(lambda: exit_actor()).remote())


@pytest.mark.parametrize("kind", [Plain, Async])
def test_sigterm_ends_an_actor_after_the_calls_that_run_at_the_same_time(kind: type, marks: Marks):
    actor = ray.remote(kind).options(max_concurrency=3).remote()
    running = actor.get_later.remote(marks, [ray.put("value")])
    eventually(marks.lines)
    assert ray.get(actor.signal.remote(signal.SIGTERM)) == "sent"
    time.sleep(0.2)  # its handler runs in the main thread; until then the thread of the event loop takes calls
    waiting = [actor.ping.remote() for _ in range(10)]
    time.sleep(0.2)
    marks.add()
    assert ray.get(running) == "value"
    assert all(map(dead, waiting))


def test_sigterm_interrupts_the_call_of_an_actor_that_runs_one_at_a_time(marks: Marks):
    actor = ray.remote(Plain).options(max_restarts=1, max_task_retries=1).remote()
    assert ray.get(actor.signal_oneself_once.remote(marks)) == "second"
    assert marks.lines() == ["finally", "atexit"], "what SystemExit runs, and the exit handlers"


def test_sigterm_of_an_idle_actor_and_of_a_task_is_a_crash(marks: Marks):
    actor = ray.remote(Plain).options(max_restarts=1, max_task_retries=-1).remote()
    first = ray.get(actor.pid.remote())
    os.kill(first, signal.SIGTERM)
    assert eventually(lambda: not alive(first))
    assert ray.get(actor.pid.remote()) != first

    @ray.remote(max_retries=1)
    def task():
        if marks.add() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return len(marks.lines())

    assert ray.get(task.remote()) == 2


def left_to_other_threads(kind: type):
    """A class of actors whose main thread blocks SIGTERM."""

    class LeavesSignals(kind):
        def __init__(self):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    return LeavesSignals


@hpcray_only
@pytest.mark.parametrize(("kind", "limit"), [(Plain, 1), (Plain, 2), (Async, 2)])
def test_sigterm_ends_an_idle_actor_whose_wait_it_does_not_interrupt(kind: type, limit: int):
    """As when it comes between the last look of Python at its signals and the wait: here another thread gets it."""
    actor = ray.remote(left_to_other_threads(kind)).options(max_concurrency=limit).remote()
    pid = ray.get(actor.pid.remote())
    time.sleep(0.5)  # the background thread sleeps too
    os.kill(pid, signal.SIGTERM)
    assert eventually(lambda: not alive(pid), patience=10)


def test_children_that_a_task_forks_can_be_terminated():
    @ray.remote
    def forks():
        pid = os.fork()
        if not pid:
            time.sleep(60)
            os._exit(0)
        time.sleep(0.2)
        os.kill(pid, signal.SIGTERM)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert ray.get(forks.remote()) == -signal.SIGTERM


class Tidy(Plain):
    def __init__(self, marks):
        self.marks = marks

    def ray_get(self):
        return ray.get(ray.put(1))

    def __ray_shutdown__(self):
        self.marks.add(f"shutdown{self.ray_get()}")

    def __del__(self):
        self.marks.add("del")


@pytest.mark.parametrize("how", ["out of scope", "exit_actor", "terminate", "sys.exit", "SIGTERM"])
def test_what_an_actor_does_at_its_end(how: str, marks: Marks):
    actor = ray.remote(Tidy).options(max_concurrency=1 + (how == "SIGTERM")).remote(marks)
    pid = ray.get(actor.pid.remote())
    if how == "exit_actor":
        assert dead(actor.raised.remote())
    elif how == "terminate":
        assert dead(actor.__ray_terminate__.remote())
    elif how == "sys.exit":
        assert dead(actor.leave.remote())
    elif how == "SIGTERM":
        os.kill(pid, signal.SIGTERM)
    del actor
    eventually(lambda: not alive(pid))
    assert marks.lines() == ["shutdown1", "del"]


def test_a_killed_actor_does_nothing_at_its_end(marks: Marks):
    actor = ray.remote(Tidy).remote(marks)
    pid = ray.get(actor.pid.remote())
    ray.kill(actor)
    eventually(lambda: not alive(pid))
    assert marks.lines() == []


def test_a_shutdown_that_raises_leaves_nothing(marks: Marks):
    @ray.remote
    class Broken(Plain):
        def __ray_shutdown__(self):
            raise ValueError("not today")

    pid = ray.get(Broken.remote().pid.remote())
    eventually(lambda: not alive(pid))


@hpcray_only
def test_an_actor_that_takes_too_long_to_end_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(STUCK)
    ended = run_script(script, RAY_actor_graceful_shutdown_timeout_ms="500")
    assert ended.returncode == 0, ended.stderr
    assert "its end took longer than 0.5 s" in ended.stderr


STUCK = """
import os, time
import engine_under_test as ray

ray.init(num_cpus=1)

@ray.remote
class Stuck:
    def pid(self):
        return os.getpid()

    def __ray_shutdown__(self):
        time.sleep(1000)

actor = Stuck.remote()
pid = ray.get(actor.pid.remote())
del actor
deadline = time.monotonic() + 60
while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
    time.sleep(0.02)
assert not os.path.exists(f"/proc/{pid}")
time.sleep(0.5)
"""
