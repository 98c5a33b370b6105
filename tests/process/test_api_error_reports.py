"""What the user is told beside an exception: errors that nobody looked at, code that a worker cannot load."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from engine import PATIENCE, eventually, exceptions, hpcray_only, ray

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 2}


@pytest.fixture
def logged():
    """The records of hpcray's logger."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("hpcray")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


@ray.remote
def fail(text):
    raise ValueError(text)


@ray.remote
class Failing:
    def fail(self, text):
        raise ValueError(text)


@ray.remote
def caught(refs):
    with pytest.raises(ValueError):
        ray.get(refs[0])
    return True


@ray.remote
def echo(value):
    return value


@ray.remote
def two_then_error():
    yield 0
    yield 1
    raise ValueError("third")


def unhandled(logged):
    return [text for text in logged if text.startswith("Unhandled error")]


def test_errors_that_nobody_looked_at_are_logged(logged):
    actor = Failing.remote()
    refs = [fail.remote("early")]
    ray.wait(refs)
    refs += [fail.remote("late"), actor.fail.remote("method")]
    del refs
    eventually(lambda: len(unhandled(logged)) == 3)
    assert {text.split()[-1] for text in unhandled(logged)} == {"early", "late", "method"}


def test_errors_that_somebody_looked_at_are_not_logged(logged, monkeypatch):
    refs = [fail.remote("gets") for _ in range(3)]
    for ref in refs[:2]:
        with pytest.raises(ValueError):
            ray.get(ref)
    with pytest.raises(ValueError):
        ray.get(refs)
    elsewhere = [fail.remote("read elsewhere"), fail.remote("read elsewhere")]
    ray.wait(elsewhere[1:])
    assert ray.get([caught.remote([ref]) for ref in elsewhere])
    failed = echo.remote(fail.remote("an argument"))
    with pytest.raises(ValueError):
        ray.get(failed)
    del refs, elsewhere, failed, ref
    monkeypatch.setenv("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    fail.remote("ignored")
    assert ray.get(echo.remote(1)) == 1
    time.sleep(0.5)
    assert unhandled(logged) == []


def test_values_that_a_generator_yielded_before_its_error_are_no_errors(logged):
    refs = two_then_error.options(num_returns=4).remote()
    assert ray.get(refs[:2]) == [0, 1]
    with pytest.raises(ValueError):
        ray.get(refs[2:])
    del refs
    unread = two_then_error.options(num_returns=4).remote()
    ray.wait(unread, num_returns=4)
    del unread
    eventually(lambda: len(unhandled(logged)) == 2)
    time.sleep(0.2)
    assert len(unhandled(logged)) == 2


@pytest.fixture
def only_here():
    """A module that workers cannot import."""
    module = types.ModuleType("only_here")
    exec("def f(): return 1\nclass C: pass", module.__dict__)
    sys.modules["only_here"] = module
    yield module
    del sys.modules["only_here"]


def test_code_that_a_worker_cannot_load_says_so(only_here):
    with pytest.raises(RuntimeError, match=r"The remote function failed to import on the worker.*\n(.*\n)*.*only_here"):
        ray.get(ray.remote(lambda: only_here.f()).remote())

    @ray.remote
    class Actor:
        def __init__(self):
            only_here.f()

    with pytest.raises(exceptions.ActorDiedError, match="The actor with name Actor failed to import on the worker"):
        ray.get(Actor.remote().__ray_ready__.remote())


def test_a_value_that_does_not_unpickle_is_a_system_error(only_here):
    with pytest.raises(exceptions.RaySystemError, match="System error: No module named 'only_here'") as info:
        ray.get(echo.remote(only_here.C()))
    assert isinstance(info.value, exceptions.RayTaskError)
    ref = ray.put([only_here.C()])
    del sys.modules["only_here"]
    try:
        with pytest.raises(exceptions.RaySystemError, match="only_here"):
            ray.get(ref)
    finally:
        sys.modules["only_here"] = only_here


def test_a_get_that_blocks_the_loop_of_an_async_actor_is_warned_of_once():
    @ray.remote
    class Async:
        def __init__(self):
            self.records = []
            handler = logging.Handler()
            handler.emit = lambda record: self.records.append(record.getMessage())
            logging.getLogger("hpcray").addHandler(handler)

        async def blocks(self, refs):
            assert ray.get(refs) == [1]
            assert ray.get(refs[0]) == 1
            return self.records

        async def awaits(self, refs):
            assert await refs[0] == 1
            return self.records

    actor = Async.remote()
    assert ray.get(actor.awaits.remote([ray.put(1)])) == []
    assert [text.partition(".")[0] for text in ray.get(actor.blocks.remote([ray.put(1)]))] == ["Using blocking ray"]


@ray.remote(max_retries=2)
def crashes_unless(path):
    if not os.path.exists(path):
        open(path, "w").close()
        os._exit(3)


@ray.remote(max_retries=2, retry_exceptions=True)
def raises_unless(path):
    if not os.path.exists(path):
        open(path, "w").close()
        raise KeyError


@ray.remote(max_restarts=3)
class Restarting:
    def leave(self):
        os._exit(4)


def test_a_task_that_runs_again_and_an_actor_that_restarts_are_named_with_the_reason(logged, tmp_path):
    ray.get([crashes_unless.remote(str(tmp_path / "crashes")), raises_unless.remote(str(tmp_path / "raises"))])
    actor = Restarting.remote()
    with pytest.raises(exceptions.RayActorError):
        ray.get(actor.leave.remote())
    eventually(lambda: len(logged) == 3)
    texts = {" ".join(text.split()[1:4]): text for text in logged}
    crash = texts["task crashes_unless runs"]
    assert crash.startswith("hpcray: task crashes_unless runs again (retry 1 of 2): worker process")
    assert crash.endswith("exit code 3")
    assert texts["task raises_unless runs"].endswith("runs again (retry 1 of 2): it raised KeyError (node 0)")
    assert ", restart 1 of 3): its worker process" in texts["actor Restarting restarts"]


def test_a_burst_of_retries_is_one_line(logged, tmp_path):
    ray.get([raises_unless.options(max_retries=1).remote(str(tmp_path / str(index))) for index in range(20)])
    time.sleep(0.2)
    assert len([text for text in logged if "raises_unless" in text]) <= 1


def test_a_crash_in_c_shows_the_python_stack():
    script = """
import ctypes, hpcray as ray
ray.init(num_cpus=1)
@ray.remote(max_retries=0)
def segfault():
    ctypes.string_at(0)
try:
    ray.get(segfault.remote())
except ray.exceptions.WorkerCrashedError as error:
    assert "SIGSEGV" in str(error), error
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert "Segmentation fault" in run.stderr
    assert "in segfault" in run.stderr


def test_the_kernel_would_end_workers_first():
    score = ray.get(ray.remote(Path.read_text).remote(Path("/proc/self/oom_score_adj")))
    assert int(score) == 1000


@pytest.mark.skipif((os.cpu_count() or 1) > 8, reason="the warning comes after 8 processes for each CPU")
def test_tasks_that_wait_for_each_other_without_end_are_warned_of():
    script = """
import hpcray as ray
ray.init(num_cpus=1)
@ray.remote
def deeper(left):
    return 0 if left == 0 else 1 + ray.get(deeper.remote(left - 1))
assert ray.get(deeper.remote(70)) == 70
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert run.stderr.count("worker processes have been started here") == 1, run.stderr
