"""All nodes in one process, on virtual time: the wires for simulations. Nothing here reads a clock or draws a number.

Time and delays come from outside: `LoopbackNet(n, delay=...)` asks `delay` for each message, so a seeded generator (or
hypothesis) decides speeds and orders, and the same seed replays the same run. Messages of one pair keep their order,
as on the real wire; messages of different pairs, and transfers, overtake each other as the delays have it.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable

from hpcray.transport.base import FOREVER, PeerLost, Report

Delay = Callable[[int, int, int], float]
"""Seconds that `size` bytes take from node to node: called as delay(source, destination, size)."""


def seeded_delay(seed: int, low: float = 1e-5, high: float = 1e-3, bandwidth: float = 1e9) -> Delay:
    """Delays drawn evenly from low..high seconds, plus size / bandwidth (bytes/s)."""
    draw = random.Random(seed)
    return lambda source, dest, size: draw.uniform(low, high) + size / bandwidth


class LoopbackNet:
    """The network between `size` nodes.

    Args:
        size: number of nodes.
        delay: how long each message takes.

    Attributes:
        now: virtual time in seconds; `advance` moves it.
    """

    def __init__(self, size: int, delay: Delay) -> None:
        self.size = size
        self.now = 0.0
        self.controls = [LoopbackControl(self, rank) for rank in range(size)]
        self.planes = [LoopbackData(self, rank) for rank in range(size)]
        self._delay = delay
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._last: dict[tuple[int, int], float] = {}
        self._dead: set[int] = set()
        self._cut: set[frozenset[int]] = set()
        self._held: dict[frozenset[int], list[Callable[[], None]]] = {}

    # ------------------------------------------------------------ time

    def next_event(self) -> float:
        """When something will arrive next; `FOREVER` when nothing is on its way."""
        return self._queue[0][0] if self._queue else FOREVER

    def advance(self, until: float) -> None:
        """Let time pass; what arrives by then is there for `poll` and `progress`."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, deliver = heapq.heappop(self._queue)
            deliver()
        self.now = max(self.now, until)

    # ------------------------------------------------------------ faults

    def kill(self, rank: int, notice: float = 0.0) -> None:
        """The node is gone at once; what it had sent still arrives.

        Args:
            notice: seconds until the others' wires know; negative: they never find out by themselves.
        """
        self._dead.add(rank)
        if notice >= 0:
            self._at(self.now + notice, lambda: self._tell(rank))

    def cut(self, one: int, other: int) -> None:
        """The link is silent both ways; nobody is told. What is sent meanwhile waits for `heal`."""
        self._cut.add(frozenset((one, other)))

    def heal(self, one: int, other: int) -> None:
        """The link works again, and what waited arrives now, in order."""
        link = frozenset((one, other))
        self._cut.discard(link)
        for deliver in self._held.pop(link, []):
            deliver()

    def _tell(self, dead: int) -> None:
        why = f"node {dead} was killed"
        for rank in range(self.size):
            if rank not in self._dead:
                self.controls[rank].tell(dead, why)
                self.planes[rank].forget(dead, why)

    # ------------------------------------------------------------ for the transports

    def carry(self, source: int, dest: int, size: int, deliver: Callable[[], None], ordered: bool) -> None:
        """Call `deliver` at the destination after the delay, unless it is dead or the link is cut by then."""
        if source in self._dead:
            return
        when = self.now + self._delay(source, dest, size)
        if ordered:
            when = max(when, self._last.get((source, dest), 0.0))
            self._last[source, dest] = when
        self._at(when, lambda: self._arrive(source, dest, deliver))

    def _arrive(self, source: int, dest: int, deliver: Callable[[], None]) -> None:
        link = frozenset((source, dest))
        if link in self._cut:
            self._held.setdefault(link, []).append(lambda: self._arrive(source, dest, deliver))
        elif dest not in self._dead:
            deliver()

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (when, self._count, action))


