"""The mixed workload, and how busy it keeps the CPUs: the same for real ranks (`mixed.py`) and for simulated ones.

A CPU that is idle counts against a node only while something is queued that it could run: a CPU in a bundle of a
placement group runs that group's tasks alone, and the last tasks of all run while nothing is queued any more.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

SECONDS = {"short": 0.005, "long": 0.3, "leaf": 0.01, "gpu": 0.02}
COUNTS = {"short": 3000, "long": 60, "parent": 60, "gpu": 200}
CHILDREN = 10
GROUPED = (0.05, 0.1)
"""Seconds of a task in the first group, which has one CPU of every node, and in the second, which has two CPUs."""
PER_BUNDLE = 20
ACTORS_PER_NODE, CALLS, CALL_SECONDS = 2, 50, 0.002
PLAIN = "plain"
"""The CPUs that are in no bundle, and the tasks that run on these."""


def order(scale: int, seed: int) -> list[str]:
    """The kinds of all tasks outside of groups, in the order in which they are submitted."""
    kinds = [kind for kind, count in COUNTS.items() for _ in range(count * scale)]
    random.Random(seed).shuffle(kinds)
    return kinds


@dataclass(frozen=True)
class Run:
    """One task that holds a CPU of a pool; times in seconds. What began and ended at once has only waited."""

    pool: str
    submitted: float
    node: int
    began: float
    ended: float


@dataclass(frozen=True)
class Slots:
    """CPUs of a node that belong to a pool for a while."""

    pool: str
    node: int
    cpus: float
    since: float
    until: float


def slots_of(
    cpus: dict[int, float], groups: Iterable[tuple[str, dict[int, float], float, float]], since: float, until: float
) -> list[Slots]:
    """All CPUs by pool.

    Args:
        cpus: of every node. groups: for each its pool, the CPUs of its bundles by node, and from when until when.
    """
    found = []
    left = {node: [(since, until, count)] for node, count in cpus.items()}
    for pool, bundles, made, gone in groups:
        for node, count in bundles.items():
            found.append(Slots(pool, node, count, made, gone))
            left[node].append((made, gone, -count))
    return found + [Slots(PLAIN, node, count, *when) for node, parts in left.items() for *when, count in parts]


def shares(runs: list[Run], slots: list[Slots]) -> tuple[float, dict[int, float]]:
    """How busy the CPUs were for which there was work.

    Returns:
        The seconds in which anything was queued; for each node the CPU time in which tasks ran, out of that and the CPU
        time that was idle though something was queued that could have run there. When fewer tasks are queued than CPUs
        of their pool are idle, so many count, in equal parts.
    """
    changes: list[tuple[float, str, int, float, int, int]] = []  # when, pool, node, CPUs, queued, running
    for one in slots:
        changes += [(one.since, one.pool, one.node, one.cpus, 0, 0), (one.until, one.pool, one.node, -one.cpus, 0, 0)]
    for run in runs:
        changes += [
            (run.submitted, run.pool, run.node, 0.0, 1, 0),
            (run.began, run.pool, run.node, 0.0, -1, 1),
            (run.ended, run.pool, run.node, 0.0, 0, -1),
        ]
    changes.sort(key=lambda change: change[0])
    queued: dict[str, int] = defaultdict(int)
    room: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    busy: dict[int, float] = defaultdict(float)
    idle: dict[int, float] = defaultdict(float)
    running: dict[int, int] = defaultdict(int)
    demand = 0.0
    before = changes[0][0]
    for when, pool, node, cpus, more, begun in changes:
        passed = when - before
        before = when
        if passed > 0.0:
            demand += passed if any(count > 0 for count in queued.values()) else 0.0
            for where, count in running.items():
                busy[where] += passed * count
            for name, nodes in room.items():
                free = sum(max(0.0, left) for left in nodes.values())
                wanted = min(1.0, max(0, queued[name]) / free) if free > 1e-9 else 0.0
                for where, left in nodes.items():
                    idle[where] += passed * max(0.0, left) * wanted
        queued[pool] += more
        running[node] += begun
        room[pool][node] += cpus - begun
    return demand, {node: busy[node] / (busy[node] + idle[node]) for node in sorted(busy)}
