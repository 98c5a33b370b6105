"""Values whose tensors are in another process, which dies, or moves them out before it ends."""

from __future__ import annotations

from typing import Any

import pytest
from table_kit import ME, PEER, RAYLET, SIZE, THIRD, Owner, Task, error, put_id, return_id

from hpcray.common.ids import RESIDENT_INDEX
from hpcray.core.core_worker.object_entry import resident_of
from hpcray.core.core_worker.object_table import INLINE, PENDING, STORED, Waiter
from hpcray.protocol import messages as m

OID = return_id()


def tensors_id(counter: int = 1, owner: bytes = PEER) -> bytes:
    return owner + counter.to_bytes(5, "big") + RESIDENT_INDEX


def made_with_tensors(table: Owner, stored: bool = False, retries: int = 3, owner: bytes = PEER) -> Any:
    """A task has returned a value with a ref of the user's and its tensors, which are in the worker."""
    task = Task(1, retries)
    contained: list[Any] = [put_id(9, THIRD), tensors_id(1, owner)]  # as in a replay: the ids stand for the refs
    table.create(OID, task)
    table.recovery.keep_task(task, [OID], (), 0)
    if stored:
        table.set_stored(OID, SIZE, 2, contained)
    else:
        table.set_inline(OID, b"value\0", contained)
    table.said()
    return task


@pytest.fixture
def table() -> Owner:
    return Owner()


class TestLoss:
    @pytest.mark.parametrize("stored", [False, True])
    def test_the_task_runs_again_when_the_process_with_the_tensors_dies(self, table: Owner, stored: bool) -> None:
        task = made_with_tensors(table, stored)
        table.process_died(THIRD, "killed")
        assert table.again == [], "that is the owner of another ref in the value"
        table.process_died(PEER, "killed")
        entry = table.entries[OID]
        assert table.again == [task] and entry.state == PENDING and not entry.value and not entry.nodes
        assert table.said() == ([(RAYLET, m.Free([OID], [2]))] if stored else [])
        table.process_died(PEER, "killed")
        assert table.again == [task]
        assert table.set_inline(OID, b"new\0", [tensors_id(2, THIRD)])
        assert resident_of(entry) == tensors_id(2, THIRD) and put_id(9, THIRD) in (entry.contained or ())
        table.check_invariants()

    def test_the_readers_report_makes_it_again_once(self, table: Owner) -> None:
        task = made_with_tensors(table)
        for reader in (PEER, THIRD):
            table.recovery.on_object_lost(reader, m.ObjectLost(OID, 0, [], "?", tensors_id()))
        assert table.again == [task] and table.said() == []
        table.set_inline(OID, b"new\0", [tensors_id(2)])
        ready = m.ObjectReady(OID, 0, b"new\0", 0, [])
        assert table.said() == [(PEER, ready), (THIRD, ready)]
        table.recovery.on_object_lost(PEER, m.ObjectLost(OID, 0, [], "late", tensors_id(1)))
        assert table.said() == [(PEER, ready)] and table.again == [task], "those are not its tensors any more"

    def test_a_task_that_must_not_run_again_leaves_an_error(self, table: Owner) -> None:
        made_with_tensors(table, retries=0)
        table.process_died(PEER, "killed")
        assert "a part of it stayed in a process that is gone" in error(table.entries[OID]) and table.again == []
        table.check_invariants()

    def test_a_borrower_reports_the_loss_and_waits(self, table: Owner) -> None:
        oid = return_id(1, PEER)
        entry = table.borrow(oid)
        entry.state, entry.value = INLINE, b"value\0"
        table.recovery.resident_lost(oid, tensors_id(1, THIRD), "killed")
        assert table.said() == [(PEER, m.ObjectLost(oid, 0, [], "killed", tensors_id(1, THIRD)))]
        waiter = Waiter()
        assert not table.wait_local(oid, waiter) and table.said() == []
        table.on_object_ready(m.ObjectReady(oid, 0, b"new\0", 0, []))
        assert table.fired == [waiter] and entry.value == b"new\0"

    def test_a_borrower_gives_its_pin_back(self, table: Owner) -> None:
        oid = return_id(1, PEER)
        entry = table.borrow(oid, SIZE)
        table.wait_local(oid, Waiter())
        table.on_opened(m.Opened(oid, 64, SIZE, False))
        table.said()
        table.recovery.resident_lost(oid, tensors_id(1, THIRD), "killed")
        assert (RAYLET, m.Release([oid])) in table.said() and entry.mapping is None and entry.state == PENDING
        table.check_invariants()

    def test_tensors_that_nodes_keep_after_their_owner_has_left_are_not_lost(self, table: Owner) -> None:
        made_with_tensors(table)
        table.copies.node_left(1, [2])
        table.process_died(PEER, "its node has left")
        assert table.again == [] and table.entries[OID].state == INLINE

    def test_an_unknown_object_is_no_concern(self, table: Owner) -> None:
        table.recovery.resident_lost(OID, tensors_id(), "killed")
        assert table.said() == [] and not table.entries


