"""Frames between worlds: in order, once, and nobody else's."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hpcray.core.gcs.handshake import link_key
from hpcray.transport.base import PeerLost, TransportError
from hpcray.transport.ucx_control import _FRAME, _HANDSHAKE, UcxControl
from hpcray.transport.ucx_data import _DATA, UcxData
from hpcray.transport.ucx_engine import UcxEngine, load

try:
    load()
except TransportError as error:
    pytest.skip(str(error), allow_module_level=True)

SECRET = b"s" * 32


class Side:
    """One node of a world of its own."""

    def __init__(self, rank: int, secret: bytes = SECRET) -> None:
        self.engine = UcxEngine(rank, secret, one_host=True)
        self.data = UcxData(self.engine)
        self.control = UcxControl(self.engine, lambda source, dest: link_key(secret, source, dest), rank)
        self.got: list[tuple[int, bytes]] = []

    def meet(self, other: Side) -> None:
        self.data.connect(other.control.rank, other.engine.address(), False)
        self.control.grow(other.control.rank + 1)

    def turn(self) -> None:
        self.got += self.control.poll()
        self.data.progress()
        self.control.lost()


@pytest.fixture
def sides() -> Iterator[list[Side]]:
    """Nodes 0 and 1, who know each other."""
    found = [Side(0), Side(1)]
    found[0].meet(found[1])
    found[1].meet(found[0])
    yield found
    for side in found:
        side.control.close()
        side.data.close()


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def until(condition: Callable[[], Any], *sides: Side, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        for side in sides:
            side.turn()


def test_frames_of_all_sizes_arrive_in_order(sides: list[Side]) -> None:
    sent = [bytes([number % 251]) * (size + number) for number in range(40) for size in (0, 100, 10_000, 1_000_000)]
    for frame in sent:
        sides[0].control.send(1, frame)
    until(lambda: len(sides[1].got) >= len(sent), *sides)
    assert sides[1].got == [(0, frame) for frame in sent]
    until(lambda: len(sides[0].control._links[1].retained) < 70, *sides)  # acknowledged without an answer


def test_a_link_that_breaks_loses_and_repeats_nothing(sides: list[Side]) -> None:
    one, other = sides
    sent = [number.to_bytes(4, "big") for number in range(300)]
    for number, frame in enumerate(sent):
        one.control.send(1, frame)
        if number in (100, 200):
            one.engine._drop_endpoint(1)
            one.engine.link_broken(1, one.engine.link(1), "cut by the test")
        if number % 10 == 0:
            one.turn()
            other.turn()
    until(lambda: len(other.got) >= len(sent), *sides)
    assert other.got == [(0, frame) for frame in sent]


@pytest.mark.parametrize("count", [2_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_strangers_are_not_heard_and_cost_no_memory(sides: list[Side], count: int) -> None:
    """They may know the tag, from the wire: not the key."""
    one, other = sides
    stranger = Side(0, b"x" * 32)
    endpoint = stranger.engine.visit(other.engine.address(), False)
    lib = stranger.engine.lib
    right, wrong = _FRAME | one.engine.label(0, 1, 0), _FRAME | 12345
    kept: deque[tuple[Any, Any]] = deque(maxlen=5_000)
    rng, resident = random.Random(count), 0
    for number in range(count):
        size = 33 + number % 100
        noise = rng.randbytes(size + 7) if count > 2_000 else number.to_bytes(8, "little") * (size // 8 + 1)
        array = stranger.engine.array(bytearray(noise))
        kept.append((endpoint.tag_send(array, lib.UCXXTag(right if number % 2 else wrong)), array))
        if number % 100 == 0:
            stranger.turn()
            other.turn()
        if number == 50_000:
            resident = resident_bytes()
    one.control.send(1, b"true")
    until(lambda: other.control.dropped >= count and other.got, stranger, *sides)
    assert other.got == [(0, b"true")]
    assert len(other.control._discards) < 2000 and not other.control._landing
    assert not resident or resident_bytes() - resident < 64 << 20, "950 000 further frames cost no memory"


class MeasuredWorker:
    """A UCX worker of ucxx 0.48 and older, as far as it matters here: `tag_recv_with_handle` writes the whole message,
    however short the buffer is. It refuses what these would write beyond the buffer's end."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def tag_recv_with_handle(self, buffer: Any, found: Any) -> Any:
        assert buffer.nbytes == found.length, f"a message of {found.length} bytes into {buffer.nbytes}"
        return self._worker.tag_recv_with_handle(buffer, found)


