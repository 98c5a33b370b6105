"""A task that takes too much memory is ended before the kernel ends anything, and the job goes on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from engine import Marks, exceptions, hpcray_only, ray

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
MB = 1 << 20
INIT = {
    "num_cpus": 2,
    "object_store_memory": 64 * MB,
    "memory_limit": 500 * MB,  # of this node's processes together, of which this is one
    "memory_monitor_period": 0.05,
}


@pytest.fixture(scope="module", autouse=True)
def _room_beside_what_other_tests_have_imported() -> None:
    INIT["memory_limit"] = 400 * MB + int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def take(megabytes: int) -> int:
    """Touch so much memory, slowly enough to be seen."""
    blocks = []
    for _ in range(megabytes // 20):
        blocks.append(b"x" * (20 * MB))
        time.sleep(0.02)
    return len(blocks)


@ray.remote
def add(value):
    return value + 1


@pytest.fixture(autouse=True)
def the_same_job_runs_100_more_tasks():
    yield
    assert ray.get([add.remote(i) for i in range(100)]) == list(range(1, 101))


def test_a_task_that_must_not_run_again_fails_with_the_use_by_process():
    hog = ray.remote(max_retries=0)(take)
    with pytest.raises(exceptions.OutOfMemoryError) as caught:
        ray.get(hog.remote(2000))
    text = str(caught.value)
    assert "running low on memory" in text and "Workers by memory:" in text and "limit of memory_limit" in text
    assert "pid" in text and "The task is 'take'; it ran 1 times" in text


def test_a_task_that_may_run_again_does(marks: Marks):
    @ray.remote(max_retries=1)
    def greedy_at_first(count):
        if len(marks.lines()) < count:
            marks.add(str(os.getpid()))
            return take(2000)
        return "modest"

    assert ray.get(greedy_at_first.remote(2)) == "modest", "lack of memory does not count against max_retries"
    assert len(set(marks.lines())) == 2


@pytest.mark.slow
def test_a_task_that_fits_nowhere_ends_with_the_names_of_the_settings():
    began = time.monotonic()
    with pytest.raises(exceptions.OutOfMemoryError, match=r"10 times alone.*HPCRAY_MEMORY_USAGE_THRESHOLD"):
        ray.get(ray.remote(max_retries=-1)(take).remote(2000), timeout=150)
    assert time.monotonic() - began > 5, "later runs come after longer and longer pauses"


def test_an_idle_worker_whose_objects_others_need_does_not_end_for_a_task_that_takes_too_much(marks: Marks):
    """Its end would free as much, and lose what it owns."""

    @ray.remote
    def own():
        global kept
        kept = b"x" * (200 * MB)
        return [ray.put("needed")]

    (ref,) = ray.get(own.remote())
    hog = ray.remote(max_retries=0, runtime_env={"env_vars": {"HOG": "1"}})(take)  # in another worker
    with pytest.raises(exceptions.OutOfMemoryError, match="The task is 'take'"):
        ray.get(hog.remote(2000))
    assert ray.get(ray.remote(lambda refs: ray.get(refs[0])).remote([ref])) == "needed"


def test_an_actor():
    @ray.remote
    class Hog:
        def take(self, megabytes):
            return take(megabytes)

    hog = Hog.remote()
    assert ray.get(hog.take.remote(20)) == 1
    with pytest.raises(exceptions.OutOfMemoryError, match="The actor is Hog"):
        ray.get(hog.take.remote(2000))


def test_what_a_worker_has_started_counts_as_its_own():
    @ray.remote(max_retries=0)
    def parent():
        pid = os.fork()
        if pid == 0:
            take(2000)
            os._exit(0)
        os.waitpid(pid, 0)
        time.sleep(60)

    with pytest.raises(exceptions.OutOfMemoryError):
        ray.get(parent.remote())
