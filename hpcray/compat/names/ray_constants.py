"""`ray._private.ray_constants`: the constants that other packages read."""

from __future__ import annotations

import os
from typing import Any

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
LOGGER_FORMAT = "%(asctime)s\t%(levelname)s %(filename)s:%(lineno)s -- %(message)s"


def env_integer(key: str, default: int) -> int:
    """An environment variable as a number."""
    value = os.environ.get(key, "")
    return int(value) if value.lstrip("-").isdigit() else default


def env_float(key: str, default: float) -> float:
    """An environment variable as a number."""
    try:
        return float(os.environ[key])
    except (KeyError, ValueError):
        return default


def env_bool(key: str, default: bool) -> bool:
    """An environment variable as yes ("true", "1") or no."""
    if key not in os.environ:
        return default
    return os.environ[key].lower() in ("true", "1")


def env_set_by_user(key: str) -> Any:
    """Whether the variable is set."""
    return key in os.environ
