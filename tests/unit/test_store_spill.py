"""A full store writes to disk what nobody reads, and reads it back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_kit import CAPACITY, FAR, A, B, answers, oid, only, put, sent_to

from hpcray.base.ids import raylet_of
from hpcray.core.effects import DiscardSpilled, Effect, LendSpilled, ReadSpill, Send, StartSend, WriteSpill
from hpcray.core.store.node_store import NodeStore
from hpcray.core.store.objects import Slot
from hpcray.core.store.pulls import transfer_tag
from hpcray.core.store.spill import RETRY_AFTER, Segments
from hpcray.wire import messages as m

THIRD = CAPACITY // 3 // 64 * 64


@pytest.fixture
def store() -> NodeStore:
    return NodeStore(2, CAPACITY, full_timeout=10.0, spill_threshold=1.0)


def write_of(effects: list[Effect]) -> WriteSpill:
    (write,) = [effect for effect in effects if isinstance(effect, WriteSpill)]
    return write


def fill(store: NodeStore) -> None:
    for counter in (1, 2, 3):
        put(store, oid(counter), THIRD)


def spill_two(store: NodeStore) -> None:
    """Objects 1 and 2 go to disk, 4 takes their place."""
    fill(store)
    store.handle(1.0, B, m.Create(oid(4, B), 2 * THIRD))
    store.spilled(2.0, None)
    store.handle(2.0, B, m.Seal(oid(4, B)))
    store.handle(2.0, B, m.Release([oid(4, B)]))
    assert store.snapshot()["spilled"] == 2


class TestSpilling:
    def test_the_least_recently_used_makes_way_and_the_request_is_served_when_it_is_written(
        self, store: NodeStore
    ) -> None:
        fill(store)
        store.handle(0.0, A, m.Open(oid(1), THIRD, [2]))
        store.handle(0.0, A, m.Release([oid(1)]))  # used last
        write = write_of(store.handle(1.0, B, m.Create(oid(4, B), THIRD)))
        assert [(piece.size, piece.offset) for piece in write.pieces] == [(THIRD, THIRD)], "object 2, put second"
        assert store.snapshot()["spilled"] == 0, "nothing gives up its block before it is written"
        assert only(store.spilled(1.5, None), B) == m.Created(oid(4, B), THIRD, THIRD)
        numbers = store.snapshot()
        assert (numbers["spilled"], numbers["on_disk"], numbers["spilled_bytes"]) == (1, THIRD, THIRD)

    def test_small_objects_go_in_one_write(self, store: NodeStore) -> None:
        for counter in range(1, 1001):
            put(store, oid(counter), 64)
        write = write_of(store.handle(1.0, B, m.Create(oid(1, B), 64)))
        assert sum(piece.size for piece in write.pieces) >= CAPACITY // 8
        positions = [piece.position for piece in write.pieces]
        assert positions == [64 * at for at in range(len(positions))], "one behind the other"

    def test_one_write_at_a_time(self, store: NodeStore) -> None:
        fill(store)
        write_of(store.handle(1.0, B, m.Create(oid(4, B), THIRD)))
        assert store.handle(1.1, B, m.Create(oid(5, B), THIRD)) == []
        more = store.spilled(1.2, None)
        assert sent_to(more, B) == [m.Created(oid(4, B), 0, THIRD)]
        write_of(more)  # for the other one

    def test_what_is_read_stays(self, store: NodeStore) -> None:
        fill(store)
        for counter in (1, 2, 3):
            store.handle(0.0, A, m.Open(oid(counter), THIRD, [2]))
        effects = store.handle(1.0, B, m.Create(oid(4, B), THIRD))
        assert answers(effects) == []
        assert sent_to(effects, A) == [m.Unpin(THIRD)], "but its readers are asked whether they need it"
        write_of(store.handle(1.1, A, m.Release([oid(2)])))

    def test_beyond_the_threshold_it_begins_before_anybody_waits(self) -> None:
        store = NodeStore(2, CAPACITY, spill_threshold=0.5)
        put(store, oid(1), THIRD)
        store.handle(0.0, A, m.Create(oid(2), THIRD))
        store.handle(0.0, A, m.Seal(oid(2)))
        store.handle(0.0, A, m.Release([oid(2)]))
        assert store.spilled(0.1, None) == []
        numbers = store.snapshot()
        assert numbers["on_disk"] == THIRD and numbers["evictable"] == THIRD and numbers["spilled"] == 0

    def test_what_was_opened_while_it_was_written_stays_in_memory(self, store: NodeStore) -> None:
        fill(store)
        write_of(store.handle(1.0, B, m.Create(oid(4, B), THIRD)))
        assert isinstance(only(store.handle(1.1, A, m.Open(oid(1), THIRD, [2])), A), m.Opened)
        write_of(store.spilled(1.2, None))  # the next one is tried
        assert store.snapshot()["spilled"] == 0
        assert isinstance(only(store.spilled(1.3, None), B), m.Created)

    def test_what_was_freed_while_it_was_written_is_nowhere(self, store: NodeStore) -> None:
        fill(store)
        write_of(store.handle(1.0, B, m.Create(oid(4, B), THIRD)))
        store.handle(1.1, A, m.Free([oid(1)], [2]))
        effects = store.spilled(1.2, None)
        assert DiscardSpilled(1, 0, THIRD, True) in effects
        assert sent_to(effects, B) == [m.Created(oid(4, B), 0, THIRD)]
        assert store.snapshot()["on_disk"] == 0

    def test_a_failed_write_loses_nothing_and_is_tried_again_later(self, store: NodeStore) -> None:
        fill(store)
        write_of(store.handle(1.0, B, m.Create(oid(4, B), THIRD)))
        assert store.spilled(2.0, "No space left on device (/scratch)")[0] == DiscardSpilled(1, 0, THIRD, True)
        for counter in (1, 2, 3):
            assert isinstance(only(store.handle(2.0, A, m.Open(oid(counter), THIRD, [2])), A), m.Opened)
            store.handle(2.0, A, m.Release([oid(counter)]))
        assert not [effect for effect in store.tick(2.0 + RETRY_AFTER / 2) if isinstance(effect, WriteSpill)]
        write_of(store.tick(2.0 + RETRY_AFTER))

    def test_a_request_that_the_disk_could_not_help_says_what_is_wrong_with_the_disk(self, store: NodeStore) -> None:
        fill(store)
        write_of(store.handle(1.0, B, m.Create(oid(4, B), THIRD)))
        store.spilled(2.0, "No space left on device (/scratch)")
        write_of(store.tick(10.0))
        error = only(store.spilled(11.0, "No space left on device (/scratch)")[1:] + store.tick(11.0), B)
        assert isinstance(error, m.StoreError) and error.kind == "full"
        assert "Spilling to disk failed: No space left on device (/scratch)" in error.reason and "hint:" in error.reason

    def test_a_request_waits_for_longer_while_a_slow_disk_makes_room(self, store: NodeStore) -> None:
        fill(store)
        write_of(store.handle(1.0, B, m.Create(oid(4, B), THIRD)))
        assert answers(store.tick(60.0)) == []
        assert isinstance(only(store.spilled(61.0, None), B), m.Created)


class TestRestoring:
    def test_somebody_asks_and_gets_it_at_its_new_place(self, store: NodeStore) -> None:
        spill_two(store)
        store.handle(3.0, A, m.Free([oid(3)], [2]))
        (read,) = store.handle(3.0, B, m.Open(oid(1), THIRD, [2]))
        assert isinstance(read, ReadSpill) and (read.id, read.segment, read.piece.position) == (oid(1), 1, 0)
        assert store.handle(3.1, A, m.Open(oid(1), THIRD, [2])) == [], "one read for both"
        effects = store.restored(3.2, oid(1), None)
        opened = m.Opened(oid(1), read.piece.offset, THIRD, False)
        assert sent_to(effects, A) == sent_to(effects, B) == [opened]

    def test_it_stays_on_disk_too_and_gives_up_its_block_without_a_write(self, store: NodeStore) -> None:
        spill_two(store)
        store.handle(3.0, A, m.Free([oid(3)], [2]))
        store.handle(3.0, B, m.Open(oid(1), THIRD, [2]))
        store.restored(3.2, oid(1), None)
        store.handle(3.3, B, m.Release([oid(1)]))
        assert isinstance(only(store.handle(4.0, B, m.Create(oid(5, B), THIRD)), B), m.Created)
        assert store.snapshot()["spilled"] == 2

    def test_another_node_gets_it_too(self, store: NodeStore) -> None:
        spill_two(store)
        store.handle(3.0, A, m.Free([oid(3)], [2]))
        tag = transfer_tag(4, 1)
        (read,) = store.handle(3.0, raylet_of(4), m.Pull(oid(2), tag, THIRD))
        assert isinstance(read, ReadSpill)
        assert store.restored(3.1, oid(2), None) == [StartSend(oid(2), 4, tag, read.piece.offset, THIRD)]

    def test_where_there_is_no_room_who_asks_reads_the_file_and_the_object_stays_where_it_is(
        self, store: NodeStore
    ) -> None:
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
        (read,) = store.spilled(15.1, None)
        assert isinstance(read, ReadSpill)

    def test_what_is_lent_goes_from_disk_when_it_was_read_or_its_reader_is_dead(self, store: NodeStore) -> None:
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

    def test_nobody_wants_it_any_more(self, store: NodeStore) -> None:
        spill_two(store)
        store.handle(3.0, B, m.Open(oid(4, B), 2 * THIRD, [2]))
        store.handle(3.0, A, m.Open(oid(3), THIRD, [2]))
        store.handle(4.0, B, m.Open(oid(1), THIRD, [2]))
        store.handle(4.1, B, m.Release([oid(1)]))
        assert store.snapshot()["waiting"] == 0 and store.snapshot()["spilled"] == 2

    def test_what_cannot_be_read_is_pulled_from_another_node_or_is_lost(self, store: NodeStore) -> None:
        spill_two(store)
        store.handle(3.0, A, m.Free([oid(3)], [2]))
        store.handle(3.0, B, m.Open(oid(1), THIRD, [2, 7]))
        effects = store.restored(3.1, oid(1), "Input/output error (/scratch)")
        assert [effect.msg.id for effect in effects if isinstance(effect, Send) and effect.dest == raylet_of(7)] == [
            oid(1)
        ]
        store.handle(3.0, B, m.Free([oid(4, B)], [2]))
        store.handle(4.0, B, m.Open(oid(2), THIRD, [2]))
        (error,) = sent_to(store.restored(4.1, oid(2), "Input/output error (/scratch)"), B)
        assert isinstance(error, m.StoreError) and error.kind == "lost"
        assert "reading from disk failed: Input/output error (/scratch)" in error.reason

    def test_a_free_of_what_is_on_disk_gives_the_disk_back(self, store: NodeStore) -> None:
        spill_two(store)
        assert store.handle(3.0, A, m.Free([oid(1)], [2])) == [DiscardSpilled(1, 0, THIRD, False)]
        assert store.handle(3.0, A, m.Free([oid(2)], [2])) == [DiscardSpilled(1, THIRD, THIRD, True)]
        assert store.snapshot()["on_disk"] == store.snapshot()["segments"] == 0

    def test_the_owner_dies(self, store: NodeStore) -> None:
        spill_two(store)
        assert [type(effect) for effect in store.process_died(3.0, A)] == [DiscardSpilled, DiscardSpilled]


def test_switched_off_it_writes_nothing() -> None:
    store = NodeStore(2, CAPACITY)
    fill(store)
    assert answers(store.handle(1.0, B, m.Create(oid(4, B), THIRD))) == []
    (error,) = answers(store.tick(11.0))
    assert isinstance(error, Send) and isinstance(error.msg, m.StoreError)
    assert "Spilling to disk is off (HPCRAY_SPILL_THRESHOLD=0)" in error.msg.reason


def test_copies_are_evicted_rather_than_written(store: NodeStore) -> None:
    receive = store.handle(0.0, A, m.Open(oid(1, FAR), 2 * THIRD, [7]))[0]
    store.received(0.0, receive.tag, None)  # type: ignore[union-attr]
    store.handle(0.0, A, m.Release([oid(1, FAR)]))
    assert isinstance(only(store.handle(0.0, B, m.Create(oid(1, B), 2 * THIRD)), B), m.Created)
    assert store.snapshot()["evicted"] == 1 and store.snapshot()["spilled_bytes"] == 0


@given(
    st.lists(st.one_of(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(0, 1000))), st.integers(1, 80)
)
def test_segments_hand_out_places_that_do_not_overlap_and_count_what_lives(script: list[object], size: int) -> None:
    segments = Segments(size)
    alive: list[Slot] = []
    for step in script:
        if isinstance(step, list):
            slots = segments.take(step)
            assert [slot.size for slot in slots] == step and len({slot.segment for slot in slots}) == 1
            for slot in slots:
                for other in alive:
                    apart = slot.offset >= other.offset + other.size or other.offset >= slot.offset + slot.size
                    assert slot.segment != other.segment or apart
            alive += slots
        elif alive and isinstance(step, int):
            slot = alive.pop(step % len(alive))
            discard = segments.give_back(slot)
            assert discard.last == all(other.segment != slot.segment for other in alive)
        assert segments.used == sum(slot.size for slot in alive)
        assert len(segments) == len({slot.segment for slot in alive})
