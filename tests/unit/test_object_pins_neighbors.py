"""What a process reads in the stores of other nodes of its host, in place."""

from __future__ import annotations

import pytest
from neighbors_kit import FAR, NEAR, NEXT, OID, OPENED, Visits, borrow, ours, process, read, want
from table_kit import PEER, RAYLET, SIZE, Owner, Table, put_id, return_id

from hpcray.common.ids import raylet_of
from hpcray.core.core_worker.object_table import PENDING, STORED, Waiter
from hpcray.protocol import messages as m


@pytest.fixture
def visits() -> Visits:
    return Visits()


@pytest.fixture
def table(visits: Visits) -> Owner:
    return process(visits)


class TestMeeting:
    def test_an_open_at_a_neighbor_leaves_once_the_connection_is_there(self, table: Table, visits: Visits) -> None:
        borrow(table)
        borrow(table, put_id(2, PEER))
        waiters = [want(table), want(table, put_id(2, PEER))]
        assert visits.calls == [("meet", NEAR)] and visits.said() == [] and table.said() == []
        table.pins.met(NEAR)
        assert visits.said() == [(NEAR, m.Open(OID, SIZE, [])), (NEAR, m.Open(put_id(2, PEER), SIZE, []))]
        table.on_opened(OPENED)
        table.on_opened(m.Opened(put_id(2, PEER), 0, SIZE, False))
        assert table.fired == waiters and table.said() == []
        mapping = table.entries[OID].mapping
        assert mapping is not None and (mapping.node, mapping.offset) == (NEAR, 4096)

    def test_an_open_at_a_connected_neighbor_leaves_at_once(self, table: Table, visits: Visits) -> None:
        borrow(table)
        read(table, visits)
        borrow(table, put_id(2, PEER), (FAR, NEAR))
        want(table, put_id(2, PEER), 1)
        assert visits.said() == [(NEAR, m.Open(put_id(2, PEER), SIZE, [], 1))] and visits.calls == [("meet", NEAR)]

    def test_an_object_in_our_own_store_is_read_there(self, table: Table, visits: Visits) -> None:
        borrow(table, nodes=(NEAR, 1))
        want(table)
        assert table.said() == [(RAYLET, m.Open(OID, SIZE, [NEAR, 1]))] and visits.calls == []

    def test_a_higher_priority_reaches_an_open_that_waits_for_a_connection(self, table: Table, visits: Visits) -> None:
        borrow(table)
        want(table, priority=1)
        want(table)
        table.pins.met(NEAR)
        assert visits.said() == [(NEAR, m.Open(OID, SIZE, [], 0))]
        assert table.said() == []

    def test_a_higher_priority_is_sent_after_an_open_at_a_neighbor(self, table: Table, visits: Visits) -> None:
        borrow(table)
        want(table, priority=1)
        table.pins.met(NEAR)
        visits.said()
        want(table)
        assert visits.said() == [(NEAR, m.RaisePriority(OID, 0))] and table.said() == []

    def test_an_object_of_a_neighbor_without_connection_is_opened_at_our_own_store(
        self, table: Table, visits: Visits
    ) -> None:
        borrow(table)
        waiter = want(table)
        table.recovery.neighbor_lost(NEAR)
        assert table.said() == [(RAYLET, m.Open(OID, SIZE, [NEAR]))] and visits.said() == []
        table.on_opened(m.Opened(OID, 64, SIZE, True))
        assert table.fired == [waiter]
        borrow(table, put_id(2, PEER))
        want(table, put_id(2, PEER))
        assert (RAYLET, m.Open(put_id(2, PEER), SIZE, [NEAR])) in table.said() and visits.calls == [("meet", NEAR)]

    def test_an_object_without_waiters_is_not_opened_again_when_the_connection_fails(
        self, table: Table, visits: Visits
    ) -> None:
        borrow(table)
        table.remove_waiter([OID], want(table))
        table.recovery.neighbor_lost(NEAR)
        assert table.said() == [] and table.pins.opening == {}

    def test_a_parked_open_is_answered_with_a_release_when_the_last_ref_died(
        self, table: Table, visits: Visits
    ) -> None:
        borrow(table)
        want(table)
        table.refs.remove_local_ref(OID)
        table.pins.met(NEAR)
        assert visits.said() == [(NEAR, m.Open(OID, SIZE, []))]
        table.on_opened(OPENED)
        assert visits.said() == [(NEAR, m.Release([OID]))]


class TestTheConnectionEnds:
    def test_opens_under_way_at_a_lost_neighbor_are_repeated_elsewhere(self, table: Table, visits: Visits) -> None:
        borrow(table)
        want(table)
        table.pins.met(NEAR)
        visits.said()
        table.recovery.neighbor_lost(NEAR)
        assert table.said() == [
            (raylet_of(NEAR), m.Release([OID])),  # it has heard us
            (RAYLET, m.Open(OID, SIZE, [NEAR])),
        ]
        assert visits.said() == [] and not table.pins.awaits(OID, NEAR)

    def test_views_outlive_the_connection_and_their_pins_go_back_through_the_raylet(
        self, table: Table, visits: Visits
    ) -> None:
        borrow(table)
        entry = read(table, visits)
        table.recovery.neighbor_lost(NEAR)
        assert table.said() == [] and entry.mapping is not None
        table.refs.remove_local_ref(OID)
        table.said()
        table.pins.view_died(OID)
        assert table.said() == [(raylet_of(NEAR), m.Release([OID]))] and visits.said() == []


