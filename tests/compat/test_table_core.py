"""The table's rows of `ray` itself, in its order. Everything is reached through `import ray`."""

# Ray sends into generators, and a range, which `yield from` would pass that on to, takes nothing.
# ruff: noqa: UP028

from __future__ import annotations

import asyncio
import copy
import importlib
import importlib.metadata
import importlib.util
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from .rows import row

ROOT = Path(__file__).resolve().parents[2]


def script(text: str, path: Path, *options: str, timeout: float = 90) -> str:
    """Run a program that says `import ray`; its output."""
    file = path / "program.py"
    if os.environ.get("HPCRAY_TEST_ENGINE") == "ray":
        text = text.replace("import hpcray.compat.ray", "")
    file.write_text(textwrap.dedent(text))
    ended = subprocess.run(
        [sys.executable, *options, str(file)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


# -------------------------------------------------------------------- ray.init … ray.is_initialized


@row("ray.init")
def test_init_twice_is_an_error_unless_it_is_ignored(ray: Any) -> None:
    with pytest.raises(RuntimeError, match="Maybe you called ray.init twice by accident"):
        ray.init()
    context = ray.init(ignore_reinit_error=True)
    assert context.address_info["node_id"] == ray.get_runtime_context().get_node_id()
    assert context["node_ip_address"] == ray.util.get_node_ip_address()
    assert context.dashboard_url == ""


@row(
    "ray.init",
    differs="an address is 'auto', 'local', a session directory, slurm:// or ssh://; H:P is a cluster's name, no port",
)
def test_init_accepts_the_keywords_of_ray(tmp_path: Path) -> None:
    out = script(
        """
        import hpcray.compat.ray
        import logging, os
        import ray
        with ray.init(num_cpus=2, num_gpus=1, resources={"a": 3}, object_store_memory=80 << 20, namespace="here",
                      include_dashboard=False, dashboard_host="0.0.0.0", dashboard_port=1234, log_to_driver=False,
                      logging_level=logging.ERROR, configure_logging=False, ignore_reinit_error=True,
                      runtime_env={"env_vars": {"WORD": "yes"}}, _temp_dir="/nowhere", _system_config={"x": 1},
                      _redis_password="", _plasma_directory=None) as context:
            total = ray.cluster_resources()
            assert (total["CPU"], total["GPU"], total["a"]) == (2, 1, 3), total
            assert total["object_store_memory"] == 80 << 20
            assert ray.get_runtime_context().namespace == "here"
            word = ray.remote(lambda: os.environ["WORD"]).remote()
            print(ray.get(word), context.address_info["session_dir"] != "")
        print(ray.is_initialized())
        """,
        tmp_path,
    )
    assert out.split() == ["yes", "True", "False"]
    with pytest.raises((ConnectionError, ValueError), match=r"no ports|ray://"):
        _fresh_init("ray://localhost:10001")
    with pytest.raises((ConnectionError, ValueError), match="no ports"):
        _fresh_init("127.0.0.1:6379")


def _fresh_init(address: str) -> None:
    from hpcray.processes.bootstrap import enter
    from hpcray.runtime.node.options import NodeOptions

    enter(address, NodeOptions())


@row("auto-init")
@row("ray.shutdown, ray.is_initialized")
def test_the_first_call_starts_a_session(tmp_path: Path) -> None:
    out = script(
        """
        import hpcray.compat.ray
        import ray

        @ray.remote
        class A:
            def f(self):
                return 1

        for first in (lambda: ray.get(A.remote().f.remote()), lambda: ray.get_gpu_ids() == [] and 1):
            assert not ray.is_initialized()
            print(first(), ray.is_initialized())
            ray.shutdown()
            ray.shutdown()
        """,
        tmp_path,
    )
    assert out.split() == ["1", "True"] * 2


# -------------------------------------------------------------------- ray.remote, .remote(), .options()


@row("ray.remote")
def test_remote_decorates_functions_generators_and_classes(ray: Any) -> None:
    @ray.remote
    def plain(x: int, y: int = 2, *rest: int, **named: int) -> tuple[Any, ...]:
        return x, y, rest, named

    @ray.remote(num_cpus=0.5, num_returns=2)
    def pair() -> tuple[int, int]:
        return 1, 2

    @ray.remote
    def three() -> Any:
        for index in range(3):
            yield index

    class Base:
        def hello(self) -> str:
            return f"hello from {type(self).__name__}"

    @ray.remote
    class Derived(Base):
        word = "class attribute"

        async def wait(self, x: int) -> int:
            await asyncio.sleep(0)
            return x + 1

        @staticmethod
        def static(x: int) -> int:
            return 2 * x

        @classmethod
        def named(cls) -> str:
            return cls.__name__

    assert ray.get(plain.remote(1, 3, 4, z=5)) == (1, 3, (4,), {"z": 5})
    assert ray.get(pair.remote()) == [1, 2]
    assert [ray.get(ref) for ref in three.remote()] == [0, 1, 2]
    actor = Derived.remote()
    assert ray.get([actor.hello.remote(), actor.wait.remote(1), actor.static.remote(4), actor.named.remote()]) == [
        "hello from Derived", 2, 8, "Derived",
    ]  # fmt: skip
    assert Derived.word == "class attribute"
    for call in (plain, Derived):
        with pytest.raises(TypeError, match="cannot be"):
            call()
    with pytest.raises((TypeError, AssertionError), match="must be applied"):
        ray.remote(1)


@row("ray.remote")
def test_async_functions_are_refused(ray: Any) -> None:
    with pytest.raises(ValueError, match="'async def' should not be used for remote tasks"):

        @ray.remote
        async def coroutine() -> None: ...


@row(".remote(), .options().remote()")
def test_remote_calls_take_arguments_and_options(ray: Any) -> None:
    @ray.remote
    def total(first: int, second: list[Any], third: int = 0) -> tuple[int, bool]:
        return first + third + sum(ray.get(second)), isinstance(second[0], ray.ObjectRef)

    two = ray.put(2)
    assert ray.get(total.remote(two, [two, two], third=two)) == (8, True), "refs inside of lists stay refs"
    named = total.options(num_cpus=2, name="sum", max_retries=0)
    assert ray.get(named.remote(1, [two])) == (3, True)
    with pytest.raises(TypeError, match="missing a required argument|required"):
        total.remote()
    with pytest.raises(ValueError, match="Invalid option keyword nonsense for remote functions"):
        total.options(nonsense=1)


# -------------------------------------------------------------------- get, put, wait


@row("ray.get")
def test_get_returns_values_and_refuses_what_is_no_ref(ray: Any) -> None:
    @ray.remote(num_cpus=0)
    class Slow:
        async def sleep(self) -> None:
            await asyncio.sleep(600)

    refs = [ray.put(index) for index in range(3)]
    assert ray.get(refs) == [0, 1, 2]
    assert ray.get(refs[1]) == 1
    assert ray.get([]) == []
    slow = Slow.remote()
    with pytest.raises(ray.exceptions.GetTimeoutError) as caught:
        ray.get(slow.sleep.remote(), timeout=0.05)
    assert isinstance(caught.value, TimeoutError)
    with pytest.raises((ValueError, TypeError)):
        ray.get(1)


@row("ray.put")
def test_put_stores_read_only_values_from_any_thread(ray: Any) -> None:
    import numpy as np

    big = np.arange(100_000)
    seen = ray.get(ray.put(big))
    assert (seen == big).all()
    assert not seen.flags.writeable, "views of the store are read-only"
    with pytest.raises(TypeError, match="ObjectRef"):
        ray.put(ray.put(1))
    refs: list[Any] = []
    threads = [threading.Thread(target=lambda: refs.extend(ray.put(i) for i in range(50))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ray.get(refs)) == sorted(list(range(50)) * 4)


@row("ray.wait")
def test_wait_returns_ready_and_unready_refs(ray: Any) -> None:
    @ray.remote(num_cpus=0)
    class Gate:
        def __init__(self) -> None:
            self.open = asyncio.Event()

        async def wait(self) -> str:
            await self.open.wait()
            return "open"

        async def go(self) -> None:
            self.open.set()

    gate = Gate.remote()
    ready, closed = ray.put(1), gate.wait.remote()
    assert ray.wait([closed, ready]) == ([ready], [closed])
    assert ray.wait([closed], timeout=0) == ([], [closed])
    gate.go.remote()
    assert ray.wait([closed, ready], num_returns=2, fetch_local=False) == ([closed, ready], [])
    for wrong, error in (([ready, ready], ValueError), (ready, TypeError)):
        with pytest.raises(error):
            ray.wait(wrong)
    with pytest.raises(ValueError, match="num_returns cannot be greater"):
        ray.wait([ready], num_returns=2)


# -------------------------------------------------------------------- kill, cancel, get_actor, method


@row("ray.kill")
def test_kill_ends_an_actor_and_refuses_refs(ray: Any, until: Any) -> None:
    @ray.remote(num_cpus=0)
    class A:
        def ok(self) -> int:
            return 1

    actor = A.remote()
    assert ray.get(actor.ok.remote()) == 1
    ray.kill(actor)

    def killed() -> bool:
        try:
            return ray.get(actor.ok.remote()) is None
        except ray.exceptions.RayActorError as error:
            return isinstance(error, ray.exceptions.ActorDiedError)

    until(killed)
    with pytest.raises(ValueError, match=r"ray.kill\(\) only supported for actors"):
        ray.kill(ray.put(1))


@row("ray.cancel")
def test_cancel_ends_queued_and_running_tasks(ray: Any) -> None:
    @ray.remote(num_cpus=4)
    def sleep() -> None:
        import time

        time.sleep(600)

    running, queued = sleep.remote(), sleep.remote()
    for ref in (queued, running):
        ray.cancel(ref)
        with pytest.raises(ray.exceptions.TaskCancelledError):
            ray.get(ref)
    forced = sleep.remote()
    ray.cancel(forced, force=True)
    with pytest.raises((ray.exceptions.TaskCancelledError, ray.exceptions.WorkerCrashedError)):
        ray.get(forced)


@row("ray.get_actor")
def test_get_actor_finds_actors_by_name_and_namespace(ray: Any) -> None:
    @ray.remote(num_cpus=0)
    class Named:
        def who(self) -> str:
            return "me"

    actor = Named.options(name="table.named").remote()
    assert ray.get(ray.get_actor("table.named").who.remote()) == "me"
    assert ray.get_actor("table.named") == actor
    with pytest.raises(ValueError, match="Failed to look up actor with name 'table.nobody'"):
        ray.get_actor("table.nobody")
    with pytest.raises(ValueError, match="Failed to look up actor"):
        ray.get_actor("table.named", namespace="elsewhere")


@row("ray.method")
def test_method_sets_the_options_of_actor_methods(ray: Any) -> None:
    @ray.remote(num_cpus=0, concurrency_groups={"io": 1})
    class Actor:
        tries = 0

        @ray.method(num_returns=2)
        def pair(self) -> tuple[int, int]:
            return 1, 2

        @ray.method(concurrency_group="io")
        def group(self) -> str:
            return threading.current_thread().name

        def thread(self) -> str:
            return threading.current_thread().name

        @ray.method(max_task_retries=3, retry_exceptions=[ZeroDivisionError])
        def third_time(self) -> int:
            self.tries += 1
            return self.tries if self.tries > 2 else 1 // 0

        @ray.method(enable_task_events=False)
        def quiet(self) -> int:
            return 1

        @ray.method(_generator_backpressure_num_objects=1)
        def numbers(self) -> Any:
            for index in range(3):
                yield index

    actor = Actor.remote()
    assert ray.get(actor.pair.remote()) == [1, 2]
    assert ray.get(actor.group.remote()) != ray.get(actor.thread.remote())
    assert ray.get(actor.third_time.remote()) == 3
    assert ray.get(actor.quiet.remote()) == 1
    assert [ray.get(ref) for ref in actor.numbers.remote()] == [0, 1, 2]
    with pytest.raises((ValueError, AssertionError), match="keyword"):
        ray.method(nonsense=1)


# -------------------------------------------------------------------- nodes, resources, context


@row("ray.nodes")
def test_nodes_lists_the_node_with_its_resources(ray: Any) -> None:
    (node,) = ray.nodes()
    address = ray.util.get_node_ip_address()
    assert node["Alive"] is True
    assert node["NodeID"] == ray.get_runtime_context().get_node_id()
    assert node["NodeManagerAddress"] == node["NodeName"] == address
    assert node["Resources"]["CPU"] == 4
    assert node["Resources"][f"node:{address}"] == 1


@row("ray.cluster_resources, ray.available_resources")
def test_cluster_and_available_resources_are_counted(ray: Any, until: Any) -> None:
    total = ray.cluster_resources()
    assert (total["CPU"], total["GPU"], total["disk"], total["node:__internal_head__"]) == (4, 2, 2, 1)
    assert total["memory"] > 0
    assert total["object_store_memory"] > 0

    @ray.remote(num_cpus=1, num_gpus=1, resources={"disk": 2})
    class Holder:
        def ok(self) -> int:
            return 1

    holder = Holder.remote()
    ray.get(holder.ok.remote())
    until(lambda: ray.available_resources().get("GPU") == 1 and "disk" not in ray.available_resources())
    ray.kill(holder)
    until(lambda: ray.available_resources().get("GPU") == 2 and ray.available_resources()["disk"] == 2)


@row("ray.get_gpu_ids")
def test_get_gpu_ids_returns_the_visible_device_of_a_task(ray: Any) -> None:
    @ray.remote(num_gpus=1)
    def mine() -> tuple[list[Any], str]:
        return ray.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"]

    assert ray.get_gpu_ids() == []
    (ident,), visible = ray.get(mine.remote())
    assert ident in (0, 1)
    assert visible == str(ident)


@row("ray.get_runtime_context")
def test_the_runtime_context_names_node_task_and_actor(ray: Any) -> None:
    @ray.remote(num_cpus=1, name="the task")
    def task() -> dict[str, Any]:
        here = ray.get_runtime_context()
        return {
            "node": here.get_node_id(), "job": here.get_job_id(), "task": here.get_task_id(),
            "name": here.get_task_name(), "worker": here.get_worker_id(), "actor": here.get_actor_id(),
            "holds": here.get_assigned_resources(), "gpus": here.get_accelerator_ids()["GPU"],
            "group": here.get_placement_group_id(), "space": here.namespace, "canceled": here.is_canceled(),
            "captures": here.should_capture_child_tasks_in_placement_group, "env": here.runtime_env,
        }  # fmt: skip

    @ray.remote(num_cpus=0)
    class Actor:
        def me(self) -> tuple[Any, ...]:
            here = ray.get_runtime_context()
            return here.get_actor_id(), here.get_actor_name(), here.was_current_actor_reconstructed, here.current_actor

    driver = ray.get_runtime_context()
    found = ray.get(task.options(name="the task").remote())
    assert (found["node"], found["job"], found["space"]) == (driver.get_node_id(), driver.get_job_id(), "table")
    assert found["name"] == "the task"
    assert found["worker"] != driver.get_worker_id()
    assert len(bytes.fromhex(found["task"])) > 0
    assert found["holds"] == {"CPU": 1}
    assert (found["actor"], found["group"], found["gpus"], found["canceled"], found["captures"]) == (
        None, None, [], False, False,
    )  # fmt: skip
    actor = Actor.options(name="table.context").remote()
    ident, name, restarted, handle = ray.get(actor.me.remote())
    assert (ident, name, restarted) == (actor._actor_id.hex(), "table.context", False)
    assert handle == actor
    assert driver.get_task_id() is None
    assert driver.get_node_labels()["ray.io/node-id"] == driver.get_node_id()
    assert driver.gcs_address


# -------------------------------------------------------------------- refs, generators, actors


@row("ray.ObjectRef, ray.ObjectID")
def test_object_refs_have_the_methods_of_ray(ray: Any) -> None:
    ref = ray.put(5)
    assert isinstance(ref, ray.ObjectRef)
    assert ray.ObjectID is ray.ObjectRef
    assert ray.ObjectRef(ref.binary()) == ref
    assert hash(ray.ObjectRef(bytes.fromhex(ref.hex()))) == hash(ref)
    assert not ref.is_nil()
    assert ray.ObjectRef.nil().is_nil()
    assert ref.future().result(30) == 5
    assert ray.ObjectRef[int] is not None

    async def ask() -> tuple[Any, ...]:
        both = await asyncio.gather(ref, asyncio.wrap_future(ref.future()))
        return await ref, *both

    assert asyncio.run(ask()) == (5, 5, 5)
    done = threading.Event()
    ref._on_completed(lambda value: done.set() if value == 5 else None)
    assert done.wait(30)

    @ray.remote
    def value_of(blob: bytes) -> int:
        return ray.get(pickle.loads(blob))

    assert ray.get(value_of.remote(pickle.dumps(ref))) == 5, "pickled by somebody else's pickler"


@row("ray.ObjectRefGenerator, DynamicObjectRefGenerator")
def test_generators_of_tasks_and_actors_yield_refs(ray: Any) -> None:
    @ray.remote
    def count(n: int) -> Any:
        for index in range(n):
            yield index

    @ray.remote(num_cpus=0)
    class Actor:
        async def count(self, n: int) -> Any:
            for index in range(n):
                yield index

    stream = count.remote(3)
    assert isinstance(stream, ray.ObjectRefGenerator)
    assert [ray.get(ref) for ref in stream] == [0, 1, 2]
    assert ray.get(stream.completed()) is None
    dynamic = ray.get(count.options(num_returns="dynamic").remote(3))
    assert isinstance(dynamic, ray.DynamicObjectRefGenerator)
    assert ray.get(list(dynamic)) == [0, 1, 2]
    actor = Actor.remote()

    async def ask() -> list[int]:
        return [await ref async for ref in actor.count.options(num_returns="streaming").remote(3)]

    assert asyncio.run(ask()) == [0, 1, 2]
    waiting = count.remote(1)
    assert ray.wait([waiting], timeout=30) == ([waiting], [])


@row("ray.actor: ActorHandle, ActorClass, ActorMethod, exit_actor")
def test_actor_classes_handles_and_methods_have_the_names_of_ray(ray: Any, until: Any) -> None:
    class Plain:
        """Of the user."""

        limit = 3

        def get(self) -> int:
            return self.limit

        def leave(self) -> None:
            ray.actor.exit_actor()

    Made = ray.remote(Plain)
    assert type(Made).__name__ == "ActorClass(Plain)"
    assert isinstance(Made, ray.actor.ActorClass)
    assert Made.__ray_actor_class__ is Plain
    assert Made.limit == 3
    assert {"limit", "get", "remote", "options"} <= set(dir(Made))
    actor = Made.options(num_cpus=0).remote()
    assert isinstance(actor, ray.actor.ActorHandle)
    assert isinstance(actor.get, ray.actor.ActorMethod)
    assert isinstance(actor._actor_id, ray.ActorID)
    assert actor._ray_actor_id == actor._actor_id
    until(lambda: actor._actor_id.hex() in ray._private.state.actors())
    assert ray.get(actor.__ray_ready__.remote()) in (True, None)
    assert ray.get(actor.__ray_call__.remote(lambda self, x: self.limit + x, 1)) == 4
    assert copy.deepcopy({"a": actor})["a"] == actor
    with pytest.raises(AttributeError, match="nothing"):
        actor.nothing.remote()
    with pytest.raises(TypeError, match="exit_actor .*called on a non-actor worker"):
        ray.actor.exit_actor()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.leave.remote())
    other = Made.options(num_cpus=0).remote()
    ray.get(other.__ray_ready__.remote())
    other.__ray_terminate__.remote()

    def dead() -> bool:
        try:
            ray.get(other.get.remote(), timeout=10)
        except ray.exceptions.RayActorError:
            return True
        return False

    until(dead)


@row("ray.actor: ActorHandle, ActorClass, ActorMethod, exit_actor")
def test_a_class_made_at_run_time_travels_by_value(ray: Any) -> None:
    def build(word: str) -> type:
        return type(f"Made{word}", (), {"word": word, "say": lambda self, end="": self.word + end})

    actor = ray.remote(build("Hi")).options(num_cpus=0).remote()
    assert ray.get(actor.say.remote(end="!")) == "Hi!"


# -------------------------------------------------------------------- exceptions, cloudpickle, timeline, version


@row("ray.exceptions")
def test_errors_of_tasks_have_the_classes_of_ray(ray: Any) -> None:
    class Own(Exception):
        def __init__(self, code: int) -> None:
            super().__init__(f"code {code}")
            self.code = code

    @ray.remote(max_retries=0)
    def fail(how: str) -> None:
        if how == "own":
            raise Own(7)
        os._exit(3)

    with pytest.raises(Own) as caught:
        ray.get(fail.remote("own"))
    error = caught.value
    assert isinstance(error, ray.exceptions.RayTaskError)
    assert isinstance(error, ray.exceptions.RayError)
    assert (error.code, type(error.cause), error.cause.code) == (7, Own, 7)
    assert "in fail" in str(error)
    assert isinstance(error.as_instanceof_cause(), Own)
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(fail.remote("exit"))
    for name in (
        "ActorDiedError", "ActorUnavailableError", "NodeDiedError", "OutOfMemoryError", "OwnerDiedError",
        "ObjectLostError", "ObjectStoreFullError", "RuntimeEnvSetupError", "TaskUnschedulableError",
        "ObjectFreedError", "LocalRayletDiedError", "PendingCallsLimitExceeded", "RaySystemError",
    ):  # fmt: skip
        assert issubclass(getattr(ray.exceptions, name), ray.exceptions.RayError), name
    assert issubclass(ray.exceptions.ActorDiedError, ray.exceptions.RayActorError)


@row("ray.cloudpickle")
def test_cloudpickle_registers_modules_that_are_pickled_by_value(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def word():\n    return 'by value'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    only_here = importlib.import_module("only_here")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    task = ray.remote(lambda call: call())
    ray.cloudpickle.register_pickle_by_value(only_here)
    try:
        assert ray.get(task.remote(only_here.word)) == "by value"
    finally:
        ray.cloudpickle.unregister_pickle_by_value(only_here)
    assert ray.cloudpickle.loads(ray.cloudpickle.dumps(lambda x: x + 1))(1) == 2


@row("ray.timeline")
def test_timeline_has_the_events_of_tasks(ray: Any, tmp_path: Path) -> None:
    if not hasattr(ray, "timeline"):
        pytest.xfail("hpcray does not have ray.timeline")
    import json

    ray.get(ray.remote(lambda: 1).options(name="traced").remote())
    file = tmp_path / "trace.json"
    ray.timeline(str(file))
    rows = json.loads(file.read_text())
    assert isinstance(rows, list)
    assert all({"ph", "pid"} <= row.keys() for row in rows)


@row("ray.__version__, metadata version", differs='metadata says "2.60.0+hpcray", which satisfies ray>=2.10')
def test_version_and_metadata_are_those_of_ray(as_ray: Any) -> None:
    assert [int(part) for part in as_ray.__version__.split(".")] == [2, 60, 0]
    assert importlib.metadata.version("ray").startswith(as_ray.__version__)
    assert importlib.util.find_spec("ray") is not None
    assert importlib.util.find_spec("ray.util.queue") is not None
    assert importlib.util.find_spec("ray.tune") is None


@row("ray.runtime_env.RuntimeEnv")
def test_a_runtime_env_object_is_accepted_as_an_option(ray: Any) -> None:
    try:
        from ray.runtime_env import RuntimeEnv
    except ImportError as error:
        pytest.xfail(str(error))
    env = RuntimeEnv(env_vars={"TABLE_WORD": "set"})
    assert env["env_vars"] == {"TABLE_WORD": "set"}
    assert ray.get(ray.remote(lambda: os.environ["TABLE_WORD"]).options(runtime_env=env).remote()) == "set"


@row("ray.job_submission", differs="the address is a session directory; a URL stands for the only cluster on this host")
def test_a_job_is_submitted_and_followed(ray: Any) -> None:
    import asyncio

    from ray.job_submission import JobStatus, JobSubmissionClient

    client = JobSubmissionClient(ray.get_runtime_context().gcs_address)
    job = client.submit_job(entrypoint="echo word", metadata={"k": "v"})

    async def follow() -> str:
        return "".join([piece async for piece in client.tail_job_logs(job)])

    assert asyncio.run(follow()).endswith(f"Running entrypoint for job {job}: echo word\nword\n")
    assert client.get_job_status(job) is JobStatus.SUCCEEDED
    assert client.get_job_info(job).metadata == {"k": "v"}
    assert client.delete_job(job)
    with pytest.raises(RuntimeError, match="does not exist"):
        client.get_job_status(job)


@row(
    "ray.util.client, ray://",
    missing="a program outside of the job attaches by slurm:// or ssh://, without a port (docs/how-to/attach.md)",
)
def test_ray_client_is_never_connected(as_ray: Any) -> None:
    from ray.util.client import ray as client

    assert client.is_connected() is False
    with pytest.raises(ConnectionError):
        client.get(1)


@row("ray.LoggingConfig, ray.logger")
def test_a_logging_config_refuses_unknown_encodings(as_ray: Any) -> None:
    assert as_ray.logger.name == "ray"
    if not hasattr(as_ray, "LoggingConfig"):
        pytest.xfail("hpcray does not have ray.LoggingConfig")
    assert as_ray.LoggingConfig(encoding="TEXT", log_level="INFO").log_level == "INFO"
    with pytest.raises(ValueError, match="encoding"):
        as_ray.LoggingConfig(encoding="nonsense")
