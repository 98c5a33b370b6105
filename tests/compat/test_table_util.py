"""The table's rows of `ray.util` and `ray.experimental`, in its order."""

from __future__ import annotations

import asyncio
import builtins
import importlib
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpcray.compat.finder import FINDER

from .rows import row
from .test_table_core import ROOT, script


def there(name: str) -> Any:
    """A module, or the end of the test where hpcray does not have it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if "hpcray does not have" not in str(error):
            raise
        return pytest.xfail(str(error))


# -------------------------------------------------------------------- placement groups, strategies


@row("placement_group")
def test_placement_groups_reserve_bundles_by_strategy(ray: Any) -> None:
    from ray.util.placement_group import placement_group

    for strategy in ("PACK", "SPREAD", "STRICT_PACK"):
        group = placement_group([{"CPU": 1}, {"CPU": 1, "GPU": 0.5, "disk": 1e-4}], strategy=strategy, name=strategy)
        assert ray.get(group.ready(), timeout=60) == group
        ray.util.remove_placement_group(group)
    spread = placement_group([{"CPU": 1}, {"CPU": 1}], strategy="STRICT_SPREAD", lifetime="detached")
    assert not spread.wait(0.05), "there is one node"
    ray.util.remove_placement_group(spread)
    with pytest.raises(ValueError, match="Invalid placement group strategy"):
        placement_group([{"CPU": 1}], strategy="NONSENSE")
    with pytest.raises(ValueError, match="Bundles must be"):
        placement_group([])


@row("PlacementGroup")
def test_the_handle_of_a_placement_group_travels(ray: Any) -> None:
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 2}])
    assert isinstance(group, ray.util.placement_group.__globals__["PlacementGroup"])
    assert isinstance(group.ready(), ray.ObjectRef)
    assert group.wait(60)
    assert (group.bundle_count, group.bundle_specs, group.is_empty) == (2, [{"CPU": 1}, {"CPU": 2}], False)
    assert pickle.loads(pickle.dumps(group)) == group
    assert ray.get(ray.remote(lambda g: (g.bundle_count, g.id.hex())).remote(group)) == (2, group.id.hex())
    ray.util.remove_placement_group(group)


@row("remove_placement_group, placement_group_table, get_current_placement_group, get_placement_group")
def test_placement_groups_are_listed_found_and_removed(ray: Any, until: Any) -> None:
    from ray.util import get_current_placement_group, get_placement_group, placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}], name="table.functions", strategy="PACK")
    assert group.wait(60)
    here = ray.get_runtime_context().get_node_id()
    table = placement_group_table(group)
    assert (table["state"], table["bundles_to_node_id"]) == ("CREATED", {0: here, 1: here})
    assert placement_group_table(group.id) == table
    assert placement_group_table()[group.id.hex()]["name"] == "table.functions"
    assert get_placement_group("table.functions") == group
    assert get_current_placement_group() is None
    inside = ray.remote(lambda: get_current_placement_group())
    assert ray.get(inside.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group)).remote()) == group
    ray.util.remove_placement_group(group)
    until(lambda: placement_group_table(group)["state"] == "REMOVED")
    with pytest.raises(ValueError, match="Failed to look up placement group"):
        get_placement_group("table.nobody")


@row("PlacementGroupSchedulingStrategy")
def test_actors_in_a_placement_group_share_a_bundle(ray: Any) -> None:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.placement_group([{"CPU": 1, "GPU": 1}, {"CPU": 1}])

    @ray.remote(num_cpus=0, num_gpus=0.5)
    class Half:
        def gpu(self) -> tuple[Any, Any]:
            child = ray.remote(num_cpus=1)(lambda: ray.get_runtime_context().get_placement_group_id())
            return ray.get_gpu_ids(), ray.get(child.remote())

    strategy = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    halves = [Half.options(scheduling_strategy=strategy).remote() for _ in range(2)]
    (one, first), (other, second) = ray.get([half.gpu.remote() for half in halves])
    assert one == other, "two halves of the bundle's GPU"
    assert {first, second} == {group.id.hex()}, "what they start runs in the group too"
    with pytest.raises(ValueError, match="bundle index"):
        Half.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, 7)).remote()
    for half in halves:
        ray.kill(half)
    ray.util.remove_placement_group(group)


class Place:
    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())


@row("NodeAffinitySchedulingStrategy")
def test_an_affinity_to_a_busy_node_fails_waits_or_spills(ray: Any) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    cpus = int(ray.cluster_resources()["CPU"])
    actor_class = ray.remote(num_cpus=cpus)(Place)
    fails = NodeAffinitySchedulingStrategy(here, soft=False, _fail_on_unavailable=True)
    while ray.available_resources().get("CPU") != cpus:
        time.sleep(0.05)  # what earlier tests held
    holder = actor_class.options(scheduling_strategy=fails).remote()
    assert ray.get(holder.node.remote()) == here
    where = ray.remote(num_cpus=cpus)(lambda: ray.get_runtime_context().get_node_id())
    with pytest.raises(ray.exceptions.ActorUnschedulableError):
        ray.get(actor_class.options(scheduling_strategy=fails).remote().node.remote(), timeout=30)
    with pytest.raises(ray.exceptions.TaskUnschedulableError):
        ray.get(where.options(scheduling_strategy=fails).remote(), timeout=30)
    spills = NodeAffinitySchedulingStrategy(here, soft=True, _spill_on_unavailable=True)
    later = where.options(scheduling_strategy=spills).remote()
    assert not ray.wait([later], timeout=0.5)[0]
    ray.kill(holder)
    assert ray.get(later, timeout=30) == here


@row("NodeAffinitySchedulingStrategy")
def test_node_affinity_selects_the_node(ray: Any) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    where = ray.remote(lambda: ray.get_runtime_context().get_node_id())
    assert ray.get(where.options(scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False)).remote()) == here
    gone = ray.NodeID.from_random().hex()
    assert ray.get(where.options(scheduling_strategy=NodeAffinitySchedulingStrategy(gone, soft=True)).remote()) == here
    for options in (
        {"scheduling_strategy": NodeAffinitySchedulingStrategy(gone, soft=False)},
        {"label_selector": {ray._raylet.RAY_NODE_ID_KEY: gone}},
        {"label_selector": {ray._raylet.RAY_NODE_ID_KEY: here}, "resources": {"nowhere": 1}},
    ):
        with pytest.raises(ray.exceptions.TaskUnschedulableError):
            ray.get([where.options(**options).remote() for _ in range(3)], timeout=30)
        actor = ray.remote(num_cpus=0)(Place).options(**options).remote()
        with pytest.raises(ray.exceptions.ActorUnschedulableError):
            ray.get(actor.node.remote(), timeout=30)
    with pytest.raises(ValueError, match="Invalid node_id"):
        NodeAffinitySchedulingStrategy("nonsense", soft=False)


@row("NodeLabelSchedulingStrategy")
def test_node_labels_select_the_node(ray: Any) -> None:
    from ray.util.scheduling_strategies import Exists, In, NodeLabelSchedulingStrategy, NotIn

    here = ray.get_runtime_context().get_node_id()
    where = ray.remote(lambda: ray.get_runtime_context().get_node_id())
    strategy = NodeLabelSchedulingStrategy(
        {"ray.io/node-id": In(here)}, soft={"zone": Exists(), "ray.io/node-id": NotIn("x")}
    )
    with pytest.raises(ValueError, match="In operator must be a non-empty tuple"):
        In()
    try:
        ref = where.options(scheduling_strategy=strategy).remote()
    except NotImplementedError as error:
        pytest.xfail(str(error))
    assert ray.get(ref, timeout=60) == here


# -------------------------------------------------------------------- utilities


@row("util.get_node_ip_address")
def test_get_node_ip_address_is_the_address_of_the_node(ray: Any) -> None:
    assert ray.util.get_node_ip_address() == ray.nodes()[0]["NodeManagerAddress"]


@row("util.queue.Queue")
def test_a_queue_is_shared_by_driver_and_tasks(ray: Any) -> None:
    from ray.util.queue import Empty, Full, Queue

    queue = Queue(maxsize=2, actor_options={"num_cpus": 0})
    queue.put_nowait_batch([1, 2])
    assert (queue.qsize(), queue.full(), queue.empty()) == (2, True, False)
    with pytest.raises(Full):
        queue.put(3, block=False)
    assert [queue.get(), queue.get(timeout=10)] == [1, 2]
    with pytest.raises(Empty):
        queue.get_nowait()
    ray.get(ray.remote(lambda q: q.put("from a task")).remote(queue))
    assert asyncio.run(queue.get_async(timeout=10)) == "from a task"
    queue.shutdown()


@row("util.ActorPool, ActorGroup, as_completed, map_unordered")
def test_actor_pools_and_iterators_return_all_results(ray: Any) -> None:
    @ray.remote(num_cpus=0)
    class Doubler:
        def double(self, x: int) -> int:
            return 2 * x

    pool = ray.util.ActorPool([Doubler.remote() for _ in range(2)])
    assert list(pool.map(lambda actor, x: actor.double.remote(x), range(5))) == [0, 2, 4, 6, 8]
    assert sorted(pool.map_unordered(lambda actor, x: actor.double.remote(x), range(5))) == [0, 2, 4, 6, 8]
    double = ray.remote(lambda x: 2 * x)
    assert sorted(ray.util.as_completed([double.remote(i) for i in range(3)])) == [0, 2, 4]
    assert sorted(ray.util.map_unordered(double, range(3))) == [0, 2, 4]


@row("util.list_named_actors")
def test_named_actors_are_listed_by_namespace(ray: Any, until: Any) -> None:
    @ray.remote(num_cpus=0)
    class Named:
        pass

    here = Named.options(name="table.a").remote()
    there_ = Named.options(name="table.b", namespace="moon").remote()
    until(lambda: "table.a" in ray.util.list_named_actors())
    assert "table.b" not in ray.util.list_named_actors()
    until(lambda: {"name": "table.b", "namespace": "moon"} in ray.util.list_named_actors(all_namespaces=True))
    del here, there_


@row(
    "util.state, experimental.state.api",
    differs="of runtime_envs there are no rows",
)
def test_the_state_api_lists_actors_nodes_and_placement_groups(ray: Any, until: Any) -> None:
    state = there("ray.util.state")

    @ray.remote(num_cpus=0)
    class Seen:
        def pid(self) -> int:
            return os.getpid()

    actor = Seen.options(name="table.seen").remote()
    pid = ray.get(actor.pid.remote())
    ident = actor._actor_id.hex()
    found = until(lambda: state.get_actor(ident))
    assert (found.actor_id, found.state, found.class_name, found.name) == (ident, "ALIVE", "Seen", "table.seen")
    assert found["pid"] == found.pid == pid
    assert ident in {row.actor_id for row in state.list_actors(filters=[("state", "=", "ALIVE")])}
    assert state.list_actors(filters=[("class_name", "=", "Nobody")]) == []
    (node,) = state.list_nodes()
    assert (node.node_id, node.state) == (ray.get_runtime_context().get_node_id(), "ALIVE")
    group = ray.util.placement_group([{"CPU": 1}], name="table.state")
    group.wait(60)
    assert "CREATED" in {row.state for row in state.list_placement_groups() if row.name == "table.state"}
    ray.util.remove_placement_group(group)
    common = there("ray.util.state.common")
    options = common.ListApiOptions(filters=[("name", "=", "Seen.__init__")], detail=True)
    (creation,) = state.StateApiClient().list(common.StateResource.TASKS, options)
    assert (creation.type, creation.state) == ("ACTOR_CREATION_TASK", "FINISHED")
    assert state.list_cluster_events() == state.list_runtime_envs() == []


@row("util.collective")
def test_a_collective_group_of_actors_reduces_arrays(ray: Any) -> None:
    there("ray.util.collective")
    import numpy as np

    @ray.remote(num_cpus=0)
    class Rank:
        def join(self, size: int, rank: int) -> None:
            from ray.util import collective

            collective.init_collective_group(size, rank, backend="gloo", group_name="table")

        def sum(self, value: float) -> float:
            from ray.util import collective

            data = np.full(3, value, dtype=np.float32)
            collective.allreduce(data, group_name="table")
            collective.barrier(group_name="table")
            return float(data[0]) if collective.is_group_initialized("table") else 0.0

    ranks = [Rank.remote() for _ in range(2)]
    ray.get([rank.join.remote(2, index) for index, rank in enumerate(ranks)], timeout=60)
    assert ray.get([rank.sum.remote(index + 1.0) for index, rank in enumerate(ranks)], timeout=60) == [3.0, 3.0]


@row("util.metrics")
def test_metrics_have_the_methods_and_errors_of_ray(ray: Any) -> None:
    there("ray.util.metrics")
    from ray.util.metrics import Counter, Gauge, Histogram

    counter = Counter("table_counter", description="of a test", tag_keys=("kind",))
    counter.set_default_tags({"kind": "a"})
    counter.inc(2.0)
    Gauge("table_gauge").set(3)
    Histogram("table_histogram", boundaries=[1, 10]).observe(5)
    assert counter.info["name"] == "table_counter"
    with pytest.raises(ValueError, match=r"Missing value for tag key\(s\): kind"):
        Counter("table_other", tag_keys=("kind",)).inc(1)


@row("util.multiprocessing.Pool")
def test_a_multiprocessing_pool_maps_and_applies(ray: Any) -> None:
    from ray.util.multiprocessing import Pool

    with Pool(2) as pool:
        assert pool.map(lambda x: x * x, range(5)) == [0, 1, 4, 9, 16]
        assert pool.apply_async(divmod, (7, 2)).get(timeout=60) == (3, 1)
        assert sorted(pool.imap_unordered(abs, [-1, -2])) == [1, 2]


@row("util.joblib.register_ray")
def test_joblib_runs_calls_on_the_ray_backend(ray: Any) -> None:
    joblib = pytest.importorskip("joblib")
    from ray.util.joblib import register_ray

    register_ray()
    with joblib.parallel_config("ray", n_jobs=2):
        assert joblib.Parallel()(joblib.delayed(pow)(x, 2) for x in range(4)) == [0, 1, 4, 9]


@row("util.tracing")
def test_tracing_is_off_unless_a_hook_is_given(ray: Any) -> None:
    assert not there("ray.util.tracing.tracing_helper")._is_tracing_enabled()


OF_THE_WHEEL = "Ray's own code: Ray's wheel lends it (docs/how-to/ray-libraries.md), and an error says so without one"


@row("util.iter", differs=OF_THE_WHEEL)
@row("experimental.shuffle", differs=OF_THE_WHEEL)
@pytest.mark.parametrize(
    "name", ["ray.util.iter", "ray.util.iter_metrics", "ray.experimental.shuffle", "ray._common.retry"]
)
def test_code_of_ray_itself_is_not_there_without_its_wheel(ray: Any, name: str) -> None:
    assert not FINDER.lent
    with pytest.raises(ModuleNotFoundError, match=rf"{name}: it is Ray's own code.*hint: .*libraries install"):
        importlib.import_module(name)


@row("util.dask")
def test_dask_graphs_are_computed_by_tasks(ray: Any) -> None:
    pytest.importorskip("dask")
    from ray.util.dask import enable_dask_on_ray, ray_dask_get

    graph = {"a": 1, "b": (lambda x: x + 1, "a"), "c": (sum, ["a", "b"])}
    assert ray_dask_get(graph, ["c", ["b"]]) == [3, [2]]
    with enable_dask_on_ray():
        import dask

        assert dask.delayed(lambda x: x + 1)(1).compute() == 2


@row("util.register_serializer, deregister_serializer")
def test_a_registered_serializer_is_used_until_deregistered(ray: Any) -> None:
    if not hasattr(ray.util, "register_serializer"):
        pytest.xfail("hpcray does not have ray.util.register_serializer")

    class Locked:
        def __init__(self, x: int) -> None:
            self.x = x
            self.lock = threading.Lock()

    ray.util.register_serializer(Locked, serializer=lambda o: o.x, deserializer=lambda x: Locked(x + 1))
    assert ray.get(ray.put(Locked(1))).x == 2
    ray.util.deregister_serializer(Locked)
    with pytest.raises(TypeError, match="Could not serialize the put value"):
        ray.put(Locked(1))


@row("util.inspect_serializability")
def test_inspect_serializability_finds_what_does_not_pickle(ray: Any) -> None:
    lock = threading.Lock()
    fine, problems = ray.util.inspect_serializability(lambda: lock, name="it")
    assert not fine
    assert "lock" in str(problems)


@row("util.annotations, util.debug.log_once, util.timer")
def test_annotations_log_once_and_timer_behave_as_in_ray(as_ray: Any) -> None:
    from ray.util.annotations import Deprecated, DeveloperAPI, PublicAPI, RayDeprecationWarning
    from ray.util.debug import log_once, reset_log_once
    from ray.util.timer import _Timer

    @PublicAPI(stability="alpha")
    @DeveloperAPI
    def f() -> int:
        return 1

    @Deprecated(message="use f", warning=True)
    def old() -> int:
        return 2

    assert f() == 1
    with pytest.warns(RayDeprecationWarning, match="deprecated and may be removed in future Ray releases.*\\nuse f"):
        assert old() == 2
    assert "DEPRECATED" in (old.__doc__ or "") and "use f" in (old.__doc__ or "")
    reset_log_once("table")
    assert [log_once("table"), log_once("table")] == [True, False]
    timer = _Timer(window_size=2)
    for sample in (9.0, 1.0, 3.0):
        timer.push(sample)
        timer.push_units_processed(4)
    assert (timer.mean, timer.count, timer.mean_throughput) == (2.0, 3, 2.0)
    assert as_ray.util.log_once is log_once


@row("experimental.internal_kv")
def test_the_internal_kv_stores_lists_and_deletes_keys(ray: Any) -> None:
    kv = there("ray.experimental.internal_kv")
    assert kv._internal_kv_initialized()
    assert kv._internal_kv_put(b"table", b"1", namespace="t") is False, "it was not there"
    assert kv._internal_kv_put("table", "2", overwrite=False, namespace="t") is True
    assert kv._internal_kv_get(b"table", namespace="t") == b"1"
    assert kv._internal_kv_exists(b"table", namespace="t")
    assert kv._internal_kv_list("tab", namespace="t") == [b"table"]
    assert ray.get(ray.remote(lambda: kv._internal_kv_get("table", namespace="t")).remote()) == b"1"
    assert kv._internal_kv_del("table", namespace="t") == 1
    assert kv._internal_kv_get("table", namespace="t") is None


@row("experimental.tqdm_ray")
def test_a_progress_bar_shows_how_far_its_task_is(as_ray: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    from ray.experimental import tqdm_ray

    printing = builtins.print
    try:
        assert list(tqdm_ray.tqdm([1, 2], desc="rows")) == [1, 2]
        bar = tqdm_ray.tqdm(total=3, flush_interval_s=0)
        bar.update(2)
        assert (bar.n, bar.total) == (2, 3)
        assert builtins.print is tqdm_ray.safe_print
        print("a line")
        bar.close()
    finally:
        builtins.print = printing
    found = capsys.readouterr()
    assert "rows: 100%" in found.err and " 67%" in found.err and found.out == "a line\n"


@row("experimental.get_object_locations")
def test_object_locations_name_node_and_size(ray: Any) -> None:
    import numpy as np

    ref = ray.put(np.zeros(100_000))
    place = ray.experimental.get_object_locations([ref])[ref]
    assert place["node_ids"] == [ray.get_runtime_context().get_node_id()]
    assert 800_000 <= place["object_size"] < 810_000


@row(
    "RDT: tensor_transport",
    differs="tensors stay in their process until another reads them, then they go through the node stores, those on a "
    "GPU too; registered transports must be one-sided; register_nixl_memory and the like have no effect, as nothing "
    "needs it",
)
def test_tensor_transport(ray: Any) -> None:
    torch = pytest.importorskip("torch")

    @ray.remote(num_cpus=0, enable_tensor_transport=True)
    class Actor:
        @ray.method(tensor_transport="gloo")
        def f(self) -> Any:
            return torch.ones(3)

        def g(self, tensor: Any) -> float:
            return float(tensor.sum())

    first, second = Actor.remote(), Actor.remote()
    assert ray.get(second.g.remote(first.f.remote())) == 3


@pytest.mark.slow
@row("object spilling")
def test_objects_beyond_the_store_are_spilled(tmp_path: Path) -> None:
    out = script(
        """
        import hpcray.compat.ray
        import numpy as np, ray
        ray.init(num_cpus=1, object_store_memory=64 << 20)
        refs = [ray.put(np.full(2_000_000, index)) for index in range(8)]  # 128 MB
        print(all((ray.get(ref) == index).all() for index, ref in enumerate(refs)))
        """,
        tmp_path,
    )
    assert out.strip() == "True"


@row("ray.internal.free")
def test_a_freed_object_raises_object_freed_error(ray: Any) -> None:
    import numpy as np
    from ray._private.internal_api import free

    ref = ray.put(np.zeros(100_000))
    free([ref])
    with pytest.raises(ray.exceptions.ObjectFreedError):
        ray.get(ref, timeout=60)


@row("log_to_driver, prefixes")
def test_log_to_driver_prints_lines_of_workers_with_a_prefix(tmp_path: Path) -> None:
    out = script(
        """
        import hpcray.compat.ray
        import ray, sys, time

        @ray.remote
        def speak(word):
            print(word, "from", "a task", flush=True)

        for how, word in ((False, "nothing"), (True, "hello")):
            with ray.init(num_cpus=1, log_to_driver=how):
                ray.get(speak.remote(word))
        """,
        tmp_path,
    )
    (line,) = [line for line in out.splitlines() if "from a task" in line]
    assert line.startswith("(speak")
    assert "pid=" in line
    assert line.endswith("hello from a task")


@row(
    "command line: start, stop, status",
    differs="a job is started by Slurm or mpirun and ends by itself: no start, stop",
)
def test_the_status_command_prints_resources(ray: Any) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "hpcray.cli", "status"], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "CPU" in ended.stdout
