"""A process of node 1, which has neighbors, and what is done with it."""

from __future__ import annotations

from table_kit import PEER, SIZE, Owner, Table, put_id, return_id

from hpcray.core.core_worker.object_table import ObjectEntry, Waiter
from hpcray.protocol import messages as m

NEAR, NEXT, FAR = 2, 3, 7
OID = put_id(1, PEER)
OPENED = m.Opened(OID, 4096, SIZE, False)


class Visits:
    """What a table asks of its neighbors' stores."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.out: list[tuple[int, m.Message]] = []

    def meet(self, node: int) -> None:
        self.calls.append(("meet", node))

    def send(self, node: int, msg: m.Message) -> None:
        self.out.append((node, msg))

    def leave(self, node: int) -> None:
        self.calls.append(("leave", node))

    def said(self) -> list[tuple[int, m.Message]]:
        out, self.out = self.out, []
        return out


def borrow(table: Table, oid: bytes = OID, nodes: tuple[int, ...] = (NEAR,)) -> ObjectEntry:
    entry = table.borrow(oid)
    table.set_locations(oid, SIZE, list(nodes))
    return entry


def want(table: Table, oid: bytes = OID, priority: int = 0) -> Waiter:
    waiter = Waiter()
    assert not table.wait_local(oid, waiter, priority)
    return waiter


def read(table: Table, visits: Visits, oid: bytes = OID, node: int = NEAR) -> ObjectEntry:
    """It is opened there, and a view lives; what was said is forgotten."""
    want(table, oid)
    if not table.pins._neighbors[node]:
        table.pins.met(node)
    table.on_opened(m.Opened(oid, 4096, SIZE, False))
    entry = table.entries[oid]
    assert entry.mapping is not None and entry.mapping.node == node
    table.pins.begin_view(oid)
    table.said(), visits.said()
    return entry


def ours(table: Table, nodes: tuple[int, ...] = (NEAR,)) -> ObjectEntry:
    """A large return of a task of ours, on these nodes."""
    assert isinstance(table, Owner)
    table.made(node=nodes[0])
    for node in nodes[1:]:
        table.recovery.on_add_location(m.AddLocation(return_id(), node))
    table.said()
    return table.entries[return_id()]


def process(visits: Visits) -> Owner:
    """It has met no neighbor."""
    table = Owner()
    table.pins.use_neighbors([NEAR, NEXT], visits)
    return table
