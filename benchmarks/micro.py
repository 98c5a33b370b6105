"""Micro benchmark: the rows of Ray's own, for hpcray, for Ray, or for both in turn, with the ratio.

    python benchmarks/micro.py
    python benchmarks/micro.py --engine both --ray-python /path/to/python --json table.json
    python benchmarks/micro.py --against /path/to/python
    hpcray-launch -n 2 benchmarks/micro.py --rows cross-node

Latency rows give the median of all single calls, the other rows the median of five windows. With `both` the engines run
in processes of their own, one after the other, in `--rounds` turns; each row's figure is its median over the turns.

`--against` compares with another version of hpcray, that of the other interpreter, with two sessions beside ours. The
three measure a row in turn, in windows of `--seconds` / 10 and in random order, so that what else the machine does
meets all of them. The ratio of ours is the median of windows with the same number; the spread, of which the middle half
is shown, is that of the other version against itself.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WINDOWS = 5
INIT_RUNS = 3
INIT = "init"
_INIT_CODE = """
import time, {engine} as engine
started = time.perf_counter()
engine.init(**{options})
print("took", time.perf_counter() - started)
engine.shutdown()
"""
_OPTIONS: dict[str, dict[str, Any]] = {
    "hpcray": {},
    "ray": {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"},
}
PUTS = (
    ("put of a large array", "single client put gigabytes", "(warm memcpy of the same size)"),
    ("put by several clients at once", "multi client put gigabytes", "(warm memcpy by as many clients)"),
)

Result = dict[str, Any]


def measure(row: Any, seconds: float) -> Result:
    """Time one row: a warm-up, then `seconds` of calls."""
    with row.prepared() as call:
        # A large put is only fast on pages that have been touched before.
        _repeat(call, 2.0 if row.unit == "GB/s" else min(1.0, seconds / 2))
        if row.unit == "us":
            samples = [took * 1e6 for took in _repeat(call, seconds)]
            value = statistics.median(samples)
            spread = {"p10": _quantile(samples, 0.1), "p90": _quantile(samples, 0.9), "p99": _quantile(samples, 0.99)}
        else:
            windows = [_repeat(call, seconds / WINDOWS) for _ in range(WINDOWS)]
            samples = [took for window in windows for took in window]
            rates = [row.amount * len(window) / sum(window) for window in windows]
            value = statistics.median(rates)
            spread = {"low": min(rates), "high": max(rates)}
    return {"name": row.name, "unit": row.unit, "value": value, "samples": len(samples), **spread}


def _repeat(call: Any, seconds: float) -> list[float]:
    """Seconds of each call, until `seconds` are over; at least one."""
    clock = time.perf_counter
    took: list[float] = []
    end = clock() + seconds
    while True:
        started = clock()
        counted = call()
        now = clock()
        took.append(now - started if counted is None else counted)
        if now >= end:
            return took


def _quantile(samples: list[float], share: float) -> float:
    return sorted(samples)[min(len(samples) - 1, int(share * len(samples)))]


def run_engine(engine: str, options: argparse.Namespace) -> list[Result]:
    """All wanted rows on one engine, in this process."""
    from micro_rows import all_rows

    wanted = re.compile(options.rows)
    results = []
    launched = "HPCRAY_ADDRESS" in os.environ
    if wanted.search(INIT) and not launched:
        results.append(_report(measure_init(engine)))
    ray = importlib.import_module(engine)
    ray.init(**_OPTIONS[engine])
    try:
        here = ray.get_runtime_context().get_node_id()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        other = next((node["NodeID"] for node in nodes if node["NodeID"] != here), None)
        for row in all_rows(ray, options.clients, large_object(nodes), other):
            if wanted.search(row.name):
                results.append(_report(measure(row, options.seconds)))
    finally:
        ray.shutdown()
    return results


def large_object(nodes: list[dict[str, Any]]) -> int:
    """Bytes of the large object, of which any node's store has room for three."""
    return min(800_000_000, min(int(node["Resources"].get("object_store_memory", 0)) for node in nodes) // 3)


def measure_init(engine: str) -> Result:
    """Seconds of `init()` in fresh processes, import not counted."""
    took = []
    for _ in range(INIT_RUNS):
        code = _INIT_CODE.format(engine=engine, options=_OPTIONS[engine])
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=180)
        took.append(float(done.stdout.split("took", 1)[1].split()[0]))
    return {"name": INIT, "unit": "s", "value": statistics.median(took), "samples": len(took), "high": max(took)}


