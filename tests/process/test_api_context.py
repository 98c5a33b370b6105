"""get_runtime_context: who am I."""

from __future__ import annotations

import os
import threading
import time

import pytest
from engine import hpcray_only, ray

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 4, "namespace": "here"}


@ray.remote
def who():
    context = ray.get_runtime_context()
    time.sleep(0.01)
    return {
        "node": context.get_node_id(), "job": context.get_job_id(), "worker": context.get_worker_id(),
        "task": context.get_task_id(), "actor": context.get_actor_id(), "namespace": context.namespace,
        "task_name": context.get_task_name(), "function": context.get_task_function_name(),
        "actor_name": context.get_actor_name(), "pid": os.getpid(),
    }  # fmt: skip


@ray.remote
class Who:
    def ask(self):
        context = ray.get_runtime_context()
        return {
            "node": context.get_node_id(), "job": context.get_job_id(), "worker": context.get_worker_id(),
            "task": context.get_task_id(), "actor": context.get_actor_id(), "namespace": context.namespace,
            "task_name": context.get_task_name(), "function": context.get_task_function_name(),
            "actor_name": context.get_actor_name(), "pid": os.getpid(),
        }  # fmt: skip

    def me(self):
        return ray.get_runtime_context().current_actor

    def restarted(self):
        return ray.get_runtime_context().was_current_actor_reconstructed


def is_hex(text):
    return isinstance(text, str) and len(text) > 6 and bytes.fromhex(text)


class TestDriver:
    def test_ids(self):
        context = ray.get_runtime_context()
        assert is_hex(context.get_node_id())
        assert is_hex(context.get_worker_id())
        assert is_hex(context.get_job_id())
        assert context.namespace == "here"

    def test_is_no_task_and_no_actor(self):
        context = ray.get_runtime_context()
        assert context.get_task_id() is None
        assert context.get_actor_id() is None
        assert context.get_actor_name() is None
        with pytest.raises(RuntimeError):
            _ = context.current_actor
        with pytest.raises(AssertionError):
            context.get_assigned_resources()

    def test_node_is_listed(self):
        assert ray.get_runtime_context().get_node_id() in [node["NodeID"] for node in ray.nodes()]

    def test_no_accelerators(self):
        found = ray.get_runtime_context().get_accelerator_ids()
        assert isinstance(found["GPU"], list)
        assert isinstance(ray.get(ray.remote(lambda: ray.get_runtime_context().get_accelerator_ids()).remote()), dict)

    def test_address(self):
        assert ray.get_runtime_context().gcs_address
        assert ray.get_runtime_context().get_session_name().startswith("session_")


class TestTask:
    def test_ids(self):
        mine = ray.get_runtime_context()
        found = ray.get(who.remote())
        assert found["node"] == mine.get_node_id()
        assert found["job"] == mine.get_job_id()
        assert found["namespace"] == "here"
        assert is_hex(found["worker"])
        assert found["worker"] != mine.get_worker_id()
        assert found["actor"] is None
        assert found["actor_name"] is None

    def test_task_id_is_that_of_its_ref(self):
        ref = who.remote()
        assert ray.get(ref)["task"] == ref.task_id().hex()

    def test_every_task_has_its_own_id(self):
        found = ray.get([who.remote() for _ in range(20)])
        assert len({one["task"] for one in found}) == 20
        by_worker = {}
        for one in found:
            by_worker.setdefault(one["worker"], set()).add(one["pid"])
        assert all(len(pids) == 1 for pids in by_worker.values())

    def test_names(self):
        found = ray.get(who.remote())
        assert found["task_name"] == "who"
        assert found["function"] == f"{__name__}.who"
        named = ray.get(who.options(name="christened").remote())
        assert named["task_name"] == "christened"
        assert named["function"] == f"{__name__}.who"

    def test_in_a_nested_task(self):
        found = ray.get(ray.remote(lambda: [ray.get_runtime_context().get_task_id(), ray.get(who.remote())]).remote())
        assert found[0] != found[1]["task"]

    def test_after_a_nested_get(self):
        @ray.remote
        def outer():
            before = ray.get_runtime_context().get_task_id()
            ray.get([who.remote() for _ in range(3)])
            return before == ray.get_runtime_context().get_task_id()

        assert ray.get(outer.remote()) is True

    def test_a_thread_of_a_task_knows_job_and_node(self):
        @ray.remote
        def threaded():
            found = []

            def run():
                context = ray.get_runtime_context()
                found.append((context.get_job_id(), context.get_node_id(), context.namespace))

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            return found[0]

        mine = ray.get_runtime_context()
        assert ray.get(threaded.remote()) == (mine.get_job_id(), mine.get_node_id(), "here")

    def test_env_vars(self):
        ask = ray.remote(lambda: ray.get_runtime_context().runtime_env)
        env = {"env_vars": {"HPCRAY_TEST_X": "1"}}
        assert ray.get(ask.options(runtime_env=env).remote())["env_vars"] == {"HPCRAY_TEST_X": "1"}


