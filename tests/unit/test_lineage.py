"""What is remembered so that lost objects can be made again, and for how long; second copies."""

from __future__ import annotations

import pytest
from table_kit import ME, PEER, RAYLET, SIZE, Owner, Task, put_id, return_id

from hpcray.common.ids import raylet_of
from hpcray.core.core_worker.object_recovery import Lineage
from hpcray.core.core_worker.object_table import LINEAGE_ONLY, PENDING, STORED, Waiter
from hpcray.protocol import messages as m


@pytest.fixture
def table() -> Owner:
    return Owner()


class TestRemembered:
    def test_an_argument_without_holders_is_remembered_by_lineage(self, table: Owner) -> None:
        table.made(1)
        table.made(2, (return_id(1),))
        table.refs.remove_local_ref(return_id(1))
        assert table.said() == [(RAYLET, m.Free([return_id(1)], [2]))], "its bytes go"
        assert table.entries[return_id(1)].state == LINEAGE_ONLY
        table.refs.remove_local_ref(return_id(2))
        assert table.entries == {} and table.lineage.kept == {} and table.lineage.used == 0
        assert table.lineage.remembered == {}

    def test_a_remembered_object_is_made_again_when_a_task_needs_it(self, table: Owner) -> None:
        first = table.made(1)
        table.made(2, (return_id(1),))
        table.refs.remove_local_ref(return_id(1))
        table.recovery.recount_args([return_id(1)])
        assert table.again == [first] and table.entries[return_id(1)].state == PENDING
        table.set_stored(return_id(1), SIZE, 3)
        table.said()
        table.refs.remove_local_ref(return_id(1))
        assert table.said() == [(RAYLET, m.Free([return_id(1)], [3]))]
        assert table.entries[return_id(1)].state == LINEAGE_ONLY

    def test_a_remembered_object_is_made_again_for_a_borrower(self, table: Owner) -> None:
        """A task of another process that took it runs again."""
        first = table.made(1)
        table.made(2, (return_id(1),))
        table.refs.remove_local_ref(return_id(1))
        table.said()
        table.refs.on_borrow_add(PEER, m.BorrowAdd([return_id(1)], PEER, 1))
        table.on_object_get(PEER, return_id(1))
        assert table.again == [first]
        table.said()
        table.set_stored(return_id(1), SIZE, 3)
        assert table.said() == [(PEER, m.ObjectReady(return_id(1), 0, b"", SIZE, [3], 1))]
        table.refs.on_borrow_drop(m.BorrowDrop([return_id(1)], PEER))
        assert table.entries[return_id(1)].state == LINEAGE_ONLY

    def test_a_borrower_that_comes_when_it_is_freed_is_counted_beyond_lineage(self, table: Owner) -> None:
        """It read the ref out of a value whose owner died, and with it who held the object."""
        first = table.made(1)
        table.made(2, (return_id(1),))
        table.refs.remove_local_ref(return_id(1))
        table.refs.on_borrow_add(PEER, m.BorrowAdd([return_id(1)], PEER, 1))
        table.refs.remove_local_ref(return_id(2))
        assert table.lineage.remembered == {} and table.entries[return_id(1)].state == LINEAGE_ONLY
        table.on_object_get(PEER, return_id(1))
        assert table.again == [first], "it can be made again for that borrower"
        table.set_stored(return_id(1), SIZE, 3)
        table.lineage.run_ended(first.id)
        table.said()
        table.refs.on_borrow_drop(m.BorrowDrop([return_id(1)], PEER))
        assert table.said() == [(RAYLET, m.Free([return_id(1)], [3]))]
        assert table.entries == {} and table.lineage.kept == {} and table.has_side_records == set()

    def test_such_a_borrower_lets_go_without_reading_it(self, table: Owner) -> None:
        table.made(1)
        table.made(2, (return_id(1),))
        table.refs.remove_local_ref(return_id(1))
        table.refs.on_borrow_add(PEER, m.BorrowAdd([return_id(1)], PEER, 1))
        table.refs.remove_local_ref(return_id(2))
        table.refs.on_borrow_drop(m.BorrowDrop([return_id(1)], PEER))
        assert table.entries == {} and table.lineage.kept == {} and table.has_side_records == set()

    def test_a_value_in_a_message_stays(self, table: Owner) -> None:
        table.owned(put_id(7))
        table.made(2, (put_id(7),))
        table.refs.remove_local_ref(put_id(7))
        assert table.entries[put_id(7)].value == b"v\0"
        table.recovery.recount_args([put_id(7)])
        assert table.entries[put_id(7)].local == 1
        table.refs.remove_local_ref(put_id(7))
        table.refs.remove_local_ref(return_id(2))
        assert table.entries == {}

    def test_what_was_put_stays_as_nothing_can_make_it_again(self, table: Owner) -> None:
        """Also what is inside of it."""
        dropped: list[str] = []

        class Inner:
            def __del__(self) -> None:
                dropped.append("inner")

        table.owned(put_id(7), contained=[Inner()])
        table.made(2, (put_id(7),))
        table.create(put_id(8))
        table.put_stored(put_id(8), 64, SIZE, None)
        table.made(3, (put_id(8),))
        table.said()
        for number in (7, 8):
            table.refs.remove_local_ref(put_id(number))
        assert table.said() == [(RAYLET, m.Release([put_id(8)]))], "its bytes may be spilled"
        table.recovery.recount_args([put_id(7), put_id(8)])
        assert (table.entries[put_id(7)].value, table.entries[put_id(8)].state) == (b"v\0", STORED)
        for number in (7, 8):
            table.refs.remove_local_ref(put_id(number))
        assert not dropped and not table.said()
        table.refs.remove_local_ref(return_id(2))
        table.refs.remove_local_ref(return_id(3))
        assert dropped == ["inner"] and table.entries == {}
        assert (RAYLET, m.Free([put_id(8)], [1])) in table.said()

    def test_an_actors_handle_is_out_of_scope_all_the_same(self, table: Owner) -> None:
        ended: list[bool] = []
        table.owned(put_id(7))
        table.when_freed(put_id(7), lambda: ended.append(True))
        table.made(2, (put_id(7),))
        table.refs.remove_local_ref(put_id(7))
        assert ended == [True]
        table.refs.remove_local_ref(return_id(2))
        assert ended == [True] and table.entries == {}

    def test_a_task_with_two_returns_is_kept_for_the_last(self, table: Owner) -> None:
        task = table.made(1)
        second = return_id(1)[:-1] + b"\2"
        table.create(second, task)
        table.recovery.keep_task(task, [second], [], 0)
        table.set_stored(second, SIZE, 2)
        table.refs.remove_local_ref(return_id(1))
        assert task.id in table.lineage.kept
        table.refs.remove_local_ref(second)
        assert table.lineage.kept == {}

    def test_a_long_chain_goes_at_once(self, table: Owner) -> None:
        for number in range(1, 5001):
            table.made(number, (return_id(number - 1),) if number > 1 else ())
            if number > 1:
                table.refs.remove_local_ref(return_id(number - 1))
        assert len(table.entries) == 5000
        table.refs.remove_local_ref(return_id(5000))
        assert table.entries == {} and table.lineage.kept == {} and table.lineage.remembered == {}

    def test_an_object_that_is_freed_by_hand_is_not_remembered(self, table: Owner) -> None:
        table.made(1)
        table.discard(return_id(1), b"freed\2")
        assert table.lineage.kept == {}
        table.recovery.node_died(2, "power")
        assert table.again == []


