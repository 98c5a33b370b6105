"""The files of histories: whatever is cut off or overwritten, the rest is read."""

from __future__ import annotations

import errno
import os
import random
import time
from pathlib import Path

import pytest

from hpcray.history.block_file import FIRST_LINE, BlockWriter, Damage, blocks, pack
from hpcray.history.records import Began, Ended, Gap, Line, decode, encode

CONTENTS = [encode([Line(float(number), "INFO", f"line {number} " + "x" * (number * 40))]) for number in range(20)]
WHOLE = FIRST_LINE + b"".join(map(pack, CONTENTS))


def test_blocks_come_back_in_order() -> None:
    damage = Damage()
    assert list(blocks(WHOLE, damage)) == CONTENTS
    assert damage == Damage()


def test_a_file_cut_at_any_byte_gives_all_whole_blocks() -> None:
    ends = [len(FIRST_LINE)]
    for content in CONTENTS:
        ends.append(ends[-1] + len(pack(content)))
    for cut in range(len(WHOLE)):
        damage = Damage()
        whole = sum(end <= cut for end in ends) - 1
        assert list(blocks(WHOLE[:cut], damage)) == CONTENTS[: max(0, whole)], cut
        assert damage.cut == (cut > ends[0] and cut not in ends) or cut < ends[0], cut


def test_a_flipped_byte_costs_one_block_and_is_counted() -> None:
    chosen = random.Random(45)
    for _ in range(1000):
        place = chosen.randrange(len(FIRST_LINE), len(WHOLE))
        data = bytearray(WHOLE)
        data[place] ^= 1 << chosen.randrange(8)
        damage = Damage()
        found = list(blocks(bytes(data), damage))
        assert [one for one in CONTENTS if one not in found] and len(found) == len(CONTENTS) - 1, place
        assert set(found) <= set(CONTENTS)
        assert damage.places == 1 or damage.cut


def test_garbage_is_no_block() -> None:
    chosen = random.Random(7)
    for size in (0, 1, 5, 100, 100_000):
        damage = Damage()
        assert list(blocks(chosen.randbytes(size), damage)) == []


def test_records_of_another_version_are_counted_and_the_others_read() -> None:
    known = Ended(1.0, 3)
    content = encode([[99, "new"], known, ["no record at all"]])
    assert decode(content) == ([known], 2)
    assert decode(b"\xc1") == ([], 1)
    assert decode(encode({"not": "a list"})) == ([], 1)


def test_no_value_is_unpickled() -> None:
    """The format has numbers, texts, bytes, lists and maps; a reader makes nothing else of them."""
    records, _ = decode(encode([Began(0.0, "1", "2", 0, 1, "h", 1, 1, "b", "p", {})]))
    assert type(records[0]) is Began


class TestBlockWriter:
    def test_files_change_where_they_are_full(self, tmp_path: Path) -> None:
        def opened(number: int) -> int:
            return os.open(tmp_path / str(number), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

        writer = BlockWriter(opened, 1000)
        writer.add(os.urandom(2000))
        deadline = time.monotonic() + 20
        while not writer.full:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        writer.begin_file(b"first of the next")
        assert not writer.full
        writer.add(b"second of the next")
        writer.close(20.0)
        assert list(blocks((tmp_path / "1").read_bytes(), Damage())) == [b"first of the next", b"second of the next"]

    def test_a_full_disk_is_told_once(self) -> None:
        def opened(number: int) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        writer = BlockWriter(opened, 1000)
        writer.add(b"content")
        deadline = time.monotonic() + 20
        problem = ""
        while not problem:
            assert time.monotonic() < deadline
            problem = writer.problem()
        assert problem == os.strerror(errno.ENOSPC)
        writer.add(b"more")
        assert writer.problem() == ""
        writer.close(20.0)
        assert writer.lost

    def test_a_file_that_was_removed_is_told_and_another_one_is_begun(self, tmp_path: Path) -> None:
        def opened(number: int) -> int:
            return os.open(tmp_path / str(number), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

        writer = BlockWriter(opened, 1 << 20)
        writer.add(b"lost")
        deadline = time.monotonic() + 20
        while not (tmp_path / "0").exists():
            assert time.monotonic() < deadline
        (tmp_path / "0").unlink()
        while not writer.full:
            assert time.monotonic() < deadline
            writer.add(b"lost too")
            time.sleep(0.01)
        assert "was removed" in writer.problem()
        writer.begin_file(b"first of the next")
        writer.close(20.0)
        assert list(blocks((tmp_path / "1").read_bytes(), Damage())) == [b"first of the next"]

    def test_what_a_full_disk_has_cut_off_makes_room_for_the_word_that_something_is_missing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever room there was: no reader takes the end of the file for the end of the job."""
        write, gap = os.write, encode([Gap(1.0, "no space")])
        first = len(FIRST_LINE + pack(CONTENTS[0]))

        def full(fd: int, data: bytes) -> int:
            fits = first + room - os.fstat(fd).st_size
            if fits <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(fd, data[:fits])

        monkeypatch.setattr("hpcray.history.block_file.os.write", full)
        for room in (0, 1, 5, len(pack(gap)) - 1, len(pack(gap)), 100):
            path = tmp_path / str(room)

            def opened(number: int, path: Path = path) -> int:
                return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

            writer = BlockWriter(opened, 1 << 30, gap=lambda why: gap)
            writer.add(CONTENTS[0])
            deadline = time.monotonic() + 20
            while not path.exists() or path.stat().st_size < first:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            writer.add(encode([Line(1.0, "INFO", os.urandom(400).hex())]))  # larger than the room
            writer.close(20.0)
            damage, data = Damage(), path.read_bytes()
            assert list(blocks(data, damage)) == [CONTENTS[0], gap][: 1 + (room >= len(pack(gap)))]
            assert damage.cut == (0 < room < len(pack(gap)))
            assert writer.problem() == os.strerror(errno.ENOSPC)

    @pytest.mark.parametrize("size", [1 << 20])
    def test_a_file_system_that_hangs_stops_nobody(self, size: int) -> None:
        read, write = os.pipe()  # nobody reads: the thread hangs in its second write at the latest
        writer = BlockWriter(lambda number: os.dup(write), 1 << 30)
        began = time.monotonic()
        for _ in range(100):
            writer.add(os.urandom(size))
        writer.close(0.1)
        assert time.monotonic() - began < 10
        assert writer.lost
        os.close(read)  # the thread ends with an error
        os.close(write)
