"""A disk that does not answer: whoever waits for it hears so, and what is in memory goes on."""

from __future__ import annotations

import pytest
from store_kit import CAPACITY, A, B, answers, oid, only, put, sent_to

from hpcray.base.errors import ObjectStoreFullError
from hpcray.base.fullness import store_full
from hpcray.base.ids import raylet_of
from hpcray.core.effects import Effect, LendSpilled, ReadSpill, StartSend, WriteSpill
from hpcray.core.store.node_store import NodeStore
from hpcray.core.store.pulls import transfer_tag
from hpcray.wire import messages as m

THIRD = CAPACITY // 3 // 64 * 64
CHUNK = THIRD
SINCE = "/scratch has not answered since 09:00:00"


@pytest.fixture
def store() -> NodeStore:
    return NodeStore(2, CAPACITY, full_timeout=10.0, spill_threshold=1.0, chunk=CHUNK, slots=1)


def fill_and_ask_for_more(store: NodeStore) -> None:
    """Three objects are idle, and a fourth waits for the write of the first."""
    for counter in (1, 2, 3):
        put(store, oid(counter), THIRD)
    effects = store.handle(1.0, B, m.Create(oid(4, B), THIRD))
    assert any(isinstance(effect, WriteSpill) for effect in effects)


def spill_two(store: NodeStore) -> None:
    """Objects 1 and 2 are on disk only; 3, and one that B has pinned, fill the store; 3 can go."""
    for counter in (1, 2, 3):
        put(store, oid(counter), THIRD)
    store.handle(1.0, B, m.Create(oid(4, B), 2 * THIRD))
    store.spilled(2.0, None)
    store.handle(2.0, B, m.Seal(oid(4, B)))
    assert store.snapshot()["spilled"] == 2


def full_error(effects: list[Effect], dest: bytes) -> str:
    (error,) = [msg for msg in sent_to(effects, dest) if isinstance(msg, m.StoreError)]
    assert error.kind == "full" and "hint:" in error.reason and SINCE in error.reason
    assert isinstance(store_full(error.reason), ObjectStoreFullError)
    return error.reason


class TestWrites:
    def test_who_waits_for_a_write_that_does_not_move_gets_an_error(self, store: NodeStore) -> None:
        fill_and_ask_for_more(store)
        assert answers(store.tick(60.9)) == [], "it is slow, and moves"
        store.stalled(61.0, [b""], SINCE)
        assert "does not get on" in full_error(store.tick(61.1), B)

    def test_pins_are_asked_for_as_nothing_else_makes_room(self, store: NodeStore) -> None:
        fill_and_ask_for_more(store)
        store.handle(1.0, A, m.Open(oid(2), THIRD, [2]))
        assert m.Unpin(THIRD) in sent_to(store.stalled(61.0, [b""], SINCE), A)

    def test_what_is_in_memory_goes_on(self, store: NodeStore) -> None:
        fill_and_ask_for_more(store)
        store.stalled(61.0, [b""], SINCE)
        store.tick(61.0)
        for counter in (1, 2, 3):
            assert isinstance(only(store.handle(62.0, A, m.Open(oid(counter), THIRD, [2])), A), m.Opened)
            store.handle(62.0, A, m.Release([oid(counter)]))
        store.handle(62.0, A, m.Free([oid(3)], [2]))
        assert isinstance(only(store.handle(63.0, B, m.Create(oid(5, B), THIRD)), B), m.Created), "its room was freed"

    def test_what_is_being_written_keeps_its_block(self, store: NodeStore) -> None:
        fill_and_ask_for_more(store)
        store.stalled(61.0, [b""], SINCE)
        store.tick(61.0)
        store.handle(62.0, A, m.Free([oid(1)], [2]))
        assert answers(store.handle(62.0, B, m.Create(oid(5, B), THIRD))) == []
        assert sent_to(store.spilled(63.0, None), B) == [m.Created(oid(5, B), 0, THIRD)], "now it is free"

    @pytest.mark.parametrize("error", [None, "Input/output error (/scratch)"])
    def test_when_it_answers_again_all_is_as_before(self, store: NodeStore, error: str | None) -> None:
        fill_and_ask_for_more(store)
        store.stalled(61.0, [b""], SINCE)
        store.tick(61.0)
        assert not any(isinstance(effect, WriteSpill) for effect in store.handle(74.0, B, m.Create(oid(5, B), THIRD)))
        effects = store.spilled(75.0, error) + store.stalled(75.0, [], "") + store.tick(80.0)
        if error is not None:
            (write,) = [effect for effect in effects if isinstance(effect, WriteSpill)]
            assert write.number == 2
            effects = store.spilled(81.0, None)
        assert isinstance(only([e for e in effects if not isinstance(e, WriteSpill)][-1:], B), m.Created)
        store.handle(82.0, B, m.Release([oid(5, B)]))
        store.handle(82.0, A, m.Free([oid(1), oid(2), oid(3)], [2]))
        numbers = store.snapshot()
        assert numbers["objects"] == numbers["used"] == numbers["on_disk"] == numbers["segments"] == 0

    def test_nobody_is_sent_to_read_a_file_himself(self, store: NodeStore) -> None:
        spill_two(store)
        store.handle(3.0, B, m.Open(oid(1), THIRD, [2]))  # object 3 is to make way for it
        store.stalled(64.0, [b""], SINCE)
        effects = store.tick(64.0)
        assert not any(isinstance(effect, LendSpilled) for effect in effects)
        full_error(effects, B)
        assert store.snapshot()["spilled"] == 2, "it is on disk as before"


