"""Every error of hpcray, one tree under `RayError`. Users import them from `hpcray.exceptions`.

All of them pickle, subclasses with constructors of any shape included.
"""

from __future__ import annotations

import os
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from hpcray.base.failures import (
    AuthenticationError,
    LocalRayletDiedError,
    NodeDiedError,
    OutOfMemoryError,
    PeerLostError,
    RayCgraphCapacityExceeded,
    RayChannelError,
    RayChannelTimeoutError,
    RayDirectTransportError,
    RayError,
    RaySystemError,
    RpcError,
    RuntimeEnvSetupError,
    StartupError,
    StreamingGeneratorReplayInconsistentError,
    WorkerCrashedError,
)
from hpcray.base.object_errors import (
    GetTimeoutError,
    ObjectFetchTimedOutError,
    ObjectFreedError,
    ObjectLostError,
    ObjectReconstructionFailedError,
    ObjectReconstructionFailedLineageEvictedError,
    ObjectReconstructionFailedMaxAttemptsExceededError,
    ObjectStoreFullError,
    OufOfBandObjectRefSerializationException,
    OutOfDiskError,
    OwnerDiedError,
    PlasmaObjectNotAvailable,
    ReferenceCountingAssertionError,
)
from hpcray.base.portable import Portable, bare_instance, copy_builtin_attributes, remote_traceback
from hpcray.base.task_errors import (
    ActorAlreadyExistsError,
    ActorDiedError,
    ActorHandleNotFoundError,
    ActorPlacementGroupRemoved,
    ActorUnavailableError,
    ActorUnschedulableError,
    AsyncioActorExit,
    ObjectRefStreamEndOfStreamError,
    PendingCallsLimitExceeded,
    RayActorError,
    TaskCancelledError,
    TaskPlacementGroupRemoved,
    TaskUnschedulableError,
)

__all__ = [
    "ActorAlreadyExistsError",
    "ActorDiedError",
    "ActorHandleNotFoundError",
    "ActorLabel",
    "ActorPlacementGroupRemoved",
    "ActorUnavailableError",
    "ActorUnschedulableError",
    "AsyncioActorExit",
    "AuthenticationError",
    "CrossLanguageError",
    "GetTimeoutError",
    "LocalRayletDiedError",
    "NodeDiedError",
    "ObjectFetchTimedOutError",
    "ObjectFreedError",
    "ObjectLostError",
    "ObjectReconstructionFailedError",
    "ObjectReconstructionFailedLineageEvictedError",
    "ObjectReconstructionFailedMaxAttemptsExceededError",
    "ObjectRefStreamEndOfStreamError",
    "ObjectStoreFullError",
    "OufOfBandObjectRefSerializationException",
    "OutOfDiskError",
    "OutOfMemoryError",
    "OwnerDiedError",
    "PeerLostError",
    "PendingCallsLimitExceeded",
    "PlasmaObjectNotAvailable",
    "RayActorError",
    "RayCgraphCapacityExceeded",
    "RayChannelError",
    "RayChannelTimeoutError",
    "RayDirectTransportError",
    "RayError",
    "RaySystemError",
    "RayTaskError",
    "ReferenceCountingAssertionError",
    "RpcError",
    "RuntimeEnvSetupError",
    "StartupError",
    "StreamingGeneratorReplayInconsistentError",
    "TaskCancelledError",
    "TaskPlacementGroupRemoved",
    "TaskUnschedulableError",
    "UnserializableException",
    "UserCodeException",
    "WorkerCrashedError",
    "is_control_flow",
    "make_task_error",
    "root_cause",
]  # fmt: skip

_TRACEBACK_HEAD = "Traceback (most recent call last):"
_PUBLIC_MODULE = "hpcray.exceptions"


class UnserializableException(RayError):
    """Stands in for an exception that could not be pickled or unpickled; carries its text."""

    def __init__(self, original_stack_trace: str) -> None:
        super().__init__(original_stack_trace)
        self._original_stack_trace = original_stack_trace

    def __str__(self) -> str:
        return (
            "an exception could not be sent between processes; its text is below. "
            "hint: give its class a __reduce__ that keeps only picklable values\n"
            f"Original exception:\n{self._original_stack_trace}"
        )


class UserCodeException(RayError):
    """Wraps an exception of user code; the retry rules look at its cause."""


class CrossLanguageError(RayError):
    """An exception raised by a program in another language."""


class ActorLabel(NamedTuple):
    """Which actor a method ran on: its repr and its id in hex."""

    repr: str
    id: str


