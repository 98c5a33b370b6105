"""Output of commands is text that may have any bytes: names of users, comments and paths in Slurm's answers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.source_laws import Source, parse, tree

from hpcray.jobs.batch_queues import query_state


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
