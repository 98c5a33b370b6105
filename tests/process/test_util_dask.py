"""The Dask scheduler."""

from __future__ import annotations

import importlib
import os
import time

import numpy as np
import pytest
from engine import IS_HPCRAY, NAME, hpcray_only, ray

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


@dask.delayed
def add(x, y):
    return x + y


@ray.remote
class Notes:
    def __init__(self):
        self.lines = []

    def note(self, *line):
        self.lines.append(line)

    def read(self):
        return self.lines


class Noting(util_dask.RayDaskCallback):
    def __init__(self, notes):
        self.notes = notes

    def _note(self, *line):
        ray.get(self.notes.note.remote(*line))

    def _ray_presubmit(self, task, key, deps):
        self._note("presubmit", str(key), len(deps))

    def _ray_postsubmit(self, task, key, deps, object_ref):
        assert isinstance(object_ref, ray.ObjectRef)
        self._note("postsubmit", str(key))

    def _ray_pretask(self, key, object_refs):
        return f"state of {key}", os.getpid()

    def _ray_posttask(self, key, result, pre_state):
        assert pre_state == (f"state of {key}", os.getpid())
        self._note("posttask", str(key), result)

    def _ray_postsubmit_all(self, object_refs, dsk):
        self._note("postsubmit_all", len(dsk))

    def _ray_finish(self, result):
        self._note("finish", result)


@pytest.mark.parametrize("scheduler", [util_dask.ray_dask_get, util_dask.ray_dask_get_sync], ids=["tasks", "sync"])
class TestCallbacks:
    def test_each_callback_is_called_in_its_place(self, scheduler):
        graph = {"a": (inc, 1), "b": (inc, "a")}
        notes = Notes.remote()
        with Noting(notes):
            assert scheduler(graph, ["b"]) in ([3], (3,))
        assert not util_dask.RayDaskCallback.ray_active
        lines = ray.get(notes.read.remote())
        kinds = [line[0] for line in lines]
        assert sorted(kinds) == sorted(["presubmit", "postsubmit", "posttask"] * 2 + ["postsubmit_all", "finish"])
        assert ("presubmit", "a", 0) in lines and ("presubmit", "b", 1) in lines and ("posttask", "b", 3) in lines
        assert kinds[0] == "presubmit" and kinds[-1] == "finish"

    def test_a_value_of_presubmit_stands_for_the_tasks(self, scheduler):
        asked = []

        def answer(task, key, deps):
            asked.append(key)
            return 40 if key == "a" else None

        with util_dask.RayDaskCallback(ray_presubmit=answer):
            assert scheduler({"a": (boom, 1), "b": (inc, "a")}, "b") == 41
        assert asked == ["a", "b"]

    def test_several_callbacks_get_their_own_states(self, scheduler):
        def after(suffix, key, result, state):
            assert state == (None if suffix is None else f"{key}{suffix}")

        class Both(util_dask.RayDaskCallback):
            def __init__(self, suffix):
                self.suffix = suffix

            def _ray_pretask(self, key, object_refs):
                return f"{key}{self.suffix}"

            def _ray_posttask(self, key, result, pre_state):
                assert pre_state == f"{key}{self.suffix}"

        class OnlyAfter(util_dask.RayDaskCallback):
            def _ray_posttask(self, key, result, pre_state):
                assert pre_state is None

        with Both("x"), OnlyAfter(), Both("y"):
            assert add(2, 3).compute(scheduler=scheduler) == 5

    def test_callbacks_can_be_given_to_one_computation(self, scheduler):
        found = []
        callback = util_dask.RayDaskCallback(ray_finish=found.append)
        assert add(2, 3).compute(scheduler=scheduler, ray_callbacks=[callback._ray_callback]) == 5
        assert add(2, 3).compute(scheduler=scheduler) == 5
        assert len(found) == 1

    def test_dasks_own_callbacks_are_called(self, scheduler):
        from dask.callbacks import Callback

        seen = []
        with Callback(
            start=lambda dsk: seen.append("start"),
            pretask=lambda key, dsk, state: seen.append(f"before {key}"),
            posttask=lambda key, value, dsk, state, worker: seen.append(f"after {key}"),
            finish=lambda dsk, state, failed: seen.append(f"finish {failed}"),
        ):
            assert scheduler({"a": (inc, 1)}, "a") == 2
        assert seen[0] == "start" and seen[-1] == "finish False" and {"before a", "after a"} <= set(seen)


class TestPersist:
    @pytest.mark.parametrize("way", ["method", "function", "default", "explicit"])
    def test_persist_keeps_refs(self, way):
        array = pytest.importorskip("dask.array").arange(100, chunks=50) + 1
        if way == "method":
            kept = array.persist(scheduler=ray_dask_get)
        elif way == "function":
            (kept,) = dask.persist(array, scheduler=ray_dask_get)
        elif way == "explicit":
            (kept,) = util_dask.ray_dask_persist(array, scheduler=ray_dask_get)
        else:
            with util_dask.enable_dask_on_ray():
                kept = array.persist()
        assert all(isinstance(_value(part), ray.ObjectRef) for part in kept.dask.values())
        assert kept.sum().compute(scheduler=ray_dask_get) == 5050

    def test_dasks_own_schedulers_keep_values(self):
        array = pytest.importorskip("dask.array").arange(100, chunks=50).persist(scheduler="sync")
        assert array.sum().compute(scheduler="sync") == 4950
        assert not any(isinstance(_value(part), ray.ObjectRef) for part in array.dask.values())


def _value(part):
    return getattr(part, "value", part)


def test_resources_of_dask_are_refused_with_rays_words():
    with pytest.raises(ValueError, match=r'Use ray_remote_args=\{"resources"'):
        add(1, 2).compute(scheduler=ray_dask_get, resources={"x": 1})
    with dask.annotate(resources={"x": 1}), pytest.raises(ValueError, match=r'Use ray_remote_args=\{"resources"'):
        add(1, 2).compute(scheduler=ray_dask_get)


def test_the_progress_bar_counts_the_nodes(capsys):
    with util_dask.ProgressBarCallback():
        assert add(1, 2).compute(scheduler=ray_dask_get, _ray_enable_progress_bar=True) == 3
    shown = capsys.readouterr()
    assert "All tasks are completed." in shown.out and "execution_time" in shown.out and "1/1" in shown.err


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_refs_are_found_in_nested_values(kind):
    common = importlib.import_module("hpcray.util.dask.scheduler" if IS_HPCRAY else "ray.util.dask.common")
    first, second = ray.put(1), ray.put(2)
    nested = {"a": [first, {"b": (second, first)}]} if kind is dict else kind([first, {"b": (second, first)}])
    refs, repack = common.unpack_object_refs(nested, 7)
    (found, seven) = repack(ray.get(refs))
    expected = {"a": [1, {"b": (2, 1)}]} if kind is dict else kind([1, {"b": (2, 1)}])
    assert (found, seven) == (expected, 7) and type(found) is kind


def test_the_helpers_of_a_scheduler_have_rays_names():
    utils = importlib.import_module(f"{NAME}.util.dask.scheduler_utils")
    assert utils.nested_get([[1, 0], 0], "abc") == (("b", "a"), "a")
    assert callable(utils.get_async) and callable(utils.start_state_from_dask)
    with pytest.warns(UserWarning, match="2025.1.0"):
        assert util_dask.dataframe_optimize({}, []) is None
