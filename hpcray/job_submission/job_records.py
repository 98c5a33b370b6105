"""The records of a submitted job: the request that submits it, and the details that `JobSubmissionClient` returns."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hpcray.common.labels import selector_problem
from hpcray.state.job_table import JobStatus

_NUMBER = (int, float)
# Field: its types, their name in errors, the types of values.
_TYPES: dict[str, tuple[Any, str, Any]] = {
    "entrypoint": (str, "a string", None),
    "submission_id": (str, "a string if provided", None),
    "runtime_env": (dict, "a dict", None),
    "metadata": (dict, "a dict", (str, "strings")),
    "entrypoint_num_cpus": (_NUMBER, "a number", None),
    "entrypoint_num_gpus": (_NUMBER, "a number", None),
    "entrypoint_memory": (int, "an integer", None),
    "entrypoint_resources": (dict, "a dict", (_NUMBER, "numbers")),
    "entrypoint_label_selector": (dict, "a dict", (str, "strings")),
}


@dataclass
class JobSubmitRequest:
    """A job to submit.

    Raises:
        TypeError: a field is of the wrong type.
    """

    entrypoint: str
    submission_id: str | None = None
    runtime_env: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    entrypoint_num_cpus: int | float | None = None
    entrypoint_num_gpus: int | float | None = None
    entrypoint_memory: int | None = None
    entrypoint_resources: dict[str, float] | None = None
    entrypoint_label_selector: dict[str, str] | None = None

    def __post_init__(self) -> None:
        for field, (kind, name, values) in _TYPES.items():
            value = getattr(self, field)
            if field != "entrypoint" and value is None:
                continue
            if not isinstance(value, kind):
                raise TypeError(f"{field} must be {name}, got {type(value)}")
            if isinstance(value, Mapping):
                _check_items(field, value, values)

    @property
    def has_place(self) -> bool:
        """True if the job says where, or with which resources, its entrypoint runs; else that is on the head."""
        return any((
            self.entrypoint_num_cpus, self.entrypoint_num_gpus, self.entrypoint_memory, self.entrypoint_resources,
            self.entrypoint_label_selector,
        ))  # fmt: skip

    def problem(self) -> str:
        """Return why the cluster refuses the job; "" if it does not."""
        selector = self.entrypoint_label_selector
        return (selector_problem(selector) or "") if selector else ""


def _check_items(field: str, value: Mapping[Any, Any], values: tuple[Any, str] | None) -> None:
    for key, item in value.items():
        if not isinstance(key, str):
            raise TypeError(f"{field} keys must be strings, got {type(key)}")
        if values is not None and not isinstance(item, values[0]):
            raise TypeError(f"{field} values must be {values[1]}, got {type(item)}")


# ------------------------------------------------------------ job details
# The records that `JobSubmissionClient` returns about a job.


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
