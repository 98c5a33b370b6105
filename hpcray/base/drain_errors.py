"""The errors of a job whose end is known or near. Users import them from `hpcray.exceptions`."""

from __future__ import annotations

from hpcray.base.failures import RayError


class JobDrainingError(RayError):
    """The job is about to end and starts nothing new: this task, call or actor was not run.

    Attributes:
        message: what was not started, why, and how many seconds were left.
    """

    __module__ = "hpcray.exceptions"

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class NotEnoughTimeError(RayError):
    """The work's `max_runtime` is longer than the time that the job has left; it was not started.

    Attributes:
        needed: seconds that it may take.
        left: seconds until the job begins to drain; not below 0.
    """

    __module__ = "hpcray.exceptions"

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
