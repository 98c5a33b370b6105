"""Names that the processes of a job agree upon: log files of workers and lines in them, variables and keys of submitted
jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hpcray.common.ids import run_of

LOG_PREFIX_ACTOR_NAME = ":actor_name:"
LOG_PREFIX_TASK_NAME = ":task_name:"
LOG_PREFIX_TASK_ID = ":task_id:"
LOG_PREFIX_JOB_ID = ":job_id:"
LOG_PREFIX_INFO_MESSAGE = ":info_message:"
FIRST_JOB = "01000000"
LOG_PIECE = 256 << 10
"""Bytes of a log file that a raylet reads for one question."""
_WORKER = "worker"


def logs_directory(session_dir: str) -> str:
    """Return the directory of the log files of a node."""
    return f"{session_dir}/logs"


def worker_log_name(proc: bytes, job: str, pid: int) -> str:
    """Return the name of a worker's log files, without `.out` or `.err`."""
    return f"{_WORKER}-{proc.hex()}-{job}-{pid}"


def split_rotation(name: str) -> tuple[str, int]:
    """Return the name of a log file before it was rotated away, and how often since; 0: it is the present one."""
    stem, _, number = name.rpartition(".")
    return (stem, int(number)) if stem and number.isdecimal() else (name, 0)


def parse_worker_log_name(name: str) -> tuple[bytes, int, bool] | None:
    """Return the worker's proc id, its pid, and whether the file has its standard error; None for another file."""
    stem, _, kind = name.rpartition(".")
    parts = stem.split("-")
    if kind not in ("out", "err") or len(parts) != 4 or parts[0] != _WORKER:
        return None
    try:
        return bytes.fromhex(parts[1]), int(parts[3]), kind == "err"
    except ValueError:
        return None


def jobs_space(proc: bytes) -> str:
    """The part of the key-value store that has the drivers of the run of a process, by the numbers of their jobs."""
    return f"hpcray.jobs.{run_of(proc)}"


# ------------------------------------------------------------ submitted jobs
# Names that processes of submitted jobs agree upon: variables, keys of the key-value store, files.


JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable of an entrypoint: runtime_env and metadata of its job, as JSON."""
JOB_ID_METADATA_KEY = "job_submission_id"
JOB_NAME_METADATA_KEY = "job_name"
JOB_ACTOR_NAME_TEMPLATE = "_ray_internal_job_actor_{job_id}"
SUPERVISOR_ACTOR_RAY_NAMESPACE = "SUPERVISOR_ACTOR_RAY_NAMESPACE"
JOB_LOGS_PATH_TEMPLATE = "job-driver-{submission_id}.log"
KV_NAMESPACE = "job"
INFO_PREFIX, DRIVER_PREFIX, PACKAGE_PREFIX = (
    "_ray_internal_job_info_", "_ray_internal_job_driver_", "_ray_internal_job_package_",
)  # fmt: skip


def job_config(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what `JOB_CONFIG_VARIABLE` says; {} where it is not set.

    Raises:
        ValueError: it is no JSON.
    """
    found: dict[str, Any] = json.loads(environ.get(JOB_CONFIG_VARIABLE) or "{}")
    return found


def job_key(prefix: str, name: str) -> bytes:
    """Return the key of a fact about a submitted job."""
    return f"{prefix}{name}".encode()
