"""The Dask scheduler."""

from __future__ import annotations

import importlib
import os
import time

import numpy as np
import pytest
from engine import NAME, hpcray_only, ray

dask = pytest.importorskip("dask")
util_dask = importlib.import_module(f"{NAME}.util.dask")
ray_dask_get = util_dask.ray_dask_get

pytestmark = pytest.mark.usefixtures("session")


def inc(x):
    return x + 1


def boom(x):
    raise KeyError(x)


class TestGraphs:
    def test_graphs_of_tuples_are_computed(self):
        graph = {"one": 1, "two": (inc, "one"), "alias": "two", "list": (sum, ["one", "two", "alias"])}
        assert ray_dask_get(graph, "list") == 5
        assert ray_dask_get(graph, ["one", ["alias", ["list"]]]) == [1, [2, [5]]]

    def test_only_dependencies_of_the_keys_run(self):
        assert ray_dask_get({"good": (inc, 1), "bad": (boom, 1)}, "good") == 2

    def test_errors_of_nodes_are_instances_of_the_users_class(self):
        with pytest.raises(KeyError, match="text"):
            ray_dask_get({"bad": (boom, "text"), "after": (inc, "bad")}, ["after"])

    @hpcray_only
    def test_a_long_chain_of_nodes_is_computed(self):
        graph = {"k0": 0, **{f"k{i}": (inc, f"k{i - 1}") for i in range(1, 2001)}}
        assert ray_dask_get(graph, "k2000") == 2000

    def test_a_graph_with_a_cycle_is_refused(self):
        with pytest.raises((ValueError, RuntimeError)):
            ray_dask_get({"a": (inc, "b"), "b": (inc, "a")}, "a")


class TestDelayed:
    def test_delayed_values_are_computed(self):
        parts = [dask.delayed(inc)(x) for x in range(10)]
        assert dask.delayed(sum)(parts).compute(scheduler=ray_dask_get) == 55

    def test_nodes_of_a_graph_run_in_parallel_in_workers(self):
        parts = [dask.delayed(lambda _: time.sleep(0.2) or os.getpid())(x) for x in range(4)]
        pids = dask.compute(*parts, scheduler=ray_dask_get)
        assert os.getpid() not in pids
        assert len(set(pids)) > 1

    def test_enable_dask_on_ray_sets_the_default_scheduler(self):
        with util_dask.enable_dask_on_ray():
            assert dask.delayed(os.getpid)().compute() != os.getpid()
        with util_dask.disable_dask_on_ray():
            assert dask.delayed(os.getpid)().compute() == os.getpid()

    def test_the_sync_scheduler_runs_in_this_process(self):
        total = dask.delayed(inc)(dask.delayed(os.getpid)())
        assert total.compute(scheduler=util_dask.ray_dask_get_sync) == os.getpid() + 1

    def test_options_of_the_tasks_of_a_graph_apply(self):
        environ = {"runtime_env": {"env_vars": {"OF_DASK": "all"}}}
        read = dask.delayed(os.getenv)("OF_DASK")
        assert read.compute(scheduler=ray_dask_get, ray_remote_args=environ) == "all"
        with dask.annotate(ray_remote_args={"runtime_env": {"env_vars": {"OF_DASK": "one"}}}):
            read = dask.delayed(os.getenv)("OF_DASK")
        assert read.compute(scheduler=ray_dask_get, optimize_graph=False) == "one"


class TestArrays:
    @pytest.fixture(autouse=True)
    def array(self):
        self.da = pytest.importorskip("dask.array")

    def test_dask_arrays_compute_what_numpy_computes(self):
        plain = np.random.default_rng(0).random((600, 400))
        array = self.da.from_array(plain, chunks=(150, 100))
        result = ((array @ array.T).sum(axis=0) + array.mean()).compute(scheduler=ray_dask_get)
        assert np.allclose(result, (plain @ plain.T).sum(axis=0) + plain.mean())

    def test_persisted_collections_are_refs_for_further_graphs(self):
        array = self.da.arange(1000, chunks=100).persist(scheduler=ray_dask_get, ray_persist=True)
        assert all(isinstance(part, ray.ObjectRef) for part in array.dask.values())
        assert (array + 1).sum().compute(scheduler=ray_dask_get) == 500_500
        assert array.sum().compute(scheduler=util_dask.ray_dask_get_sync) == 499_500
