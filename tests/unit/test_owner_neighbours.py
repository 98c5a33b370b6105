"""What a process reads in the stores of other nodes of its host, in place."""

from __future__ import annotations

import pytest
from neighbours_kit import FAR, NEAR, NEXT, OID, OPENED, Visits, borrow, ours, process, read, want
from table_kit import PEER, RAYLET, SIZE, Owner, Table, put_id, return_id

from hpcray.base.ids import raylet_of
from hpcray.core.owner.table import PENDING, STORED, Waiter
from hpcray.wire import messages as m


@pytest.fixture
def visits() -> Visits:
    return Visits()


@pytest.fixture
def table(visits: Visits) -> Owner:
    return process(visits)


class TestMeeting:
    def test_who_is_met_first_is_asked_then(self, table: Table, visits: Visits) -> None:
        borrow(table)
        borrow(table, put_id(2, PEER))
        waiters = [want(table), want(table, put_id(2, PEER))]
        assert visits.calls == [("meet", NEAR)] and visits.said() == [] and table.said() == []
        table.met(NEAR)
        assert visits.said() == [(NEAR, m.Open(OID, SIZE, [])), (NEAR, m.Open(put_id(2, PEER), SIZE, []))]
        table.on_opened(OPENED)
        table.on_opened(m.Opened(put_id(2, PEER), 0, SIZE, False))
        assert table.fired == waiters and table.said() == []
        mapping = table.entries[OID].mapping
        assert mapping is not None and (mapping.node, mapping.offset) == (NEAR, 4096)

    def test_who_was_met_is_asked_at_once(self, table: Table, visits: Visits) -> None:
        borrow(table)
        read(table, visits)
        borrow(table, put_id(2, PEER), (FAR, NEAR))
        want(table, put_id(2, PEER), 1)
        assert visits.said() == [(NEAR, m.Open(put_id(2, PEER), SIZE, [], 1))] and visits.calls == [("meet", NEAR)]

    def test_what_our_own_store_has_is_read_there(self, table: Table, visits: Visits) -> None:
        borrow(table, nodes=(NEAR, 1))
        want(table)
        assert table.said() == [(RAYLET, m.Open(OID, SIZE, [NEAR, 1]))] and visits.calls == []

    def test_haste_while_it_is_parked(self, table: Table, visits: Visits) -> None:
        borrow(table)
        want(table, priority=1)
        want(table)
        table.met(NEAR)
        assert visits.said() == [(NEAR, m.Open(OID, SIZE, [], 0))]
        assert table.said() == []

    def test_haste_when_it_was_asked_for(self, table: Table, visits: Visits) -> None:
        borrow(table)
        want(table, priority=1)
        table.met(NEAR)
        visits.said()
        want(table)
        assert visits.said() == [(NEAR, m.Hurry(OID, 0))] and table.said() == []

    def test_who_cannot_be_met(self, table: Table, visits: Visits) -> None:
        borrow(table)
        waiter = want(table)
        table.unmet(NEAR)
        assert table.said() == [(RAYLET, m.Open(OID, SIZE, [NEAR]))] and visits.said() == []
        table.on_opened(m.Opened(OID, 64, SIZE, True))
        assert table.fired == [waiter]
        borrow(table, put_id(2, PEER))
        want(table, put_id(2, PEER))
        assert (RAYLET, m.Open(put_id(2, PEER), SIZE, [NEAR])) in table.said() and visits.calls == [("meet", NEAR)]

    def test_nobody_waits_any_more_for_who_cannot_be_met(self, table: Table, visits: Visits) -> None:
        borrow(table)
        table.forget([OID], want(table))
        table.unmet(NEAR)
        assert table.said() == [] and table.pins.opening == {}

    def test_the_last_ref_dies_while_it_is_parked(self, table: Table, visits: Visits) -> None:
        borrow(table)
        want(table)
        table.release(OID)
        table.met(NEAR)
        assert visits.said() == [(NEAR, m.Open(OID, SIZE, []))]
        table.on_opened(OPENED)
        assert visits.said() == [(NEAR, m.Release([OID]))]


class TestTheConnectionEnds:
    def test_what_was_asked_for_is_asked_for_elsewhere(self, table: Table, visits: Visits) -> None:
        borrow(table)
        want(table)
        table.met(NEAR)
        visits.said()
        table.unmet(NEAR)
        assert table.said() == [
            (raylet_of(NEAR), m.Release([OID])),  # it has heard us
            (RAYLET, m.Open(OID, SIZE, [NEAR])),
        ]
        assert visits.said() == [] and not table.pins.asks(OID, NEAR)

    def test_what_is_read_there_is_read_on_and_given_back_another_way(self, table: Table, visits: Visits) -> None:
        borrow(table)
        entry = read(table, visits)
        table.unmet(NEAR)
        assert table.said() == [] and entry.mapping is not None
        table.release(OID)
        table.said()
        table.view_died(OID)
        assert table.said() == [(raylet_of(NEAR), m.Release([OID]))] and visits.said() == []


