"""Rings of slots and blocks of values in shared memory: order, room, several readers, other processes, the end."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import numpy as np
import pytest

from hpcray.graphs.channel_memory import (
    FOREVER,
    ChannelClosed,
    ChannelMemory,
    RingReader,
    RingShape,
    RingWriter,
    ValueMemory,
    ValueViews,
)

SPIN = 0.0002


def number(header: tuple[int, int, int, int], slot: memoryview) -> int:
    return int.from_bytes(slot[: header[1]], "little")


def put(writer: RingWriter, value: int, deadline: float = FOREVER) -> None:
    at, slot = writer.slot(deadline)
    slot[:8] = value.to_bytes(8, "little")
    writer.publish(at, 0, 8, 0, 0)


def take(reader: RingReader, deadline: float = FOREVER) -> int:
    found = number(*reader.next(deadline))
    reader.done()
    return found


def test_values_come_in_order_to_every_reader_and_writers_wait_for_the_slowest() -> None:
    memory = ChannelMemory.create([RingShape(1, 2, 8), RingShape(2, 3, 100)], SPIN)
    writer, fast, slow = RingWriter(memory, 1), RingReader(memory, 1, 0), RingReader(memory, 1, 1)
    for value in range(3):
        put(writer, value)
    assert [take(fast) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(TimeoutError):
        put(writer, 3, 0.0)
    assert take(slow) == 0 and not fast.ready()
    put(writer, 3, 0.0)
    assert take(fast) == 3 and [take(slow) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(TimeoutError):
        take(slow, 0.0)
    assert not RingReader(memory, 0, 0).ready(), "the channels do not touch each other"


def test_numbers_wrap() -> None:
    memory = ChannelMemory.create([RingShape(1, 3, 8)], SPIN)
    writer, reader = RingWriter(memory, 0), RingReader(memory, 0, 0)
    start = 2**32 - 3 * 5 + 2  # slots go by the whole number, words by its low half
    writer._number = reader._number = start
    writer._room_until = start + 3
    memory.file.words[writer._written] = memory.file.words[reader._read] = start
    for value in range(30):
        put(writer, value)
        if value % 3 == 2:
            assert [take(reader) for _ in range(3)] == [value - 2, value - 1, value]


def in_child(work: object) -> int:
    """Fork; the child runs `work` and exits with 0 if that raises nothing."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()  # type: ignore[operator]
            code = 0
        finally:
            os._exit(code)
    return child


@pytest.mark.parametrize("slots", [1, 2, 7])
def test_processes_exchange_many_values_and_lose_none(slots: int) -> None:
    shapes = [RingShape(1, slots, 8), RingShape(1, slots, 8)]
    memory = ChannelMemory.create(shapes, SPIN)
    place, count = memory.file.place, 3000

    def echo() -> None:
        there = ChannelMemory.open(place, shapes, SPIN)
        reader, writer = RingReader(there, 0, 0), RingWriter(there, 1)
        for _ in range(count):
            put(writer, take(reader) + 1)

    child = in_child(echo)
    writer, reader = RingWriter(memory, 0), RingReader(memory, 1, 0)
    limit = time.monotonic() + 60
    for value in range(count):
        put(writer, value, limit)
        if value >= slots:
            assert take(reader, limit) == value - slots + 1
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_close_ends_all_waits() -> None:
    memory = ChannelMemory.create([RingShape(1, 1, 8), RingShape(1, 1, 8)], SPIN)
    ended = []

    def wait(work: object) -> None:
        try:
            work()  # type: ignore[operator]
        except ChannelClosed:
            ended.append(1)

    full = RingWriter(memory, 1)
    put(full, 1)
    waits = [lambda: RingReader(memory, 0, 0).next(FOREVER), lambda: full.slot(FOREVER)]
    threads = [threading.Thread(target=wait, args=(work,)) for work in waits]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    memory.close()
    for thread in threads:
        thread.join(5)
    assert len(ended) == 2


def test_an_interrupt_ends_a_wait_and_loses_nothing() -> None:
    memory = ChannelMemory.create([RingShape(1, 2, 8)], SPIN)
    writer, reader = RingWriter(memory, 0), RingReader(memory, 0, 0)
    me = os.getpid()
    threading.Timer(0.1, os.kill, (me, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        reader.wait(time.monotonic() + 30)
    put(writer, 5)
    assert take(reader) == 5


def test_memory_cannot_be_opened_once_its_maker_has_ended() -> None:
    memory = ChannelMemory.create([RingShape(1, 1, 8)], SPIN)
    pid, fd, size = memory.file.place
    del memory
    gc.collect()
    with pytest.raises((OSError, ValueError)):
        ChannelMemory.open((pid, fd, size), [RingShape(1, 1, 8)], SPIN)


def test_large_values_stay_as_they_are_while_somebody_views_them() -> None:
    memory, views = ValueMemory(1), ValueViews(os.getpid(), 1, 0, 4)

    def send(value: int, size: int) -> np.ndarray:
        header, target = memory.take(size)
        np.frombuffer(target, np.uint8)[:] = value
        return np.frombuffer(views.view(header), np.uint8)

    kept = send(1, 100_000)
    part = kept[500:600]
    assert send(2, 100_000)[0] == 2
    del kept
    gc.collect()
    for value in range(3, 20):
        assert send(value, 80_000)[-1] == value
    assert set(part) == {1}
    assert len(memory._blocks) == 2, "memory that nobody views is used again"
    del part
    gc.collect()
    assert send(3, 1_000_000).sum() == 3_000_000
    assert len(memory._blocks) == 1, "what is too small is given back"
