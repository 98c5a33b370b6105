"""Log lines of programs: text or JSON, with job, node, task and actor that they come from; rotation of log files."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from hpcray.common.config import parse_size

TEXT_FORMAT = "%(asctime)s\t%(levelname)s %(filename)s:%(lineno)s -- %(message)s"
INTERNAL_TIMESTAMP_LOG_KEY = "_ray_timestamp_ns"
"""Attribute of log records: the time in nanoseconds. In lines its name is `timestamp_ns`."""
STANDARD_ATTRIBUTES = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {
    "asctime", "message", "taskName",
}  # fmt: skip
"""Attributes that every log record has; others were given with `extra`, or are the context."""
FLATTENED = frozenset({"ray_serve_extra_fields"})
"""Attributes with further attributes in them."""
_MAX_BYTES, _BACKUP_COUNT = "RAY_ROTATION_MAX_BYTES", "RAY_ROTATION_BACKUP_COUNT"
_STAMPS = "_gives_ray_timestamp_ns"

Context = Callable[[], Mapping[str, Any]]


class AbstractFormatter(logging.Formatter, ABC):
    """Base class of the formats.

    Attributes:
        additional_log_standard_attrs: attributes that every record has, to be written beside the usual ones.
    """

    def __init__(
        self,
        fmt: str | None = None,
        datefmt: str | None = None,
        style: Literal["%", "{", "$"] = "%",
        validate: bool = True,
    ) -> None:
        super().__init__(fmt, datefmt, style, validate)
        self.additional_log_standard_attrs: list[str] = []

    def set_additional_log_standard_attrs(self, additional_log_standard_attrs: Sequence[str]) -> None:
        """Set the attribute of this name."""
        self.additional_log_standard_attrs = list(additional_log_standard_attrs)

    def generate_record_format_attrs(
        self, record: logging.LogRecord, exclude_default_standard_attrs: bool
    ) -> dict[str, Any]:
        """Return what is to be written of a record, by name.

        Args:
            exclude_default_standard_attrs: leave out time, level, message, place and process.

        Raises:
            ValueError, KeyError: an attribute with attributes in it is no dict, or repeats a name.
        """
        found: dict[str, Any] = {}
        if not exclude_default_standard_attrs:
            found |= {
                "asctime": self.formatTime(record),
                "levelname": record.levelname,
                "message": record.getMessage(),
                "filename": record.filename,
                "lineno": record.lineno,
                "process": record.process,
            }
            if record.exc_info:
                record.exc_text = record.exc_text or self.formatException(record.exc_info)
                found["exc_text"] = record.exc_text
        for name in self.additional_log_standard_attrs:
            _add(found, name, getattr(record, name, None))
        for name, value in vars(record).items():
            if name not in STANDARD_ATTRIBUTES:
                _add(found, name, value)
        if INTERNAL_TIMESTAMP_LOG_KEY in found:
            found["timestamp_ns"] = found.pop(INTERNAL_TIMESTAMP_LOG_KEY)
        return found

    @abstractmethod
    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""


class TextFormatter(AbstractFormatter):
    """Ray's usual line, then `name=value` for each further attribute."""

    _usual = logging.Formatter(TEXT_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        attributes = self.generate_record_format_attrs(record, True)
        return " ".join([self._usual.format(record), *(f"{name}={value}" for name, value in attributes.items())])


class JSONFormatter(AbstractFormatter):
    """One object for each record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record. What JSON does not have is written as `str()` shows it."""
        return json.dumps(self.generate_record_format_attrs(record, False), default=str)


FORMATTERS: dict[str, type[AbstractFormatter]] = {"TEXT": TextFormatter, "JSON": JSONFormatter}
"""The formats by `LoggingConfig.encoding`."""


class _ContextHandler(logging.StreamHandler):  # type: ignore[type-arg]  # takes none before Python 3.11
    """Writes to standard error, with the context of the line."""

    def __init__(self, context: Context) -> None:
        super().__init__(sys.stderr)
        self._context = context

    def handle(self, record: logging.LogRecord) -> bool:
        add_context(record, self._context())
        return super().handle(record)  # type: ignore[return-value,unused-ignore]


def add_context(record: logging.LogRecord, context: Mapping[str, Any]) -> None:
    """Make attributes of a record out of what is known of a context."""
    for name, value in context.items():
        if value is not None and value != "":
            setattr(record, name, value)


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


def configure_loggers(encoding: str, level: int | str, attributes: Sequence[str], context: Context) -> None:
    """Make the root logger of this process, and Ray's, write to standard error, beside what they do already.

    Args:
        encoding: "TEXT" or "JSON".
        level: the lowest level that is written.
        attributes: of log records, beside the usual ones.
        context: called for every line: identifies the task or actor that logs.
    """
    setup_log_record_factory()
    formatter = FORMATTERS[encoding]()
    formatter.set_additional_log_standard_attrs(attributes)
    handler = _ContextHandler(context)
    handler.setLevel(level)
    handler.setFormatter(formatter)
    root, ray = logging.getLogger(), logging.getLogger("ray")
    root.handlers[:] = [one for one in root.handlers if not isinstance(one, _ContextHandler)]  # of an earlier session
    ray.handlers.clear()
    ray.propagate = False
    for logger in (root, ray):
        logger.addHandler(handler)
        logger.setLevel(level)


def _add(found: dict[str, Any], name: str, value: Any) -> None:
    if name not in FLATTENED:
        found[name] = value
        return
    if not isinstance(value, dict):
        raise ValueError(f"Expected a dictionary passing into {name}, but got {type(value)}")
    for inner, part in value.items():
        if inner in found:
            raise KeyError(f"Found duplicated key in the log record: {inner}")
        found[inner] = part


def rotation_limits() -> tuple[int, int]:
    """Return the size from which on a log file is rotated, and how many older ones are kept."""
    return _read(_MAX_BYTES, parse_size, 512 << 20), _read(_BACKUP_COUNT, int, 5)


def check_rotation() -> None:
    """Raise ValueError where a variable of the rotation is no size, or no number; workers heed those that are."""
    for variable, parse in ((_MAX_BYTES, parse_size), (_BACKUP_COUNT, int)):
        text = os.environ.get(variable, "").strip()
        if text not in ("", "0"):
            try:
                wrong = parse(text) < 0
            except ValueError:
                wrong = True
            if wrong:
                raise ValueError(f"{variable}={text!r} is not valid; hint: {_MAX_BYTES}=10m, {_BACKUP_COUNT}=5")


def _read(variable: str, parse: Callable[[str], int], default: int) -> int:
    """The value of a variable; 0 is one (no rotation), and what is not valid is `check_rotation`'s."""
    text = os.environ.get(variable, "")
    try:
        return 0 if text.strip() == "0" else max(0, parse(text)) if text else default
    except ValueError:
        return default
