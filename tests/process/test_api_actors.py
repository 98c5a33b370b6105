"""Actors: state, methods, order of calls, options, actor classes."""

from __future__ import annotations

import abc
import importlib
import os
import time

import numpy as np
import pytest
from engine import NAME, exceptions, hpcray_only, ray

pytestmark = pytest.mark.usefixtures("session")


@ray.remote
class Counter:
    """Counts."""

    STEP = 1

    def __init__(self, start=0, *, scale=1):
        self.value = start
        self.scale = scale

    def add(self, amount=1):
        self.value += amount * self.scale
        return self.value

    def read(self):
        return self.value

    def echo(self, *args, **kwargs):
        return args, kwargs

    @ray.method(num_returns=2)
    def pair(self, x):
        return x, self.value

    @staticmethod
    def static(x):
        return x + 1

    @classmethod
    def name_of_class(cls):
        return cls.__name__

    def _private(self):
        return "private"


class Base:
    def __init__(self, value):
        self.value = value

    def get(self):
        return self.value


@ray.remote
class Derived(Base):
    """A class of an importable module whose name there is the actor class, not itself."""

    step = 2

    def __init__(self, value):
        super().__init__(value)

    def get(self):
        return super().get(), self.step, isinstance(self, Base), type(self).__name__

    @staticmethod
    def static(x):
        return x * 2

    @property
    def double(self):
        return self.value * 2

    def read_double(self):
        return self.double


class TestState:
    def test_is_kept_between_calls(self):
        counter = Counter.remote()
        assert ray.get([counter.add.remote() for _ in range(10)]) == list(range(1, 11))

    def test_is_not_shared(self):
        one, two = Counter.remote(10), Counter.remote(20)
        ray.get([one.add.remote(), two.add.remote()])
        assert ray.get([one.read.remote(), two.read.remote()]) == [11, 21]

    def test_large_state(self):
        @ray.remote
        class Server:
            def __init__(self, weights):
                self.weights = np.array(weights)

            def push(self, gradient):
                self.weights += gradient

            def pull(self):
                return self.weights

        server = Server.remote(np.zeros(200_000))
        for _ in range(10):
            server.push.remote(np.ones(200_000))
        got = ray.get(server.pull.remote())
        assert (got == 10).all()
        ray.get(server.push.remote(np.ones(200_000)))
        assert (got == 10).all()

    def test_of_a_class_that_extends_another(self):
        derived = Derived.remote(4)
        assert ray.get(derived.get.remote()) == (4, 2, True, "Derived")
        assert ray.get([derived.static.remote(2), derived.read_double.remote()]) == [4, 8]
        assert Derived.static(3) == 6
        assert ray.get(ray.remote(lambda cls: ray.get(cls.remote(1).get.remote())[0]).remote(Derived)) == 1

    def test_it_is_a_process_of_its_own(self):
        @ray.remote
        class Pid:
            def get(self):
                return os.getpid()

        actors = [Pid.remote() for _ in range(3)]
        pids = ray.get([actor.get.remote() for actor in actors])
        assert len({*pids, os.getpid()}) == 4
        assert ray.get([actor.get.remote() for actor in actors]) == pids


class TestConstructor:
    def test_arguments(self):
        assert ray.get(Counter.remote(5, scale=3).add.remote(2)) == 11
        assert ray.get(Counter.remote(start=7).read.remote()) == 7

    def test_refs_as_arguments(self):
        slow = ray.remote(lambda: time.sleep(0.2) or 40)
        assert ray.get(Counter.remote(slow.remote(), scale=ray.put(2)).add.remote()) == 42

    def test_without_a_constructor(self):
        @ray.remote
        class Plain:
            def hello(self):
                return "hello"

        assert ray.get(Plain.remote().hello.remote()) == "hello"
        with pytest.raises(TypeError):
            Plain.remote(1)

    def test_arguments_that_do_not_fit_are_refused(self):
        for args, kwargs in [((1, 2), {}), ((), {"unknown": 1}), ((1,), {"start": 1})]:
            with pytest.raises(TypeError):
                Counter.remote(*args, **kwargs)

    def test_calls_wait_for_a_slow_one(self):
        @ray.remote
        class Slow:
            def __init__(self):
                time.sleep(0.5)
                self.calls = 0

            def call(self):
                self.calls += 1
                return self.calls

        slow = Slow.remote()
        assert ray.get([slow.call.remote() for _ in range(100)]) == list(range(1, 101))


