"""Every error that hpcray raises, one tree under `RayError`. Users import them from `hpcray.exceptions`.

All of them pickle, subclasses with constructors of any shape included.
"""

from __future__ import annotations

import errno
import os
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

from hpcray.common.exception_pickling import (
    Portable,
    bare_instance,
    copy_builtin_attributes,
    reduce_exception,
    remote_traceback,
)

SPILL_FAILED = "Spilling to disk failed: "
"""Prefix of the object store's error text when its spill disk refuses a write."""

_FULL_DISK = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))
_TRACEBACK_HEAD = "Traceback (most recent call last):"
_PUBLIC_MODULE = "hpcray.exceptions"


class RayError(Exception):
    """Base class of every error that hpcray defines."""

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_exception(self)


class _MessageError(RayError):
    """Base class of errors that hold one message."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


# ---------------------------------------------------------------- start, stop, the system itself


class StartupError(_MessageError):
    """The cluster did not start. The message names the rank, its host, and the step that failed or timed out.

    Attributes:
        reported_by: who writes the message to standard error: "self": the process that raised this; "rank0": every
            rank fails for the same reason, and rank 0 reports it; "launcher": written already, and the launcher is
            ending all ranks.
    """

    def __init__(self, message: str = "", *, reported_by: Literal["self", "rank0", "launcher"] = "self") -> None:
        super().__init__(message)
        self.reported_by = reported_by


class PeerLostError(_MessageError):
    """A process that this process exchanges messages with has died."""


class AuthenticationError(_MessageError):
    """Ray's error for a rejected token, so that programs can catch it. hpcray has no tokens and never raises it."""


class RpcError(_MessageError):
    """A request to another process failed."""

    def __init__(self, message: str = "", rpc_code: int | None = None) -> None:
        super().__init__(message)
        self.rpc_code = rpc_code


class RaySystemError(RayError):
    """hpcray itself failed."""

    def __init__(self, client_exc: object, traceback_str: str | None = None) -> None:
        super().__init__(client_exc)
        self.client_exc = client_exc
        self.traceback_str = traceback_str

    def __str__(self) -> str:
        text = f"System error: {self.client_exc}"
        return f"{text}\ntraceback: {self.traceback_str}" if self.traceback_str else text


class StreamingGeneratorReplayInconsistentError(RaySystemError):
    """A generator task that was re-executed yielded a different number of values than the first time."""


class RayChannelError(RaySystemError):
    """A compiled graph's channel failed."""


class RayChannelTimeoutError(RayChannelError, TimeoutError):
    """An operation on a compiled graph's channel took too long."""


class RayCgraphCapacityExceeded(RaySystemError):
    """A compiled graph's channel is full."""


class RayDirectTransportError(RaySystemError):
    """A direct device-to-device transfer failed."""


# ---------------------------------------------------------------- processes and nodes


class WorkerCrashedError(_MessageError):
    """The worker process died while the task ran."""

    def __init__(self, message: str = "The worker died unexpectedly while executing this task.") -> None:
        super().__init__(message)


class LocalRayletDiedError(_MessageError):
    """The raylet of this node died."""

    def __init__(self, message: str = "The raylet of this node died; the job cannot go on here.") -> None:
        super().__init__(message)


class NodeDiedError(_MessageError):
    """The node is dead or unreachable."""


class OutOfMemoryError(_MessageError):
    """The memory monitor killed the task or actor because its node ran low on memory."""


class RuntimeEnvSetupError(RayError):
    """The runtime environment of a task or actor could not be set up."""

    def __init__(self, error_message: str | None = None) -> None:
        super().__init__(error_message)
        self.error_message = error_message

    def __str__(self) -> str:
        return "\n".join(["Failed to set up runtime environment.", *filter(None, [self.error_message])])


# -------------------------------------------------------------------- objects


class GetTimeoutError(RayError, TimeoutError):
    """The value did not arrive within the timeout of `get`."""


class PlasmaObjectNotAvailable(RayError):
    """The object did not reach the node's object store within the timeout."""


class OufOfBandObjectRefSerializationException(RayError):
    """An ObjectRef was pickled outside of task arguments, where its owner cannot count it."""


