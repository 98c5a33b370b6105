"""What the system reports: processes, nodes, objects and resources that failed. `base.errors` has them all."""

from __future__ import annotations

from typing import Any

from hpcray.base.portable import reduce_exception


class RayError(Exception):
    """Base of all errors that hpcray raises by itself."""

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_exception(self)


class _MessageError(RayError):
    """An error that is one message."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


# ---------------------------------------------------------------- start, stop, the system itself


class StartupError(_MessageError):
    """The cluster did not come up: which rank, on which host, waiting for what."""


class PeerLostError(_MessageError):
    """A process that this one was talking to is gone."""


class AuthenticationError(_MessageError):
    """A peer did not know the session's secret."""


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
    """A generator task that ran again yielded another number of values than the first time."""


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
    """The worker process died while it ran the task."""

    def __init__(self, message: str = "The worker died unexpectedly while executing this task.") -> None:
        super().__init__(message)


class LocalRayletDiedError(_MessageError):
    """The raylet of this node died."""

    def __init__(self, message: str = "The raylet of this node died; the job cannot go on here.") -> None:
        super().__init__(message)


class NodeDiedError(_MessageError):
    """The node is dead or cannot be reached."""


class OutOfMemoryError(_MessageError):
    """The node ran low on memory and the task or actor was ended to free some."""


class RuntimeEnvSetupError(RayError):
    """The runtime environment of a task or actor could not be set up."""

    def __init__(self, error_message: str | None = None) -> None:
        super().__init__(error_message)
        self.error_message = error_message

    def __str__(self) -> str:
        return "\n".join(["Failed to set up runtime environment.", *filter(None, [self.error_message])])


# ---------------------------------------------------------------- tasks and actors


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
        actor_id: in hex, or None where it is not known.
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
        """Whether the actor died because its node was taken away."""
        return self._preempted

    @property
    def actor_init_failed(self) -> bool:
        """Whether the actor's constructor failed."""
        return self._actor_init_failed


class ActorDiedError(RayActorError):
    """The actor is dead, and stays dead.

    Args:
        cause: the `RayTaskError` of its constructor, or the reason in words.
        actor_id: in hex.
        details: what else is known (class_name, pid, name, namespace, ip), printed one per line.
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
        known = {"actor_id": actor_id, **details}
        lines = [f"\t{name}: {value}" for name, value in known.items() if value not in (None, "", 0)]
        text = "\n".join([self.BASE_ERROR_MSG, *lines, *([cause] if cause else [])])
        super().__init__(actor_id, text, False, preempted)

    @staticmethod
    def from_task_error(task_error: RayError) -> ActorDiedError:
        """The actor's constructor raised `task_error`."""
        return ActorDiedError(task_error)


class ActorUnavailableError(RayActorError):
    """The actor cannot be reached now, but may be again later."""

    def __init__(self, error_message: str, actor_id: bytes | str | None = None) -> None:
        ident = actor_id.hex() if isinstance(actor_id, bytes) else actor_id
        text = f"The actor {ident} is unavailable: {error_message}. The task may or may not have been executed on it."
        super().__init__(ident, text)


class _NamedActorError(ValueError, RayError):
    """Also a ValueError, as it was before it had a class of its own."""

    def __init__(self, error_message: str) -> None:
        super().__init__(error_message)
        self.error_message = error_message


class ActorAlreadyExistsError(_NamedActorError):
    """The actor name is taken."""


class ActorHandleNotFoundError(_NamedActorError):
    """The handle belongs to an actor that this session does not know."""


class AsyncioActorExit(RayError):
    """An async actor leaves through `exit_actor()`."""


class PendingCallsLimitExceeded(RayError):
    """More calls wait for the actor than `max_pending_calls` allows."""


class ObjectRefStreamEndOfStreamError(RayError):
    """A generator task has no more values."""


# ---------------------------------------------------------------- objects


class GetTimeoutError(RayError, TimeoutError):
    """The value was not there within the timeout."""


class PlasmaObjectNotAvailable(RayError):
    """The object was not in the node store within the timeout."""


class OufOfBandObjectRefSerializationException(RayError):
    """An ObjectRef was pickled outside of task arguments, where its owner cannot count it."""


class ObjectStoreFullError(RayError):
    """The node store is full of objects that are still in use."""

    def __str__(self) -> str:
        text = super().__str__()
        if "hint:" in text:  # the store knows more
            return text
        return f"{text}\nhint: drop references that are not needed, or raise object_store_memory"


class OutOfDiskError(RayError):
    """The node store is full and so is the disk it spills to."""

    def __str__(self) -> str:
        return super().__str__() + "\nhint: free space on the node's local disk (`df`), or spill somewhere else"


class ObjectLostError(RayError):
    """No copy of the object is left.

    Attributes:
        object_ref_hex: the object's id.
        owner_address: the owner's process, where known.
        call_site: where the reference was made, where known.
    """

    WHY = "All copies of the object are lost."

    def __init__(self, object_ref_hex: str, owner_address: Any = None, call_site: str = "") -> None:
        super().__init__(object_ref_hex, owner_address, call_site)
        self.object_ref_hex = object_ref_hex
        self.owner_address = owner_address
        self.call_site = call_site

    def _why(self) -> str:
        return self.WHY

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
    """The object was freed by hand."""

    WHY = "It was freed by hand. hint: call `free` only when no reference is needed any more."


class OwnerDiedError(ObjectLostError):
    """The process that owned the object is gone."""

    WHY = "Its owner, the process that created the reference, is gone."

    def _why(self) -> str:
        return f"{self.WHY} Owner: {self.owner_address}." if self.owner_address else self.WHY


class ObjectReconstructionFailedError(ObjectLostError):
    """The object is lost and cannot be made again.

    Attributes:
        reason: why, as a name (for example "MAX_ATTEMPTS_EXCEEDED"), or None.
        reason_message: why, in words.
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
    """The task that makes the object has no retries left."""

    WHY = "The task that makes it has used up its retries. hint: raise max_retries."


class ObjectReconstructionFailedLineageEvictedError(ObjectReconstructionFailedError):
    """What would make the object again is forgotten."""

    WHY = "The description of the task that made it was dropped to save memory."
