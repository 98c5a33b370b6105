"""Objects that are lost: what is made again, what becomes an error, and what is remembered to make that possible."""

from __future__ import annotations

from typing import Any

import pytest
from table_kit import PEER, RAYLET, SIZE, THIRD, Owner, error, put_id, return_id

from hpcray.common.ids import raylet_of
from hpcray.core.core_worker.object_recovery import BASE_COST
from hpcray.core.core_worker.object_table import INLINE, LINEAGE_ONLY, PENDING, STORED, Waiter
from hpcray.protocol import messages as m


@pytest.fixture
def table() -> Owner:
    return Owner()


class TestNodeDeath:
    def test_an_object_whose_only_copy_was_on_a_dead_node_is_made_again(self, table: Owner) -> None:
        task = table.made()
        waiter = Waiter()
        table.recovery.node_died(2, "power")
        assert table.again == [task]
        entry = table.entries[return_id()]
        assert entry.state == PENDING and not table.wait_local(return_id(), waiter)
        table.said()
        table.set_stored(return_id(), SIZE, 3)
        assert table.said() == [(RAYLET, m.Open(return_id(), SIZE, [3]))]
        table.refs.remove_local_ref(return_id())
        assert m.Free([return_id()], [3]) in [msg for _, msg in table.said()], "nothing is sent to the dead node"

    def test_a_copy_that_is_left_is_pinned_by_the_owner(self, table: Owner) -> None:
        table.made()
        table.recovery.on_add_location(m.AddLocation(return_id(), 3))
        table.recovery.node_died(2, "power")
        assert table.again == [] and table.entries[return_id()].nodes == [3]
        assert table.said() == [(raylet_of(3), m.Open(return_id(), SIZE, [3], pin_replica=True))], (
            "it must not be evicted now"
        )
        table.recovery.on_replica(return_id(), 3, "")
        table.refs.remove_local_ref(return_id())
        assert set(map(repr, table.said())) == {
            repr((RAYLET, m.Free([return_id()], [3]))),
            repr((raylet_of(3), m.Release([return_id()], unpin_replica=True))),
        }  # fmt: skip

    def test_the_copy_that_was_left_had_been_evicted(self, table: Owner) -> None:
        task = table.made()
        table.recovery.on_add_location(m.AddLocation(return_id(), 3))
        table.recovery.node_died(2, "power")
        table.recovery.on_replica(return_id(), 3, "it is not here")
        assert table.again == [task]

    def test_a_mapped_object_survives_the_death_of_its_primary_copy(self, table: Owner) -> None:
        table.made()
        table.wait_local(return_id(), Waiter())
        table.on_opened(m.Opened(return_id(), 64, SIZE, False))
        table.recovery.node_died(2, "power")
        assert table.again == [] and table.entries[return_id()].nodes == [1]

    def test_what_we_have_mapped_stays_when_the_pin_goes(self, table: Owner) -> None:
        table.made()
        table.wait_local(return_id(), Waiter())
        table.on_opened(m.Opened(return_id(), 64, SIZE, True))
        table.said()
        table.recovery.node_died(2, "power")
        assert table.said() == [(RAYLET, m.Open(return_id(), SIZE, [], pin_replica=True))]
        table.pins.give_up(SIZE, 1)
        assert table.said() == [(RAYLET, m.Release([return_id()]))]
        table.recovery.node_died(3, "power")
        assert table.said() == [] and table.again == []

    def test_what_our_node_has_stays_there_if_it_still_has_it(self, table: Owner) -> None:
        table.made()
        table.recovery.on_add_location(m.AddLocation(return_id(), 3))
        table.recovery.on_add_location(m.AddLocation(return_id(), 1))
        table.recovery.node_died(2, "power")
        assert table.said() == [(RAYLET, m.Open(return_id(), SIZE, [1, 3]))]
        table.on_opened(m.Opened(return_id(), 64, SIZE, False))
        assert table.said() == [(RAYLET, m.Open(return_id(), SIZE, [], pin_replica=True))]
        assert table.entries[return_id()].nodes == [1, 3]

    def test_another_node_keeps_a_copy_when_our_own_was_evicted(self, table: Owner) -> None:
        table.made()
        for node in (1, 3):
            table.recovery.on_add_location(m.AddLocation(return_id(), node))
        table.recovery.node_died(2, "power")
        table.recovery.on_add_location(m.AddLocation(return_id(), 4))
        table.said()
        table.on_store_error(m.StoreError(return_id(), "lost", "it was evicted, and node 3 has died"))
        assert (
            table.said() == [(raylet_of(4), m.Open(return_id(), SIZE, [4, 1, 3], pin_replica=True))]
            and table.again == []
        )

    def test_the_first_copy_of_all_is_still_there(self, table: Owner) -> None:
        table.made()
        table.recovery.on_add_location(m.AddLocation(return_id(), 1))
        table.recovery.node_died(1, "power")
        assert table.said() == [] and table.entries[return_id()].nodes == [2]

    def test_another_node_keeps_a_copy_when_the_first_replies_that_it_cannot(self, table: Owner) -> None:
        table.made()
        for node in (3, 4):
            table.recovery.on_add_location(m.AddLocation(return_id(), node))
        table.recovery.node_died(2, "power")
        assert table.said() == [(raylet_of(3), m.Open(return_id(), SIZE, [3, 4], pin_replica=True))]
        table.recovery.on_replica(return_id(), 3, "it is not here")
        assert table.said() == [(raylet_of(4), m.Open(return_id(), SIZE, [4], pin_replica=True))]
        table.recovery.on_replica(return_id(), 4, "")
        table.recovery.node_died(3, "power")
        assert table.said() == [] and table.again == []

    def test_the_copy_on_its_way_to_us_came_in_time(self, table: Owner) -> None:
        table.made()
        table.wait_local(return_id(), Waiter())
        table.recovery.node_died(2, "power")
        table.said()
        table.on_opened(m.Opened(return_id(), 64, SIZE, True))
        assert table.said() == [(RAYLET, m.Open(return_id(), SIZE, [], pin_replica=True))], "it is the only one"

    def test_a_copy_is_on_its_way_to_us(self, table: Owner) -> None:
        """Our store will say whether it came in time."""
        task = table.made()
        table.wait_local(return_id(), Waiter())
        table.recovery.node_died(2, "power")
        assert table.again == []
        table.on_store_error(m.StoreError(return_id(), "lost", "node 2 died"))
        assert table.again == [task]

    def test_a_lost_put_is_an_error(self, table: Owner) -> None:
        table.stored(put_id(), node=2)
        table.recovery.node_died(2, "power")
        assert "power" in error(table.entries[put_id()])

    def test_a_result_that_comes_from_a_node_that_is_dead_already(self, table: Owner) -> None:
        table.recovery.node_died(2, "power")
        task = table.made(node=2)
        assert table.again == [task] and table.entries[return_id()].state == PENDING

    def test_late_copies_on_the_dead_node_count_for_nothing(self, table: Owner) -> None:
        table.made(node=3)
        table.recovery.node_died(2, "power")
        table.recovery.on_add_location(m.AddLocation(return_id(), 2))
        assert table.entries[return_id()].nodes == [3]

    def test_borrowers_ask_again(self, table: Owner) -> None:
        oid = return_id(1, PEER)
        entry = table.borrow(oid, SIZE)
        table.recovery.node_died(2, "power")
        assert entry.state == PENDING
        waiter = Waiter()
        assert not table.wait_local(oid, waiter)
        assert table.said() == [(PEER, m.ObjectGet(oid))]
        table.on_object_ready(m.ObjectReady(oid, 0, b"", SIZE, [3], 1))
        assert table.said() == [(RAYLET, m.Open(oid, SIZE, [3]))]

    def test_a_node_dies_only_once(self, table: Owner) -> None:
        table.made()
        table.recovery.node_died(2, "power")
        table.recovery.node_died(2, "power")
        assert len(table.again) == 1


