"""Plugins of runtime environments, in sessions of their own: nodes read the variable when they start."""

from __future__ import annotations

import json
import os

import pytest
from engine import exceptions, hpcray_only, ray, start

from hpcray.runtime_env.runtime_env_plugin import RuntimeEnvPlugin, RuntimeEnvPluginManager

pytestmark = hpcray_only


class Colour(RuntimeEnvPlugin):
    name = "hpcray_test_colour"

    @staticmethod
    def validate(runtime_env_dict):
        if runtime_env_dict["hpcray_test_colour"] == "none":
            raise ValueError("none is no colour")

    def get_uris(self, runtime_env):
        return [f"colour://{runtime_env['hpcray_test_colour']}"]

    async def create(self, uri, runtime_env, context, logger):
        with open(os.environ["HPCRAY_TEST_CREATED"], "a") as file:
            file.write(f"{uri}\n")
        return 1

    def modify_context(self, uris, runtime_env, context, logger):
        context.env_vars["HPCRAY_TEST_COLOUR"] = f"{os.environ.get('HPCRAY_TEST_COLOUR', '')}{uris[0]}"


class Command(RuntimeEnvPlugin):
    name = "hpcray_test_command"
    priority = 3

    def modify_context(self, uris, runtime_env, context, logger):
        context.command_prefix += ["export", "HPCRAY_TEST_PREFIX=1", "&&"]
        context.py_executable = f"nice -n {runtime_env['hpcray_test_command']} {context.py_executable}"


class Slow(RuntimeEnvPlugin):
    name = "hpcray_test_slow"

    async def create(self, uri, runtime_env, context, logger):
        import asyncio

        await asyncio.sleep(1000)


class Nameless(RuntimeEnvPlugin):
    pass


def named(*classes, **more):
    return json.dumps([{"class": f"{cls.__module__}.{cls.__qualname__}", **more} for cls in classes])


@pytest.fixture
def session(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_RUNTIME_ENV_PLUGINS", named(Colour, Command, Slow))
    monkeypatch.setenv("HPCRAY_TEST_CREATED", str(tmp_path / "created"))
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__), prepend=os.pathsep)
    with start(num_cpus=2):
        yield tmp_path


def test_variables_and_what_is_made_once(session):
    @ray.remote
    class Looks:
        def look(self):
            return os.environ["HPCRAY_TEST_COLOUR"]

    actors = [Looks.options(runtime_env={"hpcray_test_colour": "red"}, num_cpus=0).remote() for _ in range(3)]
    assert ray.get([actor.look.remote() for actor in actors]) == ["colour://red"] * 3
    assert (session / "created").read_text() == "colour://red\n"
    with pytest.raises(exceptions.RuntimeEnvSetupError, match="none is no colour"):
        ray.get(ray.remote(lambda: 1).options(runtime_env={"hpcray_test_colour": "none"}).remote())


def test_another_command(session):
    task = ray.remote(lambda: (os.nice(0), os.environ["HPCRAY_TEST_PREFIX"]))
    niceness = min(19, os.nice(0) + 7)  # the tests may themselves be nice
    assert ray.get(task.options(runtime_env={"hpcray_test_command": 7}).remote()) == (niceness, "1")


def test_a_plugin_that_takes_too_long(session):
    env = {"hpcray_test_slow": True, "config": {"setup_timeout_seconds": 1}}
    with pytest.raises(exceptions.RuntimeEnvSetupError, match="within the timeout of 1.0 seconds"):
        ray.get(ray.remote(lambda: 1).options(runtime_env=env).remote())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("[3]", "Invalid runtime env plugin config"),
        ('[{"class": "os.path.join"}]', "must inherit"),
        (named(Nameless), "No valid name"),
        (named(Colour, Colour), "conflicts with"),
        (named(Colour, priority=101), "should be an integer between 0 and 100"),
    ],
)
def test_wrong_variables(monkeypatch, value, text):
    monkeypatch.setenv("RAY_RUNTIME_ENV_PLUGINS", value)
    with pytest.raises(RuntimeError, match=text):
        RuntimeEnvPluginManager()
