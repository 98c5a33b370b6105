"""Neighbours that die, and copies that are kept where we read too."""

from __future__ import annotations

import pytest
from neighbours_kit import FAR, NEAR, OID, Visits, borrow, ours, process, read, want
from table_kit import PEER, RAYLET, SIZE, Owner, Table, put_id, return_id

from hpcray.base.ids import raylet_of
from hpcray.core.owner.table import PENDING, Waiter
from hpcray.wire import messages as m


@pytest.fixture
def visits() -> Visits:
    return Visits()


@pytest.fixture
def table(visits: Visits) -> Owner:
    return process(visits)


class TestItsNodeDies:
    def test_what_was_asked_for_there_is_asked_for_elsewhere(self, table: Table, visits: Visits) -> None:
        borrow(table, nodes=(NEAR, FAR))
        want(table)
        table.met(NEAR)
        visits.said()
        table.node_died(NEAR, "power")
        assert table.said() == [(RAYLET, m.Open(OID, SIZE, [FAR]))]
        assert visits.said() == [] and visits.calls[-1] == ("leave", NEAR)

    def test_a_borrower_who_knows_no_other_asks_the_owner(self, table: Table, visits: Visits) -> None:
        entry = borrow(table)
        want(table)
        table.node_died(NEAR, "power")
        assert table.said() == [(PEER, m.ObjectGet(OID))] and entry.state == PENDING

    def test_nothing_is_asked_of_who_is_known_to_be_dead(self, table: Table, visits: Visits) -> None:
        """Its processes are mourned first, and who does so may want to read."""
        borrow(table, put_id(2, PEER))
        read(table, visits, put_id(2, PEER))
        borrow(table)
        table.dead_nodes.add(NEAR)
        want(table)
        assert table.said() == [(RAYLET, m.Open(OID, SIZE, [NEAR]))] and visits.said() == []

    def test_with_no_view_its_memory_is_left_at_once(self, table: Table, visits: Visits) -> None:
        entry = borrow(table)
        read(table, visits)
        table.view_died(OID)
        table.node_died(NEAR, "power")
        assert visits.calls == [("meet", NEAR), ("leave", NEAR)] and entry.mapping is None
        assert table.said() == [] and visits.said() == [] and table.pins.mapped == {}

    def test_its_memory_is_left_once_and_not_before_its_death_is_dealt_with(self, table: Table, visits: Visits) -> None:
        borrow(table)
        read(table, visits)
        table.view_died(OID)
        table.dead_nodes.add(NEAR)
        table.release(OID)
        assert visits.calls == [("meet", NEAR)]
        table.node_died(NEAR, "power")
        assert visits.calls == [("meet", NEAR), ("leave", NEAR)]

    def test_views_outlive_it(self, table: Table, visits: Visits) -> None:
        borrow(table, nodes=(NEAR, FAR))
        entry = read(table, visits)
        table.node_died(NEAR, "power")
        assert visits.calls == [("meet", NEAR)] and entry.mapping is None and entry.nodes == [FAR]
        table.view_died(OID)
        assert visits.calls[-1] == ("leave", NEAR) and table.said() == []
        want(table)
        assert table.said() == [(RAYLET, m.Open(OID, SIZE, [FAR]))]

    def test_a_second_read_takes_what_is_mapped_as_long_as_it_is(self, table: Table, visits: Visits) -> None:
        borrow(table, nodes=(NEAR, FAR))
        entry = read(table, visits)
        table.node_died(NEAR, "power")
        assert table.want_local(OID, Waiter()) and entry.mapping is not None
        entry.mapping.views += 1
        table.view_died(OID)
        assert visits.calls == [("meet", NEAR)]
        table.view_died(OID)
        assert visits.calls[-1] == ("leave", NEAR) and entry.mapping is None
        assert table.said() == [] and visits.said() == []

    def test_what_is_read_of_a_dead_node_is_no_copy(self, table: Owner, visits: Visits) -> None:
        ours(table, (NEAR, FAR))
        read(table, visits, return_id())
        table.node_died(NEAR, "power")
        assert table.want_local(return_id(), Waiter())
        table.said()
        table.node_died(FAR, "power")
        assert len(table.again) == 1, "nobody but us can read it"

    def test_nor_when_a_borrower_asks(self, table: Owner, visits: Visits) -> None:
        entry = ours(table, (NEAR, FAR))
        read(table, visits, return_id())
        table.node_died(NEAR, "power")
        assert table.want_local(return_id(), Waiter())
        table.on_object_lost(PEER, m.ObjectLost(return_id(), 0, [FAR], "evicted"))
        assert len(table.again) == 1 and entry.subscribers == [PEER]

    def test_our_own_copy_is_pinned_until_it_is_kept(self, table: Owner, visits: Visits) -> None:
        """Which is no place to read from as long as views of the dead node live."""
        entry = ours(table)
        read(table, visits, return_id())
        table.on_add_location(m.AddLocation(return_id(), 1))
        table.node_died(NEAR, "power")
        assert table.said() == [(RAYLET, m.Open(return_id(), SIZE, [1]))]
        table.on_opened(m.Opened(return_id(), 64, SIZE, False))
        assert table.said() == [
            (RAYLET, m.Open(return_id(), SIZE, [], keep=True)),
            (RAYLET, m.Release([return_id()])),
        ]
        assert entry.mapping is not None and entry.mapping.node == NEAR
        table.view_died(return_id())
        assert visits.calls[-1] == ("leave", NEAR)

    def test_our_own_copy_was_evicted(self, table: Owner, visits: Visits) -> None:
        ours(table)
        read(table, visits, return_id())
        table.on_add_location(m.AddLocation(return_id(), 1))
        table.node_died(NEAR, "power")
        table.on_store_error(m.StoreError(return_id(), "lost", "it was evicted"))
        assert len(table.again) == 1

    def test_a_node_that_is_no_neighbour(self, table: Table, visits: Visits) -> None:
        borrow(table, nodes=(NEAR, FAR))
        entry = read(table, visits)
        table.node_died(FAR, "power")
        assert entry.mapping is not None and entry.nodes == [NEAR] and ("leave", NEAR) not in visits.calls


