"""Details of Ray's Core that programs can observe, found by running the same programs on Ray 2.60 and here.

These tests pass on the real Ray too (`HPCRAY_TEST_ENGINE=ray`), but for those that say what hpcray does instead.
"""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .rows import row
from .test_as_in_ray import ours_only
from .test_table_core import ROOT, script

# ------------------------------------------------------------ before init

_BEFORE_INIT = """
import hpcray.compat.ray
import importlib
import ray

importlib.import_module("ray._private.auto_init_hook").enable_auto_connect = False

@ray.remote
def f():
    pass

@ray.remote
class A:
    pass

calls = [
    f.remote, A.remote, lambda: ray.get([]), lambda: ray.put(1), lambda: ray.wait([]), ray.get_gpu_ids, ray.nodes,
    lambda: ray.cancel(None), lambda: ray.kill(None), lambda: ray.get_actor("x"),
    lambda: ray.util.placement_group([{"CPU": 1}]),
]
for round in range(2):
    for call in calls:
        try:
            call()
        except ray.exceptions.RaySystemError as error:
            assert "Ray has not been started yet." in str(error), error
        else:
            raise AssertionError(call)
        assert not ray.is_initialized()
    if not round:
        ray.init(num_cpus=0)
        ray.shutdown()
try:
    ray.experimental.get_object_locations([])
except RuntimeError:
    print("refused")
"""


@row("auto-init")
@row("ray._private.auto_init_hook")
def test_nothing_can_be_done_before_init_where_a_program_forbids_that_it_is_called(tmp_path: Path) -> None:
    assert "refused" in script(_BEFORE_INIT, tmp_path)


# ------------------------------------------------------------ top level


@row("ray._raylet")
def test_the_functions_of_the_top_level_are_those_of_ray(ray: Any) -> None:
    functions = {name for name, _ in inspect.getmembers(ray, inspect.isfunction)}
    assert functions == {
        "__getattr__", "available_resources", "cancel", "client", "cluster_resources", "get", "get_actor",
        "get_gpu_ids", "get_runtime_context", "init", "is_initialized", "java_actor_class", "java_function", "kill",
        "method", "nodes", "put", "remote", "shutdown", "timeline", "wait",
    }  # fmt: skip
    assert {"get", "LoggingConfig", "ObjectRef"} <= set(ray.__all__)
    assert all(hasattr(ray, name) for name in ray.__all__ if name not in ("cpp_function", "data", "workflow"))
    assert ray.__getattribute__("_raylet") is sys.modules["ray._raylet"]
    with pytest.raises(AttributeError):
        ray.__getattr__("no_such_name")


@ours_only
@row("ray._raylet")
def test_functions_of_other_languages_are_refused(ray: Any) -> None:
    with pytest.raises(NotImplementedError, match="no workers in other languages"):
        ray.java_function("A", "f")
    with pytest.raises(NotImplementedError, match="no workers in other languages"):
        ray.java_actor_class("A")


# ------------------------------------------------------------ locations


@row("experimental.get_object_locations")
def test_an_object_that_was_put_lies_on_its_owners_node_and_a_small_result_on_none(ray: Any) -> None:
    node = ray.get_runtime_context().get_node_id()
    put, result = ray.put("a"), ray.remote(lambda: 1).remote()
    ray.get(result)
    found = ray.experimental.get_object_locations([put, result])
    assert found[put]["node_ids"] == [node] and found[put]["object_size"] > 0
    assert found[result]["node_ids"] == []
    inside = ray.remote(lambda refs: ray.experimental.get_object_locations(refs)[refs[0]]["node_ids"])
    assert ray.get(inside.remote([put])) == [node]


@row("experimental.get_object_locations")
def test_a_pending_object_has_no_location_and_is_not_waited_for(ray: Any) -> None:
    pending = ray.remote(lambda: time.sleep(600)).remote()
    for locate in (ray.experimental.get_object_locations, ray.experimental.get_local_object_locations):
        found = locate([pending])[pending]
        assert (found["node_ids"], found["object_size"]) == ([], None)
    ray.cancel(pending, force=True)


