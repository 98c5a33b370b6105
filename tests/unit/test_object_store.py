"""One node store: objects from creation to the end, and what happens when there is no room."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from store_kit import BIG, CAPACITY, FAR, A, B, C, answers, oid, only, pull, put, sent_to, start_pull

from hpcray.common.ids import raylet_of
from hpcray.core.effects import Send, StartReceive
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.core.object_store.stored_object import TRANSITIONS, StoredObject, StoredObjectState
from hpcray.protocol import messages as m


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore(2, CAPACITY, full_timeout=10.0)


# ---------------------------------------------------------------- create, seal, open, release, free


def test_an_object_lives_from_create_to_free(store: ObjectStore) -> None:
    offset = put(store, oid(1))
    assert only(store.handle(0.0, B, m.Open(oid(1), 640, [2])), B) == m.Opened(oid(1), offset, 640, False)
    store.handle(0.0, A, m.Free([oid(1)], [2]))
    assert store.snapshot()["used"] == 640, "pinned by B"
    store.handle(0.0, B, m.Release([oid(1)]))
    assert store.snapshot()["used"] == store.snapshot()["objects"] == 0


def test_one_release_undoes_any_number_of_opens_of_a_process(store: ObjectStore) -> None:
    put(store, oid(1), release=False)
    store.handle(0.0, A, m.Open(oid(1), 640, [2]))
    store.handle(0.0, A, m.Open(oid(1), 640, [2]))
    store.handle(0.0, A, m.Free([oid(1)], [2]))
    store.handle(0.0, A, m.Release([oid(1)]))
    assert store.snapshot()["objects"] == 0


def test_an_open_waits_for_the_seal(store: ObjectStore) -> None:
    store.handle(0.0, A, m.Create(oid(1), 640))
    assert store.handle(0.0, B, m.Open(oid(1), 640, [2])) == []
    assert only(store.handle(0.0, A, m.Seal(oid(1))), B) == m.Opened(oid(1), 0, 640, False)


def test_only_the_creator_can_seal(store: ObjectStore) -> None:
    store.handle(0.0, A, m.Create(oid(1), 640))
    store.handle(0.0, B, m.Seal(oid(1)))
    store.handle(0.0, B, m.Seal(oid(9)))
    assert store.snapshot()["creating"] == 1


def test_a_second_create_is_refused(store: ObjectStore) -> None:
    put(store, oid(1))
    error = only(store.handle(0.0, B, m.Create(oid(1), 640)), B)
    assert isinstance(error, m.StoreError) and error.kind == "exists" and "sealed" in error.reason


def test_a_release_before_the_seal_takes_the_creation_back(store: ObjectStore) -> None:
    store.handle(0.0, A, m.Create(oid(1), 640))
    store.handle(0.0, A, m.Release([oid(1)]))
    assert store.snapshot()["used"] == 0


def test_free_during_creation_takes_effect_after_it(store: ObjectStore) -> None:
    store.handle(0.0, A, m.Create(oid(1), 640))
    store.handle(0.0, A, m.Free([oid(1)], [2]))
    assert store.snapshot()["creating"] == 1
    store.handle(0.0, A, m.Seal(oid(1)))
    store.handle(0.0, A, m.Release([oid(1)]))
    assert store.snapshot()["objects"] == 0


def test_the_owners_raylet_forwards_free_to_the_other_nodes_once(store: ObjectStore) -> None:
    effects = store.handle(0.0, A, m.Free([oid(1), oid(2)], [1, 2, 7]))
    assert effects == [Send(raylet_of(node), m.Free([oid(1), oid(2)], [])) for node in (1, 7)]
    assert store.handle(0.0, raylet_of(1), m.Free([oid(1)], [])) == []


# ---------------------------------------------------------------- room


def test_unpinned_replicas_are_evicted_least_recently_used_first(store: ObjectStore) -> None:
    third = CAPACITY // 4 // 64 * 64
    for counter in (1, 2, 3):
        pull(store, oid(counter, FAR), third)
    store.handle(0.0, A, m.Open(oid(1, FAR), third, [7]))
    store.handle(0.0, A, m.Release([oid(1, FAR)]))
    put(store, oid(4), 2 * third)
    assert store.snapshot()["evicted"] >= 1
    assert sent_to(store.handle(0.0, B, m.Open(oid(1, FAR), third, [7])), B) != [], "the one used last stayed"
    assert sent_to(store.handle(0.0, B, m.Open(oid(2, FAR), third, [])), B)[0].kind == "lost"  # type: ignore[union-attr]


def test_primaries_and_pinned_replicas_are_never_evicted(store: ObjectStore) -> None:
    put(store, oid(1), CAPACITY // 2)
    pull(store, oid(1, FAR), CAPACITY // 4, release=False)
    assert answers(store.handle(0.0, B, m.Create(oid(2), CAPACITY // 2))) == []
    assert store.snapshot()["evicted"] == 0 and store.snapshot()["waiting"] == 1


def test_nothing_is_evicted_for_a_request_that_would_not_fit_even_then(store: ObjectStore) -> None:
    put(store, oid(1), CAPACITY // 2)
    pull(store, oid(1, FAR), CAPACITY // 4)
    store.handle(0.0, B, m.Create(oid(2), CAPACITY // 4 * 3))
    assert store.snapshot()["evicted"] == 0


def test_a_create_waits_for_room_and_gets_it(store: ObjectStore) -> None:
    put(store, oid(1), BIG)
    assert store.handle(1.0, B, m.Create(oid(2, B), BIG)) == []
    assert only(store.handle(2.0, A, m.Free([oid(1)], [2])), B) == m.Created(oid(2, B), 0, BIG)


def test_a_pull_waits_for_room_and_starts_then(store: ObjectStore) -> None:
    put(store, oid(1), BIG)
    assert store.handle(1.0, B, m.Open(oid(1, FAR), BIG, [7])) == []
    receive, ask = store.handle(2.0, A, m.Free([oid(1)], [2]))
    assert isinstance(receive, StartReceive) and receive.size == BIG
    assert isinstance(ask, Send) and ask.dest == raylet_of(7)


def test_a_create_that_finds_no_room_in_time_fails_and_names_the_objects_that_hold_it(store: ObjectStore) -> None:
    put(store, oid(1), BIG, release=False)
    store.handle(1.0, B, m.Create(oid(2, B), BIG))
    assert answers(store.tick(10.9)) == []
    error = only(store.tick(11.0), B)
    assert isinstance(error, m.StoreError) and error.kind == "full"
    for part in (
        "node 2",
        "waited 10.0 s",
        str(BIG),
        "capacity 62.5 KiB",
        "used 37.5 KiB",
        oid(1).hex(),
        "owner process 2.1",
    ):
        assert part in error.reason
    assert "pinned by process 2.1" in error.reason and "hint:" in error.reason
    assert store.snapshot()["waiting"] == 0
    assert store.tick(99.0) == []


def test_a_request_larger_than_the_store_fails_at_once(store: ObjectStore) -> None:
    for msg in (m.Create(oid(1), CAPACITY + 1), m.Open(oid(2), CAPACITY + 1, [7])):
        error = only(store.handle(0.0, A, msg), A)
        assert isinstance(error, m.StoreError) and error.kind == "full" and "larger than the whole" in error.reason
    assert store.snapshot()["objects"] == 0


def test_a_small_request_overtakes_a_large_one_but_not_for_ever(store: ObjectStore) -> None:
    put(store, oid(1), BIG)
    store.handle(0.0, B, m.Create(oid(2, B), BIG))
    assert isinstance(only(store.handle(1.0, C, m.Create(oid(1, C), 64)), C), m.Created)
    assert answers(store.handle(6.0, C, m.Create(oid(2, C), 64))) == [], "room is kept for the one that has waited long"


def test_a_request_in_the_queue_can_be_taken_back(store: ObjectStore) -> None:
    put(store, oid(1), BIG)
    store.handle(0.0, B, m.Create(oid(2, B), BIG))
    store.handle(0.0, C, m.Open(oid(1, FAR), BIG, [7]))
    store.handle(0.0, B, m.Release([oid(2, B)]))
    store.handle(0.0, C, m.Release([oid(1, FAR)]))
    assert store.snapshot()["waiting"] == 0 and store.snapshot()["objects"] == 1


def test_a_message_that_the_store_does_not_handle_is_a_programming_error(store: ObjectStore) -> None:
    with pytest.raises(KeyError):
        store.handle(0.0, A, m.Blocked())


# ---------------------------------------------------------------- the cost of a death


def test_a_death_touches_only_objects_of_which_the_process_was_a_client(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(50):
        put(store, oid(number, B), 64, proc=B)
    put(store, oid(100), release=False)  # pinned and owned by A
    put(store, oid(101, C), proc=C)
    store.handle(0.0, A, m.Open(oid(101, C), 640, [2]))  # pinned by A, owned by C
    store.handle(0.0, A, m.Create(oid(102), 640))  # not finished
    put(store, oid(103))  # owned by A, held by nobody
    touched: list[bytes] = []
    life = store.lifecycle
    release, free = life.release_client, life.free_object
    monkeypatch.setattr(
        life, "release_client", lambda now, obj, *rest: (touched.append(obj.id), release(now, obj, *rest))
    )
    monkeypatch.setattr(life, "free_object", lambda ident, out: (touched.append(ident), free(ident, out)))
    store.process_died(0.0, A)
    assert set(touched) == {oid(100), oid(101, C), oid(102), oid(103)}
    assert store.snapshot()["objects"] == 51
    assert store.process_died(0.0, A) == []
    assert len(touched) == 5, "only what it owned and held twice is looked at twice"


def test_the_client_index_forgets_processes_that_released_everything(store: ObjectStore) -> None:
    put(store, oid(1), release=False)
    store.handle(0.0, B, m.Open(oid(1), 640, [2]))
    pull(store, oid(2), proc=B, release=False)
    receive = start_pull(store, oid(3), [7], proc=C)
    store.handle(0.0, A, m.Create(oid(4), 640))
    assert len(store.lifecycle.clients) == 5
    store.handle(0.0, A, m.Release([oid(1), oid(4)]))
    store.handle(0.0, B, m.Release([oid(1), oid(2)]))
    store.node_died(0.0, 7)
    store.receive_ended(0.0, receive.tag, "the node died")
    assert len(store.lifecycle.clients) == 1, "only B still stands for having told the owner of its copy"
    store.handle(0.0, A, m.Free([oid(2)], []))
    assert len(store.lifecycle.clients) == 0


# ---------------------------------------------------------------- invariants


def _corruptions() -> dict[str, Callable[[ObjectStore], object]]:
    def obj(store: ObjectStore, counter: int = 1) -> StoredObject:
        return store.lifecycle.objects[oid(counter)]

    return {
        "a block without an object": lambda store: store.lifecycle.blocks.allocate(64),
        "an object whose block was freed": lambda store: store.lifecycle.blocks.free(obj(store).offset),
        "a pin that is not in the index": lambda store: obj(store).pins.add(C),
        "an index entry without a pin": lambda store: store.lifecycle.clients.add_client(C, obj(store)),
        "a pin of a dead process": lambda store: store.lifecycle.dead_procs.add(A),
        "a read that is not over": lambda store: setattr(obj(store), "io_reads", 1),
        "a negative count of reads": lambda store: setattr(obj(store), "io_reads", -1),
        "an evictable object that is pinned": lambda store: store.lifecycle.eviction.add_candidate(obj(store)),
        "a primary that could be evicted": lambda store: (
            store.lifecycle.spills.remove_candidate(obj(store, 2)),
            store.lifecycle.eviction.add_candidate(obj(store, 2)),
        ),
        "a request in the queue that has its block": lambda store: store.lifecycle.queue.pending.update(
            {oid(1): obj(store)}
        ),
        "a request that would fit": lambda store: store.lifecycle.add_object(StoredObject(oid(9), 64, A, 0.0)),
        "an object on disk without a slot": lambda store: setattr(obj(store, 2), "state", StoredObjectState.SPILLED),
        "a slot on disk without an object": lambda store: store.lifecycle.spills.segments.allocate_slots([64]),
        "a pull that is neither asked for nor paused": lambda store: setattr(
            store.lifecycle.objects[oid(3, FAR)].pull, "tag", -1
        ),
        "a pull that left the store": lambda store: store.lifecycle.objects.pop(oid(3, FAR)),
    }


@pytest.mark.parametrize("name", _corruptions())
def test_check_invariants_finds_a_corrupted_store(store: ObjectStore, name: str) -> None:
    put(store, oid(1), release=False)
    put(store, oid(2))
    start_pull(store, oid(3, FAR), [7])
    store.check_invariants()
    _corruptions()[name](store)
    with pytest.raises(AssertionError):
        store.check_invariants()


@pytest.mark.parametrize("old", StoredObjectState)
@pytest.mark.parametrize("new", StoredObjectState)
def test_an_object_changes_its_state_only_as_the_table_allows(old: StoredObjectState, new: StoredObjectState) -> None:
    obj = StoredObject(oid(1), 64, A, 0.0, state=old)
    if new in TRANSITIONS[old]:
        obj.change_state(new)
        assert obj.state is new
    else:
        with pytest.raises(AssertionError, match=f"must not go from {old.value} to {new.value}"):
            obj.change_state(new)
        assert obj.state is old
