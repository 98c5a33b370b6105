"""What a task costs that waits: memory and CPU time of one driver that submits many more tasks than can run.

    python benchmarks/queued.py                      # a million, without arguments and with one
    python benchmarks/queued.py --tasks 100000 --json OUT
    python benchmarks/queued.py --durable            # what durable=True adds, with joblib.Memory beside it
    python benchmarks/queued.py --history --pairs 7  # what the history of the job adds

The only CPU of the node is busy until all are queued. Counted is the driver's resident memory and CPU time between the
first submission and the last one, the program's own list of refs included, and the memory (Pss) and CPU time of all
processes of the job. Then the tasks run, or are cancelled by the end of the session.

`--durable` measures, in turn with and without `durable=True`: the driver's CPU time of a submission by kind of
argument; the CPU time of all processes for a task that is computed; the time of one whose result is found; and the time
of `hpcray durable du` in a directory of a million results. Medians of `--pairs` pairs, each side in a process of
its own. `--history` measures the CPU time of all processes for `--tasks` empty tasks, in turn with the history and
without, and prints the median of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import enum
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import hpcray as ray

_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Each row in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", choices=list(ROWS), help=argparse.SUPPRESS)
    parser.add_argument("--run", action="store_true", help="let them run, and get every value")
    parser.add_argument("--durable", action="store_true", help="what durable=True adds")
    parser.add_argument("--history", action="store_true", help="what the history adds")
    parser.add_argument("--pairs", type=int, default=5, help="with these two: how often each side is measured")
    parser.add_argument("--side", choices=[*SIDES, *HISTORY], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side in HISTORY:
        print(json.dumps(with_history(given.side, given.tasks)))
        return
    if given.side:
        print(json.dumps(SIDES[given.side]()))
        return
    if given.history:
        compare_history(given.tasks, given.pairs, given.json)
        return
    if given.durable:
        compare_durable(given.pairs, given.json)
        return
    if given.row:
        print(json.dumps(measure(given.row, given.tasks, given.run)))
        return
    rows = []
    for row in ROWS:
        command = [sys.executable, __file__, "--row", row, "--tasks", str(given.tasks), *(["--run"] * given.run)]
        rows.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
        print(json.dumps(rows[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


ROWS: dict[str, Any] = {
    "no argument": lambda task, count: [task.remote() for _ in range(count)],
    "one integer": lambda task, count: [task.remote(i) for i in range(count)],
}


def measure(row: str, tasks: int, run: bool) -> dict[str, Any]:
    """Bytes and microseconds per queued task."""
    with tempfile.TemporaryDirectory() as directory:
        gate = Path(directory, "gate")
        ray.init(num_cpus=1)

        @ray.remote
        def task(x: int = 0) -> int:
            return x

        ray.get(task.remote())
        held = ray.remote(_hold).remote(str(gate))
        refs = ROWS[row](task, 100)  # what is made once is made now
        gc.collect()
        resident, used = _resident(), time.process_time()
        all_memory, all_used = _job()
        refs += ROWS[row](task, tasks)
        used, resident = time.process_time() - used, _resident() - resident
        found = {
            "row": row,
            "tasks": tasks,
            "driver_bytes": round(resident / tasks),
            "driver_us": round(used / tasks * 1e6, 2),
        }
        memory, cpu = _job()
        found["job_bytes"] = round((memory - all_memory) / tasks)
        found["job_us"] = round((cpu - all_used) / tasks * 1e6, 2)
        if run:
            gate.touch()
            began = time.monotonic()
            values = ray.get(refs)
            assert len(values) == tasks + 100
            found["run_us"] = round((time.monotonic() - began) / tasks * 1e6, 2)
        else:
            gate.touch()
            ray.get(held)
        ray.shutdown()
    return found


def _hold(path: str) -> None:
    """Keep a CPU busy until there is a file."""
    while not os.path.exists(path):
        time.sleep(0.01)


# ------------------------------------------------------------ durable tasks


@dataclasses.dataclass
class Options:
    """An argument of a class of the program's."""

    rate: float = 0.1
    name: str = "adam"
    layers: list[int] = dataclasses.field(default_factory=lambda: [64, 32])


@dataclasses.dataclass
class Study:
    """An argument that holds others of classes of the program's."""

    number: int
    options: Options
    further: list[Options]


class Colour(enum.Enum):
    """An argument without state."""

    RED = 1
    BLUE = 2


