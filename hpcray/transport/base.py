"""The seams between a raylet and the wires to other nodes.

A raylet is one thread with one epoll. Its loop, with any transport behind these protocols::

    while True:
        for rank, batch in control.poll(): ...
        for what, node, tag, error in data.progress(): ...
        for rank, why in control.lost(): ...
        awake = not control.arm()
        sleep = 0.0 if awake else min(tick, control.patience(), data.patience())
        epoll.poll(sleep)              # the local sockets and control.fileno()
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Literal, Protocol, Union

Report = tuple[str, int, int, "str | None"]
"""A finished transfer: "received" or "sent", the other node, the tag, and what went wrong (None: nothing)."""

Received = Union[bytes, memoryview]
"""A message that has arrived; a long one is a read-only view of memory that is used again when no view is left."""

FOREVER = math.inf
Range = Callable[[int, int], memoryview]
"""Gives the bytes of a store at (offset, size)."""


_NOTHING = memoryview(b"")


class StoreMemory:
    """The memory of a node's store, as a data plane reads and writes it.

    Args:
        arena: writable, one-dimensional bytes.
        ranges: gives the bytes of it, or of the overflow file; None: of `arena` only.
    """

    __slots__ = ("_arena", "_ranges")

    def __init__(self, arena: memoryview = _NOTHING, ranges: Range | None = None) -> None:
        self._arena, self._ranges = arena, ranges

    def part(self, offset: int, size: int) -> memoryview:
        """Return the bytes at an offset."""
        return self._arena[offset : offset + size] if self._ranges is None else self._ranges(offset, size)


class TransportError(Exception):
    """A wire cannot be used. The message says which, why, and what to do."""


class StartError(TransportError):
    """The cluster did not come up.

    Attributes:
        reported_by: "self": the rank that raised this reports it; "rank0": every rank has the same error, rank 0
            reports it, and the others leave silently.
        others_wait: only this rank, or some, have the error, and the other ranks wait for it.
    """

    def __init__(
        self, message: str = "", *, reported_by: Literal["self", "rank0"] = "self", others_wait: bool = False
    ) -> None:
        super().__init__(message)
        self.reported_by = reported_by
        self.others_wait = others_wait


class PeerLost(TransportError):
    """A peer is known to be dead; what was sent to it may be lost, nothing more can be.

    Attributes:
        rank: the dead peer.
        why: how it was noticed.
    """

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} is lost: {why}")
        self.rank = rank
        self.why = why


class ReceiveBuffers(Protocol):
    """Memory for long messages that are received."""

    def take(self, size: int) -> memoryview:
        """Return `size` writable bytes."""


class ControlTransport(Protocol):
    """Ordered messages between raylets. One thread makes all calls.

    Attributes:
        rank: own number.
        size: number of nodes.
    """

    rank: int
    size: int

    def send(self, dest: int, data: Received, wake: bool = True) -> None:
        """Send without waiting. Messages of one pair arrive in the order sent.

        Args:
            dest: any rank but our own.
            data: up to 2 GiB, bytes or a read-only view of them; must not change afterwards.
            wake: False: where the wire allows it, a peer that sleeps reads the message when it next wakes up.

        Raises:
            PeerLost: `dest` is known dead. Nothing was sent.
            ValueError: `data` is too long.
        """

    def receive_into(self, buffers: ReceiveBuffers) -> None:
        """Receive long messages into this memory, where the wire can do so."""

    def poll(self) -> list[tuple[int, Received]]:
        """What has arrived, as (source, data); also moves sends on. Empty when nothing came."""

    def lost(self) -> list[tuple[int, str]]:
        """Peers newly found dead by the wire itself, each once. A cut link shows late or never: heartbeats decide."""

    def fileno(self) -> int | None:
        """A descriptor that turns readable when something arrives, or None (then `patience` stays short)."""

    def arm(self) -> bool:
        """Get ready to sleep: True, it is safe to sleep for what both `patience()` then say; False, poll again."""

    def patience(self) -> float:
        """Longest sleep allowed now, in seconds: 0 none, `FOREVER` until `fileno` is readable."""

    def pending(self) -> bool:
        """Return True if sends (or half-received messages) are in flight; they move only inside `poll`."""

    def forget(self, rank: int, why: str) -> None:
        """The cluster has declared `rank` dead: later sends raise PeerLost, nothing waits for it."""

    def close(self, abort: bool = False) -> None:
        """Leave. Orderly leaving is collective and can hang after a death; with `abort` nothing is waited for, and the
        caller must end the process with `os._exit`."""


class DataPlane(Protocol):
    """Bytes from the arena of one node into the arena of another. Same thread as the control transport.

    Attributes:
        name: "ucx", "mpi" or "loopback".
    """

    name: str

    def address(self) -> bytes:
        """What a peer needs for `connect`."""

    def connect(self, node: int, address: bytes, same_host: bool) -> None:
        """Make `node` reachable. Call once for each peer, before any transfer with it."""

    def register(self, arena: memoryview, ranges: Range | None = None) -> None:
        """Name the memory, once. It must outlive the plane.

        Args:
            arena: writable, one-dimensional bytes.
            ranges: gives the bytes (offset, size) of it, or of the overflow file; None: of `arena` only.
        """

    def receive(self, node: int, tag: int, offset: int, size: int) -> None:
        """Expect `size` bytes with `tag` from `node` at `offset` of the arena. Ends in a "received" report.

        Must come before the node is asked to send: bytes that nobody expects are thrown away.

        Args:
            tag: an unsigned 64-bit number, chosen by the receiver. At most its low 32 bits, a counter of the receiver,
                go over the wire; they must be unique among its transfers.
        """

    def send(self, node: int, tag: int, offset: int, size: int) -> None:
        """Send arena bytes to a node that expects them. Ends in a "sent" report; until then they must not change."""

    def cancel(self, tag: int) -> bool:
        """Give up the expected receive `tag`, without a report.

        Returns:
            True: nothing will be written any more. False: its bytes are arriving; its report comes, and only after that
            is the range free.
        """

    def forget(self, node: int, why: str) -> None:
        """`node` is dead: its transfers end with an error report."""

    def progress(self) -> list[Report]:
        """Move transfers on for at most about a millisecond. Finished ones."""

    def busy(self) -> bool:
        """Return True if any transfer is expected or in flight."""

    def patience(self) -> float:
        """Longest sleep allowed now; see `ControlTransport.patience`."""

    def close(self) -> None:
        """Drop all transfers, without reports, and the arena."""


class Backoff:
    """How long to sleep between looks at a wire that cannot wake us: shorter after traffic, longer in silence.

    epoll counts in milliseconds, so there is nothing between 0 and 1 ms. At 10 ms an idle raylet uses 0.3 % of a core.
    """

    __slots__ = ("_last",)

    SPIN = 0.0001
    ALONE = 0.00002
    STEPS = ((0.1, 0.001), (1.0, 0.003))
    LONGEST = 0.01

    def __init__(self) -> None:
        self._last = time.monotonic()

    def touch(self) -> None:
        """Something moved."""
        self._last = time.monotonic()

    def lively(self) -> bool:
        """Whether to look again without sleep, as something moved just now: who is woken loses 50 us.

        Not where another process, perhaps the awaited peer, wants this core too: the kernel moves a process that sleeps
        to a free core when it wakes it, whereas two processes that yield to each other stay on one core.
        """
        now = time.monotonic()
        if now - self._last >= self.SPIN:
            return False
        os.sched_yield()
        return time.monotonic() - now < self.ALONE

    def silence(self) -> float:
        """Seconds since something moved."""
        return time.monotonic() - self._last

    def delay(self) -> float:
        """How long to sleep now. With 0, others on this core have had a chance to run."""
        silence = self.silence()
        if silence < self.SPIN:
            os.sched_yield()
            return 0.0
        for limit, pause in self.STEPS:
            if silence < limit:
                return pause
        return self.LONGEST
