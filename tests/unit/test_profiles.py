"""Profiles: what a process says of itself while it is sampled, and the files that are made of it."""

from __future__ import annotations

import ctypes
import json
import threading
import time
import tracemalloc
from typing import Any

import pytest

from hpcray.diagnostics.process_profile import INTERNAL, MemoryGrowth, StackSampler
from hpcray.state.profile import (
    JobProfile,
    ProcessProfile,
    ProfiledStack,
    folded,
    limits,
    speedscope,
    time_by_label,
    top_functions,
)

HERE = __file__


def spins(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def sleeps(seconds: float) -> None:
    time.sleep(seconds)


def keeps_the_lock(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def sampled(work: Any, label: str = "work", everything: bool = False) -> dict[str, Any]:
    """What a sampler says of this thread while it does some work."""
    me = threading.get_ident()
    sampler = StackSampler(lambda frames: ({me: label} if label else {}, "idle"), everything)
    stop, found = threading.Event(), {}
    thread = threading.Thread(target=lambda: found.update(sampler.run(60.0, 100.0, stop)), name="hpcray-profile")
    thread.start()
    work()
    stop.set()
    thread.join()
    return found


def time_of(found: dict[str, Any], function: str) -> tuple[float, float]:
    rows = [row for row in found["stacks"] if row[5][-1][2].endswith(function)]
    return sum(row[2] for row in rows), sum(row[3] for row in rows)


def test_computing_counts_as_cpu_time_and_sleeping_does_not() -> None:
    found = sampled(lambda: (spins(0.4), sleeps(0.4)))
    wall, cpu = time_of(found, "spins")
    assert wall >= cpu >= 0.3
    wall, cpu = time_of(found, "sleeps")
    assert wall >= 0.3 and cpu < 0.1
    # Threads that other tests have left may compute too.
    assert {row[0] for row in found["stacks"] if row[5][-1][2].endswith(("spins", "sleeps"))} == {"work"}
    frames = next(row[5] for row in found["stacks"] if row[5][-1][2].endswith("sleeps"))
    assert frames[-1][0] == HERE and frames[-1][1] == sleeps.__code__.co_firstlineno


def test_c_code_that_keeps_the_lock_counts_in_full_for_the_line_that_called_it() -> None:
    # A thread that another test has left may get the lock before the sampler does, and the work go on meanwhile.
    tries = (sampled(lambda: keeps_the_lock(0.5)) for _ in range(5))
    found = next(found for found in tries if time_of(found, "keeps_the_lock")[0])
    assert time_of(found, "keeps_the_lock")[0] >= 0.4
    assert found["gap"] >= 0.4


def test_what_runs_nothing_is_idle() -> None:
    found = sampled(lambda: sleeps(0.3), label="")
    assert found["idle"]["idle"] >= 0.2 and sum(row[2] for row in found["stacks"]) < 0.1


def test_a_thread_that_works_for_no_task_counts_while_it_computes() -> None:
    thread = threading.Thread(target=spins, args=(0.3,), name="loader")

    def work() -> None:
        thread.start()
        sleeps(0.5)
        thread.join()

    found = sampled(work)
    rows = [row for row in found["stacks"] if row[0] == "(thread loader)"]
    assert sum(row[3] for row in rows) >= 0.2
    assert sum(row[2] for row in rows) == pytest.approx(sum(row[3] for row in rows))


def test_own_frames_are_shown_on_request_only() -> None:
    sampler = StackSampler(lambda frames: ({}, ""), False)
    codes = (StackSampler.answer.__code__,)
    assert sampler._shown("task", codes) == (("", 0, INTERNAL),)
    assert sampler._shown("(thread x)", codes) == ()
    assert StackSampler(lambda frames: ({}, ""), True)._shown("task", codes)[0][2].endswith("answer")


def test_memory_that_stays_is_found_by_its_line_and_freed_memory_is_not() -> None:
    assert not tracemalloc.is_tracing()
    growth = MemoryGrowth()
    kept = [bytes(1000) for _ in range(2000)]
    freed = [bytes(1000) for _ in range(2000)]
    del freed
    found = growth.answer(False)
    assert not tracemalloc.is_tracing()
    assert len(kept) == 2000 and 2e6 < found["traced"] < 3.5e6
    largest = found["stacks"][0]
    assert largest[2] >= 2e6 and largest[4] >= 2000
    assert largest[5][-1][0] == HERE and largest[1] == largest[5][-1][1]
    assert found["after"]["anonymous"] > 0


def test_tracing_that_the_program_has_started_goes_on() -> None:
    tracemalloc.start()
    try:
        old = [bytes(1000) for _ in range(2000)]
        growth, other = MemoryGrowth(), MemoryGrowth()
        new = [bytes(1000) for _ in range(1000)]
        found = growth.answer(False)
        other.close()
        assert tracemalloc.is_tracing() and old and new
        assert 1e6 < found["traced"] < 1.9e6
    finally:
        tracemalloc.stop()


OUTER, INNER = ("/job/train.py", 3, "step<T>"), ("/job/train.py", 9, "Model.forward")


def example() -> JobProfile:
    first = ProcessProfile("process 0.1", 11, "worker", 0, "n1", seconds=4.0, samples=400, idle={"idle": 1.0})
    first.stacks = [
        ProfiledStack("step", (OUTER, INNER), 12, 2.0, 1.5, 200),
        ProfiledStack("step", (OUTER,), 4, 1.0, 0.0, 100),
    ]
    second = ProcessProfile("process 1.1", 12, "worker", 1, "n2", seconds=4.0, samples=10, gap=2.0, native_cpu=3.0)
    second.stacks = [ProfiledStack("step", (OUTER, INNER), 13, 3.0, 3.0, 300)]
    silent = ProcessProfile("process 1.2", 13, "worker", 1, "n2", problem="it does not answer")
    return JobProfile(0.0, 4.0, 100.0, "seconds", [first, second, silent])


def test_functions_have_their_own_time_their_total_and_their_hottest_line() -> None:
    inner, outer = top_functions(example().stacks())
    assert (inner.frame, inner.own, inner.total, inner.cpu, inner.line) == (INNER, 5.0, 5.0, 4.5, 13)
    assert (outer.frame, outer.own, outer.total, outer.line) == (OUTER, 1.0, 6.0, 4)
    assert time_by_label(example()) == [("step", 6.0, 4.5, 2)]


def test_a_recursive_function_counts_once() -> None:
    (row,) = top_functions([ProfiledStack("f", (OUTER, OUTER, OUTER), 1, 2.0, 2.0, 1)])
    assert (row.own, row.total) == (2.0, 2.0)


def test_a_profile_says_what_it_does_not_show() -> None:
    text = "\n".join(limits(example()))
    assert "3.0 s of CPU were used by threads that are not Python's" in text
    assert "process 1.1 (worker, pid 12, node 1) could not be sampled for up to 2.0 s" in text


def test_folded_text_has_a_line_per_stack_with_microseconds() -> None:
    assert folded(example()).splitlines() == [
        "step;step<T> (train.py:3);Model.forward (train.py:9) 5000000",
        "step;step<T> (train.py:3) 1000000",
        "(idle) 1000000",
    ]


def test_speedscope_gets_all_processes_cpu_time_and_each_process() -> None:
    found = json.loads(speedscope(example()))
    names = [one["name"] for one in found["profiles"]]
    assert names[:2] == ["all processes", "all processes, CPU time"] and len(names) == 4
    frames = found["shared"]["frames"]
    whole = found["profiles"][0]
    assert whole["type"] == "sampled" and whole["unit"] == "seconds" and whole["endValue"] == 6.0
    assert len(whole["samples"]) == len(whole["weights"])
    assert [frames[place]["name"] for place in whole["samples"][0]] == ["step", "step<T>", "Model.forward"]
    assert all(place < len(frames) for one in found["profiles"] for row in one["samples"] for place in row)
