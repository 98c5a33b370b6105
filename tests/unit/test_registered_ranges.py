"""Which ranges of an arena are registered with the driver of a device, within a budget."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcray.tensors.registered_ranges import GRANULE, KEPT_TIME, RegisteredRange, RegisteredRanges

WHOLE = 20 * GRANULE


def register(ranges: RegisteredRanges, first: int, last: int, now: float = 0.0, arena: str = "a") -> RegisteredRange:
    planned = ranges.add(arena, first * GRANULE, last * GRANULE, WHOLE, now)
    assert planned is not None
    assert ranges.registered(planned[0])
    return planned[0]


def test_a_range_is_found_for_what_lies_in_it_and_for_nothing_else() -> None:
    ranges = RegisteredRanges(WHOLE)
    made = register(ranges, 2, 5)
    assert ranges.use("a", 2 * GRANULE + 7, 5 * GRANULE, 1.0) is made and made.users == 1
    for arena, start, end in (("b", 2, 3), ("a", 1, 3), ("a", 4, 6), ("a", 0, 1)):
        assert ranges.use(arena, start * GRANULE, end * GRANULE, 1.0) is None


def test_what_is_read_once_is_not_worth_registering() -> None:
    ranges = RegisteredRanges(WHOLE)
    assert not ranges.note_read("a", 100, 5 * GRANULE)
    assert not ranges.note_read("a", 100, 7 * GRANULE)
    assert ranges.note_read("a", 200, 5 * GRANULE - 300), "about the same place"
    for number in range(1000):
        ranges.note_read("b", number * GRANULE, (number + 1) * GRANULE)
    assert not ranges.note_read("a", 100, 5 * GRANULE)


def test_ranges_end_at_granules_and_at_the_end_of_their_arena() -> None:
    ranges = RegisteredRanges(WHOLE)
    planned = ranges.add("a", GRANULE + 1, GRANULE + 2, WHOLE, 0.0)
    assert planned is not None and (planned[0].start, planned[0].end) == (GRANULE, 2 * GRANULE)
    planned = ranges.add("a", 5 * GRANULE, 6 * GRANULE - 5, 6 * GRANULE - 4096, 0.0)
    assert planned is not None and planned[0].end == 6 * GRANULE - 4096


def test_the_least_recently_used_ranges_make_room_and_used_ones_stay() -> None:
    ranges = RegisteredRanges(6 * GRANULE)
    first, second, third = (register(ranges, at, at + 2, now) for at, now in ((0, 1.0), (4, 2.0), (8, 3.0)))
    assert ranges.use("a", 0, GRANULE, 4.0) is first
    ranges.unuse(first)
    assert ranges.use("a", 4 * GRANULE, 5 * GRANULE, 5.0) is second
    assert ranges.add("a", 12 * GRANULE, 15 * GRANULE, WHOLE, 3.9 + KEPT_TIME) is None, "they were used just now"
    planned = ranges.add("a", 12 * GRANULE, 15 * GRANULE, WHOLE, 4.0 + KEPT_TIME)
    assert planned is not None and planned[1] == [third, first]
    ranges.check_invariants()
    assert ranges.add("a", 15 * GRANULE, 18 * GRANULE, WHOLE, 99.0) is None, "what is used or being registered stays"
    assert ranges.add("a", 0, 19 * GRANULE, WHOLE, 99.0) is None, "more than the budget"


def test_a_range_replaces_unused_ones_that_it_contains() -> None:
    ranges = RegisteredRanges(WHOLE)
    inner, used = register(ranges, 3, 4), register(ranges, 5, 6)
    ranges.use("a", 5 * GRANULE, 6 * GRANULE, 1.0)
    planned = ranges.add("a", 2 * GRANULE, 8 * GRANULE, WHOLE, 2.0)
    assert planned is not None and planned[1] == [inner] and used.users == 1


def test_two_threads_do_not_register_the_same_place_at_once() -> None:
    ranges = RegisteredRanges(WHOLE)
    planned = ranges.add("a", 0, 4 * GRANULE, WHOLE, 0.0)
    assert planned is not None and ranges.add("a", GRANULE, 2 * GRANULE, WHOLE, 0.0) is None
    assert ranges.use("a", 0, GRANULE, 0.0) is None, "it is not registered yet"
    ranges.failed(planned[0])
    assert ranges.add("a", GRANULE, 2 * GRANULE, WHOLE, 0.0) is not None


def test_ranges_of_an_arena_that_goes_are_closed_when_nothing_uses_them() -> None:
    ranges = RegisteredRanges(WHOLE)
    idle, used, other = register(ranges, 0, 1), register(ranges, 2, 3), register(ranges, 0, 1, arena="b")
    planned = ranges.add("a", 5 * GRANULE, 6 * GRANULE, WHOLE, 0.0)
    assert planned is not None
    ranges.use("a", 2 * GRANULE, 3 * GRANULE, 1.0)
    assert ranges.forget("a") == [idle]
    assert ranges.use("a", 2 * GRANULE, 3 * GRANULE, 1.0) is None
    assert not ranges.registered(planned[0]), "the caller closes what it has just registered"
    assert ranges.unuse(used) and len(ranges) == 1
    assert ranges.clear() == [other] and not len(ranges)
    with pytest.raises(AssertionError):
        ranges.unuse(used)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["use", "unuse", "add", "registered", "failed", "forget"]),
            st.sampled_from("ab"),
            st.integers(0, 9),
            st.integers(1, 5),
        ),
        max_size=80,
    )
)
def test_whatever_comes_the_budget_holds_and_nothing_in_use_is_closed(steps: list[tuple[str, str, int, int]]) -> None:
    ranges = RegisteredRanges(8 * GRANULE)
    opening: list[RegisteredRange] = []
    live: dict[RegisteredRange, int] = {}
    for number, (step, arena, first, count) in enumerate(steps):
        now = number * KEPT_TIME / 3
        start, end = first * GRANULE, (first + count) * GRANULE
        closed: list[Any] = []
        if step == "add":
            planned = ranges.add(arena, start, end, WHOLE, now)
            if planned is not None:
                opening.append(planned[0])
                closed = planned[1]
        elif step == "registered" and opening:
            made = opening.pop(first % len(opening))
            if ranges.registered(made):
                live[made] = 0
        elif step == "failed" and opening:
            ranges.failed(opening.pop(first % len(opening)))
        elif step == "use":
            found = ranges.use(arena, start, end, now)
            if found is not None:
                assert found.start <= start and end <= found.end and found.arena == arena
                live[found] += 1
        elif step == "unuse":
            used = [each for each, users in live.items() if users]
            if used:
                one = used[first % len(used)]
                live[one] -= 1
                if ranges.unuse(one):
                    closed = [one]
        elif step == "forget":
            closed = ranges.forget(arena)
        for each in closed:
            assert live.pop(each) == 0
        ranges.check_invariants()
    assert len(ranges) == len(live) + len(opening)
