"""The borrower protocol, message by message: who counts whom, what waits for what, and what deaths do."""

from __future__ import annotations

import pytest
from table_kit import ME, PEER, RAYLET, SIZE, THIRD, Table, put_id

from hpcray.core.owner.table import Waiter
from hpcray.wire import messages as m

MINE = put_id()
THEIRS = put_id(1, PEER)
OTHERS = put_id(2, PEER)
THIRDS = put_id(1, THIRD)
REPLY = m.TaskReply(b"t" * 13, 0, [], 0)


@pytest.fixture
def table() -> Table:
    return Table()


def acked(table: Table, seq: int) -> list[tuple[bytes, m.Message]]:
    table.on_borrow_ack(m.BorrowAck(seq))
    return table.said()


class TestBorrower:
    def test_outside_of_tasks_it_counts_itself_at_once(self, table: Table) -> None:
        table.arrived(THEIRS, None)
        assert table.said() == [(PEER, m.BorrowAdd([THEIRS], ME, 1))]
        assert table.unacked == 1
        table.arrived(THEIRS, None)
        assert table.said() == [], "a second ref of the same process is its own affair"
        acked(table, 1)
        table.release(THEIRS)
        assert table.said() == []
        table.release(THEIRS)
        assert table.said() == [(PEER, m.BorrowDrop([THEIRS], ME))]
        assert table.entries == {}

    def test_a_drop_waits_for_every_registration_before_it(self, table: Table) -> None:
        """What is dropped may be what kept the registered object alive so far."""
        table.borrow(THIRDS)
        table.arrived(THEIRS, None)
        table.said()
        table.release(THIRDS)
        assert table.said() == []
        assert acked(table, 2) == [(THIRD, m.BorrowDrop([THIRDS], ME))]

    def test_it_does_not_wait_for_those_after_it(self, table: Table) -> None:
        """Else a busy actor, that always has one under way, would never let go nor answer."""
        table.borrow(THIRDS)
        table.arrived(THEIRS, None)
        table.release(THIRDS)
        table.hold(PEER, REPLY)
        table.arrived(OTHERS, None)
        table.said()
        assert acked(table, 2) == [(THIRD, m.BorrowDrop([THIRDS], ME)), (PEER, REPLY)]
        assert table.unacked == 1

    def test_acknowledgements_out_of_order(self, table: Table) -> None:
        table.arrived(THIRDS, None)
        table.arrived(THEIRS, None)
        table.hold(PEER, REPLY)
        table.said()
        assert acked(table, 2) == []
        assert acked(table, 2) == [], "once is enough"
        assert acked(table, 1) == [(PEER, REPLY)]

    def test_what_is_held_keeps_its_order(self, table: Table) -> None:
        """A reply that hands a ref to its owner must come before our own drop of it."""
        table.borrow(THEIRS)
        table.arrived(THIRDS, None)
        table.hold(PEER, REPLY)
        table.release(THEIRS)
        table.said()
        assert acked(table, 2) == [(PEER, REPLY), (PEER, m.BorrowDrop([THEIRS], ME))]

    def test_without_registrations_nothing_is_held(self, table: Table) -> None:
        table.hold(PEER, REPLY)
        assert table.said() == [(PEER, REPLY)]

    def test_a_dead_owner_acknowledges_nothing(self, table: Table) -> None:
        table.borrow(THIRDS)
        table.arrived(THEIRS, None)
        table.release(THIRDS)
        table.said()
        table.process_died(PEER, "killed")
        assert table.said() == [(THIRD, m.BorrowDrop([THIRDS], ME))]
        assert table.unacked == 0


