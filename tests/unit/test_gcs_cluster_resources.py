"""The policies: pack to half, then spread; SPREAD; affinity; and what people are told about the impossible."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcray.common.config import Config
from hpcray.common.resources import show, to_units
from hpcray.core.gcs.cluster_resources import ClusterResources
from hpcray.core.gcs.gcs import Gcs
from hpcray.protocol.messages import NodeInfo, NodeView, Shape

UNIT = 10_000
CPU1 = Shape((("CPU", UNIT),))
SPREAD1 = Shape((("CPU", UNIT),), "SPREAD")
NOTHING = Shape(())


def cluster(*cpus: float, **extra: float) -> ClusterResources:
    view = ClusterResources()
    view.nodes_joined(
        NodeInfo(n, f"id{n}", f"host{n}", f"10.0.0.{n}", 1, to_units({"CPU": c, **extra}), b"", "mpi", 0)
        for n, c in enumerate(cpus)
    )
    return view


def test_hybrid_packs_to_half_in_index_order_then_takes_the_least_used() -> None:
    view = cluster(4, 4, 4)
    assert view.choose(CPU1, 2) == [(0, 2)]
    assert view.choose(CPU1, 1) == [(1, 1)]
    assert view.choose(CPU1, 3) == [(1, 1), (2, 2)]
    assert view.choose(CPU1, 3) == [(0, 1), (1, 1), (2, 1)]
    assert view.choose(CPU1, 99) == [(0, 1), (1, 1), (2, 1)]
    assert view.choose(CPU1, 1) == []


def test_the_share_up_to_which_nodes_are_packed_is_a_setting() -> None:
    for threshold, expected in ((0.0, [(0, 1), (1, 1), (2, 1)]), (0.75, [(0, 3)]), (1.0, [(0, 3)])):
        head = Gcs(Config(spread_threshold=threshold))
        head.resources.nodes_joined(state.info for state in cluster(4, 4, 4).nodes.values())
        assert head.resources.choose(CPU1, 3) == expected


def test_spread_goes_round_and_prefers_the_least_loaded() -> None:
    view = cluster(4, 4, 4)
    assert view.choose(SPREAD1, 3) == [(0, 1), (1, 1), (2, 1)]
    view.promise(0, CPU1.resources)
    assert view.choose(SPREAD1, 2) == [(1, 1), (2, 1)]
    one_by_one = [view.choose(Shape((), "SPREAD"), 1)[0][0] for _ in range(6)]
    assert sorted(one_by_one[:3]) == sorted(one_by_one[3:]) == [0, 1, 2]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 40), st.sampled_from(["", "SPREAD"]))
def test_choices_never_exceed_what_is_there_and_leave_nothing_unused(
    cpus: list[int], count: int, strategy: str
) -> None:
    view = cluster(*cpus)
    given_out = view.choose(Shape((("CPU", UNIT),), strategy), count)
    assert sum(part for _, part in given_out) == min(count, sum(cpus))
    assert all(part <= cpus[node] for node, part in given_out)
    assert all(state.available.get("CPU", 0) >= 0 for state in view.nodes.values())


def test_actors_that_hold_nothing_do_not_pile_up() -> None:
    view = cluster(4, 4)
    where = []
    for _ in range(8):
        node = view.choose_for_actor(CPU1, NOTHING)
        assert node is not None
        view.take_soft(node, dict(CPU1.resources))
        where.append(node)
    assert where[:4] == [0, 0, 1, 1] and where.count(0) == where.count(1) == 4
    assert all(state.available["CPU"] == 4 * UNIT for state in view.nodes.values())


def test_an_actor_that_holds_nothing_needs_no_free_cpu_but_a_node_that_has_one() -> None:
    view = cluster(0, 2)
    view.promise(1, (("CPU", 2 * UNIT),))
    assert view.choose_for_actor(CPU1, NOTHING) == 1


def test_a_stale_view_changes_nothing() -> None:
    view = cluster(4)
    assert not view.apply_view(NodeView(0, 2, {"CPU": UNIT}))
    assert not view.apply_view(NodeView(0, 1, {"CPU": 4 * UNIT}))
    assert not view.apply_view(NodeView(0, 2, {"CPU": 4 * UNIT}))
    assert view.nodes[0].available == {"CPU": UNIT}
    assert view.apply_view(NodeView(0, 3, {"CPU": 2 * UNIT}))
    assert not view.apply_view(NodeView(7, 1, {"CPU": UNIT})), "a node nobody knows"


def test_a_view_corrects_what_was_promised() -> None:
    view = cluster(4)
    view.apply_view(NodeView(0, 1, {"CPU": 4 * UNIT}))
    view.promise(0, CPU1.resources)
    assert view.apply_view(NodeView(0, 2, {"CPU": 4 * UNIT})), "the promise was not kept"


def test_a_refusal_is_remembered_until_the_node_has_more() -> None:
    view = cluster(4)
    view.apply_view(NodeView(0, 1, {"CPU": 2 * UNIT}))
    view.rejected(0, CPU1)
    assert view.choose(CPU1, 1) == []
    view.apply_view(NodeView(0, 2, {"CPU": 2 * UNIT}))
    assert view.choose(CPU1, 1) == [], "the same again is no news"
    assert view.apply_view(NodeView(0, 3, {"CPU": 3 * UNIT}))
    assert view.choose(CPU1, 1) == [(0, 1)]


def test_affinity_decides_what_is_feasible() -> None:
    view = cluster(1, 2)
    two = (("CPU", 2 * UNIT),)
    assert view.feasible(Shape(two, "node:1")) == [1]
    assert view.feasible(Shape(two, "node:0")) == []
    assert view.feasible(Shape(two, "node:0:soft")) == [1]
    assert view.feasible(Shape(CPU1.resources, "node:0:soft")) == [0]
    view.node_died(1, "power cut")
    assert view.feasible(Shape(CPU1.resources, "node:1")) == []
    assert view.feasible(Shape(CPU1.resources, "node:1:soft")) == [0]
    assert "node 1 (it died: power cut)" in view.why_infeasible(Shape(CPU1.resources, "node:1"), "a task")


def test_a_soft_affinity_to_a_node_that_leaves_falls_back_at_once() -> None:
    view = cluster(1, 2, 2)
    two, shape = (("CPU", 2 * UNIT),), Shape(CPU1.resources, "node:1:soft")
    view.set_draining([1])
    assert view.feasible(shape) == [0, 2] and view.feasible(Shape(CPU1.resources, "node:1")) == [1]
    view.set_draining([1, 2])
    assert view.feasible(shape) == [0]
    assert view.feasible(Shape(two, "node:1:soft")) == [1], "no node that stays could serve it"
    view.set_draining([])
    assert view.feasible(shape) == [1], "it stays after all"


def test_the_impossible_is_explained_with_numbers() -> None:
    view = cluster(4, 4, 8, memory=2.0**31)
    text = view.why_infeasible(Shape((("GPU", UNIT),)), "a task")
    assert "{GPU: 1}" in text and "nodes 0, 1 (host0, host1): {CPU: 4, memory: 2.0 GiB}" in text
    assert "node 2 (host2): {CPU: 8, memory: 2.0 GiB}" in text and "hint:" in text
    view.node_died(2, "power cut")
    text = view.why_infeasible(Shape((("CPU", 8 * UNIT),)), "a task")
    assert "(host0, host1): {CPU: 4, memory: 2.0 GiB}; node 2 (power cut) ended. hint:" in text
    assert show({"node:10.0.0.1": UNIT, "CPU": UNIT // 2}) == "{CPU: 0.5, node:10.0.0.1: 1}", (
        "a request names what no node has"
    )


def test_nodes_with_gpus_are_left_to_those_who_ask_for_gpus() -> None:
    view = ClusterResources()
    view.nodes_joined([*(state.info for state in cluster(4, GPU=1).nodes.values()), cluster(4, 4).nodes[1].info])
    assert view.choose(CPU1, 5) == [(0, 1), (1, 4)], "as long as others have room"
    assert view.choose(Shape((("CPU", UNIT), ("GPU", UNIT))), 2) == [(0, 1)]
