"""What a `LoggingConfig` makes of log records."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from hpcray.platform.log_format import configure_root_logger


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    before = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:], level = before
    logger.setLevel(level)


def record(**extra: object) -> logging.LogRecord:
    try:
        raise KeyError("why")
    except KeyError:
        return logging.getLogger("mine").makeRecord(
            "mine", logging.ERROR, "/x/file.py", 7, "said %s\nmore", ("it",), sys.exc_info(), extra=extra
        )


def test_log_lines_in_json_have_context_and_extra_attributes(root: logging.Logger) -> None:
    configure_root_logger("JSON", "WARNING", ["funcName", "name"], lambda: {"job_id": "01"})
    (handler,) = root.handlers
    line = json.loads(handler.format(record(k=[1])))
    trace = line.pop("exc_text")
    assert "KeyError: 'why'" in trace
    line.pop("asctime")
    assert line == {
        "levelname": "ERROR", "message": "said it\nmore", "filename": "file.py", "lineno": 7, "job_id": "01",
        "funcName": None, "name": "mine", "k": [1],
    }  # fmt: skip
    assert root.level == logging.WARNING


def test_log_lines_in_text_have_context_and_extra_attributes(root: logging.Logger) -> None:
    configure_root_logger("TEXT", "INFO", [], lambda: {"job_id": "01", "node_id": "ab"})
    text = root.handlers[0].format(record(k=2))
    first = text.splitlines()[0]
    assert first.endswith("ERROR file.py:7 -- said it job_id=01 node_id=ab k=2")
    assert "KeyError: 'why'" in text
