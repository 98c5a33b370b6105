"""`util.multiprocessing.Pool`."""

from __future__ import annotations

import importlib
import itertools
import math
import multiprocessing
import os
import pickle
import threading
import time

import numpy as np
import pytest
from engine import NAME, PATIENCE, alive, eventually, exceptions, hpcray_only, ray, run_script

module = importlib.import_module(f"{NAME}.util.multiprocessing")
Pool, TimeoutError_ = module.Pool, module.TimeoutError

pytestmark = pytest.mark.usefixtures("session")


def square(x):
    return x * x


def add(x, y=0):
    return x + y


def fail_at_three(x):
    if x == 3:
        raise ValueError("three")
    return x


def when(path, value):
    while not os.path.exists(path):
        time.sleep(0.01)
    return value


def pid(_=None):
    return os.getpid()


def die(_):
    os._exit(3)


@pytest.fixture(scope="module")
def pool(session):
    made = Pool(2)
    yield made
    made.terminate()


class TestCalls:
    def test_apply_returns_the_result_of_a_call(self, pool):
        assert pool.apply(square, (5,)) == 25
        assert pool.apply(add, (1,), {"y": 2}) == 3
        assert pool.apply(math.hypot, [3, 4]) == 5

    @hpcray_only
    def test_apply_takes_kwds_as_the_standard_library_does(self, pool):
        assert pool.apply(add, (1,), kwds={"y": 2}) == 3
        assert pool.apply_async(add, (1,), kwds={"y": 3}).get(PATIENCE) == 4

    def test_apply_async_returns_a_result_that_can_be_awaited(self, pool, tmp_path):
        gate = tmp_path / "gate"
        result = pool.apply_async(when, (str(gate), "late"))
        assert not result.ready()
        with pytest.raises(ValueError, match="not ready"):
            result.successful()
        result.wait(0.05)
        with pytest.raises(TimeoutError_):
            result.get(timeout=0.05)
        gate.touch()
        assert result.get(PATIENCE) == "late"
        assert (result.ready(), result.successful()) == (True, True)

    def test_a_pool_calls_closures_and_lambdas(self, pool):
        offset = 10
        assert pool.apply(lambda x: x + offset, (1,)) == 11

    def test_errors_are_instances_of_the_users_class(self, pool):
        result = pool.apply_async(fail_at_three, (3,))
        with pytest.raises(ValueError, match="three") as caught:
            result.get()
        assert type(caught.value) is ValueError
        assert caught.value.args == ("three",)
        assert not result.successful()

    @hpcray_only
    def test_errors_contain_the_remote_traceback(self, pool):
        with pytest.raises(ValueError) as caught:
            pool.apply(fail_at_three, (3,))
        assert "fail_at_three" in str(caught.value.__cause__)

    @hpcray_only
    def test_a_value_that_does_not_pickle_fails_its_own_call(self, pool):
        with pytest.raises(TypeError, match="serialize"):
            pool.apply(square, (threading.Lock(),))
        with pytest.raises(TypeError):
            pool.apply(threading.Lock)
        assert pool.apply(square, (2,)) == 4


class TestMaps:
    @pytest.mark.parametrize("chunksize", [None, 1, 7, 1000])
    def test_map_returns_results_in_order(self, pool, chunksize):
        assert pool.map(square, range(50), chunksize=chunksize) == [x * x for x in range(50)]
        assert pool.map(square, iter(range(5)), chunksize=chunksize) == [0, 1, 4, 9, 16]

    def test_map_of_an_empty_iterable_is_empty(self, pool):
        assert pool.map(square, []) == []
        assert list(pool.imap(square, [])) == []

    def test_starmap_spreads_arguments(self, pool):
        assert pool.starmap(add, [(1, 2), (3, 4), (5,)]) == [3, 7, 5]
        assert pool.starmap_async(add, zip(range(5), range(5), strict=True)).get(PATIENCE) == [0, 2, 4, 6, 8]

    def test_map_raises_the_first_error(self, pool):
        result = pool.map_async(fail_at_three, range(6), chunksize=2)
        with pytest.raises(ValueError, match="three"):
            result.get(PATIENCE)

    def test_map_takes_arrays(self, pool):
        rows = pool.map(np.sum, [np.full(200_000, value) for value in range(4)])
        assert rows == [0, 200_000, 400_000, 600_000]

    def test_map_uses_all_processes(self, pool):
        barrier_free = pool.map(lambda _: time.sleep(0.1) or os.getpid(), range(4), chunksize=1)
        assert len(set(barrier_free)) == 2