class TestReaders:
    oid = return_id(1, PEER)

    def test_a_borrower_reports_a_loss_to_the_owner_and_waits(self, table: Owner) -> None:
        table.borrow(self.oid, SIZE)
        waiter = Waiter()
        table.wait_local(self.oid, waiter)
        table.said()
        table.on_store_error(m.StoreError(self.oid, "lost", "no node has it"))
        assert table.said() == [(PEER, m.ObjectLost(self.oid, 0, [2], "no node has it"))]
        assert table.fired == []
        table.on_object_ready(m.ObjectReady(self.oid, 0, b"", SIZE, [5], 1))
        assert table.said() == [(RAYLET, m.Open(self.oid, SIZE, [5]))]
        table.on_opened(m.Opened(self.oid, 0, SIZE, False))
        assert table.fired == [waiter]

    def test_a_report_of_a_loss_names_the_life_of_the_object(self, table: Owner) -> None:
        table.borrow(self.oid)
        table.wait_local(self.oid, Waiter())
        table.on_object_ready(m.ObjectReady(self.oid, 0, b"", SIZE, [5], 3))
        table.said()
        table.on_store_error(m.StoreError(self.oid, "lost", "?"))
        assert table.said() == [(PEER, m.ObjectLost(self.oid, 3, [5], "?"))]

    def test_a_lost_object_whose_owner_dies_is_an_error(self, table: Owner) -> None:
        entry = table.borrow(self.oid, SIZE)
        table.wait_local(self.oid, Waiter())
        table.on_store_error(m.StoreError(self.oid, "lost", "no node has it"))
        table.process_died(PEER, "killed")
        assert error(entry).startswith("died")

    def test_the_owner_makes_a_lost_object_once_for_all_borrowers(self, table: Owner) -> None:
        task = table.made()
        for proc in (PEER, THIRD):
            table.recovery.on_object_lost(proc, m.ObjectLost(return_id(), 0, [2], "gone"))
        assert table.again == [task] and table.said() == []
        table.set_stored(return_id(), SIZE, 2)
        ready = m.ObjectReady(return_id(), 0, b"", SIZE, [2], 1)
        assert table.said() == [(PEER, ready), (THIRD, ready)]
        table.recovery.on_object_lost(PEER, m.ObjectLost(return_id(), 0, [2], "late"))
        assert table.said() == [(PEER, ready)] and len(table.again) == 1, "that was an earlier life"
        table.recovery.on_object_lost(PEER, m.ObjectLost(return_id(), 1, [2], "again"))
        assert len(table.again) == 2

    def test_the_owner_answers_a_loss_with_another_location(self, table: Owner) -> None:
        table.made()
        table.recovery.on_add_location(m.AddLocation(return_id(), 4))
        table.recovery.on_object_lost(PEER, m.ObjectLost(return_id(), 0, [2], "gone"))
        assert table.again == []
        assert table.said() == [(PEER, m.ObjectReady(return_id(), 0, b"", SIZE, [2, 4]))]

    def test_a_put_that_one_borrower_cannot_read_stays_for_the_others(self, table: Owner) -> None:
        table.stored(put_id(), node=2)
        table.recovery.on_object_lost(PEER, m.ObjectLost(put_id(), 0, [2], "broken wire"))
        ((dest, msg),) = table.said()
        assert dest == PEER and isinstance(msg, m.ObjectReady) and b"broken wire" in msg.value
        assert table.entries[put_id()].state == STORED

    def test_the_owner_makes_an_object_again_that_it_cannot_read(self, table: Owner) -> None:
        task = table.made()
        waiter = Waiter()
        table.wait_local(return_id(), waiter)
        table.on_store_error(m.StoreError(return_id(), "lost", "unreadable"))
        assert table.again == [task] and table.fired == []
        table.said()
        table.set_inline(return_id(), b"v\0")
        assert table.fired == [waiter]
        table.refs.remove_local_ref(return_id())
        assert table.said() == [(RAYLET, m.Free([return_id()], [2]))], "perhaps it is there after all"

    def test_a_copy_came_up_while_the_store_looked_elsewhere(self, table: Owner) -> None:
        table.made()
        table.wait_local(return_id(), Waiter())
        table.recovery.on_add_location(m.AddLocation(return_id(), 4))
        table.said()
        table.on_store_error(m.StoreError(return_id(), "lost", "node 2 has it not"))
        assert table.again == []
        assert table.said() == [(RAYLET, m.Open(return_id(), SIZE, [2, 4]))]


