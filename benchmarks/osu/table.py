"""Tables in the manner of the OSU micro-benchmarks."""

from __future__ import annotations

Column = dict[int, float]
"""Message size in bytes to the figure."""
SAME_HOST = "objects (same host)"
"""The column of objects that are read in the store of another node of this host."""


def show(title: str, unit: str, columns: dict[str, Column]) -> str:
    """One table: a line per size, a column per wire; `-` where a wire was not measured."""
    sizes = sorted({size for column in columns.values() for size in column})
    names = list(columns)
    width = max([14, *(len(name) + 2 for name in names)])
    lines = [f"# {title} ({unit})", "# Size".ljust(12) + "".join(name.rjust(width) for name in names)]
    for size in sizes:
        cells = (f"{columns[name][size]:.2f}" if size in columns[name] else "-" for name in names)
        lines.append(str(size).ljust(12) + "".join(cell.rjust(width) for cell in cells))
    return "\n".join(lines)


def ratios(columns: dict[str, Column], above: str, below: str) -> Column:
    """One column over another, where both have a figure."""
    over, under = columns.get(above, {}), columns.get(below, {})
    return {size: over[size] / under[size] for size in over if under.get(size)}