class TestItIsNotThere:
    LOST = m.StoreError(OID, "lost", "it is not here")

    def ask(self, table: Table, visits: Visits, oid: bytes = OID) -> Waiter:
        waiter = want(table, oid)
        table.pins.met(NEAR)
        table.said(), visits.said()
        return waiter

    def test_a_borrower_without_another_location_sends_the_owner_an_object_get(
        self, table: Table, visits: Visits
    ) -> None:
        entry = borrow(table)
        waiter = self.ask(table, visits)
        table.on_store_error(self.LOST)
        assert table.said() == [(PEER, m.ObjectLost(OID, 0, [NEAR], "it is not here"))] and entry.state == PENDING
        table.on_object_ready(m.ObjectReady(OID, 0, b"", SIZE, [FAR]))
        assert table.said() == [(RAYLET, m.Open(OID, SIZE, [FAR]))] and table.fired == []
        table.on_opened(m.Opened(OID, 0, SIZE, True))
        assert table.fired == [waiter]

    def test_a_borrower_with_another_location_opens_the_object_there(self, table: Table, visits: Visits) -> None:
        entry = borrow(table, nodes=(NEAR, FAR))
        self.ask(table, visits)
        table.on_store_error(self.LOST)
        assert table.said() == [(RAYLET, m.Open(OID, SIZE, [FAR]))] and entry.nodes == [FAR]

    def test_an_object_that_one_neighbor_lacks_is_opened_at_another(self, table: Table, visits: Visits) -> None:
        borrow(table, nodes=(NEAR, NEXT))
        self.ask(table, visits)
        table.on_store_error(self.LOST)
        assert table.said() == [] and visits.calls == [("meet", NEAR), ("meet", NEXT)]
        table.pins.met(NEXT)
        assert visits.said() == [(NEXT, m.Open(OID, SIZE, []))]

    def test_an_owner_makes_an_object_again_that_its_only_neighbor_lacks(self, table: Owner, visits: Visits) -> None:
        entry = ours(table)
        self.ask(table, visits, return_id())
        table.on_store_error(m.StoreError(return_id(), "lost", "it is not here"))
        assert len(table.again) == 1 and entry.state == PENDING and entry.left_at == [NEAR]

    def test_an_owner_with_another_location_pins_a_copy_there(self, table: Owner, visits: Visits) -> None:
        entry = ours(table, (NEAR, FAR))
        self.ask(table, visits, return_id())
        table.on_store_error(m.StoreError(return_id(), "lost", "it is not here"))
        assert table.again == [] and entry.nodes == [FAR] and entry.left_at == [NEAR]
        assert table.said() == [
            (raylet_of(FAR), m.Open(return_id(), SIZE, [FAR], pin_replica=True)),
            (RAYLET, m.Open(return_id(), SIZE, [FAR])),
        ]

    def test_an_object_that_a_full_neighbor_cannot_pin_is_opened_at_our_own_store(
        self, table: Table, visits: Visits
    ) -> None:
        entry = borrow(table)
        waiter = Waiter()
        assert not table.wait_local(OID, waiter, 1)
        table.pins.met(NEAR)
        visits.said()
        table.on_store_error(m.StoreError(OID, "full", "no room"))
        assert table.said() == [(RAYLET, m.Open(OID, SIZE, [NEAR], 1))] and visits.said() == []
        assert table.fired == [] and entry.state == STORED and table.pins.refused == {}
        table.on_store_error(m.StoreError(OID, "full", "none here either"))
        assert table.fired == [waiter] and table.pins.refused == {OID: "none here either"}

    def test_a_full_neighbor_without_waiters_here_has_no_effect(self, table: Table, visits: Visits) -> None:
        borrow(table)
        table.remove_waiter([OID], self.ask(table, visits))
        table.on_store_error(m.StoreError(OID, "full", "no room"))
        assert table.said() == [] and table.pins.opening == {}


class TestGivingUp:
    def test_only_pins_at_the_node_that_is_short_of_room_are_given_up(self, table: Table, visits: Visits) -> None:
        borrow(table)
        read(table, visits)
        table.pins.view_died(OID)
        table.create(put_id())
        table.put_stored(put_id(), 64, SIZE, None)
        table.pins.give_up(10 * SIZE, NEAR)
        assert visits.said() == [(NEAR, m.Release([OID]))] and table.said() == []
        assert table.entries[put_id()].mapping is not None
        table.pins.give_up(10 * SIZE, 1)
        assert table.said() == [(RAYLET, m.Release([put_id()]))] and visits.said() == []


def test_a_copy_that_a_neighbor_pulled_is_reported_to_the_owner(table: Owner, visits: Visits) -> None:
    """The store was fetching it for somebody else, and we are the first who hears of it."""
    entry = borrow(table)
    want(table)
    table.pins.met(NEAR)
    table.on_opened(m.Opened(OID, 64, SIZE, True))
    assert table.said() == [(PEER, m.AddLocation(OID, NEAR))]
    assert entry.mapping is not None
