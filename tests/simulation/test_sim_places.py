"""Where the network is known, work goes to near nodes as far as that costs nothing, in small and in large clusters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from simcluster import SimCluster
from submitters import CPU1, SimTask, shape
from test_sim_leases import nodes
from test_sim_near import large_from

from hpcray.common.ids import HEAD
from hpcray.common.resources import GROUP, names_in, to_units
from hpcray.core.gcs.placement_group_manager import CREATED, REMOVED
from hpcray.core.raylet.peer_requests import MOST_COMING
from hpcray.protocol import messages as m

TWO_SWITCHES = ["s0.s1", "s0.s2"]


@pytest.fixture(params=["head", "peers"])
def decided_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """In a large cluster, raylets ask each other; in a small one the head decides."""
    if request.param == "peers":
        large_from(monkeypatch, 2)
    found: str = request.param
    return found


def started(cpus: Sequence[int], paths: Sequence[str], node: int = 0) -> tuple[SimCluster, Any]:
    """A cluster whose messages take half a millisecond, and a driver on one of its nodes."""
    cluster = SimCluster(nodes(*cpus), [0.0005], real=True, paths=paths)
    cluster.run_for(0.01)
    return cluster, cluster.driver(node)


def submit(driver: Any, count: int, seconds: float = 0.2, kind: m.Shape = CPU1) -> list[SimTask]:
    tasks = [SimTask(kind, seconds) for _ in range(count)]
    for task in tasks:
        driver.submit(task)
    return tasks


def ran_on(cluster: SimCluster, tasks: list[SimTask]) -> list[int]:
    assert cluster.net.run(cluster.net.now + 60.0, lambda: all(task.done for task in tasks), cluster.check), (
        cluster.explain()
    )
    return sorted(node for task in tasks for node in task.ran_on)


def test_tasks_go_to_nodes_behind_the_same_switch_first(decided_by: str) -> None:
    """The driver is on node 4; without places, nodes would be filled by their numbers, or in turn."""
    cluster, driver = started([4] * 8, [TWO_SWITCHES[node % 2] for node in range(8)], 4)
    assert set(ran_on(cluster, submit(driver, 8))) <= {0, 2, 4, 6}


def test_a_leaf_alone_takes_the_nearest_leaves(decided_by: str) -> None:
    paths = ["s0.p1.s1", "s0.p2.s2", "s0.p1.s3", "s0.p2.s4", "s0.p1.s5", "s0.p2.s6"]
    cluster, driver = started([4] * 6, paths, 3)
    assert set(ran_on(cluster, submit(driver, 6))) <= {1, 3, 5}


def test_no_node_stays_idle_for_nearness(decided_by: str) -> None:
    """All work begins at once, as it does where nothing is known of the network."""
    cluster, driver = started([2] * 8, [TWO_SWITCHES[node % 2] for node in range(8)])
    tasks = submit(driver, 16, 5.0)
    assert ran_on(cluster, tasks) == sorted([*range(8)] * 2)
    assert cluster.net.now < 9.0, "no two of them followed each other"


def test_of_nodes_that_are_used_alike_the_near_one_is_taken() -> None:
    """Above the share to which nodes are filled one after the other, too, but never one that is used more."""
    cluster, _ = started([4] * 4, ["s0.s1", "s0.s2", "s0.s2", "s0.s1"])
    resources = cluster.head.resources
    for node in range(4):
        resources.promise(node, (("CPU", 25_000),))
    assert resources.choose(CPU1, 1, but=0, near=0) == [(3, 1)]
    assert resources.choose(CPU1, 1, but=0, near=0) == [(1, 1)], "node 3 is used more now"
    nothing = [resources.choose(m.Shape(()), 1, near=0)[0][0] for _ in range(4)]
    assert len(set(nothing[:2])) == 2, "what needs nothing takes turns"


def test_spread_tasks_spread(decided_by: str) -> None:
    cluster, driver = started([4] * 4, ["s0.s1", "s0.s1", "s0.s2", "s0.s2"])
    tasks = submit(driver, 8, 0.5, shape("SPREAD", CPU=1))
    assert set(ran_on(cluster, tasks)) == {0, 1, 2, 3}


def test_more_tasks_than_near_nodes_hold_go_everywhere(decided_by: str) -> None:
    count = 2 * MOST_COMING
    cluster, driver = started([4] * 8, [TWO_SWITCHES[node // 4] for node in range(8)])
    assert set(ran_on(cluster, submit(driver, count, 0.1))) == set(range(8))


def test_busy_and_dead_near_nodes_are_passed_over(decided_by: str) -> None:
    cluster, driver = started([1] * 6, ["s0.s1"] * 3 + ["s0.s2"] * 3)
    occupied = submit(cluster.driver(1), 1, 5.0)
    cluster.run_for(0.05)
    cluster.kill_node(2)
    cluster.run_for(0.05)
    tasks = submit(driver, 4, 0.5)
    found = ran_on(cluster, tasks)
    assert found == [0, 3, 4, 5] and occupied[0].ran_on == [1]


def test_places_that_are_all_alike_change_nothing(decided_by: str) -> None:
    """One switch for all: nodes in the old order."""
    told = []
    for paths in ((), ["s0.s1"] * 6, [""] * 6):
        cluster, driver = started([4] * 6, paths, 2)
        told.append(ran_on(cluster, submit(driver, 12, 0.3)))
    assert told[0] == told[1] == told[2]


def spec(driver: Any, number: int, bundles: int, strategy: str) -> m.GroupSpec:
    return m.GroupSpec(
        driver.proc + number.to_bytes(5, "big"), [to_units({"CPU": 1})] * bundles, strategy, owner=driver.proc
    )


def test_a_group_that_follows_a_removed_one_takes_its_place() -> None:
    """Whoever removes a group and makes another at once is not sent behind two switches because the nodes have not yet
    said that the bundles of the first are free."""
    cluster, driver = started([2, 2, 2], ["s0.s1", "s0.s1", "s0.s2"])
    first, second = spec(driver, 1, 3, "PACK"), spec(driver, 2, 2, "STRICT_SPREAD")
    cluster.post(driver.proc, HEAD, m.CreateGroup(0, first))
    cluster.run_for(0.5)
    assert cluster.head.groups.find(first.group).nodes == [0, 0, 1]
    cluster.post(driver.proc, HEAD, m.RemoveGroup(first.group))
    cluster.post(driver.proc, HEAD, m.CreateGroup(0, second))
    cluster.run_for(0.5)
    group = cluster.head.groups.find(second.group)
    assert group.state == CREATED and sorted(group.nodes) == [0, 1]
    assert cluster.head.groups.find(first.group).state == REMOVED


def test_bundles_in_which_tasks_run_are_not_counted_as_free() -> None:
    """Their resources are free when the tasks have ended; a group that counts on them would wait for the refusal."""
    cluster, driver = started([1, 1], ["s0.s1", "s0.s2"])
    first = spec(driver, 1, 1, "PACK")
    cluster.post(driver.proc, HEAD, m.CreateGroup(0, first))
    cluster.run_for(0.5)
    inside = m.Shape(tuple(sorted(names_in(first.group.hex(), 0, to_units({"CPU": 1})).items())), GROUP)
    driver.submit(SimTask(inside, 60.0))
    cluster.run_for(0.5)
    (node,) = cluster.head.groups.find(first.group).nodes
    resources = cluster.head.resources
    free = dict(resources.nodes[node].available)
    resources.bundles_left(node, first.group.hex())
    assert resources.nodes[node].available == free
