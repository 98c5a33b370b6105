"""`ray._common.logging_constants`: names of the attributes of log lines."""

from __future__ import annotations

import enum

from hpcray.platform.log_format import FLATTENED, STANDARD_ATTRIBUTES

LOGRECORD_STANDARD_ATTRS = STANDARD_ATTRIBUTES
LOGGER_FLATTEN_KEYS = FLATTENED


class LogKey(str, enum.Enum):
    """Attributes of log lines: those of the context, of every line, and of Ray."""

    JOB_ID = "job_id"
    WORKER_ID = "worker_id"
    NODE_ID = "node_id"
    ACTOR_ID = "actor_id"
    TASK_ID = "task_id"
    ACTOR_NAME = "actor_name"
    TASK_NAME = "task_name"
    TASK_FUNCTION_NAME = "task_func_name"
    ASCTIME = "asctime"
    LEVELNAME = "levelname"
    MESSAGE = "message"
    FILENAME = "filename"
    LINENO = "lineno"
    EXC_TEXT = "exc_text"
    PROCESS = "process"
    TIMESTAMP_NS = "timestamp_ns"
