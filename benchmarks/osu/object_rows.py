"""Objects across nodes, through the API: put on one node, `get` by an actor that is pinned to another.

Run by run.py on two or more nodes. It is written against Ray's API, so it runs on a Ray cluster just as well: `python
object_rows.py FILE LARGEST --engine=ray`. On two nodes it measures latency, bandwidth one way and both ways, and the
first two again with each value copied into memory of the reader's own (`latency copied`, `bw copied`): what a message
is, on arrival; and latency where an actor of the other node has put the object, and not the program (`latency of an
actor's`). On more nodes: pairs at once, one object to all, each node's object to all, and an object from each node to
each other one.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from effort import Effort, effort

WINDOW = 16
WARM_UP = 3

Column = dict[int, float]


class Nodes:
    """An actor on each node: it puts objects, and times how long it takes to get others."""

    def __init__(self, engine: Any, strategies: Any, effort: Effort) -> None:
        class Actor:
            def __init__(self) -> None:
                self.refs: list[Any] = []
                self.own = np.zeros(0, dtype=np.uint8)

            def put(self, size: int, count: int, number: int) -> list[Any]:
                self.refs = [engine.put(np.full(size, number % 251, dtype=np.uint8)) for _ in range(count)]
                return self.refs

            def read(self, refs: list[Any], number: int, room: int) -> float:
                if self.own.size < room:
                    self.own = np.full(room, 255, dtype=np.uint8)
                started = time.perf_counter()
                values = engine.get(refs)
                if room:
                    at = 0
                    for place, value in enumerate(values):
                        self.own[at : at + value.size] = value
                        values[place] = self.own[at : at + value.size]
                        at += value.size
                seconds = time.perf_counter() - started
                assert all(int(value[0]) == int(value[-1]) == number % 251 for value in values)
                return seconds

        self._engine = engine
        self._number = 0
        self.effort = effort
        here = engine.get_runtime_context().get_node_id()
        names = sorted((node["NodeID"] for node in engine.nodes() if node["Alive"]), key=lambda name: name != here)
        self.actors = [
            engine.remote(Actor)
            .options(
                num_cpus=0, scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node_id=name, soft=False)
            )
            .remote()
            for name in names
        ]

    def shuffled(self, size: int) -> float:
        """The longest time, in seconds, in which a node got the objects that all others put for it, all at once."""
        self._number += 1
        everyone = range(len(self.actors))
        puts = self._engine.get([actor.put.remote(size, len(self.actors), self._number) for actor in self.actors])
        gets = [
            self.actors[node].read.remote(
                [puts[source][node] for source in everyone if source != node], self._number, 0
            )
            for node in everyone
        ]
        return float(max(self._engine.get(gets)))

    def timed(self, size: int, count: int, flows: list[tuple[int, list[int]]], copied: bool = False) -> float:
        """The longest time, in seconds, in which a node got what the others put, all at once.

        Args:
            size: bytes of an object.
            count: objects that each source puts.
            flows: (node that gets, nodes whose objects it gets).
            copied: whether it copies them into memory of its own, too.
        """
        self._number += 1
        sources = sorted({source for _, froms in flows for source in froms})
        puts = [self.actors[source].put.remote(size, count, self._number) for source in sources]
        refs = dict(zip(sources, self._engine.get(puts), strict=True))
        gets = [
            self.actors[node].read.remote(
                [ref for source in froms for ref in refs[source]], self._number, copied * size * count * len(froms)
            )
            for node, froms in flows
        ]
        return float(max(self._engine.get(gets)))


def latency(engine: Any, nodes: Nodes, size: int, copied: bool = False, of_actor: bool = False) -> float:
    """Median time of one `get` across nodes, microseconds. Every object is new: a second `get` would ask nobody.

    Args:
        of_actor: an actor of the other node puts them, not the program.
    """
    times: list[float] = []
    for number in range(WARM_UP + max(5, min(100, 2 * nodes.effort.budget // size))):
        if of_actor:
            refs = engine.get(nodes.actors[0].put.remote(size, 1, number))
        else:
            refs = [engine.put(np.full(size, number % 251, dtype=np.uint8))]
        seconds = engine.get(nodes.actors[1].read.remote(refs, number, copied * size))
        if number >= WARM_UP:
            times.append(seconds)
        del refs
    return statistics.median(times) * 1e6


def bandwidth(nodes: Nodes, size: int, flows: list[tuple[int, list[int]]], copied: bool = False) -> float:
    """MB/s of all flows together: a window of objects each; the best of some, as for the wires."""
    window = max(1, min(WINDOW, nodes.effort.in_flight // size))
    best = min(nodes.timed(size, window, flows, copied) for _ in range(nodes.effort.repeats))
    return len(flows) * window * size / best / 1e6


def collective(nodes: Nodes, size: int, flows: list[tuple[int, list[int]]]) -> float:
    """Median time until all have it, microseconds."""
    return statistics.median(nodes.timed(size, 1, flows) for _ in range(nodes.effort.repeats)) * 1e6


def main() -> None:
    """Measure; write {row: {size: figure}} as JSON to the file named on the command line."""
    path, largest, how = sys.argv[1], int(sys.argv[2]), effort(sys.argv)
    name = "ray" if "--engine=ray" in sys.argv else "hpcray"
    engine = importlib.import_module(name)
    strategies = importlib.import_module(name + ".util.scheduling_strategies")
    engine.init(**({"address": "auto"} if name == "ray" else {}))
    nodes = Nodes(engine, strategies, how)
    count = len(nodes.actors)
    if count < 2:
        sys.exit("object_rows.py needs two nodes")
    half = count // 2
    others = list(range(1, count))
    rows: dict[str, Callable[[int], float]]
    if count == 2:
        rows = {
            "latency": lambda size: latency(engine, nodes, size),
            "bw": lambda size: bandwidth(nodes, size, [(1, [0])]),
            "bibw": lambda size: bandwidth(nodes, size, [(1, [0]), (0, [1])]),
            "latency of an actor's": lambda size: latency(engine, nodes, size, of_actor=True),
            "latency copied": lambda size: latency(engine, nodes, size, copied=True),
            "bw copied": lambda size: bandwidth(nodes, size, [(1, [0])], copied=True),
        }
    else:
        rows = {
            "mbw_mr": lambda size: bandwidth(nodes, size, [(node + half, [node]) for node in range(half)]),
            "bcast": lambda size: collective(nodes, size, [(node, [0]) for node in others]),
            "allgather": lambda size: collective(
                nodes, size, [(node, [other for other in range(count) if other != node]) for node in range(count)]
            ),
            "alltoall": lambda size: statistics.median(nodes.shuffled(size) for _ in range(nodes.effort.repeats)) * 1e6,
        }
    sizes = [size for size in how.sizes if size <= largest]
    figures: dict[str, Column] = {}
    for row, measure in rows.items():
        chosen = sizes if count == 2 else [size for size in sizes if size * count <= 1 << 29][::2]
        figures[row] = {size: measure(size) for size in chosen}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(figures, file)
    engine.shutdown()


if __name__ == "__main__":
    main()