# ------------------------------------------------------------ actor groups


class Member:
    def __init__(self, number: int) -> None:
        self.number = number

    def add(self, more: int) -> int:
        return self.number + more


class Described(Member):
    def get_actor_metadata(self) -> str:
        return f"number {self.number}"


@row("util.ActorPool, ActorGroup, as_completed, map_unordered")
def test_an_actor_group_has_what_its_members_say_of_themselves(ray: Any) -> None:
    from ray.util.actor_group import ActorGroup

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        group = ActorGroup(Described, 2, num_cpus_per_actor=0, init_args=(3,))
    assert any("ray.util.multiprocessing" in str(each.message) for each in warned)
    assert group.actor_metadata == ["number 3", "number 3"]
    assert ray.get(group.add.remote(1)) == [4, 4]
    assert (group[1].metadata, ray.get(group[1].actor.add.remote(2))) == ("number 3", 5)
    group.shutdown(0)
    plain = ActorGroup(Member, 1, num_cpus_per_actor=0, init_args=(1,))
    assert plain.actor_metadata == [None]
    plain.shutdown(0)


# ------------------------------------------------------------ cancellation


@row("ray.cancel")
def test_a_running_task_that_is_cancelled_ends_in_a_task_error(ray: Any, until: Callable[..., Any]) -> None:
    @ray.remote(num_cpus=0)
    class Flag:
        up = False

        def set(self) -> None:
            self.up = True

        def get(self) -> bool:
            return self.up

    @ray.remote
    def runs(flag: Any) -> None:
        ray.get(flag.set.remote())
        while True:
            time.sleep(0.01)

    @ray.remote(num_returns="streaming")
    def yields(flag: Any) -> Any:
        ray.get(flag.set.remote())
        while True:
            time.sleep(0.01)
        yield

    for function in (runs, yields):
        flag = Flag.remote()
        result = function.remote(flag)
        until(lambda flag=flag: ray.get(flag.get.remote()))
        ray.cancel(result)
        with pytest.raises(ray.exceptions.TaskCancelledError) as caught:
            ray.get(result if function is runs else next(result), timeout=60)
        assert isinstance(caught.value, ray.exceptions.RayTaskError)


@row("ray.cancel")
def test_a_cancelled_task_gets_its_interrupt_though_what_it_waits_for_comes_at_once(
    ray: Any, until: Callable[..., Any]
) -> None:
    import asyncio

    @ray.remote(num_cpus=0)
    class Gate:
        def __init__(self) -> None:
            self.open, self.waiting = asyncio.Event(), 0

        async def wait(self) -> None:
            self.waiting += 1
            await self.open.wait()

        async def count(self) -> int:
            return self.waiting

        def send(self) -> None:
            self.open.set()

    @ray.remote
    def waits(gate: Any, how: str) -> tuple[str, bool]:
        try:
            ref = gate.wait.remote()
            ray.get(ref) if how == "get" else ray.wait([ref])
        except KeyboardInterrupt:
            return how, ray.get_runtime_context().is_canceled()
        return "completed", False

    for how in ("get", "wait") * 3:
        gate = Gate.remote()
        result = waits.remote(gate, how)
        until(lambda gate=gate: ray.get(gate.count.remote()) == 1)
        ray.cancel(result, recursive=False)
        ray.get(gate.send.remote())
        assert ray.get(result, timeout=60) == (how, True)


class SlowToUnpickle:
    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_slowly, ()


def _unpickle_slowly() -> SlowToUnpickle:
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        time.sleep(0.01)
    return SlowToUnpickle()


