"""Output of commands that hpcray runs may have any bytes; that of its own is plain where it goes to no terminal."""

from __future__ import annotations

import ast
import contextlib
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.jobs import ROOT
from helpers.source_laws import Source, parse, tree

from hpcray.cli.__main__ import main
from hpcray.common.config import format_setting, parse_size
from hpcray.core.object_store.allocator import format_size
from hpcray.jobs.batch_queues import query_state
from hpcray.jobs.submitted_job import JobRecord, make_folder


def strict_texts(source: Source) -> Iterator[int]:
    """Lines with calls that decode what a command prints, and fail where it is no UTF-8."""
    for node in source.of_kind(ast.Call):
        words = {word.arg: word.value for word in node.keywords}
        text = words.get("text", words.get("universal_newlines"))
        if isinstance(text, ast.Constant) and text.value is True and "errors" not in words:
            yield node.lineno


def test_no_output_of_a_command_is_decoded_strictly() -> None:
    found = {source.path: list(strict_texts(source)) for source in tree()}
    assert {path: lines for path, lines in found.items() if lines} == {}, 'errors="replace"'


def test_the_law_can_be_broken() -> None:
    assert list(strict_texts(parse("x.py", "subprocess.run(line, text=True)"))) == [1]
    assert list(strict_texts(parse("x.py", "subprocess.run(line, text=True, errors='replace')"))) == []


def test_bytes_of_slurm_that_are_no_utf8_end_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("squeue", "sacct", "scontrol"):
        command = tmp_path / name
        command.write_text("#!/bin/sh\nprintf 'job \\377\\376 of M\\374ller\\n'\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert isinstance(query_state("987654"), str)


# ------------------------------------------------------------ colours

NO, FORCE = {"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}


@pytest.fixture
def job_of_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One job that is listed: its state has a colour."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCRAY_HISTORY_DIR", str(tmp_path / "history"))
    folder = make_folder(tmp_path / ".hpcray-jobs", "mine")
    JobRecord("1", "mine", "local", 1, 0.0, None, 0, ("p.py",)).write(folder)


def shown(words: list[str], terminal: bool, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> str:
    """The output of a command, in a pipe or on a terminal."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**environ, "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "hpcray.cli", *words]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    if not terminal:
        return subprocess.run(command, capture_output=True, timeout=60, env=variables, check=False).stdout.decode()
    main, side = pty.openpty()
    child = subprocess.Popen(command, stdin=side, stdout=side, stderr=subprocess.DEVNULL, env=variables)
    os.close(side)
    text = b""
    with contextlib.suppress(OSError):  # EIO: the command has ended
        while data := os.read(main, 1 << 16):
            text += data
    child.wait(60)
    os.close(main)
    return text.decode()


@pytest.mark.usefixtures("job_of_history")
@pytest.mark.parametrize("words", [["doctor", "--here"], ["jobs"], ["copy"]], ids=" ".join)
def test_colours_are_where_a_terminal_is_or_they_are_wanted(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = shown(words, False, monkeypatch, {})
    assert plain and "\x1b" not in plain
    assert shown(words, False, monkeypatch, NO) == plain
    assert shown(words, False, monkeypatch, {"NO_COLOR": "", "FORCE_COLOR": ""}) == plain, "empty ones do not count"
    assert "\x1b[" in shown(words, True, monkeypatch, {})
    assert "\x1b" not in shown(words, True, monkeypatch, NO)
    assert "\x1b" not in shown(words, True, monkeypatch, {**NO, **FORCE}), "NO_COLOR counts more"
    forced = shown(words, False, monkeypatch, FORCE)
    assert "\x1b[" in forced
    without = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in forced.splitlines()]
    assert without == [line.rstrip() for line in plain.splitlines()], "colours change no line, and cut none"


def own_colours(source: Source) -> Iterator[int]:
    """Lines of a command that colour text past click's context: consoles of rich, and escapes."""
    for node in source.of_kind(ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == "Console":
            yield node.lineno
    for text in source.of_kind(ast.Constant):
        if isinstance(text.value, str) and re.search("\x1b\\[[0-9;]*[349][0-7]m", text.value):
            yield text.lineno


def test_no_command_colours_text_by_itself() -> None:
    found = {source.path: list(own_colours(source)) for source in tree() if "cli/" in source.path}
    assert found and not [path for path, lines in found.items() if lines], "click.style, print_table or print_text"
    assert list(own_colours(parse("x.py", "Console(width=3)"))) == [1]
    assert list(own_colours(parse("x.py", "print('\x1b[31mred')"))) == [1]


# ------------------------------------------------------------ sizes

DECIMAL = re.compile(r"(?<![A-Za-z])[kKMGTP]B(?:/s)?\b")
AS_RAY = {"state/node_metrics.py"}
"""The unit of two of Ray's metrics."""


def decimal_units(source: Source) -> Iterator[int]:
    """Lines of texts, comments and docstrings apart, with a unit of bytes that is no power of 1024."""
    for node in source.of_kind(ast.Constant):
        text = isinstance(node.value, str) and node.value
        if text and "\n" not in text.strip() and DECIMAL.search(text):
            yield node.lineno


def docstrings(source: Source) -> set[int]:
    """Lines where a string stands that nothing reads."""
    return {node.value.lineno for node in source.of_kind(ast.Expr) if isinstance(node.value, ast.Constant)}


def test_all_texts_have_one_unit_of_bytes() -> None:
    found = {
        source.path: sorted(set(decimal_units(source)) - docstrings(source))
        for source in tree()
        if source.path not in AS_RAY
    }
    assert {path: lines for path, lines in found.items() if lines} == {}, (
        "KiB, MiB, GiB: hpcray's own are powers of 1024"
    )
    pages = list((ROOT / "hpcray" / "dashboard" / "static" / "js").rglob("*.js"))
    assert pages and not [path.name for path in pages if DECIMAL.search(path.read_text())]


def test_the_law_of_units_can_be_broken() -> None:
    source = parse("x.py", 'def f():\n    """Up to 4 MB."""\n    return f"{size / 1e9:.1f} GB free"\n')
    assert set(decimal_units(source)) - docstrings(source) == {3}


@pytest.mark.parametrize(
    ("given", "shown", "setting"),
    [
        ("2g", "2.0 GiB", "2g"),
        ("512m", "512.0 MiB", "512m"),
        ("1.5GiB", "1.5 GiB", "1536m"),
        ("100k", "100.0 KiB", "100k"),
        ("1000001", "976.6 KiB", "1000001"),
        ("3t", "3.0 TiB", "3t"),
        ("17", "17 B", "17"),
    ],
)
def test_a_size_comes_back_as_it_was_given(given: str, shown: str, setting: str) -> None:
    size = parse_size(given)
    assert (format_size(size), format_setting(size)) == (shown, setting)
    assert parse_size(format_setting(size)) == size and format_setting(0) == "0"


def test_settings_are_shown_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCRAY_OBJECT_STORE_MEMORY", "2g")
    monkeypatch.setenv("HPCRAY_START_TIMEOT", "3")
    ended = CliRunner().invoke(main, ["config", "show", "--changed"])
    assert re.search(r"^object_store_memory +2g +HPCRAY_OBJECT_STORE_MEMORY$", ended.stdout, re.MULTILINE), ended.output
    assert "HPCRAY_START_TIMEOT is no setting and has no effect; hint: HPCRAY_START_TIMEOUT?" in ended.stderr
