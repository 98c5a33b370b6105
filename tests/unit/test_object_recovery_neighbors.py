"""Neighbors that die, and copies that are kept where we read too."""

from __future__ import annotations

import pytest
from neighbors_kit import FAR, NEAR, OID, Visits, borrow, ours, process, read, want
from table_kit import PEER, RAYLET, SIZE, Owner, Table, put_id, return_id

from hpcray.common.ids import raylet_of
from hpcray.core.core_worker.object_table import PENDING, Waiter
from hpcray.protocol import messages as m


@pytest.fixture
def visits() -> Visits:
    return Visits()


@pytest.fixture
def table(visits: Visits) -> Owner:
    return process(visits)


class TestItsNodeDies:
    def test_opens_under_way_at_a_dead_neighbor_are_repeated_elsewhere(self, table: Table, visits: Visits) -> None:
        borrow(table, nodes=(NEAR, FAR))
        want(table)
        table.pins.met(NEAR)
        visits.said()
        table.recovery.node_died(NEAR, "power")
        assert table.said() == [(RAYLET, m.Open(OID, SIZE, [FAR]))]
        assert visits.said() == [] and visits.calls[-1] == ("leave", NEAR)

    def test_a_borrower_without_another_location_sends_the_owner_an_object_get(
        self, table: Table, visits: Visits
    ) -> None:
        entry = borrow(table)
        want(table)
        table.recovery.node_died(NEAR, "power")
        assert table.said() == [(PEER, m.ObjectGet(OID))] and entry.state == PENDING

    def test_no_open_is_sent_to_a_neighbor_that_is_known_to_be_dead(self, table: Table, visits: Visits) -> None:
        """Its processes are mourned first, and who does so may want to read."""
        borrow(table, put_id(2, PEER))
        read(table, visits, put_id(2, PEER))
        borrow(table)
        table.recovery.mark_node_dead(NEAR)
        want(table)
        assert table.said() == [(RAYLET, m.Open(OID, SIZE, [NEAR]))] and visits.said() == []

    def test_memory_of_a_dead_neighbor_without_views_is_unmapped_at_once(self, table: Table, visits: Visits) -> None:
        entry = borrow(table)
        read(table, visits)
        table.pins.view_died(OID)
        table.recovery.node_died(NEAR, "power")
        assert visits.calls == [("meet", NEAR), ("leave", NEAR)] and entry.mapping is None
        assert table.said() == [] and visits.said() == [] and table.pins.mapped == {}

    def test_memory_of_a_dead_neighbor_is_unmapped_once_and_not_before_its_death_is_handled(
        self, table: Table, visits: Visits
    ) -> None:
        borrow(table)
        read(table, visits)
        table.pins.view_died(OID)
        table.recovery.mark_node_dead(NEAR)
        table.refs.remove_local_ref(OID)
        assert visits.calls == [("meet", NEAR)]
        table.recovery.node_died(NEAR, "power")
        assert visits.calls == [("meet", NEAR), ("leave", NEAR)]

    def test_views_outlive_the_neighbor_that_holds_them(self, table: Table, visits: Visits) -> None:
        borrow(table, nodes=(NEAR, FAR))
        entry = read(table, visits)
        table.recovery.node_died(NEAR, "power")
        assert visits.calls == [("meet", NEAR)] and entry.mapping is None and entry.nodes == [FAR]
        table.pins.view_died(OID)
        assert visits.calls[-1] == ("leave", NEAR) and table.said() == []
        want(table)
        assert table.said() == [(RAYLET, m.Open(OID, SIZE, [FAR]))]

    def test_a_second_read_uses_the_mapping_of_the_first_while_it_lasts(self, table: Table, visits: Visits) -> None:
        borrow(table, nodes=(NEAR, FAR))
        entry = read(table, visits)
        table.recovery.node_died(NEAR, "power")
        assert table.wait_local(OID, Waiter()) and entry.mapping is not None
        entry.mapping.views += 1
        table.pins.view_died(OID)
        assert visits.calls == [("meet", NEAR)]
        table.pins.view_died(OID)
        assert visits.calls[-1] == ("leave", NEAR) and entry.mapping is None
        assert table.said() == [] and visits.said() == []

    def test_a_mapping_of_a_dead_node_is_no_location(self, table: Owner, visits: Visits) -> None:
        ours(table, (NEAR, FAR))
        read(table, visits, return_id())
        table.recovery.node_died(NEAR, "power")
        assert table.wait_local(return_id(), Waiter())
        table.said()
        table.recovery.node_died(FAR, "power")
        assert len(table.again) == 1, "nobody but us can read it"

    def test_a_mapping_of_a_dead_node_is_no_location_for_a_borrower(self, table: Owner, visits: Visits) -> None:
        entry = ours(table, (NEAR, FAR))
        read(table, visits, return_id())
        table.recovery.node_died(NEAR, "power")
        assert table.wait_local(return_id(), Waiter())
        table.recovery.on_object_lost(PEER, m.ObjectLost(return_id(), 0, [FAR], "evicted"))
        assert len(table.again) == 1 and entry.subscribers == [PEER]

    def test_our_own_copy_is_pinned_until_it_is_kept(self, table: Owner, visits: Visits) -> None:
        """Which is no place to read from as long as views of the dead node live."""
        entry = ours(table)
        read(table, visits, return_id())
        table.recovery.on_add_location(m.AddLocation(return_id(), 1))
        table.recovery.node_died(NEAR, "power")
        assert table.said() == [(RAYLET, m.Open(return_id(), SIZE, [1]))]
        table.on_opened(m.Opened(return_id(), 64, SIZE, False))
        assert table.said() == [
            (RAYLET, m.Open(return_id(), SIZE, [], pin_replica=True)),
            (RAYLET, m.Release([return_id()])),
        ]
        assert entry.mapping is not None and entry.mapping.node == NEAR
        table.pins.view_died(return_id())
        assert visits.calls[-1] == ("leave", NEAR)

    def test_our_own_copy_was_evicted(self, table: Owner, visits: Visits) -> None:
        ours(table)
        read(table, visits, return_id())
        table.recovery.on_add_location(m.AddLocation(return_id(), 1))
        table.recovery.node_died(NEAR, "power")
        table.on_store_error(m.StoreError(return_id(), "lost", "it was evicted"))
        assert len(table.again) == 1

    def test_the_death_of_a_node_that_is_no_neighbor_unmaps_nothing_else(self, table: Table, visits: Visits) -> None:
        borrow(table, nodes=(NEAR, FAR))
        entry = read(table, visits)
        table.recovery.node_died(FAR, "power")
        assert entry.mapping is not None and entry.nodes == [NEAR] and ("leave", NEAR) not in visits.calls


