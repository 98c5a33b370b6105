"""A node that is nothing but its wires: for tests of the transports and point-to-point benchmarks under mpirun."""

from __future__ import annotations

import mmap
import os
import select
import time
from collections.abc import Callable

import msgspec

from hpcray.common.config import Config
from hpcray.transport.base import Report
from hpcray.transport.selection import open_transports

TICK = 20.0
DEADLINE = 60.0


class Wires:
    """The loop of a raylet around control transport and data plane, with an arena of its own.

    Args:
        arena_size: bytes.
    """

    def __init__(self, arena_size: int = 1 << 20) -> None:
        self.control, self.data = open_transports(Config.from_env(os.environ))
        self.rank, self.size = self.control.rank, self.control.size
        self.inbox: list[tuple[int, bytes]] = []
        self.reports: list[Report] = []
        self.lost: dict[int, str] = {}
        self._epoll = select.epoll()
        fd = self.control.fileno()
        if fd is not None:
            self._epoll.register(fd, select.EPOLLIN)
        arena = os.memfd_create("arena")
        os.ftruncate(arena, arena_size)
        self.arena = memoryview(mmap.mmap(arena, arena_size))
        os.close(arena)
        self.data.register(self.arena)
        self._meet()

    def _meet(self) -> None:
        """Exchange data addresses through rank 0, as raylets do at start-up."""
        own = self.data.address()
        if self.rank == 0:
            table = {0: own}
            while len(table) < self.size:
                source, address = self.receive()
                table[source] = address
            self._connect(table)
            for peer in range(1, self.size):
                self.control.send(peer, msgspec.msgpack.encode(table))
            for _ in range(1, self.size):
                assert self.receive()[1] == b"ready"
            for peer in range(1, self.size):
                self.control.send(peer, b"go")
        else:
            self.control.send(0, own)
            self._connect(msgspec.msgpack.decode(self.receive()[1], type=dict[int, bytes]))
            self.control.send(0, b"ready")
            self.expect(0, b"go")

    def _connect(self, table: dict[int, bytes]) -> None:
        for peer, address in table.items():
            if peer != self.rank:
                self.data.connect(peer, address, True)

    def turn(self, tick: float = TICK) -> None:
        """One turn of the loop. Sleeps, for at most `tick` seconds, only when there was nothing to do."""
        came = self.control.poll()
        self.inbox += came
        ended = self.data.progress()
        self.reports += ended
        self.lost.update(self.control.lost())
        if came or ended:
            return
        sleep = min(tick, self.control.patience(), self.data.patience())
        if sleep and self.control.arm():
            self._epoll.poll(sleep)

    def until(self, condition: Callable[[], object], what: str, tick: float = TICK) -> None:
        """Turn until the condition holds; raise TimeoutError naming `what` when it does not in time."""
        deadline = time.monotonic() + DEADLINE
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank} waited in vain for {what}")
            self.turn(tick)

    def receive(self) -> tuple[int, bytes]:
        """The next control message, as (source, data)."""
        self.until(lambda: self.inbox, "a control message")
        return self.inbox.pop(0)

    def expect(self, source: int, data: bytes) -> None:
        """Wait for this very message; what others send meanwhile stays in `inbox`."""
        self.until(lambda: (source, data) in self.inbox, f"{data!r} from rank {source}")
        self.inbox.remove((source, data))

    def report(self) -> Report:
        """The next finished transfer."""
        self.until(lambda: self.reports, "the end of a transfer")
        return self.reports.pop(0)

    def close(self) -> None:
        """Leave together with all other ranks."""
        self.data.close()
        self.control.close()