class TestTaskArguments:
    def test_a_protected_ref_costs_no_message(self, table: Table) -> None:
        protected: list[bytes] = []
        table.arrived(THIRDS, protected)
        assert protected == [THIRDS]
        table.release(THIRDS)
        assert table.keep(protected, PEER) == []
        assert table.said() == [] and table.entries == {}

    def test_kept_beyond_the_task_it_is_registered_before_the_reply(self, table: Table) -> None:
        protected: list[bytes] = []
        table.arrived(THIRDS, protected)
        assert table.keep(protected, PEER) == []
        table.hold(PEER, REPLY)
        assert table.said() == [(THIRD, m.BorrowAdd([THIRDS], ME, 1))]
        assert acked(table, 1) == [(PEER, REPLY)]

    def test_the_submitter_learns_of_its_own_from_the_reply(self, table: Table) -> None:
        protected: list[bytes] = []
        table.arrived(THEIRS, protected)
        table.arrived(THEIRS, protected)
        assert table.keep(protected, PEER) == [THEIRS]
        assert table.said() == []
        table.release(THEIRS)
        table.release(THEIRS)
        assert table.said() == [(PEER, m.BorrowDrop([THEIRS], ME))]

    def test_one_message_for_several_of_one_owner(self, table: Table) -> None:
        protected: list[bytes] = []
        for oid in (THEIRS, THIRDS, OTHERS):
            table.arrived(oid, protected)
        table.keep(protected, ME)
        assert table.said() == [(PEER, m.BorrowAdd([THEIRS, OTHERS], ME, 1)), (THIRD, m.BorrowAdd([THIRDS], ME, 2))]

    def test_two_tasks_with_the_same_ref(self, table: Table) -> None:
        first: list[bytes] = []
        second: list[bytes] = []
        table.arrived(THIRDS, first)
        table.arrived(THIRDS, second)
        table.release(THIRDS)
        table.keep(first, PEER)
        assert table.said() == [(THIRD, m.BorrowAdd([THIRDS], ME, 1))]
        assert table.keep(second, PEER) == [] and table.said() == []

    def test_a_drop_ends_the_reliance_on_protection(self, table: Table) -> None:
        """The inner ref may have come out of what is dropped, not out of the arguments."""
        table.borrow(THIRDS)
        protected: list[bytes] = []
        table.arrived(THEIRS, protected)
        table.release(THIRDS)
        assert table.said() == [(PEER, m.BorrowAdd([THEIRS], ME, 2))]
        assert acked(table, 2) == [(THIRD, m.BorrowDrop([THIRDS], ME))]
        assert table.keep(protected, PEER) == [], "it is registered already"

    def test_the_submitter_dies(self, table: Table) -> None:
        table.arrived(THIRDS, [])
        table.process_died(PEER, "killed")
        assert table.said() == [(THIRD, m.BorrowAdd([THIRDS], ME, 1))]


class TestOwner:
    def test_kept_until_the_last_borrower_lets_go(self, table: Table) -> None:
        table.owned(MINE)
        table.on_borrow_add(PEER, m.BorrowAdd([MINE], PEER, 4))
        table.on_borrow_add(THIRD, m.BorrowAdd([MINE], THIRD, 9))
        assert table.said() == [(PEER, m.BorrowAck(4)), (THIRD, m.BorrowAck(9))]
        table.release(MINE)
        table.on_borrow_drop(m.BorrowDrop([MINE], PEER))
        assert MINE in table.entries
        table.on_borrow_drop(m.BorrowDrop([MINE], THIRD))
        assert table.entries == {}

    def test_named_in_a_reply(self, table: Table) -> None:
        table.owned(MINE)
        table.borrowed_by(PEER, [MINE])
        table.release(MINE)
        assert MINE in table.entries
        table.on_borrow_drop(m.BorrowDrop([MINE], PEER))
        assert table.entries == {}

    def test_the_death_of_a_borrower_ends_its_borrows(self, table: Table) -> None:
        table.stored(MINE, node=2)
        table.lend(MINE, PEER)
        table.lend(MINE, PEER)
        table.release(MINE)
        table.process_died(THIRD, "killed")
        assert MINE in table.entries
        table.process_died(PEER, "killed")
        assert table.said() == [(RAYLET, m.Free([MINE], [2]))]

    def test_of_what_is_freed_already(self, table: Table) -> None:
        table.on_borrow_add(PEER, m.BorrowAdd([MINE], PEER, 4))
        table.on_borrow_drop(m.BorrowDrop([MINE], PEER))
        table.on_borrow_take(PEER, m.BorrowTake([MINE], THIRD))
        assert table.said() == [(PEER, m.BorrowAck(4))], "the borrower will hear it when it asks for the value"
        assert table.entries == {}


