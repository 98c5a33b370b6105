"""What each rank of a transport test does: `mpirun -n N python wire_scenarios.py NAME`, prints `NAME ok`."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from sys import argv

from helpers.links import break_tcp
from helpers.wires import Wires

from hpcray.transport.base import PeerLost

SIZES = (0, 1, 100, 4096, 70_000, 1 << 20, (1 << 20) + 1, 5 << 20)


def message(source: int, number: int) -> bytes:
    """A message of which every byte is known: its size, source and number decide."""
    size = SIZES[number % len(SIZES)]
    return bytes([source, number % 251]) + random.Random(number).randbytes(64) * (size // 64)


def control() -> None:
    """All to all, small and large mixed, everybody at once: complete, intact, in order per pair."""
    count = 200
    wires = Wires()
    for number in range(count):
        for dest in range(wires.size):
            if dest != wires.rank:
                wires.control.send(dest, message(wires.rank, number))
        wires.turn(0.0)
    seen = [0] * wires.size
    for _ in range(count * (wires.size - 1)):
        source, data = wires.receive()
        assert data == message(source, seen[source]), (source, seen[source], len(data))
        seen[source] += 1
    wires.until(lambda: not wires.control.pending(), "the last sends")
    wires.close()


def asleep() -> None:
    """A raylet that sleeps in epoll without a limit wakes for every message: one bell lost, and this runs into TICK."""
    wires = Wires()
    for number in range(500):
        for turn in range(2):
            if wires.rank == turn:
                wires.control.send(1 - turn, b"%d" % number)
            else:
                assert wires.receive() == (turn, b"%d" % number)
    wires.close()


def burst() -> None:
    """A sender that never turns its loop, to a peer that sleeps: nothing is lost, nothing is late."""
    wires = Wires()
    count = 5000
    if wires.rank == 0:
        for number in range(count):
            wires.control.send(1, b"%d" % number)
        assert wires.receive() == (1, b"all")
    else:
        for number in range(count):
            assert wires.receive() == (0, b"%d" % number)
        wires.control.send(0, b"all")
    wires.close()


def data() -> None:
    """Objects of many sizes, both ways at once, into the right places, and none beside them."""
    sizes = (0, 1, 4097, 100_001, 1 << 20, (9 << 20) + 5)
    room = 16 << 20
    wires = Wires(2 * len(sizes) * room)
    peer = 1 - wires.rank
    for index, size in enumerate(sizes):
        pattern = bytes([wires.rank + 1, index, 7])
        wires.arena[index * room : index * room + size] = (pattern * (size // 3 + 1))[:size]
    base = len(sizes) * room
    for index, size in enumerate(sizes):
        wires.data.receive(peer, index, base + index * room, size)
    wires.control.send(peer, b"send")
    assert wires.receive() == (peer, b"send")
    for index in range(len(sizes)):
        wires.data.send(peer, index, index * room, sizes[index])
    reports = {wires.report() for _ in range(2 * len(sizes))}
    assert reports == {(what, peer, index, None) for what in ("sent", "received") for index in range(len(sizes))}
    for index, size in enumerate(sizes):
        place = wires.arena[base + index * room : base + (index + 1) * room]
        pattern = bytes([peer + 1, index, 7])
        assert place[:size] == (pattern * (size // 3 + 1))[:size], f"object {index}"
        assert not any(place[size : size + 64]), f"bytes beside object {index}"
    assert not wires.data.busy()
    wires.control.send(peer, b"done")
    assert wires.receive() == (peer, b"done")
    wires.close()


def cancel() -> None:
    """A cancelled receive writes nothing, its sender ends all the same, and a wrong size is an error."""
    size = 8 << 20
    wires = Wires(2 * size)
    if wires.rank == 0:
        wires.data.receive(1, 1, 0, size)
        wires.data.receive(1, 2, size, size // 8)
        assert wires.data.cancel(1)
        wires.control.send(1, b"send")
        what, node, tag, error = wires.report()
        assert (what, node, tag) == ("received", 1, 2) and error, error
        assert wires.receive() == (1, b"sent")
        assert not any(wires.arena[:4096]) and not any(wires.arena[size - 4096 : size])
        wires.data.receive(1, 3, 0, size)
        wires.control.send(1, b"send")
        assert wires.report() == ("received", 1, 3, None)
        assert wires.arena[:size] == b"\7" * size
        wires.control.send(1, b"done")
        assert wires.receive() == (1, b"done")
    else:
        wires.arena[:size] = b"\7" * size
        wires.receive()
        wires.data.send(0, 1, 0, size)
        wires.data.send(0, 2, 0, size)
        assert {wires.report()[2] for _ in range(2)} == {1, 2}
        wires.control.send(0, b"sent")
        wires.receive()
        wires.data.send(0, 3, 0, size)
        assert wires.report() == ("sent", 0, 3, None)
        assert wires.receive() == (0, b"done")
        wires.control.send(0, b"done")
    wires.close()


class Pair:
    """Two ranks that send each other objects and break the links between them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.wires = Wires(2 * size)
        self.peer = 1 - self.wires.rank
        self.tag = 0
        self.wires.control.send(self.peer, b"%d" % os.getpid())
        self.peer_pid = int(self.wires.receive()[1])

    def meet(self, word: bytes) -> None:
        """Wait until the other rank is here too."""
        self.wires.control.send(self.peer, word)
        self.wires.expect(self.peer, word)

    def exchange(self, length: int, disturb: Callable[[], None] = lambda: None) -> bool:
        """Send each other objects; True if all arrived. Every transfer ends, well or not."""
        wires, peer = self.wires, self.peer
        self.tag += 1
        filling = bytes([100 * wires.rank + self.tag])
        wires.arena[: self.size] = filling * self.size
        wires.data.receive(peer, self.tag, self.size, length)
        self.meet(b"send")
        wires.data.send(peer, self.tag, 0, length)
        disturb()
        reports = {wires.report() for _ in range(2)}
        assert {report[:3] for report in reports} == {("sent", peer, self.tag), ("received", peer, self.tag)}, reports
        good = not any(report[3] for report in reports if report[0] == "received")
        if good:
            assert wires.arena[self.size : self.size + length] == bytes([100 * peer + self.tag]) * length
        wires.control.send(peer, b"good" if good else b"bad")
        wires.until(lambda: wires.inbox, "the other rank's result")
        return wires.receive()[1] == b"good" and good

    def exchange_again(self, length: int) -> None:
        """What was sent before the other end noticed that the link broke may fail, but not for long."""
        deadline = time.monotonic() + 5.0
        while not self.exchange(length):
            assert time.monotonic() < deadline, "the link is still broken"
            time.sleep(0.1)

    def break_link(self) -> None:
        """The endpoint alone where UCX uses shared memory, else every TCP connection between the two."""
        if self.wires.rank == 0:
            return
        if "tcp" in os.environ["UCX_TLS"]:
            assert break_tcp(os.getpid(), self.peer_pid), "no TCP connection to break"
        else:
            self.wires.data._engine._endpoints[self.peer].close()