class ObjectStoreFullError(RayError):
    """The node's object store is full of objects that are still in use."""

    def __str__(self) -> str:
        text = super().__str__()
        if "hint:" in text:  # the store gave a more specific one
            return text
        return f"{text}\nhint: drop references that are not needed, or raise object_store_memory"


class OutOfDiskError(RayError):
    """The node's object store is full, and so is the disk that it spills to."""

    def __str__(self) -> str:
        return super().__str__() + "\nhint: free space on the node's local disk (`df`), or spill somewhere else"


class ObjectLostError(RayError):
    """No copy of the object is left.

    Attributes:
        object_ref_hex: id of the object, in hex.
        owner_address: the process that owns the object, where known.
        call_site: file and line that created the ObjectRef, where known.
        details: how the object was lost, where known.
    """

    WHY = "All copies of the object are lost."

    def __init__(self, object_ref_hex: str, owner_address: Any = None, call_site: str = "", details: str = "") -> None:
        super().__init__(object_ref_hex, owner_address, call_site, details)
        self.object_ref_hex = object_ref_hex
        self.owner_address = owner_address
        self.call_site = call_site
        self.details = details

    def _why(self) -> str:
        return f"{self.WHY} {self.details}".rstrip()

    def __str__(self) -> str:
        text = f"Failed to retrieve object {self.object_ref_hex}. {self._why()}"
        return f"{text}\nThe ObjectRef was created at: {self.call_site}" if self.call_site else text


class ObjectFetchTimedOutError(ObjectLostError):
    """The object could not be fetched in time."""

    WHY = "Fetching it took too long: no node could send a copy."


class ReferenceCountingAssertionError(ObjectLostError, AssertionError):
    """The object was freed while a reference to it was left; a bug of hpcray."""

    WHY = "It was freed while a reference to it was left. This is a bug of hpcray."


class ObjectFreedError(ObjectLostError):
    """The program freed the object with `internal.free`."""

    WHY = "It was freed by hand. hint: call `free` only when no reference is needed any more."


class OwnerDiedError(ObjectLostError):
    """The process that owned the object died."""

    WHY = "Its owner, the process that created the reference, is gone."

    def _why(self) -> str:
        why = super()._why()
        return f"{why} Owner: {self.owner_address}." if self.owner_address else why


class ObjectReconstructionFailedError(ObjectLostError):
    """The object is lost and cannot be reconstructed.

    Attributes:
        reason: name of the cause (for example "MAX_ATTEMPTS_EXCEEDED"), or None.
        reason_message: the cause as a sentence.
    """

    WHY = "It cannot be made again."

    def __init__(
        self,
        object_ref_hex: str,
        reason: Any = None,
        reason_message: str | None = None,
        owner_address: Any = None,
        call_site: str = "",
    ) -> None:
        super().__init__(object_ref_hex, owner_address, call_site)
        self.reason = reason
        self.reason_message = reason_message or self.WHY

    def _why(self) -> str:
        return f"[{self.reason or 'UNKNOWN'}] {self.reason_message}"


class ObjectReconstructionFailedMaxAttemptsExceededError(ObjectReconstructionFailedError):
    """The task that creates the object has no retries left."""

    WHY = "The task that makes it has used up its retries. hint: raise max_retries."


class ObjectReconstructionFailedLineageEvictedError(ObjectReconstructionFailedError):
    """The lineage needed to reconstruct the object was evicted."""

    WHY = "The description of the task that made it was dropped to save memory."


def store_full_error(reason: str) -> RayError:
    """Make the exception for the error text of a full object store.

    Args:
        reason: the error text of the store.

    Returns:
        OutOfDiskError where the text says that spilling failed because the disk is full, else ObjectStoreFullError.
    """
    _, _, why = reason.partition(SPILL_FAILED)
    return OutOfDiskError(reason) if why.startswith(_FULL_DISK) else ObjectStoreFullError(reason)


# -------------------------------------------------------------------- tasks and actors


class TaskCancelledError(RayError):
    """The task was cancelled."""

    def __init__(self, task_id: Any = None, error_message: str | None = None) -> None:
        super().__init__(task_id, error_message)
        self.task_id = task_id
        self.error_message = error_message

    def __str__(self) -> str:
        task = self.task_id.hex() if isinstance(self.task_id, bytes) else self.task_id
        text = f"Task: {task} was cancelled. " if task else "The task was cancelled. "
        return (text + (self.error_message or "")).rstrip()


