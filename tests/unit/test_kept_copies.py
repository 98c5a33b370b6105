"""Objects whose owner leaves in good order: what a borrower says, and what its store keeps."""

from __future__ import annotations

import pytest
from store_kit import CAPACITY, FAR, A, B, C, oid, only, put, sent_to
from table_kit import ME, PEER, RAYLET, SIZE, THIRD, Table, error, put_id

from hpcray.common.ids import make_proc, raylet_of
from hpcray.core.core_worker.object_table import INLINE, PENDING, STORED, Waiter
from hpcray.core.effects import StartSend
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.protocol import messages as m

THEIRS = put_id(1, THIRD)
HERE = 1
"""The node of ME."""


@pytest.fixture
def table() -> Table:
    return Table()


def kept(table: Table) -> None:
    table.borrow(THEIRS, SIZE)
    table.copies.keep(THEIRS)
    table.said()
    table.on_replica(THEIRS, HERE, "")
    assert table.said() == [(THIRD, m.BorrowDrop([THEIRS], ME))]
    table.check_invariants()


class TestBorrower:
    def test_its_store_keeps_the_object_then_it_drops_its_borrow(self, table: Table) -> None:
        table.borrow(THEIRS, SIZE)
        table.copies.keep(THEIRS)
        assert table.said() == [(RAYLET, m.Open(THEIRS, SIZE, [2], pin_replica=True))]
        table.copies.keep(THEIRS)
        assert table.said() == [], "it was asked already"
        table.on_replica(THEIRS, HERE, "")
        assert table.said() == [(THIRD, m.BorrowDrop([THEIRS], ME))]
        assert table.known_locations(THEIRS) == (SIZE, (HERE,)), "who gets the ref reads it here"

    def test_the_copy_goes_with_its_last_ref_and_the_owner_hears_nothing(self, table: Table) -> None:
        kept(table)
        table.refs.remove_local_ref(THEIRS)
        assert table.said() == [(RAYLET, m.Release([THEIRS], unpin_replica=True))]
        assert table.entries == {} and not table.copies.kept

    def test_the_owner_s_end_changes_nothing(self, table: Table) -> None:
        kept(table)
        table.process_died(THIRD, "its node has left")
        table.recovery.node_died(2, "it was removed")
        entry = table.entries[THEIRS]
        assert (entry.state, entry.nodes) == (STORED, [HERE]) and table.said() == []

    def test_who_gets_a_ref_after_the_owner_has_left_keeps_a_copy_too(self, table: Table) -> None:
        table.refs.ref_deserialized(THEIRS, None)
        table.hint_locations(THEIRS, SIZE, [3])
        assert table.said() == [(THIRD, m.BorrowAdd([THEIRS], ME, 1))]
        table.copies.node_left(2, [3])
        table.process_died(THIRD, "node 2 is dead")
        assert table.said() == [(RAYLET, m.Open(THEIRS, SIZE, [3], pin_replica=True))]

    def test_a_ref_without_a_location_is_sought_on_the_nodes_that_keep(self, table: Table) -> None:
        table.borrow(THEIRS)
        assert not table.wait_ready(THEIRS, Waiter())
        table.copies.node_left(2, [3, 4])
        table.said()
        table.process_died(THIRD, "node 2 is dead")
        assert table.said() == [(raylet_of(3), m.ObjectGet(THEIRS)), (raylet_of(4), m.ObjectGet(THEIRS))]
        table.copies.found(raylet_of(3), m.ObjectReady(THEIRS, 2, b"", 0, []))
        assert table.entries[THEIRS].state == PENDING
        table.copies.found(raylet_of(4), m.ObjectReady(THEIRS, 0, b"", SIZE, [4]))
        assert table.entries[THEIRS].nodes == [4]
        assert table.said() == [(RAYLET, m.Open(THEIRS, SIZE, [4], pin_replica=True))]

    @pytest.mark.parametrize("end", ["not there", "dead"])
    def test_what_no_node_keeps_is_lost_with_its_owner(self, table: Table, end: str) -> None:
        table.borrow(THEIRS)
        table.wait_ready(THEIRS, Waiter())
        table.copies.node_left(2, [3])
        table.process_died(THIRD, "node 2 is dead")
        if end == "dead":
            table.copies.node_died(3)
        else:
            table.copies.found(raylet_of(3), m.ObjectReady(THEIRS, 2, b"", 0, []))
        assert error(table.entries[THEIRS]).startswith("died: its owner has left")

    def test_a_raylet_that_is_gone_keeps_nothing(self, table: Table) -> None:
        """This process began after that node had died, and hears of it by the frame that comes back."""
        table.borrow(THEIRS)
        table.wait_ready(THEIRS, Waiter())
        table.copies.node_left(2, [3])
        table.process_died(THIRD, "node 2 is dead")
        table.said()
        table.process_died(raylet_of(3), "node 3 is dead")
        assert error(table.entries[THEIRS]).startswith("died: its owner has left")

    def test_an_owner_that_leaves_does_not_say_that_what_it_has_handed_over_is_freed(self, table: Table) -> None:
        table.on_object_get(PEER, put_id(1))
        assert table.said() == [(PEER, m.ObjectReady(put_id(1), 2, b"", 0, []))]
        table.copies.hand_over()
        table.on_object_get(PEER, put_id(1))
        assert table.said() == [], "who asks seeks it when its owner has gone"

    def test_a_store_without_room_leaves_the_borrow_as_it_is(self, table: Table) -> None:
        table.borrow(THEIRS, SIZE)
        table.copies.keep(THEIRS)
        table.said()
        table.on_replica(THEIRS, HERE, "full")
        assert table.said() == [] and table.entries[THEIRS].state == PENDING, "its owner knows where it is"
        table.set_locations(THEIRS, SIZE, [3])
        table.copies.keep(THEIRS)
        assert table.said() == [(RAYLET, m.Open(THEIRS, SIZE, [3], pin_replica=True))]

    def test_a_ref_that_dies_meanwhile_takes_the_request_back(self, table: Table) -> None:
        table.borrow(THEIRS, SIZE)
        table.copies.keep(THEIRS)
        table.said()
        table.refs.remove_local_ref(THEIRS)
        assert (RAYLET, m.Release([THEIRS], unpin_replica=True)) in table.said()
        table.on_replica(THEIRS, HERE, "")
        assert table.said() == [] and not table.copies.kept

    def test_a_small_value_moves_into_the_store(self, table: Table) -> None:
        entry = table.borrow(THEIRS)
        entry.state, entry.value = INLINE, b"value\0"
        table.copies.written(THEIRS, 640, 6)
        assert table.said() == [(RAYLET, m.Open(THEIRS, 6, [HERE], pin_replica=True))]
        assert entry.state == STORED and table.known_locations(THEIRS) == (6, (HERE,))
        table.on_replica(THEIRS, HERE, "")
        table.check_invariants()

    def test_two_processes_of_a_node_keep_one_small_value(self, table: Table) -> None:
        entry = table.borrow(THEIRS)
        entry.state, entry.value = INLINE, b"value\0"
        table.copies.written(THEIRS, None, 6)
        assert table.said() == [(RAYLET, m.Open(THEIRS, 6, [HERE], pin_replica=True))]
        assert entry.state == STORED and entry.mapping is None

    def test_a_small_value_without_a_ref_is_not_kept(self, table: Table) -> None:
        table.copies.written(THEIRS, 640, 6)
        assert table.said() == [(RAYLET, m.Release([THEIRS])), (RAYLET, m.Free([THEIRS], []))]

    def test_an_error_stays_in_the_process_that_has_it_and_holds_up_no_owner(self, table: Table) -> None:
        entry = table.borrow(THEIRS)
        entry.state, entry.value = INLINE, b"error\2"
        for _ in range(2):  # the owner asks again until it reads the answer
            table.copies.keep_error(THEIRS)
        assert table.said() == [(THIRD, m.BorrowDrop([THEIRS], ME))]
        table.process_died(THIRD, "its node has left")
        assert (entry.state, entry.value) == (INLINE, b"error\2")
        table.refs.remove_local_ref(THEIRS)
        assert table.entries == {} and not table.copies.kept
        assert (THIRD, m.BorrowDrop([THEIRS], ME)) not in table.said()

    def test_only_what_others_elsewhere_hold_is_waited_for(self, table: Table) -> None:
        mine, other = put_id(1), put_id(2)
        table.owned(mine)
        table.owned(other)
        table.refs.on_borrow_add(THIRD, m.BorrowAdd([mine], THIRD, 0))
        table.refs.on_borrow_add(PEER, m.BorrowAdd([other], PEER, 0))
        assert table.refs.lent_beyond({HERE}) == {THIRD: [mine]}
        assert table.refs.lent_beyond({HERE, 2}) == {}


