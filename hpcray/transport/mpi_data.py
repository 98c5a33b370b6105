"""Objects over MPI, for sites whose fabric UCX cannot use (Slingshot) or where there is no UCX.

As with UCX nothing is posted before it arrives: `Improbe` on a communicator of our own hands over the next piece of
whatever comes, and it is received straight into its place in the arena. An object travels in pieces of 4 MiB, so that
no single MPI call keeps the raylet for long; MPI keeps the pieces of one tag in order.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from hpcray.transport.base import FOREVER, Backoff, Range, Report, StoreMemory
from hpcray.transport.mpi_control import acknowledge

if TYPE_CHECKING:
    from mpi4py import MPI as mpi

_PIECE = 4 << 20  # bytes of one MPI message
_WINDOW = 4  # pieces of an object in flight
_PER_PROGRESS = 4  # pieces matched in one `progress`


class _Transfer:
    """An object on its way: what of its range is still to be sent or filled, and the pieces in flight."""

    __slots__ = ("flying", "node", "rest", "tag")

    def __init__(self, node: int, tag: int, view: memoryview) -> None:
        self.node = node
        self.tag = tag
        self.rest = view
        self.flying: deque[mpi.Request] = deque()


class MpiData:
    """The `DataPlane` over MPI.

    Args:
        module: `mpi4py.MPI`, initialized.
        comm: a communicator of its own (a duplicate), ranks are nodes.
    """

    name = "mpi"

    def __init__(self, module: Any, comm: mpi.Intracomm) -> None:
        self._mpi = module
        self._comm = comm
        self._byte = module.BYTE
        self._status = module.Status()
        self._tags: int = (comm.Get_attr(module.TAG_UB) or 32767) + 1
        self._memory = StoreMemory()
        self._outgoing: list[_Transfer] = []
        self._incoming: dict[tuple[int, int], _Transfer] = {}
        self._nodes: dict[int, int] = {}  # source of what is expected, by tag
        self._filling: set[tuple[int, int]] = set()  # what is expected and has begun to come
        self._unwanted: list[tuple[mpi.Request, bytearray]] = []
        self._stuck: list[Any] = []
        self._done: list[Report] = []
        self._backoff = Backoff()

    def address(self) -> bytes:
        """See `DataPlane.address`: ranks are all that MPI needs."""
        return b""

    def connect(self, node: int, address: bytes, same_host: bool) -> None:
        """MPI connects by itself."""

    def register(self, arena: memoryview, ranges: Range | None = None) -> None:
        self._memory = StoreMemory(arena, ranges)

    def receive(self, node: int, tag: int, offset: int, size: int) -> None:
        if size == 0:
            self._done.append(("received", node, tag, None))
            return
        self._incoming[node, tag % self._tags] = _Transfer(node, tag, self._memory.part(offset, size))
        self._nodes[tag] = node
        self._backoff.touch()

    def send(self, node: int, tag: int, offset: int, size: int) -> None:
        if size == 0:
            self._done.append(("sent", node, tag, None))
            return
        outgoing = _Transfer(node, tag, self._memory.part(offset, size))
        if self._push(outgoing):
            self._outgoing.append(outgoing)
        self._backoff.touch()

    def cancel(self, tag: int) -> bool:
        node = self._nodes.get(tag)
        if node is not None:
            if self._incoming[node, tag % self._tags].flying:
                return False
            self._drop(self._incoming[node, tag % self._tags])
        return True

    def forget(self, node: int, why: str) -> None:
        """MPI cannot take back what is in flight: its buffers stay referenced."""
        for incoming in list(self._incoming.values()):
            if incoming.node == node:
                self._fail(incoming, why)
        for outgoing in self._outgoing:
            if outgoing.node == node:
                self._stuck.append(outgoing)
                self._done.append(("sent", node, outgoing.tag, why))
        self._outgoing = [outgoing for outgoing in self._outgoing if outgoing.node != node]

    def progress(self) -> list[Report]:
        for _ in range(_PER_PROGRESS):
            if not self._match():
                break
        for key in list(self._filling):
            self._fill(key)
        if self._unwanted:
            self._unwanted = [entry for entry in self._unwanted if not entry[0].Test()]
        if self._outgoing:
            self._outgoing = [outgoing for outgoing in self._outgoing if self._push(outgoing)]
        done, self._done = self._done, []
        return done

    def busy(self) -> bool:
        return bool(self._outgoing or self._incoming or self._unwanted or self._done)

    def patience(self) -> float:
        if self._done:
            return 0.0
        return self._backoff.delay() if self.busy() else FOREVER

    def close(self) -> None:
        self._outgoing.clear()
        self._incoming.clear()
        self._nodes.clear()
        self._filling.clear()
        self._done.clear()
        self._memory = StoreMemory()

    def _push(self, outgoing: _Transfer) -> bool:
        """Reap pieces that are out, send more. False when the object is finished, one way or the other."""
        flying = outgoing.flying
        try:
            while flying and flying[0].Test():
                flying.popleft()
                self._backoff.touch()
            while outgoing.rest and len(flying) < _WINDOW:
                piece, rest = outgoing.rest[:_PIECE], outgoing.rest[_PIECE:]
                flying.append(self._comm.Isend((piece, self._byte), outgoing.node, outgoing.tag % self._tags))
                outgoing.rest = rest
        except self._mpi.Exception as error:
            self._stuck.append(outgoing)
            self._done.append(("sent", outgoing.node, outgoing.tag, f"MPI send failed: {error}"))
            return False
        if flying:
            return True
        self._done.append(("sent", outgoing.node, outgoing.tag, None))
        return False

    def _match(self) -> bool:
        """Take the next piece that has come."""
        status = self._status
        try:
            message = self._comm.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status)
        except self._mpi.Exception as error:
            acknowledge(self._mpi, self._comm, error)
            return True
        if message is None:
            return False
        self._backoff.touch()
        size = status.Get_count(self._byte)
        incoming = self._incoming.get((status.Get_source(), status.Get_tag()))
        if incoming is None or size > len(incoming.rest):
            # Cancelled, or not what was announced; its sender waits until somebody takes it.
            if incoming is not None:
                self._fail(incoming, f"{size} bytes came where {len(incoming.rest)} were expected")
            waste = bytearray(size)
            self._unwanted.append((message.Irecv((waste, self._byte)), waste))
            return True
        piece, incoming.rest = incoming.rest[:size], incoming.rest[size:]
        self._filling.add((incoming.node, incoming.tag % self._tags))
        incoming.flying.append(message.Irecv((piece, self._byte)))
        return True

    def _fill(self, key: tuple[int, int]) -> None:
        incoming = self._incoming[key]
        flying = incoming.flying
        try:
            while flying and flying[0].Test():
                flying.popleft()
                self._backoff.touch()
        except self._mpi.Exception as problem:
            self._fail(incoming, f"MPI receive failed: {problem}")
            return
        if not (flying or incoming.rest):
            self._drop(incoming)
            self._done.append(("received", incoming.node, incoming.tag, None))

    def _drop(self, incoming: _Transfer) -> None:
        """It is expected no longer."""
        key = incoming.node, incoming.tag % self._tags
        del self._incoming[key], self._nodes[incoming.tag]
        self._filling.discard(key)

    def _fail(self, incoming: _Transfer, why: str) -> None:
        self._drop(incoming)
        self._stuck.append(incoming)
        self._done.append(("received", incoming.node, incoming.tag, why))
