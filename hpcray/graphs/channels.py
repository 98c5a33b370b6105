"""The two ends of a value's way between processes: shared memory to readers of the node, messages to all others."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hpcray.graphs.channel_memory import (
    ChannelClosed,
    ChannelMemory,
    RingReader,
    RingShape,
    RingWriter,
    ValueMemory,
    ValueViews,
)
from hpcray.graphs.compiled_graphs import ChannelValue, CompiledGraphs, OpenGraph
from hpcray.graphs.graph_plan import GraphPlan
from hpcray.protocol.messages.objects import ERROR, PLAIN
from hpcray.protocol.serialization import Serialized, deserialize, serialize, serialize_error
from hpcray.runtime.core_worker.core_worker import CoreWorker

_COPIED = 1 << 16
"""Bytes up to which a value with buffers is copied where it is read, so that its slot is free at once."""
_IN_MESSAGE = 1 << 18
"""Bytes up to which a value goes to other nodes in a message; larger ones go as an object."""


class Failed:
    """An error, read in the place of a value."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class ValueWriter:
    """Where one value of a graph is written, once in each execution.

    Args:
        ring: for readers of this node; None without any. far: processes of other nodes that read it.
        kept: how many executions may be under way.
    """

    def __init__(
        self, process: CoreWorker, graph: bytes, value: int, ring: RingWriter | None, far: Sequence[bytes], kept: int
    ) -> None:
        self._process, self._graph, self._value = process, graph, value
        self._ring, self._far = ring, far
        self._large = ValueMemory(ring.shape.readers) if ring is not None else None
        # Refs in values, and of values: their readers have counted them once as many later values were written.
        self._kept: deque[Any] = deque(maxlen=kept + 1)

    def write(self, value: Any, deadline: float) -> None:
        """Write a value.

        Raises:
            SerializationError: it does not pickle; nothing was written. TimeoutError: readers left no room in time.
            ChannelClosed: the graph has ended.
        """
        blob, refs = serialize(value)
        self._write(blob, refs, deadline)

    def write_error(self, error: BaseException, deadline: float) -> None:
        """Write an error in the place of a value; raises what `write` raises."""
        self._write(serialize_error(error), [], deadline)

    def _write(self, blob: bytes | Serialized, refs: list[Any], deadline: float) -> None:
        ring = self._ring
        if ring is not None:
            at, slot = ring.slot(deadline)
            if type(blob) is bytes:
                size = len(blob)
                header = (0, size, 0, 0)
                if size > ring.shape.capacity:
                    header, slot = self._large.take(size)  # type: ignore[union-attr]
                slot[:size] = blob
            else:
                assert isinstance(blob, Serialized)
                header = (0, blob.size, 0, 0)
                if blob.size > min(_COPIED, ring.shape.capacity):
                    header, slot = self._large.take(blob.size)  # type: ignore[union-attr]

                def put(offset: int, piece: Any) -> None:
                    size = len(piece) if isinstance(piece, bytes) else piece.nbytes
                    slot[offset : offset + size] = piece

                blob.write(put)
            ring.publish(at, *header)
        if refs:
            self._kept.append(refs)
        if self._far:
            self._send(blob, refs)

    def _send(self, blob: bytes | Serialized, refs: list[Any]) -> None:
        process = self._process
        size = len(blob) if isinstance(blob, bytes) else blob.size
        # Errors travel in messages, whatever their size, as those of tasks do: what is in a store is a value.
        stored = size > _IN_MESSAGE and not (isinstance(blob, bytes) and blob[-1] == ERROR)
        if stored:
            ref = process.put_serialized(blob, refs)
            self._kept.append(ref)
            blob, _ = serialize(ref)
        msg = ChannelValue(self._graph, self._value, blob if isinstance(blob, bytes) else blob.join(), stored)
        engine = process.engine
        with engine.lock:
            CompiledGraphs.of(process).send_all(self._far, msg)
            engine.flush()


class NearReader:
    """Reads a value that a process of this node writes.

    Args:
        pid: the writer. readers, reader: how many read it on this node, and which one this is.
    """

    def __init__(self, ring: RingReader, pid: int, readers: int, reader: int, kept: int) -> None:
        self.ring = ring
        self._views = ValueViews(pid, readers, reader, kept)

    def read(self, deadline: float) -> Any:
        """Wait for the next value, which may be `Failed`.

        Raises:
            TimeoutError: none came in time. ChannelClosed: none will come.
        """
        ring = self.ring
        header, slot = ring.next(deadline)
        try:
            if header[0]:
                return _load(self._views.view(header))
            size = header[1]
            if slot[size - 1] == PLAIN:
                return pickle.loads(slot[:size])
            return _load(bytes(slot[:size]))
        except Exception as error:  # unpickling runs user code
            if isinstance(error, OSError) and header[0]:
                raise ChannelClosed from error  # the writer has ended
            return Failed(error)
        finally:
            ring.done()

    def skip(self, deadline: float) -> None:
        """Wait for the next value, and drop it; raises what `read` raises."""
        header, _ = self.ring.next(deadline)
        if header[0]:
            self.read(deadline)  # so that its memory is free
        else:
            self.ring.done()


