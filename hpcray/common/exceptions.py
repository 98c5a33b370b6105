"""Every error that hpcray raises, one tree under `RayError`. Users import them from `hpcray.exceptions`.

All of them pickle, subclasses with constructors of any shape included.
"""

from __future__ import annotations

import copyreg
import errno
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Literal

# ------------------------------------------------------------ exception pickling
# Pickling of exceptions without their constructors, and tracebacks as text.
#
# Pickle rebuilds an exception by calling its class with `args`, which fails for every class whose `__init__` takes
# something else, and quietly changes the message of some. Here the object is rebuilt without calling `__init__`.

_HEAP_TYPE = 1 << 9
_PICKLE_HOOKS = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


CUSTOM: dict[type, Callable[[Any], Any]] = {}
"""Serializers of the user by class (`register_serializer`): each gives what `__reduce__` returns for an instance."""


class Portable:
    """Pickles as the exception it holds; unpickling does not call the `__init__` of the exception.

    Exception classes that define a pickle hook are pickled by that hook.
    """

    __slots__ = ("_exc",)

    def __init__(self, exc: BaseException) -> None:
        self._exc = exc

    def __reduce__(self) -> tuple[Any, ...]:
        cls = type(self._exc)
        if (
            cls in copyreg.dispatch_table
            or cls in CUSTOM
            or any(_is_heap_type(base) and _has_hook(base) for base in cls.__mro__)
        ):
            return _itself, (self._exc,)
        return reduce_exception(self._exc)


def reduce_exception(exc: BaseException) -> tuple[Any, ...]:
    """Make a pickle `__reduce__` value for `exc`: class, args, attributes and slots."""
    reduced = BaseException.__reduce__(exc) if _has_own_reduce(exc) else exc.__reduce__()
    assert isinstance(reduced, tuple)
    state = dict(reduced[2]) if len(reduced) > 2 and reduced[2] else {}
    for base in type(exc).__mro__:
        if _is_heap_type(base):
            state.update(_slots(base, exc))
    return revive, (type(exc), reduced[1], state)


def revive(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """Rebuild an exception from the parts of `reduce_exception` without calling a user's `__init__` or `__new__`."""
    exc: BaseException = bare_instance(cls, args)
    for name, value in state.items():
        object.__setattr__(exc, name, value)
    return exc


def bare_instance(cls: type[BaseException], args: tuple[Any, ...]) -> Any:
    """Make an instance of `cls` with the constructor of the built-in exception class that it extends.

    Raises:
        TypeError: no built-in base takes these arguments.
    """
    for base in cls.__mro__:
        if _is_heap_type(base) or not issubclass(base, BaseException):
            continue
        try:
            exc = base.__new__(cls, *args)
        except (TypeError, ValueError):
            continue
        with suppress(TypeError):
            base.__init__(exc, *args)
        return exc
    raise TypeError(f"no built-in base of {cls.__qualname__} can make an instance from {len(args)} args")


def copy_builtin_attributes(source: BaseException, target: BaseException) -> None:
    """Copy the attributes that built-in exceptions store outside `__dict__` (errno, filename, code, value...)."""
    for base in type(source).__mro__:
        if _is_heap_type(base) or base in (object, BaseException, Exception):
            continue
        for name in vars(base):
            if not name.startswith("__"):
                with suppress(AttributeError, TypeError):
                    object.__setattr__(target, name, getattr(source, name))


def remote_traceback(exc: BaseException) -> str:
    """Format the traceback of `exc`, causes and contexts included, without the frames of this package."""
    formatted = traceback.TracebackException.from_exception(exc)
    _drop_own_frames(formatted, set())
    return "".join(formatted.format())


def _drop_own_frames(formatted: traceback.TracebackException, seen: set[int]) -> None:
    if id(formatted) in seen:
        return
    seen.add(id(formatted))
    formatted.stack[:] = [frame for frame in formatted.stack if not frame.filename.startswith(_PACKAGE)]
    for linked in (formatted.__cause__, formatted.__context__, *(getattr(formatted, "exceptions", None) or ())):
        if linked is not None:
            _drop_own_frames(linked, seen)


def _itself(exc: BaseException) -> BaseException:
    return exc


def _is_heap_type(cls: type) -> bool:
    """True for a class that a `class` statement created, False for a built-in one."""
    return bool(cls.__flags__ & _HEAP_TYPE)


def _has_hook(cls: type) -> bool:
    return any(hook in vars(cls) for hook in _PICKLE_HOOKS)


def _has_own_reduce(exc: BaseException) -> bool:
    """True if `exc.__reduce__` is a Python function, as in hpcray's errors, where it calls `reduce_exception`."""
    return any(_is_heap_type(base) and "__reduce__" in vars(base) for base in type(exc).__mro__)


def _slots(cls: type, exc: BaseException) -> dict[str, Any]:
    slots = vars(cls).get("__slots__", ())
    found = {}
    for slot in (slots,) if isinstance(slots, str) else slots:
        if slot.startswith("__"):
            name = slot if slot.endswith("__") else f"_{cls.__name__.lstrip('_')}{slot}"
        else:
            name = slot
        if name not in ("__dict__", "__weakref__"):
            with suppress(AttributeError):
                found[name] = object.__getattribute__(exc, name)
    return found


# ------------------------------------------------------------ exceptions

SPILL_FAILED = "Spilling to disk failed: "
"""Prefix of the object store's error text when its spill disk refuses a write."""

_FULL_DISK = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))
PUBLIC_MODULE = "hpcray.exceptions"
"""Module that tracebacks and pickles name: the one that users import from."""


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

    def __str__(self) -> str:
        return (
            f"{self.message}. Note: RAY_AUTH_MODE is currently 'disabled' (not 'token'). For tokens in Ray see "
            "https://docs.ray.io/en/latest/ray-security/token-auth.html"
        )


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