class TestItIsNotThere:
    LOST = m.StoreError(OID, "lost", "it is not here")

    def ask(self, table: Table, visits: Visits, oid: bytes = OID) -> Waiter:
        waiter = want(table, oid)
        table.met(NEAR)
        table.said(), visits.said()
        return waiter

    def test_a_borrower_who_knows_no_other_asks_the_owner(self, table: Table, visits: Visits) -> None:
        entry = borrow(table)
        waiter = self.ask(table, visits)
        table.on_store_error(self.LOST)
        assert table.said() == [(PEER, m.ObjectLost(OID, 0, [NEAR], "it is not here"))] and entry.state == PENDING
        table.on_object_ready(m.ObjectReady(OID, 0, b"", SIZE, [FAR]))
        assert table.said() == [(RAYLET, m.Open(OID, SIZE, [FAR]))] and table.fired == []
        table.on_opened(m.Opened(OID, 0, SIZE, True))
        assert table.fired == [waiter]

    def test_a_borrower_who_knows_others_reads_there(self, table: Table, visits: Visits) -> None:
        entry = borrow(table, nodes=(NEAR, FAR))
        self.ask(table, visits)
        table.on_store_error(self.LOST)
        assert table.said() == [(RAYLET, m.Open(OID, SIZE, [FAR]))] and entry.nodes == [FAR]

    def test_another_neighbour_has_it(self, table: Table, visits: Visits) -> None:
        borrow(table, nodes=(NEAR, NEXT))
        self.ask(table, visits)
        table.on_store_error(self.LOST)
        assert table.said() == [] and visits.calls == [("meet", NEAR), ("meet", NEXT)]
        table.met(NEXT)
        assert visits.said() == [(NEXT, m.Open(OID, SIZE, []))]

    def test_its_owner_makes_it_again(self, table: Owner, visits: Visits) -> None:
        entry = ours(table)
        self.ask(table, visits, return_id())
        table.on_store_error(m.StoreError(return_id(), "lost", "it is not here"))
        assert len(table.again) == 1 and entry.state == PENDING and entry.left_at == [NEAR]

    def test_its_owner_who_knows_another_has_it_kept_there(self, table: Owner, visits: Visits) -> None:
        entry = ours(table, (NEAR, FAR))
        self.ask(table, visits, return_id())
        table.on_store_error(m.StoreError(return_id(), "lost", "it is not here"))
        assert table.again == [] and entry.nodes == [FAR] and entry.left_at == [NEAR]
        assert table.said() == [
            (raylet_of(FAR), m.Open(return_id(), SIZE, [FAR], keep=True)),
            (RAYLET, m.Open(return_id(), SIZE, [FAR])),
        ]

    def test_no_room_there_but_perhaps_here(self, table: Table, visits: Visits) -> None:
        entry = borrow(table)
        waiter = Waiter()
        assert not table.want_local(OID, waiter, 1)
        table.met(NEAR)
        visits.said()
        table.on_store_error(m.StoreError(OID, "full", "no room"))
        assert table.said() == [(RAYLET, m.Open(OID, SIZE, [NEAR], 1))] and visits.said() == []
        assert table.fired == [] and entry.state == STORED and table.pins.refused == {}
        table.on_store_error(m.StoreError(OID, "full", "none here either"))
        assert table.fired == [waiter] and table.pins.refused == {OID: "none here either"}

    def test_no_room_there_and_nobody_waits(self, table: Table, visits: Visits) -> None:
        borrow(table)
        table.forget([OID], self.ask(table, visits))
        table.on_store_error(m.StoreError(OID, "full", "no room"))
        assert table.said() == [] and table.pins.opening == {}


class TestGivingUp:
    def test_only_what_is_pinned_at_the_node_that_is_short(self, table: Table, visits: Visits) -> None:
        borrow(table)
        read(table, visits)
        table.view_died(OID)
        table.create(put_id()).local = 1
        table.created_here(put_id(), 64, SIZE, 1, None)
        table.pins.give_up(10 * SIZE, NEAR)
        assert visits.said() == [(NEAR, m.Release([OID]))] and table.said() == []
        assert table.entries[put_id()].mapping is not None
        table.pins.give_up(10 * SIZE, 1)
        assert table.said() == [(RAYLET, m.Release([put_id()]))] and visits.said() == []


def test_a_copy_that_was_made_there_is_told_to_its_owner(table: Owner, visits: Visits) -> None:
    """The store was fetching it for somebody else, and we are the first who hears of it."""
    entry = borrow(table)
    want(table)
    table.met(NEAR)
    table.on_opened(m.Opened(OID, 64, SIZE, True))
    assert table.said() == [(PEER, m.AddLocation(OID, NEAR))]
    assert entry.mapping is not None
