"""What a `LoggingConfig` makes of log records."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from hpcray.platform.log_format import (
    JSONFormatter,
    TextFormatter,
    check_rotation,
    configure_loggers,
    rotation_limits,
    setup_log_record_factory,
)


@pytest.fixture
def loggers() -> Iterator[tuple[logging.Logger, logging.Logger]]:
    found = logging.getLogger(), logging.getLogger("ray")
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in found]
    factory = logging.getLogRecordFactory()
    yield found
    logging.setLogRecordFactory(factory)
    for logger, (handlers, level, propagate) in zip(found, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def record(**extra: object) -> logging.LogRecord:
    try:
        raise KeyError("why")
    except KeyError:
        return logging.getLogger("mine").makeRecord(
            "mine", logging.ERROR, "/x/file.py", 7, "said %s\nmore", ("it",), sys.exc_info(), extra=extra
        )


def configured(
    loggers: tuple[logging.Logger, ...], encoding: str, level: str, attributes: list[str]
) -> logging.Handler:
    configure_loggers(encoding, level, attributes, lambda: {"job_id": "01", "actor_name": "", "task_id": None})
    for logger in loggers:
        assert logger.level == getattr(logging, level)
    handler = loggers[0].handlers[-1]
    assert loggers[1].handlers == [handler] and not loggers[1].propagate and handler.level == getattr(logging, level)
    return handler


def line_of(handler: logging.Handler, of: logging.LogRecord, capsys: pytest.CaptureFixture[str]) -> str:
    handler.stream = sys.stderr  # type: ignore[attr-defined]
    handler.handle(of)
    return capsys.readouterr().err


def test_lines_in_json_have_context_and_extra_attributes(loggers, capsys: pytest.CaptureFixture[str]) -> None:
    handler = configured(loggers, "JSON", "WARNING", ["funcName", "name"])
    line = json.loads(line_of(handler, record(k=[1], odd={1}), capsys))
    assert "KeyError: 'why'" in line.pop("exc_text")
    assert line.pop("asctime") and line.pop("timestamp_ns") > 1e18 and line.pop("process")
    assert line == {
        "levelname": "ERROR", "message": "said it\nmore", "filename": "file.py", "lineno": 7, "job_id": "01",
        "funcName": None, "name": "mine", "k": [1], "odd": "{1}",
    }  # fmt: skip


def test_lines_in_text_have_context_and_extra_attributes(loggers, capsys: pytest.CaptureFixture[str]) -> None:
    text = line_of(configured(loggers, "TEXT", "INFO", []), record(k=2), capsys)
    assert "ERROR file.py:7 -- said it\nmore\nTraceback" in text
    assert " k=2 " in text and " job_id=01" in text and "timestamp_ns=" in text and "actor_name" not in text


def test_who_has_configured_logging_keeps_it_and_a_second_session_adds_no_second_line(loggers) -> None:
    own = logging.NullHandler()
    loggers[0].addHandler(own)
    configure_loggers("TEXT", "INFO", [], dict)
    count = len(loggers[0].handlers)
    configure_loggers("JSON", "INFO", [], dict)
    assert own in loggers[0].handlers and len(loggers[0].handlers) == count


def test_attributes_with_attributes_in_them() -> None:
    setup_log_record_factory()
    plain = logging.makeLogRecord({"ray_serve_extra_fields": {"route": "/"}})
    assert json.loads(JSONFormatter().format(plain))["route"] == "/" and "route=/" in TextFormatter().format(plain)
    with pytest.raises(ValueError, match="Expected a dictionary"):
        JSONFormatter().format(logging.makeLogRecord({"ray_serve_extra_fields": 1}))
    with pytest.raises(KeyError, match="duplicated key"):
        JSONFormatter().format(logging.makeLogRecord({"ray_serve_extra_fields": {"message": 1}}))


@pytest.mark.parametrize(
    ("size", "backups", "limits"),
    [("10m", "2", (10 << 20, 2)), ("1000", "", (1000, 5)), ("0", "0", (0, 0)), ("", "", (512 << 20, 5))],
)
def test_sizes_of_log_files_are_spelled_like_all_sizes(
    monkeypatch: pytest.MonkeyPatch, size: str, backups: str, limits: tuple[int, int]
) -> None:
    monkeypatch.setenv("RAY_ROTATION_MAX_BYTES", size)
    monkeypatch.setenv("RAY_ROTATION_BACKUP_COUNT", backups)
    check_rotation()
    assert rotation_limits() == limits


@pytest.mark.parametrize(("name", "text"), [("MAX_BYTES", "ten"), ("MAX_BYTES", "-1"), ("BACKUP_COUNT", "2k")])
def test_a_wrong_size_of_log_files_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(f"RAY_ROTATION_{name}", text)
    with pytest.raises(
        ValueError, match=rf"RAY_ROTATION_{name}='{text}' is not valid; hint: RAY_ROTATION_MAX_BYTES=10m"
    ):
        check_rotation()
    assert rotation_limits() == (512 << 20, 5), "workers go on"
