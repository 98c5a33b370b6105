"""Errors travel whole: through pickle, from any user class, with their remote traceback."""

from __future__ import annotations

import asyncio
import builtins
import copy
import errno
import pickle
import sys
import threading
from dataclasses import dataclass
from typing import Any

import cloudpickle
import pytest

from hpcray import exceptions
from hpcray.common.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    ObjectReconstructionFailedError,
    RayActorError,
    RayError,
    TaskCancelledError,
)
from hpcray.common.task_errors import RayTaskError, UnserializableException, UserCodeException, make_task_error


class Plain(ValueError):
    pass


class OddInit(Exception):
    """Ray loses this one: pickle would call OddInit("...")."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"code {code} in {where}")
        self.code = code

    def describe(self) -> str:
        return f"described {self.code}"


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        self.code = code

    def __str__(self) -> str:
        return f"keyword {self.code}"


class Doubling(Exception):
    """Called again by pickle, its message would be doubled."""

    def __init__(self, text: str) -> None:
        super().__init__(f"<{text}>")


class Slotted(Exception):
    __slots__ = ("__hidden", "x")

    def __init__(self, x: int) -> None:
        super().__init__()
        self.x = x
        self.__hidden = x + 1

    def hidden(self) -> int:
        return self.__hidden


class OddNew(Exception):
    def __new__(cls, first: int, second: int) -> OddNew:
        return super().__new__(cls, first)

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first)
        self.second = second


class ReadOnlyArgs(Exception):
    def __init__(self) -> None:
        super().__init__("inner")

    @property
    def args(self) -> tuple[Any, ...]:  # type: ignore[override]
        return ("mine",)


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


class OddOSError(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(errno.ENOENT, "not there", path)


class OwnReduce(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a)
        self.b = b

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.b)


class Meta(type):
    pass


class WithMeta(Exception, metaclass=Meta):
    pass


class Final(Exception):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError("no further")


class Clashing(Exception):
    """Uses names that RayTaskError has too."""

    def __init__(self) -> None:
        super().__init__("clash")
        self.pid = "my pid"
        self.function_name = "my function"


class Own(BaseException):
    pass


CAUSES = [
    Plain("bad"), OddInit(3, "here"), KeywordOnly(code=4), Doubling("once"), Slotted(5), OddNew(1, 2), ReadOnlyArgs(),
    Frozen(7), OddOSError("x.txt"), OwnReduce(1, 2), WithMeta("m"), Clashing(), Own("base"), KeyError("k"),
    FileNotFoundError(errno.ENOENT, "no", "f"), UnicodeDecodeError("utf8", b"x", 0, 1, "bad"), StopIteration(3),
    SyntaxError("s", ("f.py", 1, 2, "text")), ImportError("i", name="n"), GetTimeoutError("t"), ActorDiedError("gone"),
]  # fmt: skip


LOST_BY_RAY = {OddInit, KeywordOnly, Slotted, OddNew, ReadOnlyArgs, Frozen, OddOSError, Clashing}
"""Exceptions that pickle cannot rebuild by a call of their class with `args`."""


def caught(exc: BaseException) -> BaseException:
    try:
        raise exc
    except BaseException as error:
        return error


def task_error(exc: BaseException, **kwargs: Any) -> RayTaskError:
    return make_task_error("work", caught(exc), 42, "10.0.0.7", dumps=cloudpickle.dumps, **kwargs)


def trip(error: Any) -> Any:
    return pickle.loads(cloudpickle.dumps(error))


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: type(cause).__name__)
@pytest.mark.parametrize("trips", [0, 1, 2])
def test_a_dual_error_is_an_instance_of_task_error_and_of_the_users_class(cause: BaseException, trips: int) -> None:
    raised = task_error(cause)
    for _ in range(trips):
        raised = trip(raised)
    dual = raised.as_instanceof_cause()
    for _ in range(trips):
        dual = trip(dual)

    with pytest.raises(type(cause)) as caught_by_class:
        raise dual
    assert isinstance(caught_by_class.value, RayTaskError)
    assert type(dual).__name__ == f"RayTaskError({type(cause).__name__})"
    assert dual.args == (dual.cause,)
    assert type(dual.cause) is type(cause)
    assert dual.cause.args == cause.args
    assert str(dual.cause) == str(cause)
    for name, value in vars(cause).items():
        assert getattr(dual, name) == value
    if type(cause) in LOST_BY_RAY:
        assert isinstance(dual, UnserializableException)
        assert str(dual) == str(UnserializableException(f"ray.exceptions.RayTaskError: {raised}\n"))
    else:
        assert not isinstance(dual, UnserializableException)
        assert str(dual) == str(raised)
    assert str(raised).splitlines()[0] == "ray::work() (pid=42, ip=10.0.0.7)"
    assert dual.as_instanceof_cause() is dual


def test_methods_slots_and_builtin_fields_of_the_cause_are_visible() -> None:
    assert task_error(OddInit(3, "x")).as_instanceof_cause().describe() == "described 3"  # type: ignore[attr-defined]
    slotted: Any = trip(task_error(Slotted(5)).as_instanceof_cause())
    assert (slotted.x, slotted.hidden()) == (5, 6)
    missing: Any = trip(task_error(OddOSError("x.txt")).as_instanceof_cause())
    assert (missing.errno, missing.filename) == (errno.ENOENT, "x.txt")
    undecoded: Any = trip(task_error(UnicodeDecodeError("utf8", b"xy", 0, 1, "bad")).as_instanceof_cause())
    assert (undecoded.object, undecoded.reason) == (b"xy", "bad")


def test_names_of_the_cause_win_over_those_of_the_task_error() -> None:
    dual: Any = task_error(Clashing()).as_instanceof_cause()
    assert (dual.pid, dual.function_name, dual.ip) == ("my pid", "my function", "10.0.0.7")
    with pytest.raises(AttributeError):
        _ = dual.nonsense


def test_derived_classes_are_cached() -> None:
    first, second = (task_error(Plain("x")).as_instanceof_cause() for _ in range(2))
    assert type(first) is type(second)


def test_a_class_that_refuses_to_be_extended_arrives_as_the_cause_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = trip(task_error(Final("last"))).as_instanceof_cause()
    assert type(error) is RayTaskError
    assert isinstance(error.cause, Final)
    assert str(error.cause) == "last"
    assert "This exception is raised as RayTaskError only. You can use `ray_task_error.cause`" in caplog.text
    with pytest.raises(TypeError, match="no further"):
        error.make_dual_exception_instance()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with 3.11")
def test_an_exception_group_can_be_the_cause() -> None:
    group_class = builtins.ExceptionGroup  # type: ignore[attr-defined]
    group = group_class("several", [ValueError(1), KeyError(2)])
    dual: Any = trip(task_error(group).as_instanceof_cause())
    assert isinstance(dual, group_class)
    assert [type(exc) for exc in dual.exceptions] == [ValueError, KeyError]
    with pytest.raises(RayTaskError, match="several"):
        raise dual


def test_class_that_cannot_be_combined_falls_back_to_task_error() -> None:
    class Refusing(type):
        def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Refusing:
            if name.startswith("RayTaskError"):
                raise RuntimeError("no subclasses")
            return super().__new__(cls, name, bases, body)

    class Final(Exception, metaclass=Refusing):
        pass

    error = task_error(Final("end"))
    assert error.as_instanceof_cause() is error
    assert isinstance(error.cause, Final)


@pytest.mark.parametrize("exc", [SystemExit(3), GeneratorExit()])
def test_a_cause_that_would_end_the_caller_stays_a_task_error(exc: BaseException) -> None:
    error = trip(task_error(exc)).as_instanceof_cause()
    assert type(error) is RayTaskError
    assert type(error.cause) is type(exc)


@pytest.mark.parametrize("exc", [KeyboardInterrupt(), asyncio.CancelledError()])
def test_interrupts_become_task_cancelled_errors(exc: BaseException) -> None:
    error = trip(task_error(exc)).as_instanceof_cause()
    assert isinstance(error, TaskCancelledError)
    assert not isinstance(error, (KeyboardInterrupt, asyncio.CancelledError))


def test_plain_exception_and_ray_error_need_no_second_class() -> None:
    for cause in (Exception("x"), RayError("y")):
        error = task_error(cause)
        assert error.as_instanceof_cause() is error


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class FailsToLoad(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def test_a_cause_that_does_not_pickle_leaves_its_text() -> None:
    error = trip(task_error(Unpicklable())).as_instanceof_cause()
    assert type(error) is RayTaskError
    assert type(error.cause) is RayError
    assert "Unpicklable isn't serializable: cannot pickle '_thread.lock' object." in str(error.cause)
    assert "holds a lock" in str(error)


def test_a_cause_that_does_not_unpickle_leaves_its_text() -> None:
    error: Any = trip(task_error(FailsToLoad("holds a lock"))).as_instanceof_cause()
    assert isinstance(error, UnserializableException)
    assert isinstance(error, RayTaskError)
    assert "FailsToLoad: holds a lock" in str(error)


def test_a_cause_unknown_to_the_receiver_leaves_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = pickle.dumps(make_task_error("work", caught(Plain("far away")), 1, "ip"))
    monkeypatch.delattr(sys.modules[__name__], "Plain")
    error = pickle.loads(blob)
    assert isinstance(error.cause, UnserializableException)
    assert (error.function_name, error.pid) == ("work", 1)
    assert "far away" in str(error)


def test_exception_classes_of_the_script_are_pickled_by_value() -> None:
    class Local(Exception):
        pass

    dual = trip(task_error(Local("l")).as_instanceof_cause())
    assert isinstance(dual, Local)


def test_nested_errors_keep_the_first_cause_and_both_tracebacks() -> None:
    inner = trip(task_error(OddInit(3, "here"))).as_instanceof_cause()
    outer = trip(make_task_error("outer", caught(inner), 43, "10.0.0.8", dumps=cloudpickle.dumps))
    dual = outer.as_instanceof_cause()
    assert type(dual.cause) is OddInit
    assert isinstance(dual, OddInit)
    text = str(dual)
    assert text.index("ray::outer() (pid=43") < text.index("ray::work() (pid=42") < text.index("code 3 in here")


def test_a_task_error_around_a_task_error_keeps_the_first_cause() -> None:
    outer = RayTaskError("outer", "no traceback", task_error(Plain("p")), pid=5, ip="ip")
    assert isinstance(outer.as_instanceof_cause(), Plain)
    assert str(outer) == "ray::outer() (pid=5, ip=ip)\nno traceback"


def test_the_text_contains_chained_causes() -> None:
    def work() -> None:
        try:
            raise KeyError("missing")
        except KeyError as error:
            raise Plain("outer") from error

    with pytest.raises(Plain) as info:
        work()
    text = str(make_task_error("work", info.value, 1, "ip"))
    assert "KeyError: 'missing'" in text
    assert "direct cause" in text
    assert text.count("ray::work() (pid=1, ip=ip)") == 2
    assert "Traceback (most recent call last)" not in text


def test_frames_of_this_package_are_hidden() -> None:
    from hpcray.common.resources import to_units

    with pytest.raises(ValueError) as info:
        to_units({"CPU": -1})
    text = make_task_error("work", info.value, 1, "ip").traceback_str
    assert "test_errors.py" in text
    assert "resources.py" not in text
    assert "is negative" in text


def test_the_header_names_the_actor() -> None:
    error = trip(task_error(Plain("p"), actor=("<Counter>", "0a0b")))
    assert (error.actor_repr, error.actor_id) == ("<Counter>", "0a0b")
    assert str(error).startswith("ray::work() (pid=42, ip=10.0.0.7, actor_id=0a0b, repr=<Counter>)\n")
    died = trip(ActorDiedError.from_task_error(error))
    assert died.actor_init_failed
    assert died.actor_id == "0a0b"
    assert "Plain: p" in str(died)


def test_the_exceptions_module_exports_the_whole_error_tree() -> None:
    for name in exceptions.__all__:
        cls = getattr(exceptions, name)
        assert issubclass(cls, RayError), name
        assert cls.__module__ == "hpcray.exceptions"
        assert cls.__doc__


@pytest.mark.parametrize("name", exceptions.__all__)
def test_every_error_pickles_with_its_attributes(name: str) -> None:
    cls = getattr(exceptions, name)
    error: Any
    if cls is RayTaskError:
        error = task_error(Plain("p"))
    elif issubclass(cls, ObjectLostError):
        error = cls("abcd", owner_address="process 1.2", call_site="f.py:3")
    else:
        error = cls("some words")
    error.extra = 1
    for loaded in (trip(error), pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(loaded) is cls
        assert str(loaded) == str(error)
        assert {**vars(loaded), "cause": 0, "_cause_blob": 0} == {**vars(error), "cause": 0, "_cause_blob": 0}
    if not issubclass(cls, (RayTaskError, ObjectLostError, RayActorError)) or cls is ActorDiedError:
        assert "some words" in str(error)


def test_errors_take_the_keyword_names_of_ray() -> None:
    assert str(exceptions.NodeDiedError(message="node 3")) == "node 3"
    assert exceptions.TaskCancelledError(task_id="ab", error_message="why").task_id == "ab"
    assert RayActorError(actor_id="ab", error_msg="m", actor_init_failed=True).actor_init_failed
    assert ActorUnavailableError("busy", b"\x01").actor_id == "01"
    assert "name: x" in str(ActorDiedError("killed", actor_id="ab", name="x", pid=0))
    assert "pid" not in str(ActorDiedError("killed", actor_id="ab", name="x", pid=0))
    lost = ObjectReconstructionFailedError("ab", reason="PUT", reason_message="it was put")
    assert "[OBJECT_UNRECONSTRUCTABLE_PUT] it was put" in str(lost)


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("GetTimeoutError", TimeoutError),
        ("RayChannelTimeoutError", TimeoutError),
        ("ReferenceCountingAssertionError", AssertionError),
        ("ActorAlreadyExistsError", ValueError),
        ("ActorHandleNotFoundError", ValueError),
    ],
)
def test_errors_that_are_builtin_errors_too(name: str, builtin: type) -> None:
    assert issubclass(getattr(exceptions, name), builtin)


def test_what_wraps_user_code_is_shown_without_the_frames_of_ray_data() -> None:
    code = compile("def run(f):\n    f()\n", "/somewhere/ray/data/_internal/planner/plan.py", "exec")
    space: dict[str, Any] = {}
    exec(code, space)

    def user_function() -> None:
        raise KeyError("missing")

    def task() -> None:
        try:
            space["run"](user_function)
        except KeyError as error:
            raise UserCodeException("failed") from error

    with pytest.raises(UserCodeException) as info:
        task()
    text = str(make_task_error("_map_task", info.value, 1, "ip", proctitle="ray::Map(user_function)"))
    assert "in user_function" in text and 'raise KeyError("missing")' in text
    assert "ray/data/_internal" not in text
    assert text.splitlines()[0] == "ray::Map(user_function)() (pid=1, ip=ip)"
    assert text.count("ray::Map(user_function)()") == 2 and text.splitlines()[-1].endswith("UserCodeException: failed")