class _UnschedulableError(RayError):
    WHAT = ""

    def __init__(self, error_message: str) -> None:
        super().__init__(error_message)
        self.error_message = error_message

    def __str__(self) -> str:
        return f"The {self.WHAT} is not schedulable: {self.error_message}"


class TaskUnschedulableError(_UnschedulableError):
    """No node can ever run the task."""

    WHAT = "task"


class ActorUnschedulableError(_UnschedulableError):
    """No node can ever host the actor."""

    WHAT = "actor"


class TaskPlacementGroupRemoved(_MessageError):
    """The placement group of the task was removed."""

    def __init__(self, message: str = "The placement group corresponding to this task has been removed.") -> None:
        super().__init__(message)


class ActorPlacementGroupRemoved(_MessageError):
    """The placement group of the actor was removed."""

    def __init__(self, message: str = "The placement group corresponding to this Actor has been removed.") -> None:
        super().__init__(message)


class RayActorError(RayError):
    """The actor could not finish the call: it died (`ActorDiedError`) or cannot be reached (`ActorUnavailableError`).

    Attributes:
        actor_id: id of the actor in hex, or None where it is not known.
        error_msg: the whole message.
    """

    BASE_ERROR_MSG = "The actor experienced an error before finishing this task."

    def __init__(
        self,
        actor_id: str | None = None,
        error_msg: str = BASE_ERROR_MSG,
        actor_init_failed: bool = False,
        preempted: bool = False,
    ) -> None:
        super().__init__(actor_id, error_msg, actor_init_failed, preempted)
        self.actor_id = actor_id
        self.error_msg = error_msg
        self._actor_init_failed = actor_init_failed
        self._preempted = preempted

    def __str__(self) -> str:
        return self.error_msg

    @property
    def preempted(self) -> bool:
        """True if the actor died because its node was preempted."""
        return self._preempted

    @property
    def actor_init_failed(self) -> bool:
        """True if the constructor of the actor raised."""
        return self._actor_init_failed


class ActorDiedError(RayActorError):
    """The actor is dead and will not restart.

    Args:
        cause: the `RayTaskError` of the constructor, or the reason as a sentence.
        actor_id: id of the actor in hex.
        preempted: True if the node of the actor was preempted.
        details: further facts (class_name, pid, name, namespace, ip), printed one per line.
    """

    BASE_ERROR_MSG = "The actor died unexpectedly before finishing this task."

    def __init__(
        self,
        cause: RayError | str | None = None,
        *,
        actor_id: str | None = None,
        preempted: bool = False,
        **details: object,
    ) -> None:
        if isinstance(cause, RayError):
            text = f"The actor died because of an error raised in its creation task, {cause}"
            super().__init__(actor_id or getattr(cause, "actor_id", None), text, True, preempted)
            return
        known = {"class_name": details.pop("class_name", None), "actor_id": actor_id, **details}
        lines = [f"\t{name}: {value}" for name, value in known.items() if value not in (None, "", 0)]
        text = "\n".join([self.BASE_ERROR_MSG, *lines, *([f"The actor is dead because {cause}"] if cause else [])])
        super().__init__(actor_id, text, False, preempted)

    @staticmethod
    def from_task_error(task_error: RayError) -> ActorDiedError:
        """Make the error of an actor whose constructor raised `task_error`."""
        return ActorDiedError(task_error)


class ActorUnavailableError(RayActorError):
    """The actor is unreachable now and may become reachable again."""

    def __init__(self, error_message: str, actor_id: bytes | str | None = None) -> None:
        ident = actor_id.hex() if isinstance(actor_id, bytes) else actor_id
        text = (
            f"The actor {ident} is unavailable: {error_message}. The task may or may not have been executed on the "
            "actor."
        )
        super().__init__(ident, text)


class _NamedActorError(ValueError, RayError):
    """Base class of name errors. Also a ValueError, for programs that catch that."""

    def __init__(self, error_message: str) -> None:
        super().__init__(error_message)
        self.error_message = error_message


class ActorAlreadyExistsError(_NamedActorError):
    """Another live actor has this name."""


class ActorHandleNotFoundError(_NamedActorError):
    """The handle belongs to an actor of another session."""


class AsyncioActorExit(RayError):
    """Raised inside an async actor by `exit_actor()`."""