GONE, OURS = make_proc(5, 2), oid(1, make_proc(5, 2))


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore(2, CAPACITY)


def hold_replica(store: ObjectStore, proc: bytes = B) -> None:
    """An object of a node that leaves is pulled here, and kept for a process."""
    receive, _ = store.handle(0.0, proc, m.Open(OURS, 640, [7], pin_replica=True))
    assert m.ReplicaPinned(OURS) in sent_to(store.receive_ended(0.0, receive.tag, None), proc)  # type: ignore[union-attr]


class TestStore:
    @pytest.mark.parametrize("end", ["freed", "owner died", "node died"])
    def test_a_copy_that_is_kept_outlives_its_owner(self, store: ObjectStore, end: str) -> None:
        hold_replica(store)
        if end == "freed":
            store.handle(0.0, GONE, m.Free([OURS], [2]))
        elif end == "owner died":
            store.process_died(0.0, GONE)
        else:
            store.node_died(0.0, 5)
        store.check_invariants()
        assert isinstance(only(store.handle(0.0, C, m.Open(OURS, 640, [])), C), m.Opened), "others read it too"
        store.handle(0.0, C, m.Release([OURS]))
        (push,) = store.handle(0.0, raylet_of(7), m.Pull(OURS, 1, 640))
        assert isinstance(push, StartSend)
        store.send_ended(0.0, push.tag, None)
        store.check_invariants()

    @pytest.mark.parametrize("end", ["released", "died"])
    def test_it_goes_with_the_last_process_it_is_kept_for(self, store: ObjectStore, end: str) -> None:
        hold_replica(store)
        store.handle(0.0, C, m.Open(OURS, 640, [7], pin_replica=True))
        store.node_died(0.0, 5)
        for proc in (B, C):
            assert store.snapshot()["objects"] == 1
            if end == "released":
                store.handle(0.0, proc, m.Release([OURS], unpin_replica=True))
            else:
                store.process_died(0.0, proc)
            store.check_invariants()
        assert store.snapshot()["objects"] == 0 and store.used == 0

    def test_a_small_value_that_a_borrower_has_written_is_kept_too(self, store: ObjectStore) -> None:
        put(store, OURS, proc=A)
        store.handle(0.0, A, m.Open(OURS, 640, [2], pin_replica=True))
        store.process_died(0.0, GONE)
        assert store.snapshot()["objects"] == 1
        store.handle(0.0, A, m.Release([OURS], unpin_replica=True))
        store.check_invariants()
        assert store.snapshot()["objects"] == 0

    def test_an_owner_s_own_replica_goes_with_the_object(self, store: ObjectStore) -> None:
        ident = oid(1, FAR)
        receive, _ = store.handle(0.0, FAR, m.Open(ident, 640, [7], pin_replica=True))
        store.receive_ended(0.0, receive.tag, None)  # type: ignore[union-attr]
        store.handle(0.0, FAR, m.Free([ident], [2]))
        store.handle(0.0, FAR, m.Release([ident], unpin_replica=True))
        store.check_invariants()
        assert store.snapshot()["objects"] == 0
