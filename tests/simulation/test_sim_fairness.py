"""Nobody starves: not the large among many small, not a placement group among tasks, wherever they wait."""

from __future__ import annotations

import random

import pytest
from simcluster import SimCluster
from submitters import SimTask, Submitter, shape
from test_sim_actors import actor_spec

from hpcray.common.ids import HEAD
from hpcray.common.resources import Resources, to_units
from hpcray.core.gcs.placement_group_manager import CREATED, REMOVED, GcsPlacementGroup
from hpcray.protocol import messages as m


class Flood(SimCluster):
    """A cluster and the drivers that keep it busy."""

    def __init__(self, totals: list[Resources], delays: list[float], lazy: bool) -> None:
        super().__init__(totals, delays, lazy=lazy)
        self.flood: list[bytes] = []


def flooded(cpus: list[float], seconds: list[float], tasks: int, seed: int) -> Flood:
    """A cluster in which a driver of every node with CPUs has more to do than all of them can.

    Args:
        seconds: how long the tasks take, by node in turn.
    """
    rng = random.Random(seed)
    delays = [rng.choice([0.0001, 0.001, 0.005]) for _ in range(50)]
    cluster = Flood([to_units({"CPU": count}) for count in cpus], delays, lazy=True)
    for node, count in enumerate(cpus):
        driver = cluster.driver(node)
        if count:
            cluster.flood.append(driver.proc)
        for number in range(tasks if count else 0):
            task = SimTask(seconds=seconds[node % len(seconds)] * rng.uniform(0.8, 1.2))
            cluster.net.after(number * 1e-4, lambda driver=driver, task=task: driver.submit(task))
    cluster.run_for(1.0)
    return cluster


def still_flooded(cluster: Flood) -> bool:
    """Whether every driver of the flood has more to do still."""
    return all(cluster.submitters[proc].waiting_for > 10 for proc in cluster.flood)


@pytest.mark.parametrize("seconds", [0.3, 3.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_large_task_does_not_starve_on_a_cluster_full_of_small_ones(seconds: float, seed: int) -> None:
    """Its own node has no CPU: it is the head's to find a place, and every node is busy with its own work."""
    cluster = flooded([0, 2, 2, 2, 2, 2], [seconds], int(150 / seconds), seed)
    driver = cluster.driver(0)
    large = SimTask(shape(CPU=2), 0.1)
    driver.submit(large)
    cluster.net.run(cluster.net.now + 60, lambda: bool(large.done), cluster.check)
    assert large.done, cluster.explain()
    assert still_flooded(cluster)


@pytest.mark.parametrize("seconds", [0.3, 3.0, 6.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_large_actor_does_not_starve_on_a_cluster_full_of_small_tasks(seconds: float, seed: int) -> None:
    """It comes back to the node where it queued, until that has been kept free for long enough."""
    cluster = flooded([0, 2, 2, 2, 2, 2], [seconds], int(250 / seconds) + 30, seed)
    driver = cluster.driver(0)
    spec = actor_spec(driver.proc, 1, shape(CPU=2), shape(CPU=2))
    cluster.post(driver.proc, HEAD, m.CreateActor(1, spec))
    cluster.run_for(0.1)
    actor = cluster.head.actors.actors[spec.actor]
    cluster.net.run(cluster.net.now + 60, lambda: actor.state == "ALIVE", cluster.check)
    assert actor.state == "ALIVE", cluster.explain()
    assert still_flooded(cluster)


def test_a_large_actor_queues_on_a_node_without_other_actors() -> None:
    """Nodes 1 to 4 have an actor each that stays for ever: only node 5 will ever be free as a whole."""
    cluster = flooded([0, 2, 2, 2, 2, 2], [0.5], 600, 1)
    driver = cluster.driver(0)
    specs = [actor_spec(driver.proc, n, shape(f"node:{n}", CPU=1), shape(CPU=1)) for n in (1, 2, 3, 4)]
    specs.append(actor_spec(driver.proc, 5, shape(CPU=2), shape(CPU=2)))
    for spec in specs:
        cluster.post(driver.proc, HEAD, m.CreateActor(1, spec))
        cluster.run_for(5.0)
    large = cluster.head.actors.actors[specs[-1].actor]
    cluster.net.run(cluster.net.now + 20, lambda: large.state == "ALIVE", cluster.check)
    assert (large.state, large.node) == ("ALIVE", 5), cluster.explain()
    assert still_flooded(cluster)


def test_a_large_task_does_not_starve_on_a_node_with_tasks_of_every_length() -> None:
    cluster = flooded([4], [0.1], 2000, 1)
    other, slow = cluster.driver(0), cluster.driver(0)
    for _ in range(200):
        slow.submit(SimTask(shape(CPU=0.5), 4.0))
    large = SimTask(shape(CPU=4), 0.1)
    other.submit(large)
    cluster.net.run(cluster.net.now + 60, lambda: bool(large.done), cluster.check)
    assert large.done, cluster.explain()


def create(cluster: SimCluster, driver: Submitter, number: int, strategy: str, *cpus: float) -> GcsPlacementGroup:
    ident = driver.proc + number.to_bytes(5, "big")
    spec = m.GroupSpec(ident, [to_units({"CPU": count}) for count in cpus], strategy, owner=driver.proc)
    cluster.post(driver.proc, HEAD, m.CreateGroup(0, spec))
    cluster.run_for(0.1)
    return cluster.head.groups.find(ident)


@pytest.mark.parametrize("strategy", ["STRICT_SPREAD", "PACK", "STRICT_PACK", "SPREAD"])
@pytest.mark.parametrize("seconds", [[0.3], [2.0, 0.1]])
def test_a_group_does_not_starve_under_small_tasks(strategy: str, seconds: list[float]) -> None:
    cluster = flooded([2, 2, 2], seconds, 3000, 3)
    driver = cluster.driver(0)
    group = create(cluster, driver, 900, strategy, *([2] if strategy == "STRICT_PACK" else [2, 2]))
    cluster.net.run(cluster.net.now + 90, lambda: group.state == CREATED, cluster.check)
    assert group.state == CREATED, cluster.explain()
    assert still_flooded(cluster)


def test_groups_that_need_everything_come_one_after_the_other() -> None:
    cluster = flooded([2, 2], [0.2], 4000, 5)
    driver = cluster.driver(1)
    groups = [create(cluster, driver, 900 + number, "SPREAD", 2, 2) for number in range(3)]
    for _ in groups:
        waiting = [group for group in groups if group.state not in (CREATED, REMOVED)]
        cluster.net.run(cluster.net.now + 120, lambda: any(g.state == CREATED for g in waiting), cluster.check)  # noqa: B023
        (there,) = [group for group in groups if group.state == CREATED]
        cluster.post(driver.proc, HEAD, m.RemoveGroup(there.spec.group))
        cluster.run_for(1.0)
    assert all(group.state == REMOVED for group in groups)


def test_a_request_that_can_never_be_served_keeps_no_node_empty() -> None:
    """Another group holds what the group needs: tasks go on as if the group were not there."""
    cluster = flooded([2, 2], [0.2], 400, 7)
    driver = cluster.driver(0)
    holder = create(cluster, driver, 901, "STRICT_PACK", 1)
    cluster.net.run(cluster.net.now + 90, lambda: holder.state == CREATED, cluster.check)
    assert holder.state == CREATED
    wants_all = create(cluster, driver, 902, "STRICT_SPREAD", 2, 2)
    cluster.run_for(300.0)
    assert wants_all.attempt == 0
    assert not any(s.waiting_for for s in cluster.submitters.values()), "the flood is over"
