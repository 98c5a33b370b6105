"""Transfers of objects between nodes, without their raylet: what starts, is given up, or ends at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpcray.core import effects as fx
from hpcray.runtime.raylet.raylet import ObjectTransfers
from hpcray.transport.base import TransportError

OBJECT = bytes(16)


class Plane:
    """A data plane of which some nodes cannot be reached, and that has begun some transfers already."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.begun: set[int] = set()

    def receive(self, node: int, tag: int, offset: int, size: int) -> None:
        self.calls.append(("receive", node, tag, offset, size))

    def send(self, node: int, tag: int, offset: int, size: int) -> None:
        if node == 2:
            raise TransportError("the link is broken")
        self.calls.append(("send", node, tag, offset, size))

    def cancel(self, tag: int) -> bool:
        return tag not in self.begun


class Raylet:
    """What surrounds the transfers: pages that are populated, ends that are reported."""

    def __init__(self, plane: Plane | None) -> None:
        self.ended: list[tuple[str, int, str | None]] = []
        self.populated = 0
        self.context = SimpleNamespace(cluster_size=3)
        self.transfers = ObjectTransfers(
            self.context,  # type: ignore[arg-type]
            plane,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            lambda *end: self.ended.append(end),
        )

    def allocated_to(self, high_water: int) -> None:
        self.populated = high_water


def test_chunks_go_to_the_data_plane() -> None:
    raylet = Raylet(plane := Plane())
    raylet.transfers.receive(fx.StartReceive(OBJECT, 1, 7, 4096, 100))
    raylet.transfers.send(fx.StartSend(OBJECT, 1, 8, 0, 50))
    assert plane.calls == [("receive", 1, 7, 4096, 100), ("send", 1, 8, 0, 50)]
    assert raylet.ended == []


def test_what_the_data_plane_refuses_ends_at_once() -> None:
    raylet = Raylet(Plane())
    raylet.transfers.send(fx.StartSend(OBJECT, 2, 8, 0, 50))
    assert raylet.ended == [("sent", 8, "the link is broken")]


@pytest.mark.parametrize("plane", [None, Plane()], ids=["alone", "unknown node"])
def test_a_node_that_is_not_there_is_named(plane: Plane | None) -> None:
    raylet = Raylet(plane)
    raylet.transfers.receive(fx.StartReceive(OBJECT, 5, 7, 0, 100))
    assert raylet.ended == [("received", 7, "this cluster has no node 5")]


def test_a_cancelled_receive_ends_unless_it_has_begun() -> None:
    raylet = Raylet(plane := Plane())
    plane.begun.add(8)
    raylet.transfers.cancel(fx.CancelReceive(7))
    raylet.transfers.cancel(fx.CancelReceive(8))
    assert raylet.ended == [("received", 7, "cancelled")]


def test_a_node_that_is_not_alone_any_more_uses_its_data_plane() -> None:
    raylet = Raylet(None)
    raylet.transfers.use(plane := Plane())  # type: ignore[arg-type]
    raylet.transfers.receive(fx.StartReceive(OBJECT, 1, 7, 0, 100))
    assert plane.calls and not raylet.ended


def test_memory_that_is_given_out_is_populated() -> None:
    raylet = Raylet(None)
    raylet.transfers.populate(12_288)
    assert raylet.populated == 12_288
