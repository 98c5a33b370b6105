"""Messages between ranks: hpcray's wires, mpi4py and ucxx, in the same processes and arenas.

Run by run.py under mpirun: with two ranks it measures latency, bandwidth one way and both ways, with more of them pairs
at once, and what mpi4py needs for a broadcast and an allgather. Latency is half a round trip, the median of all; fetch
is a request of 8 bytes and its answer of `size` bytes, from the first byte to the last, which is what a `get` does.
Bandwidth is a window of messages and one small answer, as in osu_bw; the best repetition, since this measures wires and
not the neighbors. Every message arrives in a place of its own, as objects do.
"""

from __future__ import annotations

import json
import statistics
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import raw
from effort import LARGEST, Effort, effort, place
from table import Column

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from helpers.wires import Wires

WINDOW = 64
REQUEST = 8
CONTROL_LARGEST = 1 << 20
"""Control messages are not made for more: larger values travel as objects."""


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


def next_from(wires: Wires, source: int) -> bytes:
    """The next control message of that rank; what others send meanwhile stays."""
    wires.until(lambda: any(origin == source for origin, _ in wires.inbox), f"a message of rank {source}")
    at = next(at for at, (origin, _) in enumerate(wires.inbox) if origin == source)
    return wires.inbox.pop(at)[1]


class Control:
    """The control wire."""

    def __init__(self, wires: Wires, peer: int) -> None:
        self._wires = wires
        self._peer = peer
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
        for _ in range(count):
            next_from(self._wires, self._peer)


class Data:
    """The data wire."""

    def __init__(self, wires: Wires, peer: int) -> None:
        self._wires = wires
        self._peer = peer
        self._next = {"sent": 0, "received": 0}
        self._ended = {"sent": 0, "received": 0}
        self._unsent = 0

    def prepare(self, count: int, size: int) -> None:
        """See `Wire`."""
        for number in range(count):
            self._wires.data.receive(self._peer, self._next["received"], place(number, size), size)
            self._next["received"] += 1

    def send(self, size: int) -> None:
        """See `Wire`."""
        self._wires.data.send(self._peer, self._next["sent"], place(self._unsent, size), size)
        self._next["sent"] += 1
        self._unsent += 1

    def sent(self, count: int) -> None:
        """See `Wire`."""
        self._wait("sent", count)
        self._unsent = 0

    def received(self, count: int) -> None:
        """See `Wire`."""
        self._wait("received", count)

    def _wait(self, what: str, count: int) -> None:
        while self._ended[what] < count:
            ended, _, _, error = self._wires.report()
            assert error is None, error
            self._ended[ended] += 1
        self._ended[what] -= count


