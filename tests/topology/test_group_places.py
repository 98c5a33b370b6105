"""Placement groups take nodes behind few switches, and the plan for equal bundles is that for any."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcray.common.labels import nearness, place_of
from hpcray.core.gcs import placement_group_scheduler as scheduler
from hpcray.core.gcs.cluster_resources import ClusterResources
from hpcray.protocol.messages import GroupSpec, NodeInfo
from hpcray.topology.node_order import near_domains

UNIT = 10_000
amounts = st.dictionaries(st.sampled_from(["CPU", "GPU"]), st.integers(0, 3), max_size=2)


@given(amounts, st.integers(1, 6), st.lists(amounts, max_size=6), st.dictionaries(st.integers(0, 6), st.integers(1, 3)))
def test_equal_bundles_are_packed_as_unequal_ones(
    bundle: dict[str, int], count: int, free: list[dict[str, int]], used: dict[int, int]
) -> None:
    bundles, nodes = dict.fromkeys(range(count), bundle), dict(enumerate(free))
    quick = scheduler._pack_alike(bundles, nodes, used)
    alike, scheduler._alike = scheduler._alike, lambda bundles: False
    try:
        slow = scheduler._pack(bundles, nodes, used)
    finally:
        scheduler._alike = alike
    assert quick == slow


@given(amounts, st.integers(1, 6), st.lists(amounts, max_size=6), st.sets(st.integers(0, 6)))
def test_equal_bundles_are_spread_as_unequal_ones(
    bundle: dict[str, int], count: int, free: list[dict[str, int]], used: set[int]
) -> None:
    bundles, nodes = dict.fromkeys(range(count), bundle), dict(enumerate(free))
    quick = scheduler._strict_spread(bundles, nodes, dict.fromkeys(used, 1))
    alike, scheduler._alike = scheduler._alike, lambda bundles: False
    try:
        slow = scheduler._strict_spread(bundles, nodes, dict.fromkeys(used, 1))
    finally:
        scheduler._alike = alike
    assert quick == slow


def planner(resources: ClusterResources) -> scheduler.PlacementGroupScheduler:
    return scheduler.PlacementGroupScheduler(resources, near_domains)


class Group:
    """What a plan needs of a placement group."""

    def __init__(self, bundles: list[dict[str, int]], strategy: str) -> None:
        self.spec = GroupSpec(b"g" * 13, bundles, strategy, "", "", False)
        self.avoid: set[int] = set()
        self.placed: dict[int, int] = {}

    def without_node(self) -> dict[int, dict[str, int]]:
        return {index: amounts for index, amounts in enumerate(self.spec.bundles) if index not in self.placed}

    def bundles_per_node(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for node in self.placed.values():
            found[node] = found.get(node, 0) + 1
        return found


def fat_tree(nodes: int, per_leaf: int, leaves_per_pod: int, seed: int, half: bool = True) -> ClusterResources:
    """Nodes of 8 CPUs; of half of them, drawn at random, some or all are taken."""
    rng = random.Random(seed)
    resources = ClusterResources()
    infos = []
    for index in range(nodes):
        leaf = index // per_leaf
        path = f"core.pod{leaf // leaves_per_pod}.leaf{leaf}"
        total = {"CPU": 8 * UNIT}
        infos.append(
            NodeInfo(index, f"{index:056x}", f"n{index}", "", 0, total, b"", "", 0, {"hpcray.io/switch-path": path})
        )
    resources.nodes_joined(infos)
    for index in rng.sample(range(nodes), nodes // 2 if half else 0):
        resources.nodes[index].available["CPU"] -= rng.choice([2, 4, 6, 8]) * UNIT
    return resources


def least(resources: ClusterResources, cpus: int, count: int, one_each: bool) -> int:
    """The least number of leaf switches that have room for `count` bundles, by an exact solver."""
    optimize: Any = pytest.importorskip("scipy.optimize")
    room: dict[tuple[str, ...], int] = {}
    for index, state in resources.nodes.items():
        fits = state.available["CPU"] // (cpus * UNIT)
        room[resources.places[index]] = room.get(resources.places[index], 0) + (min(fits, 1) if one_each else fits)
    sizes = np.array(list(room.values()))
    done = optimize.milp(
        np.ones(len(sizes)),
        constraints=optimize.LinearConstraint(sizes[None, :], lb=count),
        integrality=np.ones(len(sizes)),
        bounds=optimize.Bounds(0, 1),
    )
    assert done.success
    return round(done.fun)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("strategy", "one_each"), [("PACK", False), ("SPREAD", True), ("STRICT_SPREAD", True)])
def test_groups_in_a_half_occupied_fat_tree_take_the_fewest_leaf_switches(
    seed: int, strategy: str, one_each: bool
) -> None:
    resources = fat_tree(1000, 20, 5, seed)
    for count, cpus in ((2, 8), (10, 8), (16, 3), (64, 8), (100, 2), (200, 8)):
        group = Group([{"CPU": cpus * UNIT}] * count, strategy)
        plan = planner(resources).find_plan(group)
        assert plan is not None and len(plan) == count
        taken = {resources.places[node] for node in plan.values()}
        assert len(taken) == least(resources, cpus, count, one_each)


def test_leaves_of_one_pod_are_preferred_where_there_are_as_many() -> None:
    resources = fat_tree(80, 4, 5, 0, half=False)
    for index in range(0, 80, 4):  # no leaf has room for all
        resources.nodes[index].available["CPU"] = 0
    plan = planner(resources).find_plan(Group([{"CPU": 8 * UNIT}] * 6, "PACK"))
    assert plan is not None
    places = [resources.places[node] for node in plan.values()]
    assert len(set(places)) == 2 and all(nearness(places[0], place) >= 2 for place in places)


def test_unequal_bundles_and_lost_ones_stay_near() -> None:
    resources = fat_tree(100, 10, 5, 3)
    group = Group([{"CPU": 8 * UNIT}, {"CPU": 2 * UNIT}, {"CPU": UNIT}] * 3, "PACK")
    plan = planner(resources).find_plan(group)
    assert plan is not None
    (place,) = {resources.places[node] for node in plan.values()}
    group.placed = {index: node for index, node in plan.items() if index > 1}
    again = planner(resources).find_plan(group)
    assert again is not None and {resources.places[node] for node in again.values()} == {place}


def test_a_group_that_needs_everything_gets_it() -> None:
    resources = fat_tree(60, 10, 2, 1, half=False)
    for strategy in ("PACK", "SPREAD", "STRICT_SPREAD"):
        plan = planner(resources).find_plan(Group([{"CPU": 8 * UNIT}] * 60, strategy))
        assert plan is not None and len(set(plan.values())) == 60
        assert planner(resources).find_plan(Group([{"CPU": UNIT}] * 481, strategy)) is None


def test_places() -> None:
    assert place_of({}) == () == place_of({"region": "us"})
    assert place_of({"hpcray.io/block": "b1", "hpcray.io/switch-path": "s0.s1"}) == ("s0", "s1")
    assert place_of({"hpcray.io/rack": "r7"}) == ("r7",)
    assert (nearness(("a", "b"), ("a", "c")), nearness(("a",), ()), nearness(("a", "b"), ("a", "b"))) == (1, 0, 2)
