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