class HangError(RayError):
    """A wait that could never end, in a job that runs with the option --end-hangs.

    It is raised in one waiting call, that which has closed a circle of waits, say; the others get it as the error of
    the task or call that they wait for.

    Attributes:
        chain: who waits for whom, and where in the source, a line each.
    """

    def __init__(self, message: str = "These waits can never end.", chain: Iterable[str] = ()) -> None:
        self.message, self.chain = message, list(chain)
        super().__init__(message, self.chain)

    def __str__(self) -> str:
        hint = "hint: docs/how-to/hangs.md; without the option --end-hangs they would have waited for ever"
        return "\n".join([self.message, *(f"  {line}" for line in self.chain), hint])


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

    WHY = "All copies of {} have been lost."

    def __init__(self, object_ref_hex: str, owner_address: Any = None, call_site: str = "", details: str = "") -> None:
        super().__init__(object_ref_hex, owner_address, call_site, details)
        self.object_ref_hex = object_ref_hex
        self.owner_address = owner_address
        self.call_site = call_site
        self.details = details

    def _why(self) -> str:
        details = f" ({self.details})" if self.details else ""
        return f"{self.WHY.format(self.object_ref_hex)}{details}"

    def __str__(self) -> str:
        site = (
            f"The ObjectRef was created at: {self.call_site}"
            if self.call_site
            else "To see where this ObjectRef was created, set the variable RAY_record_ref_creation_sites=1."
        )
        return f"Failed to retrieve object {self.object_ref_hex}. {site}\n\n{self._why()}"


class ObjectFetchTimedOutError(ObjectLostError):
    """The object could not be fetched in time."""

    WHY = "Fetch for object {} timed out because no locations were found for the object: no node could send a copy."


class ReferenceCountingAssertionError(ObjectLostError, AssertionError):
    """The object was freed while a reference to it was left; a bug of hpcray."""

    WHY = (
        "The object has already been deleted by the reference counting protocol, while a reference to it was left. "
        "This should not happen: it is a bug of hpcray."
    )


class ObjectFreedError(ObjectLostError):
    """The program freed the object with `internal.free`."""

    WHY = (
        "The object was manually freed using the internal `free` call. hint: call it only when no reference is needed "
        "any more."
    )


class OwnerDiedError(ObjectLostError):
    """The process that owned the object died."""

    WHY = "The object's owner has exited: the process that first created the ObjectRef, by `.remote()` or `put()`."

    def _why(self) -> str:
        why = super()._why()
        return f"{why} Owner: {self.owner_address}." if self.owner_address else why


