"""The borrower protocol, message by message: who counts whom, what waits for what, and what deaths do."""

from __future__ import annotations

import pytest
from table_kit import ME, PEER, RAYLET, SIZE, THIRD, Table, put_id

from hpcray.core.core_worker.object_table import Waiter
from hpcray.protocol import messages as m

MINE = put_id()
THEIRS = put_id(1, PEER)
OTHERS = put_id(2, PEER)
THIRDS = put_id(1, THIRD)
REPLY = m.TaskReply(b"t" * 13, 0, [], 0)


@pytest.fixture
def table() -> Table:
    return Table()


def acked(table: Table, seq: int) -> list[tuple[bytes, m.Message]]:
    table.refs.on_borrow_ack(m.BorrowAck(seq))
    return table.said()


class TestBorrower:
    def test_a_borrower_outside_of_tasks_counts_itself_at_once(self, table: Table) -> None:
        table.refs.ref_deserialized(THEIRS, None)
        assert table.said() == [(PEER, m.BorrowAdd([THEIRS], ME, 1))]
        assert len(table.refs.unacked) == 1
        table.refs.ref_deserialized(THEIRS, None)
        assert table.said() == [], "a second ref of the same process is its own affair"
        acked(table, 1)
        table.refs.remove_local_ref(THEIRS)
        assert table.said() == []
        table.refs.remove_local_ref(THEIRS)
        assert table.said() == [(PEER, m.BorrowDrop([THEIRS], ME))]
        assert table.entries == {}

    def test_a_drop_waits_for_every_registration_before_it(self, table: Table) -> None:
        """What is dropped may be what kept the registered object alive so far."""
        table.borrow(THIRDS)
        table.refs.ref_deserialized(THEIRS, None)
        table.said()
        table.refs.remove_local_ref(THIRDS)
        assert table.said() == []
        assert acked(table, 2) == [(THIRD, m.BorrowDrop([THIRDS], ME))]

    def test_a_drop_does_not_wait_for_registrations_after_it(self, table: Table) -> None:
        """Else a busy actor, that always has one under way, would never let go nor answer."""
        table.borrow(THIRDS)
        table.refs.ref_deserialized(THEIRS, None)
        table.refs.remove_local_ref(THIRDS)
        table.refs.send_after_acks(PEER, REPLY)
        table.refs.ref_deserialized(OTHERS, None)
        table.said()
        assert acked(table, 2) == [(THIRD, m.BorrowDrop([THIRDS], ME)), (PEER, REPLY)]
        assert len(table.refs.unacked) == 1

    def test_acknowledgements_out_of_order(self, table: Table) -> None:
        table.refs.ref_deserialized(THIRDS, None)
        table.refs.ref_deserialized(THEIRS, None)
        table.refs.send_after_acks(PEER, REPLY)
        table.said()
        assert acked(table, 2) == []
        assert acked(table, 2) == [], "once is enough"
        assert acked(table, 1) == [(PEER, REPLY)]

    def test_held_messages_keep_their_order(self, table: Table) -> None:
        """A reply that hands a ref to its owner must come before our own drop of it."""
        table.borrow(THEIRS)
        table.refs.ref_deserialized(THIRDS, None)
        table.refs.send_after_acks(PEER, REPLY)
        table.refs.remove_local_ref(THEIRS)
        table.said()
        assert acked(table, 2) == [(PEER, REPLY), (PEER, m.BorrowDrop([THEIRS], ME))]

    def test_without_registrations_nothing_is_held(self, table: Table) -> None:
        table.refs.send_after_acks(PEER, REPLY)
        assert table.said() == [(PEER, REPLY)]

    def test_a_dead_owner_acknowledges_nothing(self, table: Table) -> None:
        table.borrow(THIRDS)
        table.refs.ref_deserialized(THEIRS, None)
        table.refs.remove_local_ref(THIRDS)
        table.said()
        table.process_died(PEER, "killed")
        assert table.said() == [(THIRD, m.BorrowDrop([THIRDS], ME))]
        assert not table.refs.unacked


