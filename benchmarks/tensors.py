"""PyTorch CPU tensors as objects, beside NumPy arrays of the same bytes and beside the copies themselves.

    python benchmarks/tensors.py
    python benchmarks/tensors.py --engine both --ray-python /path/to/python --json table.json

Rows, in GB/s (median of the rounds):

- put: `ray.put` of the value by the driver, into warm memory of the store.
- actor to actor: one actor returns the value, another one takes it as an argument and reads all of it. The clock runs
  in the driver, from the first call to the second one's answer.
- two copies by hand: a copy into warm memory and a copy of that into fresh memory, what "actor to actor" comes to.

With `both`, each engine measures in a process of its own, in turns; a figure is the median of its turns.
"""

from __future__ import annotations

import argparse
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
import torch

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


def rounds_of(call: Callable[[], Any], size: int, seconds: float) -> float:
    """GB/s of the median call; two to warm up, then for so many seconds, five calls at least."""
    took: list[float] = []
    end = 0.0
    for number in range(1000):
        if number == 2:
            end = time.perf_counter() + seconds
        started = time.perf_counter()
        result = call()
        took.append(time.perf_counter() - started)
        del result
        if number >= 7 and time.perf_counter() > end:
            break
    return size / statistics.median(took[2:]) / 1e9


def by_hand(size: int, seconds: float) -> float:
    """The two copies, by NumPy, whose fresh memory is of huge pages where the kernel has them."""
    source, warm = np.ones(size, np.uint8), np.ones(size, np.uint8)

    def copies() -> Any:
        np.copyto(warm, source)
        return warm.copy()

    return rounds_of(copies, size, seconds)


def add_device_rows(
    ray: Any, rows: dict[str, float], name: str, size: int, seconds: float, pair: tuple[Any, Any]
) -> None:
    """The same tensor as a device object: read by its maker, and by another actor."""
    giver, taker = pair
    give = giver.give.options(tensor_transport="auto")
    rows[f"device object to its maker, {name}"] = rounds_of(
        lambda: ray.get(giver.take.remote(give.remote())), size, seconds
    )
    rows[f"device object to another actor, {name}"] = rounds_of(
        lambda: ray.get(taker.take.remote(give.remote())), size, seconds
    )


def measure(engine: str, sizes: list[str], seconds: float) -> dict[str, float]:
    """All rows of one engine, by name."""
    ray = importlib.import_module(engine)
    # What the template learns from the first worker would be learned while rows are measured.
    ray.init(num_cpus=2, object_store_memory=_STORE, **({} if engine == "ray" else {"learn_imports": False}))
    producer, consumer = ray.remote(Producer), ray.remote(Consumer)
    rows: dict[str, float] = {}
    for name in sizes:
        size = SIZES[name]
        if engine != "ray":
            rows[f"two copies by hand, {name}"] = by_hand(size, seconds)
        for kind in KINDS:
            if kind.startswith("state") and size < PARTS * 1000:
                continue
            value = KINDS[kind](size)
            rows[f"put, {kind}, {name}"] = rounds_of(lambda value=value: ray.put(value), size, seconds)
            del value
            giver, taker = producer.remote(kind, size), consumer.remote()
            ray.get([giver.ready.remote(), taker.take.remote(np.ones(4))])
            pair = giver, taker
            if engine != "ray" and kind == "tensor":
                add_device_rows(ray, rows, name, size, seconds, pair)
            rows[f"actor to actor, {kind}, {name}"] = rounds_of(
                lambda pair=pair: ray.get(pair[1].take.remote(pair[0].give.remote())), size, seconds
            )
            ray.kill(giver)
            ray.kill(taker)
    ray.shutdown()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["hpcray", "ray", "both"], default="hpcray")
    parser.add_argument("--ray-python", default=sys.executable, help="an interpreter that has Ray and PyTorch")
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of the engines, with both (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    if options.engine != "both":
        table = {options.engine: measure(options.engine, options.sizes, options.seconds)}
    else:
        table = in_turns(options)
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))
    print(f"{'GB/s':48}" + "".join(f"{engine:>10}" for engine in table))
    for row in table.get("hpcray") or table["ray"]:
        print(f"{row:48}" + "".join(f"{rows[row]:10.2f}" if row in rows else " " * 10 for rows in table.values()))


def in_turns(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Each engine in processes of its own, in turns."""
    found: dict[str, list[dict[str, float]]] = {"hpcray": [], "ray": []}
    with tempfile.TemporaryDirectory() as place:
        for _ in range(options.rounds):
            for engine, results in found.items():
                python = options.ray_python if engine == "ray" else sys.executable
                file = Path(place, "rows.json")
                line = [python, __file__, "--engine", engine, "--seconds", str(options.seconds), "--json", str(file)]
                subprocess.run([*line, "--sizes", *options.sizes], check=True, stdout=subprocess.DEVNULL)
                results.append(json.loads(file.read_text())[engine])
    return {
        engine: {row: statistics.median(each[row] for each in results) for row in results[0]}
        for engine, results in found.items()
    }


if __name__ == "__main__":
    main()
