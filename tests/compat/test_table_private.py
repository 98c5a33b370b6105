"""Private names of Ray that real programs touch, in the order of the table, and how `import ray` itself behaves."""

from __future__ import annotations

import gc
import importlib
import io
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcray.compat.finder import load_source
from hpcray.compat.table import MODULES

from .rows import row
from .test_table_core import ROOT, script


@row("ray._private.services.get_node_ip_address")
def test_private_services_return_the_address_of_the_node(ray: Any) -> None:
    from ray._private.services import get_node_ip_address

    assert get_node_ip_address() == ray.nodes()[0]["NodeManagerAddress"]


@row("ray._private.state")
def test_private_state_lists_nodes_actors_and_placement_groups(ray: Any, until: Any) -> None:
    from ray._private import state
    from ray.util.state import list_workers

    here = ray.get_runtime_context().get_node_id()
    assert state.total_resources_per_node()[here]["CPU"] == 4
    until(lambda: state.available_resources_per_node()[here].get("CPU") == 4)
    assert state.state._available_resources_per_node().keys() == {here}

    @ray.remote(num_cpus=0)
    class Listed:
        def ok(self) -> int:
            return 1

    actor = Listed.options(name="table.listed").remote()
    ray.get(actor.ok.remote())
    ident = actor._actor_id.hex()
    row_ = ray._private.state.actors()[ident]
    assert (row_["Name"], row_["State"], row_["ActorClassName"]) == ("table.listed", "ALIVE", "Listed")
    assert row_["Address"]["NodeID"] == here
    assert state.actors(ident) == row_
    assert row_["Timestamp"] == row_["StartTime"] > 0 == row_["EndTime"]
    assert row_["Pid"] in {worker.pid for worker in list_workers(detail=True, limit=1000)}
    ended = Listed.remote()
    ray.get(ended.ok.remote())
    before = state.actors(ended._actor_id.hex())
    time.sleep(0.05)
    ray.kill(ended)
    until(lambda: state.actors(before["ActorID"])["State"] == "DEAD")
    after = state.actors(before["ActorID"])
    assert after["Timestamp"] == after["EndTime"] > after["StartTime"] == before["StartTime"]
    group = ray.util.placement_group([{"CPU": 1}], name="table.group")
    assert group.wait(30)
    table = state.state.placement_group_table(group.id)
    assert table["state"] == "CREATED"
    assert table["bundles_to_node_id"] == {0: here}
    ray.util.remove_placement_group(group)


def count_references(ray: Any, core: Any) -> None:
    """What the program holds, what its tasks mention, what other objects hold; and where a value is."""

    go = Path(ray._private.worker._global_node.get_session_dir_path(), "go")

    @ray.remote
    def late(*values: Any) -> None:
        while not go.exists():
            time.sleep(0.01)

    def counts() -> dict[bytes, tuple[int, int]]:
        gc.collect()
        rows = core.get_all_reference_counts().items()
        return {oid: (row["local"], row["submitted"]) for oid, row in rows if oid not in before}

    before = core.get_all_reference_counts()
    ref = ray.put(1)
    oid = ref.hex().encode()
    assert core.object_exists(ref)
    done = late.remote(ref, [ref])
    task = done.hex().encode()
    assert counts() == {oid: (1, 2), task: (1, 0)}
    outer = ray.put([ref])
    del ref
    assert counts() == {oid: (0, 2), task: (1, 0), outer.hex().encode(): (1, 0)}
    go.touch()
    ray.get(done)
    assert counts()[oid] == (0, 0)
    del outer, done
    assert counts() == {}

    @ray.remote(num_cpus=0)
    class Idle:
        pass

    size, actor = core.get_memory_store_size(), Idle.remote()
    ray.get(actor.__ray_ready__.remote())
    assert counts() == {}, "a handle of an actor is no reference to an object"
    assert core.get_memory_store_size() == size
    large = ray.put(bytes(1 << 20))
    assert core.object_exists(large)
    assert not core.object_exists(large, memory_store_only=True)
    freed = large.binary()
    del large
    assert not core.object_exists(ray.ObjectRef(freed))
    assert core.get_memory_store_size() >= 0


