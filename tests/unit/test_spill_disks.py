"""Disks that misbehave while objects are spilled to them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_spill_files import SIZE, Disk, becomes

from hpcray.platform import direct_io, spill_files
from hpcray.platform.arena import Arena


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(SIZE)
    yield arena
    arena.close()


def test_an_error_at_close_of_a_segment_does_not_end_the_writer(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, arena)
    disk.files.write(1, [(0, 4096, 0)])
    assert disk.reports(1) == [(b"", None)]
    close = os.close

    def over_quota(fd: int) -> None:
        close(fd)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(spill_files.os, "close", over_quota)
    disk.files.discard(1, 0, 4096, True)
    disk.files.write(2, [(0, 4096, 0)])
    assert disk.reports(1) == [(b"", None)]
    monkeypatch.undo()
    disk.files.close()


def test_closing_the_spill_files_does_not_wait_for_a_silent_file_system(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, asked = threading.Event(), threading.Event()

    def silent(fd: int, parts: list[memoryview], position: int) -> int:
        asked.set()
        answers.wait()
        return sum(map(len, parts))

    monkeypatch.setattr(direct_io.os, "pwritev", silent)
    monkeypatch.setattr(spill_files, "_CLOSE_TIMEOUT", 0.1)
    disk = Disk(tmp_path, arena)
    disk.files.write(1, [(0, 4096, 0)])
    assert asked.wait(30)
    closing = threading.Thread(target=disk.files.close, daemon=True)
    closing.start()
    closing.join(30)
    late = closing.is_alive()
    answers.set()
    assert not late


def test_a_stale_handle_does_not_end_the_discarding_thread(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, arena)
    disk.files.write(1, [(0, 4096, 0), (4096, 4096, 4096)])
    assert disk.reports(1) == [(b"", None)]
    asked, fstat = threading.Event(), os.fstat

    def stale(fd: int) -> os.stat_result:
        asked.set()
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(spill_files.os, "fstat", stale)
    disk.files.discard(1, 0, 4096, False)
    assert asked.wait(30)
    monkeypatch.setattr(spill_files.os, "fstat", fstat)
    disk.files.discard(1, 4096, 4096, True)
    assert becomes(lambda: not disk.files._segments), "the file is closed with its last object"
    disk.files.close()


def test_every_exception_in_a_spill_thread_is_reported(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, arena)
    disk.files.write(1, [(0, 4096, 0)])
    assert disk.reports(1) == [(b"", None)]
    disk.files.write(1, [(SIZE, 4096, 4096)])
    ((ident, error),) = disk.reports(1)
    assert ident == b"" and error is not None and "not in the arena" in error
    for _ in range(3):  # more than there are threads that read
        disk.files.read(b"object", 1, SIZE, 4096, 0)
        ((ident, error),) = disk.reports(1)
        assert ident == b"object" and error is not None and "not in the arena" in error
    disk.files.write(1, [(0, 4096, 4096)])
    assert disk.reports(1) == [(b"", None)], "the thread is still there"
    disk.files.close()


class Silent:
    """A system call on files that does not return, until it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        self.asked, self.answers = threading.Semaphore(0), threading.Event()
        self._call = getattr(os, call)
        monkeypatch.setattr(direct_io.os, call, self.silent)

    def silent(self, fd: int, parts: list[memoryview], position: int) -> int:
        self.asked.release()
        assert self.answers.wait(60)
        return self._call(fd, parts, position)


def test_a_write_that_does_not_return_counts_as_stuck_until_it_does(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, arena)
    assert disk.files.stuck(0.0) == ([], 0.0) and not disk.files.busy
    silent = Silent(monkeypatch, "pwritev")
    disk.files.write(1, [(0, 4096, 0)])
    assert silent.asked.acquire(timeout=30)
    assert disk.files.stuck(3600.0) == ([], 0.0), "it has not taken that long"
    stuck, still = disk.files.stuck(0.0)
    assert stuck == [b""] and still >= 0.0 and disk.files.busy
    silent.answers.set()
    assert disk.reports(1) == [(b"", None)]
    assert disk.files.stuck(0.0) == ([], 0.0) and not disk.files.busy
    disk.files.close()


def test_reads_queued_behind_stuck_reads_count_as_stuck(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, arena)
    disk.files.write(1, [(0, 4096, 0)])
    assert disk.reports(1) == [(b"", None)]
    silent = Silent(monkeypatch, "preadv")
    disk.files.read(b"a", 1, 4096, 4096, 0)
    assert silent.asked.acquire(timeout=30)
    assert disk.files.stuck(0.0)[0] == [b"a"], "one thread is left"
    disk.files.read(b"b", 1, 8192, 4096, 0)
    assert silent.asked.acquire(timeout=30)
    disk.files.read(b"c", 1, 12288, 4096, 0)
    assert sorted(disk.files.stuck(0.0)[0]) == [b"a", b"b", b"c"]
    disk.files.write(1, [(0, 4096, 4096)])
    assert disk.reports(1) == [(b"", None)], "writing goes on"
    silent.answers.set()
    assert sorted(disk.reports(3)) == [(b"a", None), (b"b", None), (b"c", None)]
    assert disk.files.stuck(0.0) == ([], 0.0)
    disk.files.close()


def test_a_write_fails_if_no_thread_can_be_started_and_a_later_one_succeeds(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, arena)
    start, left = threading.Thread.start, [2]

    def limited(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    for segment in (1, 2):
        disk.files.write(segment, [(0, 4096, 0)])
        ((ident, error),) = disk.reports(1)
        assert ident == b"" and error is not None
        assert "can't start new thread" in error and "ulimit -u" in error and str(tmp_path) in error
        disk.files.discard(segment, 0, 4096, True)
    monkeypatch.undo()
    arena.write(0, os.urandom(4096))
    disk.files.write(3, [(0, 4096, 0)])
    assert disk.reports(1) == [(b"", None)]
    for ident in (b"a", b"b"):
        disk.files.read(ident, 3, 8192, 4096, 0)
    assert sorted(disk.reports(2)) == [(b"a", None), (b"b", None)]
    assert bytes(arena.view(8192, 4096)) == bytes(arena.view(0, 4096))
    assert len(disk.files._threads) == 4
    disk.files.close()
