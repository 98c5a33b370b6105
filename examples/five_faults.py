"""A job with five things to find out, for practice with hpcray's commands: hpcray-launch -n 4 examples/five_faults.py

It prepares records on all nodes until Ctrl-C. Something in it takes most of the time, something never starts, something
keeps the memory, one node is slow, and an actor has died. Look at it from a second terminal; docs/how-to/observe.md has
the questions and the commands that answer them.
"""

from __future__ import annotations

import argparse
import os
import signal
import time

import numpy as np

import hpcray as ray
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

SLOW_NODE = 2
SLOWER = 2.5
MB = 1 << 20


def compute(seconds: float) -> None:
    """Take this time, or longer on the slow node, as a host does whose cores another program uses."""
    index = next(one["Index"] for one in ray.nodes() if one["NodeID"] == ray.get_runtime_context().get_node_id())
    time.sleep(seconds * (SLOWER if index == SLOW_NODE else 1.0))


@ray.remote(num_cpus=0.25)
def load(number: int) -> np.ndarray:
    """Read one record."""
    compute(0.02)
    return np.full(1000, number)


@ray.remote(num_cpus=0.25)
def align(record: np.ndarray) -> np.ndarray:
    """Align a record to the reference: the expensive step."""
    compute(0.25)
    return record


@ray.remote(num_cpus=0.25)
def score(record: np.ndarray) -> float:
    """Give a record its mark."""
    compute(0.05)
    return float(record.sum())


@ray.remote(num_cpus=0.1, resources={"licence": 1})
def solve(seconds: float) -> None:
    """Use the only licence there is."""
    time.sleep(seconds)


@ray.remote(num_cpus=0)
class Cache:
    """Keeps the tables that it has read."""

    def __init__(self) -> None:
        self._tables: list[object] = []

    def fill(self, tables: int, size: int) -> int:
        """Read this many tables of `size` bytes."""
        self._tables += [ray.put(np.zeros(size, np.uint8)) for _ in range(tables)]
        return len(self._tables)


@ray.remote(num_cpus=0)
class Collector:
    """Gathers the marks."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def add(self, mark: float) -> int:
        """Keep a mark."""
        self._marks.append(mark)
        return len(self._marks)

    def save(self, path: str) -> None:
        """Write the marks; the memory for it is more than there is."""
        print(f"saving {len(self._marks)} marks to {path}", flush=True)
        print("cannot map 96 GiB: giving up", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0, help="How long it goes on.")
    parser.add_argument("--tables", type=int, default=24, help="Tables of 8 MiB that are kept.")
    args = parser.parse_args()
    ray.init(log_to_driver=False)
    nodes = [one["NodeID"] for one in sorted(ray.nodes(), key=lambda one: one["Index"])]

    def on(index: int) -> NodeAffinitySchedulingStrategy:
        return NodeAffinitySchedulingStrategy(nodes[index % len(nodes)], soft=False)

    cache = Cache.options(name="cache", scheduling_strategy=on(1)).remote()
    collector = Collector.options(name="collector", scheduling_strategy=on(3)).remote()
    ray.get([cache.fill.remote(args.tables, 8 * MB), collector.add.remote(0.0)])
    solving = [solve.remote(args.seconds) for _ in range(3)]
    collector.save.remote("marks.npy")

    end, number = time.monotonic() + args.seconds, 0
    print("ready", flush=True)
    while time.monotonic() < end:
        marks = []
        for index in range(len(nodes)):
            for _ in range(4):
                number += 1
                record = load.options(scheduling_strategy=on(index)).remote(number)
                aligned = align.options(scheduling_strategy=on(index)).remote(record)
                marks.append(score.options(scheduling_strategy=on(index)).remote(aligned))
        ray.get(marks)
    del solving


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("ended")
