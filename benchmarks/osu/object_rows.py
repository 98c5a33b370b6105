"""Objects across nodes, through the API: put on node 0, `get` by an actor that is pinned to node 1.

Run by run.py on two nodes. It is written against Ray's API, so it runs on a Ray cluster of two nodes just as well:
`python object_rows.py FILE LARGEST ray`.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from typing import Any

import numpy as np

SIZES = tuple(1 << power for power in range(3, 29))
BUDGET = 2 << 30
WARM_UP = 3


def measure(engine: Any, reader: Any, size: int) -> float:
    """Median time of one `get` across nodes, microseconds. Every object is new: a second `get` of it would be local."""
    times: list[float] = []
    for number in range(WARM_UP + max(5, min(100, BUDGET // size))):
        ref = engine.put(np.full(size, number % 251, dtype=np.uint8))
        seconds, first, last = engine.get(reader.read.remote([ref]))
        assert first == last == number % 251
        if number >= WARM_UP:
            times.append(seconds)
        del ref
    return statistics.median(times) * 1e6


def main() -> None:
    """Measure; write {size: microseconds} as JSON to the file named on the command line."""
    path, largest, name = sys.argv[1], int(sys.argv[2]), (sys.argv[3:] or ["hpcray"])[0]
    engine = importlib.import_module(name)
    strategies = importlib.import_module(name + ".util.scheduling_strategies")
    engine.init(**({"address": "auto"} if name == "ray" else {}))

    class Reader:
        def read(self, refs: list[Any]) -> tuple[float, int, int]:
            started = time.perf_counter()
            value = engine.get(refs[0])
            return time.perf_counter() - started, int(value[0]), int(value[-1])

    here = engine.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in engine.nodes() if node["NodeID"] != here]
    if not others:
        sys.exit("object_rows.py needs two nodes")
    pinned = strategies.NodeAffinitySchedulingStrategy(node_id=others[0], soft=False)
    reader = engine.remote(Reader).options(num_cpus=0, scheduling_strategy=pinned).remote()
    figures = {size: measure(engine, reader, size) for size in SIZES if size <= largest}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(figures, file)
    engine.shutdown()


main()
