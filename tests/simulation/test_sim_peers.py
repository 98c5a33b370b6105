"""Requests between raylets of what any node may serve, or the nodes of a group: some are lost, or late, nodes die.

At every moment: no node is over-committed, and soon after a process has died nothing is held or queued for it anywhere.
At the end: each task of a living driver has run, and nothing is held.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simcluster import SEAT, SimCluster
from submitters import CPU1, SimTask, shape
from test_sim_leases import DELAYS, nodes
from test_sim_near import NearCluster, courses, info, large_from

from hpcray.common.ids import HEAD, make_proc, node_of, raylet_of
from hpcray.common.resources import GROUP, Resources, names_in, to_units
from hpcray.core.gcs.gcs import RecoveringGcs
from hpcray.core.gcs.placement_group_manager import CREATED
from hpcray.core.gcs.state_log import TableSnapshot
from hpcray.core.raylet.lease_requests import LeaseRequestTable
from hpcray.core.raylet.local_lease_manager import LocalLeaseManager
from hpcray.core.raylet.peer_requests import PeerRequests
from hpcray.protocol import messages as m

SIM = courses(15)
NODES = 6
LARGEST_DELAY = 1.0
"""Seconds for which a late message between two raylets is held up, at most, with all behind it."""
FORGOTTEN_AFTER = 3 * (0.3 + LARGEST_DELAY)
"""Seconds after the death of a process in which all nodes have heard of it: three messages, one after the other."""
PEER = (m.PeerLeaseRequest, m.PeerLeasesRefused)
OF_HEAD = (
    m.GrantLeases,
    m.PrepareBundles,
    m.CommitBundles,
    m.ReturnBundles,
    m.PlacementGroupNodes,
    m.ResourceContention,
)


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    large_from(monkeypatch, 2)


class Successor(RecoveringGcs):
    """A head that takes over from another one's tables; what it does not decide meanwhile is its Gcs's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.gcs, name)


