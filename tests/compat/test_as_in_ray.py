"""What a run of the same programs on Ray 2.60 and here has found different once: errors, when they come, what they say.

These tests pass on the real Ray too (`HPCRAY_TEST_ENGINE=ray`), but for those that say what hpcray does instead.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .rows import row
from .test_table_core import script

OURS = os.environ.get("HPCRAY_TEST_ENGINE") != "ray"
ours_only = pytest.mark.skipif(not OURS, reason="Ray does not promise that, or does otherwise")


@row("num_cpus, num_gpus")
@row("scheduling_strategy")
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_gpus": 1.5}, "whole numbers. The specified quantity 1.5"),
        ({"scheduling_strategy": "ANYWHERE"}, "Invalid scheduling_strategy value ANYWHERE"),
    ],
)
def test_some_options_are_refused_when_work_is_submitted(ray: Any, options: dict[str, Any], match: str) -> None:
    class Actor:
        pass

    function = ray.remote(**options)(lambda: 1)
    actor = ray.remote(Actor).options(**options)
    with pytest.raises(ValueError, match=match):
        function.remote()
    with pytest.raises(ValueError, match=match):
        actor.remote()
    assert ray.get(ray.remote(num_cpus=True)(lambda: 1).remote(), timeout=60) == 1, "a bool is a number, in Ray too"


@row("ray.remote")
@row("ray.method")
def test_decorators_refuse_invalid_targets_and_options(ray: Any) -> None:
    class Actor:
        pass

    for wrong in (1, None, "x"):
        with pytest.raises(AssertionError, match=r"The @ray.remote decorator must be applied"):
            ray.remote(wrong)
    with pytest.raises(AssertionError, match=r"Unexpected keyword argument to @ray.method: 'nonsense'"):
        ray.method(nonsense=1)
    for remote in (ray.remote(Actor), ray.remote(lambda: 1)):
        with pytest.raises(TypeError, match="must be applied to either a function or a class"):
            ray.remote(remote)
    with pytest.raises(
        ValueError, match="only accepts None, 0, -1 or a positive integer, where -1 represents infinity"
    ):
        ray.remote(max_retries=-2)(lambda: 1)
    with pytest.raises(TypeError, match="placement_group"):
        ray.remote(placement_group=1)(lambda: 1)


@row("ray.actor: ActorHandle, ActorClass, ActorMethod, exit_actor")
def test_inheriting_from_an_actor_class_raises_rays_exception_class(ray: Any) -> None:
    actor_class = ray.remote(type("Base", (), {}))
    with pytest.raises(
        ray.actor.ActorClassInheritanceException, match=r"'?Base'?.*Inheriting from actor classes is not"
    ):

        class Derived(actor_class):  # type: ignore[misc]
            pass

    assert issubclass(ray.actor.ActorClassInheritanceException, TypeError)
    assert type(actor_class).__module__ == actor_class.__ray_actor_class__.__module__


@row("ray.actor: ActorHandle, ActorClass, ActorMethod, exit_actor")
def test_handles_have_the_private_names_of_ray(ray: Any) -> None:
    class Actor:
        @ray.method(num_returns=2)
        def two(self) -> tuple[int, int]:
            return 1, 2

    actor = ray.remote(num_cpus=0)(Actor).remote()
    assert (actor.two._method_name, actor.two._num_returns) == ("two", 2)
    assert actor._ray_actor_creation_function_descriptor.class_name.endswith("Actor")
    assert not actor._ray_is_cross_language


@row("compiled graphs, .bind()", differs="no GPU channels: tensors go through shared memory")
def test_graphs_are_executed_and_compiled(ray: Any) -> None:
    from ray.dag import InputNode, MultiOutputNode

    actor = ray.remote(num_cpus=0)(type("Actor", (), {"f": lambda self, x: x + 1})).remote()
    function = ray.remote(lambda x, y: x * y)
    with InputNode() as inp:
        dag = MultiOutputNode([function.bind(actor.f.bind(inp[0]), inp.y), actor.f.bind(inp[0])])
    with pytest.warns(DeprecationWarning):
        assert ray.get(dag.execute(2, y=5)) == [15, 3]
    with pytest.raises(NotImplementedError, match="only support actor method nodes"):
        dag.experimental_compile()
    with InputNode() as inp:
        graph = actor.f.bind(actor.f.bind(inp)).experimental_compile()
    assert ray.get([graph.execute(1), graph.execute(2)]) == [3, 4]
    graph.teardown()
    with pytest.raises(ray.exceptions.RayChannelError):
        graph.execute(1)


@row("num_returns")
def test_generators_with_a_fixed_number_of_returns(ray: Any) -> None:
    def numbers(count: int, fails: bool) -> Iterator[Any]:
        for index in range(count):
            yield [index] * 100_000 if index == 0 else index
        if fails:
            raise KeyError("after them")

    function = ray.remote(numbers)
    first, second, third, fourth = function.options(num_returns=4).remote(2, True)
    assert len(ray.get(first, timeout=60)) == 100_000
    assert ray.get(second, timeout=60) == 1
    for ref in (third, fourth):
        with pytest.raises(KeyError, match="after them"):
            ray.get(ref, timeout=60)
    for too_many in (function.options(num_returns=2).remote(3, False), function.options(num_returns=2).remote(2, True)):
        assert ray.get(too_many[1], timeout=60) == 1, "what comes after the last value that is wanted is dropped"
    few = function.options(num_returns=2).remote(1, False)
    with pytest.raises(ValueError, match="Task returned 1 objects, but num_returns=2"):
        ray.get(few[1], timeout=60)


@ours_only
@row("max_retries, retry_exceptions")
def test_a_generator_that_fails_and_runs_again_sends_what_the_last_run_made(ray: Any, tmp_path: Path) -> None:
    log = tmp_path / "runs"

    def twice() -> Iterator[Any]:
        with log.open("a") as file:
            file.write("run\n")
        runs = len(log.read_text().split())
        yield [ray.put(runs), bytes(500_000)]
        if runs < 3:
            raise ValueError("again")
        yield runs

    refs = ray.remote(num_returns=2, max_retries=5, retry_exceptions=[ValueError])(twice).remote()
    (inner, large), last = ray.get(list(refs), timeout=60)
    assert (ray.get(inner), len(large), last) == (3, 500_000, 3)


@row("ray.cancel")
def test_the_value_of_a_cancelled_call_is_dropped(ray: Any, until: Callable[..., Any]) -> None:
    class Actor:
        def __init__(self) -> None:
            self.saw = False

        def work(self, path: str) -> str:
            Path(path).touch()
            deadline = time.monotonic() + 60
            while not (self.saw or time.monotonic() > deadline):
                self.saw = ray.get_runtime_context().is_canceled()
                time.sleep(0.01)
            return "a value"

        def told(self) -> bool:
            return self.saw

    actor = ray.remote(num_cpus=0)(Actor).remote()
    started = Path(os.environ.get("HPCRAY_TMPDIR", "/tmp")) / f"started-{os.getpid()}"
    call = actor.work.remote(str(started))
    until(started.exists)
    started.unlink()
    ray.cancel(call)
    with pytest.raises(ray.exceptions.TaskCancelledError):
        ray.get(call, timeout=60)
    assert ray.get(actor.told.remote(), timeout=60), "the method has seen it, and the actor lives"


@ours_only
@row("name, namespace, get_if_exists, lifetime")
def test_the_name_of_an_actor_without_handles_is_free(ray: Any) -> None:
    class Actor:
        def __init__(self, value: int) -> None:
            self.value = value

        def get(self) -> int:
            return self.value

    named = ray.remote(num_cpus=0)(Actor).options(name="as.in.ray", get_if_exists=True)
    for value in range(5):
        assert ray.get(named.remote(value).get.remote(), timeout=60) == value, "the handle is gone after each"
    holder = named.remote(7)
    with pytest.raises(ValueError, match="The name as.in.ray .*already taken.*ray.get_actor"):
        ray.remote(num_cpus=0)(Actor).options(name="as.in.ray").remote(1)
    assert ray.get(named.remote(8).get.remote(), timeout=60) == 7
    ray.kill(holder)


@row("ray.exceptions")
def test_errors_contain_the_phrases_of_ray(ray: Any, until: Callable[..., Any]) -> None:
    class Actor:
        def f(self) -> int:
            return 1

    slow = ray.remote(num_cpus=0)(time.sleep if OURS else lambda seconds: time.sleep(seconds)).remote(60)
    with pytest.raises(ray.exceptions.GetTimeoutError, match=r"^Get timed out: some object\(s\) not ready"):
        ray.get(slow, timeout=0.05)
    ray.cancel(slow, force=True)
    crashed = ray.remote(num_cpus=0, max_retries=0)(lambda: os._exit(1)).remote()
    with pytest.raises(
        ray.exceptions.WorkerCrashedError, match="^The worker died unexpectedly while executing this task"
    ):
        ray.get(crashed, timeout=60)
    actor = ray.remote(num_cpus=0)(Actor).remote()
    ray.get(actor.f.remote(), timeout=60)
    ray.kill(actor)

    def error() -> Any:  # calls that are on their way when it is killed may be answered still
        try:
            return ray.get(actor.f.remote(), timeout=60) and None
        except ray.exceptions.ActorDiedError as died:
            return died

    text = str(until(error))
    assert text.startswith("The actor died unexpectedly before finishing this task.\n\tclass_name: ")
    assert "The actor is dead because it was killed by `ray.kill`" in text
    unavailable = ray.exceptions.ActorUnavailableError("why", b"\1" * 16)
    assert str(unavailable).endswith("is unavailable: why. The task may or may not have been executed on the actor.")
    with pytest.raises(TypeError, match=r"Calling 'put' on an ray.ObjectRef is not allowed"):
        ray.put(ray.put(1))
    with pytest.raises(ValueError, match="`_owner` argument to `ray.put` has been removed"):
        ray.put(1, _owner=actor)


@row("ray.nodes")
def test_nodes_have_the_keys_of_ray(ray: Any) -> None:
    (node,) = ray.nodes()
    assert node["alive"] is node["Alive"] is True
    assert (node["DeathReason"], node["DeathReasonMessage"]) == (0, "")
    assert {"DashboardAgentListenPort", "MetricsAgentPort", "RuntimeEnvAgentPort"} <= node.keys()


@row("ray.nodes")
@row("ray.cluster_resources, ray.available_resources")
def test_queries_of_the_cluster_state_start_no_session(tmp_path: Path) -> None:
    out = script(
        """
        import hpcray.compat.ray
        import ray
        for ask in (ray.nodes, ray.cluster_resources, ray.available_resources):
            try:
                ask()
            except ray.exceptions.RaySystemError as error:
                print("Ray has not been started yet" in str(error), ray.is_initialized())
        """,
        tmp_path,
    )
    assert out.split() == ["True", "False"] * 3


@row("runtime_env")
def test_env_vars_may_refer_to_other_variables(ray: Any) -> None:
    def seen(name: str = "LIST") -> str | None:
        return os.environ.get(name)

    env = {"env_vars": {"LIST": "${HOME}:/more:${NOT_THERE_AT_ALL}", "PLAIN": "a$1b"}}
    function = ray.remote(num_cpus=0)(seen).options(runtime_env=env)
    assert ray.get(function.remote(), timeout=60) == f"{os.environ['HOME']}:/more:"
    assert ray.get(function.remote("PLAIN"), timeout=60) == "a$1b"

    def parent() -> Any:
        return ray.get(ray.remote(num_cpus=0)(seen).remote())

    assert ray.get(ray.remote(num_cpus=0)(parent).options(runtime_env=env).remote(), timeout=60).endswith(":/more:")


@row("placement_group")
@row("PlacementGroup")
def test_placement_groups_check_arguments_and_show_bundle_specs(ray: Any) -> None:
    with pytest.raises(TypeError):
        ray.util.placement_group([{"CPU": 1}], name=1)
    group = ray.util.placement_group([{"CPU": 1, "GPU": 0}, {"disk": 0.5}])
    assert group.wait(60)
    assert group.bundle_specs == [{"CPU": 1.0, "GPU": 0.0}, {"disk": 0.5}]
    ray.util.remove_placement_group(group)


@row("NodeAffinitySchedulingStrategy")
def test_a_malformed_node_id_is_refused(ray: Any) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    for wrong in ("ab", "zz" * 28, ""):
        with pytest.raises(ValueError, match="Node ID must be a valid hex string"):
            NodeAffinitySchedulingStrategy(wrong, soft=False)


@row("ray.ObjectRef, ray.ObjectID")
def test_refs_have_the_further_methods_of_ray(ray: Any) -> None:
    ref = ray.put(1)
    assert ray.ObjectRef.from_binary(ref.binary()) == ref
    assert ray.ObjectRef.from_random() != ray.ObjectRef.from_random()
    assert (ref.call_site(), ref.tensor_transport()) == ("", None)


@row("ray.ObjectRefGenerator, DynamicObjectRefGenerator")
def test_generators_of_refs_refuse_what_ray_refuses(ray: Any) -> None:
    def one() -> Iterator[int]:
        yield 1

    stream = ray.remote(num_cpus=0)(one).remote()
    for name, arguments in (("send", (1,)), ("throw", (ValueError,)), ("close", ())):
        with pytest.raises(NotImplementedError, match=rf"`gen\.{name}` is not supported"):
            getattr(stream, name)(*arguments)
    assert isinstance(stream._generator_ref, ray.ObjectRef)
    assert ray.get(stream._next_sync(timeout_s=60)) == 1
    waiting = ray.remote(num_cpus=0, resources={"nowhere": 1})(one).remote()
    assert waiting._next_sync(timeout_s=0.01).is_nil()
    ray.cancel(waiting)


@row("ray.init")
def test_init_takes_a_job_config(tmp_path: Path) -> None:
    out = script(
        """
        import hpcray.compat.ray
        import os, pickle, ray, time
        from ray.job_config import JobConfig
        assert JobConfig.from_json({"ray_namespace": "there"}).ray_namespace == "there"
        config = JobConfig(runtime_env={"env_vars": {"WORD": "yes"}}, metadata={"a": "b"})
        config.set_py_logging_config(ray.LoggingConfig(encoding="TEXT"))
        packed = config._get_proto_job_config()
        assert pickle.loads(packed.serialized_py_logging_config) == config.py_logging_config
        assert dict(packed.metadata) == {"a": "b"}
        config.set_py_logging_config(None)
        config.set_ray_namespace("here")
        config.set_default_actor_lifetime("detached")

        @ray.remote
        class Child:
            def ping(self):
                return "pong"

        @ray.remote
        class Parent:
            def children(self):
                return Child.remote(), Child.options(lifetime="non_detached").remote()

        with ray.init(num_cpus=1, include_dashboard=False, job_config=config):
            print(ray.get_runtime_context().namespace, ray.get(ray.remote(lambda: os.environ["WORD"]).remote()))
            parent = Parent.remote()
            stays, goes = ray.get(parent.children.remote())
            ray.kill(parent)
            for _ in range(300):  # it may answer until its node has killed it
                try:
                    ray.get(goes.ping.remote(), timeout=30)
                    time.sleep(0.1)
                except ray.exceptions.ActorDiedError:
                    print(ray.get(stays.ping.remote(), timeout=30))
                    break
        try:
            JobConfig(default_actor_lifetime="for ever")
        except ValueError:
            print("refused")
        try:
            JobConfig.from_json({"code_search_path": "/a:/b"})
        except TypeError:
            print("refused")
        """,
        tmp_path,
    )
    assert out.split() == ["here", "yes", "pong", "refused", "refused"]


@row("util.ActorPool, ActorGroup, as_completed, map_unordered")
def test_map_unordered_limits_the_tasks_in_flight(ray: Any) -> None:
    double = ray.remote(num_cpus=0)(lambda x: 2 * x)
    assert sorted(ray.util.map_unordered(double, [1, 2, 3], backpressure_size=2)) == [2, 4, 6]


@pytest.mark.slow
@row("log_to_driver, prefixes")
def test_equal_lines_of_several_workers_are_printed_once(tmp_path: Path) -> None:
    program = """
        import hpcray.compat.ray
        import os, ray, sys

        @ray.remote
        class Speaker:
            def speak(self, number):
                print("step", number)
                return os.getpid()

        ray.init(num_cpus=4)
        speakers = [Speaker.remote() for _ in range(4)]
        print(len({ray.get(speaker.speak.remote(7)) for speaker in speakers}))
        """
    out = [line for line in script(program, tmp_path).splitlines() if "step" in line]
    assert len(out) == 2
    assert "repeated 3x" in "".join(out)
    os.environ["RAY_DEDUP_LOGS"] = "0"
    try:
        assert script(program, tmp_path).count("step 7") == 4
    finally:
        del os.environ["RAY_DEDUP_LOGS"]


@row("util.state, experimental.state.api")
def test_the_columns_of_states_are_those_of_ray(as_ray: Any) -> None:
    from ray.util.state import common

    wanted = {
        "ActorState": "label_selector fallback_strategy num_restarts_due_to_node_preemption repr_name",
        "TaskState": "label_selector fallback_strategy is_debugger_paused profiling_data task_log_info",
        "WorkerState": "debugger_port num_paused_threads worker_launch_time_ms exit_type",
        "PlacementGroupState": "topology_strategy topology_assignments stats bundles is_detached",
    }
    for name, columns in wanted.items():
        assert set(columns.split()) <= set(getattr(common, name).columns()), name


@row("max_restarts, max_task_retries")
@pytest.mark.parametrize("code", [3, "words"])
def test_an_actor_that_exits_with_a_code_has_crashed(ray: Any, tmp_path: Path, code: Any) -> None:
    class Actor:
        def leave(self, path: str) -> str:
            if not Path(path).exists():
                Path(path).touch()
                raise SystemExit(code)
            return "the second time"

        def leave_on_purpose(self) -> None:
            raise SystemExit(0)

        def here(self) -> bool:
            return True

    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Actor).remote()
    assert ray.get(actor.leave.remote(str(tmp_path / "left")), timeout=60) == "the second time"
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(actor.leave_on_purpose.remote(), timeout=60)
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(actor.here.remote(), timeout=60)


@row("max_restarts, max_task_retries")
@pytest.mark.parametrize("kind", ["plain", "threads", "async"])
def test_calls_that_run_at_most_once_fail_while_their_actor_restarts(ray: Any, tmp_path: Path, kind: str) -> None:
    gate = tmp_path / "gate"

    class Actor:
        def __init__(self) -> None:
            if (tmp_path / "ran").exists():
                while not gate.exists():
                    time.sleep(0.05)
            (tmp_path / "ran").touch()

        def pid(self) -> int:
            return os.getpid()

        def sleep(self) -> None:
            time.sleep(60)

    class Coroutines(Actor):
        async def pid(self) -> int:  # type: ignore[override]
            return os.getpid()

    @ray.remote(num_cpus=0)
    def elsewhere(actor: Any) -> Any:
        return error(actor.pid.remote())

    def error(ref: Any) -> Any:
        try:
            return ray.get(ref, timeout=60)
        except ray.exceptions.RayActorError as raised:
            return type(raised).__name__

    options = {"max_concurrency": 2} if kind == "threads" else {}
    made = ray.remote(num_cpus=0, max_restarts=-1, name=f"restarts-{kind}", **options)
    actor = made(Coroutines if kind == "async" else Actor).remote()
    before, running = ray.get(actor.pid.remote(), timeout=60), actor.sleep.remote()
    time.sleep(0.2)
    os.kill(before, signal.SIGKILL)
    unavailable = "ActorUnavailableError"
    assert error(running) == unavailable
    assert [error(actor.pid.remote()) for _ in range(2)] == [unavailable] * 2
    assert error(ray.get_actor(f"restarts-{kind}").pid.remote()) == unavailable
    assert ray.get(elsewhere.remote(actor), timeout=60) == unavailable
    gate.touch()
    deadline = time.monotonic() + 60
    while not isinstance(after := error(actor.pid.remote()), int):
        assert time.monotonic() < deadline and after == unavailable
    assert after != before
    ray.kill(actor)


@row("max_restarts, max_task_retries")
def test_calls_that_may_run_again_wait_while_their_actor_restarts(ray: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    class Actor:
        def __init__(self) -> None:
            if (tmp_path / "ran").exists():
                while not gate.exists():
                    time.sleep(0.05)
            (tmp_path / "ran").touch()

        def pid(self) -> int:
            return os.getpid()

    made = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=1)
    actor = made(Actor).remote()
    before = ray.get(actor.pid.remote(), timeout=60)
    os.kill(before, signal.SIGKILL)
    time.sleep(0.5)
    waiting = [actor.pid.remote(), actor.pid.options(max_task_retries=0).remote()]
    assert not ray.wait(waiting, timeout=2)[0]
    gate.touch()
    assert before not in ray.get(waiting, timeout=60)
    ray.kill(actor)


@row("ray.ObjectRef, ray.ObjectID")
@row("ray.internal.free")
def test_pickling_a_ref_outside_of_tasks_can_be_forbidden(ray: Any) -> None:
    from ray._private.internal_api import memory_summary

    def pickled() -> bytes:
        found: bytes = ray.cloudpickle.dumps(ray.put(1))
        return found

    env = {"env_vars": {"RAY_allow_out_of_band_object_ref_serialization": "0"}}
    assert ray.get(ray.remote(num_cpus=0)(pickled).remote(), timeout=60)
    with pytest.raises(ray.exceptions.OufOfBandObjectRefSerializationException):
        ray.get(ray.remote(num_cpus=0)(pickled).options(runtime_env=env).remote(), timeout=60)
    held = ray.put(bytes(1 << 20))
    assert held.hex() in memory_summary()


def test_the_logger_ray_writes_to_stderr_and_takes_level_and_format_of_init() -> None:
    program = (
        "import logging, hpcray.compat.ray, ray\n"
        "ray.init(num_cpus=1, logging_format='<%(message)s>')\n"
        "logging.getLogger('ray.data').info('of a library')\n"
        "logging.getLogger('ray').setLevel('ERROR')\n"
        "logging.getLogger('hpcray').warning('not shown')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "<Started a local Ray instance.>" in done.stderr and "<of a library>" in done.stderr, done.stderr
    assert "not shown" not in done.stderr


@row(".remote(), .options().remote()")
def test_remote_with_an_underscore_takes_arguments_and_options(ray: Any) -> None:
    class Box:
        def __init__(self, value: int) -> None:
            self.value = value

        def get(self, more: int = 0) -> Any:
            return self.value, more

    box = ray.remote(Box)._remote(args=[1], num_cpus=0)
    assert ray.get(box.get._remote(kwargs={"more": 2}, num_returns=2)) == [1, 2]
    assert ray.get(ray.remote(lambda x: x)._remote(args=[5], num_cpus=0)) == 5


@row("ray.actor: ActorHandle, ActorClass, ActorMethod, exit_actor")
def test_a_handle_knows_the_state_of_its_actor(ray: Any, until: Callable[..., Any]) -> None:
    class Box:
        def get(self) -> int:
            return 1

    box = ray.remote(num_cpus=0)(Box).remote()
    assert ray.get(box.get.remote()) == 1
    assert box._get_local_state() == 2
    ray.kill(box)
    until(lambda: box._get_local_state() == 4)


@row("ray.actor: ActorHandle, ActorClass, ActorMethod, exit_actor")
def test_a_decorator_of_the_invocation_runs_at_the_caller(ray: Any) -> None:
    def doubled(invocation: Any) -> Any:
        return lambda args, kwargs: [invocation([2 * args[0]], kwargs), args[0]]

    class Box:
        def get(self, value: int) -> int:
            return value

    Box.get.__ray_invocation_decorator__ = doubled  # type: ignore[attr-defined]
    box = ray.remote(num_cpus=0)(Box).options(name="decorated").remote()
    for handle in (box, ray.get_actor("decorated")):
        ref, given = handle.get.remote(3)
        assert (ray.get(ref), given) == (6, 3)


@row("ray.kill")
def test_kill_refuses_a_handle_of_an_earlier_session(tmp_path: Path) -> None:
    out = script(
        """
        import hpcray.compat.ray
        import ray

        @ray.remote
        class Box:
            pass

        ray.init(num_cpus=1)
        box = Box.remote()
        ray.shutdown()
        ray.init(num_cpus=1)
        try:
            ray.kill(box)
        except ray.exceptions.ActorHandleNotFoundError as error:
            print("not valid across Ray sessions" in str(error))
        ray.kill(Box.remote())
        """,
        tmp_path,
    )
    assert out.split() == ["True"]
