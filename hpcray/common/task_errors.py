"""Exceptions of user code on their way through the cluster: wrapped where they were raised, raised again by `get`."""

from __future__ import annotations

import os
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from hpcray.common.exceptions import (
    PUBLIC_MODULE,
    Portable,
    RayError,
    TaskCancelledError,
    bare_instance,
    copy_builtin_attributes,
    publish,
    remote_traceback,
)

_TRACEBACK_HEAD = "Traceback (most recent call last):"


class UnserializableException(RayError):
    """An exception that does not unpickle. Holds its text.

    Where hpcray can rebuild the exception without its constructor, the error is an instance of its class as well.
    """

    def __init__(self, original_stack_trace: str) -> None:
        super().__init__(original_stack_trace)
        self._original_stack_trace = original_stack_trace

    def __str__(self) -> str:
        return (
            "Failed to deserialize exception. Refer to https://docs.ray.io/en/latest/ray-core/objects/"
            "serialization.html#custom-serializers-for-exceptions for more information.\n"
            f"Original exception:\n{self._original_stack_trace}"
        )


class UserCodeException(RayError):
    """Wraps an exception of user code; the retry rules look at its cause."""


class CrossLanguageError(RayError):
    """An exception raised by a program in another language."""


class ActorLabel(NamedTuple):
    """The actor that a method ran on: its repr and its id in hex."""

    repr: str
    id: str


class RayTaskError(RayError):
    """A task or actor method raised an exception.

    Attributes:
        function_name: name of the function, or `Class.method`.
        traceback_str: the remote traceback, as text.
        cause: the exception that the task raised.
        proctitle, pid, ip: the process that ran the task, and the IP address of its node.
        actor_repr, actor_id: the actor that ran the method, or None.
    """

    def __init__(
        self,
        function_name: str,
        traceback_str: str,
        cause: BaseException,
        proctitle: str | None = None,
        pid: int | None = None,
        ip: str | None = None,
        actor_repr: str | None = None,
        actor_id: str | None = None,
    ) -> None:
        self.function_name = function_name
        self.traceback_str = traceback_str
        self.cause = cause
        self.proctitle = proctitle or f"ray::{function_name}"
        self.pid = pid or os.getpid()
        self.ip = ip or ""
        self.actor_repr = actor_repr
        self.actor_id = actor_id
        self._cause_blob: bytes | None = None
        self._user_blob: bytes | None = None
        self._unserializable = False
        super().__init__(function_name, traceback_str, cause, self.proctitle, self.pid, self.ip)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {name: value for name, value in self.__dict__.items() if name not in ("cause", "_cause_blob")}
        return _load_task_error, (fields, self._cause_blob or Portable(self.cause))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()

    def __str__(self) -> str:
        place = f"(pid={self.pid}"
        if self.ip:
            place += f", ip={self.ip}"
        if self.actor_repr:
            place += f", actor_id={self.actor_id}, repr={self.actor_repr}"
        head = f"{self.proctitle}() {place})"
        lines = self.traceback_str.strip().split("\n")
        if isinstance(self.cause, UserCodeException):
            lines = list(_without_frames_of_data(lines))
        shown = [line.removeprefix("hpc") if line.startswith(PUBLIC_MODULE) else line for line in lines]
        if _TRACEBACK_HEAD not in lines:
            return "\n".join([head, *shown])
        return "\n".join(head if line == _TRACEBACK_HEAD else line for line in shown)

    def retry_cause(self) -> BaseException:
        """Return what the retry rules look at: the cause; of a `UserCodeException`, what it was raised from."""
        if self._user_blob is not None:
            with suppress(Exception):  # unpickling runs user code
                found: BaseException = pickle.loads(self._user_blob)
                return found
        return self.cause

    def make_dual_exception_instance(self) -> RayTaskError:
        """Make an error that is an instance of both `RayTaskError` and the class of the cause.

        Raises:
            TypeError: the class of the cause cannot be extended. Another exception: it refuses in its own way.
        """
        return _dual_instance(self, root_cause(self.cause))

    def as_instanceof_cause(self) -> RayTaskError:
        """Make an error that is an instance of both `RayTaskError` and the class of the cause.

        Returns:
            `self` where the class cannot be extended (a warning is logged), or where raising the cause would end the
            process or cancel a coroutine (SystemExit, KeyboardInterrupt, CancelledError).
        """
        cause = root_cause(self.cause)
        if issubclass(RayTaskError, type(cause)) or is_control_flow(cause):
            return self
        try:
            return self.make_dual_exception_instance()
        except Exception as error:  # a user's class can refuse in any way; the error must still arrive
            import logging  # not for every process: 10 ms

            logging.getLogger("ray.exceptions").warning(
                "User exception type %s in RayTaskError can't be subclassed! This exception is raised as RayTaskError "
                "only. You can use `ray_task_error.cause` to access the user exception. Failure in subclassing: %s",
                type(cause), error,
            )  # fmt: skip
            return self


