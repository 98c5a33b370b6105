"""The tables as pictures: one PNG for each row of the suite, with a line for each wire; or one picture of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from table import SAME_HOST, Column

_LABELS = dict.fromkeys(("latency", "fetch", "bcast", "allgather", "alltoall"), "time (µs)")
_SUMMARY = (("fetch", "one request and its answer"), ("bw", "a window of messages"))
_LINES = (SAME_HOST, f"{SAME_HOST}, copied", "objects (ucx)", "objects (mpi)", "ucxx", "ucxx (defaults)", "mpi4py")


def draw(directory: str, tables: dict[str, dict[str, Column]], about: str) -> list[str]:
    """Write the pictures; returns their paths.

    Args:
        directory: is made if it does not exist.
        tables: row of the suite to wire to figures.
        about: what was measured where, for the title.

    Raises:
        ImportError: there is no matplotlib (the extra `bench` brings it).
    """
    pyplot = _pyplot()
    Path(directory).mkdir(parents=True, exist_ok=True)
    written = []
    for row, columns in tables.items():
        if not columns:
            continue
        figure, axes = pyplot.subplots(figsize=(7, 4.4))
        _lines(axes, row, columns, list(columns))
        axes.set_title(f"osu_{row}: {about}", fontsize=9)
        path = str(Path(directory, f"osu_{row}.png"))
        figure.savefig(path, dpi=90, bbox_inches="tight")
        pyplot.close(figure)
        written.append(path)
    return written


def summary(path: str, tables: dict[str, dict[str, Column]], about: str) -> None:
    """One small picture: how long a `get` takes, and how much it brings, beside what it is made of.

    Raises:
        ImportError: there is no matplotlib (the extra `bench` brings it).
    """
    pyplot = _pyplot()
    figure, both = pyplot.subplots(1, len(_SUMMARY), figsize=(10, 3.6))
    for axes, (row, title) in zip(both, _SUMMARY, strict=True):
        columns = tables.get(row, {})
        _lines(axes, row, columns, [name for name in _LINES if name in columns])
        axes.set_title(title, fontsize=9)
    figure.suptitle(about, fontsize=8)
    figure.savefig(path, dpi=70, bbox_inches="tight")
    pyplot.close(figure)


def _lines(axes: Any, row: str, columns: dict[str, Column], names: list[str]) -> None:
    for name in names:
        sizes = sorted(columns[name])
        axes.plot(sizes, [columns[name][size] for size in sizes], marker="o", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("size (bytes)")
    axes.set_ylabel(_LABELS.get(row, "MB/s"))
    axes.grid(True, alpha=0.3)
    if names:
        axes.legend(fontsize=8)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