class TestReturnedRefs:
    def test_of_our_own(self, table: Table) -> None:
        table.owned(MINE)
        table.give(MINE, PEER)
        assert table.said() == []
        table.release(MINE)
        assert MINE in table.entries, "the submitter holds it from the start"

    def test_of_the_submitters_own(self, table: Table) -> None:
        """No answer is awaited: it takes the way of the reply. But our drop must not come in between."""
        table.borrow(THEIRS)
        table.give(THEIRS, PEER)
        table.release(THEIRS)
        table.hold(PEER, REPLY)
        pledge, drop = m.BorrowAdd([THEIRS], PEER, 0), m.BorrowDrop([THEIRS], ME)
        assert table.said() == [(PEER, pledge), (PEER, drop), (PEER, REPLY)]

    def test_of_our_own_by_a_worker_that_drops_it_first(self, table: Table) -> None:
        table.owned(MINE)
        table.lend(MINE, PEER)
        table.release(MINE)
        table.on_borrow_add(PEER, m.BorrowAdd([MINE], ME, 0))
        table.on_borrow_drop(m.BorrowDrop([MINE], PEER))
        table.adopt(MINE, PEER)
        assert table.entries[MINE].local == 1 and not table.entries[MINE].borrowers
        table.release(MINE)
        assert table.entries == {} and table.said() == []

    def test_of_our_own_by_a_worker_that_dies_before_its_reply(self, table: Table) -> None:
        table.owned(MINE)
        table.on_borrow_add(PEER, m.BorrowAdd([MINE], ME, 0))
        table.release(MINE)
        table.process_died(PEER, "killed")
        assert table.entries == {} and table.said() == []

    def test_a_reply_that_fails_in_the_making_takes_its_refs_back(self, table: Table) -> None:
        table.owned(MINE)
        table.give(MINE, PEER)
        table.take_back(MINE, PEER)
        table.release(MINE)
        assert table.entries == {}
        table.borrow(THIRDS)
        table.give(THIRDS, PEER)
        table.take_back(THIRDS, PEER)
        add, drop = m.BorrowAdd([THIRDS], PEER, 2), m.BorrowDrop([THIRDS], ME + PEER)
        assert table.said() == [(THIRD, add), (THIRD, drop)]
        owner = Table()
        owner.owned(MINE)
        owner.on_borrow_add(PEER, m.BorrowAdd([MINE], THIRD, 2))
        owner.release(MINE)
        owner.on_borrow_drop(m.BorrowDrop([MINE], PEER + THIRD))
        assert owner.entries == {}

    def test_of_a_third_process_it_is_pledged_before_the_reply(self, table: Table) -> None:
        table.borrow(THIRDS)
        table.give(THIRDS, PEER)
        table.hold(PEER, REPLY)
        table.release(THIRDS)
        assert table.said() == [(THIRD, m.BorrowAdd([THIRDS], PEER, 2))]
        assert acked(table, 2) == [(PEER, REPLY), (THIRD, m.BorrowDrop([THIRDS], ME))]

    def test_the_taker_takes_over(self, table: Table) -> None:
        table.adopt(THIRDS, PEER)
        assert table.said() == [(THIRD, m.BorrowTake([THIRDS], PEER))]
        assert table.entries[THIRDS].local == 1
        table.release(THIRDS)
        assert table.said() == [(THIRD, m.BorrowDrop([THIRDS], ME))]

    def test_of_the_givers_own_nothing_is_to_be_taken(self, table: Table) -> None:
        table.adopt(THEIRS, PEER)
        assert table.said() == []
        table.release(THEIRS)
        assert table.said() == [(PEER, m.BorrowDrop([THEIRS], ME))]

    def test_one_that_the_taker_knows_is_counted_once(self, table: Table) -> None:
        table.borrow(THIRDS)
        table.adopt(THIRDS, PEER)
        assert table.said() == [(THIRD, m.BorrowTake([THIRDS], PEER)), (THIRD, m.BorrowDrop([THIRDS], ME))]
        assert table.entries[THIRDS].local == 2

    def test_one_that_was_protected_until_now_needs_no_other_count(self, table: Table) -> None:
        protected: list[bytes] = []
        table.arrived(THIRDS, protected)
        table.adopt(THIRDS, PEER)
        assert table.said() == [(THIRD, m.BorrowTake([THIRDS], PEER))]
        assert table.keep(protected, PEER) == []

    def test_our_own_comes_back(self, table: Table) -> None:
        table.owned(MINE)
        table.adopt(MINE, PEER)
        assert table.entries[MINE].local == 2 and table.said() == []