@row("ray._private.worker.global_worker")
def test_the_global_worker_names_the_role_of_the_process(ray: Any) -> None:
    worker = ray._private.worker.global_worker
    worker.check_connected()
    assert (worker.connected, worker.mode) == (True, ray.SCRIPT_MODE)
    assert worker.gcs_client.address == ray.get_runtime_context().gcs_address
    assert worker.current_job_id.hex() == ray.get_runtime_context().get_job_id()
    assert worker.current_node_id.hex() == ray.get_runtime_context().get_node_id()

    @ray.remote
    def inside() -> tuple[Any, ...]:
        me = ray._private.worker.global_worker
        here = ray.get_runtime_context()
        return me.mode, me.current_task_id.hex() == here.get_task_id(), me.worker_id.hex() == here.get_worker_id()

    @ray.remote(num_cpus=0)
    class Async:
        async def is_async(self) -> bool:
            return ray._private.worker.global_worker.core_worker.current_actor_is_asyncio()

    assert ray.get(inside.remote()) == (ray.WORKER_MODE, True, True)
    assert ray.get(Async.remote().is_async.remote()) is True
    with pytest.raises(AttributeError, match="hpcray does not have"):
        worker.nonsense  # noqa: B018
    count_references(ray, worker.core_worker)
    ray._private.worker.blocking_get_inside_async_warned = True


@row("ray._private.worker.global_worker")
def test_the_global_worker_says_what_the_runtime_context_says(ray: Any) -> None:
    """Train's workers read the placement group in force there."""

    def facts() -> dict[str, Any]:
        me = ray._private.worker.global_worker
        return {
            "group": me.placement_group_id.hex(), "captures": me.should_capture_child_tasks_in_placement_group,
            "name": me.current_task_name, "function": me.current_task_function_name, "actor": me.actor_name,
        }  # fmt: skip

    nil = ray._raylet.PlacementGroupID.nil().hex()
    worker, here = ray._private.worker.global_worker, ray.get_runtime_context()
    assert facts() == {"group": nil, "captures": False, "name": "", "function": "", "actor": ""}
    assert worker.current_cluster_and_job == (worker.node.cluster_id, worker.current_job_id)
    assert worker.current_temp_dir == here.get_temp_dir() and worker.current_node_labels == here.get_node_labels()

    @ray.remote(num_cpus=1)
    def of_task() -> tuple[dict[str, Any], bool]:
        return facts(), ray._private.worker.global_worker.is_canceled

    @ray.remote(num_cpus=1)
    class Actor:
        def facts(self) -> dict[str, Any]:
            return facts()

    group = ray.util.placement_group([{"CPU": 1}])
    inside = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
    found, canceled = ray.get(of_task.options(name="the task", scheduling_strategy=inside).remote())
    assert found.pop("function").endswith("of_task") and canceled is False
    assert found == {"group": group.id.hex(), "captures": False, "name": "the task", "actor": ""}
    capturing = inside.__class__(group, placement_group_capture_child_tasks=True)
    actor = Actor.options(name="table.facts", scheduling_strategy=capturing).remote()
    found = ray.get(actor.facts.remote())
    assert (found["group"], found["captures"], found["actor"]) == (group.id.hex(), True, "table.facts")
    ray.util.remove_placement_group(group)


@row("ray._private.worker._global_node")
def test_the_global_node_names_addresses_and_directories(ray: Any) -> None:
    node = ray._private.worker._global_node
    assert os.path.isdir(node.get_session_dir_path())
    assert any(name.startswith("worker-") for name in os.listdir(node.get_logs_dir_path()))
    assert node.node_id == ray.get_runtime_context().get_node_id()
    assert node.is_head()