class RayTaskError(RayError):
    """A task or actor method raised; carries the cause and the remote traceback.

    Attributes:
        function_name: the task's function or method.
        traceback_str: the remote traceback, as text.
        cause: the exception that the task raised.
        proctitle, pid, ip: where it ran.
        actor_repr, actor_id: the actor it ran on, or None.
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
        self.proctitle = proctitle or f"hpcray::{function_name}"
        self.pid = pid or os.getpid()
        self.ip = ip or ""
        self.actor_repr = actor_repr
        self.actor_id = actor_id
        self._cause_blob: bytes | None = None
        super().__init__(function_name, traceback_str, cause, self.proctitle, self.pid, self.ip)

    def __init_subclass__(cls, **_: Any) -> None:
        """Hooks of a user's exception class must not see the classes that `as_instanceof_cause` derives from it."""

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
        if _TRACEBACK_HEAD not in lines:
            return "\n".join([head, *lines])
        return "\n".join(head if line == _TRACEBACK_HEAD else line for line in lines)

    def as_instanceof_cause(self) -> RayTaskError:
        """This error as an instance of both `RayTaskError` and the class of its cause.

        Returns:
            `self` where that cannot be: the class cannot be extended, or raising it would end the process or cancel
            a coroutine (SystemExit, KeyboardInterrupt, CancelledError).
        """
        cause = root_cause(self.cause)
        if issubclass(RayTaskError, type(cause)) or is_control_flow(cause):
            return self
        try:
            return _dual_instance(self, cause)
        except Exception:  # a user's class can refuse in any way; the error must still arrive
            return self


def make_task_error(
    function_name: str,
    exc: BaseException,
    pid: int,
    ip: str,
    actor: ActorLabel | tuple[str, str] | None = None,
    dumps: Callable[[Any], bytes] = pickle.dumps,
) -> RayTaskError:
    """Wrap what a task raised, so that it can travel.

    Args:
        function_name: of the function, or `Class.method`.
        exc: what was raised, with its traceback; of another task's error only the cause is kept, not a chain.
        pid: of the process that ran the task.
        ip: of its node.
        actor: repr and hex id of the actor it ran on.
        dumps: pickles the cause; a worker passes cloudpickle's, which also takes classes of the user's script.

    Returns:
        An error that pickles. A cause that does not is replaced by an `UnserializableException` with its text.
    """
    text = remote_traceback(exc)
    cause = root_cause(exc)
    if isinstance(cause, KeyboardInterrupt) or _is_asyncio_cancel(cause):
        cause = TaskCancelledError(error_message=f"{type(cause).__name__} in {function_name}")
    blob: bytes | None = None
    try:
        blob = dumps(Portable(cause))
        pickle.loads(blob)
    except Exception as error:  # pickling runs user code
        cause, blob = _stand_in(cause, error, text), None
    actor_repr, actor_id = actor or (None, None)
    failure = RayTaskError(function_name, text, cause, pid=pid, ip=ip, actor_repr=actor_repr, actor_id=actor_id)
    failure._cause_blob = blob
    return failure


def root_cause(exc: BaseException) -> BaseException:
    """The exception that user code raised, inside any number of task errors."""
    while isinstance(exc, RayTaskError) and exc.cause is not None:
        exc = exc.cause
    return exc


def is_control_flow(exc: BaseException) -> bool:
    """Whether raising `exc` would steer the interpreter or an event loop instead of reporting an error."""
    return isinstance(exc, (KeyboardInterrupt, SystemExit, GeneratorExit)) or _is_asyncio_cancel(exc)


def _is_asyncio_cancel(exc: BaseException) -> bool:
    # Not imported: asyncio costs 50 ms, and who raised its CancelledError has it loaded.
    asyncio = sys.modules.get("asyncio.exceptions")
    return asyncio is not None and isinstance(exc, asyncio.CancelledError)


def _stand_in(cause: BaseException, error: Exception, text: str) -> UnserializableException:
    name = f"{type(cause).__module__}.{type(cause).__qualname__}"
    return UnserializableException(f"{name} does not pickle ({type(error).__name__}: {error})\n{text}")


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
    failure = RayTaskError(fields["function_name"], fields["traceback_str"], cause)
    failure.__dict__.update(fields)
    failure.args = (*failure.args[:3], failure.proctitle, failure.pid, failure.ip)
    failure._cause_blob = blob
    return failure


# The derived class keeps its cause's class alive, never the other way round: an entry goes when both are unused.
_dual_classes: WeakValueDictionary[type, type[RayTaskError]] = WeakValueDictionary()


def _dual_instance(error: RayTaskError, cause: BaseException) -> RayTaskError:
    cause_cls = type(cause)
    cls = _dual_classes.get(cause_cls)
    if cls is None:
        name = f"RayTaskError({cause_cls.__name__})"
        cls = types.new_class(name, (RayTaskError, cause_cls), {}, lambda body: body.update(_DUAL_BODY))
        cls.__module__ = _PUBLIC_MODULE
        _dual_classes[cause_cls] = cls
    dual: RayTaskError = bare_instance(cls, cause.args)
    object.__setattr__(dual, "cause", cause)
    object.__setattr__(dual, "_task_error", error)
    copy_builtin_attributes(cause, dual)
    _set_args(dual, (cause,))
    return dual


def _dual_getattr(self: Any, name: str) -> Any:
    """Attributes of the cause first (its `pid` is the one the user means), then those of the task error."""
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
    "args": BaseException.__dict__["args"],  # a class of the user may have made `args` read-only
    "__getattr__": _dual_getattr,
    "__reduce__": _dual_reduce,
    "__str__": lambda self: str(self._task_error),
    "as_instanceof_cause": lambda self: self,
}
_set_args = BaseException.__dict__["args"].__set__

for _name in __all__:
    if isinstance(globals()[_name], type) and issubclass(globals()[_name], RayError):
        # Tracebacks then name the module that users import from.
        globals()[_name].__module__ = _PUBLIC_MODULE
