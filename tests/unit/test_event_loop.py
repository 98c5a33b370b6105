"""The turns of a raylet's loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcray.common.ids import raylet_of
from hpcray.protocol import messages as m
from hpcray.runtime.raylet.event_loop import EventLoop
from hpcray.runtime.raylet.local_sockets import LocalListener
from hpcray.runtime.raylet.router import Router


def test_messages_to_itself_without_end_do_not_keep_a_raylet_from_its_timers(tmp_path: Path) -> None:
    router = Router(0, 1, None)
    loop = EventLoop(router, LocalListener(str(tmp_path / "r.s")), None, None)
    handled = 0

    class Answers:
        def messages(self, src: bytes, messages: list[Any]) -> None:
            nonlocal handled
            handled += len(messages)
            assert handled < 1_000_000, "the timer has not run"
            for msg in messages:
                router.send(raylet_of(0), msg)

    router.send(raylet_of(0), m.Ping(0))
    loop.call_at(loop.now + 0.05, loop.stop)
    loop.run(Answers())  # type: ignore[arg-type]
    loop.close()
    assert handled > 1


class _NoEvents:
    """What a raylet does with messages, when none come."""


def _turns(loop: EventLoop) -> list[float]:
    """The times of the turns until the loop has ended."""
    turns: list[float] = []
    loop.each_turn.append(lambda: turns.append(loop.now))
    loop.run(_NoEvents())  # type: ignore[arg-type]
    loop.close()
    return turns


def test_calls_with_slack_share_the_turn_of_one_without(tmp_path: Path) -> None:
    loop = EventLoop(Router(0, 1, None), LocalListener(str(tmp_path / "r.s")), None, None)
    began, called = loop.now, list[str]()
    loop.call_at(began + 0.02, lambda: called.append("a"), slack=10.0)
    loop.call_at(began + 0.03, lambda: called.append("b"), slack=10.0)
    loop.call_at(began + 0.10, loop.stop)
    turns = _turns(loop)
    assert called == ["a", "b"]
    # The first turn is the start. A turn may be a wake-up a little before the time, which asks for another at once.
    assert not [when for when in turns[1:] if when < began + 0.025], "it woke up for a call with slack alone"
    assert turns[-1] >= began + 0.10


def test_a_call_with_slack_comes_when_that_is_used_up(tmp_path: Path) -> None:
    loop = EventLoop(Router(0, 1, None), LocalListener(str(tmp_path / "r.s")), None, None)
    began, called = loop.now, list[float]()
    loop.call_at(began + 0.02, lambda: called.append(loop.now), slack=0.05)
    loop.call_at(began + 5.0, lambda: None, slack=10.0)
    loop.call_at(began + 0.2, loop.stop)
    _turns(loop)
    assert began + 0.07 <= called[0] < began + 0.2
