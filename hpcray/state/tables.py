"""Rows and counts as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_WIDEST = 60


def show_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Aligned columns under their names; nothing where there are no rows."""
    if not rows:
        return
    cells = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()


def show_summary(summary: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line per name: its counts."""
    rows = []
    for name, known in sorted(summary.items()):
        counts = known.get("state_counts") or known.get("task_state_counts") or {}
        others = [f"{key}: {_number(value)}" for key, value in known.items() if isinstance(value, (int, float))]
        rows.append([name, ", ".join([*(f"{state}: {count}" for state, count in sorted(counts.items())), *others])])
    yield from show_table(["name", "counts"], rows)


def _cell(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"
