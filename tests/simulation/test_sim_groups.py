"""Placement groups under any delays, deaths, removals: never half a group, never more given than there is, no leak."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from simcluster import SimCluster, allocations_of
from submitters import SimTask, Submitter
from test_sim_leases import DELAYS, SIM

from hpcray.common.ids import HEAD
from hpcray.common.labels import conditions, to_strategy
from hpcray.common.resources import CAPTURING, GROUP, SLOTS, name_in, names_in, to_units
from hpcray.core.gcs.placement_group_manager import CREATED, REMOVED, GcsPlacementGroup
from hpcray.core.raylet.local_lease_manager import LocalLeaseManager
from hpcray.core.raylet.local_resources import COMMITTED, GPU, Bundle
from hpcray.protocol import messages as m

ANY_NODE = to_strategy([conditions({"rack": "none"}), conditions({})])
STRATEGIES = ["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


class GroupSubmitter(Submitter):
    """Gives up tasks of groups that are removed. `failed` counts them; `states` is what it was told."""

    def __init__(self, cluster: SimCluster, proc: bytes, lazy: bool) -> None:
        super().__init__(cluster, proc, lazy)
        self.closed: set[str] = set()
        self.states: dict[bytes, str] = {}
        self.failed = 0

    def receive(self, msg: m.Message) -> None:
        if isinstance(msg, m.PlacementGroupStateUpdate):
            self.states[msg.group] = msg.state
            if msg.state == REMOVED:
                self.closed.add(msg.group.hex())
                for scheduling_class in range(len(self.shapes)):
                    self.pump(scheduling_class)
        super().receive(msg)

    def pump(self, scheduling_class: int) -> None:
        if any(name.endswith(group) for name, _ in self.shapes[scheduling_class].resources for group in self.closed):
            self.failed += len(self.queues[scheduling_class])
            self.waiting_for -= len(self.queues[scheduling_class])
            self.queues[scheduling_class].clear()
        super().pump(scheduling_class)


class GroupCluster(SimCluster):
    """Knows what must hold of bundles, at every moment."""

    def submitter(self, proc: bytes) -> Any:
        return GroupSubmitter(self, proc, self.lazy)

    def check(self) -> None:
        self.checks += 1
        self.check_head()
        self.check_touched()
        for raylet in self.living():
            check_node(raylet, self.totals[raylet.node])

    def settled(self) -> bool:
        """Nothing is under way for a group."""
        groups = self.head.groups
        here = [bundle for raylet in self.living() for bundle in bundles(raylet)]
        return not groups._attempts and all(bundle.state == COMMITTED for bundle in here)

    def check_settled(self) -> None:
        """Every group that is there is there as a whole, where its strategy allows, and nothing else is held."""
        held = {(b.group, b.index): r.node for r in self.living() for b in bundles(r) if b.state == COMMITTED}
        expected: dict[tuple[str, int], int] = {}
        for group in self.head.groups.all_groups():
            if group.state != REMOVED:
                check_strategy(group)
                expected |= {(group.key, i): node for i, node in enumerate(group.nodes) if node >= 0}
        assert held == expected


def bundles(raylet: LocalLeaseManager) -> list[Bundle]:
    return list(raylet.resources.bundles)


def check_strategy(group: GcsPlacementGroup) -> None:
    nodes = [node for node in group.nodes if node >= 0]
    if group.state == CREATED:
        assert len(nodes) == len(group.nodes)
    if group.spec.strategy == "STRICT_PACK":
        assert len(set(nodes)) <= 1
    if group.spec.strategy == "STRICT_SPREAD":
        assert len(set(nodes)) == len(nodes)


def check_node(raylet: LocalLeaseManager, total: dict[str, int]) -> None:
    pool, mine = raylet.resources.pool, bundles(raylet)
    unique = allocations_of(raylet)
    for name, units in total.items():
        outside = [c for c in unique if c.bundle is None]
        held = sum(c.resources.get(name, 0) for c in outside if not (c.cpu_released and name == "CPU"))
        held += sum(bundle.resources.get(name, 0) for bundle in mine)
        assert pool.available.get(name, 0) == units - held, (raylet.node, name)
        assert held <= units, f"node {raylet.node} over-committed {name}"
    for bundle in mine:
        inside = [c for c in unique if c.bundle is bundle]
        assert {id(c) for c in inside} == {id(c) for c in bundle.allocations}
        for name, units in bundle.resources.items():
            held = sum(c.resources.get(name, 0) for c in inside if not (c.cpu_released and name == "CPU"))
            assert bundle.pool.available[name] == units - held >= 0, (bundle.group, bundle.index, name)
        if GPU in bundle.pool.devices:
            assert sum(bundle.pool.devices[GPU].free) == bundle.pool.available[GPU]
    if GPU in pool.devices:
        assert sum(pool.devices[GPU].free) == pool.available[GPU]
    shown: dict[str, int] = {}
    for bundle in mine:
        for name, units in bundle.pool.available.items() if bundle.state == COMMITTED else ():
            for label in (name_in(bundle.group, bundle.index, name), name_in(bundle.group, -1, name)):
                shown[label] = shown.get(label, 0) + units
    assert shown == raylet.resources.bundles.available
    assert pool.available.keys() == total.keys()


class Play:
    """A random course of events."""

    def __init__(self, seed: int, delays: list[float], deadly: bool) -> None:
        self.rng = rng = random.Random(seed)
        self.totals = []
        for _ in range(rng.randint(1, 5)):
            cpus, gpus = rng.choice([1, 2, 4]), rng.choice([0, 0, 1, 2])
            self.totals.append(to_units({"CPU": cpus, **({"GPU": gpus} if gpus else {}), "custom": 1}))
        self.cluster = GroupCluster(self.totals, delays)
        self.deadly = deadly
        self.drivers = [self.cluster.driver(0)] + [self.cluster.driver(n) for n in range(1, len(self.totals))]
        self.groups: list[m.GroupSpec] = []
        self.tasks: list[SimTask] = []
        self.actors: list[bytes] = []
        self.numbers = 0

    def bundle(self) -> dict[str, int]:
        kinds = [
            {"CPU": 1},
            {"CPU": 0.5},
            {"CPU": 2},
            {"CPU": 0.5, "GPU": 0.5},
            {"GPU": 1},
            {"custom": 0.25},
            {"GPU": 2},
        ]
        return to_units(self.rng.choice(kinds))

    def create(self) -> None:
        driver = self.rng.choice(self.drivers)
        self.numbers += 1
        ident = driver.proc + (1000 + self.numbers).to_bytes(5, "big")
        amounts = [self.bundle() for _ in range(self.rng.randint(1, 4))]
        spec = m.GroupSpec(ident, amounts, self.rng.choice(STRATEGIES), owner=driver.proc)
        self.groups.append(spec)
        self.cluster.if_alive(driver.proc, HEAD, m.CreateGroup(0, spec))

    def remove(self) -> None:
        if self.groups:
            spec = self.rng.choice(self.groups)
            self.cluster.if_alive(self.drivers[0].proc, HEAD, m.RemoveGroup(spec.group))

    def flood(self) -> None:
        """So much that groups and large tasks wait for long enough to have nodes kept free."""
        driver = self.rng.choice([d for d in self.drivers if d.proc not in self.cluster.dead])
        for _ in range(40):
            task = SimTask(m.Shape((("CPU", 10_000),)), 0.3)
            self.tasks.append(task)
            driver.submit(task)

    def in_group(self) -> m.Shape:
        spec = self.rng.choice(self.groups)
        part = {name: min(units, 5000) for name, units in spec.bundles[0].items()}
        return m.Shape(tuple(sorted(names_in(spec.group.hex(), 0, part).items())), GROUP)

    def actor(self) -> None:
        """One that holds something for life, in a group or not."""
        driver = self.rng.choice(self.drivers)
        self.numbers += 1
        ident = driver.proc + (5000 + self.numbers).to_bytes(5, "big")
        hold = m.Shape((("CPU", 2500),))
        if self.groups and self.rng.random() < 0.5:
            hold = self.in_group()
        spec = m.ActorSpec(ident, "A", b"c", b"", [], hold, hold, "", "ns", False, 1, 0, 1, {})
        self.actors.append(ident)
        self.cluster.if_alive(driver.proc, HEAD, m.CreateActor(0, spec))

    def kill_actor(self) -> None:
        if self.actors:
            actor = self.rng.choice(self.actors)
            self.cluster.if_alive(self.drivers[0].proc, HEAD, m.KillActor(actor, self.rng.random() < 0.5, ""))

    def work(self) -> None:
        driver = self.rng.choice([d for d in self.drivers if d.proc not in self.cluster.dead])
        if not self.groups or self.rng.random() < 0.3:
            cpus = self.rng.choice([5000, 5000, 10_000, 20_000])
            anywhere = f"near:{self.rng.randrange(len(self.totals))}"
            strategy = self.rng.choice(["", "SPREAD", anywhere, ANY_NODE])
            most = max(total["CPU"] for node, total in enumerate(self.totals) if not node or not self.deadly)
            shape = m.Shape((("CPU", min(cpus, most)),), strategy)
        else:
            spec = self.rng.choice(self.groups)
            index = self.rng.randrange(len(spec.bundles))
            part = {name: self.rng.choice([units, min(units, 5000)]) for name, units in spec.bundles[index].items()}
            names = names_in(spec.group.hex(), self.rng.choice([index, -1]), part)
            shape = m.Shape(tuple(sorted(names.items())), self.rng.choice([GROUP, CAPTURING]))
        task = SimTask(shape, self.rng.choice([0.0, 0.01, 0.3]))
        self.tasks.append(task)
        driver.submit(task)

    def kill(self) -> None:
        if self.cluster.workers:
            self.cluster.die(self.rng.choice(sorted(self.cluster.workers)), "killed by signal 9")

    def kill_node(self) -> None:
        alive = [n for n in range(1, len(self.totals)) if n not in self.cluster.dead_nodes]
        if alive:
            self.cluster.kill_node(self.rng.choice(alive))

    def run(self) -> None:
        events = [self.create] * 4 + [self.remove] * 2 + [self.work] * 8 + [self.actor] * 2 + [self.kill_actor]
        events += [self.flood]
        events += [self.kill, self.kill, self.kill_node] if self.deadly else []
        for _ in range(self.rng.randint(1, 40)):
            self.cluster.net.after(self.rng.random() * 4, self.rng.choice(events))
        self.cluster.run_for(6.0)
        assert self.cluster.net.run(self.cluster.net.now + 60, self.cluster.settled, self.cluster.check)
        self.cluster.check_settled()
        for spec in self.groups:
            self.cluster.if_alive(self.drivers[0].proc, HEAD, m.RemoveGroup(spec.group))
        for actor in self.actors:
            self.cluster.if_alive(self.drivers[0].proc, HEAD, m.KillActor(actor, True, "the end"))
        assert self.cluster.run(300.0), self.cluster.explain()
        assert not any(bundles(raylet) for raylet in self.cluster.living())
        assert all(state.total == state.info.total for state in self.cluster.head.resources.nodes.values())
        assert not any(state.in_bundles for state in self.cluster.head.resources.nodes.values())


@SIM
@given(DELAYS, st.integers(0, 2**32))
def test_no_course_of_events_overcommits_or_leaks(delays: list[float], seed: int) -> None:
    Play(seed, delays, deadly=False).run()


@SIM
@given(DELAYS, st.integers(0, 2**32))
@example(delays=[0.0001], seed=7345198)  # a group is removed where its node has given the bundles back
@example(delays=[0, 0, 0.3], seed=7269899)  # a second node of a group died while a bundle was placed anew
def test_nor_do_deaths_of_workers_and_nodes(delays: list[float], seed: int) -> None:
    Play(seed, delays, deadly=True).run()


def cluster_of(*cpus: float, delays: tuple[float, ...] = (0.001,)) -> tuple[GroupCluster, GroupSubmitter]:
    cluster = GroupCluster([to_units({"CPU": c}) for c in cpus], delays)
    return cluster, cluster.driver()


def make(cluster: GroupCluster, driver: GroupSubmitter, number: int, strategy: str, *cpus: float) -> GcsPlacementGroup:
    ident = driver.proc + number.to_bytes(5, "big")
    spec = m.GroupSpec(ident, [to_units({"CPU": c}) for c in cpus], strategy, owner=driver.proc)
    cluster.post(driver.proc, HEAD, m.CreateGroup(0, spec))
    cluster.run_for(0.3)
    return cluster.head.groups.find(ident)


def test_bundles_of_a_dead_node_move_and_the_others_stay() -> None:
    cluster, driver = cluster_of(1, 1, 1)
    group = make(cluster, driver, 1, "STRICT_SPREAD", 1, 1)
    assert group.state == CREATED and len(set(group.nodes)) == 2
    victim = next(node for node in group.nodes if node)
    stays = next(index for index, node in enumerate(group.nodes) if node != victim)
    kept = group.nodes[stays]
    cluster.kill_node(victim)
    cluster.run_for(1.0)
    assert group.state == CREATED and group.nodes[stays] == kept and victim not in group.nodes
    assert driver.states[group.spec.group] == CREATED
    cluster.check_settled()


def test_tasks_wait_for_the_bundle_that_moves() -> None:
    cluster, driver = cluster_of(0.5, 1, 1)
    group = make(cluster, driver, 1, "PACK", 1)
    (node,) = group.nodes
    names = names_in(group.key, 0, to_units({"CPU": 1}))
    tasks = [SimTask(m.Shape(tuple(sorted(names.items())), GROUP), 0.2) for _ in range(5)]
    for task in tasks:
        driver.submit(task)
    cluster.net.after(0.3, lambda: cluster.kill_node(node))
    cluster.net.run(60, lambda: all(task.done for task in tasks), cluster.check)
    assert all(task.done == 1 for task in tasks) and {task.ran_on[-1] for task in tasks} == {node, 3 - node}


def test_a_group_that_does_not_fit_waits_holds_nothing_and_comes_when_there_is_room() -> None:
    cluster, driver = cluster_of(2, 2)
    first = make(cluster, driver, 1, "STRICT_SPREAD", 2, 1)
    second = make(cluster, driver, 2, "STRICT_SPREAD", 1, 1)
    assert (first.state, second.state) == (CREATED, "PENDING")
    assert sum(1 for r in cluster.living() for _ in bundles(r)) == 2
    cluster.post(driver.proc, HEAD, m.RemoveGroup(first.spec.group))
    cluster.run_for(1.0)
    assert (first.state, second.state) == (REMOVED, CREATED)


def test_two_groups_that_each_need_all_do_not_block_each_other() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        cluster, driver = cluster_of(1, 1, 1, delays=tuple(rng.choice([0.0, 0.01, 0.2]) for _ in range(7)))
        for number in (1, 2):
            ident = driver.proc + number.to_bytes(5, "big")
            spec = m.GroupSpec(ident, [to_units({"CPU": 1})] * 3, "SPREAD", owner=driver.proc)
            cluster.post(driver.proc, HEAD, m.CreateGroup(0, spec))
        cluster.run_for(5.0)
        states = sorted(group.state for group in cluster.head.groups.all_groups())
        assert states == [CREATED, "PENDING"], (seed, states)


def test_infeasible_groups_are_reported_once_with_what_there_is() -> None:
    cluster, driver = cluster_of(1, 1)
    make(cluster, driver, 1, "STRICT_SPREAD", 1, 1, 1)
    cluster.run_for(30)
    (text,) = driver.warnings
    assert "3 x {CPU: 1} (STRICT_SPREAD)" in text and "there are 2 nodes for 3 bundles" in text


def test_groups_of_one_creator_that_wait_for_the_same_are_reported_once() -> None:
    cluster, driver = cluster_of(1)
    for number, cpus in ((1, 1), (2, 1), (3, 1), (4, 0.5)):
        make(cluster, driver, number, "PACK", cpus)
    cluster.run_for(30)
    first, other = driver.warnings
    assert "asks for {CPU: 1} (PACK) and has waited" in first
    assert "asks for {CPU: 0.5} (PACK) and has waited" in other


def test_a_group_ends_with_its_owner() -> None:
    cluster, _ = cluster_of(2)
    other = cluster.driver()
    group = make(cluster, other, 1, "PACK", 1)
    cluster.die(other.proc, "exit code 0")
    cluster.run_for(1.0)
    assert group.state == REMOVED
    assert cluster.run(30.0), cluster.explain()


def test_slots_are_no_resource_of_the_node() -> None:
    cluster, driver = cluster_of(2)
    make(cluster, driver, 1, "PACK", 1)
    assert SLOTS not in cluster.raylets[0].available()