@pytest.mark.parametrize("size", [100, 10_000, 3_000_000])
@pytest.mark.parametrize("discarder", ["frames", "handshakes", "objects"])
def test_nothing_is_written_behind_the_buffer_of_a_message_that_is_thrown_away(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch, discarder: str, size: int
) -> None:
    one, other = sides
    other.engine.worker = MeasuredWorker(other.engine.worker)
    array, guarded = other.engine.array, []

    def guard(buffer: Any) -> Any:
        """The same number of bytes, with zeros behind them."""
        view = memoryview(bytearray(len(buffer) + 2 * size))
        guarded.append((view, len(buffer)))
        return array(view[: len(buffer)])

    monkeypatch.setattr(other.engine, "array", guard)
    tag = {"frames": _FRAME | 12345, "handshakes": _HANDSHAKE | 12345, "objects": _DATA | 12345}[discarder]
    content = one.engine.array(bytearray(b"\xff" * size))
    request = one.engine.endpoint(1).tag_send(content, one.engine.lib.UCXXTag(tag))

    def thrown_away() -> bool:
        return guarded and request.completed and not other.control._discards and not other.data._flights

    until(thrown_away, *sides)
    request.check_error()
    assert [length for _, length in guarded] == [1], "a stranger's message gets no memory"
    assert not any(bytes(view[length:]).strip(b"\0") for view, length in guarded)
    monkeypatch.undo()
    one.control.send(1, b"next")
    until(lambda: other.got, *sides)
    assert other.got == [(0, b"next")]


def test_a_frame_that_is_sent_again_is_dropped(sides: list[Side]) -> None:
    one, other = sides
    one.control.send(1, b"once")
    until(lambda: other.got, *sides)
    link = one.control._link(1)
    one.control._post(1, link, 1, b"once")
    one.control.send(1, b"next")
    until(lambda: len(other.got) >= 2, *sides)
    assert [frame for _, frame in other.got] == [b"once", b"next"] and other.control.dropped == 1


def test_no_byte_of_a_frame_can_be_changed(sides: list[Side], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every frame has a MAC over its numbers and its content, an acknowledgement too."""
    one, other = sides
    made: list[bytes] = []
    array = one.engine.array
    monkeypatch.setattr(one.engine, "array", lambda buffer: made.append(bytes(buffer)) or array(buffer))
    one.control.send(1, b"frame")
    one.control._post(1, one.control._link(1), 0, b"")
    until(lambda: other.got, *sides)
    frames = [frame for frame in made if len(frame) >= 32]
    assert [len(frame) for frame in frames] == [37, 32]
    link = other.control._link(0)
    link.received = 0  # as if the first had not come
    changed = [
        bytearray(frame[:at] + bytes([frame[at] ^ bit]) + frame[at + 1 :])
        for frame in frames
        for at in range(len(frame))
        for bit in (1, 128)
    ]
    for frame in [*changed, *(bytearray(frame + b"+") for frame in frames)]:
        other.control._read(0, link, frame)
    assert other.control.dropped == len(changed) + 2 and not other.control._arrived and link.received == 0
    other.control._read(0, link, bytearray(frames[0]))
    assert other.control._arrived == [(0, b"frame")]


def test_nothing_is_sent_to_a_node_that_was_declared_dead(sides: list[Side]) -> None:
    one, _ = sides
    one.control.forget(1, "declared dead")
    with pytest.raises(PeerLost, match="declared dead"):
        one.control.send(1, b"late")


def test_a_node_that_joins_may_be_the_first_to_speak() -> None:
    old, young = Side(0), Side(7)
    young.meet(old)
    young.control.send(0, b"hello")
    until(lambda: old.got, old, young)
    assert old.got == [(7, b"hello")]
