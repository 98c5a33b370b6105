"""The records that `JobSubmissionClient` returns about a job."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass
from typing import Any

from hpcray.state.job_table import JobStatus

_Fields = dict[str, Any]


class JobType(str, enum.Enum):
    """The way a job was started: submitted, or by a program that called `init()`."""

    SUBMISSION = "SUBMISSION"
    DRIVER = "DRIVER"


class _Model:
    """The methods of pydantic's models that programs call on the records below."""

    def dict(self) -> _Fields:
        """Return the fields, those of records in them too."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    model_dump = dict

    def json(self) -> str:
        """Return the fields as JSON."""
        return json.dumps(self.dict())

    model_dump_json = json


@dataclass
class DriverInfo(_Model):
    """A driver: the id of its job, its address, and its pid as a text."""

    id: str
    node_ip_address: str
    pid: str


@dataclass(kw_only=True)
class JobDetails(_Model):
    """A job and its driver.

    Attributes:
        job_id: id of the driver's job; None before there is a driver.
        submission_id: of a submitted job.
        driver_info: of a submitted job the driver that it has started last.
        start_time, end_time: Unix times in ms.
        driver_agent_http_address: always None, as there are no agents.
        driver_node_id: the node on which the entrypoint runs or ran.
        driver_exit_code: of the entrypoint.
    """

    type: JobType
    job_id: str | None = None
    submission_id: str | None = None
    driver_info: DriverInfo | None = None
    status: JobStatus
    entrypoint: str
    message: str | None = None
    error_type: str | None = None
    start_time: int | None = None
    end_time: int | None = None
    metadata: dict[str, str] | None = None
    runtime_env: dict[str, Any] | None = None
    driver_agent_http_address: str | None = None
    driver_node_id: str | None = None
    driver_exit_code: int | None = None

    def __post_init__(self) -> None:
        self.type, self.status = JobType(self.type), JobStatus(self.status)
        driver: Any = self.driver_info
        if isinstance(driver, dict):
            self.driver_info = DriverInfo(**driver)
