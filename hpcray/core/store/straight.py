"""Objects that lie on disk only, sent to other nodes from there: through a few slots beside the arena.

A full store could read an object back only after something else has made way. Two full stores that want each other's
objects would wait for each other; this way neither needs room for what it only passes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from hpcray.core.effects import Effect, Piece, ReadSpill, StartSend
from hpcray.core.store.objects import Reader, StoredObject
from hpcray.core.store.sends import end_reader
from hpcray.wire import messages as m

_EACH = 2  # slots that one reader has at most, while others want some: one is read into, one sent


class Straight:
    """Readers of objects on disk; each chunk is read into a slot and sent from it.

    Args:
        slots: where in the raylet's mapping they begin; none: nothing is sent this way.
        size: bytes of one.
        dead_nodes: nodes that are not told of anything any more.
        unread: called with each object that is read by one node less.
    """

    def __init__(
        self,
        slots: Sequence[int],
        size: int,
        dead_nodes: Collection[int],
        unread: Callable[[StoredObject, list[Effect]], None],
    ) -> None:
        self.ok = 0
        self.loaded = 0
        self._free = list(slots)
        self._size = size if slots else 0
        self._dead_nodes = dead_nodes
        self._unread = unread
        self._readers: deque[Reader] = deque()
        self._reading: dict[bytes, tuple[Reader, int, int, int]] = {}
        self._sending: dict[int, tuple[Reader, int]] = {}

    def takes(self, obj: StoredObject, msg: m.Pull) -> bool:
        """Whether the chunks that are asked for fit into slots."""
        return obj.disk is not None and 0 < (msg.chunk or obj.size) <= self._size

    def start(self, obj: StoredObject, node: int, msg: m.Pull, out: list[Effect]) -> None:
        """Send an object that is on disk; its place there stays until the last chunk has been read."""
        obj.reads += 1
        self._readers.append(Reader(obj, node, msg.tag, msg.chunk or obj.size, msg.first, msg.first, msg.order))
        self._pump(out)

    def read(self, ident: bytes, error: str | None, out: list[Effect]) -> bool:
        """A ReadSpill is over; False: it was none of ours."""
        if ident not in self._reading:
            return False
        reader, slot, tag, size = self._reading.pop(ident)
        if error is None:
            self.loaded += size
        else:
            end_reader(reader, f"reading from disk failed: {error}", self._dead_nodes, out)
        if reader.over:
            self._freed(reader, slot, out)
        else:
            self._sending[tag] = reader, slot
            out.append(StartSend(reader.obj.id, reader.node, tag, slot, size))
        return True

    def sent(self, tag: int, error: str | None, out: list[Effect]) -> bool:
        """A send is over; False: it was none of ours."""
        if tag not in self._sending:
            return False
        reader, slot = self._sending.pop(tag)
        if error is not None:
            end_reader(reader, f"sending failed: {error}", self._dead_nodes, out)
        self._freed(reader, slot, out)
        return True

    def stop(self, obj: StoredObject, reason: str, out: list[Effect]) -> None:
        """What the disk has of the object is not to be used any more."""
        for reader in [reader for reader in self._readers if reader.obj is obj]:
            end_reader(reader, reason, self._dead_nodes, out)
            self._leave(reader, out)

    def stalled(self, stuck: Collection[bytes], reason: str, out: list[Effect]) -> None:
        """These ReadSpills, of whomever, have not moved for long: who waits for one is told so. Its slot is taken until
        it has ended; where all slots are, nobody else gets one either."""
        mine = [self._reading[ident][0] for ident in stuck if ident in self._reading]
        over = list(self._readers) if mine and len(mine) == len(self._reading) and not self._free else mine
        for reader in over:
            end_reader(reader, reason, self._dead_nodes, out, full=True)
            self._leave(reader, out)

    def node_died(self, node: int, out: list[Effect]) -> None:
        """Nothing more is sent there."""
        for reader in [reader for reader in self._readers if reader.node == node]:
            reader.over = True
            self._leave(reader, out)

    def __len__(self) -> int:
        """Number of readers."""
        return len(self._readers)

    def _pump(self, out: list[Effect]) -> None:
        """Hand out the free slots, in turn."""
        for _ in range(len(self._readers) * _EACH):
            if not self._free:
                return
            reader = self._readers[0]
            self._readers.rotate(-1)
            obj, at = reader.obj, reader.next * reader.chunk
            if reader.over or at >= obj.size or reader.flying >= _EACH or obj.disk is None:
                continue
            slot, size = self._free.pop(), min(reader.chunk, obj.size - at)
            tag = reader.tag + reader.next - reader.first
            reader.next += 1
            reader.flying += 1
            ident = tag.to_bytes(8, "big")
            self._reading[ident] = reader, slot, tag, size
            out.append(ReadSpill(ident, obj.disk.segment, Piece(slot, size, obj.disk.offset + at)))

    def _freed(self, reader: Reader, slot: int, out: list[Effect]) -> None:
        self._free.append(slot)
        reader.flying -= 1
        self._leave(reader, out)
        self._pump(out)

    def _leave(self, reader: Reader, out: list[Effect]) -> None:
        complete = reader.next * reader.chunk >= reader.obj.size
        if reader.flying or not (reader.over or complete) or reader not in self._readers:
            return
        self._readers.remove(reader)
        self.ok += not reader.over
        reader.obj.reads -= 1
        self._unread(reader.obj, out)
