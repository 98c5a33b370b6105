"""What an operation costs in Python: calls and bytecodes in driver and worker, counted. Exact, whatever else runs.

    python benchmarks/calls.py
    python benchmarks/calls.py --json calls.json

Counted is what the calling thread runs, and the worker's main thread; an async actor's loop is not. A second
run differs by what happens now and then: an answer that came in two pieces, a timer. Each figure is a mean.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import hpcray as ray

CALLS = 200
BATCH = 50
Figures = dict[str, float]


class Counter:
    """Calls of Python functions, of C functions, and bytecodes of the calling thread while it is on.

    Bytecodes take a second round: the two hooks would count each other.
    """

    def __init__(self) -> None:
        self.python = self.native = self.bytecodes = 0

    def _call(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            self.python += 1
        elif event == "c_call":
            self.native += 1

    def _opcode(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            self.bytecodes += 1
        return self._opcode

    def start(self, bytecodes: bool) -> None:
        """From here on."""
        if bytecodes:
            sys.settrace(self._opcode)
        else:
            sys.setprofile(self._call)

    def stop(self) -> None:
        """Up to here."""
        sys.setprofile(None)
        sys.settrace(None)

    def per(self, operations: int) -> Figures:
        """The means."""
        kinds = {"python": self.python, "c": self.native, "bytecodes": self.bytecodes}
        return {kind: count / operations for kind, count in kinds.items()}


_here = Counter()


def count_here(start: bool, bytecodes: bool) -> Figures:
    """In a worker: begin to count, or end and tell."""
    if start:
        globals()["_here"] = Counter()
        _here.start(bytecodes)
        return {}
    _here.stop()
    return {"python": _here.python, "c": _here.native, "bytecodes": _here.bytecodes}


def measure(operation: Callable[[], object], worker: Callable[[bool, bool], Figures] | None, size: int) -> Figures:
    """Count one operation in the driver and, where there is one, in the worker that does it.

    Args:
        worker: runs `count_here` there.
        size: operations that one call of `operation` makes.
    """
    for _ in range(CALLS):
        operation()
    ours, theirs = Counter(), {"python": 0.0, "c": 0.0, "bytecodes": 0.0}
    rounds = max(1, CALLS // size)
    for bytecodes in (False, True):
        if worker is not None:
            worker(True, bytecodes)
        ours.start(bytecodes)
        for _ in range(rounds):
            operation()
        ours.stop()
        if worker is not None:
            for kind, count in worker(False, bytecodes).items():
                theirs[kind] += count
    total = rounds * size
    return ours.per(total) | {f"worker {kind}": count / total for kind, count in theirs.items()}


def run() -> dict[str, Figures]:
    """All operations."""

    @ray.remote
    def small_value() -> bytes:
        return b"ok"

    @ray.remote
    def small_value_arg(x: object) -> bytes:
        return b"ok"

    count_task = ray.remote(count_here)

    @ray.remote(num_cpus=0)
    class Actor:
        def small_value(self) -> bytes:
            return b"ok"

        def count(self, start: bool, bytecodes: bool) -> Figures:
            return count_here(start, bytecodes)

    actor = Actor.remote()
    ref = ray.put(0)

    def in_task(start: bool, bytecodes: bool) -> Figures:
        found: Figures = ray.get(count_task.remote(start, bytecodes))
        return found

    def in_actor(start: bool, bytecodes: bool) -> Figures:
        found: Figures = ray.get(actor.count.remote(start, bytecodes))
        return found

    def puts() -> None:
        for _ in range(BATCH):
            ray.put(0)

    return {
        "get": measure(lambda: ray.get(ref), None, 1),
        "put, and its end": measure(puts, None, BATCH),
        "task, sync": measure(lambda: ray.get(small_value.remote()), in_task, 1),
        "task with a number": measure(lambda: ray.get(small_value_arg.remote(1)), in_task, 1),
        "task, async": measure(lambda: ray.get([small_value.remote() for _ in range(BATCH)]), in_task, BATCH),
        "actor call, sync": measure(lambda: ray.get(actor.small_value.remote()), in_actor, 1),
        "actor call, async": measure(
            lambda: ray.get([actor.small_value.remote() for _ in range(BATCH)]), in_actor, BATCH
        ),
    }


def main() -> None:
    """Count, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="OUT", help="write the figures to this file")
    options = parser.parse_args()
    ray.init(num_cpus=1)
    rows = run()
    ray.shutdown()
    columns = list(next(iter(rows.values())))
    print(f"{'':<22}" + "".join(f"{column:>18}" for column in columns))
    for name, figures in rows.items():
        print(f"{name:<22}" + "".join(f"{figures[column]:>18.1f}" for column in columns))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
