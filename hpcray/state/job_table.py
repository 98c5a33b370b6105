"""Submitted jobs, as the key-value store of the cluster has them, and what became of those whose supervisor is gone."""

from __future__ import annotations

import enum
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpcray.common.job_names import (
    DRIVER_PREFIX,
    INFO_PREFIX,
    JOB_ACTOR_NAME_TEMPLATE,
    KV_NAMESPACE,
    PACKAGE_PREFIX,
    SUPERVISOR_ACTOR_RAY_NAMESPACE,
    job_key,
)
from hpcray.runtime.core_worker.core_worker import CoreWorker

START_TIMEOUT = "RAY_JOB_START_TIMEOUT_SECONDS"
"""Variable: seconds that a job may be PENDING."""
DEFAULT_START_TIMEOUT = 900.0


class JobStatus(str, enum.Enum):
    """States of a submitted job."""

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


class JobErrorType(str, enum.Enum):
    """The reason why a job has failed."""

    RUNTIME_ENV_SETUP_FAILURE = "RUNTIME_ENV_SETUP_FAILURE"
    JOB_SUPERVISOR_ACTOR_START_TIMEOUT = "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"
    JOB_SUPERVISOR_ACTOR_START_FAILURE = "JOB_SUPERVISOR_ACTOR_START_FAILURE"
    JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE = "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE"
    JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE = "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE"
    JOB_SUPERVISOR_ACTOR_DIED = "JOB_SUPERVISOR_ACTOR_DIED"
    JOB_ENTRYPOINT_COMMAND_START_ERROR = "JOB_ENTRYPOINT_COMMAND_START_ERROR"
    JOB_ENTRYPOINT_COMMAND_ERROR = "JOB_ENTRYPOINT_COMMAND_ERROR"


_MESSAGES = {
    JobStatus.PENDING: "Job has not started yet.",
    JobStatus.RUNNING: "Job is currently running.",
    JobStatus.STOPPED: "Job was intentionally stopped.",
    JobStatus.SUCCEEDED: "Job finished successfully.",
    JobStatus.FAILED: "Job failed.",
}


@dataclass
class JobInfo:
    """A submitted job.

    Attributes:
        message: the status in words; made where it is None.
        start_time, end_time: Unix times in ms; the first is that of the submission.
        driver_agent_http_address: always None, as there are no agents.
        driver_node_id: the node on which the entrypoint runs or ran.
        driver_exit_code: of the entrypoint; negative for a signal.
    """

    status: JobStatus
    entrypoint: str
    message: str | None = None
    error_type: JobErrorType | None = None
    start_time: int | None = None
    end_time: int | None = None
    metadata: dict[str, str] | None = None
    runtime_env: dict[str, Any] | None = None
    entrypoint_num_cpus: int | float | None = None
    entrypoint_num_gpus: int | float | None = None
    entrypoint_memory: int | None = None
    entrypoint_resources: dict[str, float] | None = None
    driver_agent_http_address: str | None = None
    driver_node_id: str | None = None
    driver_exit_code: int | None = None

    def __post_init__(self) -> None:
        self.status = JobStatus(self.status)
        if self.message is not None:
            return
        self.message = _MESSAGES[self.status]
        if self.status is JobStatus.PENDING:
            if self.needs_resources:
                self.message += (
                    " It may be waiting for resources (CPUs, GPUs, memory, custom resources) to become available."
                )
            if self.runtime_env:
                self.message += " It may be waiting for the runtime environment to be set up."

    @property
    def needs_resources(self) -> bool:
        """True if the entrypoint has resources of its own."""
        wanted = (self.entrypoint_num_cpus, self.entrypoint_num_gpus, self.entrypoint_memory, self.entrypoint_resources)
        return any(wanted)

    def to_json(self) -> dict[str, Any]:
        """Return JSON types; the runtime_env is a text, `runtime_env_json`."""
        found = asdict(self)
        found["status"] = str(self.status)
        found["error_type"] = self.error_type.value if self.error_type else None
        environment = found.pop("runtime_env")
        if environment is not None:
            found["runtime_env_json"] = json.dumps(environment)
        return found

    @classmethod
    def from_json(cls, json_dict: Mapping[str, Any]) -> JobInfo:
        """Return the job that `to_json` has described."""
        given = dict(json_dict)
        given["error_type"] = JobErrorType(given["error_type"]) if given.get("error_type") else None
        environment = given.pop("runtime_env_json", None)
        if environment is not None:
            given["runtime_env"] = json.loads(environment)
        return cls(**given)


