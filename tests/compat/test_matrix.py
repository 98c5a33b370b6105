"""The matrix is whole: every row that matters has a test, and the document has every row."""

from __future__ import annotations

import re
from pathlib import Path

from .matrix import BEGIN, DOCS, END
from .rows import ROWS


def test_every_row_has_a_test() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    tested = set(re.findall(r'^@row\(\s*"([^"]+)"', text, re.MULTILINE))
    assert [row.name for row in ROWS if row.name not in tested] == []


def test_the_document_has_every_row_in_order() -> None:
    matrix = DOCS.read_text().partition(BEGIN)[2].partition(END)[0]
    named = re.findall(r"^\| `([^`]+)` \| (\w+) \| ([\w ]+) \|", matrix, re.MULTILINE)
    assert [(name, importance) for name, importance, _ in named] == [(row.name, row.importance) for row in ROWS]
    assert not [name for name, _, state in named if state in ("broken", "not tested")]