@row("ray._private.worker: printing", differs="what workers print does not go through it; replacing it changes nothing")
def test_lines_of_workers_are_printed_with_the_prefix_of_ray(
    ray: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"ip": "10.0.0.9", "pid": 8, "is_err": False, "lines": ["one", "two"], "actor_name": "A", "task_name": None}
    reset = "\x1b[0m"
    colors = {"": "\x1b[36m", "1": "\x1b[32m", "0": ""}
    for setting, color in colors.items():
        monkeypatch.setenv("RAY_COLOR_PREFIX", setting)
        file = io.StringIO()
        ray._private.worker.print_worker_logs(data, file)
        assert file.getvalue().startswith(f"{color}(A pid=8, ip=10.0.0.9){reset if color else ''} one\n")
    assert file.getvalue() == "(A pid=8, ip=10.0.0.9) one\n(A pid=8, ip=10.0.0.9) two\n"
    ray._private.worker.print_to_stdstream(data, ignore_prefix=True)
    assert capsys.readouterr().out == "one\ntwo\n"


@row("ray._private.utils")
def test_private_utils_convert_and_measure_as_in_ray(ray: Any) -> None:
    from ray._private.utils import get_ray_temp_dir

    session = ray._private.worker._global_node.get_session_dir_path()
    assert os.path.samefile(os.path.dirname(session), get_ray_temp_dir())
    assert ray._private.utils.binary_to_hex(ray._private.utils.hex_to_binary("00ff")) == "00ff"
    pages = int(Path("/proc/self/statm").read_text().split()[1])  # of this process
    used, total = ray._private.utils.get_used_memory(), ray._private.utils.get_system_memory()
    assert pages * os.sysconf("SC_PAGE_SIZE") < used < total
    assert 0 < ray._private.utils.estimate_available_memory() < total


@row("ray._private.ray_option_utils", missing="Ray 2.60 does not have it either")
@row("ray._private.log_monitor", missing="raylets pass on what workers print")
@row(
    "ray.tune, train, data, serve, rllib",
    missing="they are lent from Ray's wheel (see above); without it only what packages import at their start is there",
)
@pytest.mark.parametrize(
    "name",
    [
        "ray.tune", "ray.train.torch", "ray.serve", "ray.rllib", "ray.dag.collective_node", "ray.experimental.channel",
        "ray._private.log_monitor", "ray._private.ray_option_utils", "ray.nonsense", "ray.util.nonsense",
    ],
)  # fmt: skip
def test_missing_modules_of_ray_raise_an_error_with_their_name(as_ray: Any, name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"hpcray does not have {name}") as caught:
        importlib.import_module(name)
    assert caught.value.name == name
    parent, _, last = name.rpartition(".")
    assert not hasattr(importlib.import_module(parent), last)
    with pytest.raises(ImportError, match=f"hpcray does not have {name}"):
        exec(f"from {parent} import {last}")
    with pytest.raises(ImportError, match=last):
        exec(f"from {parent} import {last}")


@row("ray._private.accelerators")
def test_the_accelerator_managers_describe_the_gpus_of_the_node(as_ray: Any) -> None:
    from ray._private.accelerators import get_accelerator_manager_for_resource, get_all_accelerator_resource_names

    manager = get_accelerator_manager_for_resource("GPU")
    assert manager.get_resource_name() == "GPU"
    assert manager.get_visible_accelerator_ids_env_var() == "CUDA_VISIBLE_DEVICES"
    assert get_accelerator_manager_for_resource("bananas") is None
    assert {"GPU", "TPU"} <= get_all_accelerator_resource_names()


@row("ray._private.runtime_env.constants, packaging, nsight", differs="packaging and nsight are not there")
def test_the_runtime_env_constants_have_the_values_of_ray(as_ray: Any) -> None:
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    assert RAY_JOB_CONFIG_JSON_ENV_VAR == "RAY_JOB_CONFIG_JSON_ENV_VAR"

    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.runtime_env.plugin import RuntimeEnvPlugin
    from ray._private.runtime_env.validation import parse_and_validate_pip

    assert RuntimeEnvContext.deserialize(RuntimeEnvContext(env_vars={"A": "b"}).serialize()).env_vars == {"A": "b"}
    assert RuntimeEnvPlugin.priority == 10
    assert parse_and_validate_pip(["a", "a"]) == {"packages": ["a"], "pip_check": False}


@row("ray._private.client_mode_hook")
def test_the_client_mode_hooks_have_no_effect(as_ray: Any) -> None:
    from ray._private.client_mode_hook import client_mode_hook, client_mode_should_convert, disable_client_hook

    with disable_client_hook():
        assert client_mode_should_convert() is False
    assert client_mode_hook(script) is script


