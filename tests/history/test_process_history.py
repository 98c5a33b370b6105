"""The rows of ended tasks that a worker gives to the history of its node."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hpcray.history.process_history import sample

SLOW = 10_000  # microseconds
Row = tuple[bytes, str, float, int, bool]


def rows_of(times: list[int], failed: set[int] = frozenset()) -> list[Row]:  # type: ignore[assignment]
    return [(b"task%d" % at, "f", float(at), us, at in failed) for at, us in enumerate(times)]


def test_few_tasks_are_given_whole() -> None:
    rows = rows_of([5] * 100)
    assert sample(rows) == rows


def test_of_many_fast_tasks_some_are_given_evenly() -> None:
    chosen = sample(rows_of([5] * 6000))
    assert 50 <= len(chosen) <= 61
    assert {b[2] - a[2] for a, b in pairwise(chosen)} == {100.0}


@given(st.lists(st.integers(1, SLOW - 1), min_size=101, max_size=400), st.sets(st.integers(0, 100), max_size=90))
def test_failed_tasks_are_all_given_and_so_are_slow_ones(times: list[int], failed: set[int]) -> None:
    slow = {len(times) // 3, len(times) - 1}
    for at in slow:
        times[at] = 3 * SLOW + at
    chosen = sample(rows_of(times, failed))
    assert failed | slow <= {int(row[2]) for row in chosen}
    assert [row[2] for row in chosen] == sorted({row[2] for row in chosen})
