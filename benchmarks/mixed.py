"""How busy a mixed workload keeps the CPUs: short, long, nested tasks, actors, placement groups, GPUs in quarters.

    hpcray-launch -n 4 --cpus-per-node 2 --gpus-per-node 1 benchmarks/mixed.py
    hpcray-launch -n 4 --cpus-per-node 2 --gpus-per-node 1 benchmarks/mixed.py --json mixed.json --scale 3

Everything is submitted at once, in an order drawn by a seed. The tasks sleep: what is measured is whether a CPU that
has demand is given work, not how fast this machine computes. The share is taken from `hpcray.timeline()`: for each node
the time in which tasks with a CPU ran, out of all CPU time between the first start and the last, after which nothing
waits any more. A parent that waits for its children gives its CPU back, and does not count.

Ends with exit code 1 if a result is wrong, or a unit of a resource has not come back.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from typing import Any

import hpcray as ray
from hpcray.util import placement_group, remove_placement_group
from hpcray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

COUNTED = {"short", "long", "leaf", "grouped"}
"""Names of the tasks that hold a CPU all the time that they run."""


@ray.remote
def nap(seconds: float, value: int) -> int:
    time.sleep(seconds)
    return value


@ray.remote
def parent(children: int, value: int) -> int:
    return sum(ray.get([nap.options(name="leaf").remote(0.01, value) for _ in range(children)]))


@ray.remote
class Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, seconds: float, value: int) -> int:
        time.sleep(seconds)
        self.total += value
        return self.total


def submit(scale: int, seed: int, nodes: int) -> tuple[list[Any], list[int], list[tuple[Any, list[Any]]]]:
    """Everything at once.

    Returns:
        refs, what each should be, and for each placement group the refs of what runs in it.
    """
    kinds = ["short"] * 3000 * scale + ["long"] * 60 * scale + ["parent"] * 60 * scale + ["gpu"] * 200 * scale
    random.Random(seed).shuffle(kinds)
    groups = [placement_group([{"CPU": 1}] * nodes, strategy="STRICT_SPREAD")]
    ray.get(groups[0].ready())  # first: one that packs could take a node whole
    groups.append(placement_group([{"CPU": 1}] * 2, strategy="PACK"))
    ray.get(groups[1].ready())
    inside: list[tuple[Any, list[Any]]] = []
    for group, seconds in zip(groups, (0.05, 0.1), strict=True):
        where = PlacementGroupSchedulingStrategy(placement_group=group)
        task = nap.options(name="grouped", scheduling_strategy=where)
        inside.append((group, [task.remote(seconds, 1) for _ in range(20 * scale * len(group.bundle_specs))]))
    refs: list[Any] = []
    expected: list[int] = []
    for number, kind in enumerate(kinds):
        if kind == "short":
            refs.append(nap.options(name=kind).remote(0.005, number))
        elif kind == "long":
            refs.append(nap.options(name=kind).remote(0.3, number))
        elif kind == "parent":
            refs.append(parent.remote(10, number))
        else:
            refs.append(nap.options(name=kind, num_cpus=0, num_gpus=0.25).remote(0.02, number))
        expected.append(10 * number if kind == "parent" else number)
    for _ in range(2 * nodes):
        counter = Counter.remote()
        refs += [counter.add.remote(0.002, 1) for _ in range(50)]
        expected += range(1, 51)
    return refs, expected, inside


def shares(events: list[dict[str, Any]], cpus: dict[str, float]) -> tuple[float, dict[str, float]]:
    """Seconds with demand, and for each node the share of its CPU time in which tasks ran, in those."""
    spans = [event for event in events if event.get("ph") == "X" and event["name"] in COUNTED]
    first, last = min(span["ts"] for span in spans), max(span["ts"] for span in spans)
    busy: dict[str, float] = defaultdict(float)
    for span in spans:
        busy[span["pid"]] += max(0.0, min(last, span["ts"] + span["dur"]) - span["ts"])
    return (last - first) / 1e6, {
        node: busy[node] / (last - first) / cpus[node.split()[1]] for node in sorted(busy)
    }  # fmt: skip


def settled(patience: float) -> tuple[dict[str, float], dict[str, float]]:
    """All resources and those that are free, once they are the same, or after `patience` seconds."""
    until = time.monotonic() + patience
    while True:
        total, free = ray.cluster_resources(), ray.available_resources()
        if total == free or time.monotonic() > until:
            return total, free
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, default=1, help="times as many tasks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="OUT", help="write the figures to this file")
    given = parser.parse_args()
    ray.init()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    start = time.perf_counter()
    refs, expected, inside = submit(given.scale, given.seed, len(nodes))
    for group, mine in inside:
        ray.get(mine)
        remove_placement_group(group)
    right = ray.get(refs) == expected
    seconds = time.perf_counter() - start
    events = ray.timeline()
    cpus = {str(index): node["Resources"]["CPU"] for index, node in enumerate(nodes)}
    demand, share = shares(events, cpus)
    total, free = settled(30)
    back = {name: (free.get(name, 0.0), amount) for name, amount in total.items() if free.get(name, 0.0) != amount}
    count = len(refs) + sum(len(mine) for _, mine in inside)
    print(f"{count} tasks and calls in {seconds:.2f} s, demand for {demand:.2f} s")
    for node, value in share.items():
        print(f"{node}: busy {100 * value:.1f} % of its CPU time")
    print("all results right" if right else "A RESULT IS WRONG")
    print(f"NOT BACK (free, of): {back}" if back else "all resources returned")
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"seconds": seconds, "demand": demand, "busy": share, "right": right, "missing": back}, file)
    return 0 if right and not back else 1


if __name__ == "__main__":
    sys.exit(main())
