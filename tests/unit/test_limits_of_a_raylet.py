"""What the descriptors of a raylet are for: workers first, then guests; and who hears of it when none is left."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from hpcray.runtime import limits

FILES = 4096


class Node:
    """What `keep_within_limits` sees of a raylet that `room` processes may connect to."""

    def __init__(self, room: int, pool: int, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.loop = SimpleNamespace(now=100.0)
        self.seat = SimpleNamespace(cluster_size=nodes)
        self.core = SimpleNamespace(pool=SimpleNamespace(limit=pool, limited_by=""))
        self.guests = SimpleNamespace(limit=0)
        self.say = self.said.append
        self.listener = SimpleNamespace(on_full=lambda: None)
        monkeypatch.setattr(limits, "raise_open_files", lambda: FILES)
        monkeypatch.setattr(limits, "connections_left", {FILES: room}.__getitem__)
        limits.keep_within_limits(self, self.listener)  # type: ignore[arg-type]

    @property
    def shares(self) -> tuple[int, int]:
        """Workers and guests, at most."""
        return self.core.pool.limit, self.guests.limit


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Node]:
    return lambda room, pool, nodes=2: Node(room, pool, nodes, monkeypatch)


@pytest.mark.parametrize(("room", "guests"), [(1000, 935), (87, 22)])
def test_guests_have_what_a_full_pool_and_a_driver_leave(node: Callable[..., Node], room: int, guests: int) -> None:
    made = node(room, 64)
    assert made.shares == (64, guests) and made.core.pool.limited_by == ""


@pytest.mark.parametrize(("nodes", "shares"), [(1, (63, 0)), (2, (47, 16)), (1000, (47, 16))])
def test_where_there_is_not_enough_for_the_pool_there_are_fewer_workers(
    node: Callable[..., Node], nodes: int, shares: tuple[int, int]
) -> None:
    made = node(64, 64, nodes)
    assert made.shares == shares, "guests, where there may be any, have a quarter"
    assert f"{FILES} open files" in made.core.pool.limited_by and "ulimit -n" in made.core.pool.limited_by


@pytest.mark.parametrize("room", [1, 0, -5])
def test_one_worker_there_is_and_then_certainly_no_guest(node: Callable[..., Node], room: int) -> None:
    workers, guests = node(room, 64).shares
    assert workers == 1 and guests == 0


def test_who_is_turned_away_for_want_of_a_descriptor_is_told_of_now_and_then(node: Callable[..., Node]) -> None:
    made = node(100, 64)
    for now, count in ((100.0, 1), (109.0, 1), (111.0, 2)):
        made.loop.now = now
        made.listener.on_full()
        assert len(made.said) == count
    assert "turned away" in made.said[0] and str(FILES) in made.said[0]
