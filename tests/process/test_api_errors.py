"""Exceptions: both RayTaskError and the user's class, with the remote traceback."""

from __future__ import annotations

import contextlib
import gc
import pickle
import threading
import weakref

import pytest
from engine import IS_HPCRAY, exceptions, hpcray_only, ray

pytestmark = pytest.mark.usefixtures("session")


class AppError(Exception):
    def __init__(self, message, code=0):
        super().__init__(message, code)
        self.code = code


class TwoArguments(Exception):
    """Pickle cannot rebuild it: `args` has one item, `__init__` takes two."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.first, self.second = first, second


class KeywordOnly(Exception):
    def __init__(self, *, code):
        self.code = code


class Unpicklable(Exception):
    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()


class Hostile(Exception):
    def __reduce__(self):
        raise RuntimeError("never")


class OnlyThere(Exception):
    """Pickles, but does not unpickle."""

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise ImportError("no such thing here")


@ray.remote
def throw(make):
    def inner():
        raise make()

    return inner()


def caught(make):
    with pytest.raises(exceptions.RayError) as info:
        ray.get(throw.remote(make))
    return info.value


class TestBothClasses:
    @pytest.mark.parametrize(
        "error",
        [ValueError("v"), KeyError("k"), OSError(2, "gone", "/f"), StopIteration(5), AssertionError(), MemoryError("m"),
         AppError("app", code=7), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), NotImplementedError("n")],
        ids=lambda error: type(error).__name__,
    )  # fmt: skip
    def test_is_instance_of(self, error):
        found = caught(lambda: error)
        assert isinstance(found, exceptions.RayTaskError)
        assert isinstance(found, type(error))
        assert type(found.cause) is type(error)
        assert found.cause.args == error.args

    def test_attributes_of_the_cause(self):
        found = caught(lambda: AppError("app", code=7))
        assert found.code == 7
        assert found.cause.code == 7

    def test_caught_by_the_users_class(self):
        with pytest.raises(AppError):
            ray.get(throw.remote(lambda: AppError("x")))

    def test_remote_traceback_in_str(self):
        text = str(caught(lambda: ValueError("the message")))
        for part in ("throw", "inner", "raise make()", "ValueError: the message", __file__.rpartition("/")[2], "pid="):
            assert part in text

    def test_the_name_option_names_the_task(self):
        with pytest.raises(ValueError) as info:
            ray.get(throw.options(name="step 3").remote(lambda: ValueError()))
        assert str(info.value).startswith("ray::step 3() (pid=")
        assert info.value.function_name == "throw"

    def test_name_of_the_class(self):
        assert type(caught(lambda: ValueError())).__name__ == "RayTaskError(ValueError)"

    def test_cause_chain_in_the_traceback(self):
        @ray.remote
        def chained():
            try:
                {}["missing"]
            except KeyError as error:
                raise ValueError("outer") from error

        with pytest.raises(ValueError) as info:
            ray.get(chained.remote())
        assert "KeyError: 'missing'" in str(info.value)
        assert "outer" in str(info.value)

    @hpcray_only
    def test_it_pickles(self):
        found = caught(lambda: AppError("app", code=7))
        again = pickle.loads(pickle.dumps(found))
        assert isinstance(again, AppError)
        assert isinstance(again, exceptions.RayTaskError)
        assert "app" in str(again)

    def test_the_worker_goes_on(self):
        for _ in range(20):
            with pytest.raises(ValueError):
                ray.get(throw.remote(ValueError))
        assert ray.get(ray.remote(lambda: "fine").remote()) == "fine"


class TestOddExceptions:
    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: TwoArguments(1, 2), "1 and 2"), (lambda: KeywordOnly(code=3), "KeywordOnly"),
            (lambda: Unpicklable("locked"), "locked"), (lambda: OnlyThere("there"), "there"),
            pytest.param(lambda: Hostile("hostile"), "hostile", marks=hpcray_only),  # Ray's worker crashes
        ],
        ids=["two arguments", "keyword only", "unpicklable", "does not unpickle", "hostile"],
    )  # fmt: skip
    def test_arrive_as_ray_errors_with_their_text(self, make, text):
        found = caught(make)
        assert isinstance(found, exceptions.RayError)
        assert text in str(found)
        assert "raise make()" in str(found)

    @hpcray_only
    def test_odd_constructors_keep_the_class(self):
        two = caught(lambda: TwoArguments("a", "b"))
        assert isinstance(two, TwoArguments)
        assert isinstance(two, exceptions.RayTaskError)
        assert (two.first, two.cause.second) == ("a", "b")
        assert caught(lambda: KeywordOnly(code=3)).code == 3

    def test_of_a_local_class(self):
        class Local(Exception):
            pass

        found = caught(lambda: Local("here"))
        assert type(found.cause).__name__ == "Local"
        assert isinstance(found, exceptions.RayTaskError)
        assert "here" in str(found)

    def test_base_exceptions_do_not_end_the_driver(self):
        class Base(BaseException):
            pass

        with pytest.raises(exceptions.RayError):
            ray.get(throw.remote(lambda: Base("base")))

    def test_keyboard_interrupt_in_a_task(self):
        with pytest.raises(exceptions.TaskCancelledError):
            ray.get(throw.options(max_retries=0).remote(KeyboardInterrupt))

    def test_exception_group(self):
        import sys

        if sys.version_info < (3, 11):
            pytest.skip("no ExceptionGroup")
        found = caught(lambda: ExceptionGroup("several", [ValueError("one"), KeyError("two")]))  # noqa: F821
        assert "several" in str(found)
        assert "one" in str(found)


class TestPropagation:
    def test_through_an_argument(self):
        use = ray.remote(lambda x: x)
        with pytest.raises(AppError) as info:
            ray.get(use.remote(use.remote(throw.remote(lambda: AppError("deep", code=2)))))
        assert isinstance(info.value, exceptions.RayTaskError)
        assert "deep" in str(info.value)
        assert info.value.cause.code == 2

    def test_a_task_with_a_failed_argument_does_not_run(self, marks):
        count = ray.remote(lambda m, _: m.add())
        with pytest.raises(AppError):
            ray.get(count.remote(marks, throw.remote(lambda: AppError("no"))))
        assert marks.lines() == []

    def test_through_a_nested_get(self):
        @ray.remote
        def outer():
            return ray.get(throw.remote(lambda: AppError("inner", code=4)))

        with pytest.raises(AppError) as info:
            ray.get(outer.remote())
        assert info.value.cause.code == 4
        assert type(info.value.cause) is AppError
        assert "outer" in str(info.value)
        assert "throw" in str(info.value)

    def test_caught_inside_a_task(self):
        @ray.remote
        def outer():
            try:
                ray.get(throw.remote(lambda: AppError("inner", code=4)))
            except AppError as error:
                return error.code

        assert ray.get(outer.remote()) == 4

    def test_of_a_list_the_first_failure_is_raised(self):
        good, bad = ray.put(1), throw.remote(lambda: AppError("bad"))
        with pytest.raises(AppError):
            ray.get([good, bad, good])
        assert ray.get(good) == 1

    @hpcray_only
    def test_what_is_raised_keeps_no_frame_alive(self):
        """Else what the caller held, refs too, would stay until the garbage is collected."""

        @ray.remote
        class Actor:
            def call(self):
                pass

        class Held:
            pass

        def caller(what):
            held = Held()
            with contextlib.suppress(exceptions.RayActorError):
                ray.get(what)
            return weakref.ref(held)

        actor = Actor.remote()
        ray.get(actor.call.remote())
        ray.kill(actor)
        ref = actor.call.remote()
        ray.wait([ref], timeout=30)
        gc.collect()
        gc.disable()
        try:
            assert [caller(what)() for what in (ref, [ref])] == [None, None]
        finally:
            gc.enable()

    def test_of_an_actor_method(self):
        @ray.remote
        class Thrower:
            def go(self):
                raise AppError("from an actor", code=1)

            def fine(self):
                return "fine"

        actor = Thrower.remote()
        with pytest.raises(AppError, match="from an actor") as info:
            ray.get(actor.go.remote())
        assert isinstance(info.value, exceptions.RayTaskError)
        assert "Thrower.go" in str(info.value)
        assert "actor_id=" in str(info.value)
        assert ray.get(actor.fine.remote()) == "fine"

    def test_an_exception_can_be_a_value(self):
        found = ray.get(ray.remote(lambda: ValueError("just a value")).remote())
        assert type(found) is ValueError
        assert str(ray.get(ray.put(KeyError("put")))) == "'put'"
        assert type(ray.get(ray.remote(lambda x: x).remote(OSError("arg")))) is OSError


class TestUnpicklable:
    def test_argument(self):
        with pytest.raises(TypeError):
            ray.remote(lambda x: x).remote(threading.Lock())

    def test_result(self):
        with pytest.raises(TypeError) as info:
            ray.get(ray.remote(lambda: threading.Lock()).remote())
        assert isinstance(info.value, exceptions.RayTaskError)

    def test_put(self):
        with pytest.raises(TypeError):
            ray.put(threading.Lock())

    def test_closure(self):
        lock = threading.Lock()
        with pytest.raises(TypeError):
            ray.remote(lambda: lock).remote()

    def test_a_value_that_does_not_unpickle(self):
        class Broken:
            def __reduce__(self):
                return _refuse, ()

        take = ray.remote(lambda x: x)
        with pytest.raises(exceptions.RayError):
            ray.get(take.remote(Broken()))
        with pytest.raises((exceptions.RayError, ImportError)):
            ray.get(ray.put(Broken()))


class TestTree:
    @pytest.mark.parametrize(
        ("name", "bases"),
        [
            ("RayTaskError", "RayError"), ("RayActorError", "RayError"), ("ActorDiedError", "RayActorError"),
            ("ActorUnavailableError", "RayActorError"), ("WorkerCrashedError", "RayError"),
            ("GetTimeoutError", "RayError"), ("TaskCancelledError", "RayError"), ("ObjectLostError", "RayError"),
            ("OwnerDiedError", "ObjectLostError"), ("ObjectStoreFullError", "RayError"),
            ("OutOfMemoryError", "RayError"), ("NodeDiedError", "RayError"), ("RuntimeEnvSetupError", "RayError"),
            ("ActorUnschedulableError", "RayError"), ("PendingCallsLimitExceeded", "RayError"),
        ],
    )  # fmt: skip
    def test_is_rays(self, name, bases):
        assert issubclass(getattr(exceptions, name), getattr(exceptions, bases))

    def test_timeout_is_a_timeout(self):
        assert issubclass(exceptions.GetTimeoutError, TimeoutError)

    def test_the_module_is_public(self):
        assert exceptions.RayTaskError.__module__ == ("hpcray.exceptions" if IS_HPCRAY else "ray.exceptions")