class TestActor:
    def test_ids(self):
        actor = Who.remote()
        one, two = ray.get([actor.ask.remote(), actor.ask.remote()])
        assert one["actor"] == actor._actor_id.hex() == two["actor"]
        assert one["worker"] == two["worker"]
        assert one["task"] != two["task"]
        assert one["job"] == ray.get_runtime_context().get_job_id()
        assert one["node"] == ray.get_runtime_context().get_node_id()

    def test_names(self):
        found = ray.get(Who.remote().ask.remote())
        assert found["task_name"] == "Who.ask"
        assert found["function"] == f"{__name__}.Who.ask"
        assert found["actor_name"] == ""
        assert ray.get(Who.options(name="named").remote().ask.remote())["actor_name"] == "named"

    def test_current_actor(self):
        actor = Who.remote()
        me = ray.get(actor.me.remote())
        assert me == actor
        assert ray.get(me.ask.remote())["actor"] == actor._actor_id.hex()

    def test_not_reconstructed(self):
        assert ray.get(Who.remote().restarted.remote()) is False


class TestOwnOptions:
    def test_names_of_functions_in_functions(self):
        @ray.remote
        def inner():
            context = ray.get_runtime_context()
            return context.get_task_name(), context.get_task_function_name()

        name, function = ray.get(inner.remote())
        assert name == "inner"
        assert function == f"{__name__}.inner"

    def test_a_name_for_every_task(self):
        names = [f"task {i}" for i in range(300)]
        ask = ray.remote(lambda: ray.get_runtime_context().get_task_name())
        assert ray.get([ask.options(name=name).remote() for name in names]) == names

    def test_a_name_with_arguments_that_come_later(self):
        @ray.remote
        def ask(first, second, k):
            return first + second + k, ray.get_runtime_context().get_task_name()

        @ray.remote
        def late(value):
            time.sleep(0.1)
            return value

        ref = ask.options(name="n").remote(late.remote(1), late.remote(2), k=ray.put(3))
        assert ray.get(ref) == (6, "n")

    def test_named_tasks_have_all_else(self):
        @ray.remote
        def pair(value):
            return value, value

        first, second = pair.options(name="two", num_returns=2).remote(1)
        assert ray.get([first, second]) == [1, 1]
        with pytest.raises(TypeError):
            pair.options(name="two").remote()
        with pytest.raises(ZeroDivisionError):
            ray.get(ray.remote(lambda: 1 / 0).options(name="fails", max_retries=0).remote())

    def test_constructor(self):
        @ray.remote
        class Made:
            def __init__(self):
                context = ray.get_runtime_context()
                self.name = context.get_task_name(), context.get_actor_id()

            def read(self):
                return self.name

        actor = Made.remote()
        assert ray.get(actor.read.remote()) == ("Made.__init__", actor._actor_id.hex())

    def test_coroutines(self):
        @ray.remote
        class Async:
            async def names(self):
                context = ray.get_runtime_context()
                return context.get_task_name(), context.get_task_function_name()

        name, function = ray.get(Async.remote().names.remote())
        assert name == "Async.names"
        assert function.endswith("<locals>.Async.names")


class TestEnvVars:
    def test_are_set_in_a_worker_of_their_own(self):
        @ray.remote
        def look():
            return os.environ.get("HPCRAY_TEST_Y"), os.getpid()

        one, two = ({"env_vars": {"HPCRAY_TEST_Y": value}} for value in "12")
        first = ray.get([look.options(runtime_env=one).remote() for _ in range(3)])
        second = ray.get([look.options(runtime_env=two).remote() for _ in range(3)])
        plain = ray.get([look.remote() for _ in range(3)])
        assert {value for value, _ in first} == {"1"}
        assert {value for value, _ in second} == {"2"}
        assert {value for value, _ in plain} == {None}
        pids = [{pid for _, pid in found} for found in (first, second, plain)]
        assert not pids[0] & pids[1] and not pids[0] & pids[2] and not pids[1] & pids[2]

    def test_children_inherit_them(self):
        look = ray.remote(lambda: {k: v for k, v in os.environ.items() if k.startswith("HPCRAY_TEST_Z")})

        @ray.remote
        class Look:
            def see(self):
                return os.environ.get("HPCRAY_TEST_Z1"), ray.get_runtime_context().runtime_env["env_vars"]

        @ray.remote(runtime_env={"env_vars": {"HPCRAY_TEST_Z1": "parent", "HPCRAY_TEST_Z2": "parent"}})
        def parent():
            own = {"env_vars": {"HPCRAY_TEST_Z2": "child"}}
            return ray.get([look.remote(), look.options(runtime_env=own).remote(), Look.remote().see.remote()])

        inherited, changed, actor = ray.get(parent.remote())
        assert inherited == {"HPCRAY_TEST_Z1": "parent", "HPCRAY_TEST_Z2": "parent"}
        assert changed == {"HPCRAY_TEST_Z1": "parent", "HPCRAY_TEST_Z2": "child"}
        assert actor == ("parent", {"HPCRAY_TEST_Z1": "parent", "HPCRAY_TEST_Z2": "parent"})

    def test_an_actor_has_them_in_its_constructor(self):
        @ray.remote(runtime_env={"env_vars": {"HPCRAY_TEST_W": "w"}})
        class Look:
            def __init__(self):
                self.seen = os.environ.get("HPCRAY_TEST_W")

            def see(self):
                return self.seen, ray.get_runtime_context().runtime_env

        assert ray.get(Look.remote().see.remote()) == ("w", {"env_vars": {"HPCRAY_TEST_W": "w"}})


@hpcray_only
def test_workers_have_the_priority_of_the_program():
    @ray.remote
    def niceness():
        return os.nice(0)

    assert ray.get(niceness.remote()) == os.nice(0)
