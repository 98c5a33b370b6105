"""`ray._private.ray_constants`, and `ray._private.runtime_env.constants`."""

from __future__ import annotations

import os
from typing import Any

from hpcray.platform.log_format import TEXT_FORMAT

DEFAULT_DASHBOARD_IP = "127.0.0.1"
DEFAULT_DASHBOARD_PORT = 8265
DEFAULT_PORT = 6379
NOSET_CUDA_VISIBLE_DEVICES_ENV_VAR = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
CUDA_VISIBLE_DEVICES_ENV_VAR = "CUDA_VISIBLE_DEVICES"
RAY_ADDRESS_ENVIRONMENT_VARIABLE = "RAY_ADDRESS"
RAY_NAMESPACE_ENVIRONMENT_VARIABLE = "RAY_NAMESPACE"
RAY_JOB_CONFIG_JSON_ENV_VAR = "RAY_JOB_CONFIG_JSON_ENV_VAR"
RESOURCE_CONSTRAINT_PREFIX = "accelerator_type:"
HEAD_NODE_RESOURCE_NAME = "node:__internal_head__"
NODE_ID_PREFIX = "node:"
KV_NAMESPACE_PACKAGE = b"package"
DEBUG_AUTOSCALING_STATUS = "__autoscaling_status"
LOGGER_FORMAT = TEXT_FORMAT
RAY_DEDUP_LOGS = os.environ.get("RAY_DEDUP_LOGS", "1") not in ("0", "false", "False")
RAY_RUNTIME_ENV_PLUGINS_ENV_VAR = "RAY_RUNTIME_ENV_PLUGINS"


def env_integer(key: str, default: int) -> int:
    """Return an environment variable as a number, or the default where it is unset or no number."""
    value = os.environ.get(key, "")
    return int(value) if value.lstrip("-").isdigit() else default


def env_float(key: str, default: float) -> float:
    """Return an environment variable as a number, or the default where it is unset or no number."""
    try:
        return float(os.environ[key])
    except (KeyError, ValueError):
        return default


def env_bool(key: str, default: bool) -> bool:
    """Return True if an environment variable is "true" or "1", the default where it is unset."""
    if key not in os.environ:
        return default
    return os.environ[key].lower() in ("true", "1")


def env_set_by_user(key: str) -> Any:
    return key in os.environ