_START = datetime.datetime(2026, 1, 1)
ARGUMENTS: dict[str, Any] = {
    "a number": lambda i: i,
    "a text of 1 KB": lambda i: f"{i:>1000}",
    "bytes of 1 KB": lambda i: b"%1000d" % i,
    "a tuple": lambda i: (i, "name", 0.5, None),
    "a list of 100 numbers": lambda i: [i, *range(99)],
    "a list of 150 numbers and texts": lambda i: [i, *range(100), *map(str, range(49))],
    "a nested dict": lambda i: {"model": {"layers": [i, 32], "opt": {"name": "adam", "rate": 0.1}}, "tags": ["a", "b"]},
    "a dict of 20 lists": lambda i: {f"k{j}": [i, j * 0.5, None] for j in range(20)},
    "a dataclass": lambda i: Options(i),
    "nested dataclasses": lambda i: Study(i, Options(i), [Options(0.5), Options(0.2)]),
    "an array of 1 KB": lambda i: np.full(128, i),
    "a member of an enum": lambda i: [Colour.RED, i],
    "a datetime": lambda i: _START + datetime.timedelta(seconds=i),
    "a set of 20 numbers": lambda i: {i, *range(100_000, 100_019)},
    "a set of 20 texts": lambda i: {str(i), *map(str, range(100_000, 100_019))},
    "a ref of a durable task": lambda i: [i, _made[0]],
    "20 refs of durable tasks": lambda i: [i, *_made],
}
_made: list[Any] = []
LARGE = 8_000_000
SUBMITTED, COMPUTED, FOUND = 3_000, 20_000, 3_000


