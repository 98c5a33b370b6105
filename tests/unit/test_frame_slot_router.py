"""Long frames in memory that a raylet shares with its processes: forwarded, delivered and given back."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator

import pytest

from hpcray.common.ids import make_proc, raylet_of
from hpcray.core.raylet.frame_slots import GRANT, SLOT_COUNT
from hpcray.platform.arena import Arena
from hpcray.protocol import messages as m
from hpcray.protocol.frames import LONG, SLOT_BYTES, FrameError, FrameReader, pack
from hpcray.runtime.raylet.local_sockets import LocalSocket
from hpcray.runtime.raylet.router import FrameSlotRouter, Router

SIZE, RESERVE = 1 << 20, SLOT_COUNT * SLOT_BYTES
ME, HERE, THERE = 1, make_proc(1, 5), make_proc(2, 7)
FRAME = pack(THERE, HERE, m.encode([m.ObjectReady(bytes(16), 0, bytes(range(256)) * 400, 0, [])]))


class Wire:
    """A control transport that holds what is sent until it is told that it has arrived."""

    def __init__(self) -> None:
        self.under_way: list[tuple[int, memoryview]] = []

    def send(self, dest: int, data: memoryview, wake: bool = True) -> None:
        self.under_way.append((dest, data))


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def router(wire: Wire) -> Router:
    return Router(ME, 3, wire)  # type: ignore[arg-type]


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(SIZE, RESERVE)
    yield made
    made.close()


@pytest.fixture
def frames(arena: Arena, router: Router) -> FrameSlotRouter:
    return FrameSlotRouter(arena, [SIZE + number * SLOT_BYTES for number in range(SLOT_COUNT)], router)


@pytest.fixture
def reader(router: Router) -> Iterator[socket.socket]:
    """The other end of the connection of process HERE."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    router.links[HERE] = LocalSocket(ours, HERE, 1)
    yield theirs
    ours.close()
    theirs.close()


def granted(frames: FrameSlotRouter) -> list[int]:
    (effect,) = frames.sent_long(HERE)
    return list(effect.msg.offsets)


def free(frames: FrameSlotRouter) -> int:
    """How many slots there are for frames that arrive; gives them back."""
    slots = frames._slots
    slots.check_invariants()
    taken = []
    while (offset := slots.take()) >= 0:
        taken.append(offset)
    for offset in taken:
        slots.release(offset)
    return len(taken)


def test_a_frame_in_a_slot_is_sent_from_there_and_the_slot_is_free_when_the_wire_has_done_with_it(
    frames: FrameSlotRouter, router: Router, wire: Wire, arena: Arena
) -> None:
    offsets = granted(frames)
    arena.view(offsets[0], len(FRAME))[:] = FRAME
    assert frames.on_slot_frame(0.0, HERE, m.SlotFrame(offsets[0], len(FRAME))) == []
    router.flush()
    assert free(frames) == SLOT_COUNT - GRANT
    ((node, data),) = wire.under_way
    assert node == 2 and data == FRAME and data.readonly
    arena.view(offsets[0], 1)[:] = b"x"
    assert data[:1] == b"x", "the wire reads it where the process has written it"
    del data
    wire.under_way.clear()
    gc.collect()
    assert free(frames) == SLOT_COUNT - GRANT + 1


def test_a_process_that_refers_to_what_is_no_frame_of_its_own_breaks_the_protocol(
    frames: FrameSlotRouter, arena: Arena
) -> None:
    (offset, *_) = granted(frames)
    for src, at, size in [
        (HERE, offset + 64, len(FRAME)), (THERE, offset, len(FRAME)), (HERE, offset, 19),
        (HERE, offset, SLOT_BYTES + 1),
    ]:  # fmt: skip
        with pytest.raises(FrameError):
            frames.on_slot_frame(0.0, src, m.SlotFrame(at, size))
    arena.view(offset, len(FRAME))[:] = FRAME
    with pytest.raises(FrameError):
        frames.on_slot_frame(0.0, HERE, m.SlotFrame(offset, len(FRAME) - 1))
    assert free(frames) == SLOT_COUNT - GRANT + 1


def test_a_frame_that_arrived_in_a_slot_is_read_there_and_the_slot_is_free_then(
    frames: FrameSlotRouter, router: Router, reader: socket.socket, arena: Arena
) -> None:
    frame = pack(HERE, THERE, FRAME[20:])
    batch = frames.take(len(frame))
    batch[:] = frame
    arrived = batch.toreadonly()
    offset = frames.offset_of(arrived)
    assert offset >= SIZE and frames.offset_of(frame) == frames.offset_of(memoryview(frame)) == -1
    assert frames.deliver(HERE, THERE, arrived, offset)
    del batch, arrived
    for link in router.dirty:
        link.flush()
    ((message,),) = [m.decode(found[20:]) for found in FrameReader().feed(reader.recv(1 << 16))]
    assert message == m.SlotFrame(offset, len(frame)) and arena.view(offset, len(frame)) == frame
    assert THERE in router.links[HERE].peers
    assert free(frames) == SLOT_COUNT - 1
    frames.on_frame_read(0.0, THERE, m.FrameRead(offset))
    assert free(frames) == SLOT_COUNT - 1
    frames.on_frame_read(0.0, HERE, m.FrameRead(offset))
    assert free(frames) == SLOT_COUNT


def test_what_a_dead_process_had_to_read_or_could_have_written_is_free(
    frames: FrameSlotRouter, reader: socket.socket
) -> None:
    granted(frames)
    batch = frames.take(LONG)
    assert frames.deliver(HERE, THERE, batch, frames.offset_of(batch))
    del batch
    frames.process_died(HERE)
    assert free(frames) == SLOT_COUNT


def test_frames_that_find_no_slot_or_are_too_long_for_one_are_received_elsewhere(frames: FrameSlotRouter) -> None:
    views = [frames.take(LONG) for _ in range(SLOT_COUNT)]
    assert all(frames.offset_of(view) >= SIZE for view in views)
    assert frames.offset_of(frames.take(LONG)) == -1
    del views
    assert frames.offset_of(frames.take(SLOT_BYTES + 1)) == -1
    assert free(frames) == SLOT_COUNT


def test_a_frame_for_a_process_that_is_gone_is_not_delivered(frames: FrameSlotRouter) -> None:
    batch = frames.take(LONG)
    assert not frames.deliver(HERE, THERE, batch, frames.offset_of(batch))
    del batch
    assert free(frames) == SLOT_COUNT


def test_a_frame_for_a_node_that_is_dead_comes_back_as_undeliverable(
    frames: FrameSlotRouter, router: Router, reader: socket.socket, arena: Arena
) -> None:
    (offset, *_) = granted(frames)
    router.lose_node(2, "gone")
    arena.view(offset, len(FRAME))[:] = FRAME
    frames.on_slot_frame(0.0, HERE, m.SlotFrame(offset, len(FRAME)))
    router.flush()
    for link in router.dirty:
        link.flush()
    found = [message for frame in FrameReader().feed(reader.recv(1 << 16)) for message in m.decode(frame[20:])]
    assert found == [m.Undeliverable(THERE, "node 2 is dead: gone")]
    assert free(frames) == SLOT_COUNT - GRANT + 1
    assert raylet_of(ME) not in router.links
