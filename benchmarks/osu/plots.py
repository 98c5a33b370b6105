"""The tables as pictures: one PNG for each row of the suite, with a line for each wire."""

from __future__ import annotations

from pathlib import Path

from table import Column

_LABELS = {"latency": "time (µs)", "fetch": "time (µs)", "bcast": "time (µs)", "allgather": "time (µs)"}


def draw(directory: str, tables: dict[str, dict[str, Column]], about: str) -> list[str]:
    """Write the pictures; returns their paths.

    Args:
        directory: is made if it does not exist.
        tables: row of the suite to wire to figures.
        about: what was measured where, for the title.

    Raises:
        ImportError: there is no matplotlib (the extra `bench` brings it).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    Path(directory).mkdir(parents=True, exist_ok=True)
    written = []
    for row, columns in tables.items():
        if not columns:
            continue
        figure, axes = pyplot.subplots(figsize=(7, 4.4))
        for name, column in columns.items():
            sizes = sorted(column)
            axes.plot(sizes, [column[size] for size in sizes], marker="o", markersize=3, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("size (bytes)")
        axes.set_ylabel(_LABELS.get(row, "MB/s"))
        axes.set_title(f"osu_{row}: {about}", fontsize=9)
        axes.grid(True, which="both", alpha=0.3)
        axes.legend()
        path = str(Path(directory, f"osu_{row}.png"))
        figure.savefig(path, dpi=90, bbox_inches="tight")
        pyplot.close(figure)
        written.append(path)
    return written