class PendingCallsLimitExceeded(RayError):
    """The actor has `max_pending_calls` pending calls from this process."""


class ObjectRefStreamEndOfStreamError(RayError):
    """The stream of a generator task has ended."""


# -------------------------------------------------------------------- jobs


class SubmitError(_MessageError):
    """The job was not submitted: an option is invalid, or the submission tool is missing or failed. No job started."""


class JobError(RayError):
    """A submitted job ended without a result: cancelled, out of time, killed, or never started.

    Attributes:
        state: Slurm's name for the final state (CANCELLED, TIMEOUT, FAILED ...).
    """

    def __init__(self, message: str = "", state: str = "FAILED") -> None:
        super().__init__(message, state)
        self.message = message
        self.state = state

    def __str__(self) -> str:
        return self.message


class JobDrainingError(_MessageError):
    """The job is draining and starts no new work: this task, call or actor did not run.

    Attributes:
        message: the work that was refused, the reason, and the seconds that were left.
    """


class NotEnoughTimeError(RayError):
    """The `max_runtime` of the task or actor exceeds the time that the job has left; it was not started.

    Attributes:
        what: name of the task or actor.
        needed: its `max_runtime`, in seconds.
        left: seconds until the job begins to drain; at least 0.
    """

    def __init__(self, what: str, needed: float = 0.0, left: float = 0.0) -> None:
        super().__init__(what, needed, left)
        self.what = what
        self.needed = needed
        self.left = left

    def __str__(self) -> str:
        return (
            f"{self.what} may take {self.needed:g} s (max_runtime), but the job begins to drain in {self.left:.0f} s; "
            "it was not started\nhint: ask for more time (`--time`), give a smaller max_runtime, or run it in the next "
            "run of the job"
        )


# -------------------------------------------------------------------- exceptions of user code


class UnserializableException(RayError):
    """Replaces an exception that does not pickle or unpickle, and holds its text."""

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
        self.proctitle = proctitle or f"hpcray::{function_name}"
        self.pid = pid or os.getpid()
        self.ip = ip or ""
        self.actor_repr = actor_repr
        self.actor_id = actor_id
        self._cause_blob: bytes | None = None
        super().__init__(function_name, traceback_str, cause, self.proctitle, self.pid, self.ip)

    def __init_subclass__(cls, **_: Any) -> None:
        """Hide the classes that `as_instanceof_cause` derives from the `__init_subclass__` of a user's exception."""

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
        """Make an error that is an instance of both `RayTaskError` and the class of the cause.

        Returns:
            `self` where the class cannot be extended, or where raising the cause would end the process or cancel a
            coroutine (SystemExit, KeyboardInterrupt, CancelledError).
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
    """Wrap an exception that a task raised in a `RayTaskError` that can be sent to other processes.

    Args:
        function_name: name of the function, or `Class.method`.
        exc: the exception, with its traceback; of another task's error only the cause is kept, not the chain.
        pid: id of the process that ran the task.
        ip: address of its node.
        actor: repr and hex id of the actor that ran the method.
        dumps: pickles the cause; workers pass cloudpickle's, which also takes classes of the user's script.

    Returns:
        An error that pickles. An `UnserializableException` with its text replaces a cause that does not.
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
    """Unwrap an exception from any number of task errors around it."""
    while isinstance(exc, RayTaskError) and exc.cause is not None:
        exc = exc.cause
    return exc


def is_control_flow(exc: BaseException) -> bool:
    """True if raising `exc` would stop the interpreter or cancel a coroutine instead of reporting an error."""
    return isinstance(exc, (KeyboardInterrupt, SystemExit, GeneratorExit)) or _is_asyncio_cancel(exc)


def _is_asyncio_cancel(exc: BaseException) -> bool:
    # Not imported: asyncio costs 50 ms, and a process that raised its CancelledError has loaded it.
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


# A derived class keeps the class of its cause alive, never the other way round: entries go when both are unused.
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
}
_set_args = BaseException.__dict__["args"].__set__


for _value in list(globals().values()):
    # Tracebacks and pickles name the module that users import from.
    if isinstance(_value, type) and issubclass(_value, RayError) and not _value.__name__.startswith("_"):
        _value.__module__ = _PUBLIC_MODULE
