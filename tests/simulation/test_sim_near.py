"""Requests between raylets, in clusters that count as large: work is done, whatever dies, leaves or moves."""

from __future__ import annotations

import random
from typing import Any

import pytest
from helpers.examples import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from simcluster import SEAT, SimCluster
from submitters import CPU1, SimTask, shape
from test_sim_groups import GroupCluster, Play
from test_sim_leases import DELAYS, nodes

from hpcray.common.ids import HEAD, node_of, number_of, raylet_of
from hpcray.common.resources import GROUP, Resources, names_in, to_units
from hpcray.core.effects import Send
from hpcray.core.gcs import placement_group_manager
from hpcray.core.gcs.gcs import Gcs
from hpcray.core.raylet import head_reporter, local_lease_manager
from hpcray.protocol import messages as m


def courses(number: int) -> settings:
    """So many courses of events. The fixture `large` may be the same for all of them."""
    health = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples(number), suppress_health_check=health, print_blob=True)


SIM = courses(40)
NODES = 5


def large_from(patch: pytest.MonkeyPatch, size: int) -> None:
    """Clusters of so many nodes count as large."""
    patch.setattr(local_lease_manager, "SMALL_CLUSTER", size - 1)
    patch.setattr(head_reporter, "SMALL_CLUSTER", size - 1)
    patch.setattr(placement_group_manager, "LARGE_CLUSTER", size - 1)


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any cluster counts as large."""
    large_from(monkeypatch, 2)


def info(node: int, total: Resources) -> m.NodeInfo:
    return m.NodeInfo(node, f"id{node}", f"host{node}", "a", 100 + node, dict(total), b"", "mpi", 0)


class NearCluster(SimCluster):
    """Counts the requests between raylets, and loses this share (`lost`) of them.

    As in `runtime.raylet.Raylet.died`, the raylet of a process that dies reports that to the nodes with which it
    exchanged messages: a new head knows nothing of the leases that the old one had let nodes grant.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        self.direct = 0
        self.lost = 0.0
        self.random = random.Random(1)
        self.exchanged: dict[bytes, set[int]] = {}
        super().__init__(*args, **more)

    def deliver_to_process(self, src: bytes, dest: bytes, msg: m.Message) -> None:
        if node_of(src) != node_of(dest):
            self.exchanged.setdefault(dest, set()).add(node_of(src))
        super().deliver_to_process(src, dest, msg)

    def noticed(self, proc: bytes, reason: str) -> None:
        super().noticed(proc, reason)
        for node in sorted(self.exchanged.pop(proc, ())):
            self.post(raylet_of(node_of(proc)), raylet_of(node), m.ProcDied(proc, reason))

    def deliver(self, src: bytes, dest: bytes, msg: m.Message) -> None:
        if isinstance(msg, (m.PeerLeaseRequest, m.PeerLeasesRefused)):
            self.direct += 1
            if self.random.random() < self.lost:
                return
        super().deliver(src, dest, msg)

    def move_head(self) -> None:
        """A head that knows nothing but the nodes takes over, and every raylet reports what it lacks."""
        self.head = Gcs(self.config)
        self.carry_out(SEAT, self.head.cluster_up(self.net.now, "session", [info(n, t) for n, t in self.alive()]))
        for node, _ in self.alive():
            effects = self.raylets[node].head_moved(self.net.now)
            keep = [one for one in effects if not (isinstance(one, Send) and isinstance(one.msg, m.NodeInventory))]
            self.carry_out(raylet_of(node), keep)

    def leave(self, node: int) -> None:
        """The node grants nothing any more."""
        if node not in self.dead_nodes:
            self.head.set_draining({node: 0})
            self.carry_out(raylet_of(node), self.raylets[node].leave(self.net.now))

    def alive(self) -> list[tuple[int, Any]]:
        return [(node, total) for node, total in enumerate(self.totals) if node not in self.dead_nodes]


def course(delays: list[float], seed: int) -> None:
    """Tasks near all nodes from drivers of most; nodes, drivers and workers die, a node leaves, and the head moves."""
    rng = random.Random(seed)
    cluster = NearCluster(nodes(*[rng.choice([1, 2, 4]) for _ in range(NODES)]), delays, real=True)
    drivers = [cluster.driver(node) for node in (0, 0, 1, 2, 3)]
    tasks: list[tuple[Any, SimTask]] = []

    def make(depth: int = 1) -> SimTask:
        kind = rng.choice([CPU1, *[shape(f"near:{rng.randrange(NODES)}", CPU=1)] * 4])
        children = [make(0) for _ in range(rng.choice([0, 0, 0, 2]))] if depth else []
        return SimTask(kind, rng.choice([0.0, 0.001, 0.02, 0.4]), children)

    def submit(driver: Any, task: SimTask) -> None:
        if driver.proc not in cluster.dead:
            driver.submit(task)

    for _ in range(rng.randint(5, 60)):
        driver, task = rng.choice(drivers), make()
        tasks.append((driver, task))
        cluster.net.after(rng.choice([0.0, 3 * rng.random()]), lambda d=driver, t=task: submit(d, t))
    possible = [
        lambda: cluster.kill_node(rng.choice([1, 4])),
        lambda: cluster.leave(rng.choice([2, 4])),
        lambda: cluster.die(rng.choice(drivers[1:]).proc, "killed by signal 9"),
        lambda: [cluster.die(proc, "killed by signal 9") for proc in sorted(cluster.workers)[:2]],
        cluster.move_head,
    ]
    for fault in rng.sample(possible, rng.randint(1, 4)):
        cluster.net.after(3 * rng.random(), fault)
    cluster.run_for(4.0)
    assert cluster.run(600.0), cluster.explain()
    for driver, task in tasks:
        assert task.done == 1 or driver.proc in cluster.dead, cluster.explain()
    for raylet in cluster.living():
        raylet.check_invariants()
        assert all(number_of(holder) and holder not in cluster.dead for holder in raylet._leases.by_holder)