@row("ray._raylet")
def test_ids_convert_as_in_ray(ray: Any) -> None:
    from ray._raylet import RAY_NODE_ID_KEY, ActorID, NodeID, PlacementGroupID

    here = ray.get_runtime_context().get_node_id()
    node = NodeID.from_hex(here)
    assert (node.hex(), node.is_nil(), NodeID.nil().is_nil()) == (here, False, True)
    assert pickle.loads(pickle.dumps(node)) == node
    assert ray.NodeID is NodeID
    assert RAY_NODE_ID_KEY == "ray.io/node-id"
    assert ActorID.from_random() != ActorID.from_random()
    assert ray.JobID.from_int(3).int() == 3
    group = ray.util.placement_group([{"CPU": 1}])
    assert isinstance(group.id, PlacementGroupID)
    ray.util.remove_placement_group(group)


@row("ray.actor._modify_class")
def test_modify_class_makes_a_subclass_of_the_same_name(ray: Any) -> None:
    class Plain:
        def get(self) -> int:
            return 1

    changed = ray.actor._modify_class(Plain)
    changed.other = lambda self: 2
    assert not hasattr(Plain, "other")
    assert ray.get(ray.remote(changed).options(num_cpus=0).remote().other.remote()) == 2
    made = ray.actor._make_actor(Plain, {"num_cpus": 0, "name": "table.made"}).remote()
    assert ray.get([made.get.remote(), ray.get_actor("table.made").get.remote()]) == [1, 1]
    with pytest.raises(ValueError, match="nonsense"):
        ray.actor._make_actor(Plain, {"nonsense": 1})


@row("ray.remote_function.RemoteFunction")
def test_remote_functions_have_the_private_names_of_ray(ray: Any) -> None:
    function = ray.remote(lambda: 1)
    assert isinstance(function, ray.remote_function.RemoteFunction)
    assert function._function() == 1


@row("ray.dashboard.utils", differs="the address of the job API is a session directory; no server listens for it")
def test_the_dashboard_utils_find_the_cluster_and_no_server(ray: Any) -> None:
    from ray.dashboard.utils import get_address_for_submission_client

    assert get_address_for_submission_client(None) == ray.get_runtime_context().gcs_address
    with pytest.raises(ConnectionError, match="no HTTP server"):
        get_address_for_submission_client("http://elsewhere.example:8265")


# -------------------------------------------------------------------- import ray


def test_names_of_ray_are_the_objects_of_hpcray(as_ray: Any) -> None:
    import hpcray

    for name in ("get", "put", "wait", "remote", "ObjectRef", "init"):
        assert getattr(as_ray, name) is getattr(hpcray, name)
    assert as_ray.util.queue.Queue is hpcray.util.queue.Queue
    assert as_ray.exceptions.GetTimeoutError is hpcray.exceptions.GetTimeoutError
    assert as_ray is not hpcray
    assert hpcray.__version__ != as_ray.__version__


@pytest.mark.parametrize("module", [module for module, sources in MODULES.items() if sources])
def test_every_source_that_the_table_names_for_a_module_of_ray_exists(module: str) -> None:
    for source in MODULES[module]:
        try:
            load_source(source)
        except ImportError as error:  # joblib or dask is not installed
            assert not (error.name or "hpcray").startswith("hpcray"), error


def test_a_source_with_a_selection_has_only_the_selected_names() -> None:
    source = load_source("hpcray.compat.names.utils:decode get_num_cpus")
    assert source.__all__ == ["decode", "get_num_cpus"]
    assert source.decode(b"x") == "x"
    assert not hasattr(source, "get_system_memory")
    with pytest.raises(AttributeError, match="nonsense"):
        load_source("hpcray.compat.names.utils:nonsense")


def test_a_submodule_does_not_hide_the_function_of_its_name(as_ray: Any) -> None:
    import ray.util.placement_group  # noqa: F401
    from ray.util.placement_group import PlacementGroup

    assert callable(as_ray.util.placement_group)
    assert callable(PlacementGroup)
    assert as_ray.util.queue.__name__ == "ray.util.queue"


