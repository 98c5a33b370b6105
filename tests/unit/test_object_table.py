"""The states of one object in a process's table: pending, ready, read, awaited, freed, lost."""

from __future__ import annotations

from collections import deque

import pytest
from table_kit import PEER, RAYLET, SIZE, THIRD, Table, put_id, return_id

from hpcray.core.core_worker.object_table import INLINE, PENDING, Waiter
from hpcray.protocol import messages as m
from hpcray.protocol.serialization import serialize_error

OPENED = {"offset": 64, "size": SIZE, "pulled": False}


class Burying(Table):
    """One whose refs die as those of a program do, many at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.refs.remove_local_ref = self._bury_one  # type: ignore[method-assign]

    def _bury_one(self, oid: bytes) -> None:
        died = deque([oid])
        self.bury(died)
        assert not died


@pytest.fixture(params=[Table, Burying])
def table(request: pytest.FixtureRequest) -> Table:
    made: Table = request.param()
    return made


class TestOwned:
    def test_a_pending_object_stays_without_refs(self, table: Table) -> None:
        table.create(return_id())
        table.refs.remove_local_ref(return_id())
        assert table.entries[return_id()].state == PENDING
        assert table.set_inline(return_id(), b"v\0")
        assert table.entries == {} and table.said() == []

    def test_an_inline_value_goes_with_its_last_ref(self, table: Table) -> None:
        table.owned(put_id(), local=2)
        table.refs.remove_local_ref(put_id())
        assert table.entries[put_id()].state == INLINE
        table.refs.remove_local_ref(put_id())
        assert table.entries == {}

    def test_the_refs_inside_a_value_go_with_the_value(self, table: Table) -> None:
        dropped: list[str] = []

        class Inner:
            def __del__(self) -> None:
                dropped.append("inner")

        table.owned(put_id(), contained=[Inner()])
        assert dropped == []
        table.refs.remove_local_ref(put_id())
        assert dropped == ["inner"]

    def test_a_chain_of_values_goes_at_once(self, table: Table) -> None:
        died: deque[bytes] = deque([put_id(1)])

        class Ref:
            def __init__(self, oid: bytes) -> None:
                self.oid = oid

            def __del__(self) -> None:
                died.append(self.oid)

        for number in range(1, 5):
            table.owned(put_id(number), contained=[Ref(put_id(number + 1))])
        table.owned(put_id(5))
        table.bury(died)
        assert table.entries == {} and not died

    def test_a_stored_value_is_freed_where_copies_are(self, table: Table) -> None:
        table.stored(return_id(), node=2)
        table.recovery.on_add_location(m.AddLocation(return_id(), 4))
        table.recovery.on_add_location(m.AddLocation(return_id(), 4))
        table.refs.remove_local_ref(return_id())
        assert table.said() == [(RAYLET, m.Free([return_id()], [2, 4]))]

    def test_a_copy_whose_report_comes_after_the_free_is_freed_too(self, table: Table) -> None:
        table.recovery.on_add_location(m.AddLocation(return_id(), 4))
        assert table.said() == [(RAYLET, m.Free([return_id()], [4]))]

    def test_a_large_result_without_refs_is_freed(self, table: Table) -> None:
        assert not table.set_stored(return_id(), SIZE, 3)
        assert table.said() == [(RAYLET, m.Free([return_id()], [3]))]
        table.owned(return_id(2))
        assert not table.set_stored(return_id(2), SIZE, 3), "it was cancelled meanwhile"
        assert table.said() == [(RAYLET, m.Free([return_id(2)], [3]))]

    def test_a_copy_that_a_dead_worker_may_have_left_is_freed_with_the_object(self, table: Table) -> None:
        table.create(return_id())
        table.may_be_left_at(return_id(), 3)
        table.set_stored(return_id(), SIZE, 2)
        assert table.said() == []
        table.refs.remove_local_ref(return_id())
        assert table.said() == [(RAYLET, m.Free([return_id()], [2, 3]))]

    def test_a_read_that_failed_does_not_make_its_copies_forgotten(self, table: Table) -> None:
        entry = table.stored(return_id(), node=2)
        table.wait_local(return_id(), Waiter())
        table.on_store_error(m.StoreError(return_id(), "lost", "no node has it"))
        assert entry.state == INLINE and entry.value.startswith(b"lost: no node has it")
        table.said()
        table.refs.remove_local_ref(return_id())
        assert table.said() == [(RAYLET, m.Free([return_id()], [2]))]

    def test_the_first_result_counts(self, table: Table) -> None:
        entry = table.owned(return_id(), b"first\0")
        assert not table.set_inline(return_id(), b"second\0")
        assert entry.value == b"first\0"

    def test_the_creator_of_a_stored_object_reads_it_without_a_message(self, table: Table) -> None:
        table.create(put_id())
        table.put_stored(put_id(), 64, SIZE, None)
        assert table.wait_local(put_id(), Waiter()) and table.said() == []
        table.refs.remove_local_ref(put_id())
        assert table.said() == [(RAYLET, m.Free([put_id()], [1])), (RAYLET, m.Release([put_id()]))]

    def test_a_put_that_failed_leaves_nothing(self, table: Table) -> None:
        table.create(put_id())
        table.abandon(put_id())
        assert table.entries == {} and table.said() == []

    def test_on_free_is_called_once(self, table: Table) -> None:
        calls: list[str] = []
        table.owned(put_id(), local=2)
        table.when_freed(put_id(), lambda: calls.append("freed"))
        table.refs.remove_local_ref(put_id())
        assert calls == []
        table.refs.remove_local_ref(put_id())
        assert calls == ["freed"] and table.on_free == {}

    def test_an_object_that_is_freed_by_hand_is_freed_once(self, table: Table) -> None:
        calls: list[int] = []
        table.owned(put_id())
        for number in (1, 2):
            table.when_freed(put_id(), lambda number=number: calls.append(number))  # type: ignore[misc]
        table.discard(put_id(), serialize_error(ValueError()))
        assert calls == [1, 2]
        table.refs.remove_local_ref(put_id())
        assert calls == [1, 2] and table.entries == {} and table.on_free == {}

    def test_a_ref_to_what_we_have_freed_is_an_error(self, table: Table) -> None:
        table.refs.ref_deserialized(put_id(), None)
        assert table.entries[put_id()].value.startswith(b"lost: its owner (this process)")
        assert table.said() == []


class TestWaiting:
    def test_a_waiter_for_a_result_fires_when_it_is_there(self, table: Table) -> None:
        table.create(return_id())
        ready, local = Waiter(), Waiter()
        assert not table.wait_ready(return_id(), ready)
        assert not table.wait_local(return_id(), local)
        assert table.said() == [], "it is ours: nobody is to be asked"
        table.set_inline(return_id(), b"v\0")
        assert table.fired == [ready, local]
        assert table.wait_ready(return_id(), Waiter()) and table.wait_local(return_id(), Waiter())

    def test_a_waiter_for_two_fires_at_the_second(self, table: Table) -> None:
        waiter = Waiter(2)
        for number in (1, 2):
            table.create(return_id(number))
            assert not table.wait_ready(return_id(number), waiter)
        table.set_inline(return_id(1), b"v\0")
        assert table.fired == []
        table.set_inline(return_id(2), b"v\0")
        assert table.fired == [waiter]

    def test_the_first_error_wakes_an_eager_one(self, table: Table) -> None:
        eager, patient = Waiter(2, eager=True), Waiter(2)
        for number in (1, 2):
            table.create(return_id(number))
            table.wait_local(return_id(number), eager)
            table.wait_local(return_id(number), patient)
        table.set_inline(return_id(1), b"error\2")
        assert table.fired == [eager] and patient.count == 1

    def test_ready_is_not_local(self, table: Table) -> None:
        table.create(return_id())
        ready, local = Waiter(), Waiter()
        table.wait_ready(return_id(), ready)
        table.wait_local(return_id(), local)
        table.set_stored(return_id(), SIZE, 2)
        assert table.fired == [ready]
        assert table.said() == [(RAYLET, m.Open(return_id(), SIZE, [2]))]
        table.on_opened(m.Opened(return_id(), 64, SIZE, True))
        assert table.fired == [ready, local]
        assert table.entries[return_id()].nodes == [2, 1], "we have a copy now"

    def test_a_waiter_that_gave_up_is_not_called(self, table: Table) -> None:
        table.create(return_id())
        waiter = Waiter()
        table.wait_ready(return_id(), waiter)
        table.wait_local(return_id(), waiter)
        table.remove_waiter([return_id(), put_id(9)], waiter)
        table.set_inline(return_id(), b"v\0")
        assert table.fired == []

    def test_fail_all_wakes_every_waiter(self, table: Table) -> None:
        waiters = [Waiter(), Waiter(), Waiter()]
        table.create(return_id(1))
        table.wait_ready(return_id(1), waiters[0])
        table.stored(return_id(2), node=2)
        table.wait_local(return_id(2), waiters[1])
        table.borrow(put_id(3, PEER))
        table.wait_local(put_id(3, PEER), waiters[2])
        table.fail_all("the raylet is gone")
        assert table.fired == waiters
        assert all(e.value.startswith(b"lost: the raylet is gone") for e in table.entries.values())


class TestBorrowedValues:
    oid = put_id(1, PEER)

    def test_the_owner_gets_one_object_get_per_object(self, table: Table) -> None:
        table.borrow(self.oid)
        waiters = [Waiter(), Waiter()]
        for waiter in waiters:
            table.wait_local(self.oid, waiter)
        assert table.said() == [(PEER, m.ObjectGet(self.oid))]
        table.on_object_ready(m.ObjectReady(self.oid, 0, b"v\0", 0, []))
        assert table.fired == waiters and table.entries[self.oid].value == b"v\0"

    def test_a_stored_borrowed_object_is_opened_at_its_locations(self, table: Table) -> None:
        table.borrow(self.oid)
        table.wait_local(self.oid, Waiter())
        table.said()
        table.on_object_ready(m.ObjectReady(self.oid, 0, b"", SIZE, [2, 5]))
        assert table.said() == [(RAYLET, m.Open(self.oid, SIZE, [2, 5]))]
        table.on_opened(m.Opened(self.oid, 64, SIZE, True))
        assert table.said() == [(PEER, m.AddLocation(self.oid, 1))]

    def test_a_waiter_is_served_by_locations_that_come_with_another_ref(self, table: Table) -> None:
        """A task's argument says where its copies are, before the owner does."""
        table.borrow(self.oid)
        ready, local = Waiter(), Waiter()
        table.wait_ready(self.oid, ready)
        table.wait_local(self.oid, local)
        table.said()
        table.set_locations(self.oid, SIZE, [2])
        assert table.fired == [ready]
        assert table.said() == [(RAYLET, m.Open(self.oid, SIZE, [2]))]
        table.on_object_ready(m.ObjectReady(self.oid, 0, b"", SIZE, [2]))
        assert table.said() == []

    def test_a_borrowed_object_that_its_owner_has_freed_is_an_error(self, table: Table) -> None:
        table.borrow(self.oid)
        table.wait_local(self.oid, Waiter())
        table.on_object_ready(m.ObjectReady(self.oid, 2, b"", 0, []))
        assert table.entries[self.oid].value.startswith(b"lost: its owner has already freed it")

    def test_a_borrowed_object_whose_owner_dies_is_an_error(self, table: Table) -> None:
        known, unknown = put_id(2, PEER), self.oid
        table.borrow(known)
        table.on_object_ready(m.ObjectReady(known, 0, b"v\0", 0, []))
        table.borrow(unknown)
        waiter = Waiter()
        table.wait_local(unknown, waiter)
        table.process_died(PEER, "killed")
        assert table.fired == [waiter]
        assert table.entries[unknown].value.startswith(b"died: its owner is gone: killed")
        assert table.entries[known].value == b"v\0", "what is here already can still be read"