_UNRECONSTRUCTABLE = {
    reason: f"OBJECT_UNRECONSTRUCTABLE_{reason}"
    for reason in (
        "PUT", "RETRIES_DISABLED", "MAX_ATTEMPTS_EXCEEDED", "LINEAGE_EVICTED", "LINEAGE_DISABLED", "TASK_CANCELLED",
    )
}  # fmt: skip
"""Ray's names of the reasons."""


class ObjectReconstructionFailedError(ObjectLostError):
    """The object is lost and cannot be reconstructed.

    Attributes:
        reason: name of the cause (for example "MAX_ATTEMPTS_EXCEEDED"), or None.
        reason_message: the cause as a sentence.
    """

    WHY = "The object cannot be reconstructed."

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
        return f"[{_UNRECONSTRUCTABLE.get(self.reason, self.reason) or 'UNKNOWN'}] {self.reason_message}"


class ObjectReconstructionFailedMaxAttemptsExceededError(ObjectReconstructionFailedError):
    """The task that creates the object has no retries left."""

    WHY = (
        "The object cannot be reconstructed because the maximum number of task retries has been exceeded. hint: raise "
        "max_retries."
    )


class ObjectReconstructionFailedLineageEvictedError(ObjectReconstructionFailedError):
    """The lineage needed to reconstruct the object was evicted."""

    WHY = "The object cannot be reconstructed because its lineage has been evicted to reduce memory pressure."


def did_you_mean(unknown: Iterable[str], known: Iterable[str]) -> str:
    """Return " Did you mean ...?" with the known names that resemble the unknown ones; "" where none does."""
    from difflib import get_close_matches  # few programs have a slip of the pen

    near = [name for word in unknown for name in get_close_matches(word, list(known), 1)]
    return f" Did you mean {', '.join(near)}?" if near else ""


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
    """The task was cancelled.

    Attributes:
        task_id: its `TaskID`, where known.
    """

    def __init__(self, task_id: Any = None, error_message: str | None = None) -> None:
        super().__init__(task_id, error_message)
        self.task_id = task_id
        self.error_message = error_message

    def __str__(self) -> str:
        text = f"Task: {self.task_id} was cancelled. " if self.task_id else "The task was cancelled. "
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


class GroupAlreadyExistsError(RaySystemError, ValueError):
    """The name of a placement group is taken: Ray's class, and that of a wrong argument, as for actors."""


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
        actor_init_failed: True if the constructor of the actor raised.
        preempted: True if the actor died because its node was preempted.
    """

    BASE_ERROR_MSG = "The actor experienced an error before finishing this task."

    def __init__(
        self,
        actor_id: str | None = None,
        error_msg: str = BASE_ERROR_MSG,
        actor_init_failed: bool = False,
        preempted: bool = False,
    ) -> None:
        super().__init__(error_msg)
        self.actor_id = actor_id
        self.error_msg = error_msg
        self.actor_init_failed = actor_init_failed
        self.preempted = preempted

    def __str__(self) -> str:
        return self.error_msg


_NODE_DIED = "its node has died:"
"""Beginning of the reason that the GCS gives for the end of an actor whose node has gone."""


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
        # Ray's words, which programs look for.
        rest = f"{cause or ''}"
        if rest.startswith(_NODE_DIED):
            rest = f"The actor died because its node has died.{rest.removeprefix(_NODE_DIED)}"
        elif rest:
            rest = f"The actor is dead because {rest}"
        text = "\n".join([self.BASE_ERROR_MSG, *lines, *([rest] if rest else [])])
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


def publish(names: dict[str, Any]) -> None:
    """Give the public errors among these names the module that users import from."""
    for value in list(names.values()):
        if isinstance(value, type) and issubclass(value, RayError) and not value.__name__.startswith("_"):
            value.__module__ = PUBLIC_MODULE


publish(globals())


# ------------------------------------------------------------ deprecation
# The warning that a name or a value of an option will be removed.


class RayDeprecationWarning(DeprecationWarning):
    """Warning that a name will be removed."""


if not sys.warnoptions:
    # Python hides deprecations outside of __main__; one of these is shown once for each module that uses the name.
    warnings.filterwarnings("module", category=RayDeprecationWarning)
