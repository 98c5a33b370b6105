"""Buffers of long messages: used again, but never while somebody reads them."""

from __future__ import annotations

import subprocess
import sys

from hpcray.common.memory import BufferPool
from hpcray.protocol.frames import LONG, FrameReader, pack

DEST, SOURCE = b"d" * 8, b"s" * 8


def test_a_buffer_without_views_is_used_again_with_its_whole_length() -> None:
    pool = BufferPool()
    first = pool.take(300_000)
    owner = id(first.obj)
    del first
    assert all(id(pool.take(size).obj) == owner for size in (1, 300_000, 500_000))


def test_a_buffer_with_a_view_is_not_given_away() -> None:
    pool = BufferPool()
    views = [pool.take(100)[10:20].toreadonly() for _ in range(20)]
    assert len({id(view.obj) for view in views}) == 20


def test_a_long_frame_is_received_in_place_between_short_ones() -> None:
    bodies = [b"short", bytes(range(256)) * (LONG // 64), b"", b"x" * (LONG + 1), b"end"]
    stream = b"".join(pack(DEST, SOURCE, body) for body in bodies)
    for step in (1 << 14, LONG - 1, LONG + 4099):
        reader = FrameReader(BufferPool())
        found, at, in_place = [], 0, 0
        while at < len(stream):
            room = reader.vacancy
            if room is None:
                found += [bytes(frame[20:]) for frame in reader.feed(stream[at : at + step])]
                at += step
                continue
            count = min(len(room), step)
            room[:count] = stream[at : at + count]
            at, in_place = at + count, in_place + count
            whole = reader.filled(count)
            if whole is not None:
                found.append(bytes(whole[20:]))
            del room, whole
        assert found == bodies and in_place > LONG


def test_no_more_memory_is_kept_than_there_is_room_for() -> None:
    pool = BufferPool(1 << 20)
    views = [pool.take(200_000) for _ in range(10)]
    owners = [id(view.obj) for view in views]
    large = pool.take(2 << 20)
    kept = owners[-4:]
    views.clear()
    del large
    again = [pool.take(200_000) for _ in range(4)]
    assert sorted(id(view.obj) for view in again) == sorted(kept)


def test_to_keep_freed_memory_touches_no_page_of_it() -> None:
    program = (
        "import resource\n"
        "from hpcray.common.memory import keep_freed_memory\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "keep_freed_memory()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64  # 2,048 of 4 KB where the block is written