class TestAnswers:
    def test_a_borrower_gets_the_value_at_once_or_when_it_is_ready(self, table: Table) -> None:
        table.owned(put_id())
        table.on_object_get(PEER, put_id())
        assert table.said() == [(PEER, m.ObjectReady(put_id(), 0, b"v\0", 0, []))]
        table.create(return_id())
        table.on_object_get(PEER, return_id())
        table.on_object_get(THIRD, return_id())
        assert table.said() == []
        table.set_stored(return_id(), SIZE, 2)
        ready = m.ObjectReady(return_id(), 0, b"", SIZE, [2])
        assert table.said() == [(PEER, ready), (THIRD, ready)]

    def test_a_borrower_gets_a_result_whose_local_refs_at_the_owner_are_gone(self, table: Table) -> None:
        table.create(return_id())
        table.refs.add_borrower(return_id(), PEER)
        table.on_object_get(PEER, return_id())
        table.refs.remove_local_ref(return_id())
        table.set_inline(return_id(), b"v\0")
        assert table.said() == [(PEER, m.ObjectReady(return_id(), 0, b"v\0", 0, []))]
        table.refs.on_borrow_drop(m.BorrowDrop([return_id()], PEER))
        assert table.entries == {}

    def test_an_object_get_for_an_unknown_object_is_answered_as_freed(self, table: Table) -> None:
        table.on_object_get(PEER, put_id())
        assert table.said() == [(PEER, m.ObjectReady(put_id(), 2, b"", 0, []))]


