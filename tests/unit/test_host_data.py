"""Objects between nodes of one host: they come, both hear of it, and what is cancelled does not come."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
from host_kit import ARENA, BIG, SMALL, Host, copiers_of, held, make

from hpcray.runtime import host_copies, host_data
from hpcray.transport.base import FOREVER, DataPlane

__all__ = ["held", "make"]  # fixtures


def test_it_is_a_data_plane_with_the_name_of_the_wire(make: Callable[..., Host]) -> None:
    plane: DataPlane = make().planes[0]
    assert plane.name == "loopback" and plane.address() == b"" and plane.fileno() is not None
    assert not plane.busy() and plane.patience() == FOREVER


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [1, 100, SMALL, host_copies._INLINE, host_copies._INLINE + 1, BIG, 5 << 20])
def test_bytes_land_in_their_place_and_nowhere_else_and_both_hear_of_it(
    make: Callable[..., Host], size: int, threads: int
) -> None:
    host = make(threads=threads)
    data = host.fill(0, 1, 4096 + 7, size)
    host.planes[1].receive(0, 9, 8192 + 1, size)
    host.planes[0].send(1, 9, 4096 + 7, size)
    assert host.planes[0].busy() and host.planes[1].busy()
    host.run(0, 1, until=lambda: host.reports[0] and host.reports[1])
    assert host.reports == {0: [("sent", 1, 9, None)], 1: [("received", 0, 9, None)]}
    assert host.arenas[1][8193 : 8193 + size] == data
    assert not any(host.arenas[1][:8193]) and not any(host.arenas[1][8193 + size : 8193 + size + 4096])
    assert not host.planes[0].busy() and not host.planes[1].busy()
    assert host.net.next_event() == FOREVER, "nothing went over the wire"


def test_small_ones_take_the_wire(make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_data, "LEAST", SMALL)
    host = make()
    for tag, size in enumerate((SMALL - 1, SMALL)):
        host.planes[1].receive(0, tag, 0, size)
        host.planes[0].send(1, tag, 0, size)
        assert host.net.next_event() < FOREVER
    host.run(0, 1, until=lambda: host.reports[0] and host.reports[1])
    assert host.reports == {0: [("sent", 1, 1, None)], 1: [("received", 0, 1, None)]}
    host.net.advance(1.0)
    assert host.planes[1].progress() == [("received", 0, 0, None)] and not host.planes[1].busy()


@pytest.mark.parametrize("threads", [1, 2])
def test_many_of_all_sizes_between_all_nodes_at_once(make: Callable[..., Host], threads: int) -> None:
    host, draw = make(3, threads=threads), random.Random(3)
    half, room, each = ARENA // 2, ARENA // 2 // 40, 40
    sources = [host.fill(node, node, 0, half) for node in range(3)]
    wanted = []
    for dest in range(3):
        for number in range(each):
            source, size = (dest + 1 + number % 2) % 3, draw.choice([0, 1, 4095, SMALL, room - 64])
            wanted.append((dest, source, number, half + number * room, draw.randrange(half - size), size))
            host.planes[dest].receive(source, dest << 48 | number, half + number * room, size)
    draw.shuffle(wanted)
    for dest, source, number, _, offset, size in wanted:
        host.planes[source].send(dest, dest << 48 | number, offset, size)
        if not size:
            host.net.advance(host.net.now + 1)
    host.run(0, 1, 2, until=lambda: sum(map(len, host.reports.values())) == 2 * len(wanted))
    assert all(error is None for told in host.reports.values() for *_, error in told)
    for dest, source, number, target, offset, size in wanted:
        assert host.arenas[dest][target : target + size] == sources[source][offset : offset + size], number
        assert not any(host.arenas[dest][target + size : target + size + 64])


def test_who_never_met_uses_the_wire(make: Callable[..., Host]) -> None:
    host = make(meet=False)
    data = host.fill(0, 1, 0, SMALL)
    host.planes[1].meet({0: host.dirs[0] + "/nowhere", 5: "/"})
    host.planes[1].receive(0, 1, 0, SMALL)
    host.planes[0].send(1, 1, 0, SMALL)
    host.net.advance(1.0)
    assert host.planes[1].progress() == [("received", 0, 1, None)] and host.arenas[1][:SMALL] == data
    assert host.planes[0].progress() == [("sent", 1, 1, None)]
    assert not host.planes[1].busy()


@pytest.mark.parametrize("turns", range(7))
def test_a_transfer_while_they_meet_goes_one_way_or_the_other(make: Callable[..., Host], turns: int) -> None:
    host = make(meet=False)
    data = host.fill(0, 1, 0, SMALL)
    host.planes[1].meet({0: host.dirs[0]})
    for turn in range(turns):
        assert host.planes[turn % 2].progress() == []
    host.planes[1].receive(0, 1, 0, SMALL)
    host.planes[0].send(1, 1, 0, SMALL)
    over_the_wire = host.net.next_event() < FOREVER
    assert over_the_wire is (turns < 5)
    for turn in range(4):
        host.reports[turn % 2] += host.planes[turn % 2].progress()
    host.net.advance(1.0)
    host.run(0, 1, until=lambda: host.reports[0] and host.reports[1])
    assert host.reports == {0: [("sent", 1, 1, None)], 1: [("received", 0, 1, None)]}
    assert host.arenas[1][:SMALL] == data and not host.planes[1].busy() and not host.planes[0].busy()


@pytest.mark.parametrize("size", [SMALL, BIG])
def test_a_cancelled_receive_writes_nothing_and_its_sender_ends(make: Callable[..., Host], size: int) -> None:
    host = make()
    host.fill(0, 1, 0, size)
    host.planes[1].receive(0, 1, 0, size)
    assert host.planes[1].cancel(1) is True
    host.planes[0].send(1, 1, 0, size)
    host.run(0, 1, until=lambda: host.reports[0])
    assert host.reports == {0: [("sent", 1, 1, None)], 1: []}
    assert not any(host.arenas[1][:4096]) and not host.planes[1].busy()


def test_cancelling_what_is_being_copied_waits_for_its_report(make: Callable[..., Host], held: threading.Event) -> None:
    host = make()
    data = host.fill(0, 1, 0, BIG)
    host.planes[1].receive(0, 1, 0, BIG)
    host.planes[0].send(1, 1, 0, BIG)
    assert host.planes[1].progress() == []
    assert host.planes[1].cancel(1) is False and host.planes[1].busy()
    held.set()
    host.run(0, 1, until=lambda: host.reports[0] and host.reports[1])
    assert host.reports == {0: [("sent", 1, 1, None)], 1: [("received", 0, 1, None)]}
    assert host.arenas[1][:BIG] == data


def test_cancelling_what_waits_for_a_thread_drops_it(make: Callable[..., Host], held: threading.Event) -> None:
    host = make()
    count = host_copies._AHEAD * copiers_of(host) + 1
    for tag in range(count):
        host.planes[1].receive(0, tag, 0, BIG)
        host.planes[0].send(1, tag, 0, BIG)
    assert host.planes[1].progress() == []
    assert [host.planes[1].cancel(tag) for tag in range(count)] == [False] * (count - 1) + [True]
    assert host.planes[0].progress() == [("sent", 1, count - 1, None)]
    held.set()
    host.run(0, 1, until=lambda: len(host.reports[0]) == count - 1 and len(host.reports[1]) == count - 1)
    assert not host.planes[0].busy() and not host.planes[1].busy()


def test_a_wrong_size_is_an_error_for_who_expects_it(make: Callable[..., Host]) -> None:
    host = make()
    host.fill(0, 1, 0, SMALL)
    host.planes[1].receive(0, 1, 0, SMALL - 1)
    host.planes[0].send(1, 1, 0, SMALL)
    host.run(0, 1, until=lambda: host.reports[0] and host.reports[1])
    assert host.reports[0] == [("sent", 1, 1, None)]
    assert host.reports[1] == [("received", 0, 1, f"{SMALL} bytes came, {SMALL - 1} were expected")]
    assert not any(host.arenas[1][:SMALL]) and not host.planes[1].busy()


def test_what_nobody_expects_is_acknowledged(make: Callable[..., Host]) -> None:
    host = make()
    host.planes[0].send(1, 77, 0, BIG)
    host.run(0, 1, until=lambda: host.reports[0])
    assert host.reports == {0: [("sent", 1, 77, None)], 1: []}


def test_thousands_of_offers_to_one_that_does_not_read(make: Callable[..., Host]) -> None:
    host, count = make(), 5_000
    data = host.fill(0, 1, 0, count)
    for tag in range(count):
        host.planes[1].receive(0, tag, tag, 1)
    for tag in range(count):
        host.planes[0].send(1, tag, tag, 1)
    assert host.planes[0].progress() == [] and host.planes[0]._offers._readers[1][0].blocked
    host.run(1, 0, until=lambda: len(host.reports[0]) == count and len(host.reports[1]) == count)
    assert {report[2] for report in host.reports[0]} == {report[2] for report in host.reports[1]} == set(range(count))
    assert all(report[3] is None for report in host.reports[0] + host.reports[1])
    assert host.arenas[1][:count] == data


def test_thousands_of_acknowledgements_to_one_that_does_not_read(make: Callable[..., Host]) -> None:
    host, count = make(), 20_000
    host.fill(0, 1, 0, count)
    for tag in range(count):
        host.planes[1].receive(0, tag, tag, 1)
        host.planes[0].send(1, tag, tag, 1)
        if tag % 8 == 7:
            host.reports[1] += host.planes[1].progress()
            host.planes[0]._offers._flush(host.planes[0]._offers._readers[1][0])  # which reads nothing
    host.run(1, until=lambda: not host.planes[1]._copies._small)
    early = len(host.reports[1])
    assert early < count, "what is not acknowledged is not reported"
    waiting = next(
        tag for tag in range(count) if ("received", 0, tag, None) not in host.reports[1][-300:] and tag > early
    )
    assert host.planes[1].cancel(waiting) is False, "its report comes"
    host.run(0, 1, until=lambda: len(host.reports[0]) == count and len(host.reports[1]) == count)