class LoopbackControl:
    """The `ControlTransport` of one node of a `LoopbackNet`."""

    def __init__(self, net: LoopbackNet, rank: int) -> None:
        self.rank = rank
        self.size = net.size
        self._net = net
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._dead: dict[int, str] = {}
        self._news: list[tuple[int, str]] = []

    def send(self, dest: int, data: bytes, wake: bool = True) -> None:
        """See `ControlTransport.send`."""
        if dest in self._dead:
            raise PeerLost(dest, self._dead[dest])
        inbox = self._net.controls[dest]._inbox
        self._net.carry(self.rank, dest, len(data), lambda: inbox.append((self.rank, data)), ordered=True)

    def poll(self) -> list[tuple[int, bytes]]:
        """See `ControlTransport.poll`."""
        arrived = list(self._inbox)
        self._inbox.clear()
        return arrived

    def lost(self) -> list[tuple[int, str]]:
        """See `ControlTransport.lost`."""
        news, self._news = self._news, []
        return news

    def tell(self, rank: int, why: str) -> None:
        """The wire has noticed a death."""
        if rank not in self._dead:
            self._dead[rank] = why
            self._news.append((rank, why))

    def fileno(self) -> int | None:
        """See `ControlTransport.fileno`."""
        return None

    def arm(self) -> bool:
        """See `ControlTransport.arm`."""
        return not self._inbox

    def patience(self) -> float:
        """See `ControlTransport.patience`: until the net's next event."""
        return 0.0 if self._inbox else max(0.0, self._net.next_event() - self._net.now)

    def pending(self) -> bool:
        """See `ControlTransport.pending`."""
        return False

    def forget(self, rank: int, why: str) -> None:
        """See `ControlTransport.forget`."""
        self._dead.setdefault(rank, why)

    def close(self, abort: bool = False) -> None:
        """See `ControlTransport.close`."""
        self._inbox.clear()


class LoopbackData:
    """The `DataPlane` of one node of a `LoopbackNet`. Bytes are copied when they arrive."""

    name = "loopback"

    def __init__(self, net: LoopbackNet, rank: int) -> None:
        self._net = net
        self._rank = rank
        self._arena = memoryview(b"")
        self._expected: dict[tuple[int, int], tuple[int, int]] = {}
        self._sending: set[tuple[int, int]] = set()
        self._done: list[Report] = []

    def address(self) -> bytes:
        """See `DataPlane.address`."""
        return b""

    def connect(self, node: int, address: bytes, same_host: bool) -> None:
        """See `DataPlane.connect`."""

    def register(self, arena: memoryview) -> None:
        """See `DataPlane.register`."""
        self._arena = arena

    def receive(self, node: int, tag: int, offset: int, size: int) -> None:
        """See `DataPlane.receive`."""
        self._expected[node, tag] = (offset, size)

    def send(self, node: int, tag: int, offset: int, size: int) -> None:
        """See `DataPlane.send`."""
        peer = self._net.planes[node]
        view = self._arena[offset : offset + size]
        self._sending.add((node, tag))
        self._net.carry(self._rank, node, size, lambda: peer._take(self._rank, tag, view, self), ordered=False)

    def _take(self, node: int, tag: int, view: memoryview, sender: LoopbackData) -> None:
        sender._finish(self._rank, tag, None)
        place = self._expected.pop((node, tag), None)
        if place is None:
            return  # cancelled
        error = None
        if place[1] == len(view):
            self._arena[place[0] : place[0] + place[1]] = view
        else:
            error = f"{len(view)} bytes came, {place[1]} were expected"
        self._done.append(("received", node, tag, error))

    def _finish(self, node: int, tag: int, error: str | None) -> None:
        if (node, tag) in self._sending:
            self._sending.discard((node, tag))
            self._done.append(("sent", node, tag, error))

    def cancel(self, tag: int) -> bool:
        """See `DataPlane.cancel`."""
        for key in [key for key in self._expected if key[1] == tag]:
            del self._expected[key]
        return True

    def forget(self, node: int, why: str) -> None:
        """See `DataPlane.forget`."""
        for key in [key for key in self._expected if key[0] == node]:
            del self._expected[key]
            self._done.append(("received", node, key[1], why))
        for key in sorted(key for key in self._sending if key[0] == node):
            self._finish(node, key[1], why)

    def progress(self) -> list[Report]:
        """See `DataPlane.progress`."""
        done, self._done = self._done, []
        return done

    def busy(self) -> bool:
        """See `DataPlane.busy`."""
        return bool(self._expected or self._sending or self._done)

    def patience(self) -> float:
        """See `DataPlane.patience`."""
        return 0.0 if self._done else max(0.0, self._net.next_event() - self._net.now)

    def close(self) -> None:
        """See `DataPlane.close`."""
        self._expected.clear()
        self._sending.clear()
        self._done.clear()
        self._arena = memoryview(b"")
