"""What the system reports of tasks and actors. `base.errors` has all errors."""

from __future__ import annotations

from typing import Any

from hpcray.base.failures import MessageError, RayError


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


class TaskPlacementGroupRemoved(MessageError):
    """The placement group of the task was removed."""

    def __init__(self, message: str = "The placement group corresponding to this task has been removed.") -> None:
        super().__init__(message)


class ActorPlacementGroupRemoved(MessageError):
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
        known = {"class_name": details.pop("class_name", None), "actor_id": actor_id, **details}
        lines = [f"\t{name}: {value}" for name, value in known.items() if value not in (None, "", 0)]
        text = "\n".join([self.BASE_ERROR_MSG, *lines, *([f"The actor is dead because {cause}"] if cause else [])])
        super().__init__(actor_id, text, False, preempted)

    @staticmethod
    def from_task_error(task_error: RayError) -> ActorDiedError:
        """The actor's constructor raised `task_error`."""
        return ActorDiedError(task_error)


class ActorUnavailableError(RayActorError):
    """The actor cannot be reached now, but may be again later."""

    def __init__(self, error_message: str, actor_id: bytes | str | None = None) -> None:
        ident = actor_id.hex() if isinstance(actor_id, bytes) else actor_id
        text = (
            f"The actor {ident} is unavailable: {error_message}. The task may or may not have been executed on the "
            "actor."
        )
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