class TestReads:
    def test_who_waits_for_a_read_that_does_not_move_gets_an_error_and_later_the_object(self, store: NodeStore) -> None:
        spill_two(store)
        store.handle(3.0, A, m.Free([oid(3)], [2]))
        (read,) = store.handle(3.0, B, m.Open(oid(1), THIRD, [2]))
        assert isinstance(read, ReadSpill)
        assert "lies on disk on node 2" in full_error(store.stalled(63.0, [oid(1)], SINCE), B)
        assert store.snapshot()["restoring"] == 1, "its block is being read into"
        store.handle(63.2, A, m.Open(oid(1), THIRD, [2]))
        full_error(store.stalled(63.5, [oid(1)], SINCE), A)
        store.restored(70.0, oid(1), None)
        store.stalled(70.0, [], "")
        assert isinstance(only(store.handle(71.0, B, m.Open(oid(1), THIRD, [2])), B), m.Opened)

    def test_no_more_blocks_are_taken_for_what_cannot_be_read(self, store: NodeStore) -> None:
        spill_two(store)
        store.handle(3.0, A, m.Free([oid(3)], [2]))
        store.handle(3.0, B, m.Open(oid(1), THIRD, [2]))
        store.stalled(63.0, [oid(1)], SINCE)
        used = store.snapshot()["used"]
        full_error(store.handle(64.0, A, m.Open(oid(2), THIRD, [2])), A)
        pull = m.Pull(oid(2), transfer_tag(4, 1), THIRD, 2 * CHUNK)  # too large for what is sent from disk
        (refused,) = sent_to(store.handle(64.0, raylet_of(4), pull), raylet_of(4))
        assert isinstance(refused, m.PullRefused) and refused.full and SINCE in refused.reason
        assert store.snapshot()["used"] == used and store.snapshot()["spilled"] == 1
        store.restored(70.0, oid(1), None)
        store.stalled(70.0, [], "")
        assert any(isinstance(effect, ReadSpill) for effect in store.handle(71.0, A, m.Open(oid(2), THIRD, [2])))

    def test_who_waits_for_room_to_read_into_hears_so_too(self, store: NodeStore) -> None:
        spill_two(store)
        store.handle(3.0, A, m.Free([oid(3)], [2]))
        store.handle(3.0, B, m.Open(oid(1), THIRD, [2]))
        store.handle(3.0, A, m.Open(oid(2), THIRD, [2]))
        assert store.snapshot()["waiting"] == 1
        effects = store.stalled(63.0, [oid(1)], SINCE)
        full_error(effects, B)
        full_error(effects, A)
        assert store.snapshot()["waiting"] == 0 and store.snapshot()["spilled"] == 1

    def test_a_freed_object_goes_when_its_read_has_ended(self, store: NodeStore) -> None:
        spill_two(store)
        store.handle(3.0, A, m.Free([oid(3)], [2]))
        store.handle(3.0, B, m.Open(oid(1), THIRD, [2]))
        store.stalled(63.0, [oid(1)], SINCE)
        store.handle(64.0, A, m.Free([oid(1), oid(2)], [2]))
        used = store.snapshot()["used"]
        store.restored(70.0, oid(1), None)
        numbers = store.snapshot()
        assert numbers["used"] == used - THIRD and numbers["on_disk"] == numbers["segments"] == 0

    def test_another_node_hears_it_too_and_its_slot_is_given_back(self, store: NodeStore) -> None:
        spill_two(store)
        first, second = transfer_tag(4, 1), transfer_tag(5, 1)
        (read,) = store.handle(3.0, raylet_of(4), m.Pull(oid(1), first, THIRD, CHUNK))
        assert isinstance(read, ReadSpill) and read.piece.offset == CAPACITY
        assert store.handle(3.0, raylet_of(5), m.Pull(oid(2), second, THIRD, CHUNK)) == [], "there is one slot"
        effects = store.stalled(63.0, [read.id], SINCE)
        for node in (4, 5):
            (refused,) = sent_to(effects, raylet_of(node))
            assert isinstance(refused, m.PullRefused) and refused.full and SINCE in refused.reason
        assert answers(store.stalled(63.5, [read.id], SINCE)) == [], "once"
        assert store.restored(70.0, read.id, None) == []
        store.stalled(70.0, [], "")
        third = transfer_tag(5, 2)
        (read,) = store.handle(71.0, raylet_of(5), m.Pull(oid(2), third, THIRD, CHUNK))
        assert isinstance(read, ReadSpill) and read.piece.offset == CAPACITY
        assert store.restored(72.0, read.id, None) == [StartSend(oid(2), 5, third, CAPACITY, THIRD)]