def test_workers_import_ray_and_modules_travel(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uses_ray.py").write_text(
        "import ray\nfrom ray.util.queue import Empty\n\n@ray.remote\ndef inner():\n    return ray.__version__\n\n"
        "def outer():\n    return ray.get(inner.remote())\n"
    )

    @ray.remote
    def run(path: str) -> Any:
        sys.path.insert(0, path)
        import uses_ray

        return uses_ray.outer(), ray.util.__name__, ray.get_runtime_context().get_task_id() is not None

    assert ray.get(run.remote(str(tmp_path))) == ("2.60.0", "ray.util", True)


def test_a_real_ray_that_is_imported_already_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("real = True\n")
    code = "import ray\nassert ray.real\nimport hpcray.compat.ray"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )  # fmt: skip
    assert ended.returncode == 1
    assert "the real ray" in ended.stderr.splitlines()[-1]


def test_as_ray_runs_a_program_that_imports_ray_only(tmp_path: Path) -> None:
    program = """
        import importlib.metadata, sys
        import ray
        ray.init(address="auto")

        @ray.remote
        def f():
            import ray
            return ray.__version__, importlib.metadata.version("ray")

        print(*ray.get(f.remote()), *sys.argv[1:])
        """
    out = script(program, tmp_path, "-m", "hpcray", "--num-cpus", "1", "--as-ray")
    assert out.split() == ["2.60.0", "2.60.0+hpcray"]


def test_the_package_contains_no_file_of_ray() -> None:
    import hpcray

    for file in Path(hpcray.__file__).parent.joinpath("compat").rglob("*.py"):
        assert "Copyright" not in file.read_text()
        assert "ray-project" not in file.read_text()


@row("ray._private.auto_init_hook")
def test_a_wrapped_function_needs_a_session(ray: Any) -> None:
    from ray._private.auto_init_hook import wrap_auto_init

    assert wrap_auto_init(ray.is_initialized)()


@row(
    "ray._private.dict, inspect_util, label_utils, path_utils",
    differs="Ray's own code: Ray's wheel lends it (docs/how-to/ray-libraries.md), and an error says so without one",
)
@pytest.mark.parametrize("name", ["collections_utils", "dict", "inspect_util", "label_utils", "path_utils"])
def test_helpers_of_ray_come_from_its_wheel(ray: Any, name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"{name}: it is Ray's own code.*hint: .*libraries install"):
        __import__(f"ray._private.{name}")


@row("ray._private.state")
def test_a_program_says_what_its_cluster_may_grow_to(ray: Any) -> None:
    from ray._private.state import state
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import ClusterConfig, NodeGroupConfig

    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    assert state.get_cluster_config() is None and state.get_max_resources_from_cluster_config() is None
    config = ClusterConfig(max_resources={"CPU": 60})
    small = NodeGroupConfig(name="small", resources={"CPU": 8, "GPU": 0}, max_count=4)
    config.node_group_configs.append(small)
    config.node_group_configs.append(NodeGroupConfig(name="large", resources={"CPU": 32, "disk": 1}, max_count=1))
    client.report_cluster_config(config.SerializeToString())
    assert state.get_cluster_config() == config
    assert state.get_max_resources_from_cluster_config() == {"CPU": 60, "GPU": 0, "disk": 1}
    small.max_count = -1
    client.report_cluster_config(config.SerializeToString())
    assert state.get_max_resources_from_cluster_config() == {"CPU": sys.maxsize, "GPU": 0, "disk": 1}


@row("ray._private.state")
def test_state_lists_workers_and_jobs(ray: Any) -> None:
    from ray._private import state

    worker = ray.get(ray.remote(lambda: ray.get_runtime_context().get_worker_id()).remote())
    assert state.workers()[worker]["node_ip_address"] == ray.util.get_node_ip_address()
    (job,) = (job for job in state.jobs() if not job["IsDead"])
    assert job["JobID"] == ray.get_runtime_context().get_job_id() and job["Timestamp"] == job["StartTime"] > 0
    first, second = state.next_job_id(), state.next_job_id()
    assert first.int() + 1 == second.int() and first.hex() != job["JobID"]
