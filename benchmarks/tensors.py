"""PyTorch CPU tensors as objects, beside NumPy arrays of the same bytes and beside the copies themselves.

    python benchmarks/tensors.py
    python benchmarks/tensors.py --engine both --ray-python /path/to/python --json table.json

Rows, in GB/s (median of the rounds):

- put: `ray.put` of the value by the driver, into warm memory of the store.
- actor to actor: one actor returns the value, another one takes it as an argument and reads all of it. The clock runs
  in the driver, from the first call to the second one's answer.
- one copy by hand: of that very value into warm memory, what "put" comes to. NumPy's memory is of huge pages where the
  kernel gives them to who asks; PyTorch's only with THP_MEM_ALLOC_ENABLE=1 in the environment.
- two copies by hand: a copy into warm memory and a copy of that into fresh memory, what "actor to actor" comes to.

A row ends after `--limit` seconds, with as many calls as there were then (one at least); each is printed on stderr when
it is known. With `both`, each engine measures in processes of its own, in turns: hpcray, Ray, hpcray, ... A figure is
the median of its turns, or all that is known where a turn failed or took longer than all of its limits together.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

try:
    import torch
except ImportError:  # `--help` needs none
    torch = None

SIZES = {"4 KB": 4_000, "1 MB": 1_000_000, "100 MB": 100_000_000, "0.8 GB": 800_000_000}
PARTS = 300
"""Tensors in a state dict."""
_STORE = 4 << 30


def state_dict(size: int) -> dict[str, torch.Tensor]:
    """`PARTS` tensors of `size` bytes in all, in memory of their own."""
    return {f"layer.{number}.weight": torch.ones(size // PARTS // 4) for number in range(PARTS)}


KINDS: dict[str, Callable[[int], Any]] = {
    "NumPy array": lambda size: np.ones(size // 4, np.float32),
    "tensor": lambda size: torch.ones(size // 4),
    f"state dict of {PARTS} tensors": state_dict,
}


def touch(value: Any) -> float:
    """Read the value as a program would that uses it: one element of every page at least."""
    if isinstance(value, dict):
        return sum(map(touch, value.values()))
    return float(value[::1024].sum())


class Producer:
    """Makes a value once and returns it as often as it is asked."""

    def __init__(self, kind: str, size: int) -> None:
        self.value = KINDS[kind](size)

    def ready(self) -> bool:
        return True

    def give(self) -> Any:
        return self.value

    def take(self, value: Any) -> float:
        return touch(value)


class Consumer:
    """Takes a value and reads it."""

    def take(self, value: Any) -> float:
        return touch(value)


WARM_UP, CALLS = 2, 5
"""Calls before those that count, and how many count at least, unless the limit ends them."""


class Rows:
    """The figures of one engine.

    Args:
        engine: its name, for what is printed. seconds: for each row. limit: seconds after which a row ends.
        file: where the figures are written after each row; None: nowhere.

    Attributes:
        found: GB/s of each row, by its name.
    """

    def __init__(self, engine: str, seconds: float, limit: float, file: Path | None) -> None:
        self.found: dict[str, float] = {}
        self._engine, self._seconds, self._limit, self._file = engine, seconds, limit, file

    def add(self, row: str, size: int, call: Callable[[], Any]) -> None:
        """Measure a row: the median call."""
        took: list[float] = []
        began = time.perf_counter()
        counts_from = began
        while True:
            started = time.perf_counter()
            result = call()
            ended = time.perf_counter()
            took.append(ended - started)
            del result
            if len(took) == WARM_UP:
                counts_from = ended
            enough = len(took) >= WARM_UP + CALLS and ended - counts_from > self._seconds
            if enough or ended - began > self._limit:
                break
        counted = took[WARM_UP:] or took[-1:]
        self.found[row] = size / statistics.median(counted) / 1e9
        text = f"{self._engine:8}{row:48}{self.found[row]:10.3f} GB/s {len(counted):4} calls {ended - began:6.1f} s"
        print(text, file=sys.stderr, flush=True)
        if self._file is not None:
            self._file.write_text(json.dumps({self._engine: self.found}, indent=1))


def one_copy(value: Any, size: int) -> Callable[[], None]:
    """A copy of the value into warm memory, by NumPy."""
    warm = np.ones(size, np.uint8)
    arrays = [np.asarray(part).view(np.uint8) for part in (value.values() if isinstance(value, dict) else [value])]

    def copy() -> None:
        start = 0
        for array in arrays:
            np.copyto(warm[start : start + len(array)], array)
            start += len(array)

    return copy


def by_hand(size: int) -> Callable[[], Any]:
    """The two copies, by NumPy, whose fresh memory is of huge pages where the kernel has them."""
    source, warm = np.ones(size, np.uint8), np.ones(size, np.uint8)

    def copies() -> Any:
        np.copyto(warm, source)
        return warm.copy()

    return copies


def add_device_rows(ray: Any, rows: Rows, name: str, size: int, pair: tuple[Any, Any]) -> None:
    """The same tensor as a device object: read by its maker, and by another actor."""
    giver, taker = pair
    give = giver.give.options(tensor_transport="auto")
    rows.add(f"device object to its maker, {name}", size, lambda: ray.get(giver.take.remote(give.remote())))
    rows.add(f"device object to another actor, {name}", size, lambda: ray.get(taker.take.remote(give.remote())))


def measure(engine: str, sizes: list[str], rows: Rows) -> None:
    """Measure all rows of one engine."""
    ray = importlib.import_module(engine)
    ray.init(num_cpus=2, object_store_memory=_STORE)
    producer, consumer = ray.remote(Producer), ray.remote(Consumer)
    for name in sizes:
        size = SIZES[name]
        if engine != "ray":
            rows.add(f"two copies by hand, {name}", size, by_hand(size))
        for kind in KINDS:
            if kind.startswith("state") and size < PARTS * 1000:
                continue
            value = KINDS[kind](size)
            rows.add(f"put, {kind}, {name}", size, lambda value=value: ray.put(value))
            if engine != "ray":
                rows.add(f"one copy by hand, {kind}, {name}", size, one_copy(value, size))
            del value
            giver, taker = producer.remote(kind, size), consumer.remote()
            ray.get([giver.ready.remote(), taker.take.remote(np.ones(4))])
            pair = giver, taker
            if engine != "ray" and kind == "tensor":
                add_device_rows(ray, rows, name, size, pair)
            rows.add(
                f"actor to actor, {kind}, {name}",
                size,
                lambda pair=pair: ray.get(pair[1].take.remote(pair[0].give.remote())),
            )
            ray.kill(giver)
            ray.kill(taker)
    ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["hpcray", "ray", "both"], default="hpcray")
    parser.add_argument("--ray-python", default=sys.executable, help="an interpreter that has Ray and PyTorch")
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=15.0, help="seconds that end a row (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=2, help="turns of hpcray, with both; of Ray one less, one at least"
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    if torch is None:
        sys.exit("the rows need PyTorch; hint: pip install torch")
    if options.engine != "both":
        rows = Rows(options.engine, options.seconds, options.limit, options.json)
        measure(options.engine, options.sizes, rows)
        table = {options.engine: rows.found}
    else:
        table = in_turns(options)
        if options.json:
            options.json.write_text(json.dumps(table, indent=1))
    print_table(table)


def print_table(table: dict[str, dict[str, float]]) -> None:
    """Print a line for each row; with both engines also how many times faster hpcray is."""
    print(f"{'GB/s':48}" + "".join(f"{engine:>10}" for engine in table) + ("   times" if len(table) == 2 else ""))
    for row in table.get("hpcray") or table["ray"]:
        figures = [rows.get(row) for rows in table.values()]
        line = "".join(" " * 10 if figure is None else f"{figure:10.3f}" for figure in figures)
        times = f"{figures[0] / figures[1]:8.1f}" if len(figures) == 2 and all(figures) else ""
        print(f"{row:48}{line}{times}")


def in_turns(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Each engine in processes of its own, in turns."""
    found: dict[str, list[dict[str, float]]] = {"hpcray": [], "ray": []}
    turns = ["hpcray", *["ray", "hpcray"] * max(1, options.rounds - 1)][: max(2, 2 * options.rounds - 1)]
    # Its start and end, all rows of each size, and the actors that they need.
    limit = 60 + len(options.sizes) * (12 * (options.limit + options.seconds) + 30)
    with tempfile.TemporaryDirectory() as place:
        for engine in turns:
            python = options.ray_python if engine == "ray" else sys.executable
            file = Path(place, "rows.json")
            file.unlink(missing_ok=True)
            line = [python, __file__, "--engine", engine, "--seconds", str(options.seconds), "--json", str(file)]
            line += ["--limit", str(options.limit), "--sizes", *options.sizes]
            with subprocess.Popen(line, stdout=subprocess.DEVNULL) as turn:
                try:
                    code: object = turn.wait(limit)
                except subprocess.TimeoutExpired:
                    code = f"no end in {limit:.0f} s"
                    turn.terminate()  # both engines end their processes then
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        turn.wait(30)
                    turn.kill()
            if code:
                print(f"{engine}: the turn did not end as it should: {code}", file=sys.stderr, flush=True)
            if file.exists():
                found[engine].append(json.loads(file.read_text())[engine])
    table: dict[str, dict[str, float]] = {}
    for engine, results in found.items():
        names = [row for rows in results for row in rows]
        table[engine] = {
            row: statistics.median(rows[row] for rows in results if row in rows) for row in dict.fromkeys(names)
        }
    return table


if __name__ == "__main__":
    main()
