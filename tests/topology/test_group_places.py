"""Placement groups take nodes behind few switches, and the plan for equal bundles is that for any."""

from __future__ import annotations

import random
from time import process_time
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
requests = st.lists(st.sampled_from([{"CPU": 1}, {"CPU": 2}, {"GPU": 1}, {"CPU": 3, "GPU": 1}, {}]), max_size=8)
used_nodes = st.dictionaries(st.integers(0, 6), st.integers(1, 3), max_size=4)


def large_first(bundles: list[dict[str, int]]) -> list[int]:
    """As each bundle of the sample has another size, but for equal ones."""
    return sorted(range(len(bundles)), key=lambda i: (-bundles[i].get("GPU", 0), -sum(bundles[i].values()), i))


def taken_by(left: list[int], bundles: list[dict[str, int]], free: dict[str, int]) -> list[int]:
    room, taken = dict(free), []
    for index in left:
        if all(room.get(name, 0) >= units for name, units in bundles[index].items()):
            for name, units in bundles[index].items():
                room[name] = room.get(name, 0) - units
            taken.append(index)
    return taken


@given(requests, st.lists(amounts, max_size=7), used_nodes)
def test_pack_takes_the_node_with_room_for_most_again_and_again(
    bundles: list[dict[str, int]], free: list[dict[str, int]], used: dict[int, int]
) -> None:
    left, planned, nodes = large_first(bundles), dict[int, int](), dict(enumerate(free))
    while left:
        order = sorted(nodes, key=lambda node: (-used.get(node, 0), node))
        best = max(order, key=lambda node: len(taken_by(left, bundles, nodes[node])), default=-1)
        taken = taken_by(left, bundles, nodes.pop(best)) if best >= 0 else []
        if not taken:
            break
        planned |= dict.fromkeys(taken, best)
        left = [index for index in left if index not in planned]
    found = scheduler.plan_bundles(dict(enumerate(bundles)), "PACK", dict(enumerate(free)), used)
    assert found == (None if left else planned)


@given(requests, st.lists(amounts, max_size=7), used_nodes)
def test_strict_spread_finds_a_plan_where_there_is_one(
    bundles: list[dict[str, int]], free: list[dict[str, int]], used: dict[int, int]
) -> None:
    nodes = [node for node in range(len(free)) if node not in used]
    holders: dict[int, int] = {}

    def match(index: int, seen: set[int]) -> bool:
        for node in nodes:
            if node not in seen and taken_by([index], bundles, free[node]):
                seen.add(node)
                if node not in holders or match(holders[node], seen):
                    holders[node] = index
                    return True
        return False

    exists = all(match(index, set()) for index in range(len(bundles)))
    found = scheduler.plan_bundles(dict(enumerate(bundles)), "STRICT_SPREAD", dict(enumerate(free)), used)
    assert (found is not None) == exists
    if found is not None:
        assert sorted(found) == list(range(len(bundles))) and len(set(found.values())) == len(bundles)
        assert all(taken_by([index], bundles, free[node]) for index, node in found.items())
        assert not used.keys() & set(found.values())


@given(requests, st.lists(amounts, max_size=4), used_nodes)
def test_spread_puts_each_where_the_fewest_are(
    bundles: list[dict[str, int]], free: list[dict[str, int]], used: dict[int, int]
) -> None:
    found = scheduler.plan_bundles(dict(enumerate(bundles)), "SPREAD", dict(enumerate(free)), used)
    if scheduler.plan_bundles(dict(enumerate(bundles)), "STRICT_SPREAD", dict(enumerate(free)), used) is not None:
        assert found is not None and not used.keys() & set(found.values())
        return
    room, count, planned = [dict(have) for have in free], dict(used), dict[int, int]()
    for index in large_first(bundles):
        fitting = [node for node in range(len(room)) if taken_by([index], bundles, room[node])]
        if not fitting:
            assert found is None
            return
        share = {node: scheduler.least_share(room[node], bundles[index]) for node in fitting}
        node = min(fitting, key=lambda node: (count.get(node, 0), -share[node], node))
        for name, units in bundles[index].items():
            room[node][name] = room[node].get(name, 0) - units
        count[node], planned[index] = count.get(node, 0) + 1, node
    assert found == planned


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD", "STRICT_SPREAD"])
def test_nothing_is_placed_on_a_node_that_has_promised_too_much(strategy: str) -> None:
    """What the head has promised ahead of a node's view may be more than the node has."""
    bundles = {index: {"CPU": 1} for index in range(2)}
    found = scheduler.plan_bundles(bundles, strategy, {0: {"CPU": -3}, 1: {"CPU": 1}, 2: {"CPU": 1}}, {})
    assert found is not None and set(found.values()) == {1, 2}


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


