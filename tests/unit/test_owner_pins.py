"""Pins that a process keeps for later reads, and gives up when its node's store is short of room."""

from __future__ import annotations

import pytest
from table_kit import RAYLET, SIZE, Table, put_id

from hpcray.core.owner.table import STORED, Waiter
from hpcray.wire import messages as m


@pytest.fixture
def table() -> Table:
    table = Table()
    for counter in (1, 2, 3):
        table.create(put_id(counter)).local = 1
        table.created_here(put_id(counter), counter * SIZE, SIZE, 1, None)
    return table


class TestGivingUp:
    def test_the_oldest_goes_first_and_no_more_than_asked_for(self, table: Table) -> None:
        table.pins.give_up(SIZE + 1, 1)
        assert table.said() == [(RAYLET, m.Release([put_id(1), put_id(2)]))]
        assert table.entries[put_id(3)].mapping is not None

    def test_what_a_view_needs_stays_until_the_view_is_dead(self, table: Table) -> None:
        table.entries[put_id(1)].mapping.views += 1  # type: ignore[union-attr]
        table.pins.give_up(SIZE, 1)
        assert table.said() == [(RAYLET, m.Release([put_id(2)]))]
        table.view_died(put_id(1))
        table.pins.give_up(SIZE, 1)
        assert table.said() == [(RAYLET, m.Release([put_id(1)]))]

    def test_what_somebody_gathers_stays(self, table: Table) -> None:
        gathered = [put_id(1), put_id(2)]
        table.pins.gathering.append(gathered)
        table.pins.give_up(10 * SIZE, 1)
        assert table.said() == [(RAYLET, m.Release([put_id(3)]))]

    def test_it_is_opened_again_when_it_is_read_again(self, table: Table) -> None:
        table.pins.give_up(SIZE, 1)
        table.said()
        waiter = Waiter()
        assert not table.want_local(put_id(1), waiter)
        assert table.said() == [(RAYLET, m.Open(put_id(1), SIZE, [1]))]
        table.on_opened(m.Opened(put_id(1), 7 * SIZE, SIZE, False))
        assert table.fired == [waiter]
        mapping = table.entries[put_id(1)].mapping
        assert mapping is not None and mapping.offset == 7 * SIZE, "it may lie elsewhere now"

    def test_the_one_read_last_goes_last(self, table: Table) -> None:
        table.pins.give_up(SIZE, 1)
        table.want_local(put_id(1), Waiter())
        table.on_opened(m.Opened(put_id(1), 0, SIZE, False))
        table.said()
        table.pins.give_up(2 * SIZE, 1)
        assert table.said() == [(RAYLET, m.Release([put_id(2), put_id(3)]))]

    def test_with_nothing_to_give_it_says_nothing(self, table: Table) -> None:
        table.pins.give_up(10 * SIZE, 1)
        table.said()
        table.pins.give_up(10 * SIZE, 1)
        assert table.said() == []

    def test_the_owner_still_frees_what_it_has_not_pinned(self, table: Table) -> None:
        table.pins.give_up(SIZE, 1)
        table.said()
        table.release(put_id(1))
        assert table.said() == [(RAYLET, m.Free([put_id(1)], [1]))]

    def test_a_dead_ref_is_not_given_up_again(self, table: Table) -> None:
        table.release(put_id(1))
        table.said()
        table.pins.give_up(SIZE, 1)
        assert table.said() == [(RAYLET, m.Release([put_id(2)]))]


class TestNoRoom:
    def refuse(self, table: Table) -> Waiter:
        table.pins.give_up(SIZE, 1)
        waiter = Waiter(count=2, eager=True)
        table.want_local(put_id(1), waiter)
        table.said()
        table.on_store_error(m.StoreError(put_id(1), "full", "no room"))
        return waiter

    def test_who_reads_hears_of_it_and_the_object_is_not_lost(self, table: Table) -> None:
        waiter = self.refuse(table)
        assert table.fired == [waiter] and waiter.count == 0
        assert table.entries[put_id(1)].state == STORED
        assert table.pins.refused == {put_id(1): "no room"}

    def test_the_next_read_asks_again(self, table: Table) -> None:
        self.refuse(table)
        assert not table.want_local(put_id(1), Waiter())
        assert table.said() == [(RAYLET, m.Open(put_id(1), SIZE, [1]))]
        assert table.pins.refused == {}

    def test_nothing_is_kept_about_it_when_it_goes(self, table: Table) -> None:
        self.refuse(table)
        table.release(put_id(1))
        assert table.said() == [(RAYLET, m.Free([put_id(1)], [1]))]
        assert table.pins.refused == {} and put_id(1) not in table.pins.mapped