class FarReader:
    """Reads a value that a process of another node sends."""

    ring = None

    def __init__(self, process: CoreWorker, graph: OpenGraph, value: int) -> None:
        self._process, self._graph, self._value = process, graph, value

    def read(self, deadline: float) -> Any:
        """See `NearReader`."""
        msg = self._graph.take(self._value, None if deadline == float("inf") else deadline)
        if msg is None:
            raise ChannelClosed
        try:
            found = _load(msg.blob)
            if not msg.stored or isinstance(found, Failed):
                return found
            return self._process.reader.get_one(found, None)
        except Exception as error:  # unpickling runs user code
            return Failed(error)

    def skip(self, deadline: float) -> None:
        """See `NearReader`."""
        self.read(deadline)


ValueReader = NearReader | FarReader


def _load(blob: bytes | memoryview) -> Any:
    value = deserialize(blob)
    return Failed(value) if blob[-1] == ERROR else value


# ------------------------------------------------------------ wiring
# Which channels a compiled graph has, once it is known on which node each party is.


class Party(NamedTuple):
    """Where a party is: its process, the node of that, and its pid there."""

    proc: bytes
    node: int
    pid: int


class NearSource(NamedTuple):
    """A value that is read from shared memory: the channel's number there, the reader's, and the writer's pid."""

    channel: int
    reader: int
    pid: int


@dataclass
class Ends:
    """The values that one party writes and reads.

    Attributes:
        sources: by value; None for one that other nodes send.
        near: by value that is written, its channel in shared memory. far: the processes of other nodes that read it.
    """

    sources: dict[int, NearSource | None] = field(default_factory=dict)
    near: dict[int, int] = field(default_factory=dict)
    far: dict[int, list[bytes]] = field(default_factory=dict)


@dataclass
class Wiring:
    """All channels. shapes: of those in the memory of a node, by node. ends: by party."""

    shapes: dict[int, list[RingShape]]
    ends: dict[int, Ends]


def wire(plan: GraphPlan, parties: Mapping[int, Party], slots: int, capacity: int) -> Wiring:
    """Choose the channels of a graph.

    Args:
        slots: how many values a channel holds at most. capacity: bytes of a slot.
    """
    shapes: dict[int, list[RingShape]] = {}
    ends = {party: Ends() for party in parties}
    for value, readers in plan.readers.items():
        maker = plan.makers[value]
        writer = parties[maker]
        near = [reader for reader in readers if parties[reader].node == writer.node]
        far = [reader for reader in readers if parties[reader].node != writer.node]
        if near:
            of_node = shapes.setdefault(writer.node, [])
            ends[maker].near[value] = len(of_node)
            for index, reader in enumerate(near):
                ends[reader].sources[value] = NearSource(len(of_node), index, writer.pid)
            of_node.append(RingShape(len(near), slots, capacity))
        if far:
            ends[maker].far[value] = [parties[reader].proc for reader in far]
            for reader in far:
                ends[reader].sources[value] = None
    return Wiring(shapes, ends)


# ------------------------------------------------------------ party channels
# All channel ends of one party of a compiled graph.


class PartyChannels:
    """The readers and writers of a party, by value.

    Args:
        memory: that of this node; None if no channel is in it. kept: how many executions may be under way.
    """

    def __init__(
        self,
        process: CoreWorker,
        ident: bytes,
        graph: OpenGraph,
        ends: Ends,
        memory: ChannelMemory | None,
        shapes: Sequence[RingShape],
        kept: int,
    ) -> None:
        self.readers: dict[int, ValueReader] = {}
        for value, source in ends.sources.items():
            if source is None:
                self.readers[value] = FarReader(process, graph, value)
                continue
            assert memory is not None
            ring = RingReader(memory, source.channel, source.reader)
            readers = shapes[source.channel].readers
            self.readers[value] = NearReader(ring, source.pid, readers, source.reader, kept + 2)
        self.writers: dict[int, ValueWriter] = {}
        for value in {**ends.near, **ends.far}:
            to_node = None
            if value in ends.near:
                assert memory is not None
                to_node = RingWriter(memory, ends.near[value])
            self.writers[value] = ValueWriter(process, ident, value, to_node, ends.far.get(value, ()), kept)