class TestTaskArguments:
    def test_a_protected_ref_costs_no_message(self, table: Table) -> None:
        protected: list[bytes] = []
        table.refs.ref_deserialized(THIRDS, protected)
        assert protected == [THIRDS]
        table.refs.remove_local_ref(THIRDS)
        assert table.refs.end_protection(protected, PEER) == []
        assert table.said() == [] and table.entries == {}

    def test_a_ref_kept_beyond_the_task_is_registered_before_the_reply(self, table: Table) -> None:
        protected: list[bytes] = []
        table.refs.ref_deserialized(THIRDS, protected)
        assert table.refs.end_protection(protected, PEER) == []
        table.refs.send_after_acks(PEER, REPLY)
        assert table.said() == [(THIRD, m.BorrowAdd([THIRDS], ME, 1))]
        assert acked(table, 1) == [(PEER, REPLY)]

    def test_the_submitter_learns_of_its_own_from_the_reply(self, table: Table) -> None:
        protected: list[bytes] = []
        table.refs.ref_deserialized(THEIRS, protected)
        table.refs.ref_deserialized(THEIRS, protected)
        assert table.refs.end_protection(protected, PEER) == [THEIRS]
        assert table.said() == []
        table.refs.remove_local_ref(THEIRS)
        table.refs.remove_local_ref(THEIRS)
        assert table.said() == [(PEER, m.BorrowDrop([THEIRS], ME))]

    def test_one_message_for_several_of_one_owner(self, table: Table) -> None:
        protected: list[bytes] = []
        for oid in (THEIRS, THIRDS, OTHERS):
            table.refs.ref_deserialized(oid, protected)
        table.refs.end_protection(protected, ME)
        assert table.said() == [(PEER, m.BorrowAdd([THEIRS, OTHERS], ME, 1)), (THIRD, m.BorrowAdd([THIRDS], ME, 2))]

    def test_two_tasks_with_the_same_ref(self, table: Table) -> None:
        first: list[bytes] = []
        second: list[bytes] = []
        table.refs.ref_deserialized(THIRDS, first)
        table.refs.ref_deserialized(THIRDS, second)
        table.refs.remove_local_ref(THIRDS)
        table.refs.end_protection(first, PEER)
        assert table.said() == [(THIRD, m.BorrowAdd([THIRDS], ME, 1))]
        assert table.refs.end_protection(second, PEER) == [] and table.said() == []

    def test_a_drop_ends_the_reliance_on_protection(self, table: Table) -> None:
        """The inner ref may have come out of what is dropped, not out of the arguments."""
        table.borrow(THIRDS)
        protected: list[bytes] = []
        table.refs.ref_deserialized(THEIRS, protected)
        table.refs.remove_local_ref(THIRDS)
        assert table.said() == [(PEER, m.BorrowAdd([THEIRS], ME, 2))]
        assert acked(table, 2) == [(THIRD, m.BorrowDrop([THIRDS], ME))]
        assert table.refs.end_protection(protected, PEER) == [], "it is registered already"

    def test_protected_refs_are_registered_when_the_submitter_dies(self, table: Table) -> None:
        table.refs.ref_deserialized(THIRDS, [])
        table.process_died(PEER, "killed")
        assert table.said() == [(THIRD, m.BorrowAdd([THIRDS], ME, 1))]


class TestOwner:
    def test_an_object_is_kept_until_the_last_borrower_lets_go(self, table: Table) -> None:
        table.owned(MINE)
        table.refs.on_borrow_add(PEER, m.BorrowAdd([MINE], PEER, 4))
        table.refs.on_borrow_add(THIRD, m.BorrowAdd([MINE], THIRD, 9))
        assert table.said() == [(PEER, m.BorrowAck(4)), (THIRD, m.BorrowAck(9))]
        table.refs.remove_local_ref(MINE)
        table.refs.on_borrow_drop(m.BorrowDrop([MINE], PEER))
        assert MINE in table.entries
        table.refs.on_borrow_drop(m.BorrowDrop([MINE], THIRD))
        assert table.entries == {}

    def test_refs_named_in_a_reply_count_as_borrows(self, table: Table) -> None:
        table.owned(MINE)
        table.refs.add_borrows_in_reply(PEER, [MINE])
        table.refs.remove_local_ref(MINE)
        assert MINE in table.entries
        table.refs.on_borrow_drop(m.BorrowDrop([MINE], PEER))
        assert table.entries == {}

    def test_the_death_of_a_borrower_ends_its_borrows(self, table: Table) -> None:
        table.stored(MINE, node=2)
        table.refs.add_borrower(MINE, PEER)
        table.refs.add_borrower(MINE, PEER)
        table.refs.remove_local_ref(MINE)
        table.process_died(THIRD, "killed")
        assert MINE in table.entries
        table.process_died(PEER, "killed")
        assert table.said() == [(RAYLET, m.Free([MINE], [2]))]

    def test_a_borrow_of_an_object_that_is_freed_already_has_no_effect(self, table: Table) -> None:
        table.refs.on_borrow_add(PEER, m.BorrowAdd([MINE], PEER, 4))
        table.refs.on_borrow_drop(m.BorrowDrop([MINE], PEER))
        table.refs.on_borrow_take(PEER, m.BorrowTake([MINE], THIRD))
        assert table.said() == [(PEER, m.BorrowAck(4))], "the borrower will hear it when it asks for the value"
        assert table.entries == {}


