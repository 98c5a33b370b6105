"""Disks that misbehave while objects are spilled to them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_spill_files import SIZE, Disk, becomes

from hpcray.host import direct_io, spill_files
from hpcray.host.arena import Arena


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(SIZE)
    yield arena
    arena.close()


def test_an_error_at_close_does_not_end_the_writing(
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


def test_close_does_not_wait_for_a_file_system_that_does_not_answer(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, asked = threading.Event(), threading.Event()

    def silent(fd: int, parts: list[memoryview], position: int) -> int:
        asked.set()
        answers.wait()
        return sum(map(len, parts))

    monkeypatch.setattr(direct_io.os, "pwritev", silent)
    monkeypatch.setattr(spill_files, "_CLOSING", 0.1)
    disk = Disk(tmp_path, arena)
    disk.files.write(1, [(0, 4096, 0)])
    assert asked.wait(30)
    closing = threading.Thread(target=disk.files.close, daemon=True)
    closing.start()
    closing.join(30)
    late = closing.is_alive()
    answers.set()
    assert not late


def test_a_stale_handle_does_not_end_the_giving_back(
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


def test_whatever_goes_wrong_in_a_thread_is_reported(
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