class TestMethods:
    def test_every_kind(self):
        counter = Counter.remote()
        assert ray.get(counter.static.remote(1)) == 2
        assert ray.get(counter.name_of_class.remote()) == "Counter"
        assert ray.get(counter._private.remote()) == "private"

    def test_arguments(self):
        counter = Counter.remote()
        ref, large = ray.put("r"), np.arange(300_000)
        (one, array, box), keywords = ray.get(counter.echo.remote(ref, large, [ref], key=ref))
        assert (one, keywords) == ("r", {"key": "r"})
        assert np.array_equal(array, large)
        assert box == [ref]

    def test_num_returns_of_the_decorator_and_of_options(self):
        counter = Counter.remote(3)
        refs = counter.pair.remote("x")
        assert ray.get(refs) == ["x", 3]
        assert ray.get(counter.pair.options(num_returns=1).remote("y")) == ("y", 3)
        assert ray.get(counter.echo.options(num_returns=2).remote(1, k=2)) == [(1,), {"k": 2}]
        assert counter.add.options(num_returns=0).remote() is None
        assert ray.get(counter.read.remote()) == 4

    def test_num_returns_travel_with_the_handle(self):
        call = ray.remote(lambda counter: ray.get(counter.pair.remote("t")))
        assert ray.get(call.remote(Counter.remote(1))) == ["t", 1]

    def test_wrong_number_of_results(self):
        with pytest.raises(ValueError, match="num_returns=3"):
            ray.get(Counter.remote().pair.options(num_returns=3).remote(1))

    @pytest.mark.parametrize("args", [(1, 2), (), ("x", "y", "z")], ids=str)
    def test_arguments_that_do_not_fit_are_refused_at_the_call(self, args):
        counter = Counter.remote()
        with pytest.raises(TypeError):
            counter.pair.remote(*args)
        with pytest.raises(TypeError):
            counter.read.remote(unknown=1)

    def test_unknown_method(self):
        with pytest.raises(AttributeError):
            _ = Counter.remote().nothing

    def test_not_called_directly(self):
        with pytest.raises(TypeError, match=r"\.remote\(\)"):
            Counter.remote().read()

    def test_of_ray(self):
        counter = Counter.remote(6)
        assert ray.get(counter.__ray_ready__.remote()) is True
        assert ray.get(counter.__ray_call__.remote(lambda self, x, y=0: self.value + x + y, 1, y=2)) == 9

    def test_dir_lists_them(self):
        assert {"add", "read", "pair", "static"} <= set(dir(Counter.remote()))

    def test_inherited_ones(self):
        class Base(abc.ABC):
            @abc.abstractmethod
            def speak(self): ...

            @ray.method(num_returns=2)
            def twice(self):
                return self.speak(), self.speak()

        class Middle(Base):
            def speak(self):
                return "middle"

        @ray.remote
        class Top(Middle):
            def speak(self):
                return "top " + super().speak()

        assert ray.get(Top.remote().twice.remote()) == ["top middle", "top middle"]

    def test_a_call_to_itself_through_a_handle(self):
        @ray.remote
        class Selfish:
            def me(self):
                return ray.get_runtime_context().current_actor

            def value(self):
                return "mine"

        actor = Selfish.remote()
        again = ray.get(actor.me.remote())
        assert again == actor
        assert ray.get(again.value.remote()) == "mine"

    def test_method_decorator_refuses_what_it_does_not_know(self):
        with pytest.raises((ValueError, AssertionError), match="bogus"):
            ray.method(bogus=1)


class TestOrder:
    def test_a_thousand_calls_of_one_caller(self):
        @ray.remote
        class Log:
            def __init__(self):
                self.calls = []

            def note(self, *what):
                self.calls.append(what)

            def read(self):
                return self.calls

        log = Log.remote()
        for i in range(1000):
            log.note.remote(i)
        assert ray.get(log.read.remote()) == [(i,) for i in range(1000)]

        @ray.remote
        def caller(log, name):
            for i in range(200):
                log.note.remote(name, i)
            ray.get(log.read.remote())

        other = Log.remote()
        ray.get([caller.remote(other, name) for name in "abc"])
        calls = ray.get(other.read.remote())
        assert len(calls) == 600
        for name in "abc":
            assert [i for who, i in calls if who == name] == list(range(200))

    def test_a_call_waits_for_its_argument_and_holds_back_the_next(self):
        @ray.remote
        def slow(value):
            time.sleep(0.3)
            return value

        counter = Counter.remote()
        refs = [counter.add.remote(slow.remote(10)), counter.add.remote(1)]
        assert ray.get(refs) == [10, 11]

    def test_a_failed_argument_holds_nothing_back(self):
        counter = Counter.remote()
        bad = counter.add.remote(ray.remote(lambda: 1 / 0).remote())
        good = counter.add.remote(1)
        with pytest.raises(ZeroDivisionError):
            ray.get(bad)
        assert ray.get(good) == 1

    def test_one_call_at_a_time(self):
        @ray.remote
        class Single:
            def __init__(self):
                self.inside = 0

            def enter(self):
                self.inside += 1
                time.sleep(0.01)
                seen = self.inside
                self.inside -= 1
                return seen

        single = Single.remote()
        enter = ray.remote(lambda actor: ray.get([actor.enter.remote() for _ in range(5)]))
        assert sum(ray.get([enter.remote(single) for _ in range(3)]), []) == [1] * 15

    def test_ten_thousand_calls(self):
        counter = Counter.remote()
        assert ray.get([counter.add.remote() for _ in range(10_000)])[-1] == 10_000


