"""Pins that a process keeps for later reads, and gives up when its node's store is short of room."""

from __future__ import annotations

import pytest
from table_kit import RAYLET, SIZE, Table, put_id

from hpcray.core.core_worker.object_table import STORED, Waiter
from hpcray.protocol import messages as m


@pytest.fixture
def table() -> Table:
    table = Table()
    for counter in (1, 2, 3):
        table.create(put_id(counter))
        table.put_stored(put_id(counter), counter * SIZE, SIZE, None)
    return table


class TestGivingUp:
    def test_the_oldest_pin_is_given_up_first_and_no_more_than_requested(self, table: Table) -> None:
        table.pins.give_up(SIZE + 1, 1)
        assert table.said() == [(RAYLET, m.Release([put_id(1), put_id(2)]))]
        assert table.entries[put_id(3)].mapping is not None

    def test_a_pin_with_a_view_stays_until_the_view_is_dead(self, table: Table) -> None:
        table.entries[put_id(1)].mapping.views += 1  # type: ignore[union-attr]
        table.pins.give_up(SIZE, 1)
        assert table.said() == [(RAYLET, m.Release([put_id(2)]))]
        table.pins.view_died(put_id(1))
        table.pins.give_up(SIZE, 1)
        assert table.said() == [(RAYLET, m.Release([put_id(1)]))]

    def test_the_pin_of_an_object_that_a_get_is_about_to_read_stays(self, table: Table) -> None:
        gathered = [put_id(1), put_id(2)]
        table.pins.being_read.append(gathered)
        table.pins.give_up(10 * SIZE, 1)
        assert table.said() == [(RAYLET, m.Release([put_id(3)]))]

    def test_an_object_whose_pin_was_given_up_is_opened_again_by_the_next_read(self, table: Table) -> None:
        table.pins.give_up(SIZE, 1)
        table.said()
        waiter = Waiter()
        assert not table.wait_local(put_id(1), waiter)
        assert table.said() == [(RAYLET, m.Open(put_id(1), SIZE, [1]))]
        table.on_opened(m.Opened(put_id(1), 7 * SIZE, SIZE, False))
        assert table.fired == [waiter]
        mapping = table.entries[put_id(1)].mapping
        assert mapping is not None and mapping.offset == 7 * SIZE, "it may lie elsewhere now"

    def test_the_pin_of_the_last_read_is_given_up_last(self, table: Table) -> None:
        table.pins.give_up(SIZE, 1)
        table.wait_local(put_id(1), Waiter())
        table.on_opened(m.Opened(put_id(1), 0, SIZE, False))
        table.said()
        table.pins.give_up(2 * SIZE, 1)
        assert table.said() == [(RAYLET, m.Release([put_id(2), put_id(3)]))]

    def test_without_pins_nothing_is_sent_to_the_store(self, table: Table) -> None:
        table.pins.give_up(10 * SIZE, 1)
        table.said()
        table.pins.give_up(10 * SIZE, 1)
        assert table.said() == []

    def test_the_owner_frees_an_object_whose_pin_it_gave_up(self, table: Table) -> None:
        table.pins.give_up(SIZE, 1)
        table.said()
        table.refs.remove_local_ref(put_id(1))
        assert table.said() == [(RAYLET, m.Free([put_id(1)], [1]))]

    def test_a_dead_ref_is_not_given_up_again(self, table: Table) -> None:
        table.refs.remove_local_ref(put_id(1))
        table.said()
        table.pins.give_up(SIZE, 1)
        assert table.said() == [(RAYLET, m.Release([put_id(2)]))]


class TestNoRoom:
    def refuse(self, table: Table) -> Waiter:
        table.pins.give_up(SIZE, 1)
        waiter = Waiter(count=2, eager=True)
        table.wait_local(put_id(1), waiter)
        table.said()
        table.on_store_error(m.StoreError(put_id(1), "full", "no room"))
        return waiter

    def test_a_reader_gets_the_error_of_a_full_store_and_the_object_is_not_lost(self, table: Table) -> None:
        waiter = self.refuse(table)
        assert table.fired == [waiter] and waiter.count == 0
        assert table.entries[put_id(1)].state == STORED
        assert table.pins.refused == {put_id(1): "no room"}

    def test_the_next_read_after_a_full_store_opens_the_object_again(self, table: Table) -> None:
        self.refuse(table)
        assert not table.wait_local(put_id(1), Waiter())
        assert table.said() == [(RAYLET, m.Open(put_id(1), SIZE, [1]))]
        assert table.pins.refused == {}

    def test_the_refusal_of_a_full_store_is_forgotten_with_the_object(self, table: Table) -> None:
        self.refuse(table)
        table.refs.remove_local_ref(put_id(1))
        assert table.said() == [(RAYLET, m.Free([put_id(1)], [1]))]
        assert table.pins.refused == {} and put_id(1) not in table.pins.mapped