def least_for_unequal(resources: ClusterResources, sizes: list[int], count: int) -> int:
    """The least number of leaf switches whose nodes hold `count` bundles of each of these sizes, by an exact solver: a
    variable for each leaf, and one for each node and size."""
    optimize: Any = pytest.importorskip("scipy.optimize")
    sparse: Any = pytest.importorskip("scipy.sparse")
    room = {index: state.available["CPU"] // UNIT for index, state in resources.nodes.items()}
    leaves = sorted(set(resources.places.values()))
    kinds, nodes = len(sizes), [index for index in room if room[index] > 0]
    width = len(leaves) + kinds * len(nodes)
    fits, all_of = sparse.lil_matrix((len(nodes), width)), sparse.lil_matrix((kinds, width))
    for row, index in enumerate(nodes):
        fits[row, leaves.index(resources.places[index])] = -room[index]
        for kind, size in enumerate(sizes):
            fits[row, len(leaves) + row * kinds + kind] = size
            all_of[kind, len(leaves) + row * kinds + kind] = 1
    done = optimize.milp(
        np.r_[np.ones(len(leaves)), np.zeros(kinds * len(nodes))],
        constraints=[
            optimize.LinearConstraint(fits.tocsr(), ub=np.zeros(len(nodes))),
            optimize.LinearConstraint(all_of.tocsr(), lb=np.full(kinds, count)),
        ],
        integrality=np.ones(width),
        bounds=optimize.Bounds(0, np.r_[np.ones(len(leaves)), np.full(kinds * len(nodes), np.inf)]),
    )
    assert done.success
    return round(done.fun)


@pytest.mark.parametrize(("sizes", "seed"), [([8, 2, 1], 0), ([8, 2, 1], 4), ([5, 3], 0), ([5, 3], 2)])
def test_unequal_bundles_take_hardly_more_leaf_switches_than_the_fewest(sizes: list[int], seed: int) -> None:
    """Where they do not fit together behind the switches with just enough room, those with most room are tried."""
    resources = fat_tree(1000, 20, 5, seed)
    for count in (4, 12, 25):
        plan = planner(resources).find_plan(Group([{"CPU": size * UNIT} for size in sizes] * count, "PACK"))
        assert plan is not None and len(plan) == len(sizes) * count
        taken = {resources.places[node] for node in plan.values()}
        assert len(taken) <= 1.1 * least_for_unequal(resources, sizes, count)


def test_a_decision_on_1000_nodes_takes_milliseconds() -> None:
    """At most 5 ms of CPU: 3 ms where it was measured; the bound here allows for a busy machine."""
    resources = fat_tree(1000, 20, 5, 0)
    for sizes, count in (([4], 300), ([8], 200), ([8, 2, 1], 25), ([7, 6, 4], 25)):
        plans, group = planner(resources), Group([{"CPU": size * UNIT} for size in sizes] * count, "PACK")
        times = []
        for _ in range(5):
            began = process_time()
            plans.find_plan(group)
            times.append(process_time() - began)
        assert min(times) < 0.02, times


def test_room_is_reserved_behind_few_switches_too() -> None:
    """For a group that has starved: what is free when all tasks have ended counts, and actors and bundles stay."""
    resources = fat_tree(100, 5, 4, 2, half=False)
    for index, state in resources.nodes.items():
        state.available["CPU"] = 0
        state.lasting["CPU"] = 0 if index % 5 < 3 or index >= 95 else 8 * UNIT
    plan = planner(resources).find_reachable_plan(Group([{"CPU": 8 * UNIT}] * 5, "SPREAD"))
    assert plan is not None and sorted(plan.values()) == [95, 96, 97, 98, 99]


def test_leaves_of_one_pod_are_preferred_where_there_are_as_many() -> None:
    resources = fat_tree(80, 4, 5, 0, half=False)
    for index in range(0, 80, 4):  # no leaf has room for all
        resources.nodes[index].available["CPU"] = 0
    plan = planner(resources).find_plan(Group([{"CPU": 8 * UNIT}] * 6, "PACK"))
    assert plan is not None
    places = [resources.places[node] for node in plan.values()]
    assert len(set(places)) == 2 and all(nearness(places[0], place) >= 2 for place in places)


def test_a_group_within_one_block_takes_few_switches_of_it() -> None:
    """A group of one pod; the first pod has no room for it."""
    resources = fat_tree(100, 5, 4, 2)
    for index, state in resources.nodes.items():
        state.labels["pod"] = f"pod{index // 20}"
        state.available["CPU"] = (8 if index >= 20 and index % 5 < 3 else 1) * UNIT
    group = Group([{"CPU": 8 * UNIT}] * 6, "PACK")
    group.spec.same = "pod"
    plan = planner(resources).find_plan(group)
    assert plan is not None and {node // 20 for node in plan.values()} == {1}
    assert len({resources.places[node] for node in plan.values()}) == 2


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
