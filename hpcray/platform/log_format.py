"""Log lines of programs: text or JSON, with job, node, task and actor that they come from; rotation of log files."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ENCODINGS = ("TEXT", "JSON")
TEXT_FORMAT = "%(asctime)s\t%(levelname)s %(filename)s:%(lineno)s -- %(message)s"
INTERNAL_TIMESTAMP_LOG_KEY = "_ray_timestamp_ns"
"""Attribute of log records: the time in nanoseconds."""
STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", INTERNAL_TIMESTAMP_LOG_KEY}
"""Attributes that every log record has; others were given with `extra`."""
_STAMPS = "_gives_ray_timestamp_ns"
_ALWAYS = ("asctime", "levelname", "message", "filename", "lineno")

Context = Callable[[], Mapping[str, Any]]


class _Formatter(logging.Formatter):
    def __init__(self, attributes: Sequence[str], context: Context) -> None:
        super().__init__(TEXT_FORMAT)
        self._attributes = attributes
        self._context = context

    def more(self, record: logging.LogRecord) -> dict[str, Any]:
        """Attributes beside the standard ones."""
        extra = {key: value for key, value in vars(record).items() if key not in STANDARD_ATTRIBUTES}
        return {**self._context(), **{key: getattr(record, key, None) for key in self._attributes}, **extra}


class _Text(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        head, *rest = super().format(record).split("\n")
        return "\n".join([" ".join([head, *(f"{key}={value}" for key, value in self.more(record).items())]), *rest])


class _Json(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        record.asctime = self.formatTime(record)
        line = {**{key: getattr(record, key) for key in _ALWAYS}, **self.more(record)}
        if record.exc_info:
            line["exc_text"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup_log_record_factory() -> None:
    """Give every log record from now on its time in nanoseconds, as `_ray_timestamp_ns`."""
    make: Callable[..., logging.LogRecord] = logging.getLogRecordFactory()
    if hasattr(make, _STAMPS):
        return

    def stamped(*args: Any, **named: Any) -> logging.LogRecord:
        record = make(*args, **named)
        now = time.time_ns()
        record.created = now / 1e9
        vars(record)[INTERNAL_TIMESTAMP_LOG_KEY] = now
        return record

    setattr(stamped, _STAMPS, True)
    logging.setLogRecordFactory(stamped)


def configure_root_logger(encoding: str, level: str, attributes: Sequence[str], context: Context) -> None:
    """Make the root logger of this process write to standard error.

    Args:
        encoding: "TEXT" or "JSON".
        level: the lowest level that is written.
        attributes: of log records, beside the usual ones.
        context: called for every line: identifies the task or actor that logs.
    """
    handler = logging.StreamHandler()
    handler.setFormatter((_Json if encoding == "JSON" else _Text)(attributes, context))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def rotation_limits() -> tuple[int, int]:
    """Return the size from which on a log file is rotated, and how many older ones are kept."""
    return _number("RAY_ROTATION_MAX_BYTES", 512 << 20), _number("RAY_ROTATION_BACKUP_COUNT", 5)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else default
