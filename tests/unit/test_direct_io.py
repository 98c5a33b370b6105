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

from hpcray.host import direct_io
from hpcray.host.direct_io import PAGE, Over, Stream, nameless, read, read_privately

ROOM = 1 << 20


@pytest.fixture(scope="module")
def fd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    fd = nameless(str(tmp_path_factory.mktemp("disk")))
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
@settings(max_examples=100, deadline=None)
@given(first=st.integers(0, 5), pieces=PIECES)
def test_pieces_come_back_bit_by_bit(
    fd: int, memory: memoryview, bounce: int, first: int, pieces: list[tuple[int, int, bool]]
) -> None:
    room = memoryview(mmap.mmap(-1, bounce))
    stream = Stream(fd, first * PAGE, room, lambda: False)
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
            read(fd, position, into[at : at + size], not at, room, lambda: False)
            assert into[at : at + size] == memory[offset : offset + size]
            assert set(into[:at]) | set(into[at + size :]) == {7}, "what lies beside it was touched"
        assert read_privately(f"/proc/self/fd/{fd}", position, size) == memory[offset : offset + size]


def test_long_pieces_take_several_calls(fd: int, memory: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "CALL", 16 * PAGE)
    room = memoryview(mmap.mmap(-1, PAGE))
    stream = Stream(fd, 0, room, lambda: False)
    stream.put(memory[: ROOM - 5], True)
    stream.finish()
    into = memoryview(mmap.mmap(-1, ROOM))
    read(fd, 0, into[: ROOM - 5], True, room, lambda: False)
    assert into[: ROOM - 5] == memory[: ROOM - 5]


def test_a_system_that_stops_in_the_middle_is_asked_again(
    fd: int, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    write, calls = os.pwritev, []

    def partial(fd: int, parts: list[memoryview], position: int) -> int:
        calls.append(position)
        return write(fd, [parts[0][: max(1, len(parts[0]) // 2)]], position)

    monkeypatch.setattr(direct_io.os, "pwritev", partial)
    stream = Stream(fd, 0, memoryview(mmap.mmap(-1, PAGE)), lambda: False)
    stream.put(memory[:10_000], True)
    stream.finish()
    monkeypatch.undo()
    assert len(calls) > 3
    assert read_privately(f"/proc/self/fd/{fd}", 0, 10_000) == memory[:10_000]
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def test_the_end_of_the_file_is_an_error(fd: int) -> None:
    end = os.fstat(fd).st_size
    room = memoryview(mmap.mmap(-1, PAGE))
    with pytest.raises(OSError, match="ended"):
        read(fd, end, memoryview(mmap.mmap(-1, PAGE)), True, room, lambda: False)
    with pytest.raises(OSError, match="ended"):
        read_privately(f"/proc/self/fd/{fd}", end, 10)


def test_who_is_to_end_gives_up(fd: int, memory: memoryview) -> None:
    stream = Stream(fd, 0, memoryview(mmap.mmap(-1, PAGE)), lambda: True)
    stream.put(memory[:100], True)
    with pytest.raises(Over):
        stream.finish()


def test_a_file_has_no_name(tmp_path: Path) -> None:
    os.close(nameless(str(tmp_path)))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="No such file"):
        nameless(str(tmp_path / "gone"))
