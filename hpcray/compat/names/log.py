"""`ray.log`, `ray._private.log`: Ray's logger, which writes to standard error in every program that imports `ray`."""

from __future__ import annotations

import enum
import logging
import re
import sys
from typing import Any, TextIO

from hpcray.platform.log_format import (
    FLATTENED,
    INTERNAL_TIMESTAMP_LOG_KEY,
    STANDARD_ATTRIBUTES,
    TEXT_FORMAT,
    add_context,
    setup_log_record_factory,
)
from hpcray.runtime.core_worker.core_worker import current
from hpcray.runtime.worker.log_output import log_context

__all__ = ["INTERNAL_TIMESTAMP_LOG_KEY", "PlainRayHandler", "clear_logger", "generate_logging_config"]

logger_initialized = False
"""Without effect: what is configured already is not configured again."""

_setup_log_record_factory = setup_log_record_factory


class PlainRayHandler(logging.StreamHandler):  # type: ignore[type-arg]  # takes none before Python 3.11
    """Writes to what `sys.stderr` is at that time; in a worker, whose lines get a prefix, the message alone."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)  # StreamHandler's own would keep the stream

    @property
    def stream(self) -> TextIO:
        """Standard error."""
        return sys.stderr

    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage() if current.worker is not None else super().format(record)


def clear_logger(logger: str | logging.Logger) -> None:
    """Remove the handlers of a logger; what it gets goes to its parent."""
    if isinstance(logger, str):
        logger = logging.getLogger(logger)
    logger.propagate = True
    logger.handlers.clear()


def generate_logging_config() -> None:
    """Configure the logger `ray`, unless that was done: level INFO, to standard error. hpcray's messages go there."""
    logger = logging.getLogger("ray")
    if not any(isinstance(handler, PlainRayHandler) for handler in logger.handlers):
        handler = PlainRayHandler()
        handler.setFormatter(logging.Formatter(TEXT_FORMAT))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logging.getLogger("ray.rllib").setLevel(logging.WARNING)
        logging.getLogger("hpcray").parent = logger  # who silences or redirects Ray's logger means ours
    setup_log_record_factory()


# ------------------------------------------------------------ ray logging
# `ray._private.ray_logging`: level and format of Ray's logger.


NUMBERS = re.compile(r"(\d+|0x[0-9a-fA-F]+)")
"""Parts of a line in which lines that mean the same differ."""


def setup_logger(logging_level: int | str, logging_format: str) -> None:
    """Set the level of Ray's logger, and the format of its handlers unless that is ""."""
    logger = logging.getLogger("ray")
    for handler in logger.handlers if logging_format else ():
        handler.setFormatter(logging.Formatter(logging_format))
    logger.setLevel(logging_level.upper() if isinstance(logging_level, str) else logging_level)


# ------------------------------------------------------------ filters
# `ray._common.filters`: the job, process, node, task and actor in log records.


class CoreContextFilter(logging.Filter):
    """Adds to records where they come from. It drops none."""

    TASK_LEVEL_LOG_KEYS = ("task_id", "task_name", "task_func_name")

    @classmethod
    def get_ray_core_logging_context(cls) -> dict[str, Any]:
        """Return what the filter adds, by name; {} outside of a job."""
        return log_context()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True."""
        add_context(record, log_context())
        return True


# ------------------------------------------------------------ logging constants
# `ray._common.logging_constants`: names of the attributes of log lines.


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
