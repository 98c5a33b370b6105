"""What a store has no room for is lent: processes read it from its file. Lent is a place on disk, nothing more."""

from __future__ import annotations

import pytest
from store_kit import CAPACITY, FAR, A, B, C, answers, oid, only, put, sent_to

from hpcray.common.ids import raylet_of
from hpcray.core.effects import DiscardSpilled, LendSpilled, ReadSpill, Send, StartReceive
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.core.object_store.pull_manager import transfer_tag
from hpcray.protocol import messages as m

THIRD = CAPACITY // 3 // 64 * 64
BROKEN = "Input/output error (past the store)"


@pytest.fixture
def store() -> ObjectStore:
    """Objects 1 and 2 are on disk, 3 and 4 are pinned; 1 is lent to B, which has only asked whether it is here."""
    store = ObjectStore(2, CAPACITY, full_timeout=10.0, spill_threshold=1.0)
    for counter in (1, 2, 3):
        put(store, oid(counter), THIRD)
    store.handle(1.0, B, m.Create(oid(4, B), 2 * THIRD))
    store.spill_write_ended(2.0, None)
    store.handle(2.0, B, m.Seal(oid(4, B)))
    store.handle(3.0, A, m.Open(oid(3), THIRD, [2]))
    store.handle(4.0, B, m.Open(oid(1), THIRD, [2], 1))
    assert LendSpilled(B, oid(1), 1, 0, THIRD) in store.tick(5.5)
    return store


def failed(counter: int = 1, nodes: tuple[int, ...] = (2,)) -> m.DiskRead:
    return m.DiskRead(oid(counter), BROKEN, THIRD, list(nodes))


def restore(store: ObjectStore) -> None:
    """There is room now, and C has the object brought back."""
    store.handle(6.0, A, m.Free([oid(3)], [2]))
    store.handle(6.0, A, m.Release([oid(3)]))
    assert [type(effect) for effect in store.handle(6.0, C, m.Open(oid(1), THIRD, [2]))] == [ReadSpill]
    assert isinstance(only(store.spill_read_ended(6.5, oid(1), None), C), m.Opened)


class TestLoansThatAreNotReturned:
    def test_a_lent_object_that_was_restored_for_another_process_can_be_evicted_again(self, store: ObjectStore) -> None:
        restore(store)
        store.handle(7.0, C, m.Release([oid(1)]))
        assert store.snapshot()["evictable"] == THIRD
        assert isinstance(only(store.handle(7.0, A, m.Create(oid(5), THIRD)), A), m.Created)
        assert store.snapshot()["spilled"] == 2

    def test_a_lent_slot_stays_readable_after_its_object_is_gone(self, store: ObjectStore) -> None:
        assert store.handle(6.0, A, m.Free([oid(1)], [2])) == []
        assert store.snapshot()["objects"] == 3
        assert store.handle(7.0, B, m.DiskRead(oid(1))) == [DiscardSpilled(1, 0, THIRD, False)]
        assert store.handle(8.0, B, m.DiskRead(oid(1))) == [], "nothing is lent to it any more"