class TestIterators:
    def test_imap_keeps_the_order(self, pool):
        assert list(pool.imap(square, range(30))) == [x * x for x in range(30)]
        assert list(pool.imap(square, iter(range(30)), chunksize=4)) == [x * x for x in range(30)]

    def test_imap_unordered_yields_ready_results_first(self, pool, tmp_path):
        gate = tmp_path / "gate"
        results = pool.imap_unordered(lambda x: when(str(gate), x) if x == 0 else x, range(5))
        assert sorted(next(results) for _ in range(4)) == [1, 2, 3, 4]
        gate.touch()
        assert next(results) == 0
        with pytest.raises(StopIteration):
            next(results)

    @pytest.mark.parametrize("method", ["imap", "imap_unordered"])
    def test_a_timeout_of_next_loses_no_result(self, pool, tmp_path, method):
        gate = tmp_path / "gate"
        results = getattr(pool, method)(lambda x: when(str(gate), x), range(2))
        with pytest.raises(TimeoutError_):
            results.next(timeout=0.05)
        gate.touch()
        assert sorted(results) == [0, 1]

    @pytest.mark.parametrize("method", ["imap", "imap_unordered"])
    def test_an_error_takes_the_place_of_its_result(self, pool, method):
        results = list(getattr(pool, method)(fail_at_three, range(6), chunksize=2))
        (error,) = (result for result in results if isinstance(result, Exception))
        results.remove(error)
        assert sorted(results) == [0, 1, 2, 4, 5]

    @hpcray_only
    def test_the_error_of_imap_holds_that_of_the_function(self, pool):
        assert [repr(result) for result in pool.imap(fail_at_three, [2, 3])] == [
            "2",
            "PoolTaskError(ValueError('three'))",
        ]

    def test_map_gives_every_process_as_many_chunks(self, pool):
        pids = pool.map(pid, range(40), chunksize=1)
        assert {pids.count(one) for one in set(pids)} == {20}

    def test_imap_reads_an_endless_iterable_lazily(self, pool):
        assert list(itertools.islice(pool.imap(square, itertools.count()), 20)) == [x * x for x in range(20)]

    def test_invalid_chunk_sizes_are_refused(self, pool):
        with pytest.raises(ValueError, match="Chunksize"):
            pool.imap(square, [1], chunksize=0)


class TestCallbacks:
    def test_callbacks_get_results(self, pool):
        got = []
        pool.apply_async(square, (3,), callback=got.append).wait(PATIENCE)
        pool.map_async(square, range(4), callback=got.append).wait(PATIENCE)
        assert got == [9, [0, 1, 4, 9]]

    def test_error_callbacks_get_exceptions(self, pool):
        got, wrong = [], []
        pool.apply_async(fail_at_three, (3,), callback=wrong.append, error_callback=got.append).wait(PATIENCE)
        pool.map_async(fail_at_three, range(9), callback=wrong.append, error_callback=got.append).wait(PATIENCE)
        assert [(type(error), str(error)) for error in got] == [(ValueError, "three")] * 2
        assert not wrong


