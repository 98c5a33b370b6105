"""`hpcray profile`: the processes of a running job sample themselves."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from engine import PATIENCE, Marks, eventually, hpcray_only, ray

from hpcray.cli.profile import profile as profile_command
from hpcray.diagnostics.cluster_query import ClusterQuery, stacks
from hpcray.runtime.core_worker.core_worker import need_process
from hpcray.state.profile import JobProfile, JobProfiler, ProcessProfile, ProfileError, ProfileRequest

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 3}


def hot(end):
    while time.monotonic() < end:
        pass


def sleeps(seconds):
    time.sleep(seconds)


@ray.remote
def step(marks, seconds):
    marks.add(str(os.getpid()))
    sleeps(seconds / 2)
    hot(time.monotonic() + seconds / 2)


@ray.remote
def stuck(marks, seconds):
    """Keeps Python's lock in C code."""
    marks.add(str(os.getpid()))
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


@ray.remote
def waits(refs):
    ray.get(refs)


@ray.remote(num_cpus=0)
class Async:
    async def compute(self, marks, seconds):
        marks.add(str(os.getpid()))
        hot(time.monotonic() + seconds)


@ray.remote(num_cpus=0)
class Hoarder:
    def __init__(self):
        self.kept = []
        self.blob = None

    def hoard(self, marks):
        marks.add(str(os.getpid()))
        end = time.monotonic() + 600
        while time.monotonic() < end:
            self.kept.append(bytes(100_000))
            time.sleep(0.01)


def take(wait=time.sleep, patience=PATIENCE, **request) -> JobProfile:
    return JobProfiler(need_process(), ProfileRequest(**request), patience).take(wait)


def of(found: JobProfile, pid: int) -> ProcessProfile:
    (one,) = [one for one in found.processes if one.pid == pid]
    return one


def running(marks: Marks, count: int = 1) -> list[int]:
    eventually(lambda: len(marks.lines()) >= count)
    return [int(pid) for pid in marks.lines()]


def time_in(one: ProcessProfile, function: str) -> float:
    return sum(stack.value for stack in one.stacks if any(frame[2].endswith(function) for frame in stack.frames))


def profile_threads() -> list[str]:
    """Processes in which a profile is being made."""
    rows = [one for node in stacks(ClusterQuery(need_process(), PATIENCE)) for one in node["processes"]]
    return [one["process"] for one in rows for thread in one["threads"] if thread["name"] == "hpcray-profile"]


def test_tasks_are_sampled_by_name_function_and_line_and_nothing_stays_behind(marks: Marks):
    step.remote(marks, 3.0)
    waiting = waits.remote([step.remote(marks, 3.0)])
    pids = running(marks, 2)
    found = take(seconds=2.0)
    for pid in pids:
        one = of(found, pid)
        assert not one.problem and one.samples > 20 and one.seconds == pytest.approx(2.0, abs=0.5)
        tasks = [stack for stack in one.stacks if stack.label == "step"]
        assert time_in(one, "sleeps") > 0.3 and time_in(one, "hot") > 0.1
        assert all(stack.frames[0][2] == "step" and stack.frames[0][0] == __file__ for stack in tasks)
        assert one.cost < 0.5
    labels = {stack.label for stack in found.stacks()}
    assert {"step", "waits"} <= labels
    (get,) = {stack.frames for stack in found.stacks() if stack.label == "waits"}
    assert get[0][2] == "waits" and len(get) == 2, "of hpcray's frames the one that the task calls"
    ray.get(waiting)
    assert not profile_threads()


def test_idle_workers_are_said_to_be_idle(marks: Marks):
    ray.get(step.remote(marks, 0.0))
    found = take(seconds=0.6)
    idle = [one for one in found.answered if one.kind == "worker" and not one.actor]
    assert idle and all(one.idle["idle"] > 0.3 and not one.stacks for one in idle)


@pytest.mark.slow
def test_calls_of_async_actors_are_sampled_by_name(marks: Marks):
    actor = Async.remote()
    call = actor.compute.remote(marks, 2.0)
    (pid,) = running(marks)
    found = take(seconds=1.0, actor="Async")
    assert [one.pid for one in found.processes] == [pid]
    (one,) = found.processes
    assert {stack.label for stack in one.stacks} == {"Async.compute"} and time_in(one, "hot") > 0.5
    ray.get(call)


@pytest.mark.slow
def test_a_profile_of_a_task_an_actor_or_a_node_has_nothing_else(marks: Marks):
    refs = [step.remote(marks, 2.0)]
    running(marks)
    found = take(seconds=0.5, task="step")
    assert {stack.label for stack in found.stacks()} == {"step"}
    assert not take(seconds=0.2, task="no_such_task").stacks()
    with pytest.raises(ProfileError, match="no node 7"):
        take(seconds=0.2, nodes=[7])
    with pytest.raises(ProfileError, match="no actor 'nobody'"):
        take(seconds=0.2, actor="nobody")
    actor = Hoarder.options(name="one of them").remote()
    ray.get(actor.__ray_ready__.remote())
    assert [one.actor for one in take(seconds=0.2, actor="one of them").processes] == ["Hoarder"]
    ray.kill(actor)
    eventually(lambda: ray.util.state.list_actors(filters=[("name", "=", "one of them")])[0].state == "DEAD")
    with pytest.raises(ProfileError, match="does not live: DEAD"):
        take(seconds=0.2, actor="one of them")
    ray.get(refs)


