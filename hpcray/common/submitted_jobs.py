"""Names that processes of submitted jobs agree upon: variables, keys of the key-value store, files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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
