"""Populating the arena ahead of its allocator."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hpcray.platform import arena as arena_module
from hpcray.platform.arena import PREFAULT_STEP, Arena, Prefaulter

SIZE = 64 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(SIZE)
    yield made
    made.close()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def populated(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def test_no_page_is_populated_before_the_first_allocation(arena: Arena) -> None:
    prefaulter = Prefaulter(arena)
    prefaulter.allocated_to(0)
    prefaulter.stop()
    assert populated(arena) == 0


def test_the_prefaulter_runs_ahead_by_what_was_allocated_at_most_by_the_window(arena: Arena) -> None:
    prefaulter = Prefaulter(arena, window=16 << 20)
    try:
        prefaulter.allocated_to(8 << 20)
        until(lambda: prefaulter.idle, "it never ends")
        assert prefaulter.populated_to == 16 << 20
        assert populated(arena) == 8 << 20, "what the allocator handed out is its holder's to touch"
        prefaulter.allocated_to(40 << 20)
        until(lambda: prefaulter.idle, "it never ends")
        assert prefaulter.populated_to == 56 << 20
    finally:
        prefaulter.stop()


def test_the_prefaulter_stops_at_the_end_of_the_arena(arena: Arena) -> None:
    prefaulter = Prefaulter(arena)
    try:
        prefaulter.allocated_to(SIZE - 10)
        until(lambda: prefaulter.idle, "it never ends")
        assert prefaulter.populated_to == SIZE
        prefaulter.allocated_to(SIZE)
        assert prefaulter.idle
    finally:
        prefaulter.stop()


def test_small_moves_of_the_high_water_mark_start_no_thread(arena: Arena) -> None:
    prefaulter = Prefaulter(arena)
    prefaulter.allocated_to(PREFAULT_STEP // 4)
    assert prefaulter.idle
    prefaulter.stop()


def test_a_stopped_prefaulter_has_no_thread_and_populates_no_page(arena: Arena) -> None:
    prefaulter = Prefaulter(arena)
    prefaulter.allocated_to(30 << 20)
    prefaulter.stop()
    left = populated(arena)
    prefaulter.allocated_to(SIZE)
    assert prefaulter.idle and populated(arena) == left
    assert not any(thread.name == "hpcray-prefault" for thread in threading.enumerate())


def test_the_prefaulter_gives_up_on_a_kernel_that_cannot_populate(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "madvise", lambda *_: False)
    prefaulter = Prefaulter(arena)
    prefaulter.allocated_to(30 << 20)
    until(lambda: prefaulter.idle, "it never ends")
    prefaulter.allocated_to(60 << 20)
    assert prefaulter.idle
    prefaulter.stop()


def test_a_window_of_zero_disables_the_prefaulter(arena: Arena) -> None:
    prefaulter = Prefaulter(arena, window=0)
    prefaulter.allocated_to(30 << 20)
    assert prefaulter.idle
    prefaulter.stop()
    assert populated(arena) == 0
