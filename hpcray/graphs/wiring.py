"""Which channels a compiled graph has, once it is known on which node each party is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hpcray.graphs.channel_memory import RingShape
from hpcray.graphs.graph_plan import GraphPlan


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