class JobTable:
    """The submitted jobs of a cluster.

    Args:
        process: the process that asks.
    """

    def __init__(self, process: CoreWorker) -> None:
        self._gcs = process.gcs

    def add(self, submission_id: str, info: JobInfo) -> bool:
        """Store a new job. Returns False, and changes nothing, where the id is in use."""
        return bool(self._gcs.call("kv_put", job_key(INFO_PREFIX, submission_id), _packed(info), False, KV_NAMESPACE))

    def get(self, submission_id: str) -> JobInfo | None:
        """Return a job as it was last reported; None for an unknown id."""
        packed = self._gcs.call("kv_get", job_key(INFO_PREFIX, submission_id), KV_NAMESPACE)
        return JobInfo.from_json(json.loads(packed)) if packed is not None else None

    def change(self, submission_id: str, status: JobStatus, message: str | None = None, **changes: Any) -> None:
        """Give a job that has not ended another status; its other fields stay as they are, but for `changes`."""
        info = self.get(submission_id)
        if info is None or info.status.is_terminal():
            return
        changes["end_time"] = int(time.time() * 1000) if status.is_terminal() else None
        info = replace(info, status=status, message=message, **changes)
        self._gcs.call("kv_put", job_key(INFO_PREFIX, submission_id), _packed(info), True, KV_NAMESPACE)

    def delete(self, submission_id: str) -> None:
        """Forget a job."""
        for kind in (INFO_PREFIX, DRIVER_PREFIX):
            self._gcs.call("kv_del", job_key(kind, submission_id), KV_NAMESPACE)
        for key in self._gcs.call("kv_keys", job_key(PACKAGE_PREFIX, f"{submission_id}/"), KV_NAMESPACE):
            self._gcs.call("kv_del", key, KV_NAMESPACE)

    def find(self, submission_id: str) -> JobInfo | None:
        """Return a job as it is now: one whose supervisor is gone has failed."""
        info = self.get(submission_id)
        if info is None or info.status.is_terminal() or self._is_supervised(submission_id, info):
            return info
        row = self._last_supervisor(submission_id)
        info = self.get(submission_id)  # its last words were earlier than its end
        if info is None or info.status.is_terminal():
            return info
        if row is None and info.status is JobStatus.PENDING:
            return info  # its supervisor has not been made yet
        kind, message = _failure(row)
        self.change(submission_id, JobStatus.FAILED, message, error_type=kind)
        return self.get(submission_id)

    def all(self) -> dict[str, JobInfo]:
        """Return all jobs as they are now, by submission id."""
        found = {ident: JobInfo.from_json(facts) for ident, facts in self._facts(INFO_PREFIX).items()}
        for ident in [ident for ident, info in found.items() if not info.status.is_terminal()]:
            info = self.find(ident)
            if info is None:
                del found[ident]
            else:
                found[ident] = info
        return found

    def drivers(self) -> dict[str, dict[str, str]]:
        """Return the id, address and pid of the last driver of each job that has had one, by submission id."""
        return self._facts(DRIVER_PREFIX)

    def _facts(self, prefix: str) -> dict[str, Any]:
        items = self._gcs.call("kv_items", prefix.encode(), KV_NAMESPACE)
        return {key.decode().removeprefix(prefix): json.loads(packed) for key, packed in items}

    def driver(self, submission_id: str) -> dict[str, str] | None:
        """Return the id, address and pid of the last driver of a job; None for a job without."""
        packed = self._gcs.call("kv_get", job_key(DRIVER_PREFIX, submission_id), KV_NAMESPACE)
        return json.loads(packed) if packed is not None else None

    def put_package(self, submission_id: str, digest: str, package: bytes) -> None:
        """Store a package for the supervisor of a job."""
        self._gcs.call("kv_put", job_key(PACKAGE_PREFIX, f"{submission_id}/{digest}"), package, True, KV_NAMESPACE)

    def take_package(self, submission_id: str, digest: str) -> bytes:
        """Return a package, which the store then drops."""
        key = job_key(PACKAGE_PREFIX, f"{submission_id}/{digest}")
        package: bytes | None = self._gcs.call("kv_get", key, KV_NAMESPACE)
        if package is None:
            raise ValueError(f"the package {digest} of job {submission_id} is gone")
        self._gcs.call("kv_del", key, KV_NAMESPACE)
        return package

    def _is_supervised(self, submission_id: str, info: JobInfo) -> bool:
        try:
            self._gcs.call(
                "named_actor", JOB_ACTOR_NAME_TEMPLATE.format(job_id=submission_id), SUPERVISOR_ACTOR_RAY_NAMESPACE
            )
        except ValueError:
            return False
        if info.status is JobStatus.PENDING and (late := start_timeout_problem(info)):
            self.change(
                submission_id, JobStatus.FAILED, late, error_type=JobErrorType.JOB_SUPERVISOR_ACTOR_START_TIMEOUT
            )
            return False
        return True

    def _last_supervisor(self, submission_id: str) -> dict[str, Any] | None:
        name = JOB_ACTOR_NAME_TEMPLATE.format(job_id=submission_id)
        rows = self._gcs.call("actors")
        found = [row for row in rows if (row["name"], row["namespace"]) == (name, SUPERVISOR_ACTOR_RAY_NAMESPACE)]
        return found[-1] if found else None


def start_timeout_problem(info: JobInfo) -> str:
    """Return why a job that is PENDING does so for too long; "" if it does not."""
    limit = float(os.environ.get(START_TIMEOUT, DEFAULT_START_TIMEOUT))
    if time.time() - (info.start_time or 0) / 1000 <= limit:
        return ""
    text = (
        f"Job supervisor actor failed to start within {limit} seconds. This timeout can be configured by setting the "
        f"environment variable {START_TIMEOUT}."
    )
    if info.needs_resources:
        text += (
            " This may be because the job entrypoint's specified resources (entrypoint_num_cpus, entrypoint_num_gpus, "
            "entrypoint_resources, entrypoint_memory) aren't available on the cluster. Try checking the cluster's "
            "available resources with `ray status` and specifying fewer resources for the job entrypoint."
        )
    return text


def _failure(row: dict[str, Any] | None) -> tuple[JobErrorType, str]:
    """Say why a job has failed whose supervisor, a row of the table of actors, is gone."""
    if row is None:
        text = "Unexpected error occurred: failed to get job supervisor."
        return JobErrorType.JOB_SUPERVISOR_ACTOR_START_FAILURE, text
    reason = row["reason"]
    if row["node"] < 0:
        text = f"Job supervisor actor could not be scheduled: {reason}"
        return JobErrorType.JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE, text
    return JobErrorType.JOB_SUPERVISOR_ACTOR_DIED, f"Job supervisor actor died: {reason}"


def _packed(info: JobInfo) -> bytes:
    return json.dumps(info.to_json()).encode()