class Bench:
    """One rank's part: the lower half of the ranks sends, each to its peer in the upper half.

    Attributes:
        first: whether this rank is the one that sends.
    """

    def __init__(self, wires: Wires, effort: Effort) -> None:
        self.wires = wires
        self.effort = effort
        half = wires.size // 2
        self.first = wires.rank < half
        self.peer = wires.rank + half if self.first else wires.rank - half

    def barrier(self) -> None:
        """All ranks are here."""
        wires = self.wires
        if wires.rank:
            wires.control.send(0, b"here")
            wires.expect(0, b"go")
            return
        for other in range(1, wires.size):
            wires.expect(other, b"here")
        for other in range(1, wires.size):
            wires.control.send(other, b"go")

    def longest(self, seconds: float) -> float:
        """The largest of what all ranks say; on rank 0, elsewhere 0."""
        wires = self.wires
        if wires.rank:
            wires.control.send(0, struct.pack("<d", seconds))
            return 0.0
        others = [struct.unpack("<d", next_from(wires, other))[0] for other in range(1, wires.size)]
        return float(max([seconds, *others]))

    def latency(self, wire: Wire, size: int) -> float:
        """Half a round trip, microseconds."""
        return self._there_and_back(wire, size, size) / 2

    def fetch(self, wire: Wire, size: int) -> float:
        """A small request and its answer, microseconds."""
        return self._there_and_back(wire, REQUEST, size)

    def _there_and_back(self, wire: Wire, there: int, back: int) -> float:
        count = max(4, min(self.effort.messages, self.effort.budget // back // 8))
        wire.prepare(count, back if self.first else there)
        self.barrier()
        times = []
        for _ in range(count):
            started = time.perf_counter()
            if self.first:
                wire.send(there)
                wire.received(1)
            else:
                wire.received(1)
                wire.send(back)
            wire.sent(1)
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e6

    def bandwidth(self, wire: Wire, size: int, both_ways: bool = False) -> float:
        """MB/s of all pairs together, the lower half to the upper one, or both at once."""
        window = max(1, min(WINDOW, self.effort.in_flight // size))
        best = float("inf")
        for _ in range(self.effort.repeats):
            wire.prepare(1 if self.first and not both_ways else window, 8 if self.first and not both_ways else size)
            self.barrier()
            started = time.perf_counter()
            if self.first or both_ways:
                for _ in range(window):
                    wire.send(size)
                wire.sent(window)
            if both_ways:
                wire.received(window)
            elif self.first:
                wire.received(1)
            else:
                wire.received(window)
                wire.send(8)
                wire.sent(1)
            best = min(best, self.longest(time.perf_counter() - started) or best)
        flows = self.wires.size // 2 * (2 if both_ways else 1)
        return flows * window * size / best / 1e6

    def collective(self, call: Callable[[int], None], barrier: Callable[[], None], size: int) -> float:
        """Median time until all ranks have what they get, microseconds."""
        times = []
        for _ in range(max(5, min(200, self.effort.budget // size // 16))):
            barrier()
            started = time.perf_counter()
            call(size)
            times.append(time.perf_counter() - started)
        return self.longest(statistics.median(times)) * 1e6


def asleep(wires: Wires, rank: int) -> float:
    """Half a round trip of 8 bytes to a peer that has been asleep in epoll for 5 ms, microseconds."""
    control = Control(wires, 1 - rank)
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


def candidates(bench: Bench, data_only: bool) -> dict[str, Wire]:
    """What is measured on this data plane."""
    wires, peer = bench.wires, bench.peer
    found: dict[str, Wire] = {} if data_only else {"control": Control(wires, peer)}
    found[f"data ({wires.data.name})"] = Data(wires, peer)
    if not data_only:
        found["mpi4py"] = raw.Mpi(wires.arena, peer)
    if wires.data.name == "ucx":
        for name, alike in (("ucxx", True), ("ucxx (defaults)", False)):
            found[name] = raw.Ucx(wires.arena, lambda address: _swap(wires, peer, address), alike)
    return found


def measure(bench: Bench, wires_by_name: dict[str, Wire], sizes: list[int]) -> dict[str, dict[str, Column]]:
    """Every row for every wire, in turn, so that a busy machine is busy for all of them."""
    pairs = bench.wires.size // 2
    rows: dict[str, Callable[[Wire, int], float]] = {"mbw_mr": bench.bandwidth}
    if pairs == 1:
        rows = {
            "latency": bench.latency,
            "fetch": bench.fetch,
            "bw": bench.bandwidth,
            "bibw": lambda wire, size: bench.bandwidth(wire, size, both_ways=True),
        }
    figures: dict[str, dict[str, Column]] = {row: {} for row in rows}
    for size in sizes:
        for row, call in rows.items():
            for name, wire in wires_by_name.items():
                if isinstance(wire, Control) and size > CONTROL_LARGEST:
                    continue
                figures[row].setdefault(name, {})[size] = call(wire, size)
    mpi = wires_by_name.get("mpi4py")
    if pairs > 1 and isinstance(mpi, raw.Mpi):
        calls = {"bcast": mpi.bcast, "allgather": mpi.allgather, "alltoall": mpi.alltoall}
        for row, collective in calls.items():
            chosen = [size for size in sizes if size * 2 * bench.wires.size <= LARGEST]
            figures[row] = {"mpi4py": {size: bench.collective(collective, mpi.barrier, size) for size in chosen}}
    return figures


def main() -> None:
    """Measure everything; rank 0 writes the figures as JSON to the file named on the command line."""
    largest, how = int(sys.argv[2]), effort(sys.argv)
    wires = Wires(LARGEST)
    if wires.size % 2:
        sys.exit(f"wire_rows.py needs an even number of ranks, not {wires.size}")
    for offset in range(0, LARGEST, 4096):
        wires.arena[offset] = 1 + wires.rank
    bench = Bench(wires, how)
    sizes = [size for size in how.sizes if size <= largest]
    figures: dict[str, object] = {}
    figures |= measure(bench, candidates(bench, "--data-only" in sys.argv), sizes if wires.size == 2 else sizes[::2])
    if wires.size == 2 and "--data-only" not in sys.argv:
        figures["asleep_us"] = asleep(wires, wires.rank)
    if wires.rank == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(figures, file)
    bench.barrier()
    wires.close()


def _swap(wires: Wires, peer: int, own: bytes) -> bytes:
    wires.control.send(peer, own)
    return next_from(wires, peer)


if __name__ == "__main__":
    main()
