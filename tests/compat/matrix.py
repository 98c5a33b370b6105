"""`python -m tests.compat.matrix [--write]`: runs the tests of the table, makes the matrix of the document.

A row *works* when its tests pass, *differs* when one of them says what is not as in Ray, is *missing* when hpcray does
not have it (and a test shows that it says so, or ended because of it), and *broken* when a test fails.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs" / "ray-compatibility.md"
BEGIN, END = "<!-- matrix: made by python -m tests.compat.matrix --write -->", "<!-- /matrix -->"


class Found:
    """A pytest plugin: what the tests of each row said."""

    def __init__(self) -> None:
        self.marks: dict[str, list[Any]] = {}
        self.said: dict[str, list[tuple[str, str]]] = {}
        self.tests: dict[str, set[str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Which test shows which row."""
        for item in items:
            self.marks[item.nodeid] = list(item.iter_markers("row"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """How a test ended."""
        ended = report.when == "call" or report.outcome != "passed"
        for mark in self.marks.get(report.nodeid, ()) if ended else ():
            rows = self.said.setdefault(mark.args[0], [])
            self.tests.setdefault(mark.args[0], set()).add(report.nodeid.partition("[")[0])
            if hasattr(report, "wasxfail"):
                rows.append(("missing", report.wasxfail.removeprefix("reason: ")))
            elif report.outcome != "passed":
                rows.append(("broken" if report.outcome == "failed" else "not tested", report.nodeid))
            elif mark.kwargs.get("missing"):
                rows.append(("missing", mark.kwargs["missing"]))
            elif mark.kwargs.get("differs"):
                rows.append(("differs", mark.kwargs["differs"]))
            else:
                rows.append(("works", ""))


def table(found: Found) -> list[str]:
    """The matrix as Markdown lines."""
    from .rows import ROWS

    order = ["works", "differs", "missing", "not tested", "broken"]
    lines = ["| name | importance | state | what differs, and why |", "| --- | --- | --- | --- |"]
    section = ""
    for row in ROWS:
        if row.section != section:
            section = row.section
            lines.append(f"| **{section}** | | | |")
        said = found.said.get(row.name, [("not tested", "")])
        state = max((state for state, _ in said), key=order.index)
        why = "; ".join(dict.fromkeys(text.replace("|", "\\|") for _, text in said if text))
        lines.append(f"| `{row.name}` | {row.importance} | {state} | {why} |")
    return lines


def main() -> int:
    """Run and print, or write into the document."""
    found = Found()
    directory = Path(__file__).parent
    code = pytest.main(
        ["-q", "-m", "", "-p", "no:cacheprovider", f"--ignore={directory}/test_matrix.py", str(directory)],
        plugins=[found],
    )
    lines = table(found)
    if "--write" in sys.argv:
        text = DOCS.read_text()
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        DOCS.write_text("\n".join([before + BEGIN, "", *lines, "", END + after]))
    else:
        print("\n".join(lines))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
