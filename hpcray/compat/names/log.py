"""`ray.log`, `ray._private.log`: Ray's logger, which writes to standard error in every program that imports `ray`."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from hpcray.platform.log_format import INTERNAL_TIMESTAMP_LOG_KEY, TEXT_FORMAT, setup_log_record_factory
from hpcray.runtime.core_worker.core_worker import current

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