class TestActorClass:
    def test_type_name_and_wrapped_class(self):
        assert type(Counter).__name__ == "ActorClass(Counter)"
        assert Counter.__ray_actor_class__.__name__ == "Counter"
        assert Counter.__module__ == __name__

    @hpcray_only
    def test_keeps_name_and_docstring(self):
        assert Counter.__name__ == "Counter"
        assert Counter.__doc__ == "Counts."

    def test_shows_the_attributes_of_the_class(self):
        assert Counter.STEP == 1
        assert callable(Counter.add)
        assert {"add", "STEP", "read"} <= set(dir(Counter))
        with pytest.raises(AttributeError):
            _ = Counter.nothing

    def test_types(self):
        types = importlib.import_module(f"{NAME}.actor")
        assert isinstance(Counter, types.ActorClass)
        counter = Counter.remote()
        assert isinstance(counter, types.ActorHandle)
        assert isinstance(counter.add, types.ActorMethod)

    def test_not_called_directly(self):
        with pytest.raises(TypeError, match=r"Actors cannot be instantiated directly.*Counter\.remote\(\)"):
            Counter()

    def test_not_inherited_from(self):
        with pytest.raises(TypeError, match="[Ii]nherit"):

            class Sub(Counter):
                pass

    def test_made_by_a_call(self):
        class Plain:
            def __init__(self, x):
                self.x = x

            def get(self):
                return self.x

        Remote = ray.remote(Plain)
        with_options = ray.remote(num_cpus=0)(Plain)
        assert ray.get([Remote.remote(1).get.remote(), with_options.remote(2).get.remote()]) == [1, 2]
        assert Plain(3).get() == 3

    def test_made_in_a_task(self):
        @ray.remote
        def make():
            @ray.remote
            class Inner:
                def hello(self):
                    return "from inside"

            actor = Inner.remote()
            return ray.get(actor.hello.remote())

        assert ray.get(make.remote()) == "from inside"

    def test_travels_to_a_task(self):
        @ray.remote
        def use(cls):
            return ray.get(cls.remote(2).add.remote(3)), type(cls).__name__

        assert ray.get(use.remote(Counter)) == (5, "ActorClass(Counter)")

    def test_options(self):
        changed = Counter.options(num_cpus=0.5, max_restarts=1)
        assert ray.get(changed.remote(1).read.remote()) == 1
        with pytest.raises(ValueError):
            ray.remote(max_retries=1)(type("C", (), {}))

    @pytest.mark.parametrize(
        "bad",
        [{"bogus": 1}, {"max_restarts": -2}, {"lifetime": "forever"}, {"name": ""}, {"num_returns": 2}],
        ids=str,
    )
    def test_bad_options_are_refused(self, bad):
        with pytest.raises(ValueError):
            Counter.options(**bad).remote()

    def test_env_vars(self):
        env = {"env_vars": {"HPCRAY_TEST_COLOUR": "blue"}}
        counter = Counter.options(runtime_env=env).remote()
        read = lambda self: os.environ.get("HPCRAY_TEST_COLOUR")  # noqa: E731
        assert ray.get(counter.__ray_call__.remote(read)) == "blue"
        assert ray.get(Counter.remote().__ray_call__.remote(read)) is None

    def test_max_pending_calls(self):
        counter = Counter.options(max_pending_calls=5).remote()
        refs = [counter.__ray_call__.remote(lambda self: time.sleep(0.5))]
        with pytest.raises(exceptions.PendingCallsLimitExceeded):
            for _ in range(10):
                refs.append(counter.add.remote())
        assert ray.get(refs[1]) == 1

    @hpcray_only
    def test_many_at_once(self):
        counters = [Counter.remote(i) for i in range(30)]
        assert ray.get([counter.read.remote() for counter in counters]) == list(range(30))

    def test_an_attribute_does_not_hide_a_method(self):
        @ray.remote
        class Switch:
            def __init__(self):
                self.is_on = False

            def is_on(self):
                return ("method", self.is_on)

        assert ray.get(Switch.remote().is_on.remote()) == ("method", False)
