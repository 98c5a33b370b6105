"""`ray.job_submission`: the words of Ray's HTTP job API, which hpcray does not have."""

from __future__ import annotations

import enum
from typing import Any

from hpcray.compat.names.dashboard import get_address_for_submission_client

__all__ = ["JobStatus", "JobSubmissionClient"]


class JobStatus(str, enum.Enum):
    """States of a job."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    def __str__(self) -> str:
        return self.value

    def is_terminal(self) -> bool:
        """Whether a job in this state has ended."""
        return self in (JobStatus.STOPPED, JobStatus.SUCCEEDED, JobStatus.FAILED)


class JobSubmissionClient:
    """Nobody answers: see `hpcray.cluster.submit`."""

    def __init__(self, address: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Raises ConnectionError."""
        get_address_for_submission_client(address)