class PeerCluster(NearCluster):
    """Holds up this share (`late`) of the messages between raylets, grows, and has heads that take over."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self.late = 0.0
        self.heads = 0
        self.lost_nodes: dict[int, set[int]] = {}
        self.ended: dict[bytes, float] = {}
        super().__init__(*args, **more)

    def post(self, src: bytes, dest: bytes, msg: m.Message) -> None:
        if isinstance(msg, PEER) and self.random.random() < self.late:
            pair = src, dest
            self.net._last[pair] = max(
                self.net._last.get(pair, 0.0), self.net.now + LARGEST_DELAY * self.random.random()
            )
        if node_of(dest) in self.lost_nodes.get(node_of(src), ()) and src == raylet_of(node_of(src)):
            super().post(src, src, m.Undeliverable(dest, "its node is dead"))  # as the router of the raylet says
        elif isinstance(msg, OF_HEAD):  # of a head that is replaced, raylets obey nothing any more
            head, body = self.heads, m.encode([msg])
            self.net.send(src, dest, lambda: head == self.heads and self.deliver(src, dest, m.decode(body)[0]))
        else:
            super().post(src, dest, msg)

    def die(self, proc: bytes, reason: str) -> None:
        if proc not in self.dead and node_of(proc) not in self.dead_nodes:
            self.ended[proc] = self.net.now
        super().die(proc, reason)

    def crash(self, node: int) -> None:
        for proc in [*self.workers, *self.submitters]:
            if node_of(proc) == node:
                self.ended[proc] = self.net.now
        super().crash(node)

    def node_told(self, other: int, node: int) -> None:
        self.lost_nodes.setdefault(other, set()).add(node)
        super().node_told(other, node)

    def deliver_to_raylet(self, src: bytes, node: int, msg: m.Message) -> None:
        if isinstance(msg, m.NodeInventory):
            assert isinstance(self.head, Successor)
            self.carry_out(SEAT, self.head.handle(self.net.now, src, msg))
        else:
            super().deliver_to_raylet(src, node, msg)

    def take_over(self) -> None:
        """A head with the tables of the old one begins, as the raylets learn."""
        if isinstance(self.head, Successor) and self.head.awaited:
            return
        self.heads += 1
        snapshot, head = TableSnapshot(), Successor(self.config)
        snapshot.apply(self.head.log.snapshot_rows(), whole=True)
        head.take_over(self.net.now, snapshot, -1)
        self.head = head  # type: ignore[assignment]
        for node in self.dead_nodes:
            self.carry_out(SEAT, head.node_died(self.net.now, node, "heartbeat lost"))
        for node, _ in self.alive():
            self.carry_out(raylet_of(node), self.raylets[node].head_moved(self.net.now))

    def grow(self, total: Resources) -> int:
        """One more node joins: the others know it before the head uses it."""
        node = len(self.raylets)
        self.totals.append(dict(total))
        self.on_node.append({})
        self.raylets.append(LocalLeaseManager(node, dict(total), node + 1, self.config))
        for other in [one for one, _ in self.alive() if one != node]:
            self.carry_out(raylet_of(other), self.raylets[other].cluster_grew(self.net.now, node + 1))
        self.carry_out(SEAT, self.head.nodes_joined(self.net.now, [info(node, total)]))
        self.carry_out(raylet_of(node), self.raylets[node].start(self.net.now))
        self.net.after(self.net.delay(), lambda: self.tick(node))
        return node

    def queued_at_peers(self) -> int:
        """Requests of all nodes that other nodes know, and the head does not."""
        return sum(len(raylet._peers._open) for raylet in self.living())

    def check(self) -> None:
        super().check()
        if self.checks % 50 == 0:
            self.check_forgotten()

    def check_forgotten(self) -> None:
        """Nothing is there for a process that is long dead."""
        for raylet in self.living():
            there = {one.holder for one in raylet._requests if one.unserved() or one.starting}
            for holder in there | {holder for holder, held in raylet._leases.by_holder.items() if held}:
                ended = self.ended.get(holder, self.net.now)
                assert self.net.now - ended < FORGOTTEN_AFTER, f"node {raylet.node} has something of {holder.hex()}"


def group(cluster: SimCluster, driver: Any, number: int, strategy: str, bundles: int) -> m.GroupSpec:
    spec = m.GroupSpec(
        driver.proc + number.to_bytes(5, "big"), [to_units({"CPU": 1})] * bundles, strategy, owner=driver.proc
    )
    cluster.post(driver.proc, HEAD, m.CreateGroup(0, spec))
    return spec


def inside(spec: m.GroupSpec, index: int = -1) -> m.Shape:
    return m.Shape(tuple(sorted(names_in(spec.group.hex(), index, to_units({"CPU": 1})).items())), GROUP)


class Course:
    """Tasks of drivers on most nodes, and what happens meanwhile; the driver of node 0 owns the groups, and lives.

    Beside the groups two CPUs of some node are free, whatever dies.
    """

    def __init__(self, delays: list[float], seed: int, size: int = NODES) -> None:
        self.rng = rng = random.Random(seed)
        self.cluster = PeerCluster(nodes(*[rng.choice([3, 3, 4]) for _ in range(size)]), delays, real=True)
        self.cluster.random.seed(seed)
        self.drivers = [self.cluster.driver(node % size) for node in (0, 0, 1, 2, 3)]
        self.tasks: list[tuple[Any, SimTask]] = []
        self.groups: list[m.GroupSpec] = []

    def with_groups(self) -> None:
        self.groups = [
            group(self.cluster, self.drivers[0], 1, "STRICT_SPREAD", 3),
            group(self.cluster, self.drivers[0], 2, "PACK", 2),
        ]
        self.cluster.run_for(3.0)
        assert all(self.cluster.head.groups.find(spec.group).state == CREATED for spec in self.groups)

    def kind(self) -> m.Shape:
        rng = self.rng
        choice = rng.random()
        if choice < 0.5 and self.groups:
            spec = rng.choice(self.groups)
            return inside(spec, rng.choice([-1, -1, rng.randrange(len(spec.bundles))]))
        if choice < 0.7:
            return shape("SPREAD", CPU=1)
        return rng.choice([CPU1, CPU1, shape(f"near:{rng.randrange(NODES)}", CPU=1), shape(CPU=2)])

    def submit(self, most: int = 80, seconds: float = 3.0) -> None:
        rng = self.rng
        for _ in range(rng.randint(10, most)):
            driver = rng.choice(self.drivers)
            children = [SimTask(CPU1, 0.01) for _ in range(rng.choice([0, 0, 0, 2]))]
            kind = self.kind()
            task = SimTask(kind, rng.choice([0.0, 0.001, 0.02, 0.4]), [] if kind.strategy == GROUP else children)
            self.tasks.append((driver, task))
            when = rng.choice([0.0, seconds * rng.random()])
            self.cluster.net.after(when, lambda d=driver, t=task: d.proc in self.cluster.dead or d.submit(t))

    def at_some_time(self, what: Callable[[], object], seconds: float = 3.0) -> None:
        self.cluster.net.after(seconds * self.rng.random(), what)

    def kill_worker(self) -> None:
        for proc in sorted(self.cluster.workers)[:2]:
            self.cluster.die(proc, "killed by signal 9")

    def kill_driver(self) -> None:
        self.cluster.die(self.rng.choice(self.drivers[1:]).proc, "killed by signal 9")

    def kill_some(self, nodes: list[Callable[[], object]], least: int, most: int) -> None:
        """Nodes, by these calls, a driver, workers: so many of these kills, at some times."""
        possible = [*nodes, self.kill_driver, self.kill_worker]
        for kill in self.rng.sample(possible, self.rng.randint(least, most)):
            self.at_some_time(kill)

    def finish(self) -> None:
        cluster = self.cluster
        cluster.run_for(4.0)
        done = lambda: all(task.done or driver.proc in cluster.dead for driver, task in self.tasks)  # noqa: E731
        assert cluster.net.run(cluster.net.now + 120.0, done, cluster.check), cluster.explain()
        for spec in self.groups:
            cluster.post(self.drivers[0].proc, HEAD, m.RemoveGroup(spec.group))
        assert cluster.run(120.0), cluster.explain()
        cluster.run_for(2 * FORGOTTEN_AFTER)
        cluster.check_forgotten()
        assert all(task.done == 1 or driver.proc in cluster.dead for driver, task in self.tasks), cluster.explain()
        assert cluster.quiet() and not cluster.queued_at_peers()


@SIM
@given(DELAYS, st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.5]), st.sampled_from([0.0, 0.1, 0.5]))
def test_work_is_done_and_nothing_leaks_though_requests_are_lost_or_late_and_nodes_and_drivers_die(
    delays: list[float], seed: int, lost: float, late: float
) -> None:
    course = Course(delays, seed)
    course.with_groups()
    course.cluster.lost, course.cluster.late = lost, late
    course.submit()
    victims = course.rng.sample(range(1, NODES), 2)
    course.kill_some([lambda node=node: course.cluster.kill_node(node) for node in victims], 1, 4)
    course.finish()


@SIM
@given(DELAYS, st.integers(0, 2**32), st.booleans())
def test_a_head_that_takes_over_while_requests_queue_at_other_nodes(
    delays: list[float], seed: int, ignorant: bool
) -> None:
    """ignorant: it has no tables, as where a state log was lost, so there are no groups."""
    course = Course(delays, seed)
    if not ignorant:
        course.with_groups()
    course.submit(100)
    for _ in range(course.rng.randint(1, 3)):
        course.at_some_time(course.cluster.move_head if ignorant else course.cluster.take_over)
    course.kill_some([lambda: course.cluster.kill_node(course.rng.randrange(1, NODES))], 0, 2)
    course.finish()


@SIM
@given(DELAYS, st.integers(0, 2**32))
def test_a_cluster_grows_into_a_large_one_and_shrinks_again_under_load(delays: list[float], seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        large_from(patch, 6)
        course = Course(delays, seed, 4)
        cluster = course.cluster
        course.with_groups()
        assert not any(raylet._peers.enabled for raylet in cluster.raylets)
        course.submit(100, 6.0)
        for _ in range(4):
            course.at_some_time(lambda: cluster.grow(to_units({"CPU": course.rng.choice([1, 2, 4])})))
        cluster.run_for(3.0)
        assert all(raylet._peers.enabled for raylet in cluster.raylets)
        for node in course.rng.sample(range(4, 8), 3):
            course.at_some_time(lambda node=node: cluster.kill_node(node))
        course.finish()
        assert len(cluster.living()) == 5


# ------------------------------------------------------------ deliberate defects are found


def lone(*cpus: int) -> tuple[PeerCluster, Any]:
    """A cluster whose messages take half a millisecond, and a driver on its first node."""
    cluster = PeerCluster(nodes(*cpus), [0.0005], real=True)
    cluster.run_for(0.01)
    return cluster, cluster.driver(0)


def occupy(cluster: PeerCluster, node: int, seconds: float, count: int) -> list[SimTask]:
    """Tasks of a driver of that node keep all its CPUs busy."""
    driver = cluster.driver(node)
    tasks = [SimTask(CPU1, seconds, once=True) for _ in range(count)]
    for task in tasks:
        driver.submit(task)
    cluster.run_for(0.01)
    assert all(task.ran_on == [node] for task in tasks)
    return tasks


def in_time(cluster: PeerCluster, seconds: float, tasks: list[SimTask]) -> None:
    done = cluster.net.run(cluster.net.now + seconds, lambda: all(task.done for task in tasks), cluster.check)
    assert done, cluster.explain()


def a_near_node_that_refuses() -> None:
    cluster, driver = lone(1, 1, 1)
    cluster.leave(1)
    cluster.run_for(0.01)
    task = SimTask(shape("near:1", CPU=1), 0.01)
    driver.submit(task)
    in_time(cluster, 0.2, [task])


def a_near_node_that_dies() -> None:
    cluster, driver = lone(1, 1, 1)
    occupy(cluster, 1, 5.0, 1)
    task = SimTask(shape("near:1", CPU=1), 0.01)
    driver.submit(task)
    cluster.run_for(0.1)
    assert cluster.queued_at_peers() == 1 and not task.ran_on
    cluster.kill_node(1)
    in_time(cluster, 0.2, [task])


def a_near_node_that_is_busy_for_long() -> None:
    cluster, driver = lone(1, 1, 1)
    occupy(cluster, 1, 9.0, 1)
    task = SimTask(shape("near:1", CPU=1), 0.01)
    driver.submit(task)
    in_time(cluster, 1.0 + cluster.config.locality_wait, [task])
    assert task.ran_on != [1]


def a_holder_that_dies_while_its_requests_queue() -> None:
    """At the nodes of a group, which would keep them for half a minute."""
    cluster, owner = lone(1, 1, 1, 1)
    spec = group(cluster, owner, 1, "STRICT_SPREAD", 4)
    cluster.run_for(0.5)
    first, second = cluster.driver(0), cluster.driver(0)
    first.submit(SimTask(inside(spec), 0.001))
    cluster.run_for(0.5)  # the nodes of the group are known since
    for _ in range(8):
        first.submit(SimTask(inside(spec), 60.0))
    cluster.run_for(0.5)
    second.submit(SimTask(inside(spec), 0.001))
    cluster.run_for(0.5)
    there = [raylet for raylet in cluster.raylets if any(one.holder == second.proc for one in raylet._queue)]
    assert len(there) >= 3
    cluster.die(second.proc, "killed by signal 9")
    cluster.run_for(0.1)
    assert not any(one.holder == second.proc for raylet in cluster.raylets for one in raylet._queue)


def a_holder_that_dies_while_its_worker_starts() -> None:
    """On another node, where that may take minutes with a large environment: its CPU is free at once."""
    cluster, driver = lone(1, 1, 1)
    occupy(cluster, 0, 5.0, 1)
    cluster.fork = lambda node, number: cluster.net.after(60.0, lambda: cluster.join(make_proc(node, number)))
    driver.submit(SimTask(CPU1, 0.01))
    cluster.run_for(0.1)
    assert sum(raylet.available() != cluster.totals[raylet.node] for raylet in cluster.raylets) == 2
    cluster.die(driver.proc, "killed by signal 9")
    cluster.run_for(0.1)
    assert sum(raylet.available() != cluster.totals[raylet.node] for raylet in cluster.raylets) == 1


def a_request_that_one_of_several_nodes_has_served() -> None:
    """The others keep nothing of it: no lease comes that nobody needs."""
    cluster, owner = lone(1, 1, 1, 1)
    spec = group(cluster, owner, 1, "STRICT_SPREAD", 4)
    cluster.run_for(0.5)
    driver = cluster.driver(0)
    driver.submit(SimTask(inside(spec), 0.001))
    cluster.run_for(0.5)
    tasks = [SimTask(inside(spec, index), 0.5 + 0.2 * index) for index in range(4)]
    for task in tasks:
        owner.submit(task)
    cluster.run_for(0.1)
    task = SimTask(inside(spec), 0.001)
    driver.submit(task)
    in_time(cluster, 0.6, [task])
    cluster.run_for(0.02)
    assert not any(one.holder == driver.proc for raylet in cluster.raylets for one in raylet._queue)


def requests_that_are_lost() -> None:
    cluster, driver = lone(1, 1, 1, 1)
    occupy(cluster, 0, 5.0, 1)
    cluster.lost = 1.0
    tasks = [SimTask(shape(strategy, CPU=1), 0.01) for strategy in ("", "SPREAD", "near:2")]
    for task in tasks:
        driver.submit(task)
    in_time(cluster, 0.6 + cluster.config.locality_wait, tasks)


def a_head_that_takes_over_while_a_report_is_on_its_way() -> None:
    cluster, owner = lone(1, 1, 1, 1)
    spec = group(cluster, owner, 1, "STRICT_SPREAD", 3)
    cluster.run_for(0.5)
    driver = cluster.driver(3)
    for _ in range(4):
        driver.submit(SimTask(inside(spec), 0.3))
    while not any(one.reported_count for one in cluster.raylets[3]._requests):
        cluster.run_for(0.0005)
    cluster.raylets[3].handle(cluster.net.now, HEAD, m.PlacementGroupNodes([(spec.group, [0, 1, 2])]))
    cluster.take_over()
    cluster.run_for(2.0)
    assert driver.waiting_for == 0 and cluster.head.scheduler.unmet_by_shape() == []


def a_large_request() -> None:
    """One for more than a node is asked for is the head's, which serves it in one go."""
    cluster, driver = lone(1, 64, 64)
    tasks = [SimTask(CPU1, 1.0) for _ in range(129)]
    for task in tasks:
        driver.submit(task)
    in_time(cluster, 1.1, tasks)


