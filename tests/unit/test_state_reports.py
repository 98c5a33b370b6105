"""Tables of the commands that look at a running job."""

from __future__ import annotations

import pytest

from hpcray.state.reports import print_table, table_lines

WIDE = "x" * 300


def test_a_table_in_a_pipe_is_plain_complete_and_aligned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_table(["name", "value"], [["a", WIDE], ["long [name]", None], ["c", 7]])
    assert capsys.readouterr().out.splitlines() == [
        "name         value",
        f"a            {WIDE}",
        "long [name]",
        "c            7",
    ]


def test_a_table_without_rows_has_no_lines() -> None:
    assert list(table_lines(["name"], [])) == []


def test_columns_may_be_aligned_on_the_right() -> None:
    assert list(table_lines(["size", "id"], [["9 B", "a"], ["12 kB", "b"]], right=["size"])) == [
        " size  id",
        "  9 B  a",
        "12 kB  b",
    ]
