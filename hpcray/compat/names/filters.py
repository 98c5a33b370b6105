"""`ray._common.filters`: the job, process, node, task and actor in log records."""

from __future__ import annotations

import logging
from typing import Any

from hpcray.platform.log_format import add_context
from hpcray.runtime.worker.log_output import log_context


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