def _without_frames_of_data(lines: Iterable[str]) -> Iterator[str]:
    """A traceback without the frames of Ray Data's own code: what is left is the user's."""
    hidden = False
    for line in lines:
        if not line.startswith("    "):
            hidden = line.startswith("  File ") and "ray/data/_internal/" in line
        if not hidden:
            yield line


def make_task_error(
    function_name: str,
    exc: BaseException,
    pid: int,
    ip: str,
    actor: ActorLabel | tuple[str, str] | None = None,
    dumps: Callable[[Any], bytes] = pickle.dumps,
    proctitle: str | None = None,
) -> RayTaskError:
    """Wrap an exception that a task raised in a `RayTaskError` that can be sent to other processes.

    Args:
        function_name: name of the function, or `Class.method`.
        exc: the exception, with its traceback; of another task's error only the cause is kept, not the chain.
        pid: id of the process that ran the task.
        ip: address of its node.
        actor: repr and hex id of the actor that ran the method.
        dumps: pickles the cause; workers pass one that also takes classes of the user's script.
        proctitle: "ray::" and the task's name for people, where that is not `function_name`.

    Returns:
        An error that pickles. A `RayError` with its text replaces a cause that does not.
    """
    text = remote_traceback(exc)
    headless = text.removeprefix(f"{_TRACEBACK_HEAD}\n")
    if isinstance(exc, RayError) and headless.startswith(f"{PUBLIC_MODULE}."):  # the user's code did not begin
        return make_argument_error(function_name, getattr(exc, "_task_error", exc), pid, ip, actor, proctitle)
    cause = root_cause(exc)
    if isinstance(cause, KeyboardInterrupt) or _is_asyncio_cancel(cause):
        cause = TaskCancelledError(error_message=f"{type(cause).__name__} in {function_name}")
    blob: bytes | None = None
    unserializable = False
    try:
        blob = dumps(Portable(cause))
        plain = dumps(cause)
    except Exception as error:  # pickling runs user code
        name = f"{type(cause).__module__}.{type(cause).__name__}"
        cause = RayError(f"Exception {name} isn't serializable: {error}.\nOriginal exception details:\n{text}")
    else:
        if not _unpickles(blob):
            cause, blob, unserializable = UnserializableException(text), None, True
        elif not _unpickles(plain):  # by its class, all that Ray has
            unserializable = True
    actor_repr, actor_id = actor or (None, None)
    failure = RayTaskError(function_name, text, cause, proctitle, pid, ip, actor_repr, actor_id)
    failure._cause_blob, failure._unserializable = blob, unserializable
    if isinstance(cause, UserCodeException) and cause.__cause__ is not None:  # which is not pickled with it
        with suppress(Exception):
            failure._user_blob = dumps(Portable(cause.__cause__))
    return failure


def make_argument_error(
    function_name: str,
    error: BaseException,
    pid: int,
    ip: str,
    actor: ActorLabel | tuple[str, str] | None = None,
    proctitle: str | None = None,
) -> RayTaskError:
    """Make the error of a task that did not run, as one of its arguments is `error`. Its cause is that of `error`."""
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    what = "  At least one of the input arguments for this task could not be computed:"
    text = f"{_TRACEBACK_HEAD}\n{what}\n{name}: {error}"
    actor_repr, actor_id = actor or (None, None)
    cause = root_cause(error)
    failure = RayTaskError(function_name, text, cause, proctitle, pid, ip, actor_repr, actor_id)
    if isinstance(error, RayTaskError):
        failure._cause_blob, failure._unserializable = error._cause_blob, error._unserializable
    return failure


def _unpickles(blob: bytes) -> bool:
    try:
        pickle.loads(blob)
    except Exception:  # unpickling runs user code
        return False
    return True