class TestPins:
    """At most one unanswered Open, and one pin, per object and process."""

    oid = put_id(1, PEER)

    def test_one_open_however_many_wait(self, table: Table) -> None:
        table.borrow(self.oid, SIZE)
        for _ in range(3):
            assert not table.wait_local(self.oid, Waiter())
        assert table.said() == [(RAYLET, m.Open(self.oid, SIZE, [2]))]

    def test_a_get_that_timed_out_releases_nothing_before_the_answer(self, table: Table) -> None:
        table.borrow(self.oid, SIZE)
        waiter = Waiter()
        table.wait_local(self.oid, waiter)
        table.remove_waiter([self.oid], waiter)
        table.said()
        table.refs.remove_local_ref(self.oid)
        assert not [msg for _, msg in table.said() if isinstance(msg, m.Release)]
        table.on_opened(m.Opened(self.oid, **OPENED))
        assert table.said() == [(RAYLET, m.Release([self.oid]))]

    def test_a_ref_that_comes_back_takes_the_answer_to_the_first_open(self, table: Table) -> None:
        table.borrow(self.oid, SIZE)
        table.wait_local(self.oid, Waiter())
        table.refs.remove_local_ref(self.oid)
        table.borrow(self.oid, SIZE)
        waiter = Waiter()
        assert not table.wait_local(self.oid, waiter)
        assert table.said() == [], "one Open is under way"
        table.on_opened(m.Opened(self.oid, **OPENED))
        assert table.fired[-1] is waiter and table.said() == []
        table.refs.remove_local_ref(self.oid)
        assert [msg for dest, msg in table.said() if dest == RAYLET] == [m.Release([self.oid])]

    def test_after_an_error_it_may_be_opened_again(self, table: Table) -> None:
        table.borrow(self.oid, SIZE)
        table.wait_local(self.oid, Waiter())
        table.refs.remove_local_ref(self.oid)
        table.on_store_error(m.StoreError(self.oid, "full", "no room"))
        table.borrow(self.oid, SIZE)
        table.wait_local(self.oid, Waiter())
        assert table.said() == [(RAYLET, m.Open(self.oid, SIZE, [2]))]

    def read(self, table: Table) -> None:
        table.wait_local(self.oid, Waiter())
        table.on_opened(m.Opened(self.oid, **OPENED))
        mapping = table.entries[self.oid].mapping
        assert mapping is not None
        mapping.views += 1

    def test_a_view_outlives_the_ref(self, table: Table) -> None:
        table.borrow(self.oid, SIZE)
        self.read(table)
        table.said()
        table.refs.remove_local_ref(self.oid)
        assert [dest for dest, _ in table.said()] == [PEER], "the owner is told, the pin stays"
        table.pins.view_died(self.oid)
        assert table.said() == [(RAYLET, m.Release([self.oid]))]

    def test_a_new_life_of_the_ref_takes_the_pin_of_the_old_views(self, table: Table) -> None:
        table.borrow(self.oid, SIZE)
        self.read(table)
        table.refs.remove_local_ref(self.oid)
        table.borrow(self.oid, SIZE)
        assert table.wait_local(self.oid, Waiter()), "it is mapped still"
        table.pins.view_died(self.oid)
        assert table.said() == [], "the ref needs the pin now"
        table.refs.remove_local_ref(self.oid)
        assert [msg for dest, msg in table.said() if dest == RAYLET] == [m.Release([self.oid])]

    def test_a_pin_lasts_as_long_as_the_last_of_two_views(self, table: Table) -> None:
        entry = table.borrow(self.oid, SIZE)
        self.read(table)
        assert entry.mapping is not None
        entry.mapping.views += 1
        table.pins.view_died(self.oid)
        table.refs.remove_local_ref(self.oid)
        table.said()
        table.pins.view_died(self.oid)
        assert table.said() == [(RAYLET, m.Release([self.oid]))]