class TestReplicas:
    def test_the_first_copy_is_lost(self, table: Owner) -> None:
        table.create(put_id())
        table.put_stored(put_id(), 64, SIZE, None)
        waiter = Waiter()
        table.recovery.replicate(put_id(), 4, waiter)
        assert table.said() == [(raylet_of(4), m.Open(put_id(), SIZE, [1], pin_replica=True))]
        table.recovery.on_replica(put_id(), 4, "")
        assert table.fired == [waiter] and table.entries[put_id()].nodes == [1, 4]
        table.unmap(put_id())
        table.said()
        table.recovery.on_object_lost(PEER, m.ObjectLost(put_id(), 0, [1], "unreadable"))
        assert table.said() == [(PEER, m.ObjectReady(put_id(), 0, b"", SIZE, [1, 4]))]
        table.refs.remove_local_ref(put_id())
        assert (raylet_of(4), m.Release([put_id()], unpin_replica=True)) in table.said()
        assert table.replicas.held == {}

    def test_a_replica_that_a_full_node_refuses_is_forgotten(self, table: Owner) -> None:
        table.stored(put_id(), node=1)
        waiter = Waiter()
        table.recovery.replicate(put_id(), 4, waiter)
        table.recovery.on_replica(put_id(), 4, "full")
        assert table.fired == [waiter] and table.replicas.failed == {(put_id(), 4): "full"}
        assert table.entries[put_id()].nodes == [1] and table.replicas.held == {}

    def test_a_replica_is_forgotten_with_its_node(self, table: Owner) -> None:
        table.stored(put_id(), node=1)
        waiter = Waiter()
        table.recovery.replicate(put_id(), 4, waiter)
        table.recovery.node_died(4, "power")
        assert table.fired == [waiter] and table.entries[put_id()].state == STORED


def test_lineage_counts_what_is_mentioned_twice() -> None:
    unneeded: list[bytes] = []
    lineage = Lineage(ME, 1 << 20, unneeded.append, lambda oid: None)
    lineage.keep(Task(1), [return_id(1)], [put_id(5), put_id(5), put_id(6, PEER)], 100)
    lineage.keep(Task(2), [return_id(2)], [put_id(5)], 100)
    assert lineage.remembered == {put_id(5): 3}, "others' objects are theirs to remember"
    lineage.return_gone(return_id(1), Task(1).id)
    assert unneeded == []
    lineage.return_gone(return_id(2), Task(2).id)
    assert unneeded == [put_id(5)] and lineage.used == 0


def test_a_task_on_its_way_is_not_forgotten() -> None:
    lineage = Lineage(ME, 0, lambda oid: None, lambda oid: None)
    lineage.keep(Task(1), [return_id(1)], [], 10)
    lineage.run_begun(Task(1).id)
    lineage.trim()
    lineage.return_gone(return_id(1), Task(1).id)
    assert lineage.kept
    lineage.run_ended(Task(1).id)
    assert not lineage.kept
