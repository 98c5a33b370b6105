"""`attach.line`: whatever pipes do, each payload arrives once, in order; what is urgent does not wait for the rest."""

from __future__ import annotations

import random
import socket
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcray.attach.carrier import JobPlace
from hpcray.attach.endpoint import FILE, PLACE, Channel
from hpcray.attach.line import (
    ACK,
    DATA,
    HEADER,
    HEARTBEAT,
    LARGEST_WINDOW,
    MOST_URGENT,
    PIECE,
    SILENCE,
    SMALLEST_WINDOW,
    TARGET_DELAY,
    LineError,
    ResumableLine,
    Transfer,
)
from hpcray.attach.near_end import Attaching, NearEnd, _Driver
from hpcray.common.ids import OBJECT_BYTES
from hpcray.protocol import messages as m


class _Pipe:
    """Two lines and what is on its way between them, in bytes."""

    def __init__(self) -> None:
        self.ends = (ResumableLine(), ResumableLine())
        self.way: tuple[deque[bytes], deque[bytes]] = (deque(), deque())  # from end 0, from end 1
        self.got: tuple[list[bytes], list[bytes]] = ([], [])
        self.now = 0.0
        self.open()

    def open(self) -> None:
        for end, way in zip(self.ends, self.way, strict=True):
            way.clear()
            end.pipe_opened(self.now)

    def cut(self) -> None:
        for end in self.ends:
            end.pipe_lost()

    def write(self, side: int, room: int = 1 << 20) -> None:
        data = b"".join(self.ends[side].take(self.now, room))
        if data:
            self.way[side].append(data)

    def read(self, side: int, most: int = 1 << 30) -> None:
        """Side reads some of what the other one has written."""
        way = self.way[1 - side]
        if way:
            data = way.popleft()
            if len(data) > most:
                way.appendleft(data[most:])
            self.got[side].extend(self.ends[side].feed(data[:most], self.now))

    def run(self) -> None:
        """All that is queued arrives."""
        for _ in range(10_000):
            self.now += 0.01
            for side in (0, 1):
                self.write(side)
                self.read(side)
            if all(end.is_settled for end in self.ends) and not any(self.way):
                return
        raise AssertionError("it does not come to an end")


def _pieces(name: bytes, count: int) -> Iterator[bytes]:
    return (name + b"%d" % number for number in range(count))


@settings(max_examples=80)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.integers(0, 1), st.integers(0, 3000)),
            st.tuples(st.just("transfer"), st.integers(0, 1), st.integers(1, 6)),
            st.tuples(st.just("write"), st.integers(0, 1), st.integers(1, 5000)),
            st.tuples(st.just("read"), st.integers(0, 1), st.integers(1, 5000)),
            st.tuples(st.just("break"), st.just(0), st.integers(0, 5)),
        ),
        max_size=60,
    ),
    st.randoms(use_true_random=False),
)
def test_each_payload_arrives_once_and_in_order_over_pipes_that_break(
    steps: list[tuple[str, int, int]], dice: random.Random
) -> None:
    pipe = _Pipe()
    sent: tuple[list[bytes], list[bytes]] = ([], [])
    transfers: tuple[dict[bytes, list[bytes]], dict[bytes, list[bytes]]] = ({}, {})
    for number, (what, side, size) in enumerate(steps):
        name = b"%d:" % number
        if what == "send":
            sent[side].append(name + bytes(size))
            pipe.ends[side].send(sent[side][-1])
        elif what == "transfer":
            transfers[side][name] = [*_pieces(name, size), name + b"end"]
            pipe.ends[side].transfer(Transfer(0, _pieces(name, size), [name + b"end"]))
        elif what == "write":
            pipe.write(side, size)
        elif what == "read":
            pipe.read(side, size)
        else:
            pipe.cut()
            for way in pipe.way:  # a part of what is on its way gets lost
                while way and dice.random() < 0.7:
                    way.pop()
            for end in pipe.ends:
                end.send(b"while there is no pipe %d" % number)
            for mine in sent:
                mine.append(b"while there is no pipe %d" % number)
            pipe.open()
    pipe.run()
    for side in (0, 1):
        got = pipe.got[1 - side]
        assert [one for one in got if one in sent[side]] == sent[side]
        for expected in transfers[side].values():
            assert [one for one in got if one in expected] == expected
        assert len(got) == len(sent[side]) + sum(map(len, transfers[side].values()))


def test_what_is_urgent_passes_what_is_long() -> None:
    pipe = _Pipe()
    pipe.run()
    line = pipe.ends[0]
    line.transfer(Transfer(0, (bytes(PIECE) for _ in range(100)), []))
    pipe.write(0)
    line.send(b"urgent")
    pipe.write(0)
    on_its_way = sum(map(len, pipe.way[0]))
    assert on_its_way <= SMALLEST_WINDOW + PIECE + 1000, "no more than a window is before it"
    while b"urgent" not in pipe.got[1]:
        pipe.read(1)
    pipe.run()
    assert len(pipe.got[1]) == 101


def test_transfers_take_turns() -> None:
    pipe = _Pipe()
    line = pipe.ends[0]
    line.transfer(Transfer(1, _pieces(b"long", 50), []))
    line.transfer(Transfer(2, _pieces(b"short", 2), []))
    pipe.run()
    assert pipe.got[1].index(b"short1") < 6