class TestReturnedRefs:
    def test_a_returned_ref_of_the_givers_own_is_counted_for_the_submitter(self, table: Table) -> None:
        table.owned(MINE)
        table.refs.pledge_to(MINE, PEER)
        assert table.said() == []
        table.refs.remove_local_ref(MINE)
        assert MINE in table.entries, "the submitter holds it from the start"

    def test_a_returned_ref_of_the_submitters_own_is_pledged_at_the_submitter(self, table: Table) -> None:
        """No answer is awaited: it takes the way of the reply. But our drop must not come in between."""
        table.borrow(THEIRS)
        table.refs.pledge_to(THEIRS, PEER)
        table.refs.remove_local_ref(THEIRS)
        table.refs.send_after_acks(PEER, REPLY)
        pledge, drop = m.BorrowAdd([THEIRS], PEER, 0), m.BorrowDrop([THEIRS], ME)
        assert table.said() == [(PEER, pledge), (PEER, drop), (PEER, REPLY)]

    def test_a_returned_ref_of_our_own_survives_a_worker_that_drops_it_first(self, table: Table) -> None:
        table.owned(MINE)
        table.refs.add_borrower(MINE, PEER)
        table.refs.remove_local_ref(MINE)
        table.refs.on_borrow_add(PEER, m.BorrowAdd([MINE], ME, 0))
        table.refs.on_borrow_drop(m.BorrowDrop([MINE], PEER))
        table.refs.adopt_returned_ref(MINE, PEER)
        assert table.entries[MINE].local == 1 and not table.entries[MINE].borrowers
        table.refs.remove_local_ref(MINE)
        assert table.entries == {} and table.said() == []

    def test_a_pledge_of_our_own_object_ends_with_a_worker_that_dies_before_its_reply(self, table: Table) -> None:
        table.owned(MINE)
        table.refs.on_borrow_add(PEER, m.BorrowAdd([MINE], ME, 0))
        table.refs.remove_local_ref(MINE)
        table.process_died(PEER, "killed")
        assert table.entries == {} and table.said() == []

    def test_a_reply_that_fails_in_the_making_takes_its_refs_back(self, table: Table) -> None:
        table.owned(MINE)
        table.refs.pledge_to(MINE, PEER)
        table.refs.withdraw_pledge(MINE, PEER)
        table.refs.remove_local_ref(MINE)
        assert table.entries == {}
        table.borrow(THIRDS)
        table.refs.pledge_to(THIRDS, PEER)
        table.refs.withdraw_pledge(THIRDS, PEER)
        add, drop = m.BorrowAdd([THIRDS], PEER, 2), m.BorrowDrop([THIRDS], ME + PEER)
        assert table.said() == [(THIRD, add), (THIRD, drop)]
        owner = Table()
        owner.owned(MINE)
        owner.refs.on_borrow_add(PEER, m.BorrowAdd([MINE], THIRD, 2))
        owner.refs.remove_local_ref(MINE)
        owner.refs.on_borrow_drop(m.BorrowDrop([MINE], PEER + THIRD))
        assert owner.entries == {}

    def test_a_returned_ref_of_a_third_process_is_pledged_before_the_reply(self, table: Table) -> None:
        table.borrow(THIRDS)
        table.refs.pledge_to(THIRDS, PEER)
        table.refs.send_after_acks(PEER, REPLY)
        table.refs.remove_local_ref(THIRDS)
        assert table.said() == [(THIRD, m.BorrowAdd([THIRDS], PEER, 2))]
        assert acked(table, 2) == [(PEER, REPLY), (THIRD, m.BorrowDrop([THIRDS], ME))]

    def test_a_taker_turns_a_pledge_into_a_borrow(self, table: Table) -> None:
        table.refs.adopt_returned_ref(THIRDS, PEER)
        assert table.said() == [(THIRD, m.BorrowTake([THIRDS], PEER))]
        assert table.entries[THIRDS].local == 1
        table.refs.remove_local_ref(THIRDS)
        assert table.said() == [(THIRD, m.BorrowDrop([THIRDS], ME))]

    def test_a_returned_ref_of_the_givers_own_needs_no_take(self, table: Table) -> None:
        table.refs.adopt_returned_ref(THEIRS, PEER)
        assert table.said() == []
        table.refs.remove_local_ref(THEIRS)
        assert table.said() == [(PEER, m.BorrowDrop([THEIRS], ME))]

    def test_a_returned_ref_that_the_taker_holds_already_is_counted_once(self, table: Table) -> None:
        table.borrow(THIRDS)
        table.refs.adopt_returned_ref(THIRDS, PEER)
        assert table.said() == [(THIRD, m.BorrowTake([THIRDS], PEER)), (THIRD, m.BorrowDrop([THIRDS], ME))]
        assert table.entries[THIRDS].local == 2

    def test_a_returned_ref_that_was_protected_needs_no_other_count(self, table: Table) -> None:
        protected: list[bytes] = []
        table.refs.ref_deserialized(THIRDS, protected)
        table.refs.adopt_returned_ref(THIRDS, PEER)
        assert table.said() == [(THIRD, m.BorrowTake([THIRDS], PEER))]
        assert table.refs.end_protection(protected, PEER) == []

    def test_a_returned_ref_to_an_object_of_ours_ends_the_pledge(self, table: Table) -> None:
        table.owned(MINE)
        table.refs.adopt_returned_ref(MINE, PEER)
        assert table.entries[MINE].local == 2 and table.said() == []


