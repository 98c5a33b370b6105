"""The simulated wires keep the promises of the real ones."""

from __future__ import annotations

import pytest
from helpers.loopback import LoopbackNet, seeded_delay
from hypothesis import given
from hypothesis import strategies as st

from hpcray.transport.base import FOREVER, ControlTransport, DataPlane, PeerLost


def net(size: int = 3, delay: float = 1.0) -> LoopbackNet:
    return LoopbackNet(size, lambda source, dest, length: delay)


def test_it_is_what_raylets_use() -> None:
    wires = net()
    control: ControlTransport = wires.controls[0]
    data: DataPlane = wires.planes[0]
    assert (control.rank, control.size, data.name) == (0, 3, "loopback")


def test_a_message_arrives_when_its_time_has_come() -> None:
    wires = net()
    wires.controls[0].send(1, b"a")
    assert wires.controls[1].arm() and wires.controls[1].patience() == 1.0
    wires.advance(0.9)
    assert wires.controls[1].poll() == []
    wires.advance(1.0)
    assert not wires.controls[1].arm() and wires.controls[1].patience() == 0.0
    assert wires.controls[1].poll() == [(0, b"a")]
    assert wires.next_event() == FOREVER and wires.controls[1].patience() == FOREVER


@given(
    delays=st.lists(st.floats(0, 10), min_size=1, max_size=20),
    sends=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=60),
)
def test_pairs_keep_their_order_whatever_the_delays(delays: list[float], sends: list[tuple[int, int]]) -> None:
    draws = iter(delays * 60)
    wires = LoopbackNet(3, lambda source, dest, length: next(draws))
    for number, (source, dest) in enumerate(sends):
        wires.controls[source].send(dest, b"%d" % number)
        wires.advance(wires.now + number % 3)
    wires.advance(1e9)
    for dest in range(3):
        arrived = wires.controls[dest].poll()
        for source in range(3):
            expected = [b"%d" % n for n, pair in enumerate(sends) if pair == (source, dest)]
            assert [data for origin, data in arrived if origin == source] == expected


def test_the_same_seed_is_the_same_run() -> None:
    def run(seed: int) -> list[tuple[float, list[tuple[int, bytes]]]]:
        wires = LoopbackNet(4, seeded_delay(seed))
        for number in range(40):
            wires.controls[number % 3].send(3, b"%d" % number)
        log = []
        while wires.next_event() < FOREVER:
            wires.advance(wires.next_event())
            log.append((wires.now, wires.controls[3].poll()))
        return log

    assert run(5) == run(5) != run(6)


def test_an_object_lands_in_its_place_and_both_sides_hear_of_it() -> None:
    wires = net()
    arenas = [bytearray(16) for _ in range(3)]
    for plane, arena in zip(wires.planes, arenas, strict=True):
        plane.register(memoryview(arena))
    arenas[0][2:6] = b"wire"
    wires.planes[1].receive(0, 9, 10, 4)
    wires.planes[0].send(1, 9, 2, 4)
    assert wires.planes[0].busy() and wires.planes[1].busy()
    wires.advance(1.0)
    assert wires.planes[1].progress() == [("received", 0, 9, None)]
    assert wires.planes[0].progress() == [("sent", 1, 9, None)]
    assert arenas[1] == b"\0" * 10 + b"wire" + b"\0" * 2
    assert not wires.planes[0].busy() and not wires.planes[1].busy()


def test_a_cancelled_receive_writes_nothing_and_its_sender_ends() -> None:
    wires = net()
    arena = bytearray(8)
    wires.planes[0].register(memoryview(bytearray(b"12345678")))
    wires.planes[1].register(memoryview(arena))
    wires.planes[1].receive(0, 1, 0, 8)
    wires.planes[0].send(1, 1, 0, 8)
    assert wires.planes[1].cancel(1)
    wires.advance(5.0)
    assert arena == bytes(8) and wires.planes[1].progress() == []
    assert wires.planes[0].progress() == [("sent", 1, 1, None)]


def test_a_wrong_size_is_an_error() -> None:
    wires = net()
    for plane in wires.planes:
        plane.register(memoryview(bytearray(8)))
    wires.planes[1].receive(0, 1, 0, 4)
    wires.planes[0].send(1, 1, 0, 8)
    wires.advance(5.0)
    ((what, node, tag, error),) = wires.planes[1].progress()
    assert (what, node, tag) == ("received", 0, 1) and error == "8 bytes came, 4 were expected"


def test_a_kill_is_noticed_ends_transfers_and_refuses_messages() -> None:
    wires = net()
    for plane in wires.planes:
        plane.register(memoryview(bytearray(8)))
    wires.planes[0].receive(1, 7, 0, 8)
    wires.planes[0].send(1, 8, 0, 8)
    wires.controls[1].send(0, b"last words")
    wires.kill(1, notice=2.0)
    wires.controls[0].send(1, b"into the void")
    wires.advance(3.0)
    assert wires.controls[0].poll() == [(1, b"last words")]
    assert [rank for rank, _ in wires.controls[0].lost()] == [1] and wires.controls[0].lost() == []
    assert {report[:3] for report in wires.planes[0].progress()} == {("received", 1, 7), ("sent", 1, 8)}
    with pytest.raises(PeerLost, match="rank 1 is lost"):
        wires.controls[0].send(1, b"x")
    assert wires.controls[1].poll() == []


def test_a_cut_link_is_silent_and_what_waited_comes_in_order_when_it_heals() -> None:
    wires = net()
    wires.cut(0, 1)
    wires.controls[0].send(1, b"first")
    wires.controls[0].send(1, b"second")
    wires.controls[0].send(2, b"elsewhere")
    wires.advance(10.0)
    assert wires.controls[1].poll() == [] and wires.controls[0].lost() == []
    assert wires.controls[2].poll() == [(0, b"elsewhere")]
    wires.heal(0, 1)
    assert wires.controls[1].poll() == [(0, b"first"), (0, b"second")]