class TestWhyNot:
    @pytest.mark.parametrize(
        ("change", "word"),
        [({"retries": 0}, "RETRIES_DISABLED"), ({"retries": 0, "attempt": 2}, "MAX_ATTEMPTS_EXCEEDED"),
         ({"cancelled": True}, "TASK_CANCELLED")],
    )  # fmt: skip
    def test_the_task_of_a_lost_object_runs_again(self, table: Owner, change: dict[str, Any], word: str) -> None:
        task = table.made()
        for name, value in change.items():
            setattr(task, name, value)
        table.recovery.node_died(2, "power")
        assert table.again == []
        assert table.recovery.why_lost[return_id()].startswith(f"[{word}]")

    def test_a_task_without_retries_is_not_kept(self, table: Owner) -> None:
        table.made(retries=0)
        assert table.lineage.kept == {} and table.entries[return_id()].task == "RETRIES_DISABLED"

    def test_with_a_lineage_limit_of_zero_nothing_is_made_again(self, table: Owner) -> None:
        table.lineage.limit = 0
        table.made()
        table.recovery.node_died(2, "power")
        assert table.recovery.why_lost[return_id()].startswith("[LINEAGE_DISABLED]")

    def test_that_holds_for_a_task_without_retries_too(self, table: Owner) -> None:
        table.lineage.limit = 0
        table.made(retries=0)
        assert table.entries[return_id()].task == "LINEAGE_DISABLED"

    def test_the_oldest_tasks_are_forgotten_beyond_the_lineage_limit(self, table: Owner) -> None:
        table.lineage.limit = 3 * BASE_COST
        for number in (1, 2, 3):
            table.made(number, size=BASE_COST // 2)
            table.lineage.trim()
        assert list(table.lineage.kept) == [return_id(2)[:-3], return_id(3)[:-3]], "the oldest goes first"
        table.recovery.node_died(2, "power")
        assert table.recovery.why_lost[return_id(1)].startswith("[LINEAGE_EVICTED]")
        assert [task.id for task in table.again] == [return_id(2)[:-3], return_id(3)[:-3]]


class TestSeveralReturns:
    def test_the_last_run_makes_all_that_is_lost(self) -> None:
        class BegunAtOnce(Owner):
            def remake(self, task: Any) -> None:
                self.lineage.run_begun(task.id)
                task.retries, task.attempt = 0, 1

        table = BegunAtOnce()
        task = table.made(1, retries=1)
        second = return_id(1)[:-1] + b"\2"
        table.create(second, task)
        table.recovery.keep_task(task, [second], [], 0)
        table.set_stored(second, SIZE, 2)

        table.recovery.node_died(2, "power")
        assert table.entries[return_id(1)].state == table.entries[second].state == PENDING


class TestFoundBySimulation:
    def test_an_object_without_holders_is_not_pinned_for_lineage(self, table: Owner) -> None:
        table.made(1)
        table.made(2, (return_id(1),))
        table.wait_local(return_id(1), Waiter())
        table.refs.remove_local_ref(return_id(1))
        assert table.entries[return_id(1)].state == LINEAGE_ONLY
        table.said()
        table.on_opened(m.Opened(return_id(1), 64, SIZE, False))
        assert table.said() == [(RAYLET, m.Release([return_id(1)]))]
        assert table.entries[return_id(1)].mapping is None

    def test_an_answer_about_an_earlier_life(self, table: Owner) -> None:
        task = table.made()
        waiter = Waiter()
        table.wait_local(return_id(), waiter)
        table.recovery.on_object_lost(PEER, m.ObjectLost(return_id(), 0, [2], "gone"))
        table.on_store_error(m.StoreError(return_id(), "lost", "no node has it"))
        assert table.again == [task] and table.entries[return_id()].state == PENDING and table.fired == []
        table.said()
        table.set_stored(return_id(), SIZE, 3)
        assert (RAYLET, m.Open(return_id(), SIZE, [3])) in table.said()

    def test_after_its_last_run_a_task_is_not_kept(self, table: Owner) -> None:
        task = table.made(retries=1)
        table.recovery.node_died(2, "power")
        task.retries, task.attempt = 0, 1
        table.recovery.keep_task(task, [return_id()], [], 0)
        table.set_stored(return_id(), SIZE, 3)
        assert table.lineage.kept == {} and table.entries[return_id()].task == "MAX_ATTEMPTS_EXCEEDED"

    def test_a_value_whose_earlier_life_held_refs(self, table: Owner) -> None:
        """It stays for lineage: what it is now holds none."""
        task = table.made(1)
        table.entries[return_id(1)].contained = [object()]
        table.made(2, (return_id(1),), node=3)
        table.recovery.node_died(2, "power")
        assert table.again == [task]
        table.set_inline(return_id(1), b"v\0")
        assert table.entries[return_id(1)].contained, "who reads the first life may take them out"
        table.refs.remove_local_ref(return_id(1))
        entry = table.entries[return_id(1)]
        assert entry.state == INLINE and entry.value == b"v\0" and not entry.contained

    def an_error_that_lineage_remembers(self, table: Owner) -> None:
        table.made(1, retries=0)
        table.made(2, (return_id(1),), node=3)
        table.wait_local(return_id(1), Waiter())
        table.recovery.lose(return_id(1), table.entries[return_id(1)], "gone")
        assert error(table.entries[return_id(1)])

    def test_a_new_copy_of_an_object_without_holders_is_freed_at_once(self, table: Owner) -> None:
        """Also where what is remembered is an error."""
        self.an_error_that_lineage_remembers(table)
        table.refs.remove_local_ref(return_id(1))
        table.said()
        table.recovery.on_add_location(m.AddLocation(return_id(1), 4))
        assert table.said() == [(RAYLET, m.Free([return_id(1)], [4]))]
        assert not table.entries[return_id(1)].nodes

    def test_a_new_copy_of_an_error_with_holders_is_freed_with_it(self, table: Owner) -> None:
        """Who has not heard of the error may still read it there."""
        self.an_error_that_lineage_remembers(table)
        table.said()
        table.recovery.on_add_location(m.AddLocation(return_id(1), 4))
        assert table.said() == []
        table.refs.remove_local_ref(return_id(1))
        assert table.said() == [(RAYLET, m.Free([return_id(1)], [4, 2]))]

    def test_what_has_become_an_error_meanwhile_is_not_pinned(self, table: Owner) -> None:
        self.an_error_that_lineage_remembers(table)
        table.said()
        table.on_opened(m.Opened(return_id(1), 64, SIZE, False))
        assert table.said() == [(RAYLET, m.Release([return_id(1)]))]
        assert table.entries[return_id(1)].mapping is None