def run_both(options: argparse.Namespace) -> dict[str, list[Result]]:
    """The rows on each engine in turn, in processes of their own; medians over the turns."""
    interpreters = {"hpcray": sys.executable, "ray": options.ray_python or sys.executable}
    turns: dict[str, list[list[Result]]] = {engine: [] for engine in interpreters}
    for turn in range(options.rounds):
        for engine, python in interpreters.items():
            print(f"-- {engine}, turn {turn + 1} of {options.rounds}", file=sys.stderr, flush=True)
            turns[engine].append(_run_child(engine, python, options))
    return {engine: [_median_of(rows) for rows in zip(*found, strict=True)] for engine, found in turns.items()}


def _run_child(engine: str, python: str, options: argparse.Namespace) -> list[Result]:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "rows.json"
        command = [python, __file__, "--engine", engine, "--json", str(out), "--rows", options.rows]
        command += ["--seconds", str(options.seconds), "--clients", str(options.clients)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        results: list[Result] = json.loads(out.read_text())["rows"][engine]
    return results


class _Version:
    """A session of one version of hpcray in a process of its own, which measures windows when it is asked."""

    def __init__(self, python: str, options: argparse.Namespace) -> None:
        command = [python, __file__, "--windows", "--rows", options.rows, "--clients", str(options.clients)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.rows: dict[str, str] = self.ask("rows")
        """Unit of each row, by name."""

    def ask(self, command: str, argument: Any = None) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([command, argument]), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        self.ask("end")
        self._process.wait()


def serve_windows(options: argparse.Namespace) -> None:
    """The other side of `_Version`: commands on stdin, answers on stdout, a line each; what else is printed goes to
    stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from micro_rows import all_rows

    import hpcray as ray

    ray.init()
    rows = {row.name: row for row in all_rows(ray, options.clients, large_object(ray.nodes()), None)}
    wanted = re.compile(options.rows)
    with contextlib.ExitStack() as stack:
        for line in sys.stdin:
            command, argument = json.loads(line)
            answer: Any = None
            if command == "rows":
                answer = {row.name: row.unit for row in rows.values() if wanted.search(row.name)}
            elif command == "prepare":
                row = rows[argument]
                call = stack.enter_context(row.prepared())
                _repeat(call, 1.0)
            elif command == "window":
                samples = _repeat(call, argument)
                spent = statistics.median(samples) if row.unit == "us" else sum(samples) / len(samples)
                answer = row.amount / spent
            elif command == "clean":
                stack.close()
            print(json.dumps(answer), file=answers)
            if command == "end":
                break
    ray.shutdown()


def run_against(options: argparse.Namespace) -> dict[str, list[Result]]:
    """The rows of this version beside those of another, as ratios of their rates (see the module)."""
    ours, first, second = (_Version(python, options) for python in (sys.executable, *[options.against] * 2))
    versions = (ours, first, second)
    results = []
    for name, unit in ours.rows.items():
        for version in versions:
            version.ask("prepare", name)
        rates: dict[_Version, list[float]] = {version: [] for version in versions}
        for _ in range(options.rounds):
            for version in random.sample(versions, len(versions)):
                rates[version].append(version.ask("window", options.seconds / 10))
        for version in versions:
            version.ask("clean")
        ratios = [new / math.sqrt(a * b) for new, a, b in zip(*rates.values(), strict=True)]
        itself = [ratio for a, b in zip(rates[first], rates[second], strict=True) for ratio in (a / b, b / a)]
        row = {"name": name, "unit": unit, "value": statistics.median(ratios), "samples": options.rounds}
        row |= {"low": _quantile(itself, 0.25), "high": _quantile(itself, 0.75)}
        verdict = "  slower" if row["value"] < row["low"] else "  faster" if row["value"] > row["high"] else ""
        print(f"{name:<46} {row['value']:>6.3f}   itself {row['low']:.3f} to {row['high']:.3f}{verdict}", flush=True)
        results.append(row)
    for version in versions:
        version.end()
    mean = math.exp(statistics.mean(math.log(row["value"]) for row in results))
    print(f"{'geometric mean':<46} {mean:>6.3f}")
    return {"ratio": results}


def _median_of(rows: tuple[Result, ...]) -> Result:
    return {
        **rows[0],
        "value": statistics.median(row["value"] for row in rows),
        "turns": [row["value"] for row in rows],
    }


def ratio(ours: Result, theirs: Result) -> float:
    """How many times better `ours` is."""
    less_is_better = ours["unit"] in ("us", "ms", "s")
    top, bottom = (theirs, ours) if less_is_better else (ours, theirs)
    return float(top["value"] / bottom["value"])


def show(value: float, unit: str) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def _report(result: Result) -> Result:
    spread = f"p10 {result['p10']:.0f}  p99 {result['p99']:.0f}" if "p99" in result else ""
    print(f"{result['name']:<46} {show(result['value'], result['unit']):>16}   {spread}", flush=True)
    return result


def print_table(rows: dict[str, list[Result]]) -> None:
    """Both engines side by side."""
    print(f"{'':<46} {'hpcray':>16} {'ray':>16} {'ratio':>8}")
    theirs = {row["name"]: row for row in rows["ray"]}
    for row in rows["hpcray"]:
        other = theirs.get(row["name"])
        columns = f"{show(row['value'], row['unit']):>16}"
        if other is not None:
            columns += f" {show(other['value'], other['unit']):>16} {ratio(row, other):>7.1f}x"
        print(f"{row['name']:<46} {columns}")


def print_put_ratio(engine: str, rows: list[Result]) -> None:
    """What part of a plain copy's speed a put reaches."""
    found = {row["name"]: row["value"] for row in rows}
    for what, put, copy in PUTS:
        if put in found and copy in found:
            print(f"{engine}: {what} reaches {found[put] / found[copy]:.2f} of a warm memcpy in the same run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--engine", choices=["hpcray", "ray", "both"], default="hpcray")
    add("--ray-python", default="", metavar="PATH", help="interpreter that has Ray (default: this one)")
    add("--against", default="", metavar="PATH", help="interpreter of another version of hpcray to compare with")
    add("--windows", action="store_true", help=argparse.SUPPRESS)
    add("--rows", default="", metavar="REGEX", help="only rows whose name matches")
    add("--seconds", type=float, default=2.0, help="measuring time of a row (default 2)")
    add("--rounds", type=int, help="turns with --engine both (default 3), windows with --against (default 15)")
    add("--clients", type=int, default=max(2, (os.cpu_count() or 2) // 2), help="clients in the rows that have several")
    add("--json", metavar="OUT", help="write all figures to this file")
    options = parser.parse_args()
    options.rounds = options.rounds or (15 if options.against else 3)
    if options.engine != "hpcray" and "HPCRAY_ADDRESS" in os.environ:
        parser.error("under hpcray-launch only hpcray can be measured; hint: leave --engine out")

    if options.windows:
        serve_windows(options)
        return
    if options.against:
        rows = run_against(options)
    elif options.engine == "both":
        rows = run_both(options)
        print_table(rows)
    else:
        rows = {options.engine: run_engine(options.engine, options)}
    if not options.against:
        for engine, results in rows.items():
            print_put_ratio(engine, results)
    if options.json:
        machine = {
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "system": platform.platform(),
            "load": os.getloadavg(),
        }
        Path(options.json).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