class TestPledges:
    """The owner's side of a returned ref: PEER gives it to THIRD."""

    @pytest.fixture(autouse=True)
    def pledged(self, table: Table) -> None:
        table.owned(MINE)
        table.refs.on_borrow_add(PEER, m.BorrowAdd([MINE], THIRD, 3))
        assert table.said() == [(THIRD, m.BorrowAck(0)), (PEER, m.BorrowAck(3))], "so that we hear of a death of it"
        table.refs.remove_local_ref(MINE)
        assert MINE in table.entries

    def test_a_pledge_that_is_taken_and_dropped_frees_the_object(self, table: Table) -> None:
        table.refs.on_borrow_take(THIRD, m.BorrowTake([MINE], PEER))
        table.process_died(PEER, "killed")
        assert MINE in table.entries and table.said() == []
        table.refs.on_borrow_drop(m.BorrowDrop([MINE], THIRD))
        assert table.entries == {}

    def test_the_giver_dies_and_the_reply_never_came(self, table: Table) -> None:
        table.process_died(PEER, "killed")
        assert table.said() == [(THIRD, m.SettleBorrows(PEER))]
        assert MINE in table.entries, "it may be on its way"
        table.refs.on_borrow_end(THIRD, m.BorrowsSettled(PEER))
        assert table.entries == {}

    def test_the_giver_dies_and_the_reply_had_come(self, table: Table) -> None:
        table.process_died(PEER, "killed")
        table.refs.on_borrow_take(THIRD, m.BorrowTake([MINE], PEER))
        table.refs.on_borrow_end(THIRD, m.BorrowsSettled(PEER))
        assert MINE in table.entries
        table.process_died(THIRD, "killed")
        assert table.entries == {}

    def test_a_pledge_ends_with_its_taker(self, table: Table) -> None:
        table.process_died(THIRD, "killed")
        assert table.entries == {} and table.said() == []

    def test_a_pledge_to_a_dead_taker_causes_a_report_of_its_death(self, table: Table) -> None:
        table.process_died(THIRD, "killed")
        table.owned(put_id(2))
        table.refs.on_borrow_add(PEER, m.BorrowAdd([put_id(2)], THIRD, 4))
        assert (THIRD, m.BorrowAck(0)) in table.said()


class TestAskedOfADeadGiver:
    def test_the_answer_comes_when_nothing_can_come_any_more(self, table: Table) -> None:
        table.refs.on_borrow_ask(THIRD, m.SettleBorrows(PEER))
        assert table.said() == [(PEER, m.BorrowAck(0))], "if we have not heard of its death, this makes us hear"
        table.refs.adopt_returned_ref(THIRDS, PEER)  # its last reply
        table.process_died(PEER, "killed")
        assert table.said() == [(THIRD, m.BorrowTake([THIRDS], PEER)), (THIRD, m.BorrowsSettled(PEER))]

    def test_an_acknowledgement_with_number_0_means_nothing(self, table: Table) -> None:
        table.refs.ref_deserialized(THIRDS, None)
        table.refs.on_borrow_ack(m.BorrowAck(0))
        assert len(table.refs.unacked) == 1


def test_the_owner_of_a_container_protects_what_is_inside(table: Table) -> None:
    """The outer object is let go only after the owner of the inner one knows us."""
    table.borrow(THEIRS, SIZE)
    table.wait_local(THEIRS, Waiter())
    table.on_opened(m.Opened(THEIRS, 64, SIZE, False))
    table.said()
    table.refs.ref_deserialized(THIRDS, None)
    table.refs.remove_local_ref(THEIRS)
    assert table.said() == [(THIRD, m.BorrowAdd([THIRDS], ME, 2)), (RAYLET, m.Release([THEIRS]))]
    assert acked(table, 2) == [(PEER, m.BorrowDrop([THEIRS], ME))]
