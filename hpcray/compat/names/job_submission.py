"""`ray.job_submission`: the client of Ray's job server, which hpcray lacks; hint: `hpcray.jobs.submit`."""

from __future__ import annotations

import enum
from typing import Any, NoReturn


def get_address_for_submission_client(address: str | None = None) -> NoReturn:
    """Refused.

    Raises:
        ConnectionError: always: hpcray has no job server.
    """
    raise ConnectionError(
        f"there is no job server to send jobs to (address {address!r}): hpcray has no HTTP server; "
        "hint: hpcray.jobs.submit(...) or `hpcray submit`"
    )


class JobStatus(str, enum.Enum):
    """States of a job of Ray's job server."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    def __str__(self) -> str:
        return self.value

    def is_terminal(self) -> bool:
        """Return True for the states of a job that has ended."""
        return self in (JobStatus.STOPPED, JobStatus.SUCCEEDED, JobStatus.FAILED)


class JobSubmissionClient:
    """The client of Ray's HTTP job server, which hpcray lacks; hint: `hpcray.jobs.submit`."""

    def __init__(self, address: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Always raises ConnectionError."""
        get_address_for_submission_client(address)
