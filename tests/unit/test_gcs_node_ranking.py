"""Rankings against the plain way to find the best, and what a node tells the head of its books."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcray.common.resources import to_units
from hpcray.core.gcs.cluster_resources import NodeChangeLog, NodeRanking, NodeResources, Rank, merged_views
from hpcray.core.raylet.head_reporter import DECREASE_REPORT_DELAY, SMALL_CLUSTER, NodeViewReporter
from hpcray.core.raylet.local_resources import LocalResources, ResourcePool
from hpcray.protocol.messages import NodeInfo, NodeView, Shape

NODES = 5


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["better", "better", "worse", "secretly worse", "ask", "ask without", "some"]),
            st.integers(0, NODES - 1),
            st.integers(0, 3),
        ),
        max_size=60,
    )
)
def test_a_ranking_finds_the_best_node_whatever_changed(course: list[tuple[str, int, int]]) -> None:
    """That a node became worse may go unsaid, that it became better may not."""
    used: dict[int, int | None] = dict.fromkeys(range(NODES), 2)
    changes = NodeChangeLog()

    def rank(node: int) -> Rank | None:
        value = used[node]
        return None if value is None else (0, float(value), 0, node)

    rankings = [NodeRanking(range(NODES), rank, changes) for _ in range(2)]
    for number, (what, node, value) in enumerate(course):
        ranking = rankings[number % 2]
        present = sorted(found for other in used if (found := rank(other)) is not None)
        if what == "ask":
            assert ranking.best() == (present[0][-1] if present else None)
        elif what == "ask without":
            others = [found[-1] for found in present if found[-1] != node]
            assert ranking.best(but=node) == (others[0] if others else None)
        elif what == "some":
            assert ranking.some(value) == [found[-1] for found in present[:value]]
        else:
            known = used[node]
            worse = None if value == 3 else max(value, known if known is not None else 0)
            used[node] = value if what == "better" else None if known is None else worse
            if what != "secretly worse":
                changes.add(node)


def test_a_change_right_after_the_first_read_of_a_ranking_counts() -> None:
    used, changes = {0: 1, 1: 2}, NodeChangeLog()
    changes.add(1)
    ranking = NodeRanking(used, lambda node: (0, float(used[node]), 0, node), changes)
    assert ranking.best() == 0
    used[1] = 0
    changes.add(1)
    assert ranking.best() == 1


def test_a_ranking_of_few_nodes_does_not_make_others_begin_anew() -> None:
    asked: list[int] = []
    changes = NodeChangeLog()

    def rank(node: int) -> Rank:
        asked.append(node)
        return 0, 0.0, 0, node

    large, small = NodeRanking(range(1000), rank, changes), NodeRanking(range(2), rank, changes)
    assert large.best() == small.best() == 0
    for turn in range(20):
        for node in range(10):
            changes.add(10 * turn + node)
        small.best()
    asked.clear()
    assert large.best() == 0
    assert len(asked) <= 201, "those that have changed, and the best"


def test_a_ranking_misses_no_change_that_the_log_has_dropped() -> None:
    used = {node: node for node in range(3)}
    changes = NodeChangeLog()
    ranking = NodeRanking(used, lambda node: (0, float(used[node]), 0, node), changes)
    assert ranking.best() == 0
    for _ in range(1000):
        changes.add(1)
        changes.add(2)
    used[2] = -1
    changes.add(2)
    assert ranking.best() == 2


def reporter(size: int = 2) -> tuple[NodeViewReporter, ResourcePool]:
    mine = LocalResources(0, to_units({"CPU": 4, "memory": 8}))
    return NodeViewReporter(mine, size), mine.pool


def seen(view: NodeView | None) -> dict[str, int] | None:
    return None if view is None else view.available


def test_a_node_view_with_more_is_sent_at_once_and_one_with_less_later() -> None:
    mine, pool = reporter()
    assert seen(mine.next_view(0.0)) == to_units({"CPU": 4, "memory": 8})
    pool.available["CPU"] = 10_000
    assert mine.next_view(DECREASE_REPORT_DELAY / 2) is None, "nobody waits for less"
    assert seen(mine.next_view(DECREASE_REPORT_DELAY)) == {"CPU": 10_000}, "only what changed"
    pool.available["CPU"] = 20_000
    assert seen(mine.next_view(DECREASE_REPORT_DELAY)) == {"CPU": 20_000}
    pool.available["CPU"] = 10_000
    assert mine.next_view(DECREASE_REPORT_DELAY) is None
    pool.available["CPU"] = 20_000
    assert mine.next_view(DECREASE_REPORT_DELAY) is None, "a lease came and went: there is nothing to tell"


def test_a_head_that_may_be_wrong_gets_the_whole_node_view() -> None:
    mine, pool = reporter()
    mine.next_view(0.0)
    pool.held_by_actors["CPU"] = 5_000
    view = mine.next_view(0.0, force=True)
    assert view is not None and view.available == to_units({"CPU": 4, "memory": 8})
    assert view.lasting == {"CPU": 5_000, "memory": 0}


def test_nodes_of_a_large_cluster_send_few_views() -> None:
    mine, pool = reporter(size=20 * SMALL_CLUSTER)
    mine.next_view(0.0)
    told = 0
    for step in range(1, 1001):
        pool.available["CPU"] = 10_000 + step
        told += mine.next_view(step * 1e-3) is not None
    assert told <= 10


def test_nodes_of_a_large_cluster_report_bundles_in_time_and_sooner_where_requests_wait_for_them() -> None:
    for size, awaited, times in ((2, (), 20), (20 * SMALL_CLUSTER, (), 1), (20 * SMALL_CLUSTER, ("CPU_group_x",), 6)):
        mine = LocalResources(0, to_units({"CPU": 4}))
        views = NodeViewReporter(mine, size)
        views.note_contention(awaited)
        views.next_view(0.0)
        found = 0
        for step in range(1, 21):
            mine.bundles.available["CPU_group_x"] = step % 2
            mine.bundles._unreported.add("CPU_group_x")
            found += views.next_view(step * 5e-3) is not None
        assert found == times, f"{size} nodes"


def test_node_views_before_the_cluster_is_up_are_merged() -> None:
    first = NodeView(3, 1, {"CPU": 4, "GPU": 1}, {"a": 1}, {"CPU": 0})
    both = merged_views(first, NodeView(3, 2, {"CPU": 2}, {"b": 2}, {"CPU": 1}))
    assert both == NodeView(3, 2, {"CPU": 2, "GPU": 1}, {"a": 1, "b": 2}, {"CPU": 1})
    assert merged_views(None, first) is first


AMOUNTS = st.dictionaries(st.sampled_from(["CPU", "GPU", "memory"]), st.integers(-1, 4), max_size=3)


@given(AMOUNTS, AMOUNTS, AMOUNTS)
def test_the_used_share_of_a_node_with_room_is_its_utilisation(
    total: dict[str, int], free: dict[str, int], request: dict[str, int]
) -> None:
    total = {name: max(0, units) for name, units in total.items()}
    state = NodeResources(NodeInfo(0, "id", "host", "a", 1, total, b"", "", 0), dict(free))
    shape = Shape(tuple(sorted((name, max(0, units)) for name, units in request.items())))
    assert state.use_with_room(shape) == (state.utilisation(shape) if state.fits(shape) else None)
    state.rejected_shapes.add(shape.resources)
    assert state.use_with_room(shape) is None
