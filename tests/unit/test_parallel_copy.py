"""Copies by several threads, where the system gives no threads."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from hpcray.common.memory import copy_in_parallel, parallel_copy
from hpcray.platform import arena as arenas
from hpcray.platform.arena import Arena


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


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_several_buffers_are_copied_in_equal_shares(threads: int) -> None:
    sizes = [1, 4096, 300_000, 0, 4095, 70_000, 12_288]
    sources = [np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8) for size in sizes]
    targets = [np.zeros(size, dtype=np.uint8) for size in sizes]
    by_thread: dict[int, int] = {}

    def copy(part: np.ndarray, of: np.ndarray) -> None:
        by_thread[threading.get_ident()] = by_thread.get(threading.get_ident(), 0) + len(part)
        part[:] = of

    copy_in_parallel(copy, list(zip(targets, sources, strict=True)), threads)
    assert all(map(np.array_equal, targets, sources))
    assert sum(by_thread.values()) == sum(sizes) and len(by_thread) <= threads
    assert max(by_thread.values()) <= -(-sum(sizes) // threads) + 4096 or len(by_thread) < threads


def test_many_buffers_that_are_large_together_are_written_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "PARALLEL_COPY_SIZE", 4 << 20)
    arena = Arena.create(16 << 20)
    try:
        arena.copiers = 3
        calls: list[int] = []
        whole = arenas.copy_in_parallel
        monkeypatch.setattr(arenas, "copy_in_parallel", lambda *args: (calls.append(args[2]), whole(*args)))
        pieces, at = [], 64
        for number, size in enumerate([3 << 20, 5, 3 << 20, 64 << 10, 0]):
            pieces.append((at, np.full(size, number, np.uint8)))
            at += -(-size // 64) * 64
        arena.write_all(4096, pieces)
        assert calls == [3]
        for at, piece in pieces:
            assert arena.view(4096 + at, len(piece)) == piece.tobytes()
        arena.write_all(0, pieces[1:4])
        assert calls == [3] and arena.view(pieces[2][0], 3 << 20) == pieces[2][1].tobytes()
    finally:
        arena.close()
