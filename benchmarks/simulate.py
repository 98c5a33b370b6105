"""A thousand nodes on one core: the real scheduler cores under simulated work, reproducible from a seed.

The cores are those of a job (`hpcray.core`), and so are the submitters' lease clients; workers and the network are
simulated, in virtual time. Every message is encoded and decoded as on the wire. Four parts:

work       many drivers submit tasks: plain, nested, near their data, large, in placement groups. At the end every task
           has run once, and nothing is held any more; on the way no node is ever over-committed.
one        one driver submits tasks of a second for all workers of all nodes: how busy they are, and what that costs it.
local      a driver of every node keeps its own node busy: what the head has to do then, as a share of one core.
decisions  what one choice of a node costs the head in a cluster of 10 to 1000 nodes, between reports of other nodes.

    python benchmarks/simulate.py                             # all, a few minutes
    python benchmarks/simulate.py work --nodes 100 --tasks 100000 --seed 7
    python benchmarks/simulate.py --json out.json --plot out.png   # the plot needs the extra `bench`
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "simulation"))

from realclient import RealSubmitter
from simcluster import SimCluster, allocations_of
from submitters import SimTask, shape

from hpcray.common.config import Config
from hpcray.common.ids import HEAD, node_of, raylet_of
from hpcray.common.labels import conditions, to_strategy
from hpcray.common.resources import GROUP, names_in, to_units
from hpcray.core.core_worker.task import PendingTask
from hpcray.core.effects import Effect, Send
from hpcray.core.gcs import gcs as gcs_module
from hpcray.core.gcs.cluster_resources import ClusterResources, NodeResources
from hpcray.core.gcs.gcs import Gcs
from hpcray.core.raylet.local_lease_manager import HANDLES as RAYLET_HANDLES
from hpcray.protocol import messages as m

SIZES = (10, 32, 100, 316, 1000)
SPREAD_OF_DATA = 8
"""Over so many nodes is the data of one driver's tasks."""
__all__ = ["NodeResources", "Work", "decisions", "local", "m"]
CHECK_EVERY = 50_000
"""Events between two looks at all books."""


class Ticking(RealSubmitter):
    """Gives idle leases back as soon as the real one."""

    period = 0.02


class Measured(SimCluster):
    """A simulated cluster that knows what its head was told, and what that cost.

    Attributes:
        told: messages to the head by type. cost: seconds of CPU of the head, decoding and encoding included.
        raylets_cost: of all raylets together, their periodic work and the reports of new workers not included.
    """

    def __init__(self, nodes: int, workers: int, seed: int, kind: type[RealSubmitter] = RealSubmitter) -> None:
        self.kind = kind
        rng = random.Random(seed)
        self.told: Counter[str] = Counter()
        self.cost, self.raylets_cost, self.events = 0.0, 0.0, 0
        delays = [rng.choice([20e-6, 50e-6, 100e-6]) for _ in range(997)]
        super().__init__([to_units({"CPU": workers})] * nodes, delays, real=True)
        self.net.most_events = 1 << 60

    def submitter(self, proc: bytes) -> RealSubmitter:
        return self.kind(self, proc)

    def deliver_to_raylet(self, src: bytes, node: int, msg: m.Message) -> None:
        kind = type(msg)
        to_head = kind in gcs_module.HANDLES and (kind not in RAYLET_HANDLES or (node == 0 and src != HEAD))
        if not to_head:
            if not isinstance(msg, m.CollectGarbage):  # for the raylet's shell
                body = m.encode([msg])
                began = process_time()
                effects = self.raylets[node].handle(self.net.now, src, m.decode(body)[0])
                for effect in effects:
                    if isinstance(effect, Send):
                        m.encode([effect.msg])
                self.raylets_cost += process_time() - began
                self.carry_out(raylet_of(node), effects)
            return
        self.told[kind.__name__] += 1
        body = m.encode([msg])
        self.charge(lambda: self.head.handle(self.net.now, src, m.decode(body)[0]))

    def charge(self, work: Callable[[], list[Effect]]) -> None:
        """Let the head work at its own cost, with what it sends."""
        began = process_time()
        effects = work()
        for effect in effects:
            if isinstance(effect, Send):
                m.encode([effect.msg])
        self.cost += process_time() - began
        self.carry_out(HEAD, effects)

    def tick(self, node: int) -> None:
        if node == 0:
            self.charge(lambda: self.head.tick(self.net.now))
        self.carry_out(raylet_of(node), self.raylets[node].tick(self.net.now))
        for submitter in list(self.on_node[node].values()):
            submitter.tick(self.config.idle_lease_timeout)
        self.net.after(self.config.tick, lambda: self.tick(node))

    def look(self) -> None:
        """The books of every node, now and then."""
        self.events += 1
        if self.events % CHECK_EVERY == 0:
            self.check_all()

    def check_all(self) -> None:
        """No node gives more than it has, and what is free and what is held is all there is."""
        for raylet in self.raylets:
            raylet.check_invariants()
            total, held = self.totals[raylet.node], Counter[str]()
            allocations = allocations_of(raylet)
            for one in allocations:
                if one.bundle is None and not one.cpu_released:
                    held.update(one.resources)
            for bundle in raylet.resources.bundles:
                held.update(bundle.resources)
                assert min(bundle.pool.available.values()) >= 0, "a bundle gave more than it has"
            for name, units in total.items():
                free = raylet.available()[name]
                assert free == units - held[name], f"node {raylet.node}: {name} leaks"
                # A worker that goes on after a `get` takes its CPU back at once; nobody else may have too much.
                resumed = sum(self.workers[c.worker].was_blocked for c in allocations if c.worker in self.workers)
                assert free >= -to_units({name: resumed}).get(name, 0), f"node {raylet.node} over-committed {name}"


