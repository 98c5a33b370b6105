"""Spilled bytes on a real disk."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcray.common.exceptions import StartupError
from hpcray.platform.arena import Arena
from hpcray.platform.spill_files import SpillFiles, SpillReport, TmpDirectory, describe_spill_directory, spill_directory

SIZE = 4 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(SIZE)
    yield arena
    arena.close()


class Disk:
    def __init__(self, directory: Path, arena: Arena) -> None:
        self.said: list[str] = []
        self.files = SpillFiles(str(directory), arena, self.said.append)

    def reports(self, count: int) -> list[SpillReport]:
        found: list[SpillReport] = []
        while len(found) < count:
            readable, _, _ = select.select([self.files.fileno()], [], [], 30)
            assert readable, f"{count - len(found)} reports are missing"
            found += self.files.reports()
        return found


def becomes(what: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    return what()


@pytest.fixture
def disk(tmp_path: Path, arena: Arena) -> Iterator[Disk]:
    disk = Disk(tmp_path, arena)
    yield disk
    disk.files.close()


def test_spilled_bytes_are_read_back_at_another_place_of_the_arena(disk: Disk, arena: Arena, tmp_path: Path) -> None:
    data = os.urandom(1 << 20)
    arena.write(4096, data)
    disk.files.write(1, [(4096, 1 << 19, 0), (4096 + (1 << 19), 1 << 19, 1 << 19)])
    assert disk.reports(1) == [(b"", None)]
    assert list(tmp_path.iterdir()) == [], "its file has no name"
    disk.files.read(b"x", 1, 2 << 20, 1 << 20, 0)
    assert disk.reports(1) == [(b"x", None)]
    assert bytes(arena.view(2 << 20, 1 << 20)) == data


def test_no_file_is_open_before_the_first_write_or_after_the_last_discard(disk: Disk) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert disk.said == []
    disk.files.write(1, [(0, 4096, 0), (4096, 4096, 4096)])
    disk.reports(1)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(disk.said) == 1 and "spilled to" in disk.said[0]
    disk.files.discard(1, 0, 4096, False)
    disk.files.discard(1, 4096, 4096, True)
    assert becomes(lambda: len(os.listdir("/proc/self/fd")) == before)
    disk.files.write(2, [(0, 4096, 0)])
    disk.reports(1)
    assert len(os.listdir("/proc/self/fd")) == before + 1


def test_a_discard_gives_disk_space_back(disk: Disk, arena: Arena) -> None:
    arena.write(0, os.urandom(2 << 20))
    disk.files.write(1, [(0, 1 << 20, 0), (1 << 20, 1 << 20, 1 << 20)])
    disk.reports(1)
    (fd,) = disk.files._segments.values()
    before = os.fstat(fd).st_blocks
    disk.files.discard(1, 0, 1 << 20, False)
    if not becomes(lambda: os.fstat(fd).st_blocks < before, 20):
        pytest.skip("this file system cannot punch holes")
    disk.files.read(b"y", 1, 0, 1 << 20, 1 << 20)
    disk.reports(1)
    assert bytes(arena.view(0, 1 << 20)) == bytes(arena.view(1 << 20, 1 << 20)), "the rest is as it was"


def test_live_bytes_between_discarded_ones_stay(disk: Disk, arena: Arena) -> None:
    """Small objects share pages; large ones have theirs to themselves. Every second one goes."""
    arena.write(0, os.urandom(2 << 20))
    sizes = [3000, 100, 9000, 5000, 64, 20_000, 4096, 4097, 70_000, 1]
    pieces, at = [], 0
    for size in sizes * 8:
        pieces.append((at, size, at))
        at += size
    disk.files.write(1, pieces)
    disk.reports(1)
    for _, size, position in pieces[::2]:
        disk.files.discard(1, position, size, False)
    disk.files.discard(1, at, 1 << 30, False)  # beyond the end: as much as this is dead, so that all of it goes now
    assert becomes(lambda: disk.files._dead.get(1) == (0, []))
    for number, (offset, size, position) in enumerate(pieces):
        if number % 2:
            disk.files.read(b"y", 1, 3 << 20, size, position)
            assert disk.reports(1) == [(b"y", None)]
            assert bytes(arena.view(3 << 20, size)) == bytes(arena.view(offset, size))


def test_a_missing_spill_directory_is_a_reported_error(tmp_path: Path, arena: Arena) -> None:
    disk = Disk(tmp_path / "gone", arena)
    disk.files.write(1, [(0, 4096, 0)])
    ((ident, error),) = disk.reports(1)
    assert ident == b"" and error is not None and "No such file" in error and str(tmp_path) in error
    disk.files.discard(1, 0, 4096, True)
    (tmp_path / "gone").mkdir()
    disk.files.write(2, [(0, 4096, 0)])
    assert disk.reports(1) == [(b"", None)]
    disk.files.close()


def test_a_read_beyond_the_written_bytes_is_an_error(disk: Disk) -> None:
    disk.files.write(1, [(0, 4096, 0)])
    disk.reports(1)
    disk.files.read(b"z", 1, 0, 8192, 0)
    ((ident, error),) = disk.reports(1)
    assert ident == b"z" and error is not None and "ended 4096 bytes early" in error


class TestDirectory:
    def test_the_spill_directory_that_the_user_set_is_used(self, tmp_path: Path) -> None:
        assert spill_directory(str(tmp_path)) == str(tmp_path)

    def test_a_configured_spill_directory_that_does_not_exist_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(StartupError, match=r"HPCRAY_SPILL_DIR=.*hint:"):
            spill_directory(str(tmp_path / "no"))

    def test_the_default_spill_directory_exists(self) -> None:
        assert os.path.isdir(spill_directory(""))

    @pytest.mark.parametrize(("kind", "warning"), [("ext4", None), ("nfs4", "network"), ("tmpfs", "takes memory")])
    def test_an_unsuitable_spill_directory_causes_a_warning(self, kind: str, warning: str | None) -> None:
        text = describe_spill_directory(TmpDirectory("/scratch", "TMPDIR", kind, 5 * 10**9, True))
        assert "/scratch" in text and "4.7 GiB free" in text
        assert ("hint:" in text and warning in text) if warning else "hint:" not in text