class TestUrgency:
    """What somebody waits to read comes before what somebody only asks about."""

    @pytest.fixture
    def far(self, table: Table) -> bytes:
        oid = put_id(9)
        table.create(oid)
        table.set_stored(oid, SIZE, 3)
        table.said()
        return oid

    def test_a_get_after_a_wait_raises_the_priority_of_the_open_under_way(self, table: Table, far: bytes) -> None:
        table.wait_local(far, Waiter(), 1)
        assert table.said() == [(RAYLET, m.Open(far, SIZE, [3], 1))]
        table.wait_local(far, Waiter(), 1)
        assert table.said() == [], "it is asked for already"
        table.wait_local(far, Waiter())
        assert table.said() == [(RAYLET, m.RaisePriority(far, 0))]
        table.wait_local(far, Waiter())
        assert table.said() == []

    def test_a_pending_object_is_opened_with_the_priority_of_its_most_urgent_waiter(self, table: Table) -> None:
        for counter, priorities in ((11, (1,)), (12, (1, 0)), (13, (0, 1))):
            table.create(put_id(counter))
            for priority in priorities:
                table.wait_local(put_id(counter), Waiter(), priority)
            table.set_stored(put_id(counter), SIZE, 3)
            assert table.said() == [(RAYLET, m.Open(put_id(counter), SIZE, [3], min(priorities)))]

    def test_an_answer_ends_the_priority_of_an_open(self, table: Table, far: bytes) -> None:
        table.wait_local(far, Waiter(), 1)
        table.on_opened(m.Opened(far, 0, SIZE, False))
        table.pins.give_up(10 * SIZE, 1)
        table.said()
        table.wait_local(far, Waiter())
        assert table.said() == [(RAYLET, m.Open(far, SIZE, [3]))]


class TestFiles:
    """What the store has no room for is read from its file."""

    LENT = m.OnDisk(put_id(1), "/proc/1/fd/9", 4096, SIZE)

    @pytest.fixture
    def lent(self, table: Table) -> Waiter:
        table.pins.give_up(10 * SIZE, 1)
        waiter = Waiter()
        table.wait_local(put_id(1), waiter)
        table.said()
        table.on_disk(self.LENT)
        return waiter

    def test_waiters_may_read_a_lent_file_and_the_last_reader_gives_it_back(self, table: Table, lent: Waiter) -> None:
        assert table.fired == [lent]
        assert table.wait_local(put_id(1), Waiter()), "another may read it too"
        assert table.pins.begin_file(put_id(1)) == table.pins.begin_file(put_id(1)) == self.LENT
        table.pins.end_file(put_id(1))
        assert table.said() == []
        table.pins.end_file(put_id(1))
        assert table.said() == [(RAYLET, m.DiskRead(put_id(1)))]
        assert not table.wait_local(put_id(1), Waiter()), "the next one asks the store again"
        assert table.said() == [(RAYLET, m.Open(put_id(1), SIZE, [1]))]

    def test_a_lent_file_without_readers_goes_back_with_the_last_ref(self, table: Table, lent: Waiter) -> None:
        table.refs.remove_local_ref(put_id(1))
        assert (RAYLET, m.DiskRead(put_id(1))) in table.said()

    def test_a_lent_file_goes_back_after_its_reader_when_the_last_ref_dies_meanwhile(
        self, table: Table, lent: Waiter
    ) -> None:
        table.pins.begin_file(put_id(1))
        table.refs.remove_local_ref(put_id(1))
        assert (RAYLET, m.DiskRead(put_id(1))) not in table.said()
        table.pins.end_file(put_id(1))
        assert table.said() == [(RAYLET, m.DiskRead(put_id(1)))]

    def test_a_lent_file_that_no_entry_needs_goes_back_at_once(self, table: Table) -> None:
        table.pins.give_up(10 * SIZE, 1)
        table.wait_local(put_id(1), Waiter())
        table.refs.remove_local_ref(put_id(1))
        table.said()
        table.on_disk(self.LENT)
        assert table.said() == [(RAYLET, m.DiskRead(put_id(1)))]

    def test_a_file_that_cannot_be_read_is_reported_when_its_last_reader_is_done(
        self, table: Table, lent: Waiter
    ) -> None:
        table.pins.begin_file(put_id(1))
        table.pins.begin_file(put_id(1))
        table.pins.file_failed(put_id(1), "broken")
        waiter = Waiter()
        assert not table.wait_local(put_id(1), waiter)
        assert table.said() == [], "what lies there must stay while another thread reads it"
        table.pins.end_file(put_id(1))
        assert table.said() == [(RAYLET, m.DiskRead(put_id(1), "broken", SIZE, [1]))]
        assert not table.wait_local(put_id(1), Waiter()) and table.said() == [], "that is an Open, too"
        table.on_opened(m.Opened(put_id(1), 0, SIZE, False))
        assert waiter in table.fired and table.entries[put_id(1)].mapping is not None

    def test_all_readers_of_a_lent_file_may_fail(self, table: Table, lent: Waiter) -> None:
        for _ in range(3):
            table.pins.begin_file(put_id(1))
        for number in range(3):
            assert table.said() == []
            table.pins.file_failed(put_id(1), f"error {number}")
        assert table.said() == [(RAYLET, m.DiskRead(put_id(1), "error 0", SIZE, [1]))]
        table.on_disk(self.LENT)
        assert table.wait_local(put_id(1), Waiter()), "it lies elsewhere on disk now"
        table.pins.begin_file(put_id(1))
        table.pins.end_file(put_id(1))
        assert table.said() == [(RAYLET, m.DiskRead(put_id(1)))]

    def test_a_lent_file_that_cannot_be_read_after_the_last_ref_died_is_reported(
        self, table: Table, lent: Waiter
    ) -> None:
        table.pins.begin_file(put_id(1))
        table.refs.remove_local_ref(put_id(1))
        table.said()
        table.pins.file_failed(put_id(1), "broken")
        assert table.said() == [(RAYLET, m.DiskRead(put_id(1), "broken", SIZE, []))]
        table.on_opened(m.Opened(put_id(1), 0, SIZE, False))
        assert table.said() == [(RAYLET, m.Release([put_id(1)]))]