def links() -> None:
    """Links break again and again while both ranks live: objects and bells go over new ones, in both directions.

    Between two breaks passes more time than so many failures of a link may have.
    """
    pair = Pair(3 << 20)
    engine = pair.wires.data._engine
    assert pair.exchange(pair.size)
    for _ in range(4):
        pair.meet(b"whole")
        pair.break_link()
        pair.meet(b"broken")
        pair.exchange_again(pair.size)
        pair.exchange_again(5000)
        engine._failures.recent.clear()
    assert not pair.wires.lost, pair.wires.lost
    assert len(engine._endpoints) == 1
    pair.wires.close()


def underway() -> None:
    """A link breaks while objects travel both ways: every transfer ends, in time, and the next one succeeds."""
    pair = Pair(64 << 20)

    def disturb() -> None:
        pair.wires.turn(0.0)
        pair.break_link()

    assert not pair.exchange(pair.size, disturb)
    pair.exchange_again(pair.size)
    pair.meet(b"done")
    assert not pair.wires.lost, pair.wires.lost
    pair.wires.close()


def death() -> None:
    """Rank 1 is killed while rank 0 and it exchange objects; ranks 0 and 2 notice, go on, and their transfers end."""
    size = 256 << 20
    wires = Wires(2 * size)
    if wires.rank == 1:
        wires.data.receive(0, 2, size, size)
        wires.control.send(0, b"send")
        wires.expect(0, b"send")
        wires.data.send(0, 1, 0, size)
        wires.turn(0.0)
        wires.turn(0.0)
        os.kill(os.getpid(), signal.SIGKILL)
    if wires.rank == 0:
        wires.data.receive(1, 1, 0, size)
        wires.expect(1, b"send")
        wires.control.send(1, b"send")
        wires.data.send(1, 2, size, size)
    with contextlib.suppress(PeerLost):
        while 1 not in wires.lost:
            wires.control.send(1, b"alive?")  # also what a raylet's heartbeats do
            wires.turn(0.1)
    wires.until(lambda: 1 in wires.lost, "the news of the death", 0.1)
    wires.data.forget(1, "declared dead")
    wires.control.forget(1, "declared dead")
    if wires.rank == 0:
        wires.until(lambda: len(wires.reports) == 2, "both transfers to end", 0.1)
        assert {report[:3] for report in wires.reports} == {("received", 1, 1), ("sent", 1, 2)}, wires.reports
    try:
        wires.control.send(1, b"too late")
        raise AssertionError("a message to a dead rank was accepted")
    except PeerLost as error:
        assert error.rank == 1
    peer = 2 - wires.rank
    for number in range(100):
        wires.control.send(peer, b"%d" % number)
        wires.expect(peer, b"%d" % number)
    print("death ok", flush=True)
    # Nobody may end before the others have what it sent, and MPI cannot tell: so each waits for the other's last word.
    wires.control.send(peer, b"bye")
    wires.expect(peer, b"bye")
    wires.until(lambda: not wires.control.pending(), "the last send")
    os._exit(0)


def main() -> None:
    """Run the scenario named on the command line."""
    name = argv[1]
    {each.__name__: each for each in (control, asleep, burst, data, cancel, links, underway, death)}[name]()
    print(name, "ok", flush=True)


main()
