"""Named actors, namespaces, get_if_exists, detached ones."""

from __future__ import annotations

import gc
import os

import pytest
from engine import alive, eventually, exceptions, ray

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 4, "namespace": "home"}


@ray.remote
class Named:
    def __init__(self, value=None):
        self.value = value

    def get(self):
        return self.value

    def pid(self):
        return os.getpid()

    @ray.method(num_returns=2)
    def pair(self):
        return 1, 2


def missing(name, **where):
    try:
        ray.get_actor(name, **where)
    except ValueError:
        return True
    return False


class TestLookUp:
    def test_by_name(self):
        made = Named.options(name="plain").remote("v")
        found = ray.get_actor("plain")
        assert found == made
        assert hash(found) == hash(made)
        assert ray.get(found.get.remote()) == "v"
        assert ray.get(found.pair.remote()) == [1, 2]
        with pytest.raises(AttributeError):
            _ = found.nothing

    def test_in_a_task_and_in_an_actor(self):
        _keep = Named.options(name="everywhere").remote("e")
        look = lambda *_: ray.get(ray.get_actor("everywhere").get.remote())  # noqa: E731
        assert ray.get(ray.remote(look).remote()) == "e"
        assert ray.get(Named.remote().__ray_call__.remote(look)) == "e"

    def test_unknown(self):
        with pytest.raises(ValueError, match="Failed to look up actor with name 'nobody'"):
            ray.get_actor("nobody")

    @pytest.mark.parametrize(("name", "error"), [("", ValueError), (None, ValueError)])
    def test_bad_names(self, name, error):
        with pytest.raises(error):
            ray.get_actor(name)

    @pytest.mark.parametrize("name", ["with space", "ünïcode", "a/b:c", "x" * 200])
    def test_any_text_is_a_name(self, name):
        made = Named.options(name=name).remote()
        assert ray.get_actor(name) == made

    def test_before_the_constructor_is_done(self):
        made = Named.options(name="early").remote(ray.remote(lambda: __import__("time").sleep(0.3)).remote())
        found = ray.get_actor("early")
        assert found == made
        assert ray.get(found.get.remote()) is None

    def test_while_the_arguments_of_its_constructor_depend_on_it(self):
        """`.remote()` of a named actor does not wait for the actor's arguments."""
        argument = ray.remote(lambda: [ray.get_actor("circle")] and "there")

        @ray.remote
        class Gate:
            def __init__(self):
                self.open_ = False

            def open(self):
                self.open_ = True

            def is_open(self):
                return self.open_

        gate = Gate.remote()

        @ray.remote
        def when_open():
            while not ray.get(gate.is_open.remote()):
                pass
            return ray.get(argument.remote())

        made = Named.options(name="circle").remote(when_open.remote())
        ray.get(gate.open.remote())
        assert ray.get(made.get.remote()) == "there"

    def test_its_own_name(self):
        made = Named.options(name="selfaware").remote()
        assert ray.get(made.__ray_call__.remote(lambda self: ray.get_runtime_context().get_actor_name())) == "selfaware"


class TestTaken:
    def test_the_second_is_refused(self):
        _keep = Named.options(name="taken").remote(1)
        with pytest.raises(ValueError, match="taken") as caught:
            Named.options(name="taken").remote(2)
        assert isinstance(caught.value, exceptions.ActorAlreadyExistsError)
        assert ray.get(ray.get_actor("taken").get.remote()) == 1

    def test_before_the_arguments_are_there(self):
        late = ray.remote(lambda: __import__("time").sleep(0.5)).remote()
        first = Named.options(name="reserved").remote(late)
        with pytest.raises(ValueError, match="reserved"):
            Named.options(name="reserved").remote(late)
        assert ray.get_actor("reserved") == first
        assert ray.get(first.get.remote()) is None
        second = Named.options(name="reserved again").remote(late)
        del first, second
        gc.collect()
        eventually(lambda: missing("reserved") and missing("reserved again"))

    def test_get_if_exists(self):
        get = Named.options(name="shared", get_if_exists=True)
        first, second = get.remote("first"), get.remote("second")
        assert first == second
        assert ray.get([first.get.remote(), second.get.remote()]) == ["first", "first"]

    def test_get_if_exists_by_many_at_once(self):
        @ray.remote
        def race(i):
            actor = Named.options(name="raced", get_if_exists=True, lifetime="detached").remote(i)
            return ray.get([actor.pid.remote(), actor.get.remote()])

        found = ray.get([race.remote(i) for i in range(8)])
        assert len({tuple(one) for one in found}) == 1
        ray.kill(ray.get_actor("raced"))

    def test_get_if_exists_needs_a_name(self):
        with pytest.raises(ValueError, match="name must be specified"):
            Named.options(get_if_exists=True).remote()

    def test_the_name_is_free_after_the_death(self):
        actor = Named.options(name="again").remote(1)
        ray.get(actor.get.remote())
        ray.kill(actor)
        eventually(lambda: missing("again"))
        successor = Named.options(name="again").remote(2)
        assert ray.get(successor.get.remote()) == 2
        assert ray.get_actor("again") == successor

    def test_the_name_is_free_after_the_last_handle(self):
        actor = Named.options(name="scoped").remote()
        pid = ray.get(actor.pid.remote())
        del actor
        gc.collect()
        eventually(lambda: not alive(pid) and missing("scoped"))


class TestNamespaces:
    def test_of_the_job(self):
        assert ray.get_runtime_context().namespace == "home"
        made = Named.options(name="local").remote()
        assert ray.get_actor("local", namespace="home") == made
        assert missing("local", namespace="away")

    def test_another_one(self):
        here = Named.options(name="both").remote("home")
        there = Named.options(name="both", namespace="away").remote("away")
        assert here != there
        assert ray.get(ray.get_actor("both").get.remote()) == "home"
        assert ray.get(ray.get_actor("both", namespace="away").get.remote()) == "away"

    def test_get_if_exists_looks_in_its_namespace(self):
        there = Named.options(name="spaced", namespace="away").remote(1)
        assert Named.options(name="spaced", namespace="away", get_if_exists=True).remote(2) == there
        assert Named.options(name="spaced", get_if_exists=True).remote(3) != there


class TestDetached:
    def test_outlives_its_handles_and_its_maker(self):
        @ray.remote
        def make():
            Named.options(name="detached", lifetime="detached").remote("still here")

        ray.get(make.remote())
        gc.collect()
        found = ray.get_actor("detached")
        pid = ray.get(found.pid.remote())
        del found
        gc.collect()
        __import__("time").sleep(0.5)
        assert alive(pid)
        found = ray.get_actor("detached")
        assert ray.get(found.get.remote()) == "still here"
        ray.kill(found)
        eventually(lambda: not alive(pid) and missing("detached"))

    def test_bad_lifetime(self):
        with pytest.raises(ValueError, match="lifetime"):
            Named.options(lifetime="eternal").remote()