class TestCopies:
    """A copy that is kept for us at a node where we read, too."""

    def test_an_object_that_we_read_at_a_neighbor_is_pinned_there_for_us(self, table: Owner, visits: Visits) -> None:
        entry = ours(table, (FAR, NEAR))
        read(table, visits, return_id())
        table.recovery.node_died(FAR, "power")
        assert table.said() == [(raylet_of(NEAR), m.Open(return_id(), SIZE, [NEAR], pin_replica=True))]
        table.recovery.on_replica(return_id(), NEAR, "")
        assert entry.mapping is not None and visits.said() == []
        table.refs.remove_local_ref(return_id())
        assert (raylet_of(NEAR), m.Release([return_id()], unpin_replica=True)) in table.said() and visits.said() == []
        table.pins.view_died(return_id())
        assert visits.said() == [(NEAR, m.Release([return_id()]))]

    def test_an_object_is_read_at_a_neighbor_while_the_pin_there_is_not_answered(
        self, table: Owner, visits: Visits
    ) -> None:
        entry = ours(table, (FAR, NEAR))
        table.recovery.node_died(FAR, "power")
        assert table.said() == [(raylet_of(NEAR), m.Open(return_id(), SIZE, [NEAR], pin_replica=True))]
        waiter = want(table, return_id())
        table.pins.met(NEAR)
        assert visits.said() == [(NEAR, m.Open(return_id(), SIZE, []))] and table.said() == []
        table.on_opened(m.Opened(return_id(), 64, SIZE, False))
        assert table.fired == [waiter] and entry.mapping is not None
        table.recovery.on_replica(return_id(), NEAR, "")
        assert table.replicas.held == {return_id(): {NEAR}}

    @pytest.mark.parametrize("kind", ["lost", "full", "cut", "came", "died"])
    def test_the_last_copy_that_is_known_is_gone_while_we_ask_a_neighbor(
        self, table: Owner, visits: Visits, kind: str
    ) -> None:
        """It may come in time; whatever becomes of that, the object is not forgotten."""
        entry = ours(table)
        table.remove_waiter([return_id()], want(table, return_id()))
        table.pins.met(NEAR)
        entry.nodes = [FAR]
        table.recovery.node_died(FAR, "power")
        assert table.said() == [] and table.again == []
        if kind == "cut":
            table.recovery.neighbor_lost(NEAR)
            assert (RAYLET, m.Open(return_id(), SIZE, [])) in table.said()
        elif kind == "died":
            table.recovery.node_died(NEAR, "power")
            assert table.said() == [(RAYLET, m.Open(return_id(), SIZE, []))]
        elif kind == "lost":
            table.on_store_error(m.StoreError(return_id(), kind, "evicted"))
            assert len(table.again) == 1
        elif kind == "full":
            table.on_store_error(m.StoreError(return_id(), kind, "no room"))
            assert table.said() == [(RAYLET, m.Open(return_id(), SIZE, []))]
        else:
            table.on_opened(m.Opened(return_id(), 64, SIZE, False))
            assert table.said() == [(raylet_of(NEAR), m.Open(return_id(), SIZE, [NEAR], pin_replica=True))]

    def test_our_own_copy_is_to_be_kept_when_that_read_comes_to_nothing(self, table: Owner, visits: Visits) -> None:
        ours(table, (FAR, NEAR))
        table.remove_waiter([return_id()], want(table, return_id()))
        table.pins.met(NEAR)
        table.recovery.on_add_location(m.AddLocation(return_id(), 1))
        table.recovery.node_died(FAR, "power")
        assert table.said() == []
        table.on_store_error(m.StoreError(return_id(), "lost", "evicted"))
        assert table.said() == [(RAYLET, m.Open(return_id(), SIZE, [1]))]
        table.on_opened(m.Opened(return_id(), 64, SIZE, False))
        assert table.said() == [(RAYLET, m.Open(return_id(), SIZE, [], pin_replica=True))]

    def test_a_replica_that_arrives_after_the_object_was_freed_is_freed(self, table: Owner) -> None:
        table.create(put_id())
        table.put_stored(put_id(), 64, SIZE, None)
        table.recovery.replicate(put_id(), NEAR)
        table.refs.remove_local_ref(put_id())
        table.said()
        table.recovery.on_replica(put_id(), NEAR, "")
        assert table.said() == [(RAYLET, m.Free([put_id()], [NEAR]))]
        assert table.entries == {}

    def test_a_borrower_frees_no_copies(self, table: Table) -> None:
        table.recovery.on_replica(OID, NEAR, "")
        assert table.said() == []
