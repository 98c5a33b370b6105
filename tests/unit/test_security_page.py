"""The table of docs/security.md: each row names a test that there is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/security.md").read_text(encoding="utf-8")
CODE = re.compile(r"`([^`]+)`")


def rows(text: str) -> Iterator[tuple[str, str]]:
    """The asset and the last cell of each row of the table "What holds"."""
    part = text.partition("## What holds\n")[2].partition("\n## ")[0]
    for line in part.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 4 and cells[0] not in ("asset", "---"):
            yield cells[0], cells[3]


def names_of_tests(path: str) -> list[str]:
    """The names of the tests of a file."""
    found = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    return [node.name for node in found if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def problems(text: str) -> list[str]:
    """What rows name that is not there. A name after a file is a part of those of its tests; "the same": it."""
    found, path = [], ""
    for asset, cell in rows(text):
        words = CODE.findall(cell)
        if cell == "below":
            continue
        if not words and cell != "the same":
            found.append(f"{asset}: {cell} names no test")
        for word in words:
            if not word.startswith("tests/"):
                if not path or not any(word in name for name in names_of_tests(path)):
                    found.append(f"{asset}: {path} has no test with {word}")
            elif (ROOT / word).is_file():
                path = word
            else:
                found.append(f"{asset}: there is no {word}")
    return found


def test_each_row_names_a_test_that_there_is() -> None:
    assert len(list(rows(PAGE))) > 30
    assert problems(PAGE) == []


def test_the_law_can_be_broken() -> None:
    page = "## What holds\n\n| asset | a | b | test |\n| --- | --- | --- | --- |\n| x | a | b | {} |\n"
    for cell in ("by hand", "`tests/unit/no_such.py`", "`tests/unit/test_security_page.py`: `none_like_it`", "`none`"):
        assert len(problems(page.format(cell))) == 1, cell
    assert problems(page.format("`tests/unit/test_security_page.py`: `law_can_be`")) == []


def test_files_that_the_page_names_are_there() -> None:
    named = set(re.findall(r"tests/[a-z_/]+\.py", PAGE))
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
