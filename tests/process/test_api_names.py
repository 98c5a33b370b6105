"""What programs look at: ids, class metadata, generics, namespaces, implicit starts, what `init` returns, logs."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Generic, TypeVar

import pytest
from engine import ROOT, hpcray_only, ray, start

T = TypeVar("T")
hpcray = hpcray_only


@ray.remote
class Box(Generic[T]):
    """Holds something."""

    KIND = "box"

    def __init__(self, value: T):
        self.value = value

    def get(self) -> T:
        return self.value


class Boxes(list[T], Generic[T]):
    def get(self) -> list[T]:
        return list(self)


class TextBox(Box.__ray_actor_class__[str] if hasattr(Box, "__ray_actor_class__") else object):
    def loud(self):
        return self.get() + "!"


@pytest.fixture(scope="module")
def job():
    with start(num_cpus=2, namespace="home") as context:
        yield context


class TestActorClasses:
    def test_generic_ones(self, job):
        assert ray.get(Box.remote(3).get.remote()) == 3
        assert ray.get(ray.remote(Boxes).remote([1]).get.remote()) == [1]
        text = ray.remote(TextBox).remote("a")
        assert ray.get([text.get.remote(), text.loud.remote()]) == ["a", "a!"]

    @hpcray_only
    def test_generic_ones_with_their_parameter(self, job):
        assert ray.get(Box[int].remote(3).get.remote()) == 3
        assert ray.get(ray.remote(Boxes[int]).remote([2]).get.remote()) == [2]
        with pytest.raises(TypeError):
            ray.remote(type("Plain", (), {}))[int]

    def test_metadata(self):
        assert Box.__ray_metadata__.modified_class.__name__ in ("Box", "Class(Box)")
        assert Box.__ray_metadata__.class_name.endswith("Box")
        assert "get" in Box.__ray_metadata__.method_meta.methods
        assert Box.options(num_cpus=2) is not Box
        assert ray.remote(num_cpus=2)(type("Plain", (), {}))._default_options["num_cpus"] == 2
        function = ray.remote(num_cpus=2)(len if False else (lambda: 1))
        assert function._default_options["num_cpus"] == 2
        assert function._function_name.endswith("<lambda>")
        function._function_name = "as smallpond does"
        assert ray.get(function.remote()) == 1


class TestIds:
    def test_of_refs(self, job):
        ref = ray.remote(lambda: 1).remote()
        for ident in (ref.task_id(), ref.job_id()):
            assert bytes.fromhex(ident.hex()) == ident.binary()
            assert not ident.is_nil()
        assert ref.job_id().hex() == ray.get_runtime_context().get_job_id()
        assert ray.ObjectRef.nil().is_nil() and not ref.is_nil()

    def test_of_actors(self, job):
        box = Box.remote(1)
        assert box._actor_id == box._ray_actor_id
        assert len(box._actor_id.binary()) == len(box._actor_id.hex()) // 2
        with pytest.raises(AttributeError, match="'ActorHandle' object has no attribute 'nothing'"):
            _ = box.nothing


class TestNamespaces:
    @pytest.mark.parametrize(("namespace", "error"), [("", ValueError), (3, TypeError)])
    def test_that_are_none(self, job, namespace, error):
        with pytest.raises(error):
            Box.options(name="a", namespace=namespace).remote(1)
        with pytest.raises(error):
            ray.get_actor("a", namespace=namespace)

    def test_lists(self, job):
        kept = [Box.options(name="here").remote(1), Box.options(name="there", namespace="away").remote(2)]
        ray.get([box.get.remote() for box in kept])
        assert ray.util.list_named_actors() == ["here"]
        rows = ray.util.list_named_actors(all_namespaces=True)
        wanted = [{"name": "here", "namespace": "home"}, {"name": "there", "namespace": "away"}]
        assert all(row in rows for row in wanted)


class TestArguments:
    def test_deeply_nested(self, job):
        value = ["bottom"]
        for _ in range(200):
            value = [value, {"k": (value[0] if isinstance(value[0], str) else "x",)}]
        same = ray.get(ray.remote(lambda x: x).remote(value))
        assert same == value

    def test_refs_in_closures_and_defaults(self, job):
        ref = ray.put("closed over")

        @ray.remote
        def task(more=ref):
            return ray.get(ref), ray.get(more)

        assert ray.get(task.remote()) == ("closed over", "closed over")

    def test_every_kind_of_parameter(self, job):
        @ray.remote
        def task(a, /, b, c=3, *rest, d, e=5, **more):
            return a, b, c, rest, d, e, more

        one = ray.put(1)
        assert ray.get(task.remote(one, 2, d=4)) == (1, 2, 3, (), 4, 5, {})
        assert ray.get(task.remote(1, 2, 0, 7, 8, d=one, z=9)) == (1, 2, 0, (7, 8), 1, 5, {"z": 9})

    def test_an_object_with_a_handle_is_copied(self, job):
        import copy

        box = Box.remote([1])
        copied = copy.deepcopy({"box": box, "more": [1]})
        assert copied["box"] == box
        assert ray.get(copied["box"].get.remote()) == [1]


class TestContext:
    @hpcray_only
    def test_is_a_mapping(self, job):
        assert dict(job) == job.address_info
        assert job["node_id"] == ray.get_runtime_context().get_node_id()
        assert {"session_dir", "gcs_address", "raylet_socket_name", "webui_url", "redis_address"} <= set(job)
        assert job.python_version == sys.version.split()[0]
        assert job.ray_version.count(".") == 2


@hpcray_only
@pytest.mark.parametrize(
    "use",
    ["kill(1)", "cancel(1)", "get_gpu_ids()", "get_runtime_context()", "wait([])", "get_actor('x')"],
)
def test_each_call_of_the_api_would_start_a_session(monkeypatch, use):
    """Without the cost of one: `init` is called first, whatever comes then."""
    from hpcray.api import session
    from hpcray.runtime.core_worker.core_worker import current

    class Started(Exception):
        pass

    def init(*_, **__):
        raise Started

    monkeypatch.setattr(session, "init", init)
    monkeypatch.setattr(current, "process", None)
    with pytest.raises(Started):
        eval(f"ray.{use}")


@hpcray_only
class TestLogging:
    @pytest.mark.parametrize(
        "bad", [{"encoding": "XML"}, {"log_level": "LOUD"}, {"additional_log_standard_attrs": ["colour"]}], ids=str
    )
    def test_refused(self, bad):
        with pytest.raises(ValueError):
            ray.LoggingConfig(**bad)

    @pytest.mark.slow
    def test_json_lines_say_where_they_come_from(self, tmp_path):
        script = tmp_path / "script.py"
        script.write_text(
            "import logging, hpcray as ray\n"
            "ray.init(num_cpus=1, logging_config=ray.LoggingConfig('JSON', 'WARNING', ['name']))\n"
            "logging.warning('of the driver')\n"
            "logging.info('not shown')\n"
            "@ray.remote\n"
            "class Logs:\n"
            "    def log(self):\n"
            "        logging.getLogger('mine').warning('of %s', 'an actor', extra={'k': 2})\n"
            "ray.get(Logs.options(name='n').remote().log.remote())\n"
        )
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, env=env)
        lines = [
            json.loads(line[line.index("{") :]) for line in (done.stderr + done.stdout).splitlines() if "{" in line
        ]
        said = {line["message"]: line for line in lines}
        assert set(said) == {"of the driver", "of an actor"}, done.stderr
        of_actor = said["of an actor"]
        assert of_actor["name"] == "mine" and of_actor["k"] == 2 and of_actor["levelname"] == "WARNING"
        assert of_actor["actor_name"] == "n" and of_actor["task_name"] == "Logs.log" and of_actor["actor_id"]
        assert said["of the driver"]["job_id"] == of_actor["job_id"]

    def test_level_of_our_own_messages(self, monkeypatch):
        from hpcray.api import session

        for level, number in (("error", logging.ERROR), (logging.DEBUG, logging.DEBUG)):
            session._configure_logging(True, level, None)
            assert logging.getLogger("hpcray").level == number
        session._configure_logging(True, "info", None)
