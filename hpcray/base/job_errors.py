"""The errors of submitted jobs. Users import them from `hpcray.exceptions`."""

from __future__ import annotations

from hpcray.base.failures import RayError


class SubmitError(RayError):
    """The job was not submitted: an option is wrong, or a tool is missing or refused it. Nothing was started."""

    __module__ = "hpcray.exceptions"

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message


class JobError(RayError):
    """A submitted job ended without a result: cancelled, out of time, killed, or it never started.

    Attributes:
        state: how it ended, in Slurm's words (CANCELLED, TIMEOUT, FAILED ...).
    """

    __module__ = "hpcray.exceptions"

    def __init__(self, message: str = "", state: str = "FAILED") -> None:
        super().__init__(message, state)
        self.message = message
        self.state = state

    def __str__(self) -> str:
        return self.message
