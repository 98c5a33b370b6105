"""`Executor`, `futures.MPIPoolExecutor`."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import threading
import time

import numpy as np
import pytest
from engine import PATIENCE, alive, eventually, exceptions, ray

import hpcray
from hpcray import futures

pytestmark = pytest.mark.usefixtures("session")


def square(x):
    return x * x


def add(x, y=0):
    return x + y


def when(path, value=None):
    while not os.path.exists(path):
        time.sleep(0.01)
    return value


def boom(text):
    raise KeyError(text)


def read_state():
    return os.environ.get("STATE_OF_A_WORKER")


def set_state(text):
    os.environ["STATE_OF_A_WORKER"] = text


KINDS = {"tasks": hpcray.Executor, "actors": futures.MPIPoolExecutor}


@pytest.fixture(params=KINDS)
def executor(request):
    with KINDS[request.param](max_workers=2) as made:
        yield made


class TestBoth:
    def test_submit_returns_a_future_of_the_result(self, executor):
        assert executor.submit(square, 3).result() == 9
        assert executor.submit(add, 1, y=2).result(PATIENCE) == 3
        assert executor.submit(functools.partial(add, y=5), 1).result() == 6
        assert executor.submit(np.sum, np.ones(200_000)).result() == 200_000

    def test_an_executor_works_with_concurrent_futures(self, executor):
        assert isinstance(executor, concurrent.futures.Executor)
        pending = [executor.submit(square, x) for x in range(6)]
        done, rest = concurrent.futures.wait(pending, PATIENCE)
        assert (len(done), len(rest)) == (6, 0)
        assert sorted(future.result() for future in concurrent.futures.as_completed(pending)) == [0, 1, 4, 9, 16, 25]

    def test_map_yields_results_in_order(self, executor):
        assert list(executor.map(square, range(20))) == [x * x for x in range(20)]
        assert list(executor.map(add, range(5), range(5), chunksize=3)) == [0, 2, 4, 6, 8]
        assert list(executor.map(square, [])) == []
        with pytest.raises(ValueError, match="chunksize"):
            executor.map(square, [1], chunksize=0)

    def test_map_raises_timeout_error_for_late_results(self, executor, tmp_path):
        results = executor.map(when, [str(tmp_path / "gate")], timeout=0.1)
        with pytest.raises(concurrent.futures.TimeoutError):
            next(results)
        (tmp_path / "gate").touch()

    def test_futures_raise_the_errors_of_their_calls(self, executor):
        future = executor.submit(boom, "text")
        with pytest.raises(KeyError, match="text"):
            future.result()
        assert isinstance(future.exception(), KeyError)
        with pytest.raises(TypeError):
            executor.submit(square).result()
        with pytest.raises(TypeError):
            executor.submit(square, threading.Lock()).result()
        assert executor.submit(square, 2).result() == 4

    def test_max_workers_limits_tasks_and_queued_calls_can_be_cancelled(self, executor, tmp_path):
        gate = str(tmp_path / "gate")
        first, second, third = [executor.submit(when, gate, value) for value in range(3)]
        eventually(lambda: first.running() and second.running(), "the first two")
        assert not third.running()
        assert not first.cancel()
        assert third.cancel()
        (tmp_path / "gate").touch()
        assert (first.result(PATIENCE), second.result(PATIENCE)) == (0, 1)
        with pytest.raises(concurrent.futures.CancelledError):
            third.result()

    def test_shutdown_can_cancel_queued_calls(self, executor, tmp_path):
        gate = str(tmp_path / "gate")
        pending = [executor.submit(when, gate, value) for value in range(5)]
        executor.shutdown(wait=False, cancel_futures=True)
        assert [future.cancelled() for future in pending] == [False, False, True, True, True]
        with pytest.raises(RuntimeError, match="after shutdown"):
            executor.submit(square, 1)
        (tmp_path / "gate").touch()
        executor.shutdown()
        assert [future.result() for future in pending[:2]] == [0, 1]

    def test_callbacks_of_futures_are_called(self, executor):
        got = []
        event = threading.Event()
        future = executor.submit(square, 7)
        future.add_done_callback(lambda future: (got.append(future.result()), event.set()))
        assert event.wait(PATIENCE)
        assert got == [49]

    @pytest.mark.parametrize("kind", KINDS)
    def test_an_executor_in_a_task_that_holds_all_cpus_runs_its_calls(self, kind):
        @ray.remote(num_cpus=4)
        def outer():
            with KINDS[kind](max_workers=2) as executor:
                inner = ray.remote(square)
                work = [executor.submit(lambda x: ray.get(inner.remote(x)), x) for x in range(3)]
                return [future.result() for future in work] + list(executor.map(square, [5]))

        assert ray.get(outer.remote(), timeout=PATIENCE) == [0, 1, 4, 25]

    @pytest.mark.parametrize("kind", KINDS.values())
    def test_executors_refuse_wrong_arguments(self, kind):
        with pytest.raises(ValueError, match="max_workers"):
            kind(max_workers=0)
        with pytest.raises((TypeError, ValueError)):
            kind(nonsense=1)


class TestTasks:
    def test_an_executor_without_a_limit_runs_many_calls(self):
        with hpcray.Executor() as executor:
            assert sum(executor.map(square, range(500))) == sum(x * x for x in range(500))
            assert list(executor.map(add, range(500), range(500), chunksize=50)) == [2 * x for x in range(500)]

    def test_an_executor_applies_options_and_resolves_refs(self):
        with hpcray.Executor(runtime_env={"env_vars": {"OF_THE_TASK": "yes"}}, num_cpus=0.5) as executor:
            assert executor.submit(os.getenv, "OF_THE_TASK").result() == "yes"
            assert executor.submit(add, ray.put(1), y=ray.put(2)).result() == 3
        with pytest.raises(ValueError, match="num_returns"):
            hpcray.Executor(num_returns=2)

    def test_terminate_interrupts_running_calls(self, tmp_path):
        executor = hpcray.Executor(max_workers=1)
        inside = executor.submit(lambda: (tmp_path / "in").touch() or when(str(tmp_path / "never")))
        behind = executor.submit(square, 1)
        eventually((tmp_path / "in").exists, "the task")
        executor.terminate()
        with pytest.raises(exceptions.TaskCancelledError):
            inside.result(PATIENCE)
        assert behind.cancelled()


class TestActors:
    def test_actor_workers_keep_their_state(self):
        with futures.MPIPoolExecutor(2, set_state, ("made",)) as executor:
            assert executor.num_workers == 2
            assert {executor.submit(read_state).result() for _ in range(4)} == {"made"}

    def test_bootup_starts_all_workers(self):
        executor = futures.MPIPoolExecutor(2).bootup()
        pids = set(executor.map(lambda _: time.sleep(0.1) or os.getpid(), range(4)))
        assert len(pids) == 2
        executor.shutdown()
        eventually(lambda: not any(map(alive, pids)), "the workers' end")

    def test_starmap_and_unordered_maps_yield_all_results(self, tmp_path):
        with futures.MPIPoolExecutor(2) as executor:
            assert list(executor.starmap(add, [(1, 2), (3,)], chunksize=2)) == [3, 3]
            gate = str(tmp_path / "gate")
            results = executor.map(lambda x: when(gate, x) if x == 0 else x, range(4), unordered=True)
            assert sorted(next(results) for _ in range(3)) == [1, 2, 3]
            (tmp_path / "gate").touch()
            assert list(results) == [0]

    def test_workers_get_variables_directory_and_path(self, tmp_path):
        (tmp_path / "only_here.py").write_text("value = 42\n")
        with futures.MPIPoolExecutor(
            1, set_state, ("too",), env={"FROM_ENV": "e"}, wdir=str(tmp_path), path=[str(tmp_path)], main=False
        ) as executor:
            found = executor.submit(
                lambda: (os.getcwd(), os.environ["FROM_ENV"], __import__("only_here").value, read_state())
            )
            assert found.result() == (str(tmp_path), "e", 42, "too")

    def test_workers_get_globals_of_main(self):
        with futures.MPIPoolExecutor(1, globals={"planted": 3}) as executor:
            assert executor.submit(lambda: __import__("__main__").planted).result() == 3

    def test_the_driver_is_the_root_of_an_mpi_comm_executor(self):
        with futures.MPICommExecutor(None, root=0, max_workers=1) as executor:
            assert executor is not None
            assert executor.submit(square, 4).result() == 16

    def test_a_worker_that_dies_fails_its_call_only(self):
        with futures.MPIPoolExecutor(1) as executor:
            with pytest.raises(exceptions.RayActorError):
                executor.submit(os._exit, 1).result(PATIENCE)
            assert executor.submit(square, 3).result(PATIENCE) == 9
