"""A process that waits stays awake as long as that pays, and never where it robs others or itself."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hpcray.platform import busy_poll
from hpcray.platform.busy_poll import BusyPoll

LIMIT = 200e-6
LOOK = 1e-6
EVENT = [(3, 1)]


class World:
    """An epoll and a clock. `answers`: seconds after which the next waits end; `gap`: what each look takes longer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cpus: int = 4) -> None:
        self.now = 1000.0
        self.gap = 0.0
        self.due = float("inf")
        self.slept: list[float] = []
        monkeypatch.setattr(busy_poll, "monotonic", lambda: self.now)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        if timeout == 0:
            self.now += LOOK + self.gap
        else:
            self.slept.append(timeout)
            until = self.now + timeout if timeout > 0 else float("inf")
            self.now = max(self.now, min(until, self.due))
        return EVENT if self.now >= self.due else []

    def wait(self, poll: BusyPoll, after: float, timeout: float = -1.0) -> bool:
        """A wait that is answered after so many seconds; whether it slept."""
        self.due = self.now + after
        before = len(self.slept)
        assert poll.poll(timeout) == EVENT
        return len(self.slept) > before


def poll_of(world: Any, limit: float = LIMIT) -> BusyPoll:
    return BusyPoll(world, limit)


def test_a_wait_after_quick_answers_stays_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    poll = poll_of(world)
    assert world.wait(poll, 30e-6)
    assert not any(world.wait(poll, 30e-6) for _ in range(100))


def test_a_wait_after_late_answers_sleeps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    poll = poll_of(world)
    for _ in range(20):
        began = world.now
        assert world.wait(poll, 0.01)
        assert world.now - began < 0.01 + LOOK


def test_busy_polling_in_vain_ends_and_is_tried_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    poll = poll_of(world)
    awake = total = 0.0
    for _ in range(2000):  # one quick answer, then slow ones: the worst case for who believes the last one
        world.wait(poll, 30e-6)
        for _ in range(8):
            began = world.now
            world.wait(poll, LIMIT * 3)
            total += world.now - began
            awake += 0.0 if poll._window == 0.0 else LIMIT
    assert awake < 0.05 * total


def test_a_quick_answer_brings_busy_polling_back_after_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    poll = poll_of(world)
    world.wait(poll, 30e-6)
    assert world.wait(poll, 1.0)
    assert not world.wait(poll, 30e-6)
    assert poll._window == LIMIT


def test_busy_polling_on_a_shared_processor_pauses_for_longer_and_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    poll = poll_of(world)
    spun = 0
    world.gap = 0.003  # between two looks another process had the processor
    for _ in range(10_000):
        looked = world.now
        slept = world.wait(poll, 30e-6)
        spun += not slept or world.now - looked > 0.002
        world.now += 100e-6
    assert spun < 20


def test_busy_polling_overruns_no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    poll = poll_of(world)
    world.wait(poll, 30e-6)
    world.due = float("inf")
    for timeout in (0.0, 10e-6, LIMIT / 2):
        began = world.now
        assert poll.poll(timeout) == []
        assert world.now - began <= timeout + 2 * LOOK
    began = world.now
    assert poll.poll(1.0) == []
    assert world.now - began <= 1.0 + LIMIT + 2 * LOOK


@pytest.mark.parametrize(("limit", "cpus"), [(0.0, 4), (LIMIT, 1)])
def test_busy_polling_can_be_switched_off_and_is_off_on_one_cpu(
    monkeypatch: pytest.MonkeyPatch, limit: float, cpus: int
) -> None:
    world = World(monkeypatch, cpus)
    poll = poll_of(world, limit)
    assert all(world.wait(poll, 30e-6) for _ in range(10))
