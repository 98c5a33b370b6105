"""What the system reports: itself, its processes and nodes. `base.errors` has all errors."""

from __future__ import annotations

from typing import Any

from hpcray.base.portable import reduce_exception


class RayError(Exception):
    """Base of all errors that hpcray raises by itself."""

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_exception(self)


class MessageError(RayError):
    """An error that is one message. Only a base."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


# ---------------------------------------------------------------- start, stop, the system itself


class StartupError(MessageError):
    """The cluster did not come up: which rank, on which host, waiting for what."""


class PeerLostError(MessageError):
    """A process that this one was talking to is gone."""


class AuthenticationError(MessageError):
    """A peer did not know the session's secret."""


class RpcError(MessageError):
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


class WorkerCrashedError(MessageError):
    """The worker process died while it ran the task."""

    def __init__(self, message: str = "The worker died unexpectedly while executing this task.") -> None:
        super().__init__(message)


class LocalRayletDiedError(MessageError):
    """The raylet of this node died."""

    def __init__(self, message: str = "The raylet of this node died; the job cannot go on here.") -> None:
        super().__init__(message)


class NodeDiedError(MessageError):
    """The node is dead or cannot be reached."""


class OutOfMemoryError(MessageError):
    """The node ran low on memory and the task or actor was ended to free some."""


class RuntimeEnvSetupError(RayError):
    """The runtime environment of a task or actor could not be set up."""

    def __init__(self, error_message: str | None = None) -> None:
        super().__init__(error_message)
        self.error_message = error_message

    def __str__(self) -> str:
        return "\n".join(["Failed to set up runtime environment.", *filter(None, [self.error_message])])
