"""How busy a mixed workload keeps the CPUs: short, long, nested tasks, actors, placement groups, GPUs in quarters.

    hpcray-launch -n 4 --cpus-per-node 2 --gpus-per-node 1 benchmarks/mixed.py
    hpcray-launch -n 4 --cpus-per-node 2 --gpus-per-node 1 benchmarks/mixed.py --json mixed.json --scale 3

Everything is submitted at once, in an order drawn by a seed. The tasks sleep: what is measured is whether a CPU that
has demand is given work, not how fast this machine computes. The share is taken from `hpcray.timeline()`: for each
node the time in which tasks with a CPU ran, out of that and the time in which a CPU was idle though something was
queued that could have run there (`mixed_work.shares`). A parent that waits for its children gives its CPU back; neither
that nor its beginning and end count as work. What the policy alone makes of the same tasks: `simulate_mixed.py`.

Ends with exit code 1 if a result is wrong, or a unit of a resource has not come back.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mixed_work import (
    ACTORS_PER_NODE,
    CALL_SECONDS,
    CALLS,
    CHILDREN,
    GROUPED,
    PER_BUNDLE,
    PLAIN,
    SECONDS,
    Run,
    order,
    shares,
    slots_of,
)

import hpcray as ray
from hpcray.util import placement_group, placement_group_table, remove_placement_group
from hpcray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@dataclass
class Inside:
    """A placement group, what runs in it, and when that was."""

    pool: str
    group: Any
    cpus: dict[int, float]
    refs: list[Any] = field(default_factory=list)
    made: float = 0.0
    gone: float = 0.0


@ray.remote
def nap(seconds: float, value: int) -> int:
    time.sleep(seconds)
    return value


@ray.remote
def parent(children: int, value: int) -> int:
    return sum(ray.get([nap.options(name="leaf").remote(SECONDS["leaf"], value) for _ in range(children)]))


@ray.remote
class Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, seconds: float, value: int) -> int:
        time.sleep(seconds)
        self.total += value
        return self.total


def groups(nodes: dict[str, int]) -> list[Inside]:
    """One group with a CPU of every node, one that packs. Args: nodes: index of each, by its id."""
    found = []
    for number, (count, strategy) in enumerate(((len(nodes), "STRICT_SPREAD"), (2, "PACK"))):
        group = placement_group([{"CPU": 1}] * count, strategy=strategy)
        ray.get(group.ready())  # one after the other: one that packs could take a node whole
        cpus: dict[int, float] = {}
        for ident in placement_group_table(group)["bundles_to_node_id"].values():
            cpus[nodes[ident]] = cpus.get(nodes[ident], 0.0) + 1
        found.append(Inside(f"grouped {number}", group, cpus))
    return found


def submit(
    scale: int, seed: int, counters: list[Any], inside: list[Inside]
) -> tuple[list[Any], list[int], dict[str, list[float]]]:
    """Everything at once.

    Returns:
        refs, what each should be, and by name when each task that wants a CPU was submitted.
    """
    when: dict[str, list[float]] = {one.pool: [] for one in inside}
    for one, seconds in zip(inside, GROUPED, strict=True):
        where = PlacementGroupSchedulingStrategy(placement_group=one.group)
        task = nap.options(name=one.pool, scheduling_strategy=where)
        one.made = time.time()
        for _ in range(PER_BUNDLE * scale * len(one.group.bundle_specs)):
            when[one.pool].append(time.time())
            one.refs.append(task.remote(seconds, 1))
    refs: list[Any] = []
    expected: list[int] = []
    for number, kind in enumerate(order(scale, seed)):
        when.setdefault(kind, []).append(time.time())
        if kind == "parent":
            refs.append(parent.remote(CHILDREN, number))
        elif kind == "gpu":
            refs.append(nap.options(name=kind, num_cpus=0, num_gpus=0.25).remote(SECONDS[kind], number))
        else:
            refs.append(nap.options(name=kind).remote(SECONDS[kind], number))
        expected.append(CHILDREN * number if kind == "parent" else number)
    for counter in counters:
        refs += [counter.add.remote(CALL_SECONDS, 1) for _ in range(CALLS)]
        expected += range(1, CALLS + 1)
    del when["gpu"]
    return refs, expected, when


def ended() -> dict[str, dict[str, Any]]:
    """The spans of the timeline for which a task has ended, by its id."""
    return {
        event["args"]["task_id"]: event
        for event in ray.timeline()
        if event["ph"] == "X" and "running" not in event["args"]
    }


def runs(events: Iterable[dict[str, Any]], when: dict[str, list[float]]) -> list[Run]:
    """The tasks that held a CPU; of the parents only how long they waited for one. They submit at once what they do."""
    spans: dict[str, list[tuple[float, float, int]]] = {name: [] for name in (*when, "leaf")}
    for event in events:
        if event["name"] in spans:
            begin = event["ts"] / 1e6
            spans[event["name"]].append((begin, begin + event["dur"] / 1e6, int(event["pid"].split()[1])))
    when = {**when, "leaf": [begin for begin, _, _ in spans["parent"] for _ in range(CHILDREN)]}
    found = []
    for name, known in spans.items():
        pool = name if name.startswith("grouped") else PLAIN
        for submitted, (begin, end, node) in zip(sorted(when[name]), sorted(known), strict=True):
            found.append(Run(pool, min(submitted, begin), node, begin, begin if name == "parent" else end))
    return found


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
    inside = groups({node["NodeID"]: index for index, node in enumerate(nodes)})
    start = time.time()
    # Kept to the end: the worker of an actor that ends takes with it what it remembers of tasks.
    counters = [Counter.remote() for _ in range(ACTORS_PER_NODE * len(nodes))]
    refs, expected, when = submit(given.scale, given.seed, counters, inside)
    events: dict[str, dict[str, Any]] = {}
    for one in inside:
        ray.get(one.refs)
        events.update(ended())  # workers that idle in the group die with it
        remove_placement_group(one.group)
        one.gone = time.time()
    right = ray.get(refs) == expected
    end = time.time()
    cpus = {index: node["Resources"]["CPU"] for index, node in enumerate(nodes)}
    slots = slots_of(cpus, [(one.pool, one.cpus, one.made, one.gone) for one in inside], start, end)
    events.update(ended())
    demand, share = shares(runs(events.values(), when), slots)
    total, free = settled(30)
    back = {name: (free.get(name, 0.0), amount) for name, amount in total.items() if free.get(name, 0.0) != amount}
    count = len(refs) + sum(len(one.refs) for one in inside)
    print(f"{count} tasks and calls in {end - start:.2f} s, something queued for {demand:.2f} s")
    for node, value in share.items():
        print(f"node {node}: busy {100 * value:.1f} % of the CPU time for which there was work")
    print("all results right" if right else "A RESULT IS WRONG")
    print(f"NOT BACK (free, of): {back}" if back else "all resources returned")
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"seconds": end - start, "demand": demand, "busy": share, "right": right, "missing": back}, file)
    return 0 if right and not back else 1


if __name__ == "__main__":
    sys.exit(main())
