"""Objects that are read in the order of their writing come back before they are asked for."""

from __future__ import annotations

import pytest
from store_kit import A, B, answers, oid, put

from hpcray.common.ids import raylet_of
from hpcray.core.effects import ReadSpill
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.core.object_store.pull_manager import transfer_tag
from hpcray.protocol import messages as m

CAPACITY = 64 * 1024
SIZE = 1024  # a course has a sixteenth of the store read ahead: four of them
COUNT = 24


@pytest.fixture
def store() -> ObjectStore:
    """COUNT objects on disk alone, written in order, and a store that is empty otherwise."""
    store = ObjectStore(2, CAPACITY, spill_threshold=1.0)
    for counter in range(COUNT):
        put(store, oid(counter), SIZE)
    store.handle(0.0, B, m.Create(oid(1, B), CAPACITY))
    while not [effect for effect in store.spill_write_ended(0.0, None) if hasattr(effect, "dest")]:
        pass
    store.handle(0.0, B, m.Release([oid(1, B)]))
    assert store.snapshot()["spilled"] == COUNT and store.snapshot()["used"] == 0
    return store


def reads(effects: list) -> list[int]:
    return [int.from_bytes(effect.id[8:13], "big") for effect in effects if isinstance(effect, ReadSpill)]


def read(store: ObjectStore, counter: int) -> list[int]:
    """Somebody reads an object and lets it go; what the disk was asked for."""
    asked = reads(store.handle(1.0, A, m.Open(oid(counter), SIZE, [2])))
    for other in asked:
        store.spill_read_ended(1.0, oid(other), None)
    store.handle(1.0, A, m.Release([oid(counter)]))
    return asked


def test_the_second_object_in_a_row_restores_the_next_ones(store: ObjectStore) -> None:
    assert read(store, 3) == [3]
    assert read(store, 4) == [4, 5, 6, 7, 8]
    assert read(store, 5) == [9], "as many as before are ahead"
    assert read(store, 6) == [10]


def test_other_orders_of_reading_restore_nothing(store: ObjectStore) -> None:
    assert [read(store, counter) for counter in (9, 7, 5, 12, 2)] == [[9], [7], [5], [12], [2]]


def test_two_readers_are_followed_independently(store: ObjectStore) -> None:
    assert [read(store, counter) for counter in (0, 12, 1, 13)] == [[0], [12], [1, 2, 3, 4, 5], [13, 14, 15, 16, 17]]
    assert [read(store, counter) for counter in (2, 14)] == [[6], [18]]


def test_read_ahead_steps_over_objects_that_are_gone(store: ObjectStore) -> None:
    store.handle(0.5, A, m.Free([oid(5), oid(6)], [2]))
    assert read(store, 3) == [3]
    assert read(store, 4) == [4, 7, 8, 9, 10]
    assert read(store, 7) == [11]


def test_pulls_of_other_nodes_are_followed_too(store: ObjectStore) -> None:
    effects = store.handle(1.0, raylet_of(4), m.Pull(oid(0), transfer_tag(4, 1), SIZE))
    effects += store.handle(1.0, raylet_of(4), m.Pull(oid(1), transfer_tag(4, 2), SIZE))
    assert reads(effects) == [0, 1, 2, 3, 4, 5]


def test_read_ahead_evicts_nothing_that_is_in_use(store: ObjectStore) -> None:
    store.handle(0.5, B, m.Create(oid(2, B), CAPACITY - 8 * SIZE))
    read(store, 3)
    effects = store.handle(1.0, A, m.Open(oid(4), SIZE, [2]))
    assert reads(effects) == [4, 5, 6, 7], "as much room as can be ahead of a reader stays"
    assert store.snapshot()["waiting"] == 0


def test_objects_that_were_read_ahead_are_not_evicted_by_more_read_ahead(store: ObjectStore) -> None:
    store.handle(0.5, B, m.Create(oid(2, B), CAPACITY - 6 * SIZE))
    asked = [at for counter in range(COUNT) for at in read(store, counter)]
    assert sorted(asked) == list(range(COUNT)), "each was read once"


def test_a_failed_read_ahead_loses_nothing(store: ObjectStore) -> None:
    read(store, 3)
    store.handle(1.0, A, m.Open(oid(4), SIZE, [2]))
    for counter in (4, 5, 6, 7, 8):
        store.spill_read_ended(1.0, oid(counter), "Input/output error" if counter > 4 else None)
    assert store.snapshot()["spilled"] == COUNT - 2
    assert answers(store.handle(2.0, A, m.Open(oid(5), SIZE, [2])))[0].id == oid(5)  # type: ignore[union-attr]
