"""Copies by several threads, where the system gives no threads."""

from __future__ import annotations

import os
import threading

import pytest

from hpcray.platform.arena import parallel_copy


@pytest.mark.parametrize("given", [0, 1, 2])
def test_the_calling_thread_copies_the_parts_for_which_no_thread_starts(
    monkeypatch: pytest.MonkeyPatch, given: int
) -> None:
    """A put does not fail for it; nor does it end while a thread that was started still writes."""
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if len(started) == given:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    def copy(target: memoryview, source: memoryview) -> None:
        target[:] = source

    monkeypatch.setattr(threading.Thread, "start", limited)
    source = os.urandom(4 * 4096 + 5)
    target = bytearray(len(source))
    parallel_copy(copy, memoryview(target), memoryview(source), 4)
    assert target == source
    assert len(started) == given and not any(thread.is_alive() for thread in started)