class TestPlacesThatTravelWithARef:
    def test_a_ref_with_locations_is_opened_at_once_without_an_object_get(self, table: Table) -> None:
        table.borrow(put_id(owner=PEER))
        table.hint_locations(put_id(owner=PEER), SIZE, (2, 3))
        assert not table.wait_local(put_id(owner=PEER), Waiter())
        assert table.said() == [(RAYLET, m.Open(put_id(owner=PEER), SIZE, [2, 3]))]

    def test_nodes_that_are_known_to_be_dead_do_not_count(self, table: Table) -> None:
        table.borrow(put_id(owner=PEER))
        table.recovery.node_died(2, "gone")
        table.hint_locations(put_id(owner=PEER), SIZE, (2,))
        assert table.entries[put_id(owner=PEER)].state == PENDING
        table.hint_locations(put_id(owner=PEER), SIZE, (2, 3))
        assert table.entries[put_id(owner=PEER)].nodes == [3]

    def test_the_owners_answer_counts_more_than_locations_in_a_ref(self, table: Table) -> None:
        oid = put_id(owner=PEER)
        table.borrow(oid, SIZE)
        table.wait_local(oid, Waiter())
        table.on_store_error(m.StoreError(oid, "lost", "not there"))
        assert (PEER, m.ObjectLost(oid, 0, [2], "not there")) in table.said()
        table.hint_locations(oid, SIZE, (2,))
        assert table.entries[oid].state == PENDING and table.said() == []

    def test_locations_in_a_ref_to_an_object_of_ours_are_ignored(self, table: Table) -> None:
        table.create(return_id())
        table.hint_locations(return_id(), SIZE, (3,))
        assert table.entries[return_id()].state == PENDING

    def test_a_ref_names_the_locations_of_a_stored_object_only(self, table: Table) -> None:
        assert table.known_locations(put_id()) is None
        table.owned(put_id())
        table.create(return_id(7))
        assert table.known_locations(put_id()) is None and table.known_locations(return_id(7)) is None
        table.stored(return_id(), node=2)
        for node in range(3, 9):
            table.recovery.on_add_location(m.AddLocation(return_id(), node))
        assert table.known_locations(return_id()) == (SIZE, (2, 3, 4, 5))

    def test_a_small_value_travels_with_its_ref_and_needs_no_request(self, table: Table) -> None:
        oid = put_id(owner=PEER)
        table.owned(put_id())
        entry = table.entries[put_id()]
        assert table.known_locations(put_id(), len(entry.value) - 1) is None
        hint = table.known_locations(put_id(), len(entry.value))
        assert hint == (0, (), entry.value)
        table.borrow(oid)
        waiter = Waiter()
        table.hint_locations(oid, *hint)
        assert table.wait_local(oid, waiter) and table.entries[oid].value == entry.value and table.said() == []

    def test_the_value_of_a_worker_is_read_when_it_is_first_awaited_and_passed_on_before_and_after(
        self, table: Table
    ) -> None:
        table.owned(put_id())
        value = table.entries[put_id()].value
        hint = table.known_locations(put_id(), len(value), mortal=True)
        assert hint == (0, (), value, True)
        for number, await_it in enumerate([table.wait_local, table.wait_ready]):
            oid = put_id(number, owner=PEER)
            table.borrow(oid)
            table.hint_locations(oid, *hint)
            assert table.entries[oid].state == PENDING
            assert table.known_locations(oid, len(value)) == hint
            assert table.known_locations(oid, len(value) - 1) is None
            assert await_it(oid, Waiter()) and table.entries[oid].value == value and table.said() == []
            assert table.known_locations(oid, len(value)) == hint and not table.hints.unread

    def test_the_value_of_a_worker_that_died_before_it_was_read_is_lost_as_others_are(self, table: Table) -> None:
        read, unread, dropped = (put_id(number, owner=PEER) for number in range(3))
        for oid in (read, unread, dropped):
            table.borrow(oid)
            table.hint_locations(oid, 0, (), b"value\0", True)
        table.hints.read([read, put_id(9)])
        table.refs.remove_local_ref(dropped)
        assert table.hints.unread == {unread: b"value\0"}
        table.process_died(PEER, "killed")
        table.check_invariants()
        assert table.entries[read].value == b"value\0"
        assert table.entries[unread].state == INLINE and table.entries[unread].value != b"value\0"
        assert not table.hints.unread and dropped not in table.entries

    def test_an_error_travels_with_no_ref_and_the_owners_answer_counts_more_than_a_value(self, table: Table) -> None:
        table.create(return_id())
        table.set_inline(return_id(), serialize_error(ValueError("no")))
        assert table.known_locations(return_id(), 1 << 20) is None
        oid = put_id(owner=PEER)
        table.borrow(oid)
        table.wait_ready(oid, Waiter())
        table.hint_locations(oid, 0, (), b"late\0")
        assert table.entries[oid].state == PENDING