@row("ray.cancel")
def test_a_task_that_is_cancelled_while_its_arguments_are_unpickled_never_begins(ray: Any, tmp_path: Path) -> None:
    mark = tmp_path / "begun"
    result = ray.remote(lambda _, path: path.touch()).remote(SlowToUnpickle(), mark)
    time.sleep(0.3)  # whether it has been sent or not: it must not begin
    ray.cancel(result)
    with pytest.raises(ray.exceptions.TaskCancelledError):
        ray.get(result, timeout=60)
    assert not mark.exists()


@row("ray._private.utils")
def test_an_interrupt_waits_for_the_end_of_a_block() -> None:
    from ray._private.utils import DeferSigint

    calls: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), DeferSigint():
        signal.raise_signal(signal.SIGINT)
        calls.append("after")
    assert calls == ["after"] and signal.getsignal(signal.SIGINT) is before
    try:
        with DeferSigint.create_if_main_thread():
            signal.signal(signal.SIGINT, lambda *_: calls.append("first"))
            signal.raise_signal(signal.SIGINT)
            signal.signal(signal.SIGINT, lambda *_: calls.append("last"))
        assert calls == ["after", "last"]
    finally:
        signal.signal(signal.SIGINT, before)


# ------------------------------------------------------------ get


@row("ray.get")
def test_get_of_several_raises_an_error_that_is_there_while_others_never_come(ray: Any) -> None:
    failed = ray.remote(max_retries=0)(lambda: 1 / 0).remote()
    ray.wait([failed])
    pending = ray.remote(lambda: time.sleep(600)).remote()
    for refs in ([failed, pending], [pending, failed]):
        with pytest.raises(ZeroDivisionError):
            ray.get(refs, timeout=60)
    ray.cancel(pending, force=True)


# ------------------------------------------------------------ actors


@row("ray.actor: ActorHandle, ActorClass, ActorMethod, exit_actor")
def test_a_decorator_may_give_a_method_other_arguments_than_its_caller(ray: Any) -> None:
    def split(submit: Any) -> Any:
        return lambda args, kwargs: (submit([args[0], args[0]], {}), kwargs)

    def joined(method: Any) -> Any:
        def run(self: Any, first: int, second: int) -> Any:
            return method(self, first + second)

        run.__ray_invocation_decorator__ = split  # type: ignore[attr-defined]
        return run

    @ray.remote(num_cpus=0)
    class Actor:
        @joined
        def add_one(self, number: int) -> int:
            return number + 1

    ref, rest = Actor.remote().add_one.remote(3, further=4)
    assert (ray.get(ref), rest) == (7, {"further": 4})


@row("ray.remote")
def test_a_decorator_may_give_a_function_other_arguments_than_its_caller(ray: Any) -> None:
    def function(*args: int, d: int = 0) -> tuple[int, ...]:
        return (*args, d)

    function.__ray_invocation_decorator__ = (  # type: ignore[attr-defined]
        lambda submit: lambda args, kwargs: (submit(args[::-1], {"d": 5}), kwargs)
    )
    for remote in (ray.remote(function), ray.remote(function).options(num_cpus=0)):
        ref, rest = remote.remote(1, 2, 3, d=4)
        assert (ray.get(ref), rest) == ((3, 2, 1, 5), {"d": 4})


@row("ray.actor: ActorHandle, ActorClass, ActorMethod, exit_actor")
def test_dir_of_a_handle_lists_its_methods(ray: Any) -> None:
    handle = ray.remote(num_cpus=0)(Member).remote(1)
    assert set(dir(handle)) == {"__init__", "add", "__ray_ready__", "__ray_call__", "__ray_terminate__"}
    assert [name for name in dir(handle) if not name.startswith("_")] == ["add"]


@row("ray._private.worker.global_worker")
def test_a_handle_travels_through_the_pickle_of_the_worker_module(ray: Any) -> None:
    pickle = ray._private.worker.pickle
    handle = ray.remote(num_cpus=0)(Member).remote(1)
    assert ray.get(pickle.loads(pickle.dumps(handle)).add.remote(2)) == 3


