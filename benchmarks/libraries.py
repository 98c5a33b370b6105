"""Ray's own libraries on hpcray, on Ray, or on both in turn, with the ratio: `library_rows.py`.

    export HPCRAY_RAY_LIBRARIES=DIR      # an unpacked wheel of Ray
    python benchmarks/libraries.py --rows data
    python benchmarks/libraries.py --engine both --ray-python /path/to/python --json libraries.json

Every row runs in a process and a job of its own: what is left in a store by one does not help or hinder the next. With
`both` the engines take turns within a row.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from library_rows import ROWS, Row
from micro import print_table, show

TIMEOUT = 1200.0
_ALWAYS: dict[str, dict[str, Any]] = {
    "hpcray": {"log_to_driver": False, "logging_level": "error"},
    "ray": {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"},
}


def inside(engine: str, wanted: Row, cpus: int, out: str) -> None:
    """Run one row in this process; its figure goes to a file."""
    if engine == "hpcray":
        importlib.import_module("hpcray.compat.ray")
    ray = importlib.import_module("ray")
    ray.init(num_cpus=cpus, **_ALWAYS[engine], **wanted.options)
    try:
        work = wanted.work(ray)
        next(work)
        started = time.perf_counter()
        amount = None
        try:
            next(work)
        except StopIteration as ended:
            amount = ended.value
        took = time.perf_counter() - started
    finally:
        ray.shutdown()
    figure = took if amount is None else amount if wanted.unit == "ms" else amount / took
    Path(out).write_text(json.dumps(figure))


def measure(engine: str, python: str, wanted: Row, cpus: int) -> float | None:
    """A row's figure from a process of its own; None if it failed, and its output is shown."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "figure.json"
        command = [python, __file__, "--engine", engine, "--cpus", str(cpus), "--inside", wanted.name, str(out)]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            print(f"-- {engine}: {wanted.name}: not done after {TIMEOUT:.0f} s", file=sys.stderr, flush=True)
            return None
        if not out.exists():
            print(f"-- {engine}: {wanted.name}:\n{done.stdout[-4000:]}", file=sys.stderr, flush=True)
            return None
        figure: float = json.loads(out.read_text())
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--engine", choices=["hpcray", "ray", "both"], default="hpcray")
    add("--ray-python", default="", metavar="PATH", help="interpreter that has Ray (default: this one)")
    add("--rows", default="", metavar="REGEX", help="only rows whose name matches")
    add("--rounds", type=int, default=1, help="turns of each engine and row (default 1)")
    add("--cpus", type=int, default=os.cpu_count() or 2, help="CPUs of the job (default: those of this machine)")
    add("--json", metavar="OUT", help="write all figures to this file")
    add("--inside", nargs=2, metavar=("ROW", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(
            options.engine, next(row for row in ROWS if row.name == options.inside[0]), options.cpus, options.inside[1]
        )
        return 0
    engines = ["hpcray", "ray"] if options.engine == "both" else [options.engine]
    pythons = {"hpcray": sys.executable, "ray": options.ray_python or sys.executable}
    table: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
    failed = False
    for row in ROWS:
        if not re.search(options.rows, row.name):
            continue
        found: dict[str, list[float]] = {engine: [] for engine in engines}
        for _ in range(options.rounds):
            for engine in engines:
                figure = measure(engine, pythons[engine], row, options.cpus)
                failed |= figure is None
                if figure is not None:
                    found[engine].append(figure)
                    print(f"-- {engine:<7} {row.name:<46} {show(figure, row.unit):>16}", file=sys.stderr, flush=True)
        for engine in engines:
            if turns := found[engine]:
                value = statistics.median(turns)
                table[engine].append({"name": row.name, "unit": row.unit, "value": value, "turns": turns})
    print_table({"ray": [], **table}) if table.get("hpcray") else None
    if options.json:
        Path(options.json).write_text(json.dumps(table, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
