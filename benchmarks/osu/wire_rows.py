"""Latency and bandwidth between two ranks: hpcray's wires, mpi4py and ucxx, in the same two processes and arenas.

Run by run.py under `mpirun -n 2`. Latency is half a round trip, the median of all. Bandwidth is a window of messages
one way and one small answer, as in osu_bw; the best repetition, since this measures wires and not the neighbours.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Protocol

import raw
from table import Column

from hpcray.testing.wires import Wires

SIZES = tuple(1 << power for power in range(3, 29))
LARGEST = SIZES[-1]
BUDGET = 1 << 30
WINDOW = 64
IN_FLIGHT = 256 << 20
REPEATS = 3


class Wire(Protocol):
    """What is measured: messages between the arenas of rank 0 and rank 1."""

    def prepare(self, count: int, size: int) -> None:
        """`count` messages of `size` bytes will come; called on the receiving side before any is sent."""

    def send(self, size: int) -> None:
        """Start sending one."""

    def sent(self, count: int) -> None:
        """Wait until the last `count` have been sent."""

    def received(self, count: int) -> None:
        """Wait until `count` more have come."""


class Control:
    """The control wire."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self._peer = 1 - wires.rank
        self._message = b""

    def prepare(self, count: int, size: int) -> None:
        """See `Wire`."""

    def send(self, size: int) -> None:
        """See `Wire`."""
        if len(self._message) != size:
            self._message = bytes(size)
        self._wires.control.send(self._peer, self._message)

    def sent(self, count: int) -> None:
        """See `Wire`."""
        self._wires.until(lambda: not self._wires.control.pending(), "control sends")

    def received(self, count: int) -> None:
        """See `Wire`."""
        self._wires.until(lambda: len(self._wires.inbox) >= count, "control messages")
        del self._wires.inbox[:count]


class Data:
    """The data wire."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self._peer = 1 - wires.rank
        self._next = {"sent": 0, "received": 0}
        self._ended = {"sent": 0, "received": 0}

    def prepare(self, count: int, size: int) -> None:
        """See `Wire`."""
        for _ in range(count):
            self._wires.data.receive(self._peer, self._next["received"], 0, size)
            self._next["received"] += 1

    def send(self, size: int) -> None:
        """See `Wire`."""
        self._wires.data.send(self._peer, self._next["sent"], 0, size)
        self._next["sent"] += 1

    def sent(self, count: int) -> None:
        """See `Wire`."""
        self._wait("sent", count)

    def received(self, count: int) -> None:
        """See `Wire`."""
        self._wait("received", count)

    def _wait(self, what: str, count: int) -> None:
        while self._ended[what] < count:
            ended, _, _, error = self._wires.report()
            assert error is None, error
            self._ended[ended] += 1
        self._ended[what] -= count


def latency(wire: Wire, rank: int, size: int, barrier: Callable[[], None]) -> float:
    """Half a round trip, microseconds."""
    count = max(4, min(1000, BUDGET // size // 8))
    wire.prepare(count, size)
    barrier()
    times = []
    for _ in range(count):
        started = time.perf_counter()
        if rank == 0:
            wire.send(size)
            wire.received(1)
        else:
            wire.received(1)
            wire.send(size)
        wire.sent(1)
        times.append(time.perf_counter() - started)
    return statistics.median(times) / 2 * 1e6


def bandwidth(wire: Wire, rank: int, size: int, barrier: Callable[[], None]) -> float:
    """Rank 0 to rank 1, MB/s."""
    window = max(1, min(WINDOW, IN_FLIGHT // size))
    best = 0.0
    for _ in range(REPEATS):
        wire.prepare(window if rank else 1, size if rank else 8)
        barrier()
        started = time.perf_counter()
        if rank == 0:
            for _ in range(window):
                wire.send(size)
            wire.sent(window)
            wire.received(1)
        else:
            wire.received(window)
            wire.send(8)
            wire.sent(1)
        best = max(best, window * size / (time.perf_counter() - started) / 1e6)
    return best


def asleep(wires: Wires, rank: int) -> float:
    """Half a round trip of 8 bytes to a peer that has been asleep in epoll for 5 ms, microseconds."""
    control = Control(wires)
    times = []
    for _ in range(100):
        if rank == 0:
            time.sleep(0.005)
            started = time.perf_counter()
            control.send(8)
            control.received(1)
            times.append(time.perf_counter() - started)
        else:
            control.received(1)
            control.send(8)
    return statistics.median(times) / 2 * 1e6 if times else 0.0


def main() -> None:
    """Measure everything; rank 0 writes the figures as JSON to the file named on the command line."""
    largest = int(sys.argv[2])
    wires = Wires(LARGEST)
    rank = wires.rank
    if wires.size != 2:
        sys.exit(f"wire_rows.py needs two ranks, not {wires.size}")
    for offset in range(0, LARGEST, 4096):
        wires.arena[offset] = 1 + rank

    def barrier() -> None:
        wires.control.send(1 - rank, b"barrier")
        wires.expect(1 - rank, b"barrier")

    candidates: dict[str, Wire] = {"control": Control(wires), f"data ({wires.data.name})": Data(wires)}
    candidates["mpi4py"] = raw.Mpi(wires.arena)
    if wires.data.name == "ucx":
        candidates["ucxx"] = raw.Ucx(wires.arena, rank, lambda address: _swap(wires, address))
    figures: dict[str, dict[str, Column]] = {"latency": {}, "bandwidth": {}}
    for size in SIZES:
        for name, wire in candidates.items():  # in turn, so that a busy machine is busy for all of them
            if size <= largest:
                figures["latency"].setdefault(name, {})[size] = latency(wire, rank, size, barrier)
                figures["bandwidth"].setdefault(name, {})[size] = bandwidth(wire, rank, size, barrier)
    sleeping = asleep(wires, rank)
    if rank == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump({**figures, "asleep_us": sleeping}, file)
    barrier()
    wires.close()


def _swap(wires: Wires, own: bytes) -> bytes:
    wires.control.send(1 - wires.rank, own)
    return wires.receive()[1]


main()
