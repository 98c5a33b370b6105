"""Control messages between worlds: MPI ends at the ranks of one step, and UCX reaches the nodes of all of them.

A frame is one tagged UCX message, whose tag only the job can know (`UcxEngine.label`), and which begins with

    number u64 | how many of the receiver's frames have arrived u64 | MAC, 16 B

The MAC is keyed for this pair of nodes and this direction, and covers all the rest. A frame with a wrong one, or with
another number than the next, is dropped. What a peer has not acknowledged is kept, and sent again over the new link
where UCX had to make one. So a link that breaks loses and repeats nothing, and a frame that was recorded has no effect.

Nothing is allocated for a message before its tag was found to be a peer's: strangers' messages are received into one
byte, and thrown away.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hpcray.common.keyed_hash import blake2b, compare_digest
from hpcray.common.memory import BufferPool
from hpcray.transport.base import FOREVER, Backoff, ControlTransport, PeerLost, ReceiveBuffers, Received
from hpcray.transport.ucx_engine import UcxEngine

_CLASS = 0xF << 60
_FRAME = 6 << 60
_HANDSHAKE = 7 << 60
_EITHER = 0xE << 60  # the bits that both have in common
_LABEL_MASK = (1 << 60) - 1
_NOBODY = 0xFFFF
_HEADER = struct.Struct("<QQ16s")
_COUNTS = struct.Struct("<QQ")
_MAC = 16  # bytes
_EMPTY = bytearray()
_LONGEST = (1 << 31) - 1  # bytes of a message
_SHORT = 1 << 16  # bytes; longer frames are handed on where they arrived
_LONGEST_MESSAGE = 1 << 16  # bytes
_PER_POLL = 256  # messages received in one `poll`
_ARMINGS = 3
_LABELS_AHEAD = 1024  # nodes whose frames are taken before this node has been introduced to them
_SEND_TIME = 10.0  # seconds that the endpoint of a message stays open
_ACKNOWLEDGE_AFTER = 64  # frames or
_ACKNOWLEDGE_BYTES = 1 << 20  # bytes that arrived without one to the peer, which would carry the acknowledgement


class _Link:
    """The frames to and from one peer."""

    __slots__ = (
        "arriving", "keyed_from", "keyed_to", "received", "retained", "send_tag", "sent", "unacknowledged",
        "unacknowledged_bytes",
    )  # fmt: skip

    def __init__(self, key_from: bytes, key_to: bytes, send_tag: Any) -> None:
        # Each frame's hash begins as a copy of these: to take in the key costs as much as to hash a small frame.
        self.keyed_from = blake2b(key=key_from, digest_size=_MAC)
        self.keyed_to = blake2b(key=key_to, digest_size=_MAC)
        self.send_tag = send_tag
        self.sent = 0
        self.received = 0
        self.unacknowledged = 0
        self.unacknowledged_bytes = 0
        self.retained: deque[tuple[int, Received]] = deque()
        self.arriving: deque[tuple[Any, Any]] = deque()


class UcxControl:
    """The `ControlTransport` over UCX, to nodes of other worlds.

    Args:
        engine: shared with the data plane. Open the data plane first.
        key_of: the key of the frames from one node to another.
        rank: own number; a node that joins has none yet.

    Attributes:
        size: number of nodes, those that have died included.
        dropped: frames with a wrong MAC or number, and messages of strangers.
        alone: whether no MPI shares the engine; its doorbell is for this transport then.
    """

    def __init__(self, engine: UcxEngine, key_of: Callable[[int, int], bytes], rank: int = _NOBODY) -> None:
        self.rank = rank
        self.size = 0
        self.dropped = 0
        self.alone = True
        self._engine = engine
        self._key_of = key_of
        lib = engine.lib
        engine.claim(_FRAME >> 60, _HANDSHAKE >> 60)
        self._ours = lib.UCXXTag(_FRAME & _EITHER)
        self._either = lib.UCXXTagMask(_EITHER)
        self._handshake_label = engine.label(_NOBODY, _NOBODY, 0)
        self._links: dict[int, _Link] = {}
        self._sources: dict[int, int] = {}  # by label
        self._labelled = 0  # nodes that have a label
        self._landing: set[int] = set()
        self._to_resend: set[int] = set()  # nodes whose link broke
        self._flights: deque[tuple[Any, Any]] = deque()  # sends under way, and their buffers
        self._discards: list[tuple[Any, Any]] = []
        self._handshakes_arriving: deque[tuple[Any, bytearray, Any]] = deque()
        self._handshake_sends: list[tuple[float, Any, Any, Any]] = []  # and their endpoints, which are no peers'
        self._arrived: list[tuple[int, Received]] = []
        self._buffers = BufferPool()
        self._dead: dict[int, str] = {}
        self._newly_dead: list[tuple[int, str]] = []
        self._backoff = Backoff()
        engine.ripe_checks.append(self.waiting)
        engine.link_listeners.append(self._link_broken)
        if rank != _NOBODY:
            self.own(rank)

    def _link_broken(self, node: int, link: int, why: str) -> None:
        if node in self._links:
            self._to_resend.add(node)

    def own(self, rank: int) -> None:
        """This node has its number."""
        self.rank = self._engine.rank = rank
        self.grow(rank + 1)

    def grow(self, size: int) -> None:
        """The job has had so many nodes. Frames of some more are taken: a node that joins may be the first to speak."""
        self.size = max(self.size, size)
        while self._labelled < self.size + _LABELS_AHEAD:
            self._sources[self._engine.label(self._labelled, self.rank, 0)] = self._labelled
            self._labelled += 1

    def _link(self, node: int) -> _Link:
        link = self._links.get(node)
        if link is None:
            me = self.rank
            engine = self._engine
            tag = engine.lib.UCXXTag(_FRAME | engine.label(me, node, 0))
            link = self._links[node] = _Link(self._key_of(node, me), self._key_of(me, node), tag)
        return link

    # ------------------------------------------------------------ base.ControlTransport

    def send(self, dest: int, data: Received, wake: bool = True) -> None:
        why = self._dead.get(dest)
        if why is not None:
            raise PeerLost(dest, why)
        if len(data) > _LONGEST:
            raise ValueError(f"a control message of {len(data)} bytes to node {dest}: the most is {_LONGEST}")
        link = self._link(dest)
        link.sent += 1
        link.retained.append((link.sent, data))
        if dest not in self._to_resend:
            self._post(dest, link, link.sent, data)
        self._backoff.touch()

    def receive_into(self, buffers: ReceiveBuffers) -> None:
        """Ignore that memory: messages are verified before they count, so they are received elsewhere, and copied."""

    def poll(self) -> list[tuple[int, Received]]:
        self._engine.progress()
        if self.alone:
            self._engine.heard()
        for _ in range(_PER_POLL):
            if not self._next():
                break
        if self._landing:
            self._land()
        if self._flights or self._discards or self._handshake_sends:
            self._reap()
        if self._to_resend:
            for node in sorted(self._to_resend):
                self._resend(node, self._links[node])
        arrived, self._arrived = self._arrived, []
        if arrived:
            self._backoff.touch()
        return arrived

    def lost(self) -> list[tuple[int, str]]:
        for node, why in self._engine.failed():
            self.lose(node, why)
        found, self._newly_dead = self._newly_dead, []
        return found

    def lose(self, node: int, why: str) -> None:
        """UCX has found this node dead."""
        if node not in self._dead:
            self.forget(node, why)
            self._newly_dead.append((node, why))

    def fileno(self) -> int | None:
        return self._engine.fileno()

    def arm(self) -> bool:
        engine = self._engine
        for _ in range(_ARMINGS):
            engine.progress()
            engine.heard()
            if engine.hungry():
                return False
            if engine.arm():
                return not engine.ripe()
        return False

    def waiting(self) -> bool:
        """Return True if something has come that `poll` would take."""
        if self._arrived or any(self._links[node].arriving[0][0].completed for node in self._landing):
            return True
        if self._handshakes_arriving and self._handshakes_arriving[0][0].completed:
            return True
        return bool(self._engine.worker.tag_probe(self._ours, self._either, False).matched)

    def patience(self) -> float:
        if self._arrived:
            return 0.0
        if self._flights or self._landing or self._to_resend:
            return self._backoff.delay()
        return 0.0 if self._backoff.lively() else FOREVER

    def pending(self) -> bool:
        return bool(self._flights or self._landing)

    def forget(self, rank: int, why: str) -> None:
        self._dead.setdefault(rank, why)
        self._links.pop(rank, None)
        self._landing.discard(rank)
        self._to_resend.discard(rank)

    def close(self, abort: bool = False) -> None:
        """Close the links. Frames under way may still leave, unless the data plane has closed the engine."""
        for _ in range(_PER_POLL):
            if not self._flights or self._engine.worker is None:
                break
            self._engine.progress()
            self._reap()
        self._links.clear()
        self._flights.clear()
        self._discards.clear()
        self._handshake_sends.clear()

    # ------------------------------------------------------------ messages of nodes that are not in the job yet

    def send_handshake(self, address: bytes, same_host: bool, message: bytes) -> None:
        """Send a message to a UCX worker that is no peer, or not yet.

        Raises:
            TransportError: no transport of this UCX reaches it.
        """
        engine = self._engine
        endpoint = engine.visit(address, same_host)
        buffer = engine.array(bytearray(message))
        request = endpoint.tag_send(buffer, engine.lib.UCXXTag(_HANDSHAKE | self._handshake_label))
        self._handshake_sends.append((time.monotonic() + _SEND_TIME, request, endpoint, buffer))
        self._backoff.touch()

    def fails_to_reach(self) -> bool:
        """Return True where the endpoint of the last message of `send_handshake` has failed: its peer is gone."""
        return bool(self._handshake_sends) and not self._handshake_sends[-1][2].alive

    # ------------------------------------------------------------ inside

    def _post(self, dest: int, link: _Link, number: int, data: Received) -> None:
        """Hand a frame to UCX. Where its link is broken, it goes with all that is sent again."""
        counts = _COUNTS.pack(number, link.received)
        mac = link.keyed_to.copy()
        mac.update(counts)
        mac.update(data)
        link.unacknowledged = link.unacknowledged_bytes = 0
        engine = self._engine
        buffer = engine.array(_EMPTY.join((counts, mac.digest(), data)))  # one copy
        try:
            request = engine.endpoint(dest).tag_send(buffer, link.send_tag)
        except Exception:
            self._to_resend.add(dest)
            return
        if not request.completed:
            self._flights.append((request, buffer))

    def _resend(self, node: int, link: _Link) -> None:
        try:
            self._engine.endpoint(node)
        except Exception:
            return  # `failed` makes a new one, or gives the peer up
        self._to_resend.discard(node)
        for number, data in list(link.retained):
            self._post(node, link, number, data)
            if node in self._to_resend:
                return

    def _next(self) -> bool:
        engine = self._engine
        found = engine.worker.tag_probe(self._ours, self._either, False)
        if not found.matched:
            return False
        if found.sender_tag.value & _CLASS == _FRAME:
            source = self._sources.get(found.sender_tag.value & _LABEL_MASK, _NOBODY)
            known = source != _NOBODY and source not in self._dead
            if not known or not _HEADER.size <= found.length <= _LONGEST + _HEADER.size:
                self._discard(found, source not in self._dead)
                return True
            link = self._link(source)
            buffer = bytearray(found.length) if found.length <= _SHORT else self._buffers.take(found.length)
            request = engine.take(found, engine.array(buffer))
            link.arriving.append((request, buffer))
            self._landing.add(source)
            return True
        known = found.sender_tag.value & _LABEL_MASK == self._handshake_label
        if not known or found.length > _LONGEST_MESSAGE or len(self._handshakes_arriving) >= _PER_POLL:
            self._discard(found)
            return True
        buffer = bytearray(found.length)
        array = engine.array(buffer)
        self._handshakes_arriving.append((engine.take(found, array), buffer, array))
        return True

    def _discard(self, found: Any, of_stranger: bool = True) -> None:
        self.dropped += of_stranger
        buffer = self._engine.array(bytearray(1))
        self._discards.append((self._engine.take(found, buffer), buffer))

    def _land(self) -> None:
        for source in list(self._landing):
            link = self._links[source]
            while link.arriving and link.arriving[0][0].completed:
                request, buffer = link.arriving.popleft()
                try:
                    request.check_error()
                except Exception:
                    continue  # its link broke: it comes again
                self._read(source, link, buffer)
            if not link.arriving:
                self._landing.discard(source)

    def _read(self, source: int, link: _Link, buffer: bytearray | memoryview) -> None:
        number, acknowledged, given = _HEADER.unpack_from(buffer)
        data: Received = memoryview(buffer)[_HEADER.size :].toreadonly()
        mac = link.keyed_from.copy()
        mac.update(buffer[: _COUNTS.size])
        mac.update(data)
        if not compare_digest(mac.digest(), given):
            self.dropped += 1
            return
        while link.retained and link.retained[0][0] <= acknowledged:
            link.retained.popleft()
        if number == 0:
            return
        if number != link.received + 1:
            self.dropped += 1
            return
        link.received = number
        self._arrived.append((source, bytes(data) if len(buffer) <= _SHORT else data))
        link.unacknowledged += 1
        link.unacknowledged_bytes += len(data)
        if link.unacknowledged >= _ACKNOWLEDGE_AFTER or link.unacknowledged_bytes >= _ACKNOWLEDGE_BYTES:
            self._post(source, link, 0, b"")

    def _reap(self) -> None:
        while self._flights and self._flights[0][0].completed:
            self._flights.popleft()
        self._discards = [discard for discard in self._discards if not discard[0].completed]
        if self._handshake_sends and self._handshake_sends[0][0] < time.monotonic():
            del self._handshake_sends[0]

    def take_handshakes(self) -> list[bytes]:
        """The messages that have come, in order."""
        found = []
        while self._handshakes_arriving and self._handshakes_arriving[0][0].completed:
            request, buffer, _ = self._handshakes_arriving.popleft()
            try:
                request.check_error()
            except Exception:
                continue
            found.append(bytes(buffer))
        return found


class JointControl:
    """The `ControlTransport` of a node whose world has several ranks, in a job of several worlds: MPI to the ranks of
    its own world, UCX to all other nodes.

    Args:
        inner: to the ranks of the own world.
        outer: to all others.
        first: the number of this world's rank 0.

    Attributes:
        outer: as given.
    """

    def __init__(self, inner: ControlTransport, outer: UcxControl, first: int = 0) -> None:
        self.rank = first + inner.rank
        self.size = first + inner.size
        self._inner = inner
        self.outer = outer
        self._first = first
        self._ranks = inner.size
        outer.alone = False

    def send(self, dest: int, data: Received, wake: bool = True) -> None:
        rank = dest - self._first
        if 0 <= rank < self._ranks:
            self._inner.send(rank, data, wake)
        else:
            self.outer.send(dest, data)

    def receive_into(self, buffers: ReceiveBuffers) -> None:
        self._inner.receive_into(buffers)
        self.outer.receive_into(buffers)

    def poll(self) -> list[tuple[int, Received]]:
        first = self._first
        return [*((first + rank, data) for rank, data in self._inner.poll()), *self.outer.poll()]

    def lost(self) -> list[tuple[int, str]]:
        found = []
        for rank, why in self._inner.lost():  # it asks the engine, about the nodes of all worlds
            if 0 <= rank < self._ranks:
                found.append((self._first + rank, why))
            else:
                self.outer.lose(self._first + rank, why)
        return found + self.outer.lost()

    def fileno(self) -> int | None:
        return self._inner.fileno()

    def arm(self) -> bool:
        return self._inner.arm()  # it asks `UcxEngine.ripe`, and so `UcxControl.waiting`

    def patience(self) -> float:
        return min(self._inner.patience(), self.outer.patience())

    def pending(self) -> bool:
        return self._inner.pending() or self.outer.pending()

    def forget(self, rank: int, why: str) -> None:
        if self.shares_mpi(rank):
            self._inner.forget(rank - self._first, why)
        else:
            self.outer.forget(rank, why)

    def shares_mpi(self, node: int) -> bool:
        """Return True for a node of this world."""
        return 0 <= node - self._first < self._ranks

    def close(self, abort: bool = False) -> None:
        self.outer.close(abort)
        self._inner.close(abort)
