"""Rankings against the plain way to find the best, and what a node tells the head of its books."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcray.base.resources import to_units
from hpcray.core.scheduler.ledger import CROWD, VIEW_PAUSE, Ledger
from hpcray.core.scheduler.nodes import joined
from hpcray.core.scheduler.ranking import Changes, Rank, Ranking
from hpcray.wire.messages import NodeView

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
def test_the_best_is_the_best_whatever_changed(course: list[tuple[str, int, int]]) -> None:
    """That a node became worse may go unsaid, that it became better may not."""
    used: dict[int, int | None] = dict.fromkeys(range(NODES), 2)
    changes = Changes()

    def rank(node: int) -> Rank | None:
        value = used[node]
        return None if value is None else (0, float(value), 0, node)

    rankings = [Ranking(range(NODES), rank, changes) for _ in range(2)]
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
                changes.note(node)


def test_a_change_right_after_the_first_question_is_noted() -> None:
    used, changes = {0: 1, 1: 2}, Changes()
    changes.note(1)
    ranking = Ranking(used, lambda node: (0, float(used[node]), 0, node), changes)
    assert ranking.best() == 0
    used[1] = 0
    changes.note(1)
    assert ranking.best() == 1


def test_changes_that_were_forgotten_are_not_missed() -> None:
    used = {node: node for node in range(3)}
    changes = Changes()
    ranking = Ranking(used, lambda node: (0, float(used[node]), 0, node), changes)
    assert ranking.best() == 0
    for _ in range(1000):
        changes.note(1)
        changes.note(2)
    used[2] = -1
    changes.note(2)
    assert ranking.best() == 2


def ledger(size: int = 2) -> Ledger:
    found = Ledger(0, to_units({"CPU": 4, "memory": 8}))
    found.crowd(size)
    return found


def seen(view: NodeView | None) -> dict[str, int] | None:
    return None if view is None else view.available


def test_more_is_told_at_once_and_less_after_a_while() -> None:
    mine = ledger()
    assert seen(mine.view(0.0)) == to_units({"CPU": 4, "memory": 8})
    mine.available["CPU"] = 10_000
    assert mine.view(VIEW_PAUSE / 2) is None, "nobody waits for less"
    assert seen(mine.view(VIEW_PAUSE)) == {"CPU": 10_000}, "only what changed"
    mine.available["CPU"] = 20_000
    assert seen(mine.view(VIEW_PAUSE)) == {"CPU": 20_000}
    mine.available["CPU"] = 10_000
    assert mine.view(VIEW_PAUSE) is None
    mine.available["CPU"] = 20_000
    assert mine.view(VIEW_PAUSE) is None, "a lease came and went: there is nothing to tell"


def test_a_head_that_may_think_otherwise_is_told_everything() -> None:
    mine = ledger()
    mine.view(0.0)
    mine.actors["CPU"] = 5_000
    view = mine.view(0.0, force=True)
    assert view is not None and view.available == to_units({"CPU": 4, "memory": 8})
    assert view.lasting == {"CPU": 5_000, "memory": 0}


def test_in_a_crowd_nobody_talks_all_the_time() -> None:
    mine = ledger(size=20 * CROWD)
    mine.view(0.0)
    told = 0
    for step in range(1, 1001):
        mine.available["CPU"] = 10_000 + step
        told += mine.view(step * 1e-3) is not None
    assert told <= 10


def test_views_before_the_start_are_kept_together() -> None:
    first = NodeView(3, 1, {"CPU": 4, "GPU": 1}, {"a": 1}, {"CPU": 0})
    both = joined(first, NodeView(3, 2, {"CPU": 2}, {"b": 2}, {"CPU": 1}))
    assert both == NodeView(3, 2, {"CPU": 2, "GPU": 1}, {"a": 1, "b": 2}, {"CPU": 1})
    assert joined(None, first) is first
