"""A disk that does not answer: whoever waits for it hears so, and what is in memory goes on."""

from __future__ import annotations

import pytest
from store_kit import CAPACITY, A, B, answers, oid, only, put, sent_to

from hpcray.common.exceptions import ObjectStoreFullError, store_full_error
from hpcray.common.ids import raylet_of
from hpcray.core.effects import Effect, LendSpilled, ReadSpill, StartSend, WriteSpill
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.core.object_store.pull_manager import transfer_tag
from hpcray.protocol import messages as m

THIRD = CAPACITY // 3 // 64 * 64
CHUNK = THIRD
SINCE = "/scratch has not answered since 09:00:00"


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore(2, CAPACITY, full_timeout=10.0, spill_threshold=1.0, chunk=CHUNK, slots=1)


def fill_and_ask_for_more(store: ObjectStore) -> None:
    """Three objects are idle, and a fourth waits for the write of the first."""
    for counter in (1, 2, 3):
        put(store, oid(counter), THIRD)
    effects = store.handle(1.0, B, m.Create(oid(4, B), THIRD))
    assert any(isinstance(effect, WriteSpill) for effect in effects)


def spill_two(store: ObjectStore) -> None:
    """Objects 1 and 2 are on disk only; 3, and one that B has pinned, fill the store; 3 can go."""
    for counter in (1, 2, 3):
        put(store, oid(counter), THIRD)
    store.handle(1.0, B, m.Create(oid(4, B), 2 * THIRD))
    store.spill_write_ended(2.0, None)
    store.handle(2.0, B, m.Seal(oid(4, B)))
    assert store.snapshot()["spilled"] == 2


def full_error(effects: list[Effect], dest: bytes) -> str:
    (error,) = [msg for msg in sent_to(effects, dest) if isinstance(msg, m.StoreError)]
    assert error.kind == "full" and "hint:" in error.reason and SINCE in error.reason
    assert isinstance(store_full_error(error.reason), ObjectStoreFullError)
    return error.reason


class TestStalledWrites:
    def test_a_request_that_waits_for_a_stalled_write_fails(self, store: ObjectStore) -> None:
        fill_and_ask_for_more(store)
        assert answers(store.tick(60.9)) == [], "it is slow, and moves"
        store.disk_stalled(61.0, [b""], SINCE)
        assert "does not get on" in full_error(store.tick(61.1), B)

    def test_processes_are_asked_to_unpin_during_a_stalled_write(self, store: ObjectStore) -> None:
        fill_and_ask_for_more(store)
        store.handle(1.0, A, m.Open(oid(2), THIRD, [2]))
        assert m.Unpin(THIRD) in sent_to(store.disk_stalled(61.0, [b""], SINCE), A)

    def test_objects_in_memory_stay_available_during_a_stall(self, store: ObjectStore) -> None:
        fill_and_ask_for_more(store)
        store.disk_stalled(61.0, [b""], SINCE)
        store.tick(61.0)
        for counter in (1, 2, 3):
            assert isinstance(only(store.handle(62.0, A, m.Open(oid(counter), THIRD, [2])), A), m.Opened)
            store.handle(62.0, A, m.Release([oid(counter)]))
        store.handle(62.0, A, m.Free([oid(3)], [2]))
        assert isinstance(only(store.handle(63.0, B, m.Create(oid(5, B), THIRD)), B), m.Created), "its room was freed"

    def test_an_object_in_a_stalled_write_holds_its_block(self, store: ObjectStore) -> None:
        fill_and_ask_for_more(store)
        store.disk_stalled(61.0, [b""], SINCE)
        store.tick(61.0)
        store.handle(62.0, A, m.Free([oid(1)], [2]))
        assert answers(store.handle(62.0, B, m.Create(oid(5, B), THIRD))) == []
        assert sent_to(store.spill_write_ended(63.0, None), B) == [m.Created(oid(5, B), 0, THIRD)], "now it is free"

    @pytest.mark.parametrize("error", [None, "Input/output error (/scratch)"])
    def test_spilling_goes_on_when_the_disk_answers_again(self, store: ObjectStore, error: str | None) -> None:
        fill_and_ask_for_more(store)
        store.disk_stalled(61.0, [b""], SINCE)
        store.tick(61.0)
        assert not any(isinstance(effect, WriteSpill) for effect in store.handle(74.0, B, m.Create(oid(5, B), THIRD)))
        effects = store.spill_write_ended(75.0, error) + store.disk_stalled(75.0, [], "") + store.tick(80.0)
        if error is not None:
            (write,) = [effect for effect in effects if isinstance(effect, WriteSpill)]
            assert write.number == 2
            effects = store.spill_write_ended(81.0, None)
        assert isinstance(only([e for e in effects if not isinstance(e, WriteSpill)][-1:], B), m.Created)
        store.handle(82.0, B, m.Release([oid(5, B)]))
        store.handle(82.0, A, m.Free([oid(1), oid(2), oid(3)], [2]))
        numbers = store.snapshot()
        assert numbers["objects"] == numbers["used"] == numbers["on_disk"] == numbers["segments"] == 0

    def test_no_file_is_lent_during_a_stall(self, store: ObjectStore) -> None:
        spill_two(store)
        store.handle(3.0, B, m.Open(oid(1), THIRD, [2]))  # object 3 is to make way for it
        store.disk_stalled(64.0, [b""], SINCE)
        effects = store.tick(64.0)
        assert not any(isinstance(effect, LendSpilled) for effect in effects)
        full_error(effects, B)
        assert store.snapshot()["spilled"] == 2, "it is on disk as before"


