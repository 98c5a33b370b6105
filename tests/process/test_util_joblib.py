"""The joblib backend "ray"."""

from __future__ import annotations

import importlib
import os
import threading
import time

import numpy as np
import pytest
from engine import NAME, PATIENCE, hpcray_only, ray, run_script

joblib = pytest.importorskip("joblib")
importlib.import_module(f"{NAME}.util.joblib").register_ray()

pytestmark = pytest.mark.usefixtures("session")


def square(x):
    return x * x


def boom(x):
    if x == 3:
        raise KeyError("three")
    return x


class Concurrency:
    """A function that returns the number of its concurrent calls, and its process."""

    def __init__(self, directory):
        self.directory = str(directory)

    def __call__(self, x):
        mine = os.path.join(self.directory, f"in-{x}")
        with open(mine, "w"):
            pass
        time.sleep(0.05)
        inside = len(os.listdir(self.directory))
        os.remove(mine)
        return inside, os.getpid()


def run(calls, **options):
    with joblib.parallel_config("ray"):
        return joblib.Parallel(**options)(calls)


class TestParallel:
    def test_joblib_returns_results_in_order(self):
        assert run((joblib.delayed(square)(x) for x in range(40)), n_jobs=4) == [x * x for x in range(40)]
        with joblib.parallel_backend("ray", n_jobs=2):
            assert joblib.Parallel()(joblib.delayed(square)(x) for x in range(5)) == [0, 1, 4, 9, 16]

    def test_calls_run_elsewhere_and_not_more_than_n_jobs(self, tmp_path):
        concurrency = Concurrency(tmp_path)
        seen = run((joblib.delayed(concurrency)(x) for x in range(12)), n_jobs=2, batch_size=1)
        assert max(inside for inside, _ in seen) == 2
        assert os.getpid() not in {pid for _, pid in seen}

    def test_joblib_uses_all_cpus_by_default(self):
        with joblib.parallel_config("ray"):
            assert joblib.effective_n_jobs(-1) == 4
            assert joblib.effective_n_jobs(-2) == 3
            assert joblib.Parallel(n_jobs=-1)(joblib.delayed(square)(x) for x in range(3)) == [0, 1, 4]
            with pytest.raises(ValueError, match="n_jobs"):
                joblib.Parallel(n_jobs=0)(joblib.delayed(square)(x) for x in range(3))

    def test_errors_are_instances_of_the_users_class(self):
        with pytest.raises(KeyError, match="three"):
            run((joblib.delayed(boom)(x) for x in range(20)), n_jobs=2)

    def test_parallel_can_return_a_generator(self):
        results = run((joblib.delayed(square)(x) for x in range(10)), n_jobs=2, return_as="generator")
        assert next(results) == 0
        assert list(results) == [x * x for x in range(1, 10)]

    @hpcray_only
    def test_small_arrays_and_results_can_be_written_to(self):
        def change(array):
            array += 1
            return array

        for result in run((joblib.delayed(change)(np.zeros(1000)) for _ in range(4)), n_jobs=2):
            result += 1
            assert (result == 2).all()

    @hpcray_only
    def test_a_large_array_is_stored_once(self, monkeypatch):
        backend = importlib.import_module("hpcray.util.joblib.ray_backend")
        stored = []
        monkeypatch.setattr(backend, "put", lambda value: stored.append(value.nbytes) or ray.put(value))
        array = np.arange(300_000.0)
        sums = run((joblib.delayed(lambda a, i, b: float(a[i] + b[i]))(array, i, b=array) for i in range(12)), n_jobs=2)
        assert sums == [2.0 * i for i in range(12)]
        assert stored == [array.nbytes]

    @hpcray_only
    def test_joblib_in_a_task_that_holds_all_cpus_runs_its_calls(self):
        @ray.remote(num_cpus=4)
        def outer():
            importlib.import_module("hpcray.util.joblib").register_ray()
            return run((joblib.delayed(square)(x) for x in range(6)), n_jobs=2)

        assert ray.get(outer.remote(), timeout=PATIENCE) == [0, 1, 4, 9, 16, 25]

    def test_options_of_the_tasks_of_joblib_apply(self):
        options = {"runtime_env": {"env_vars": {"OF_JOBLIB": "yes"}}}
        with joblib.parallel_config("ray", ray_remote_args=options):
            found = joblib.Parallel(n_jobs=2)(joblib.delayed(os.getenv)("OF_JOBLIB") for _ in range(3))
        assert found == ["yes"] * 3

    def test_options_of_a_parallel_replace_those_of_the_backend(self):
        seen = joblib.Parallel(n_jobs=2, backend="ray", ray_remote_args={"num_cpus": 2})(
            joblib.delayed(lambda: ray.get_runtime_context().get_assigned_resources())() for _ in range(2)
        )
        assert [held["CPU"] for held in seen] == [2, 2]

    def test_a_function_that_does_not_pickle_raises(self):
        with pytest.raises((TypeError, joblib.externals.loky.process_executor.PicklingError)):
            run((joblib.delayed(square)(threading.Lock()) for _ in range(3)), n_jobs=2)


@hpcray_only
def test_joblib_and_executors_start_a_session_where_there_is_none(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import engine_under_test as ray, joblib\n"
        "from hpcray.futures import ActorPoolExecutor\n"
        "from hpcray.util.joblib import register_ray\n"
        "if __name__ == '__main__':\n"
        "    register_ray()\n"
        "    with joblib.parallel_backend('ray'):\n"
        "        print(joblib.Parallel()(joblib.delayed(abs)(i) for i in (-1, 2)), ray.is_initialized())\n"
        "    ray.shutdown()\n"
        "    with ActorPoolExecutor() as executor:\n"
        "        print(list(executor.map(abs, [-3])))\n"
    )
    done = run_script(script)
    assert done.stdout.split("\n")[-3:] == ["[1, 2] True", "[3]", ""], done.stderr


@pytest.mark.slow
def test_a_grid_search_of_scikit_learn_runs_as_tasks():
    svm = pytest.importorskip("sklearn.svm")
    selection = importlib.import_module("sklearn.model_selection")
    digits = importlib.import_module("sklearn.datasets").load_digits()
    data, target = digits.data[:300], digits.target[:300]
    grid = {"C": [0.1, 1, 10], "gamma": [0.001, 0.01]}
    here = selection.GridSearchCV(svm.SVC(), grid, cv=3).fit(data, target)
    with joblib.parallel_backend("ray"):
        there = selection.GridSearchCV(svm.SVC(), grid, cv=3, n_jobs=4).fit(data, target)
    assert there.best_params_ == here.best_params_
    assert np.array_equal(there.cv_results_["mean_test_score"], here.cv_results_["mean_test_score"])
    assert there.best_score_ > 0.9
    assert there.predict(data[:10]).tolist() == here.predict(data[:10]).tolist()