class TestMove:
    def test_a_small_value_arrives_whole(self, table: Owner) -> None:
        task = made_with_tensors(table)
        table.recovery.resident_moved(OID, tensors_id(), b"whole\0", 0, 2)
        entry = table.entries[OID]
        assert (entry.state, entry.value) == (INLINE, b"whole\0") and resident_of(entry) == b""
        assert entry.contained == [put_id(9, THIRD)]
        table.process_died(PEER, "it has ended")
        assert entry.value == b"whole\0" and table.again == []
        table.recovery.on_object_lost(THIRD, m.ObjectLost(OID, 0, [], "late", tensors_id()))
        assert table.said() == [(THIRD, m.ObjectReady(OID, 0, b"whole\0", 0, []))] and table.again == []
        assert task.attempt == 0
        table.check_invariants()

    @pytest.mark.parametrize("stored", [False, True])
    def test_a_large_value_is_in_a_store_and_is_made_again_if_it_is_lost(self, table: Owner, stored: bool) -> None:
        task = made_with_tensors(table, stored)
        if stored:
            table.recovery.on_add_location(m.AddLocation(OID, 3))
        table.recovery.resident_moved(OID, tensors_id(), b"", 2 * SIZE, 2)
        entry = table.entries[OID]
        assert (entry.state, entry.size, entry.nodes) == (STORED, 2 * SIZE, [2])
        assert table.said() == ([(RAYLET, m.Free([OID], [3]))] if stored else []), "the copy without tensors"
        table.recovery.node_died(2, "power")
        assert table.again == [task] and entry.state == PENDING
        table.check_invariants()

    def test_readers_that_wait_get_it(self, table: Owner) -> None:
        made_with_tensors(table, stored=True)
        waiter = Waiter()
        assert not table.wait_local(OID, waiter)
        table.on_opened(m.Opened(OID, 64, SIZE, False))
        table.recovery.resident_moved(OID, tensors_id(), b"whole\0", 0, 2)
        assert table.entries[OID].mapping is None and table.entries[OID].available

    def test_what_comes_too_late_is_dropped(self, table: Owner) -> None:
        table.recovery.resident_moved(OID, tensors_id(), b"", SIZE, 2)
        assert table.said() == [(RAYLET, m.Free([OID], [2]))]
        task = made_with_tensors(table)
        table.process_died(PEER, "killed")
        table.recovery.resident_moved(OID, tensors_id(), b"whole\0", 0, 2)
        assert table.again == [task] and table.entries[OID].state == PENDING

    def test_a_node_that_is_dead_by_then_keeps_nothing(self, table: Owner) -> None:
        task = made_with_tensors(table)
        table.recovery.mark_node_dead(2)
        table.recovery.resident_moved(OID, tensors_id(), b"", SIZE, 2)
        assert table.again == [task]
        table.check_invariants()


def test_tensors_of_this_process_are_kept_like_puts() -> None:
    table = Owner()
    mine = tensors_id(3, ME)
    table.put_inline(mine, b"e\2")
    table.put_stored(mine, 64, SIZE, None)
    task = Task(7)
    table.create(return_id(7), task)
    table.recovery.keep_task(task, [return_id(7)], (mine,), 0)
    table.set_stored(return_id(7), SIZE, 2)
    table.refs.remove_local_ref(mine)
    assert table.entries[mine].state == STORED, "nothing could make them again"
