"""Which node for which bundle: plans fit, keep their strategy's promise, and are found where brute force finds one."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcray.common.resources import Resources, add, fits
from hpcray.core.gcs.placement_group_scheduler import PACK, SPREAD, STRICT_PACK, STRICT_SPREAD, plan_bundles

AMOUNTS = st.fixed_dictionaries({"CPU": st.integers(0, 4)}, optional={"GPU": st.integers(0, 2)})
FREE = st.lists(AMOUNTS, min_size=1, max_size=4)
BUNDLES = st.lists(AMOUNTS, min_size=1, max_size=4)
ALL = [PACK, SPREAD, STRICT_PACK, STRICT_SPREAD]


def holds(bundles: dict[int, Resources], free: dict[int, Resources], chosen: dict[int, int]) -> bool:
    for node in free:
        need: Resources = {}
        for index, at in chosen.items():
            if at == node:
                add(need, bundles[index])
        if not fits(need, free[node]):
            return False
    return chosen.keys() == bundles.keys()


def keeps(strategy: str, chosen: dict[int, int]) -> bool:
    count = len(set(chosen.values()))
    return {STRICT_PACK: count == 1, STRICT_SPREAD: count == len(chosen)}.get(strategy, True)


@pytest.mark.parametrize("strategy", ALL)
@given(FREE, BUNDLES)
def test_a_plan_fits_and_the_strict_ones_are_found_where_there_is_one(
    strategy: str, free: list[Resources], bundles: list[Resources]
) -> None:
    nodes, wanted = dict(enumerate(free)), dict(enumerate(bundles))
    chosen = plan_bundles(wanted, strategy, nodes, {})
    if chosen is not None:
        assert holds(wanted, nodes, chosen) and keeps(strategy, chosen)
    elif strategy in (STRICT_PACK, STRICT_SPREAD):
        for places in product(nodes, repeat=len(bundles)):
            any_plan = dict(enumerate(places))
            assert not (holds(wanted, nodes, any_plan) and keeps(strategy, any_plan))


@given(FREE, BUNDLES)
def test_planning_leaves_its_inputs_unchanged(free: list[Resources], bundles: list[Resources]) -> None:
    nodes, wanted = dict(enumerate(free)), dict(enumerate(bundles))
    before = ({n: dict(a) for n, a in nodes.items()}, {i: dict(a) for i, a in wanted.items()})
    for strategy in ALL:
        plan_bundles(wanted, strategy, nodes, {})
    assert (nodes, wanted) == before


def test_pack_takes_one_node_where_one_is_enough_and_few_else() -> None:
    bundles = {key: {"CPU": 1} for key in range(4)}
    assert set(plan_bundles(bundles, PACK, {0: {"CPU": 1}, 1: {"CPU": 4}}, {}).values()) == {1}
    assert len(set(plan_bundles(bundles, PACK, {0: {"CPU": 1}, 1: {"CPU": 2}, 2: {"CPU": 2}}, {}).values())) == 2


def test_spread_takes_as_many_nodes_as_there_are() -> None:
    nodes = {n: {"CPU": 4} for n in range(3)}
    chosen = plan_bundles({key: {"CPU": 1} for key in range(6)}, SPREAD, nodes, {})
    assert sorted(chosen.values()) == [0, 0, 1, 1, 2, 2]


def test_bundles_that_have_a_node_already_count_in_a_plan() -> None:
    nodes = {n: {"CPU": 4} for n in range(3)}
    assert set(plan_bundles({1: {"CPU": 1}}, PACK, nodes, {2: 3}).values()) == {2}
    assert set(plan_bundles({1: {"CPU": 1}}, STRICT_PACK, nodes, {1: 3}).values()) == {1}
    assert plan_bundles({1: {"CPU": 1}}, SPREAD, nodes, {0: 1, 1: 1}) == {1: 2}
    assert plan_bundles({1: {"CPU": 1}}, STRICT_SPREAD, nodes, {0: 1, 1: 1, 2: 1}) is None


def test_two_hundred_bundles_are_planned_on_two_hundred_nodes() -> None:
    nodes = {n: {"CPU": 64} for n in range(200)}
    chosen = plan_bundles({key: {"CPU": 32} for key in range(200)}, STRICT_SPREAD, nodes, {})
    assert len(set(chosen.values())) == 200