class TestPledges:
    """The owner's side of a returned ref: PEER gives it to THIRD."""

    @pytest.fixture(autouse=True)
    def pledged(self, table: Table) -> None:
        table.owned(MINE)
        table.on_borrow_add(PEER, m.BorrowAdd([MINE], THIRD, 3))
        assert table.said() == [(THIRD, m.BorrowAck(0)), (PEER, m.BorrowAck(3))], "so that we hear of a death of it"
        table.release(MINE)
        assert MINE in table.entries

    def test_taken_and_dropped(self, table: Table) -> None:
        table.on_borrow_take(THIRD, m.BorrowTake([MINE], PEER))
        table.process_died(PEER, "killed")
        assert MINE in table.entries and table.said() == []
        table.on_borrow_drop(m.BorrowDrop([MINE], THIRD))
        assert table.entries == {}

    def test_the_giver_dies_and_the_reply_never_came(self, table: Table) -> None:
        table.process_died(PEER, "killed")
        assert table.said() == [(THIRD, m.BorrowAsk(PEER))]
        assert MINE in table.entries, "it may be on its way"
        table.on_borrow_end(THIRD, m.BorrowEnd(PEER))
        assert table.entries == {}

    def test_the_giver_dies_and_the_reply_had_come(self, table: Table) -> None:
        table.process_died(PEER, "killed")
        table.on_borrow_take(THIRD, m.BorrowTake([MINE], PEER))
        table.on_borrow_end(THIRD, m.BorrowEnd(PEER))
        assert MINE in table.entries
        table.process_died(THIRD, "killed")
        assert table.entries == {}

    def test_the_taker_dies(self, table: Table) -> None:
        table.process_died(THIRD, "killed")
        assert table.entries == {} and table.said() == []

    def test_a_pledge_to_one_that_is_dead_makes_us_hear_of_it_again(self, table: Table) -> None:
        table.process_died(THIRD, "killed")
        table.owned(put_id(2))
        table.on_borrow_add(PEER, m.BorrowAdd([put_id(2)], THIRD, 4))
        assert (THIRD, m.BorrowAck(0)) in table.said()


class TestAskedOfADeadGiver:
    def test_the_answer_comes_when_nothing_can_come_any_more(self, table: Table) -> None:
        table.on_borrow_ask(THIRD, m.BorrowAsk(PEER))
        assert table.said() == [(PEER, m.BorrowAck(0))], "if we have not heard of its death, this makes us hear"
        table.adopt(THIRDS, PEER)  # its last reply
        table.process_died(PEER, "killed")
        assert table.said() == [(THIRD, m.BorrowTake([THIRDS], PEER)), (THIRD, m.BorrowEnd(PEER))]

    def test_an_acknowledgement_with_number_0_means_nothing(self, table: Table) -> None:
        table.arrived(THIRDS, None)
        table.on_borrow_ack(m.BorrowAck(0))
        assert table.unacked == 1


def test_the_owner_of_a_container_protects_what_is_inside(table: Table) -> None:
    """The outer object is let go only after the owner of the inner one knows us."""
    table.borrow(THEIRS, SIZE)
    table.want_local(THEIRS, Waiter())
    table.on_opened(m.Opened(THEIRS, 64, SIZE, False))
    table.said()
    table.arrived(THIRDS, None)
    table.release(THEIRS)
    assert table.said() == [(THIRD, m.BorrowAdd([THIRDS], ME, 2)), (RAYLET, m.Release([THEIRS]))]
    assert acked(table, 2) == [(PEER, m.BorrowDrop([THEIRS], ME))]
