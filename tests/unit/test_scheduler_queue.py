"""The waiting room: turns, requests that do not fit, and what is set aside for who waited too long."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcray.base.resources import Resources, fits, subtract
from hpcray.core.scheduler.queue import LONGEST_WINDOW, RESERVE_AFTER, WaitingRoom, Want
from hpcray.core.scheduler.wants import bound_to, coarse, node_affinity
from hpcray.wire.messages import Shape


def want(name: str, total: int, **request: int) -> Want:
    shape = Shape(tuple(sorted(request.items())))
    return Want(name.encode(), 0, shape, local=True, own=True, total=total)


def serve(room: WaitingRoom, available: Resources, now: float = 0.0) -> list[str]:
    """Grant all that fits; the names in order."""
    out = []
    for served in room.serve(now, available, lambda env: True):
        served.granted += 1
        subtract(available, served.request)
        out.append(served.holder.decode())
    return out


def filled(*wants: Want, now: float = 0.0) -> WaitingRoom:
    room = WaitingRoom()
    for each in wants:
        room.update(now, each)
    return room


def test_turns_go_round_over_wants_not_over_requests() -> None:
    room = filled(want("a", 9, CPU=1), want("b", 9, CPU=1), want("c", 9, CPU=2))
    assert serve(room, {"CPU": 7}) == ["a", "b", "c", "a", "b", "a"]
    assert serve(room, {"CPU": 4}) == ["c", "b", "a"]


def test_a_wide_want_does_not_delay_a_narrow_one() -> None:
    room = filled(want("wide", 1000, CPU=1))
    assert serve(room, {"CPU": 2}) == ["wide", "wide"]
    room.update(1.0, want("narrow", 1, CPU=1))
    assert "narrow" in serve(room, {"CPU": 2})


def test_what_does_not_fit_does_not_hold_up_what_does() -> None:
    room = filled(want("big", 1, CPU=4), want("gpu", 1, GPU=1), want("small", 2, CPU=1))
    assert serve(room, {"CPU": 3}) == ["small", "small"]
    assert room.waiting == 2


def test_a_withdrawn_want_leaves() -> None:
    a, b = want("a", 1, CPU=1), want("b", 1, CPU=1)
    room = filled(a, b)
    assert room.only() is None
    a.total = 0
    room.update(0.0, a)
    assert room.only() is b
    assert serve(room, {"CPU": 2}) == ["b"]
    assert room.waiting == 0


def test_a_line_is_skipped_when_no_worker_can_be_had() -> None:
    with_env = Want(b"env", 0, Shape((("CPU", 1),), "", (("A", "1"),)), local=True, own=True, total=1)
    room = filled(with_env, want("plain", 1, CPU=1))
    assert [w.holder for w in _taken(room.serve(0.0, {"CPU": 2}, lambda env: not env))] == [b"plain"]


def _taken(wants: object) -> list[Want]:
    out = []
    for each in wants:  # type: ignore[attr-defined]
        each.granted += 1
        out.append(each)
    return out


def test_who_waited_too_long_has_the_node_kept_free() -> None:
    big, small = want("big", 1, CPU=4), want("small", 100, CPU=1)
    room = filled(big, small)
    available = {"CPU": 3}
    assert serve(room, available) == ["small"] * 3
    assert not room.tick(RESERVE_AFTER - 0.1, lambda request: True)
    available["CPU"] += 1
    assert serve(room, available, RESERVE_AFTER - 0.1) == ["small"]
    room.tick(RESERVE_AFTER, lambda request: True)
    assert room.reserved is big
    for _ in range(3):
        available["CPU"] += 1
        assert serve(room, available, RESERVE_AFTER) == []
    available["CPU"] += 1
    assert serve(room, available, RESERVE_AFTER) == ["big"]
    assert room.reserved is None
    available["CPU"] = 1
    assert serve(room, available, RESERVE_AFTER) == ["small"]


def test_what_is_set_aside_blocks_only_what_would_take_it() -> None:
    big = want("big", 1, CPU=2, GPU=1)
    room = filled(big, want("small", 100, CPU=1), want("other", 1, disk=1))
    assert serve(room, {"CPU": 1}) == ["small"]
    room.tick(RESERVE_AFTER, lambda request: True)
    assert room.reserved is not None
    room.reserved = big
    assert sorted(serve(room, {"CPU": 5, "disk": 1})) == ["other", "small", "small", "small"]


def test_a_reservation_ends_so_that_what_it_waits_for_can_run() -> None:
    big = want("big", 1, CPU=4)
    room = filled(big, want("small", 100, CPU=1))
    assert serve(room, {"CPU": 1}) == ["small"]
    room.tick(1.0, lambda request: request == {"CPU": 4})
    assert room.reserved is big
    assert room.tick(2.0, lambda request: True), "its window is over: others may go again"
    assert room.reserved is None
    assert serve(room, {"CPU": 1}, 2.0) == ["small"]
    room.tick(2.5, lambda request: request == {"CPU": 4})
    assert room.reserved is None, "the others run for as long as they were held up"
    room.tick(3.0, lambda request: request == {"CPU": 4})
    assert room.reserved is big
    room.tick(4.9, lambda request: True)
    assert room.reserved is big, "the second window is twice as long"
    room.tick(5.0, lambda request: False)
    assert room.reserved is None
    assert big.window <= LONGEST_WINDOW


def test_nothing_is_set_aside_for_who_only_waits_for_its_turn() -> None:
    """Tasks of a few seconds keep a small class waiting for longer than that, which is no reason to keep CPUs idle."""
    big, small = want("big", 1, CPU=2), want("small", 100, CPU=1)
    room = filled(small)
    room.tick(2.0, lambda request: True)
    assert room.reserved is None
    room.update(2.0, big)
    assert serve(room, {"CPU": 1}, 3.0) == ["small"]
    assert serve(room, {"CPU": 1}, 5.0) == ["small"], "whose turn was later"
    room.tick(6.5, lambda request: True)
    assert room.reserved is big


def test_one_that_was_away_for_a_moment_has_its_turn_still() -> None:
    big, small = want("big", 1, CPU=2), want("small", 100, CPU=1)
    room = filled(small, big)
    assert serve(room, {"CPU": 1}, 0.0) == ["small"]
    big.total, big.left = 0, 1.0
    room.update(1.0, big)
    big.total = 1
    room.update(1.5, big)
    assert serve(room, {"CPU": 1}, 1.6) == ["small"]
    room.tick(2.0, lambda request: True)
    assert room.reserved is big


def test_who_is_served_without_having_waited_overtakes_all() -> None:
    big = want("big", 1, CPU=2)
    room = filled(big)
    room.tick(2.0, lambda request: True)
    assert room.reserved is None
    room.passed()
    room.tick(2.5, lambda request: True)
    assert room.reserved is big


def test_nothing_is_set_aside_for_what_actors_hold() -> None:
    room = filled(want("big", 1, CPU=4), want("small", 2, CPU=1))
    assert serve(room, {"CPU": 1}) == ["small"]
    room.tick(100.0, lambda request: False)
    assert room.reserved is None


def test_who_comes_back_soon_keeps_its_age() -> None:
    traveller = want("traveller", 1, CPU=4)
    room = filled(traveller)
    traveller.total, traveller.left = 0, 3.0
    room.update(3.0, traveller)
    traveller.total = 1
    room.update(4.0, traveller)
    assert traveller.since == 0.0
    traveller.total = 0
    room.update(5.0, traveller)
    traveller.total = 1
    room.update(50.0, traveller)
    assert traveller.since == 50.0


REQUESTS = st.dictionaries(st.sampled_from(["CPU", "GPU"]), st.integers(1, 3), max_size=2)


@given(st.lists(st.tuples(REQUESTS, st.integers(1, 4)), min_size=1, max_size=8), st.integers(0, 12), st.integers(0, 6))
def test_everything_that_fits_is_served_and_nothing_else(
    wanted: list[tuple[dict[str, int], int]], cpu: int, gpu: int
) -> None:
    wants = [want(str(index), total, **request) for index, (request, total) in enumerate(wanted)]
    room = filled(*wants)
    available = {"CPU": cpu, "GPU": gpu}
    names = Counter(serve(room, available))
    assert min(available.values()) >= 0
    for index, each in enumerate(wants):
        assert each.granted == names[str(index)] <= each.total
        assert each.granted == each.total or not fits(each.request, available)
    assert room.waiting == sum(each.granted < each.total for each in wants)


def test_strategies_are_read_strictly() -> None:
    assert node_affinity("") is None and node_affinity("SPREAD") is None
    assert node_affinity("node:12") == (12, False)
    assert node_affinity("node:3:soft") == (3, True)
    assert bound_to(Shape((), "node:3:soft"), 3) and not bound_to(Shape((), "node:3"), 4)
    for wrong in ("spread", "node:", "node:x", "node:1:hard", "rack:1"):
        with pytest.raises(ValueError, match="is none of"):
            node_affinity(wrong)


@given(st.integers(0, 10**7))
def test_coarse_counts_are_exact_when_small_and_never_too_high(count: int) -> None:
    assert coarse(count) <= count
    assert count - coarse(count) <= (0 if count <= 64 else count / 8)
