"""What runs again when a worker dies or a task raises, and how often."""

from __future__ import annotations

import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from engine import Marks, alive, eventually, exceptions, hpcray_only, ray

from hpcray.runtime.core_worker.core_worker import current

pytestmark = pytest.mark.usefixtures("session")


class Flaky(Exception):
    pass


class Unlucky(Flaky):
    pass


@ray.remote
def crash(marks: Marks, good_after: int = 1_000_000):
    if marks.add() <= good_after:
        os._exit(1)
    return len(marks.lines())


@ray.remote
def fail(marks: Marks, error: type[Exception], good_after: int = 1_000_000):
    if marks.add() <= good_after:
        raise error("no luck")
    return len(marks.lines())


class TestCrash:
    def test_a_task_that_crashes_runs_four_times_by_default(self, marks: Marks):
        with pytest.raises(exceptions.WorkerCrashedError):
            ray.get(crash.remote(marks))
        assert len(marks.lines()) == 4

    @pytest.mark.parametrize("max_retries", [0, 1])
    def test_max_retries_bounds_the_runs_of_a_task_that_crashes(self, marks: Marks, max_retries):
        with pytest.raises(exceptions.WorkerCrashedError) as caught:
            ray.get(crash.options(max_retries=max_retries).remote(marks))
        assert isinstance(caught.value, exceptions.RayError)
        assert not isinstance(caught.value, exceptions.RayTaskError)
        assert len(marks.lines()) == max_retries + 1

    def test_a_retry_that_works(self, marks: Marks):
        assert ray.get(crash.remote(marks, good_after=2)) == 3

    def test_the_job_may_have_a_default_of_its_own(self, marks: Marks, monkeypatch):
        monkeypatch.setenv("RAY_TASK_MAX_RETRIES", "1")
        with pytest.raises(exceptions.WorkerCrashedError):
            ray.get(crash.options(name="default").remote(marks))
        assert len(marks.lines()) == 2
        with pytest.raises(exceptions.WorkerCrashedError):
            ray.get(crash.options(max_retries=0).remote(marks))
        assert len(marks.lines()) == 3, "what a task says itself counts"

    def test_the_default_of_a_worker_is_that_of_its_environment(self, marks: Marks):
        @ray.remote(runtime_env={"env_vars": {"RAY_TASK_MAX_RETRIES": "0"}})
        def nested():
            ray.get(crash.remote(marks))

        with pytest.raises(exceptions.WorkerCrashedError):
            ray.get(nested.remote())
        assert len(marks.lines()) == 1

    @hpcray_only
    @pytest.mark.parametrize("text", ["-2", "three", "1.5"])
    def test_a_default_that_is_no_number_of_retries_is_refused(self, marks: Marks, monkeypatch, text):
        monkeypatch.setenv("RAY_TASK_MAX_RETRIES", text)
        with pytest.raises(ValueError, match=f"RAY_TASK_MAX_RETRIES='{text}' is not"):
            crash.options(name="default").remote(marks)

    def test_max_retries_minus_1_retries_without_end(self, marks: Marks):
        assert ray.get(crash.options(max_retries=-1).remote(marks, good_after=4)) == 5

    @hpcray_only
    def test_retries_after_crashes_pause_for_longer_and_longer(self, tmp_path):
        @ray.remote(max_retries=-1)
        def crash_loop(path):
            with open(path, "a") as file:
                file.write(f"{time.monotonic()}\n")
            if len(Path(path).read_text().split()) <= 4:
                os._exit(1)

        ray.get(crash_loop.remote(str(tmp_path / "times")))
        times = [float(line) for line in (tmp_path / "times").read_text().split()]
        pauses = [after - before for before, after in pairwise(times)]
        assert len(pauses) == 4 and pauses[1] >= 0.1 and pauses[2] >= 0.2 and pauses[3] >= 0.4

    @hpcray_only
    def test_a_task_is_cancelled_in_the_pause_before_a_retry(self, marks: Marks):
        ref = crash.options(max_retries=-1).remote(marks)
        eventually(lambda: len(marks.lines()) >= 4)
        ray.cancel(ref)
        with pytest.raises(exceptions.TaskCancelledError):
            ray.get(ref)
        assert not current.process.submitter.retries.paused

    @pytest.mark.parametrize("code", [0, 1])
    def test_sys_exit_ends_the_worker(self, code):
        with pytest.raises(exceptions.WorkerCrashedError):
            ray.get(ray.remote(max_retries=0)(lambda: sys.exit(code)).remote())

    def test_a_task_whose_worker_is_killed_by_a_signal_is_retried(self):
        with pytest.raises(exceptions.WorkerCrashedError):
            ray.get(ray.remote(max_retries=0)(lambda: os.kill(os.getpid(), signal.SIGKILL)).remote())

    def test_every_return_value_of_a_crashed_task_fails(self, marks: Marks):
        refs = crash.options(max_retries=0, num_returns=2).remote(marks)
        for ref in refs:
            with pytest.raises(exceptions.WorkerCrashedError):
                ray.get(ref)

    def test_other_tasks_go_on_when_a_worker_crashes(self, marks: Marks):
        square = ray.remote(lambda x: x * x)
        before = [square.remote(i) for i in range(20)]
        crashed = crash.options(max_retries=0).remote(marks)
        after = [square.remote(i) for i in range(20)]
        assert ray.get(before + after) == [i * i for i in range(20)] * 2
        with pytest.raises(exceptions.WorkerCrashedError):
            ray.get(crashed)

    def test_tasks_queued_behind_a_crash_run(self):
        """They are on their way to the worker that dies; they must not be charged for it."""

        @ray.remote(max_retries=0)
        def sometimes(i):
            if i == 25:
                os._exit(1)
            return i

        refs = [sometimes.remote(i) for i in range(50)]
        for i, ref in enumerate(refs):
            if i == 25:
                with pytest.raises(exceptions.WorkerCrashedError):
                    ray.get(ref)
            else:
                assert ray.get(ref) == i

    def test_results_outlive_the_worker_that_made_them(self):
        import numpy as np

        @ray.remote
        def make():
            return os.getpid(), ray.put(np.arange(200_000))

        @ray.remote
        def big():
            return np.full(300_000, os.getpid())

        ref = big.remote()
        ray.wait([ref])
        pid = int(ray.get(ref)[0])
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not alive(pid))
        assert (ray.get(ref) == pid).all()

    def test_an_argument_survives_the_retry(self, marks: Marks):
        import numpy as np

        @ray.remote
        def consume(array, small):
            if marks.add() == 1:
                os._exit(1)
            return int(array.sum()), small

        assert ray.get(consume.remote(np.ones(200_000, dtype=np.int64), ray.put("s"))) == (200_000, "s")

    def test_all_that_wait_for_a_failure_fail(self, marks: Marks):
        """However long the chain is."""

        @ray.remote
        def wait_and_fail():
            while not marks.lines():
                time.sleep(0.01)
            raise Flaky

        pass_on = ray.remote(lambda value: value)
        ref = wait_and_fail.remote()
        for _ in range(1500):
            ref = pass_on.remote(ref)
        marks.add()
        with pytest.raises(Flaky):
            ray.get(ref, timeout=60)