SCENES: list[Callable[[], None]] = [
    a_near_node_that_refuses,
    a_near_node_that_dies,
    a_near_node_that_is_busy_for_long,
    a_holder_that_dies_while_its_requests_queue,
    a_holder_that_dies_while_its_worker_starts,
    a_request_that_one_of_several_nodes_has_served,
    requests_that_are_lost,
    a_head_that_takes_over_while_a_report_is_on_its_way,
    a_large_request,
]


@pytest.mark.parametrize("scene", SCENES)
def test_what_other_nodes_cannot_serve_is_handed_over_in_time(scene: Callable[[], None]) -> None:
    scene()


def nothing(*args: Any) -> list[Any]:
    return []


DEFECTS: list[tuple[type, str, Any, Callable[[], None]]] = [
    (PeerRequests, "refused", lambda *args: None, a_near_node_that_refuses),
    (PeerRequests, "node_died", nothing, a_near_node_that_dies),
    (PeerRequests, "overdue", nothing, a_near_node_that_is_busy_for_long),
    (PeerRequests, "overdue", nothing, requests_that_are_lost),
    (PeerRequests, "holder_died", nothing, a_holder_that_dies_while_its_worker_starts),
    (PeerRequests, "_withdraw", nothing, a_request_that_one_of_several_nodes_has_served),
    (
        LeaseRequestTable,
        "reset_reported",
        lambda self, now: [setattr(one, "reported_count", 0) or one for one in self if one.local],
        a_head_that_takes_over_while_a_report_is_on_its_way,
    ),
]


@pytest.mark.parametrize(("owner", "part", "defect", "scene"), DEFECTS)
def test_each_part_that_hands_a_request_over_is_needed(
    owner: type, part: str, defect: Any, scene: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, part, defect)
    with pytest.raises(AssertionError):
        scene()