def root_cause(exc: BaseException) -> BaseException:
    """Unwrap an exception from any number of task errors around it."""
    while isinstance(exc, RayTaskError) and exc.cause is not None:
        exc = exc.cause
    return exc


def happened_inside(exc: BaseException) -> bool:
    """True if user code of a task raised `exc`, whose class may be that of an actor's death or of a cancellation too.

    Such an error is about an actor or task that the user's code has asked, not about the task or actor itself.
    """
    return isinstance(exc, RayTaskError)


def is_control_flow(exc: BaseException) -> bool:
    """True if raising `exc` would stop the interpreter or cancel a coroutine instead of reporting an error."""
    return isinstance(exc, (KeyboardInterrupt, SystemExit, GeneratorExit)) or _is_asyncio_cancel(exc)


def _is_asyncio_cancel(exc: BaseException) -> bool:
    # Not imported: asyncio costs 50 ms, and a process that raised its CancelledError has loaded it.
    asyncio = sys.modules.get("asyncio.exceptions")
    return asyncio is not None and isinstance(exc, asyncio.CancelledError)


def _load_task_error(fields: dict[str, Any], cause: bytes | BaseException) -> RayTaskError:
    blob = None
    if isinstance(cause, bytes):
        blob = cause
        try:
            cause = pickle.loads(blob)
            if not isinstance(cause, BaseException):
                raise TypeError(f"it unpickled as {type(cause).__name__}")
        except Exception as error:  # unpickling runs user code
            reason = f"{type(error).__name__}: {error}"
            cause = UnserializableException(f"its cause does not unpickle here ({reason})\n{fields['traceback_str']}")
            fields = {**fields, "_unserializable": True}
    failure = RayTaskError(fields["function_name"], fields["traceback_str"], cause)
    failure.__dict__.update(fields)
    failure.args = (*failure.args[:3], failure.proctitle, failure.pid, failure.ip)
    failure._cause_blob = blob
    return failure


# A derived class keeps the class of its cause alive, never the other way round: entries go when both are unused.
_dual_classes: WeakValueDictionary[tuple[type, bool], type[RayTaskError]] = WeakValueDictionary()


def _dual_instance(error: RayTaskError, cause: BaseException) -> RayTaskError:
    cause_cls = type(cause)
    key = cause_cls, error._unserializable
    cls = _dual_classes.get(key)
    if cls is None:
        extra: tuple[type, ...] = ()
        body = _DUAL_BODY
        if error._unserializable:
            body = _UNSERIALIZABLE_BODY
            extra = () if issubclass(cause_cls, UnserializableException) else (UnserializableException,)
        name = f"RayTaskError({cause_cls.__name__})"
        cls = types.new_class(name, (RayTaskError, *extra, cause_cls), {}, lambda namespace: namespace.update(body))
        cls.__module__ = PUBLIC_MODULE
        _dual_classes[key] = cls
    dual: RayTaskError = bare_instance(cls, cause.args)
    object.__setattr__(dual, "cause", cause)
    object.__setattr__(dual, "_task_error", error)
    copy_builtin_attributes(cause, dual)
    _set_args(dual, (cause,))
    return dual


def _dual_getattr(self: Any, name: str) -> Any:
    """Look an attribute up on the cause first (`pid` is that of the user's exception), then on the task error."""
    own = object.__getattribute__(self, "__dict__")
    if (name.startswith("__") and name != "__notes__") or "_task_error" not in own:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
    try:
        return getattr(own["cause"], name)
    except AttributeError:
        return getattr(own["_task_error"], name)


def _dual_reduce(self: Any) -> tuple[Any, ...]:
    return RayTaskError.as_instanceof_cause, (self._task_error,)


_DUAL_BODY: dict[str, Any] = {
    "args": BaseException.__dict__["args"],  # the user's class may make `args` read-only
    "__getattr__": _dual_getattr,
    "__reduce__": _dual_reduce,
    "__str__": lambda self: str(self._task_error),
    "as_instanceof_cause": lambda self: self,
    "make_dual_exception_instance": lambda self: self,
}
_UNSERIALIZABLE_BODY = {
    **_DUAL_BODY,
    "__str__": lambda self: UnserializableException.__str__(self),
    "_original_stack_trace": property(lambda self: f"ray.exceptions.RayTaskError: {self._task_error}\n"),
}
_set_args = BaseException.__dict__["args"].__set__


publish(globals())
