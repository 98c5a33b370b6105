"""A full store writes to disk what nobody reads, and reads it back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_kit import CAPACITY, FAR, A, B, answers, oid, only, put, sent_to

from hpcray.common.ids import raylet_of
from hpcray.core.effects import DiscardSpilled, Effect, LendSpilled, ReadSpill, Send, StartSend, WriteSpill
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.core.object_store.pull_manager import transfer_tag
from hpcray.core.object_store.spill_manager import WRITE_RETRY_DELAY, SpillSegments
from hpcray.core.object_store.stored_object import SpillSlot
from hpcray.protocol import messages as m

THIRD = CAPACITY // 3 // 64 * 64


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore(2, CAPACITY, full_timeout=10.0, spill_threshold=1.0)


def write_of(effects: list[Effect]) -> WriteSpill:
    (write,) = [effect for effect in effects if isinstance(effect, WriteSpill)]
    return write


def fill(store: ObjectStore) -> None:
    for counter in (1, 2, 3):
        put(store, oid(counter), THIRD)


def spill_two(store: ObjectStore) -> None:
    """Objects 1 and 2 go to disk, 4 takes their place."""
    fill(store)
    store.handle(1.0, B, m.Create(oid(4, B), 2 * THIRD))
    store.spill_write_ended(2.0, None)
    store.handle(2.0, B, m.Seal(oid(4, B)))
    store.handle(2.0, B, m.Release([oid(4, B)]))
    assert store.snapshot()["spilled"] == 2


class TestSpilling:
    def test_the_least_recently_used_object_is_spilled_and_the_request_served_when_it_is_written(
        self, store: ObjectStore
    ) -> None:
        fill(store)
        store.handle(0.0, A, m.Open(oid(1), THIRD, [2]))
        store.handle(0.0, A, m.Release([oid(1)]))  # used last
        write = write_of(store.handle(1.0, B, m.Create(oid(4, B), THIRD)))
        assert [(piece.size, piece.offset) for piece in write.pieces] == [(THIRD, THIRD)], "object 2, put second"
        assert store.snapshot()["spilled"] == 0, "nothing gives up its block before it is written"
        assert only(store.spill_write_ended(1.5, None), B) == m.Created(oid(4, B), THIRD, THIRD)
        numbers = store.snapshot()
        assert (numbers["spilled"], numbers["on_disk"], numbers["spilled_bytes"]) == (1, THIRD, THIRD)

    def test_small_objects_are_spilled_in_one_write(self, store: ObjectStore) -> None:
        for counter in range(1, 1001):
            put(store, oid(counter), 64)
        write = write_of(store.handle(1.0, B, m.Create(oid(1, B), 64)))
        assert sum(piece.size for piece in write.pieces) >= CAPACITY // 8
        positions = [piece.position for piece in write.pieces]
        assert positions == [64 * at for at in range(len(positions))], "one behind the other"

    def test_spilling_writes_one_batch_at_a_time(self, store: ObjectStore) -> None:
        fill(store)
        write_of(store.handle(1.0, B, m.Create(oid(4, B), THIRD)))
        assert store.handle(1.1, B, m.Create(oid(5, B), THIRD)) == []
        more = store.spill_write_ended(1.2, None)
        assert sent_to(more, B) == [m.Created(oid(4, B), 0, THIRD)]
        write_of(more)  # for the other one

    def test_a_pinned_object_is_not_spilled(self, store: ObjectStore) -> None:
        fill(store)
        for counter in (1, 2, 3):
            store.handle(0.0, A, m.Open(oid(counter), THIRD, [2]))
        effects = store.handle(1.0, B, m.Create(oid(4, B), THIRD))
        assert answers(effects) == []
        assert sent_to(effects, A) == [m.Unpin(THIRD)], "but its readers are asked whether they need it"
        write_of(store.handle(1.1, A, m.Release([oid(2)])))

    def test_spilling_begins_beyond_the_threshold_before_a_request_waits(self) -> None:
        store = ObjectStore(2, CAPACITY, spill_threshold=0.5)
        put(store, oid(1), THIRD)
        store.handle(0.0, A, m.Create(oid(2), THIRD))
        store.handle(0.0, A, m.Seal(oid(2)))
        store.handle(0.0, A, m.Release([oid(2)]))
        assert store.spill_write_ended(0.1, None) == []
        numbers = store.snapshot()
        assert numbers["on_disk"] == THIRD and numbers["evictable"] == THIRD and numbers["spilled"] == 0

    def test_an_object_opened_while_it_is_written_stays_in_memory(self, store: ObjectStore) -> None:
        fill(store)
        write_of(store.handle(1.0, B, m.Create(oid(4, B), THIRD)))
        assert isinstance(only(store.handle(1.1, A, m.Open(oid(1), THIRD, [2])), A), m.Opened)
        write_of(store.spill_write_ended(1.2, None))  # the next one is tried
        assert store.snapshot()["spilled"] == 0
        assert isinstance(only(store.spill_write_ended(1.3, None), B), m.Created)

    def test_an_object_freed_while_it_is_written_leaves_memory_and_disk(self, store: ObjectStore) -> None:
        fill(store)
        write_of(store.handle(1.0, B, m.Create(oid(4, B), THIRD)))
        store.handle(1.1, A, m.Free([oid(1)], [2]))
        effects = store.spill_write_ended(1.2, None)
        assert DiscardSpilled(1, 0, THIRD, True) in effects
        assert sent_to(effects, B) == [m.Created(oid(4, B), 0, THIRD)]
        assert store.snapshot()["on_disk"] == 0

    def test_a_failed_write_loses_nothing_and_is_tried_again_later(self, store: ObjectStore) -> None:
        fill(store)
        write_of(store.handle(1.0, B, m.Create(oid(4, B), THIRD)))
        assert store.spill_write_ended(2.0, "No space left on device (/scratch)")[0] == DiscardSpilled(
            1, 0, THIRD, True
        )
        for counter in (1, 2, 3):
            assert isinstance(only(store.handle(2.0, A, m.Open(oid(counter), THIRD, [2])), A), m.Opened)
            store.handle(2.0, A, m.Release([oid(counter)]))
        assert not [effect for effect in store.tick(2.0 + WRITE_RETRY_DELAY / 2) if isinstance(effect, WriteSpill)]
        write_of(store.tick(2.0 + WRITE_RETRY_DELAY))

    def test_a_request_that_fails_because_of_the_disk_names_the_disk_error(self, store: ObjectStore) -> None:
        fill(store)
        write_of(store.handle(1.0, B, m.Create(oid(4, B), THIRD)))
        store.spill_write_ended(2.0, "No space left on device (/scratch)")
        write_of(store.tick(10.0))
        error = only(store.spill_write_ended(11.0, "No space left on device (/scratch)")[1:] + store.tick(11.0), B)
        assert isinstance(error, m.StoreError) and error.kind == "full"
        assert "Spilling to disk failed: No space left on device (/scratch)" in error.reason and "hint:" in error.reason

    def test_a_request_waits_for_longer_while_a_slow_disk_makes_room(self, store: ObjectStore) -> None:
        fill(store)
        write_of(store.handle(1.0, B, m.Create(oid(4, B), THIRD)))
        assert answers(store.tick(60.0)) == []
        assert isinstance(only(store.spill_write_ended(61.0, None), B), m.Created)


class TestRestoring:
    def test_an_opened_object_is_restored_at_a_new_place(self, store: ObjectStore) -> None:
        spill_two(store)
        store.handle(3.0, A, m.Free([oid(3)], [2]))
        (read,) = store.handle(3.0, B, m.Open(oid(1), THIRD, [2]))
        assert isinstance(read, ReadSpill) and (read.id, read.segment, read.piece.position) == (oid(1), 1, 0)
        assert store.handle(3.1, A, m.Open(oid(1), THIRD, [2])) == [], "one read for both"
        effects = store.spill_read_ended(3.2, oid(1), None)
        opened = m.Opened(oid(1), read.piece.offset, THIRD, False)
        assert sent_to(effects, A) == sent_to(effects, B) == [opened]

    def test_a_restored_object_stays_on_disk_and_gives_up_its_block_without_a_write(self, store: ObjectStore) -> None:
        spill_two(store)
        store.handle(3.0, A, m.Free([oid(3)], [2]))
        store.handle(3.0, B, m.Open(oid(1), THIRD, [2]))
        store.spill_read_ended(3.2, oid(1), None)
        store.handle(3.3, B, m.Release([oid(1)]))
        assert isinstance(only(store.handle(4.0, B, m.Create(oid(5, B), THIRD)), B), m.Created)
        assert store.snapshot()["spilled"] == 2

    def test_a_pull_of_another_node_restores_an_object(self, store: ObjectStore) -> None:
        spill_two(store)
        store.handle(3.0, A, m.Free([oid(3)], [2]))
        tag = transfer_tag(4, 1)
        (read,) = store.handle(3.0, raylet_of(4), m.Pull(oid(2), tag, THIRD))
        assert isinstance(read, ReadSpill)
        assert store.spill_read_ended(3.1, oid(2), None) == [StartSend(oid(2), 4, tag, read.piece.offset, THIRD)]

    def test_without_room_the_opener_is_lent_the_file_and_the_object_stays_on_disk(self, store: ObjectStore) -> None:
        spill_two(store)
        store.handle(3.0, B, m.Open(oid(4, B), 2 * THIRD, [2]))
        store.handle(3.0, A, m.Open(oid(3), THIRD, [2]))
        tag = transfer_tag(4, 1)
        store.handle(4.0, B, m.Open(oid(1), THIRD, [2]))
        store.handle(4.0, raylet_of(4), m.Pull(oid(1), tag, THIRD))
        effects = answers(store.tick(14.0))
        assert LendSpilled(B, oid(1), 1, 0, THIRD) in effects
        (refused,) = sent_to(effects, raylet_of(4))
        assert isinstance(refused, m.PullRefused) and refused.full and "restoring object" in refused.reason
        assert store.handle(14.5, A, m.Free([oid(2)], [2])) == [DiscardSpilled(1, THIRD, THIRD, False)]
        assert store.handle(14.6, B, m.DiskRead(oid(1))) == []
        store.handle(15.0, B, m.Release([oid(4, B)]))
        (write,) = answers(store.handle(15.0, B, m.Open(oid(1), THIRD, [2])))
        assert isinstance(write, WriteSpill)
        (read,) = store.spill_write_ended(15.1, None)
        assert isinstance(read, ReadSpill)

    def test_a_lent_slot_is_freed_when_it_was_read_or_its_reader_is_dead(self, store: ObjectStore) -> None:
        spill_two(store)
        store.handle(3.0, B, m.Open(oid(4, B), 2 * THIRD, [2]))
        store.handle(3.0, A, m.Open(oid(3), THIRD, [2]))
        for counter in (1, 2):
            store.handle(4.0, B, m.Open(oid(counter), THIRD, [2]))
        assert answers(store.tick(4.5)) == [], "pins may still be given up"
        lent = [effect.id for effect in store.tick(5.5) if isinstance(effect, LendSpilled)]
        assert lent == [oid(1), oid(2)], "but nothing can be spilled, so nobody waits for long"
        effects = store.handle(5.6, A, m.Open(oid(2), THIRD, [2]))
        assert LendSpilled(A, oid(2), 1, THIRD, THIRD) in effects, "who comes after that does not wait again"
        assert store.handle(5.7, A, m.DiskRead(oid(2))) == []
        assert store.handle(6.0, A, m.Free([oid(1), oid(2)], [2])) == []
        assert store.handle(7.0, B, m.DiskRead(oid(1))) == [DiscardSpilled(1, 0, THIRD, False)]
        assert DiscardSpilled(1, THIRD, THIRD, True) in store.process_died(8.0, B)

    def test_a_restore_that_is_no_longer_requested_gives_up_its_block(self, store: ObjectStore) -> None:
        spill_two(store)
        store.handle(3.0, B, m.Open(oid(4, B), 2 * THIRD, [2]))
        store.handle(3.0, A, m.Open(oid(3), THIRD, [2]))
        store.handle(4.0, B, m.Open(oid(1), THIRD, [2]))
        store.handle(4.1, B, m.Release([oid(1)]))
        assert store.snapshot()["waiting"] == 0 and store.snapshot()["spilled"] == 2

    def test_an_unreadable_object_is_pulled_from_another_node_or_lost(self, store: ObjectStore) -> None:
        spill_two(store)
        store.handle(3.0, A, m.Free([oid(3)], [2]))
        store.handle(3.0, B, m.Open(oid(1), THIRD, [2, 7]))
        effects = store.spill_read_ended(3.1, oid(1), "Input/output error (/scratch)")
        assert [effect.msg.id for effect in effects if isinstance(effect, Send) and effect.dest == raylet_of(7)] == [
            oid(1)
        ]
        store.handle(3.0, B, m.Free([oid(4, B)], [2]))
        store.handle(4.0, B, m.Open(oid(2), THIRD, [2]))
        (error,) = sent_to(store.spill_read_ended(4.1, oid(2), "Input/output error (/scratch)"), B)
        assert isinstance(error, m.StoreError) and error.kind == "lost"
        assert "reading from disk failed: Input/output error (/scratch)" in error.reason

    def test_a_freed_object_leaves_the_disk(self, store: ObjectStore) -> None:
        spill_two(store)
        assert store.handle(3.0, A, m.Free([oid(1)], [2])) == [DiscardSpilled(1, 0, THIRD, False)]
        assert store.handle(3.0, A, m.Free([oid(2)], [2])) == [DiscardSpilled(1, THIRD, THIRD, True)]
        assert store.snapshot()["on_disk"] == store.snapshot()["segments"] == 0

    def test_an_object_on_disk_goes_with_its_owner(self, store: ObjectStore) -> None:
        spill_two(store)
        assert [type(effect) for effect in store.process_died(3.0, A)] == [DiscardSpilled, DiscardSpilled]


def test_a_store_without_spilling_writes_nothing() -> None:
    store = ObjectStore(2, CAPACITY)
    fill(store)
    assert answers(store.handle(1.0, B, m.Create(oid(4, B), THIRD))) == []
    (error,) = answers(store.tick(11.0))
    assert isinstance(error, Send) and isinstance(error.msg, m.StoreError)
    assert "Spilling to disk is off (HPCRAY_SPILL_THRESHOLD=0)" in error.msg.reason


def test_replicas_are_evicted_and_not_spilled(store: ObjectStore) -> None:
    receive = store.handle(0.0, A, m.Open(oid(1, FAR), 2 * THIRD, [7]))[0]
    store.receive_ended(0.0, receive.tag, None)  # type: ignore[union-attr]
    store.handle(0.0, A, m.Release([oid(1, FAR)]))
    assert isinstance(only(store.handle(0.0, B, m.Create(oid(1, B), 2 * THIRD)), B), m.Created)
    assert store.snapshot()["evicted"] == 1 and store.snapshot()["spilled_bytes"] == 0


@given(
    st.lists(st.one_of(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(0, 1000))), st.integers(1, 80)
)
def test_segments_allocate_slots_that_do_not_overlap_and_count_the_live_ones(script: list[object], size: int) -> None:
    segments = SpillSegments(size)
    alive: list[SpillSlot] = []
    for step in script:
        if isinstance(step, list):
            slots = segments.allocate_slots(step)
            assert [slot.size for slot in slots] == step and len({slot.segment for slot in slots}) == 1
            for slot in slots:
                for other in alive:
                    apart = slot.offset >= other.offset + other.size or other.offset >= slot.offset + slot.size
                    assert slot.segment != other.segment or apart
            alive += slots
        elif alive and isinstance(step, int):
            slot = alive.pop(step % len(alive))
            discard = segments.free_slot(slot)
            assert discard.last == all(other.segment != slot.segment for other in alive)
        assert segments.used == sum(slot.size for slot in alive)
        assert len(segments) == len({slot.segment for slot in alive})