@SIM
@given(DELAYS, st.integers(0, 2**32))
def test_work_near_its_arguments_is_done_whatever_dies_leaves_or_moves(delays: list[float], seed: int) -> None:
    course(delays, seed)


def test_the_head_hears_nothing_of_work_that_its_near_nodes_can_serve() -> None:
    for seed in range(5):
        cluster = NearCluster(nodes(*[8] * NODES), [0.0005], real=True)
        tasks = [SimTask(shape(f"near:{1 + n % (NODES - 1)}", CPU=1), 0.01) for n in range(40)]
        driver = cluster.driver(0)
        heard: list[m.Message] = []
        handle = cluster.head.handle

        def listening(now: float, src: bytes, msg: m.Message, heard: Any = heard, handle: Any = handle) -> Any:
            heard.append(msg)
            return handle(now, src, msg)

        cluster.head.handle = listening  # type: ignore[method-assign]
        for task in tasks:
            cluster.net.after(random.Random(seed).random(), lambda t=task, d=driver: d.submit(t))
        cluster.run_for(3.0)
        assert all(task.done == 1 for task in tasks), cluster.explain()
        assert all(task.ran_on == [int(task.shape.strategy[-1])] for task in tasks)
        assert cluster.direct and not any(isinstance(msg, m.UnmetLeaseRequest) for msg in heard)


@SIM
@given(DELAYS, st.integers(0, 2**32), st.booleans())
@example(delays=[0.0], seed=287, deadly=False)  # leases near the arguments of what its own node has no CPUs for
def test_work_in_groups_is_done_and_nothing_leaks_whatever_is_removed_or_dies(
    delays: list[float], seed: int, deadly: bool
) -> None:
    Play(seed, delays, deadly).run()


def unmet_in_a_group() -> int:
    """How many reports of unmet requests the head gets of 60 tasks in a group, from drivers of all nodes."""
    cluster = GroupCluster(nodes(*[4] * NODES), [0.0005])
    driver = cluster.driver(0)
    spec = m.GroupSpec(driver.proc + bytes(5), [to_units({"CPU": 1})] * 3, "STRICT_SPREAD", owner=driver.proc)
    cluster.post(driver.proc, HEAD, m.CreateGroup(0, spec))
    cluster.run_for(0.1)
    kind = m.Shape(tuple(names_in(spec.group.hex(), -1, to_units({"CPU": 1})).items()), GROUP)
    heard = 0
    handle = cluster.head.handle

    def listening(now: float, src: bytes, msg: m.Message) -> Any:
        nonlocal heard
        heard += isinstance(msg, m.UnmetLeaseRequest)
        return handle(now, src, msg)

    cluster.head.handle = listening  # type: ignore[method-assign]
    tasks = [SimTask(kind, 0.01) for _ in range(60)]
    others = [cluster.driver(node) for node in range(NODES)]
    for number, task in enumerate(tasks):
        cluster.net.after(0.05 * number, lambda t=task, d=others[number % NODES]: d.submit(t))
    assert cluster.net.run(cluster.net.now + 30, lambda: all(task.done for task in tasks), cluster.check)
    assert {node for task in tasks for node in task.ran_on} == set(cluster.head.groups.find(spec.group).nodes)
    return heard


def test_the_head_hears_little_of_work_in_groups_whose_nodes_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    known = unmet_in_a_group()
    monkeypatch.setattr(placement_group_manager, "LARGE_CLUSTER", NODES)
    assert 0 < 3 * known < unmet_in_a_group()


def test_work_is_done_though_messages_between_raylets_are_lost() -> None:
    """The head takes over after the locality wait: no other safeguard is needed."""
    for seed in range(20):
        lossy(seed)


def lossy(seed: int) -> None:
    cluster = NearCluster(nodes(*[2] * NODES), [0.0005, 0.01], real=True)
    cluster.lost = 0.3
    cluster.random.seed(seed)
    driver = cluster.driver(0)
    tasks = [SimTask(shape(f"near:{n % NODES}", CPU=1), 0.02) for n in range(20 + seed)]
    for task in tasks:
        driver.submit(task)
    assert cluster.run(60.0), cluster.explain()
    assert all(task.done == 1 for task in tasks)