class TestProcesses:
    def test_an_initializer_runs_in_every_process(self, tmp_path):
        def initialize(text):
            os.environ["OF_THE_POOL"] = text

        with Pool(2, initialize, ("set",)) as pool:
            assert set(pool.map(lambda _: os.environ.get("OF_THE_POOL"), range(8), chunksize=1)) == {"set"}

    @hpcray_only
    def test_functions_see_globals_that_the_initializer_sets(self, tmp_path):
        script = tmp_path / "script.py"
        script.write_text(
            "import engine_under_test as ray\n"
            "from hpcray.util.multiprocessing import Pool\n"
            "unset = 1\n"
            "def init(x):\n    global data\n    data = x\n    globals()['unset'] = 5\n"
            "def helper():\n    return data\n"
            "def work(i):\n    return helper()[i] + data[i] + unset\n"
            "def total(i):\n    return i + unset\n"
            "if __name__ == '__main__':\n"
            "    with Pool(2, init, ([1, 2, 3],)) as pool:\n"
            "        print(pool.map(work, range(3)), pool.map(total, range(2)))\n"
        )
        done = run_script(script)
        assert done.stdout.strip().endswith("[7, 9, 11] [5, 6]"), done.stderr

    def test_maxtasksperchild_replaces_processes(self):
        with Pool(1, maxtasksperchild=2) as pool:
            pids = [pool.apply(pid) for _ in range(6)]
        assert pids[0] == pids[1]
        assert len(set(pids)) == 3

    @hpcray_only
    def test_a_process_that_dies_is_replaced(self):
        with Pool(1) as pool:
            before = pool.apply(pid)
            with pytest.raises(exceptions.RayActorError):
                pool.apply(die, (0,))
            assert pool.apply(pid) not in (before, os.getpid())

    def test_every_process_is_initialized_when_a_pool_is_there(self, tmp_path):
        with Pool(3, lambda: (tmp_path / str(os.getpid())).touch()):
            assert len(list(tmp_path.iterdir())) == 3

    def test_a_failing_initializer_fails_the_pool(self):
        with pytest.raises(exceptions.RayActorError, match="division"):
            Pool(2, lambda: 1 / 0)

    def test_invalid_numbers_of_processes_are_refused(self):
        for processes in (0, -1, 1000):
            with pytest.raises(ValueError, match=r"[Pp]rocesses"):
                Pool(processes)
        with pytest.raises(TypeError):
            Pool(1, initializer=3)

    def test_a_pool_has_a_process_per_cpu_by_default(self):
        with Pool() as pool:
            assert len(set(pool.map(lambda _: time.sleep(0.3) or os.getpid(), range(4), chunksize=1))) == 4

    def test_options_of_the_actors_of_a_pool_apply(self):
        with Pool(1, ray_remote_args={"runtime_env": {"env_vars": {"OF_THE_ACTOR": "yes"}}}) as pool:
            assert pool.apply(os.getenv, ("OF_THE_ACTOR",)) == "yes"

    @hpcray_only
    def test_pools_in_tasks_that_hold_all_cpus_run_their_calls(self):
        @ray.remote(num_cpus=4)
        def outer():
            with Pool(2) as pool:
                inner = ray.remote(square)
                return sum(pool.map(lambda x: ray.get(inner.remote(x)), range(4)))

        assert ray.get(outer.remote(), timeout=PATIENCE) == 14


class TestEnd:
    def test_join_after_close_waits_for_all_work(self):
        pool = Pool(2)
        results = pool.map_async(lambda x: time.sleep(0.05) or os.getpid(), range(6), chunksize=1)
        with pytest.raises(ValueError, match="still running"):
            pool.join()
        pool.close()
        for call in (pool.apply, pool.map_async, pool.imap):
            with pytest.raises(ValueError, match="not running"):
                call(square, [1])
        pool.join()
        assert results.ready()
        eventually(lambda: not any(map(alive, results.get())), "the processes' end")

    @hpcray_only
    def test_terminate_fails_pending_results(self, tmp_path):
        pool = Pool(1)
        inside = pool.apply_async(lambda: (tmp_path / "in").touch() or time.sleep(10 * PATIENCE))
        behind = pool.apply_async(pid)
        eventually((tmp_path / "in").exists, "the first call")
        pool.terminate()
        with pytest.raises(exceptions.RayActorError):
            inside.get(PATIENCE)
        with pytest.raises(exceptions.RayActorError):
            behind.get(PATIENCE)
        pool.join()

    def test_a_context_manager_terminates(self):
        with Pool(1) as pool:
            there = pool.apply(pid)
        eventually(lambda: not alive(there), "the process's end")
        with pytest.raises(ValueError, match="not running"):
            pool.apply(pid)

    @hpcray_only
    def test_a_pool_without_references_ends(self):
        pool = Pool(1)
        there = pool.apply(pid)
        del pool
        eventually(lambda: not alive(there), "the process's end")

    def test_a_pool_does_not_pickle(self, pool):
        with pytest.raises((NotImplementedError, TypeError)):
            pickle.dumps(pool)

    def test_a_timeout_raises_the_timeout_error_of_multiprocessing(self):
        assert TimeoutError_ is multiprocessing.TimeoutError


@hpcray_only
def test_a_pool_starts_a_session_where_there_is_none(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom hpcray.util.multiprocessing import Pool\n"
        "if __name__ == '__main__':\n"
        "    with Pool(3) as pool:\n"
        "        import hpcray\n"
        "        print(pool.map(abs, [-1, 2]), hpcray.cluster_resources()['CPU'])\n"
    )
    done = run_script(script)
    assert done.stdout.strip() == "[1, 2] 3.0", done.stderr