def submissions(durable: bool) -> dict[str, float]:
    """The driver's microseconds of CPU for a submission by argument, and gigabytes/s of what a large one takes more."""
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        os.environ["HPCRAY_DURABLE_DIR"] = f"{directory}/kept"
        gate = Path(directory, "gate")
        ray.init(num_cpus=1)

        @ray.remote(durable=durable)
        def task(x: object) -> int:
            return 0

        _made[:] = [ray.remote(durable=True)(lambda x: x).remote(i) for i in range(20)]
        ray.get([task.remote(-1), *_made])
        held = ray.remote(_hold).remote(str(gate))
        for name, argument in ARGUMENTS.items():
            values = [argument(i) for i in range(SUBMITTED)]
            began = time.process_time()
            refs = [task.remote(value) for value in values]
            found[name] = (time.process_time() - began) / SUBMITTED * 1e6
            del refs
        large = [np.full(LARGE // 8, i) for i in range(10)]
        began = time.process_time()
        refs = [task.remote(value) for value in large]
        found["bytes"] = (time.process_time() - began) / len(large) * 1e6
        del refs
        _made.clear()
        gate.touch()
        ray.get(held)
        ray.shutdown()
    return found


def computed(durable: bool) -> dict[str, float]:
    """Microseconds of CPU of all processes for a task that is computed; and of time for one that is found."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ["HPCRAY_DURABLE_DIR"] = f"{directory}/kept"
        ray.init(num_cpus=2)

        @ray.remote(durable=durable)
        def task(x: int) -> int:
            return x

        ray.get([task.remote(-i) for i in range(1, 2000)])
        _, before = _job()
        ray.get([task.remote(i) for i in range(COMPUTED)])
        _, after = _job()
        found = {"all processes": (after - before) / COMPUTED * 1e6}
        if durable:
            time.sleep(1.5)
            ray.get(task.remote(0))
            took = []
            for i in range(FOUND):
                began = time.perf_counter()
                ray.get(task.remote(i))
                took.append(time.perf_counter() - began)
            found["found"] = statistics.median(took) * 1e6
        ray.shutdown()
    return found


def by_joblib() -> dict[str, float]:
    """Microseconds of a call that joblib computes and keeps, and of one that it finds."""
    import joblib

    with tempfile.TemporaryDirectory() as directory:
        cached = joblib.Memory(directory, verbose=0).cache(_identity)
        found = {}
        for row in ("computed", "found"):
            took = []
            for i in range(1000):
                began = time.perf_counter()
                cached(i)
                took.append(time.perf_counter() - began)
            found[row] = statistics.median(took) * 1e6
        array = np.zeros(LARGE // 8)
        began = time.process_time()
        joblib.hash(array)
        found["bytes"] = (time.process_time() - began) * 1e6
    return found


def _identity(x: int) -> int:
    return x


def counted() -> dict[str, float]:
    """Seconds of `hpcray durable du` in a directory of a million results: the first time, and later."""
    from hpcray.durable.result_store import VALUE, Meta, ResultStore, value_record

    with tempfile.TemporaryDirectory() as directory:
        store = ResultStore(f"{directory}/kept", "n0")
        for start in range(0, 1_000_000, 10_000):
            numbers = range(start, start + 10_000)
            keys = [hashlib.sha256(str(number).encode()).digest() for number in numbers]
            store.append([value_record(None, key, VALUE, 0, Meta(name="task"), [b"value"]) for key in keys])
        store.close()
        found = {}
        for row in ("du, the first time", "du, later"):
            began = time.perf_counter()
            command = [sys.executable, "-m", "hpcray.cli", "durable", "du", "--dir", f"{directory}/kept"]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            assert said.startswith("1,000,000 results"), said
            found[row] = time.perf_counter() - began
    return found


HISTORY = {"history on": "1", "history off": "0"}


def with_history(side: str, tasks: int) -> dict[str, float]:
    """Microseconds of CPU time of all processes for an empty task, and bytes on the disk."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ["HPCRAY_HISTORY"] = HISTORY[side]
        os.environ["HPCRAY_HISTORY_DIR"] = directory
        ray.init(num_cpus=2)

        @ray.remote
        def empty() -> None:
            pass

        ray.get([empty.remote() for _ in range(20_000)])
        _, before = _job()
        ray.get([empty.remote() for _ in range(tasks)])
        _, after = _job()
        ray.shutdown()
        size = sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())
    return {"us": (after - before) / tasks * 1e6, "bytes": size / tasks}


def compare_history(tasks: int, pairs: int, out: Path | None) -> None:
    """Measure both sides in turn, and print each pair and the median of their ratios."""
    turns = []
    for turn in range(pairs):
        pair = {}
        for side in list(HISTORY)[:: 1 if turn % 2 else -1]:
            command = [sys.executable, __file__, "--side", side, "--tasks", str(tasks)]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            pair[side] = json.loads(said.splitlines()[-1])
        turns.append(pair)
        print(json.dumps(pair), flush=True)
    ratio = statistics.median(pair["history on"]["us"] / pair["history off"]["us"] for pair in turns)
    print(
        f"{100 * (ratio - 1):+.1f} % CPU time of all processes, {turns[-1]['history on']['bytes']:.1f} B a task on disk"
    )
    if out:
        out.write_text(json.dumps(turns, indent=1) + "\n")


SIDES: dict[str, Any] = {
    "submit plain": lambda: submissions(False),
    "submit durable": lambda: submissions(True),
    "compute plain": lambda: computed(False),
    "compute durable": lambda: computed(True),
    "joblib": by_joblib,
    "du": counted,
}


def compare_durable(pairs: int, out: Path | None) -> None:
    """Measure all sides in turn, and print medians."""
    turns: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for turn in range(pairs):
        for side in SIDES if turn == 0 else [side for side in SIDES if side != "du"]:
            command = [sys.executable, __file__, "--side", side]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            turns[side].append(json.loads(said.splitlines()[-1]))

    def median(side: str, row: str) -> float:
        return statistics.median(turn[row] for turn in turns[side])

    def more(kind: str, row: str) -> float:
        """What a durable task takes more than the plain one before it."""
        return statistics.median(
            turn[row] - plain[row] for turn, plain in zip(turns[f"{kind} durable"], turns[f"{kind} plain"], strict=True)
        )

    rows = [(f"submission with {name}, the driver's CPU", more("submit", name), "us more") for name in ARGUMENTS]
    rows += [
        ("submission with 8 MB, hashed at", LARGE / more("submit", "bytes") / 1e3, "GB/s"),
        ("the same by joblib.hash", LARGE / median("joblib", "bytes") / 1e3, "GB/s"),
        ("a task that is computed, CPU of all processes", more("compute", "all processes"), "us more"),
        ("a call that joblib.Memory computes", median("joblib", "computed"), "us"),
        ("a task that is found", median("compute durable", "found"), "us"),
        ("a call that joblib.Memory finds", median("joblib", "found"), "us"),
        *((f"a million results: {row}", seconds, "s") for row, seconds in turns["du"][0].items()),
    ]
    for name, figure, unit in rows:
        print(f"{name:<68}{figure:>10.2f} {unit}")
    if out:
        out.write_text(json.dumps({"rows": rows, "turns": turns}, indent=1) + "\n")


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _job() -> tuple[int, float]:
    """Bytes (Pss) and seconds of CPU of this process and all its descendants."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
            seconds[int(entry.name)] = (int(fields[11]) + int(fields[12])) / _TICKS
    ours, grew = {os.getpid()}, True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in ours} - ours
        ours |= more
        grew = bool(more)
    memory = 0
    for pid in ours:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        memory += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) * 1024
    return memory, sum(seconds[pid] for pid in ours)


if __name__ == "__main__":
    main()
