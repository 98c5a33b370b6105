"""`ray._private.ray_constants`, and `ray._private.runtime_env.constants`."""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Callable
from typing import Any

from hpcray.common.ids import OBJECT_BYTES
from hpcray.common.resources import ACCELERATOR_TYPE
from hpcray.platform.log_format import TEXT_FORMAT
from hpcray.runtime.core_worker.worker_output import TESTING_NEVER_DEDUP_TOKEN

logger = logging.getLogger("ray")

DEFAULT_DASHBOARD_IP = "127.0.0.1"
DEFAULT_DASHBOARD_PORT = 8265
DEFAULT_PORT = 6379
NOSET_CUDA_VISIBLE_DEVICES_ENV_VAR = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
CUDA_VISIBLE_DEVICES_ENV_VAR = "CUDA_VISIBLE_DEVICES"
RAY_ADDRESS_ENVIRONMENT_VARIABLE = "RAY_ADDRESS"
RAY_NAMESPACE_ENVIRONMENT_VARIABLE = "RAY_NAMESPACE"
RAY_JOB_CONFIG_JSON_ENV_VAR = "RAY_JOB_CONFIG_JSON_ENV_VAR"
RESOURCE_CONSTRAINT_PREFIX = ACCELERATOR_TYPE
HEAD_NODE_RESOURCE_NAME = "node:__internal_head__"
NODE_ID_PREFIX = "node:"
RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR = "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"
KV_NAMESPACE_PACKAGE = b"package"
KV_NAMESPACE_DASHBOARD = b"dashboard"
KV_NAMESPACE_JOB = b"job"
KV_NAMESPACE_PDB = b"ray_pdb"
DEBUG_AUTOSCALING_STATUS = "__autoscaling_status"
LOGGER_FORMAT = TEXT_FORMAT
RAY_RUNTIME_ENV_PLUGINS_ENV_VAR = "RAY_RUNTIME_ENV_PLUGINS"
GPU, HPU, NPU, TPU, NEURON_CORES = "GPU", "HPU", "NPU", "TPU", "neuron_cores"
CALLER_MEMORY_USAGE_PER_OBJECT_REF = 3000  # bytes, what Ray Data reckons with
DEFAULT_MAX_CONCURRENCY_ASYNC = 1000
DEFAULT_TASK_MAX_RETRIES = 3


def _env(key: str, default: Any, convert: Callable[[str], Any], what: str) -> Any:
    text = os.environ.get(key)
    if text is None:
        return default
    try:
        return convert(text)
    except ValueError:
        logger.warning(
            "Found %s in environment, but value must be %s. Got: %s. Returning provided default %s.",
            *(key, what, text, default),
        )
        return default


def env_integer(key: str, default: Any) -> Any:
    """Return an environment variable as a number; the default where it is unset or, with a warning, no number."""
    return _env(key, default, int, "an integer")


def env_float(key: str, default: Any) -> Any:
    """Return an environment variable as a number; the default where it is unset or, with a warning, no number."""
    return _env(key, default, float, "a float")


def env_bool(key: str, default: Any) -> Any:
    """Return True if an environment variable is "true" or "1", the default where it is unset."""
    if key not in os.environ:
        return default
    return os.environ[key].lower() in ("true", "1")


def env_set_by_user(key: str) -> Any:
    return key in os.environ


DEFAULT_OBJECT_STORE_MEMORY_PROPORTION = env_float("RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION", 0.3)
DEFAULT_SYSTEM_RESERVED_MEMORY_PROPORTION = env_float("RAY_DEFAULT_SYSTEM_RESERVED_MEMORY_PROPORTION", 0.1)
NUM_REDIS_GET_RETRIES = env_integer("RAY_NUM_REDIS_GET_RETRIES", 20)
RAY_DEDUP_LOGS = env_bool("RAY_DEDUP_LOGS", True)
RAY_DEDUP_LOGS_AGG_WINDOW_S = env_integer("RAY_DEDUP_LOGS_AGG_WINDOW_S", 5)
RAY_DEDUP_LOGS_ALLOW_REGEX = os.environ.get("RAY_DEDUP_LOGS_ALLOW_REGEX", TESTING_NEVER_DEDUP_TOKEN)
RAY_DEDUP_LOGS_SKIP_REGEX = os.environ.get("RAY_DEDUP_LOGS_SKIP_REGEX")
RAY_ENABLE_EXPORT_API_WRITE = env_bool("RAY_enable_export_api_write", False)
RAY_ENABLE_EXPORT_API_WRITE_CONFIG = _env("RAY_enable_export_api_write_config", "", str, "").split(",")
RAY_EXPORT_EVENT_MAX_FILE_SIZE_BYTES = env_integer("RAY_EXPORT_EVENT_MAX_FILE_SIZE_BYTES", 100 * 1000 * 1000)
RAY_EXPORT_EVENT_MAX_BACKUP_COUNT = env_integer("RAY_EXPORT_EVENT_MAX_BACKUP_COUNT", 20)

MIN_RESOURCE_GRANULARITY = 0.0001
ID_SIZE = OBJECT_BYTES  # in Ray 28
"""The smallest amount of a resource that counts."""


# ------------------------------------------------------------ worker modes
# `ray.SCRIPT_MODE` and the like: what a process is to a job, and the languages of workers.


SCRIPT_MODE, WORKER_MODE, LOCAL_MODE = 0, 1, 2


class Language(enum.Enum):
    """Languages of workers. Every worker of hpcray runs Python."""

    PYTHON = 0
    JAVA = 1
    CPP = 2


# ------------------------------------------------------------ raylet config
# `ray._config`: settings of Ray's C++ processes that its libraries read. They have no effect here.


class _Config:
    """Ray's defaults, each as a method."""

    def grpc_client_keepalive_time_ms(self) -> int:
        """Return the milliseconds after which a silent gRPC connection is tested."""
        return 300_000

    def grpc_client_keepalive_timeout_ms(self) -> int:
        """Return the milliseconds after which such a test has failed."""
        return 120_000

    def max_grpc_message_size(self) -> int:
        """Return the largest message in bytes."""
        return 512 << 20


_config = _Config()
