"""Who is ended when memory is short, when, and what becomes of the task."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcray.common.config import Config
from hpcray.common.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError, WorkerCrashedError
from hpcray.core.core_worker.task import PendingTask
from hpcray.core.raylet.worker_pool import (
    SMALLEST_SHARE,
    Candidate,
    WorkerKillingPolicy,
    choose_victim,
    explain_kill,
)
from hpcray.platform import resource_limits
from hpcray.protocol.messages import LOW_MEMORY, NOTHING_BESIDE, out_of_memory
from hpcray.runtime.core_worker.task_retries import HOPELESS_RUNS, CrashRetries, actor_error

MB = 1 << 20


def one(name: str, used: int, since: float, retriable: bool = True) -> Candidate:
    return Candidate(name.encode(), len(name), used * MB, since, retriable, name)


def test_the_victim_is_a_large_retriable_worker_and_of_these_the_newest() -> None:
    old, new, final = one("old", 100, 1.0), one("new", 90, 2.0), one("final", 110, 3.0, retriable=False)
    assert choose_victim([old, new, final]) is new
    assert choose_victim([old, final]) is old
    assert choose_victim([final]) is final
    assert choose_victim([]) is None


def test_an_idle_worker_that_owns_nothing_ends_like_a_retriable_one_and_one_that_owns_objects_last() -> None:
    task, final, idle = one("task", 100, 1.0), one("final", 100, 2.0, retriable=False), one("", 100, 3.0)
    owner = one("", 110, 4.0, retriable=False)
    assert choose_victim([task, final, idle, owner]) is idle
    assert choose_victim([task, final, owner]) is task
    assert choose_victim([final, owner]) is final
    assert choose_victim([owner]) is owner


def test_small_workers_do_not_die_for_a_large_one() -> None:
    hog = one("hog", 1000, 1.0, retriable=False)
    assert choose_victim([hog, *(one(f"small{i}", 1000 // SMALLEST_SHARE - 1, 9.0 + i) for i in range(50))]) is hog


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 9), st.booleans()), min_size=1))
def test_the_victim_is_large_enough_and_no_better_one_is_left(rows: list[tuple[int, int, bool]]) -> None:
    people = [one(str(place), used, since, retriable) for place, (used, since, retriable) in enumerate(rows)]
    victim = choose_victim(people)
    assert victim is not None
    assert victim.used * SMALLEST_SHARE >= max(person.used for person in people)
    large = [person for person in people if person.used * SMALLEST_SHARE >= max(other.used for other in people)]
    assert victim.retriable or not any(person.retriable for person in large)
    rivals = [person for person in large if person.retriable == victim.retriable]
    assert victim.since == max(person.since for person in rivals)


def test_no_second_worker_is_killed_while_the_first_is_ending() -> None:
    policy = WorkerKillingPolicy(0.9, exit_timeout=2.0)
    assert not policy.must_kill(0.0, 90, 100) and policy.must_kill(0.0, 91, 100)
    policy.worker_killed(0.0, b"a")
    assert not policy.must_kill(1.9, 99, 100)
    assert policy.must_kill(2.0, 99, 100), "it does not die: another one must"
    policy.worker_killed(3.0, b"b")
    policy.worker_died(b"a")
    assert not policy.must_kill(3.1, 99, 100)
    policy.worker_died(b"b")
    assert policy.must_kill(3.1, 99, 100)
    assert policy.is_critical(96, 100) and not policy.is_critical(95, 100)
    assert not WorkerKillingPolicy(0.0).must_kill(0.0, 100, 100)


def test_the_reason_names_use_by_process_and_is_found_again_on_its_way() -> None:
    people = [one(f"task{i}", i, 0.0) for i in range(20)]
    text = explain_kill(people[-1], people, "node 3 (host a)", 95 * MB, 100 * MB, 0.9)
    assert text.startswith(LOW_MEMORY) and "node 3 (host a)" in text and "(0.950)" in text
    assert text.count("  pid ") == 10 and "task19" in text and "task9\n" not in text
    assert out_of_memory(f"worker process 7 (pid 1) on node 0 died: {text}") == text
    assert out_of_memory("signal 9 (SIGKILL)") == ""


def task(retries: int) -> PendingTask:
    return PendingTask(b"t", None, "work", b"", 1, None, None, retries)


def test_lack_of_memory_does_not_count_against_max_retries() -> None:
    crashes = CrashRetries(-1)
    work = task(3)
    for _ in range(100):
        assert crashes.verdict(work, "w", f"died: {LOW_MEMORY}") is None
        work.retries -= 1  # as every further run does
    assert work.retries == 3
    assert isinstance(crashes.verdict(task(0), "w", LOW_MEMORY), OutOfMemoryError)
    assert crashes.verdict(work, "w", "signal 9") is None
    assert isinstance(crashes.verdict(task(0), "w", "signal 9"), WorkerCrashedError)
    assert isinstance(crashes.verdict(task(0), "w", "node 1 died", node_died=True), NodeDiedError)
    assert crashes.verdict(task(1), "w", "node 1 died", node_died=True) is None
    assert crashes.verdict(task(-1), "w", LOW_MEMORY) is None


def test_task_oom_retries_bounds_it() -> None:
    crashes = CrashRetries(2)
    work = task(-1)
    assert [crashes.verdict(work, "w", LOW_MEMORY) for _ in range(2)] == [None, None]
    error = crashes.verdict(work, "w", LOW_MEMORY)
    assert isinstance(error, OutOfMemoryError) and "it ran 3 times" in str(error)


def test_without_a_bound_it_ends_where_nothing_else_could_make_room() -> None:
    large = one("large", 1000, 1.0)
    alone = explain_kill(large, [large, one("small", 200, 0.0), one("", 900, 0.0)], "here", 99, 100, 0.9)
    beside = explain_kill(large, [large, one("a", 150, 0.0), one("b", 150, 0.0)], "here", 99, 100, 0.9)
    assert NOTHING_BESIDE in alone and NOTHING_BESIDE not in beside
    crashes, work = CrashRetries(-1), task(-1)
    for _ in range(100):
        assert crashes.verdict(work, "w", beside) is None
    for _ in range(HOPELESS_RUNS - 1):
        assert crashes.verdict(work, "w", alone) is None
    error = crashes.verdict(work, "w", alone)
    assert isinstance(error, OutOfMemoryError)
    assert all(name in str(error) for name in ("HPCRAY_MEMORY_USAGE_THRESHOLD", "HPCRAY_TASK_OOM_RETRIES", "110 times"))
    crashes = CrashRetries(50)
    assert [crashes.verdict(work, "w", alone) for _ in range(50)] == [None] * 50


def test_a_task_that_is_over_is_forgotten() -> None:
    crashes = CrashRetries(1)
    work = task(-1)
    assert crashes.verdict(work, "w", LOW_MEMORY) is None
    crashes.run_ended(work.id)
    assert crashes.verdict(work, "w", LOW_MEMORY) is None, "it is made again: another matter"
    assert crashes.verdict(work, "w", LOW_MEMORY) is not None


def test_the_error_of_a_dead_actor() -> None:
    assert isinstance(actor_error(b"a", "A", f"its worker died: {LOW_MEMORY}"), OutOfMemoryError)
    assert isinstance(actor_error(b"a", "A", "signal 9"), ActorDiedError)


def test_rays_variables_are_read_and_ours_go_first() -> None:
    rays = {"RAY_memory_usage_threshold": "0.5", "RAY_memory_monitor_refresh_ms": "100", "RAY_task_oom_retries": "3"}
    config = Config.from_env(rays)
    assert (config.memory_usage_threshold, config.memory_monitor_period, config.task_oom_retries) == (0.5, 0.1, 3)
    assert Config.from_env({**rays, "HPCRAY_MEMORY_USAGE_THRESHOLD": "0.7"}).memory_usage_threshold == 0.7
    with pytest.raises(ValueError, match="RAY_task_oom_retries"):
        Config.from_env({"RAY_task_oom_retries": "many"})


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_without_what_the_kernel_can_take_back(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    names = names if version == 1 else ("memory.max", "memory.current", "inactive_file")
    for name, value in zip(names[:2], (1000, 900), strict=True):
        (tmp_path / name).write_text(f"{value}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\n{names[2]} 100\n")
    monkeypatch.setattr(resource_limits, "_cgroup_directories", lambda controller: iter([tmp_path, tmp_path / "none"]))
    monkeypatch.setattr(resource_limits, "_machine", lambda: resource_limits.MemoryUsage(10, 10_000, "the machine"))
    assert resource_limits.MemoryGauge().read([], 0) == resource_limits.MemoryUsage(800, 1000, "its cgroup")
    (tmp_path / names[0]).write_text("max\n" if version == 2 else f"{(1 << 63) - 4096}\n")
    assert resource_limits.MemoryGauge().read([], 0).source == "the machine"


def test_a_given_limit_is_reckoned_up_by_process() -> None:
    import os

    gauge = resource_limits.MemoryGauge(1 << 20)
    usage = gauge.read([os.getpid()], 5)
    assert usage.source == "memory_limit" and usage.used > 1 << 20