def test_the_window_follows_the_delay() -> None:
    """A slow line gets a small window, a fast one a large one: see `TARGET_DELAY`."""
    for rate in (2e6, 2e7, 2e9):  # bytes per second
        line, far = ResumableLine(), ResumableLine()
        line.pipe_opened(0.0)
        far.pipe_opened(0.0)
        line.feed(b"".join(far.take(0.0, 1)), 0.0)
        far.feed(b"".join(line.take(0.0, 1)), 0.0)
        line.transfer(Transfer(0, (bytes(PIECE) for _ in range(3000)), []))
        now, arrives, delays = 0.0, 0.0, []
        way: deque[tuple[float, float, bytes]] = deque()
        for _ in range(2000):
            for record in line.take(now, 1 << 30):
                arrives = max(arrives, now) + len(record) / rate
                way.append((arrives, now, record))
            if not way:
                break
            now, left, record = way.popleft()
            far.feed(record, now)
            delays.append(now - left)
            line.feed(b"".join(far.take(now, 1 << 20)), now)
        assert max(delays[len(delays) // 2 :]) <= max(2.5 * TARGET_DELAY, 1.5 * (SMALLEST_WINDOW + PIECE) / rate), rate
        assert rate < 1e9 or line.window == LARGEST_WINDOW
        assert rate > 1e7 or line.window < LARGEST_WINDOW // 8


def test_an_end_that_cannot_go_on_stops_the_other_one() -> None:
    pipe = _Pipe()
    pipe.run()
    far = pipe.ends[1]
    far.holds_back = True
    pieces = iter([bytes(PIECE)] * 100)
    pipe.ends[0].transfer(Transfer(0, pieces, []))
    for _ in range(50):
        pipe.now += 0.01
        for side in (0, 1):
            pipe.write(side)
            pipe.read(side)
    assert len(pipe.got[1]) * PIECE <= SMALLEST_WINDOW + PIECE
    pipe.ends[0].send(bytes(MOST_URGENT))
    assert pipe.ends[0].is_full
    far.holds_back = False
    pipe.run()
    assert len(pipe.got[1]) == 101 and not pipe.ends[0].is_full


def test_an_answer_takes_the_acknowledgement_along() -> None:
    pipe = _Pipe()
    pipe.run()
    pipe.ends[0].send(b"question")
    pipe.write(0)
    pipe.read(1)
    pipe.write(1)
    assert not pipe.way[1], "a small record before the answer would delay it"
    pipe.ends[1].send(b"answer")
    pipe.write(1)
    pipe.read(0)
    assert pipe.got[0] == [b"answer"] and pipe.ends[0].is_settled
    pipe.ends[0].send(b"no question")
    pipe.write(0)
    pipe.read(1)
    pipe.now += pipe.ends[1].next_look(pipe.now)
    pipe.write(1)
    pipe.read(0)
    assert pipe.ends[0].is_settled, "without an answer it comes by itself"


def test_what_a_channel_had_queued_goes_with_it() -> None:
    pipe = _Pipe()
    pipe.ends[0].transfer(Transfer(1, _pieces(b"a", 5), [b"after"]))
    pipe.ends[0].transfer(Transfer(2, _pieces(b"b", 2), []))
    pipe.ends[0].drop_channel(1)
    pipe.run()
    assert pipe.got[1] == [b"b0", b"b1"]


def test_silence_is_noticed_and_an_idle_line_is_not_silent() -> None:
    pipe = _Pipe()
    pipe.run()
    for _ in range(int(3 * SILENCE / HEARTBEAT)):
        pipe.now += HEARTBEAT
        for side in (0, 1):
            pipe.write(side)
            pipe.read(side)
            assert not pipe.ends[side].is_silent(pipe.now)
    pipe.now += SILENCE + 0.1
    assert all(end.is_silent(pipe.now) for end in pipe.ends)


@pytest.mark.parametrize(
    "record",
    [
        HEADER.pack(77, 0, 0, 0),
        HEADER.pack(ACK, 3, 0, 0) + b"abc",
        HEADER.pack(DATA, 1 << 31, 1, 0),
        HEADER.pack(DATA, 1, 2, 0) + b"a",
    ],
)
def test_what_is_no_record_is_refused(record: bytes) -> None:
    pipe = _Pipe()
    pipe.run()
    with pytest.raises(LineError):
        pipe.ends[0].feed(record, 0.0)


# ------------------------------------------------------------ the near end


def test_an_object_that_the_near_end_has_no_room_for_is_an_error_and_has_no_hole(tmp_path: Path) -> None:
    """The disk is full for a moment, or a cleaner has removed the directory: later pieces may be written again."""
    near = NearEnd.__new__(NearEnd)
    near.line = ResumableLine()
    near.line.pipe_opened(0.0)
    near._order = Attaching(JobPlace("slurm://1"), 1.0, str(tmp_path / "gone"))
    ours, theirs = socket.socketpair()
    channel = Channel(1, ours)
    channel.proc, channel.raylet = bytes(8), bytes(7) + b"\1"
    driver = _Driver()
    near.channels, near._drivers = {1: channel}, {1: driver}
    ident = b"i" * OBJECT_BYTES
    for at, text in ((0, b"first"), (5, b"second")):
        near.on_payload(FILE, 1, memoryview(ident + PLACE.pack(at) + text))
        (tmp_path / "gone").mkdir(exist_ok=True)
    answer = near._adapted(channel, driver, m.OnDisk(ident, "/proc/1/fd/1", 0, 11))
    assert isinstance(answer, m.StoreError) and "have no room in " in answer.reason
    assert driver.files == driver.not_written == {}
    for at, text in ((0, b"first"), (5, b"second")):
        near.on_payload(FILE, 1, memoryview(ident + PLACE.pack(at) + text))
    answer = near._adapted(channel, driver, m.OnDisk(ident, "/proc/1/fd/1", 0, 11))
    assert isinstance(answer, m.OnDisk) and Path(answer.path).read_bytes() == b"firstsecond", "there is room again"
    ours.close()
    theirs.close()