@pytest.mark.slow
def test_a_process_that_keeps_pythons_lock_is_reported_with_its_stack(marks: Marks):
    ref = stuck.remote(marks, 8.0)
    (pid,) = running(marks)
    one = of(take(seconds=0.5, patience=0.5), pid)
    assert one.problem == "it does not answer"
    assert "state" in one.kernel and "in stuck" in one.kernel["stacks"]
    ray.get(ref)
    eventually(lambda: not profile_threads())


@pytest.mark.slow
def test_time_in_c_code_that_keeps_the_lock_for_a_while_counts(marks: Marks):
    ref = stuck.remote(marks, 1.5)
    (pid,) = running(marks)
    found = take(seconds=3.0)
    one = of(found, pid)
    assert not one.problem and one.gap > 0.5
    ray.get(ref)


@pytest.mark.slow
def test_a_worker_that_dies_meanwhile_is_reported_and_new_ones_are_sampled(marks: Marks):
    doomed = step.options(max_retries=0).remote(marks, 30.0)
    (pid,) = running(marks)
    refs = []

    def wait(seconds):
        if not refs:
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: ray.wait([doomed], timeout=0)[0])
            refs.append(step.remote(marks, 6.0))
            eventually(lambda: len(marks.lines()) > 1)
        time.sleep(min(seconds, 0.5))

    found = take(wait, seconds=2.0)
    assert of(found, pid).problem == "it has ended meanwhile"
    assert time_in(of(found, int(marks.lines()[1])), "sleeps") > 0.2
    ray.cancel(refs[0], force=True)


@pytest.mark.slow
def test_ctrl_c_ends_it_early_and_shows_what_there_is(marks: Marks):
    ref = step.remote(marks, 3.0)
    (pid,) = running(marks)

    def wait(seconds):
        time.sleep(0.6)
        raise KeyboardInterrupt

    began = time.monotonic()
    found = take(wait, seconds=600.0)
    assert time.monotonic() - began < 30 and found.seconds < 30
    assert time_in(of(found, pid), "sleeps") > 0.2
    ray.get(ref)
    assert not profile_threads()


@pytest.mark.slow
def test_several_profiles_at_once_do_not_disturb_each_other(marks: Marks):
    ref = step.remote(marks, 3.0)
    (pid,) = running(marks)
    found: list[JobProfile] = []
    threads = [threading.Thread(target=lambda: found.append(take(seconds=1.0))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert all(time_in(of(one, pid), "step") > 0.5 for one in found)
    ray.get(ref)


@pytest.mark.slow
def test_memory_that_grows_is_shown_by_the_line_that_allocates_it(marks: Marks):
    actor = Hoarder.remote()
    actor.hoard.remote(marks)
    (pid,) = running(marks)
    found = take(seconds=1.5, memory=True)
    one = of(found, pid)
    largest = one.stacks[0]
    assert found.unit == "bytes" and largest.value > 1e6 and largest.count > 10
    assert largest.frames[-1][0] == __file__
    assert one.memory["traced"] >= largest.value
    result = run("--memory", "--seconds", "1", "--actor", "Hoarder")
    assert "test_profile.py" in result.output and "the processes have grown by" in result.output
    ray.kill(actor)


def run(*words: str):
    address = ray.init(ignore_reinit_error=True)["address"]
    return CliRunner().invoke(profile_command, ["--job", address, *words], catch_exceptions=False)


def test_the_command_prints_tables_and_writes_files(marks: Marks, tmp_path: Path):
    ref = step.remote(marks, 4.0)
    running(marks)
    names = ["p.json", "p.txt"]
    files = [word for name in names for word in ("-o", str(tmp_path / name))]
    result = run("--seconds", "1", *files)
    assert result.exit_code == 0, result.output
    assert "samples per second" in result.output and "step" in result.output and "test_profile.py:" in result.output
    assert "C code shows as the line of Python" in result.output
    assert json.loads((tmp_path / "p.json").read_text())["profiles"]
    assert "step;step (test_profile.py:" in (tmp_path / "p.txt").read_text()
    found = json.loads(run("--seconds", "0.3", "--json").output)
    assert found["unit"] == "seconds" and any(one["stacks"] for one in found["processes"])
    refused = run("--seconds", "1", "-o", "p.svg")
    assert refused.exit_code == 2 and "flame graphs: FILE.json" in refused.output
    ray.get(ref)