class TestStalledReads:
    def test_an_opener_of_a_stalled_read_gets_an_error_and_later_the_object(self, store: ObjectStore) -> None:
        spill_two(store)
        store.handle(3.0, A, m.Free([oid(3)], [2]))
        (read,) = store.handle(3.0, B, m.Open(oid(1), THIRD, [2]))
        assert isinstance(read, ReadSpill)
        assert "lies on disk on node 2" in full_error(store.disk_stalled(63.0, [oid(1)], SINCE), B)
        assert store.snapshot()["restoring"] == 1, "its block is being read into"
        store.handle(63.2, A, m.Open(oid(1), THIRD, [2]))
        full_error(store.disk_stalled(63.5, [oid(1)], SINCE), A)
        store.spill_read_ended(70.0, oid(1), None)
        store.disk_stalled(70.0, [], "")
        assert isinstance(only(store.handle(71.0, B, m.Open(oid(1), THIRD, [2])), B), m.Opened)

    def test_no_more_blocks_are_allocated_for_restores_during_a_stall(self, store: ObjectStore) -> None:
        spill_two(store)
        store.handle(3.0, A, m.Free([oid(3)], [2]))
        store.handle(3.0, B, m.Open(oid(1), THIRD, [2]))
        store.disk_stalled(63.0, [oid(1)], SINCE)
        used = store.snapshot()["used"]
        full_error(store.handle(64.0, A, m.Open(oid(2), THIRD, [2])), A)
        pull = m.Pull(oid(2), transfer_tag(4, 1), THIRD, 2 * CHUNK)  # too large for what is sent from disk
        (refused,) = sent_to(store.handle(64.0, raylet_of(4), pull), raylet_of(4))
        assert isinstance(refused, m.PullRefused) and refused.full and SINCE in refused.reason
        assert store.snapshot()["used"] == used and store.snapshot()["spilled"] == 1
        store.spill_read_ended(70.0, oid(1), None)
        store.disk_stalled(70.0, [], "")
        assert any(isinstance(effect, ReadSpill) for effect in store.handle(71.0, A, m.Open(oid(2), THIRD, [2])))

    def test_a_restore_that_waits_for_room_fails_during_a_stall(self, store: ObjectStore) -> None:
        spill_two(store)
        store.handle(3.0, A, m.Free([oid(3)], [2]))
        store.handle(3.0, B, m.Open(oid(1), THIRD, [2]))
        store.handle(3.0, A, m.Open(oid(2), THIRD, [2]))
        assert store.snapshot()["waiting"] == 1
        effects = store.disk_stalled(63.0, [oid(1)], SINCE)
        full_error(effects, B)
        full_error(effects, A)
        assert store.snapshot()["waiting"] == 0 and store.snapshot()["spilled"] == 1

    def test_a_freed_object_goes_when_its_stalled_read_has_ended(self, store: ObjectStore) -> None:
        spill_two(store)
        store.handle(3.0, A, m.Free([oid(3)], [2]))
        store.handle(3.0, B, m.Open(oid(1), THIRD, [2]))
        store.disk_stalled(63.0, [oid(1)], SINCE)
        store.handle(64.0, A, m.Free([oid(1), oid(2)], [2]))
        used = store.snapshot()["used"]
        store.spill_read_ended(70.0, oid(1), None)
        numbers = store.snapshot()
        assert numbers["used"] == used - THIRD and numbers["on_disk"] == numbers["segments"] == 0

    def test_another_node_is_refused_during_a_stall_and_its_slot_is_released(self, store: ObjectStore) -> None:
        spill_two(store)
        first, second = transfer_tag(4, 1), transfer_tag(5, 1)
        (read,) = store.handle(3.0, raylet_of(4), m.Pull(oid(1), first, THIRD, CHUNK))
        assert isinstance(read, ReadSpill) and read.piece.offset == CAPACITY
        assert store.handle(3.0, raylet_of(5), m.Pull(oid(2), second, THIRD, CHUNK)) == [], "there is one slot"
        effects = store.disk_stalled(63.0, [read.id], SINCE)
        for node in (4, 5):
            (refused,) = sent_to(effects, raylet_of(node))
            assert isinstance(refused, m.PullRefused) and refused.full and SINCE in refused.reason
        assert answers(store.disk_stalled(63.5, [read.id], SINCE)) == [], "once"
        assert store.spill_read_ended(70.0, read.id, None) == []
        store.disk_stalled(70.0, [], "")
        third = transfer_tag(5, 2)
        (read,) = store.handle(71.0, raylet_of(5), m.Pull(oid(2), third, THIRD, CHUNK))
        assert isinstance(read, ReadSpill) and read.piece.offset == CAPACITY
        assert store.spill_read_ended(72.0, read.id, None) == [StartSend(oid(2), 5, third, CAPACITY, THIRD)]
