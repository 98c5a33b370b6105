"""Parts of a membership in a cluster, without a cluster: the program, the session, and the end of the loop."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hpcray.protocol.messages import NodeInfo, NodeTable
from hpcray.runtime.node.cluster_member import JobSession, LocalDriver
from hpcray.runtime.node.shutdown import LoopEnd


class Loop:
    """A loop whose time a test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.last_heard: dict[int, float] = {}
        self.stopped = False
        self.calls: list[tuple[float, Callable[[], object]]] = []

    def call_at(self, when: float, call: Callable[[], object]) -> None:
        self.calls.append((when, call))

    def stop(self) -> None:
        self.stopped = True


class Child:
    """A child process, which a test ends."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        self.terminated = 0

    def poll(self) -> int | None:
        return self.code

    @property
    def ended(self) -> bool:
        return self.code is not None

    def terminate(self) -> None:
        self.terminated += 1


@pytest.fixture
def loop() -> Loop:
    return Loop()


def program_of(loop: Loop, *connected: int) -> LocalDriver:
    links = {number: SimpleNamespace(pid=pid) for number, pid in enumerate(connected)}
    return LocalDriver(loop, SimpleNamespace(links=links), 1)  # type: ignore[arg-type]


def test_a_program_elsewhere_has_no_code_here(loop: Loop) -> None:
    program = program_of(loop)
    assert not program.is_here and program.code is None


def test_a_program_that_ends_has_its_code_at_once_where_nothing_shows_its_progress(loop: Loop) -> None:
    program, driver = program_of(loop), Child(7)
    program.start(driver, None)  # type: ignore[arg-type]
    assert program.is_here and program.code is None
    driver.code = 3
    assert program.code == 3 and program.is_shown(lambda: None)


def test_the_last_line_of_the_progress_is_asked_for_once_and_waited_for(loop: Loop) -> None:
    program, driver, progress = program_of(loop, 8), Child(7), Child(8)
    program.start(driver, progress)  # type: ignore[arg-type]
    driver.code = 0
    looks: list[Any] = []
    assert not program.is_shown(lambda: looks.append(1)) and not program.is_shown(lambda: looks.append(2))
    assert progress.terminated == 1
    assert len(loop.calls) == 2 and all(when > loop.now for when, _ in loop.calls)
    progress.code = 0
    assert program.is_shown(lambda: None)


def test_what_shows_the_progress_may_never_come_up(loop: Loop) -> None:
    program, driver, progress = program_of(loop), Child(7), Child(8)
    program.start(driver, progress)  # type: ignore[arg-type]
    driver.code = 0
    assert not program.is_shown(lambda: None)
    loop.now += 60.0
    assert program.is_shown(lambda: None) and not progress.terminated


def test_a_loop_ends_not_before_its_time(loop: Loop) -> None:
    end = LoopEnd(loop, False)  # type: ignore[arg-type]
    end.delay(2.0)
    end.leave()
    ((when, call),) = loop.calls
    assert when == 102.0 and not loop.stopped
    call()
    assert loop.stopped


def test_a_loop_goes_on_while_its_node_is_cut_off(loop: Loop) -> None:
    end = LoopEnd(loop, True)  # type: ignore[arg-type]
    end.isolate()
    end.processes_ended = True
    end.leave()
    assert end.isolated and not loop.calls and not loop.stopped
    loop.last_heard[1] = 99.0
    assert not end.hears_others(), "that was before"
    loop.last_heard[1] = 101.0
    assert end.hears_others()
    end.reconnect()
    assert not end.isolated and loop.stopped


def test_a_loop_with_processes_goes_on_when_the_job_ends(loop: Loop) -> None:
    end = LoopEnd(loop, False)  # type: ignore[arg-type]
    end.stop_if_ended()
    assert not loop.stopped
    end.processes_ended = True
    end.stop_if_ended()
    assert loop.stopped


def test_a_session_is_published_by_the_name_that_the_head_gives_it() -> None:
    published: list[tuple[Any, ...]] = []
    session = JobSession(SimpleNamespace(publish=lambda *row: published.append(row)))  # type: ignore[arg-type]
    assert (session.name, session.head_host) == ("", "")
    infos = [NodeInfo(index, f"id{index}", f"host{index}", "", 1, {}, b"", "", 0) for index in range(3)]
    session.learn(NodeTable("abc", infos), 2)
    assert (session.name, session.head_host) == ("abc", "host2")
    session.publish(infos[1], 3, 7.0)
    assert published == [("abc", 1, "id1", 3, 7.0)]
