"""The bells of a UCX worker and the failures of its links, without UCX."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest

from hpcray.transport.ucx_engine import _BELL_BODY, _FAILURE_WINDOW, _Bells, _LinkFailures


class Request:
    """A transfer that a test completes."""

    def __init__(self, completed: bool = False) -> None:
        self.completed = completed
        self.error: Exception | None = None

    def check_error(self) -> None:
        if self.error is not None:
            raise self.error


class Engine:
    """Memory and receives, as the bells need them."""

    def __init__(self) -> None:
        self.rank = 3
        self.lib = SimpleNamespace(UCXXTag=lambda number: number)
        self.receives: list[tuple[bytearray, Request]] = []

    def label(self, source: int, dest: int, number: int) -> int:
        return 77

    def array(self, buffer: bytearray) -> bytearray:
        return buffer

    def receive(self, buffer: bytearray, tag: Any) -> Request:
        self.receives.append((buffer, Request()))
        return self.receives[-1][1]

    def rings(self, rank: int, count: int) -> None:
        buffer, request = self.receives[-1]
        _BELL_BODY.pack_into(buffer, 0, rank, count)
        request.completed = True


class Endpoint:
    """The link to a node: each bell is under way until a test completes it."""

    def __init__(self, completed: bool = False, error: Exception | None = None) -> None:
        self.completed, self.error = completed, error
        self.sent: list[tuple[bytearray, Request]] = []

    def tag_send(self, buffer: bytearray, tag: Any) -> Request:
        if self.error is not None:
            raise self.error
        self.sent.append((buffer, Request(self.completed)))
        return self.sent[-1][1]


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def bells(engine: Engine) -> _Bells:
    return _Bells(engine)  # type: ignore[arg-type]


def counts(endpoint: Endpoint) -> list[tuple[int, int]]:
    return [struct.unpack_from(_BELL_BODY.format, buffer) for buffer, _ in endpoint.sent]  # type: ignore[misc]


def test_a_bell_under_way_keeps_its_memory(bells: _Bells) -> None:
    first, second = Endpoint(), Endpoint()
    assert bells.ring(1, first, 10) == "" == bells.ring(2, second, 20)
    assert counts(first) == [(3, 10)] and counts(second) == [(3, 20)]
    assert bells.ringing.keys() == {1, 2} and bells.reap() == []
    first.sent[0][1].completed = True
    assert bells.reap() == [(1, "")] and bells.ringing.keys() == {2}


def test_a_bell_that_left_at_once_is_not_waited_for(bells: _Bells) -> None:
    assert bells.ring(1, Endpoint(completed=True), 10) == "" and not bells.ringing


def test_broken_links_are_named(bells: _Bells) -> None:
    assert bells.ring(1, Endpoint(error=OSError("no route")), 10) == "no route"
    assert bells.ring(1, Endpoint(error=OSError()), 10) == "OSError"
    bells.ring(1, endpoint := Endpoint(), 10)
    request = endpoint.sent[0][1]
    request.completed, request.error = True, OSError("reset")
    assert bells.reap() == [(1, "reset")]


def test_the_latest_bell_waits_for_the_one_under_way(bells: _Bells) -> None:
    bells.defer(1, 11)
    bells.defer(1, 12)
    assert bells.take_deferred(1) == 12 and bells.take_deferred(1) is None


def test_a_bell_of_a_cut_link_keeps_its_memory_and_is_not_reaped(bells: _Bells) -> None:
    bells.ring(1, endpoint := Endpoint(), 10)
    bells.cut(1)
    endpoint.sent[0][1].completed = True
    assert bells.reap() == [] and not bells.ringing


def test_bells_are_heard_in_order(engine: Engine, bells: _Bells) -> None:
    assert bells.hear() is None
    engine.rings(1, 5)
    assert bells.hear() == (1, 5)
    assert bells.hear() is None, "the next one is awaited"
    engine.rings(2, 9)
    assert bells.hear() == (2, 9)


def test_failures_count_for_a_while() -> None:
    failures = _LinkFailures()
    assert [failures.note(1, now) for now in (0.0, 1.0)] == [1, 2]
    assert failures.note(2, 1.0) == 1, "of another peer"
    assert failures.note(1, 1.0 + _FAILURE_WINDOW) == 1


def test_a_dead_peer_is_reported_once() -> None:
    failures = _LinkFailures()
    failures.give_up(4, "UCX: reset")
    assert failures.take_newly_dead() == [(4, "UCX: reset")] and failures.take_newly_dead() == []
