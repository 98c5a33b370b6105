"""All channel ends of one party of a compiled graph."""

from __future__ import annotations

from collections.abc import Sequence

from hpcray.graphs.channel_memory import ChannelMemory, RingReader, RingShape, RingWriter
from hpcray.graphs.channels import FarReader, NearReader, ValueReader, ValueWriter
from hpcray.graphs.compiled_graphs import OpenGraph
from hpcray.graphs.wiring import Ends
from hpcray.runtime.core_worker.core_worker import CoreWorker


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
