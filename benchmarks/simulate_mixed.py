"""The mixed workload of `mixed.py` on simulated ranks: what the policy makes of it, whatever the machine is busy with.

Raylets, head and lease clients are those of a job (`hpcray.core`); workers and the network are simulated, in virtual
time: a message takes 40 µs within a node and 300 µs between nodes, a worker starts in 5 ms. A task takes exactly as
long as it should.

    python benchmarks/simulate_mixed.py
    python benchmarks/simulate_mixed.py --nodes 16 --cpus 8 --scale 4 --between 0.001 --json out.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "simulation"))

from mixed_work import CHILDREN, GROUPED, PER_BUNDLE, PLAIN, SECONDS, Run, order, shares, slots_of
from realclient import RealSubmitter
from simcluster import SimCluster
from simnet import SimNet
from submitters import SimTask, shape

from hpcray.common.config import Config
from hpcray.common.ids import HEAD, make_proc, node_of
from hpcray.common.resources import GROUP, names_in, to_amounts, to_units
from hpcray.core.gcs.placement_group_manager import CREATED
from hpcray.protocol import messages as m

WITHIN, BETWEEN, START = 40e-6, 300e-6, 0.005
SETUP = 0.3
"""Seconds of which a part goes by with the making of the groups."""


class Wires(SimNet):
    """A network where a message takes so long within a node, and so long between two."""

    def __init__(self, within: float, between: float) -> None:
        super().__init__([within])
        self.within, self.between = within, between
        self.most_events = 1 << 60

    def send(self, src: bytes, dest: bytes, deliver: Any) -> None:
        self._delays = [self.within if node_of(src) == node_of(dest) else self.between]
        super().send(src, dest, deliver)


class Ticking(RealSubmitter):
    """Looks at its leases as often as the real one."""

    period = 0.02


class Ranks(SimCluster):
    """Ranks whose first workers are up, as those of a job."""

    def __init__(self, nodes: int, cpus: int, within: float, between: float) -> None:
        self._wires = Wires(within, between)
        totals = [to_units({"CPU": cpus, "GPU": 1})] * nodes
        super().__init__(totals, config=Config(), real=True, net=self._wires)

    def submitter(self, proc: bytes) -> RealSubmitter:
        return Ticking(self, proc)

    def fork(self, node: int, number: int) -> None:
        self.forks += 1
        self.net.after(START, lambda: self.join(make_proc(node, number)))


class Mixed:
    """The workload on these ranks.

    Attributes:
        tasks: all that hold a CPU: kind, pool, task; `when` each was submitted.
    """

    def __init__(self, nodes: int, cpus: int, scale: int, seed: int, within: float, between: float) -> None:
        self.nodes, self.cpus, self.scale, self.seed = nodes, cpus, scale, seed
        self.cluster = Ranks(nodes, cpus, within, between)
        self.driver = self.cluster.driver(0)
        self.tasks: list[tuple[str, str, SimTask]] = []
        self.parents: list[SimTask] = []
        self.others: list[SimTask] = []
        self.groups: list[tuple[m.GroupSpec, float, list[SimTask]]] = []
        self.gone: dict[bytes, float] = {}
        self.bundles: dict[bytes, dict[int, float]] = {}

    def run(self) -> dict[str, Any]:
        """Everything at once; the groups first, one after the other."""
        cluster, net = self.cluster, self.cluster.net
        cluster.run_for(SETUP)
        self._group([{"CPU": 1}] * self.nodes, "STRICT_SPREAD", GROUPED[0])
        self._group([{"CPU": 1}] * 2, "PACK", GROUPED[1])
        start = net.now
        self._submit()
        for spec, _, mine in self.groups:
            assert net.run(3600.0, lambda mine=mine: all(task.done for task in mine), lambda: None), cluster.explain()
            cluster.post(self.driver.proc, HEAD, m.RemoveGroup(spec.group))
            self.gone[spec.group] = net.now
        every = [task for _, _, task in self.tasks] + self.parents + self.others
        left = iter(every)
        pending = next(left)

        def done() -> bool:
            nonlocal pending
            while pending is not None and pending.done:
                pending = next(left, None)
            return pending is None

        assert net.run(3600.0, done, lambda: None), cluster.explain()
        seconds = net.now - start
        cluster.run_for(2.0)
        assert all(task.done == 1 for task in every), "a task did not run exactly once"
        assert all(raylet.available() == cluster.totals[raylet.node] for raylet in cluster.raylets), "a resource leaks"
        demand, found = shares(self.runs(), self.slots(start))
        work = sum(task.seconds for _, _, task in self.tasks)
        return {
            "seconds": round(seconds, 3),
            "demand": round(demand, 3),
            "ideal_seconds": round(work / self.nodes / self.cpus, 3),
            "busy": {str(node): round(share, 4) for node, share in found.items()},
            "messages": net.sent,
        }

    def runs(self) -> list[Run]:
        """All tasks that held a CPU, and of the parents how long they waited for one."""
        found = [
            Run(pool, task.submitted, task.ran_on[-1], task.began, task.began + task.seconds)
            for _, pool, task in self.tasks
        ]
        return found + [Run(PLAIN, one.submitted, one.ran_on[-1], one.began, one.began) for one in self.parents]

    def slots(self, start: float) -> Any:
        """The CPUs by pool."""
        end = self.cluster.net.now
        groups = [
            (spec.group.hex(), self.bundles[spec.group], start, self.gone[spec.group]) for spec, _, _ in self.groups
        ]
        return slots_of(dict.fromkeys(range(self.nodes), float(self.cpus)), groups, start, end)

    def _group(self, bundles: list[dict[str, float]], strategy: str, seconds: float) -> None:
        cluster = self.cluster
        ident = self.driver.proc + (1 << 38 | len(self.groups)).to_bytes(5, "big")
        spec = m.GroupSpec(ident, [to_units(bundle) for bundle in bundles], strategy, owner=self.driver.proc)
        cluster.post(self.driver.proc, HEAD, m.CreateGroup(0, spec))
        cluster.run_for(0.05)
        group = cluster.head.groups.find(ident)
        assert cluster.net.run(cluster.net.now + 60, lambda: group.state == CREATED, lambda: None)
        there = self.bundles[ident] = dict.fromkeys(group.nodes, 0.0)
        for index, node in enumerate(group.nodes):
            there[node] += to_amounts(spec.bundles[index])["CPU"]
        self.groups.append((spec, seconds, []))

    def _submit(self) -> None:
        now = self.cluster.net.now
        for spec, seconds, mine in self.groups:
            names = names_in(spec.group.hex(), -1, to_units({"CPU": 1}))
            inside = m.Shape(tuple(sorted(names.items())), GROUP)
            for _ in range(PER_BUNDLE * self.scale * len(spec.bundles)):
                mine.append(SimTask(inside, seconds, submitted=now, function="nap"))
                self.tasks.append(("grouped", spec.group.hex(), mine[-1]))
                self.driver.submit(mine[-1])
        for kind in order(self.scale, self.seed):
            if kind == "parent":
                children = [SimTask(shape(CPU=1), SECONDS["leaf"], function="nap") for _ in range(CHILDREN)]
                self.tasks += [("leaf", PLAIN, child) for child in children]
                task = SimTask(shape(CPU=1), 0.001, children, function="parent")
                self.parents.append(task)
            elif kind == "gpu":
                task = SimTask(shape(GPU=0.25), SECONDS[kind], function="nap")
                self.others.append(task)
            else:
                task = SimTask(shape(CPU=1), SECONDS[kind], function="nap")
                self.tasks.append((kind, PLAIN, task))
            task.submitted = now
            self.driver.submit(task)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--cpus", type=int, default=2, help="of every node")
    parser.add_argument("--scale", type=int, default=1, help="times as many tasks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--within", type=float, default=WITHIN, help="seconds of a message within a node")
    parser.add_argument("--between", type=float, default=BETWEEN, help="seconds of a message between nodes")
    parser.add_argument("--json", metavar="OUT", help="write the figures to this file")
    given = parser.parse_args()
    found = Mixed(given.nodes, given.cpus, given.scale, given.seed, given.within, given.between).run()
    print(json.dumps(found))
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