class TestUrgency:
    """What somebody waits to read comes before what somebody only asks about."""

    @pytest.fixture
    def far(self, table: Table) -> bytes:
        oid = put_id(9)
        table.create(oid).local = 1
        table.set_stored(oid, SIZE, 3)
        table.said()
        return oid

    def test_a_get_after_a_wait_raises_what_is_under_way(self, table: Table, far: bytes) -> None:
        table.want_local(far, Waiter(), 1)
        assert table.said() == [(RAYLET, m.Open(far, SIZE, [3], 1))]
        table.want_local(far, Waiter(), 1)
        assert table.said() == [], "it is asked for already"
        table.want_local(far, Waiter())
        assert table.said() == [(RAYLET, m.Hurry(far, 0))]
        table.want_local(far, Waiter())
        assert table.said() == []

    def test_what_is_not_made_yet_is_as_urgent_as_the_most_urgent_who_waits(self, table: Table) -> None:
        for counter, priorities in ((11, (1,)), (12, (1, 0)), (13, (0, 1))):
            table.create(put_id(counter)).local = 1
            for priority in priorities:
                table.want_local(put_id(counter), Waiter(), priority)
            table.set_stored(put_id(counter), SIZE, 3)
            assert table.said() == [(RAYLET, m.Open(put_id(counter), SIZE, [3], min(priorities)))]

    def test_an_answer_ends_it(self, table: Table, far: bytes) -> None:
        table.want_local(far, Waiter(), 1)
        table.on_opened(m.Opened(far, 0, SIZE, False))
        table.pins.give_up(10 * SIZE, 1)
        table.said()
        table.want_local(far, Waiter())
        assert table.said() == [(RAYLET, m.Open(far, SIZE, [3]))]


class TestFiles:
    """What the store has no room for is read from its file."""

    LENT = m.OnDisk(put_id(1), "/proc/1/fd/9", 4096, SIZE)

    @pytest.fixture
    def lent(self, table: Table) -> Waiter:
        table.pins.give_up(10 * SIZE, 1)
        waiter = Waiter()
        table.want_local(put_id(1), waiter)
        table.said()
        table.on_disk(self.LENT)
        return waiter

    def test_who_waits_may_read_and_the_last_reader_says_so(self, table: Table, lent: Waiter) -> None:
        assert table.fired == [lent]
        assert table.want_local(put_id(1), Waiter()), "another may read it too"
        assert table.begin_file(put_id(1)) == table.begin_file(put_id(1)) == self.LENT
        table.end_file(put_id(1))
        assert table.said() == []
        table.end_file(put_id(1))
        assert table.said() == [(RAYLET, m.DiskRead(put_id(1)))]
        assert not table.want_local(put_id(1), Waiter()), "the next one asks the store again"
        assert table.said() == [(RAYLET, m.Open(put_id(1), SIZE, [1]))]

    def test_nobody_reads_it_and_the_last_ref_dies(self, table: Table, lent: Waiter) -> None:
        table.release(put_id(1))
        assert (RAYLET, m.DiskRead(put_id(1))) in table.said()

    def test_the_last_ref_dies_while_it_is_read(self, table: Table, lent: Waiter) -> None:
        table.begin_file(put_id(1))
        table.release(put_id(1))
        assert (RAYLET, m.DiskRead(put_id(1))) not in table.said()
        table.end_file(put_id(1))
        assert table.said() == [(RAYLET, m.DiskRead(put_id(1)))]

    def test_nobody_wants_it_any_more_when_the_answer_comes(self, table: Table) -> None:
        table.pins.give_up(10 * SIZE, 1)
        table.want_local(put_id(1), Waiter())
        table.release(put_id(1))
        table.said()
        table.on_disk(self.LENT)
        assert table.said() == [(RAYLET, m.DiskRead(put_id(1)))]

    def test_what_cannot_be_read_is_asked_for_again_when_the_last_reader_is_done(
        self, table: Table, lent: Waiter
    ) -> None:
        table.begin_file(put_id(1))
        table.begin_file(put_id(1))
        table.file_failed(put_id(1), "broken")
        waiter = Waiter()
        assert not table.want_local(put_id(1), waiter)
        assert table.said() == [], "what lies there must stay while another thread reads it"
        table.end_file(put_id(1))
        assert table.said() == [(RAYLET, m.DiskRead(put_id(1), "broken", SIZE, [1]))]
        assert not table.want_local(put_id(1), Waiter()) and table.said() == [], "that is an Open, too"
        table.on_opened(m.Opened(put_id(1), 0, SIZE, False))
        assert waiter in table.fired and table.entries[put_id(1)].mapping is not None

    def test_all_of_its_readers_may_fail(self, table: Table, lent: Waiter) -> None:
        for _ in range(3):
            table.begin_file(put_id(1))
        for number in range(3):
            assert table.said() == []
            table.file_failed(put_id(1), f"error {number}")
        assert table.said() == [(RAYLET, m.DiskRead(put_id(1), "error 0", SIZE, [1]))]
        table.on_disk(self.LENT)
        assert table.want_local(put_id(1), Waiter()), "it lies elsewhere on disk now"
        table.begin_file(put_id(1))
        table.end_file(put_id(1))
        assert table.said() == [(RAYLET, m.DiskRead(put_id(1)))]

    def test_the_last_ref_dies_and_then_it_cannot_be_read(self, table: Table, lent: Waiter) -> None:
        table.begin_file(put_id(1))
        table.release(put_id(1))
        table.said()
        table.file_failed(put_id(1), "broken")
        assert table.said() == [(RAYLET, m.DiskRead(put_id(1), "broken", SIZE, []))]
        table.on_opened(m.Opened(put_id(1), 0, SIZE, False))
        assert table.said() == [(RAYLET, m.Release([put_id(1)]))]