class TestLoansThatCannotBeRead:
    def test_a_loan_that_cannot_be_read_is_pulled_from_another_node(self, store: ObjectStore) -> None:
        effects = store.handle(6.0, B, failed(nodes=(2, 7)))
        assert [type(effect) for effect in answers(effects)] == [DiscardSpilled], "the store is full: it waits"
        store.handle(7.0, A, m.Release([oid(3)]))
        (receive, pull) = store.spill_write_ended(7.5, None)
        assert isinstance(receive, StartReceive) and isinstance(pull, Send) and pull.dest == raylet_of(7)
        (opened,) = sent_to(store.receive_ended(8.0, receive.tag, None), B)
        assert isinstance(opened, m.Opened)
        store.handle(9.0, B, m.Release([oid(1)]))
        assert store.snapshot()["evictable"] == 0, "it took the primary's place"

    def test_a_loan_that_cannot_be_read_and_is_nowhere_else_is_lost_with_the_reason(self, store: ObjectStore) -> None:
        effects = store.handle(6.0, B, failed())
        (error,) = sent_to(effects, B)
        assert isinstance(error, m.StoreError) and error.kind == "lost"
        assert f"node 2: reading from disk failed: {BROKEN}" in error.reason
        assert DiscardSpilled(1, 0, THIRD, False) in effects
        assert store.snapshot()["objects"] == 3

    def test_openers_that_wait_for_room_get_the_replacement_too(self, store: ObjectStore) -> None:
        store.tick(30.0)
        store.handle(30.0, C, m.Open(oid(1), THIRD, [2, 7]))
        assert store.snapshot()["waiting"] == 1
        effects = answers(store.handle(30.5, B, failed()))
        assert sent_to(effects, B) == sent_to(effects, C) == [], "node 7 may have it"
        store.handle(31.0, A, m.Release([oid(3)]))
        (receive, pull) = store.spill_write_ended(31.5, None)
        assert isinstance(receive, StartReceive) and isinstance(pull, Send)
        effects = store.handle(32.0, raylet_of(7), m.PullRefused(oid(1), receive.tag, "it is not here"))
        effects += store.receive_ended(32.1, receive.tag, "cancelled")
        for proc in (B, C):
            (error,) = sent_to(effects, proc)
            assert isinstance(error, m.StoreError) and error.kind == "lost"
            assert BROKEN in error.reason and "node 7: it is not here" in error.reason

    def test_another_node_that_waits_for_an_unreadable_object_is_refused(self, store: ObjectStore) -> None:
        tag = transfer_tag(4, 1)
        store.handle(5.6, raylet_of(4), m.Pull(oid(1), tag, THIRD))
        (refused,) = sent_to(store.handle(6.0, B, failed()), raylet_of(4))
        assert isinstance(refused, m.PullRefused) and BROKEN in refused.reason

    def test_a_loan_that_cannot_be_read_is_opened_from_memory_if_it_is_there_by_now(self, store: ObjectStore) -> None:
        restore(store)
        assert isinstance(only(store.handle(7.0, B, failed()), B), m.Opened)

    def test_a_loan_that_cannot_be_read_waits_for_the_restore_under_way(self, store: ObjectStore) -> None:
        store.handle(6.0, A, m.Free([oid(3)], [2]))
        store.handle(6.0, A, m.Release([oid(3)]))
        store.handle(6.0, C, m.Open(oid(1), THIRD, [2]))
        assert store.handle(6.1, B, failed()) == [], "the raylet is reading it: that decides"
        effects = store.spill_read_ended(6.5, oid(1), "Input/output error (/scratch)")
        for proc in (B, C):
            (error,) = sent_to(effects, proc)
            assert isinstance(error, m.StoreError) and error.kind == "lost" and "/scratch" in error.reason

    def test_a_second_reader_that_fails_opens_the_replacement(self, store: ObjectStore) -> None:
        store.handle(5.6, C, m.Open(oid(1), THIRD, [2]))
        effects = store.handle(6.0, B, failed())
        assert not [effect for effect in effects if isinstance(effect, DiscardSpilled)], "C may still read it"
        (discard, error) = store.handle(6.1, C, failed())
        assert discard == DiscardSpilled(1, 0, THIRD, False)
        assert isinstance(error, Send) and isinstance(error.msg, m.StoreError) and error.msg.kind == "lost"

    def test_a_loan_of_an_object_that_was_freed_meanwhile_is_lost(self, store: ObjectStore) -> None:
        store.handle(6.0, A, m.Free([oid(1)], [2]))
        (error,) = sent_to(store.handle(6.1, B, failed()), B)
        assert isinstance(error, m.StoreError) and error.kind == "lost"

    def test_the_pinner_of_an_unreadable_replica_is_informed(self) -> None:
        store = ObjectStore(2, CAPACITY, full_timeout=10.0, spill_threshold=1.0)
        receive = store.handle(0.0, FAR, m.Open(oid(1, FAR), THIRD, [5], pin_replica=True))[0]
        store.receive_ended(0.0, receive.tag, None)  # type: ignore[union-attr]
        store.handle(1.0, B, m.Create(oid(4, B), 3 * THIRD))
        store.spill_write_ended(2.0, None)
        store.handle(3.0, A, m.Open(oid(1, FAR), THIRD, [2]))
        store.tick(4.5)
        effects = store.handle(6.0, A, m.DiskRead(oid(1, FAR), BROKEN, THIRD, [2]))
        (error,) = sent_to(effects, A)
        assert isinstance(error, m.StoreError) and error.kind == "lost"
        (told,) = sent_to(effects, FAR)
        assert isinstance(told, m.ReplicaPinned) and told.reason
        assert store.snapshot()["on_disk"] == 0
