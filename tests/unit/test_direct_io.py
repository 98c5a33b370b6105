"""Files past the page cache: any piece, wherever it lies, comes back bit by bit, and nothing beside it is touched."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcray.platform import direct_io
from hpcray.platform.direct_io import (
    PAGE,
    DirectWriter,
    TransferCancelled,
    open_unnamed_file,
    read_direct,
    read_private_copy,
)

ROOM = 1 << 20


@pytest.fixture(scope="module")
def fd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    fd = open_unnamed_file(str(tmp_path_factory.mktemp("disk")))
    yield fd
    os.close(fd)


@pytest.fixture(scope="module")
def memory() -> memoryview:
    """Something to write from: at a page, random."""
    room = mmap.mmap(-1, ROOM)
    room.write(os.urandom(ROOM))
    return memoryview(room)


PIECES = st.lists(
    st.tuples(st.integers(0, 40).map(lambda n: n * 1024), st.integers(1, 30_000), st.booleans()),
    min_size=1,
    max_size=20,
)


@pytest.mark.parametrize("bounce", [PAGE, 4 * PAGE])
@settings(max_examples=100)
@given(first=st.integers(0, 5), pieces=PIECES)
def test_pieces_written_directly_are_read_back_unchanged(
    fd: int, memory: memoryview, bounce: int, first: int, pieces: list[tuple[int, int, bool]]
) -> None:
    room = memoryview(mmap.mmap(-1, bounce))
    stream = DirectWriter(fd, first * PAGE, room, lambda: False)
    placed = []
    for offset, size, new_page in pieces:
        if new_page:
            stream.skip_to(-(-stream.position // PAGE) * PAGE)
        placed.append((offset, size, stream.position))
        stream.put(memory[offset : offset + size], not offset % PAGE)
    stream.finish()
    for offset, size, position in placed:
        for at in (0, 64):  # where it is read to: at a page, and not
            into = memoryview(mmap.mmap(-1, at + size + PAGE))
            into[:] = b"\7" * len(into)
            read_direct(fd, position, into[at : at + size], not at, room, lambda: False)
            assert into[at : at + size] == memory[offset : offset + size]
            assert set(into[:at]) | set(into[at + size :]) == {7}, "what lies beside it was touched"
        assert read_private_copy(f"/proc/self/fd/{fd}", position, size) == memory[offset : offset + size]


def test_a_long_piece_takes_several_system_calls(fd: int, memory: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "CALL_SIZE", 16 * PAGE)
    room = memoryview(mmap.mmap(-1, PAGE))
    stream = DirectWriter(fd, 0, room, lambda: False)
    stream.put(memory[: ROOM - 5], True)
    stream.finish()
    into = memoryview(mmap.mmap(-1, ROOM))
    read_direct(fd, 0, into[: ROOM - 5], True, room, lambda: False)
    assert into[: ROOM - 5] == memory[: ROOM - 5]


def test_a_partial_write_is_continued(fd: int, memory: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    write, calls = os.pwritev, []

    def partial(fd: int, parts: list[memoryview], position: int) -> int:
        calls.append(position)
        return write(fd, [parts[0][: max(1, len(parts[0]) // 2)]], position)

    monkeypatch.setattr(direct_io.os, "pwritev", partial)
    stream = DirectWriter(fd, 0, memoryview(mmap.mmap(-1, PAGE)), lambda: False)
    stream.put(memory[:10_000], True)
    stream.finish()
    monkeypatch.undo()
    assert len(calls) > 3
    assert read_private_copy(f"/proc/self/fd/{fd}", 0, 10_000) == memory[:10_000]
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def test_a_read_beyond_the_end_of_the_file_is_an_error(fd: int) -> None:
    end = os.fstat(fd).st_size
    room = memoryview(mmap.mmap(-1, PAGE))
    with pytest.raises(OSError, match="ended"):
        read_direct(fd, end, memoryview(mmap.mmap(-1, PAGE)), True, room, lambda: False)
    with pytest.raises(OSError, match="ended"):
        read_private_copy(f"/proc/self/fd/{fd}", end, 10)


def test_a_cancelled_transfer_raises_before_the_next_system_call(fd: int, memory: memoryview) -> None:
    stream = DirectWriter(fd, 0, memoryview(mmap.mmap(-1, PAGE)), lambda: True)
    stream.put(memory[:100], True)
    with pytest.raises(TransferCancelled):
        stream.finish()


def test_an_unnamed_file_leaves_no_directory_entry(tmp_path: Path) -> None:
    os.close(open_unnamed_file(str(tmp_path)))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="No such file"):
        open_unnamed_file(str(tmp_path / "gone"))
