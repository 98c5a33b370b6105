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
    def test_of_tuples(self):
        graph = {"one": 1, "two": (inc, "one"), "alias": "two", "list": (sum, ["one", "two", "alias"])}
        assert ray_dask_get(graph, "list") == 5
        assert ray_dask_get(graph, ["one", ["alias", ["list"]]]) == [1, [2, [5]]]

    def test_only_what_is_needed_runs(self):
        assert ray_dask_get({"good": (inc, 1), "bad": (boom, 1)}, "good") == 2

    def test_errors_are_the_users(self):
        with pytest.raises(KeyError, match="text"):
            ray_dask_get({"bad": (boom, "text"), "after": (inc, "bad")}, ["after"])

    @hpcray_only
    def test_a_long_chain(self):
        graph = {"k0": 0, **{f"k{i}": (inc, f"k{i - 1}") for i in range(1, 2001)}}
        assert ray_dask_get(graph, "k2000") == 2000

    def test_cycles_are_told(self):
        with pytest.raises((ValueError, RuntimeError)):
            ray_dask_get({"a": (inc, "b"), "b": (inc, "a")}, "a")


class TestDelayed:
    def test_compute(self):
        parts = [dask.delayed(inc)(x) for x in range(10)]
        assert dask.delayed(sum)(parts).compute(scheduler=ray_dask_get) == 55

    def test_it_runs_in_parallel_elsewhere(self):
        parts = [dask.delayed(lambda _: time.sleep(0.2) or os.getpid())(x) for x in range(4)]
        pids = dask.compute(*parts, scheduler=ray_dask_get)
        assert os.getpid() not in pids
        assert len(set(pids)) > 1

    def test_for_all(self):
        with util_dask.enable_dask_on_ray():
            assert dask.delayed(os.getpid)().compute() != os.getpid()
        with util_dask.disable_dask_on_ray():
            assert dask.delayed(os.getpid)().compute() == os.getpid()

    def test_here(self):
        total = dask.delayed(inc)(dask.delayed(os.getpid)())
        assert total.compute(scheduler=util_dask.ray_dask_get_sync) == os.getpid() + 1

    def test_options(self):
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

    def test_against_numpy(self):
        plain = np.random.default_rng(0).random((600, 400))
        array = self.da.from_array(plain, chunks=(150, 100))
        result = ((array @ array.T).sum(axis=0) + array.mean()).compute(scheduler=ray_dask_get)
        assert np.allclose(result, (plain @ plain.T).sum(axis=0) + plain.mean())

    def test_persist(self):
        array = self.da.arange(1000, chunks=100).persist(scheduler=ray_dask_get, ray_persist=True)
        assert all(isinstance(part, ray.ObjectRef) for part in array.dask.values())
        assert (array + 1).sum().compute(scheduler=ray_dask_get) == 500_500
        assert array.sum().compute(scheduler=util_dask.ray_dask_get_sync) == 499_500