# ------------------------------------------------------------ work


class Work:
    """Tasks of many drivers.

    Args:
        tasks: how many, children included.
    """

    def __init__(self, nodes: int, workers: int, tasks: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cluster = Measured(nodes, workers, seed, Ticking)
        self.nodes, self.workers, self.wanted = nodes, workers, tasks
        self.tasks: list[SimTask] = []
        self.waits: dict[str, float] = {}
        self.submitted: list[tuple[str, float, SimTask]] = []
        self.drivers = [self.cluster.driver(node) for node in range(nodes)]
        self.groups = [self._group(number) for number in range(max(1, nodes // 20))]

    def _group(self, number: int) -> m.GroupSpec:
        driver = self.drivers[number % self.nodes]
        strategy = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")[number % 4]
        most = max(1, self.workers // 8)  # all of them fit into half a node: STRICT_PACK needs that
        bundles = [to_units({"CPU": min(most, self.rng.choice([1, 2, 4]))}) for _ in range(min(4, self.nodes))]
        spec = m.GroupSpec(driver.proc + (1 << 38 | number).to_bytes(5, "big"), bundles, strategy, owner=driver.proc)
        self.cluster.post(driver.proc, HEAD, m.CreateGroup(0, spec))
        return spec

    def _one(self, seconds: float, node: int) -> tuple[str, SimTask]:
        """A task by the dice; children count too."""
        kind = self.rng.random()
        if kind < 0.05:
            children = [SimTask(shape(CPU=1), seconds) for _ in range(4)]
            self.tasks += children
            return "nested", SimTask(shape(CPU=1), seconds, children)
        if kind < 0.25:
            return "near", SimTask(
                shape(f"near:{(node + self.rng.randrange(SPREAD_OF_DATA)) % self.nodes}", CPU=1), seconds
            )
        if kind < 0.27:
            return "large", SimTask(shape(CPU=max(1, self.workers // 2)), seconds)
        if kind < 0.30:
            return "spread", SimTask(shape("SPREAD", CPU=1), seconds)
        if kind < 0.35:
            spec = self.rng.choice(self.groups)
            names = names_in(spec.group.hex(), -1, to_units({"CPU": 1}))
            return "group", SimTask(m.Shape(tuple(sorted(names.items())), GROUP), seconds)
        return "plain", SimTask(shape(CPU=1), seconds)

    def run(self) -> dict[str, Any]:
        """Submit everything, over half of the time that it takes, and wait for the end."""
        cluster, began, mean = self.cluster, process_time(), 0.02
        length = max(0.5, self.wanted * mean / (self.nodes * self.workers) / 2)
        while len(self.tasks) < self.wanted:
            node = self.rng.randrange(self.nodes)
            kind, task = self._one(self.rng.uniform(0.5, 1.5) * mean, node)
            self.tasks.append(task)
            when = self.rng.random() * length
            self.submitted.append((kind, when, task))
            cluster.net.after(when, lambda driver=self.drivers[node], task=task: driver.submit(task))
        ended = cluster.net.run(3600.0, self._counter(), cluster.look)
        assert ended, "tasks are lost: " + cluster.explain()[:2000]
        makespan = cluster.net.now
        for spec in self.groups:
            cluster.post(self.drivers[0].proc, HEAD, m.RemoveGroup(spec.group))
        cluster.net.run(cluster.net.now + 30, lambda: False, cluster.look)
        cluster.check_all()
        assert all(raylet.available() == cluster.totals[raylet.node] for raylet in cluster.raylets), "a resource leaks"
        assert all(task.done == 1 for task in self.tasks), "a task did not run exactly once"
        return self._report(makespan, process_time() - began)

    def _counter(self) -> Callable[[], bool]:
        """Whether all is done: the first that is not is looked at again and again."""
        position = 0

        def done() -> bool:
            nonlocal position
            while position < len(self.tasks) and self.tasks[position].done:
                position += 1
            return position == len(self.tasks)

        return done

    def _report(self, makespan: float, cpu: float) -> dict[str, Any]:
        cluster = self.cluster
        ran = ",".join(str(task.ran_on[-1]) for task in self.tasks)
        near = [task for kind, _, task in self.submitted if kind == "near"]
        at_home = sum(task.ran_on[-1] == int(task.shape.strategy.partition(":")[2]) for task in near)
        ideal = sum(task.seconds for task in self.tasks) / (self.nodes * self.workers)
        return {
            "nodes": self.nodes,
            "workers": self.workers,
            "tasks": len(self.tasks),
            "seconds": round(makespan, 3),
            "ideal_seconds": round(ideal, 3),
            "digest": hashlib.sha256(ran.encode()).hexdigest()[:16],
            "where their data is": round(at_home / max(1, len(near)), 4),
            "longest_wait": {kind: round(wait, 3) for kind, wait in self._longest().items()},
            "head_messages": sum(cluster.told.values()),
            "head_cpu": round(cluster.cost, 3),
            "head_us_per_message": round(cluster.cost / max(1, sum(cluster.told.values())) * 1e6, 1),
            "head_us_per_task": round(cluster.cost / len(self.tasks) * 1e6, 2),
            "raylets_cpu": round(cluster.raylets_cost, 3),
            "simulation_cpu": round(cpu, 1),
        }

    def _longest(self) -> dict[str, float]:
        """By kind of task: the longest time from its submission to its begin."""
        kinds = sorted({kind for kind, _, _ in self.submitted})
        return {kind: max(task.began - when for k, when, task in self.submitted if k == kind) for kind in kinds}


# ------------------------------------------------------------ one driver


class Charged(Ticking):
    """A submitter that knows what its leases and tasks cost: `cost`, in seconds of CPU, messages included."""

    cost = 0.0
    pushes = 0

    def submit(self, sim: SimTask) -> None:
        self.charge(lambda: super(Charged, self).submit(sim))

    def receive(self, msg: m.Message) -> None:
        body = m.encode([msg])
        self.charge(lambda: super(Charged, self).receive(m.decode(body)[0]))

    def taken_back(self, worker: bytes, msg: m.TasksReturned) -> None:
        self.charge(lambda: super(Charged, self).taken_back(worker, msg))

    def finished(self, worker: bytes, sim: SimTask) -> None:
        body = m.encode([m.TaskDone(worker + bytes(5), b"v\0", int(sim.seconds * 1e6))])

        def answer() -> None:
            m.decode(body)
            super(Charged, self).finished(worker, sim)

        self.charge(answer)

    def _push(self, task: PendingTask, worker: bytes) -> None:
        m.encode([m.PushTask(task.id, b"f" * 16, b"a" * 21)])
        self.pushes += 1
        super()._push(task, worker)

    def _look(self) -> None:
        self.charge(super()._look)

    def charge(self, work: Callable[[], object]) -> None:
        began = process_time()
        work()
        self.cost += process_time() - began


def one(nodes: int, workers: int, seed: int, rounds: int = 10) -> dict[str, Any]:
    """One driver with so many tasks of a second, give or take a fifth, for each worker of the cluster.

    All are submitted at once. Busy is the share of all workers that run a task, from when the first task began until
    the last one was sent; `first_round_seconds`: until every worker had one.
    """
    cluster = Measured(nodes, workers, seed, Charged)
    rng = random.Random(seed)
    driver = cluster.driver(0)
    assert isinstance(driver, Charged)
    tasks = [SimTask(shape(CPU=1), rng.uniform(0.8, 1.2)) for _ in range(nodes * workers * rounds)]
    for task in tasks:
        driver.submit(task)
    submitted = driver.cost
    ended = cluster.net.run(3600.0, lambda: driver.waiting_for == 0, cluster.look)
    assert ended, "tasks are lost: " + cluster.explain()[:2000]
    makespan = cluster.net.now
    cluster.net.run(makespan + 30, lambda: False, cluster.look)
    cluster.check_all()
    assert all(raylet.available() == cluster.totals[raylet.node] for raylet in cluster.raylets), "a resource leaks"
    assert all(task.done == 1 for task in tasks), "a task did not run exactly once"
    begins = sorted(task.began for task in tasks)
    first, last = begins[0], begins[-1]
    ran = sum(max(0.0, min(last, task.began + task.seconds) - task.began) for task in tasks)
    return {
        "nodes": nodes,
        "workers": workers,
        "tasks": len(tasks),
        "seconds": round(makespan, 3),
        "busy": round(ran / (nodes * workers * (last - first)), 4),
        "first_round_seconds": round(begins[nodes * workers - 1] - first, 3),
        "driver_us_per_submission": round(submitted / len(tasks) * 1e6, 2),
        "driver_us_per_task": round((driver.cost - submitted) / len(tasks) * 1e6, 2),
        "driver_core": round((driver.cost - submitted) / makespan, 3),
        "head_core": round(cluster.cost / makespan, 4),
        "raylets_cores": round(cluster.raylets_cost / makespan, 4),
        "head_messages": sum(cluster.told.values()),
    }


# ------------------------------------------------------------ local


def local(nodes: int, workers: int, seed: int, seconds: float = 3.0) -> dict[str, Any]:
    """What the head does while every node works for itself, at full load and with more to do.

    A simulated task stands for all that a worker does between two events of its lease, however many tasks that are:
    tasks of a class go from their submitter straight to the leased worker, and no raylet sees them.
    """
    cluster = Measured(nodes, workers, seed)
    rng = random.Random(seed)
    for node in range(nodes):
        driver = cluster.driver(node)
        for _ in range(int(workers * (seconds + 4.0))):
            driver.submit(SimTask(shape(CPU=1), rng.uniform(0.8, 1.2)))
    cluster.net.run(2.0, lambda: False, cluster.look)
    told, cost, began = sum(cluster.told.values()), cluster.cost, cluster.net.now
    kinds = Counter(cluster.told)
    cluster.net.run(began + seconds, lambda: False, cluster.look)
    cluster.check_all()
    busy = sum(worker.running is not None for worker in cluster.workers.values()) / (nodes * workers)
    return {
        "nodes": nodes,
        "workers": workers,
        "busy": round(busy, 4),
        "head_messages_per_second": round((sum(cluster.told.values()) - told) / seconds, 1),
        "by_type": {kind: round(n / seconds, 1) for kind, n in sorted((cluster.told - kinds).items())},
        "head_core": round((cluster.cost - cost) / seconds, 4),
    }


# ------------------------------------------------------------ decisions


def decisions(nodes: int, seed: int, count: int = 2000) -> dict[str, Any]:
    """Microseconds of the head for one choice of each kind; between two choices some other node reports a change."""
    rng = random.Random(seed)
    infos = [
        m.NodeInfo(n, f"{n:056x}", f"n{n}", "a", 1, to_units({"CPU": 64, "GPU": 4}), b"", "", 0, {"rack": str(n % 20)})
        for n in range(nodes)
    ]
    found: dict[str, float] = {}
    rack = to_strategy([conditions({"rack": "in(3,4,5)"})])
    for kind, wanted in (
        ("hybrid", shape(CPU=1)),
        ("spread", shape("SPREAD", CPU=1)),
        ("labels", shape(rack, CPU=1)),
        ("gpu", shape(CPU=1, GPU=0.5)),
    ):
        view = ClusterResources()
        view.nodes_joined(infos)
        found[kind] = _each(count, rng, view, lambda view=view, wanted=wanted: view.choose(wanted, 1, but=0))
    view = ClusterResources()
    view.nodes_joined(infos)
    found["actor"] = _each(count, rng, view, lambda: view.choose_for_actor(shape(CPU=1), shape()))
    head = Gcs(Config())
    head.cluster_up(0.0, "s", infos)
    numbers = iter(range(1 << 30))

    def group() -> None:
        ident = HEAD + next(numbers).to_bytes(5, "big")
        spec = m.GroupSpec(ident, [to_units({"CPU": 1})] * 4, "SPREAD")
        for effect in head.handle(0.0, HEAD, m.CreateGroup(0, spec)):
            if isinstance(effect, Send) and isinstance(effect.msg, m.PrepareBundles):
                prepared = m.BundlesPrepared(ident, effect.msg.attempt, True)
                head.handle(0.0, raylet_of(node_of(effect.dest)), prepared)
        head.handle(0.0, HEAD, m.RemoveGroup(ident))

    found["group of 4"] = _each(count // 4, rng, head.resources, group)
    return {"nodes": nodes, **{kind: round(us, 2) for kind, us in found.items()}}


def _each(count: int, rng: random.Random, view: ClusterResources, decide: Callable[[], object]) -> float:
    """Microseconds of one decision, without the reports between them."""
    spent = 0.0
    versions = Counter[int]()
    decide()
    gc.collect()
    for _ in range(count):
        versions[node := rng.randrange(len(view.nodes))] += 1
        view.apply_view(m.NodeView(node, versions[node], to_units({"CPU": rng.randrange(8, 64), "GPU": 4})))
        began = process_time()
        decide()
        spent += process_time() - began
    return spent / count * 1e6


def growth(rows: list[dict[str, Any]], kind: str) -> float:
    """The exponent of the nodes with which the cost of a decision grows, by least squares."""
    nodes = [math.log(row["nodes"]) for row in rows]
    return statistics.linear_regression(nodes, [math.log(max(row[kind], 0.01)) for row in rows]).slope


# ------------------------------------------------------------ the program


def main() -> None:
    """Run the parts that were asked for, and show what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["work", "one", "local", "decisions", []])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    sizes = [size for size in SIZES if size <= given.nodes]
    found: dict[str, Any] = {"seed": given.seed}
    parts = given.parts or ["decisions", "local", "one", "work"]
    if "decisions" in parts:
        rows = found["decisions"] = [_say(decisions(size, given.seed)) for size in sizes]
        kinds = [kind for kind in rows[0] if kind != "nodes" and len(rows) > 1]
        found["growth"] = _say({kind: round(growth(rows, kind), 2) for kind in kinds})
    if "local" in parts:
        found["local"] = [_say(local(size, given.workers, given.seed)) for size in sizes]
    if "one" in parts:
        found["one"] = _say(one(given.nodes, given.workers, given.seed))
    if "work" in parts:
        found["work"] = _say(Work(given.nodes, given.workers, given.tasks, given.seed).run())
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    if given.plot:
        plot(found, given.plot)


def _say(row: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(row), flush=True)
    return row


def plot(found: dict[str, Any], where: Path) -> None:
    """Cost of a decision, and share of a core, over the number of nodes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    rows = found.get("decisions", [])
    for kind in found.get("growth", ()):
        axes[0].loglog([row["nodes"] for row in rows], [row[kind] for row in rows], "o-", label=kind)
    axes[0].set(xlabel="nodes", ylabel="microseconds per decision", title="one global decision")
    axes[0].legend()
    rows = found.get("local", [])
    axes[1].loglog([row["nodes"] for row in rows], [max(1e-5, row["head_core"]) for row in rows], marker="o")
    axes[1].set(xlabel="nodes", ylabel="cores", title="the head, while every node works for itself")
    figure.tight_layout()
    figure.savefig(where, dpi=120)


if __name__ == "__main__":
    main()