class TestCopies:
    """A copy that is kept for us at a node where we read, too."""

    def test_what_we_read_there_is_kept_there_for_us(self, table: Owner, visits: Visits) -> None:
        entry = ours(table, (FAR, NEAR))
        read(table, visits, return_id())
        table.node_died(FAR, "power")
        assert table.said() == [(raylet_of(NEAR), m.Open(return_id(), SIZE, [NEAR], keep=True))]
        table.on_replica(return_id(), NEAR, "")
        assert entry.mapping is not None and visits.said() == []
        table.release(return_id())
        assert (raylet_of(NEAR), m.Release([return_id()], keep=True)) in table.said() and visits.said() == []
        table.view_died(return_id())
        assert visits.said() == [(NEAR, m.Release([return_id()]))]

    def test_while_that_is_not_answered_it_is_read_there(self, table: Owner, visits: Visits) -> None:
        entry = ours(table, (FAR, NEAR))
        table.node_died(FAR, "power")
        assert table.said() == [(raylet_of(NEAR), m.Open(return_id(), SIZE, [NEAR], keep=True))]
        waiter = want(table, return_id())
        table.met(NEAR)
        assert visits.said() == [(NEAR, m.Open(return_id(), SIZE, []))] and table.said() == []
        table.on_opened(m.Opened(return_id(), 64, SIZE, False))
        assert table.fired == [waiter] and entry.mapping is not None
        table.on_replica(return_id(), NEAR, "")
        assert table.replicas.held == {return_id(): {NEAR}}

    @pytest.mark.parametrize("kind", ["lost", "full", "cut", "came", "died"])
    def test_the_last_copy_that_is_known_is_gone_while_we_ask_a_neighbour(
        self, table: Owner, visits: Visits, kind: str
    ) -> None:
        """It may come in time; whatever becomes of that, the object is not forgotten."""
        entry = ours(table)
        table.forget([return_id()], want(table, return_id()))
        table.met(NEAR)
        entry.nodes = [FAR]
        table.node_died(FAR, "power")
        assert table.said() == [] and table.again == []
        if kind == "cut":
            table.unmet(NEAR)
            assert (RAYLET, m.Open(return_id(), SIZE, [])) in table.said()
        elif kind == "died":
            table.node_died(NEAR, "power")
            assert table.said() == [(RAYLET, m.Open(return_id(), SIZE, []))]
        elif kind == "lost":
            table.on_store_error(m.StoreError(return_id(), kind, "evicted"))
            assert len(table.again) == 1
        elif kind == "full":
            table.on_store_error(m.StoreError(return_id(), kind, "no room"))
            assert table.said() == [(RAYLET, m.Open(return_id(), SIZE, []))]
        else:
            table.on_opened(m.Opened(return_id(), 64, SIZE, False))
            assert table.said() == [(raylet_of(NEAR), m.Open(return_id(), SIZE, [NEAR], keep=True))]

    def test_our_own_copy_is_to_be_kept_when_that_read_comes_to_nothing(self, table: Owner, visits: Visits) -> None:
        ours(table, (FAR, NEAR))
        table.forget([return_id()], want(table, return_id()))
        table.met(NEAR)
        table.on_add_location(m.AddLocation(return_id(), 1))
        table.node_died(FAR, "power")
        assert table.said() == []
        table.on_store_error(m.StoreError(return_id(), "lost", "evicted"))
        assert table.said() == [(RAYLET, m.Open(return_id(), SIZE, [1]))]
        table.on_opened(m.Opened(return_id(), 64, SIZE, False))
        assert table.said() == [(RAYLET, m.Open(return_id(), SIZE, [], keep=True))]

    def test_a_copy_that_is_there_when_nobody_needs_it_any_more_is_freed(self, table: Owner) -> None:
        table.create(put_id()).local = 1
        table.created_here(put_id(), 64, SIZE, 1, None)
        table.special.add(put_id())
        table.replicas.hold(put_id(), table.entries[put_id()], NEAR)
        table.release(put_id())
        table.said()
        table.on_replica(put_id(), NEAR, "")
        assert table.said() == [(RAYLET, m.Free([put_id()], [NEAR]))]
        assert table.entries == {}

    def test_what_others_own_is_not_freed_by_us(self, table: Table) -> None:
        table.on_replica(OID, NEAR, "")
        assert table.said() == []