@ours_only  # on Ray the state API needs the dashboard
@row("util.state, experimental.state.api")
def test_actors_are_listed_under_the_name_in_the_metadata_of_their_class(ray: Any) -> None:
    from ray.util.state import list_actors

    class Nested:
        pass

    actor_class = ray.remote(num_cpus=0)(Nested)
    actor = actor_class.remote()
    ray.get(actor.__ray_ready__.remote())
    name = actor_class.__ray_metadata__.class_name
    assert len(list_actors(filters=[("class_name", "=", name), ("state", "=", "ALIVE")])) == 1


# ------------------------------------------------------------ placement groups


@row("placement_group")
def test_bundles_and_label_selectors_can_be_checked_beforehand(ray: Any) -> None:
    from ray.util.placement_group import _validate_bundle_label_selector, _validate_bundles

    _validate_bundles([{"CPU": 1, "custom": 2.2}, {"GPU": 0.75}])
    for wrong, match in (
        ("x", "must be a list"), ([], "non-empty list"), ([{"CPU": 1}, "x"], "resource dictionaries"),
        ([{8: 7}], "resource dictionaries"), ([{"CPU": "6"}], "resource dictionaries"), ([{"CPU": 0}], "only 0 values"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            _validate_bundles(wrong)
    _validate_bundle_label_selector([])
    _validate_bundle_label_selector([{"ray.io/market_type": "spot"}])
    for wrong, match in (
        ("x", "must be a list"), (["x"], "list of string dictionary"), ([{1: "a"}], "list of string dictionary"),
        ([{"WRONG key!": "v"}], "Invalid label selector provided"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            _validate_bundle_label_selector(wrong)


@row("placement_group")
def test_the_resource_that_marks_bundles_is_reserved(ray: Any) -> None:
    for bundle in ({"bundle": 1}, {"CPU": 1, "bundle": 2}):
        with pytest.raises(ray.exceptions.RaySystemError, match="bundle is a system reserved resource"):
            ray.util.placement_group([bundle])


# ------------------------------------------------------------ key-value store


@row("experimental.internal_kv")
def test_keys_with_the_mark_of_namespaces_are_refused(ray: Any) -> None:
    from ray.experimental import internal_kv as kv

    for use in (
        kv._internal_kv_get, kv._internal_kv_exists, kv._internal_kv_del, kv._internal_kv_list,
        lambda key: kv._internal_kv_put(key, "x"),
    ):  # fmt: skip
        with pytest.raises(ray.exceptions.RaySystemError, match="can't start with @namespace_"):
            use("@namespace_x")


# ------------------------------------------------------------ values


@row("ray.put")
def test_buffers_of_values_that_came_inside_a_message_are_aligned(ray: Any) -> None:
    np = pytest.importorskip("numpy")

    @ray.remote
    def offset_of(array: Any) -> tuple[int, bool]:
        return array.ctypes.data % 64, array.flags.writeable

    for size in (2048, 48_000, 99_000, 300_000):
        array = np.arange(size, dtype=np.uint8)
        nested = ray.get(ray.put({"first": array[:2048], "second": array}))
        assert [nested["first"].ctypes.data % 64, nested["second"].ctypes.data % 64] == [0, 0]
        assert (nested["second"] == array).all() and not nested["second"].flags.writeable
        assert ray.get(offset_of.remote(array)) == (0, False)


# ------------------------------------------------------------ tasks and their parents


@row("ray._private.worker.global_worker")
@pytest.mark.parametrize("kind", ["task", "actor", "threaded", "async", "driver"])
def test_the_tasks_that_one_has_submitted_and_that_have_not_ended(ray: Any, tmp_path: Path, kind: str) -> None:
    end = tmp_path / "end"

    @ray.remote
    def child() -> None:
        while not end.exists():
            time.sleep(0.01)

    def parent() -> tuple[set[str], set[str]]:
        refs = [child.remote() for _ in range(2)]
        core_worker = ray._private.worker.global_worker.core_worker
        task = core_worker.get_current_task_id()
        pending = {one.hex() for one in core_worker.get_pending_children_task_ids(task)}
        end.touch()
        ray.get(refs)
        assert not core_worker.get_pending_children_task_ids(task)
        assert not core_worker.get_pending_children_task_ids(ray.TaskID.from_random())
        return {ref.task_id().hex() for ref in refs}, pending

    @ray.remote
    class Parent:
        def plain(self) -> Any:
            return parent()

        async def coroutine(self) -> Any:
            return parent()

    @ray.remote
    class Plain:
        def plain(self) -> Any:
            return parent()

    calls = {
        "task": lambda: ray.get(ray.remote(parent).remote()),
        "actor": lambda: ray.get(Plain.remote().plain.remote()),
        "threaded": lambda: ray.get(Plain.options(max_concurrency=3).remote().plain.remote()),
        "async": lambda: ray.get(Parent.remote().coroutine.remote()),
        "driver": parent,
    }
    expected, found = calls[kind]()
    assert found == expected and len(found) == 2


@row("util.state, experimental.state.api")
def test_a_worker_that_has_ended_is_listed_with_its_start_and_its_end(ray: Any, until: Callable[..., Any]) -> None:
    from ray.util.state import list_workers

    @ray.remote
    class Actor:
        def pid(self) -> int:
            import os

            return os.getpid()

    before = time.time() * 1000
    actor = Actor.remote()
    pid = ray.get(actor.pid.remote())
    time.sleep(1.1)
    ray.kill(actor)

    def ended() -> Any:
        rows = list_workers(detail=True, limit=1000, filters=[("is_alive", "=", False)])
        return next((row for row in rows if row.pid == pid), None)

    until(lambda: ended() is not None)
    row = ended()
    assert row.end_time_ms - row.start_time_ms >= 1000 and row.start_time_ms > before - 60_000


@row("ray.init")
def test_a_program_that_is_run_as_a_module_gives_its_workers_no_directory_but_its_own(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "json.py").write_text("raise ImportError('a module of the package shadows the library')")
    (package / "program.py").write_text(
        "import hpcray.compat.ray\nimport ray, sys\nray.init(num_cpus=1)\n"
        "print(ray.get(ray.remote(lambda: [p for p in sys.path if p.endswith('/package')]).remote()))\n"
    )
    line = [sys.executable, "-m", "package.program"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr


@row("ray.actor: ActorHandle, ActorClass, ActorMethod, exit_actor")
def test_a_handle_of_a_cluster_that_has_gone_says_so(tmp_path: Path) -> None:
    text = """
    import hpcray.compat.ray
    import ray

    @ray.remote
    class Actor:
        def call(self):
            pass

    ray.init(num_cpus=1)
    actor = Actor.remote()
    ray.get(actor.call.remote())
    ray.shutdown()
    ray.init(num_cpus=1)
    try:
        ray.get(actor.call.remote())
    except Exception as error:
        print(error)
    print(ray.get(ray.get(ray.remote(lambda: Actor.remote().call.remote()).remote())))
    """
    output = script(text, tmp_path)
    assert "It might be dead or it's from a different cluster" in output and "None" in output


@ours_only
@pytest.mark.parametrize("own", [True, False])
def test_init_leaves_the_programs_handler_of_sigterm_as_it_is(tmp_path: Path, own: bool) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(3)))" if own else ""
    (tmp_path / "program.py").write_text(
        f"import hpcray.compat.ray, os, ray, signal, sys, time\n{handler}\nray.init(num_cpus=1)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)\n"
    )
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == ((3, "saved\n") if own else (-signal.SIGTERM, "")), ended.stderr