class TestExceptions:
    def test_exceptions_are_not_retried_by_default(self, marks: Marks):
        with pytest.raises(Flaky):
            ray.get(fail.remote(marks, Flaky))
        assert len(marks.lines()) == 1

    def test_retry_exceptions_true_retries_all_exceptions(self, marks: Marks):
        with pytest.raises(Flaky):
            ray.get(fail.options(retry_exceptions=True).remote(marks, Flaky))
        assert len(marks.lines()) == 4

    def test_an_exception_is_retried_until_the_task_works(self, marks: Marks):
        assert ray.get(fail.options(retry_exceptions=True, max_retries=5).remote(marks, Flaky, good_after=5)) == 6

    @pytest.mark.parametrize(("raised", "executions"), [(Flaky, 3), (Unlucky, 3), (ValueError, 1)])
    def test_only_exceptions_of_a_list_are_retried(self, marks: Marks, raised, executions):
        with pytest.raises(raised):
            ray.get(fail.options(retry_exceptions=[Flaky, OSError], max_retries=2).remote(marks, raised))
        assert len(marks.lines()) == executions

    @pytest.mark.parametrize(("listed", "executions"), [([Flaky], 3), ([ValueError], 1)])
    def test_of_a_user_code_exception_its_cause_counts(self, marks: Marks, listed, executions):
        @ray.remote(max_retries=2, retry_exceptions=listed)
        def wrapped():
            marks.add()
            try:
                raise Flaky
            except Flaky as error:
                raise ray.exceptions.UserCodeException("failed") from error

        with pytest.raises(ray.exceptions.UserCodeException):
            ray.get(wrapped.remote())
        assert len(marks.lines()) == executions

    def test_max_retries_0_retries_no_exception(self, marks: Marks):
        with pytest.raises(Flaky):
            ray.get(fail.options(retry_exceptions=True, max_retries=0).remote(marks, Flaky))
        assert len(marks.lines()) == 1

    @pytest.mark.parametrize("value", [1, [3], [int]])
    def test_bad_values_of_retry_exceptions_are_refused(self, value):
        with pytest.raises((TypeError, ValueError)):
            fail.options(retry_exceptions=value)
