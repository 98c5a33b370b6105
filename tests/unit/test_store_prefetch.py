"""Copies that nobody reads yet: fetched ahead, or kept for their owner."""

from __future__ import annotations

import pytest
from store_kit import CAPACITY, FAR, A, B, answers, oid, put, sent_to

from hpcray.common.ids import raylet_of
from hpcray.core.effects import DiscardSpilled, ReadSpill, Send, StartReceive, WriteSpill
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.protocol import messages as m

SIZE = CAPACITY // 4 // 64 * 64


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore(2, CAPACITY, full_timeout=10.0, spill_threshold=1.0)


def prefetch(*idents: bytes, nodes: tuple[int, ...] = (7,)) -> m.Prefetch:
    return m.Prefetch([m.ArgRef(ident, SIZE, list(nodes)) for ident in idents])


def keep(store: ObjectStore, ident: bytes, proc: bytes = FAR) -> None:
    """The owner, on node 5, has a copy kept here."""
    receive, _ = store.handle(0.0, proc, m.Open(ident, SIZE, [5], pin_replica=True))
    assert isinstance(receive, StartReceive)
    effects = store.receive_ended(0.0, receive.tag, None)
    assert sent_to(effects, proc) == [m.ReplicaPinned(ident)]


class TestPrefetch:
    def test_a_prefetched_object_is_announced_to_its_owner_and_opened_at_once(self, store: ObjectStore) -> None:
        receive, ask = store.handle(0.0, B, prefetch(oid(1, FAR)))
        assert isinstance(receive, StartReceive) and isinstance(ask, Send) and ask.dest == raylet_of(7)
        assert store.receive_ended(1.0, receive.tag, None) == [Send(FAR, m.AddLocation(oid(1, FAR), 2))]
        effects = store.handle(2.0, A, m.Open(oid(1, FAR), SIZE, [7]))
        assert effects == [Send(A, m.Opened(oid(1, FAR), receive.offset, SIZE, False))], "nobody has to tell it again"

    def test_an_open_of_a_prefetch_under_way_raises_its_priority(self, store: ObjectStore) -> None:
        receive, _ = store.handle(0.0, B, prefetch(oid(1, FAR)))
        assert store.handle(0.5, A, m.Open(oid(1, FAR), SIZE, [7])) == []
        assert store.lifecycle.objects[oid(1, FAR)].priority == 0
        effects = store.receive_ended(1.0, receive.tag, None)  # type: ignore[union-attr]
        assert effects == [Send(A, m.Opened(oid(1, FAR), 0, SIZE, True))], "the opener tells the owner, as always"

    def test_a_prefetched_object_makes_way_for_any_request(self, store: ObjectStore) -> None:
        for counter in range(1, 5):
            receive = store.handle(0.0, B, prefetch(oid(counter, FAR)))[0]
            store.receive_ended(0.0, receive.tag, None)  # type: ignore[union-attr]
        effects = store.handle(1.0, A, m.Create(oid(1), 4 * SIZE))
        assert [type(msg) for msg in sent_to(effects, A)] == [m.Created]

    def test_a_prefetch_without_room_is_dropped_and_evicts_nothing(self, store: ObjectStore) -> None:
        for counter in range(1, 5):
            put(store, oid(counter), SIZE)
        assert store.handle(1.0, B, prefetch(oid(1, FAR))) == []
        assert store.snapshot()["waiting"] == 0 and store.snapshot()["objects"] == 4

    def test_a_prefetch_freed_before_its_turn_is_forgotten(self) -> None:
        waiting = ObjectStore(2, CAPACITY)
        waiting.lifecycle.pulls.admission._may_begin = lambda priority: False  # type: ignore[method-assign]
        assert waiting.handle(0.0, B, prefetch(oid(1, FAR))) == []
        assert waiting.snapshot()["queued"] == 1
        waiting.handle(0.0, raylet_of(5), m.Free([oid(1, FAR)], []))
        assert waiting.snapshot()["queued"] == waiting.snapshot()["objects"] == 0

    def test_a_prefetch_restores_an_object_on_disk(self, store: ObjectStore) -> None:
        for counter in range(1, 5):
            put(store, oid(counter), SIZE)
        store.handle(1.0, B, m.Create(oid(9, B), SIZE))
        store.spill_write_ended(1.0, None)
        store.handle(1.0, A, m.Free([oid(4)], [2]))
        (read,) = store.handle(2.0, B, prefetch(oid(1), nodes=(2,)))
        assert isinstance(read, ReadSpill) and read.id == oid(1)


class TestPriority:
    def test_only_an_opener_can_raise_the_priority_of_a_pull(self, store: ObjectStore) -> None:
        store.handle(0.0, A, m.Open(oid(1, FAR), SIZE, [7], 1))
        obj = store.lifecycle.objects[oid(1, FAR)]
        store.handle(0.0, B, m.RaisePriority(oid(1, FAR), 0))
        assert obj.priority == 1, "B has not asked for it"
        store.handle(0.0, A, m.RaisePriority(oid(1, FAR), 0))
        assert obj.priority == 0
        assert store.handle(0.0, A, m.RaisePriority(oid(8, FAR), 0)) == [], "nor is anything made of what is not here"


class TestPinnedReplica:
    def test_a_pinned_replica_goes_to_disk_but_is_never_evicted(self, store: ObjectStore) -> None:
        for counter in range(1, 5):
            keep(store, oid(counter, FAR))
        (write,) = answers(store.handle(1.0, A, m.Create(oid(1), SIZE)))
        assert isinstance(write, WriteSpill)
        effects = store.spill_write_ended(1.0, None)
        assert [type(msg) for msg in sent_to(effects, A)] == [m.Created]
        numbers = store.snapshot()
        assert (numbers["objects"], numbers["spilled"], numbers["evicted"]) == (5, 1, 1)
        store.handle(2.0, A, m.Release([oid(1)]))
        (read,) = store.handle(3.0, raylet_of(4), m.Pull(oid(1, FAR), 4 << 48 | 1, SIZE))
        assert isinstance(read, ReadSpill), "other nodes can have it"

    def test_an_unpinned_replica_is_evictable_again(self, store: ObjectStore) -> None:
        keep(store, oid(1, FAR))
        assert store.snapshot()["evictable"] == 0
        store.handle(1.0, FAR, m.Release([oid(1, FAR)], unpin_replica=True))
        assert store.snapshot()["evictable"] == SIZE

    def test_a_pinned_replica_on_disk_goes_when_it_is_unpinned_or_its_owner_dies(self, store: ObjectStore) -> None:
        for counter in range(1, 5):
            keep(store, oid(counter, FAR))
        store.handle(1.0, A, m.Create(oid(1), 2 * SIZE))
        store.spill_write_ended(1.0, None)
        assert store.snapshot()["spilled"] == 2
        assert [type(effect) for effect in store.handle(2.0, FAR, m.Release([oid(1, FAR)], unpin_replica=True))] == [
            DiscardSpilled
        ]
        assert DiscardSpilled in [type(effect) for effect in store.process_died(3.0, FAR)]
        assert store.snapshot()["on_disk"] == 0

    def test_a_replica_that_its_owner_here_has_pinned_can_become_the_primary(self, store: ObjectStore) -> None:
        receive = store.handle(0.0, A, m.Open(oid(1), SIZE, [5]))[0]
        store.receive_ended(0.0, receive.tag, None)  # type: ignore[union-attr]
        assert store.handle(1.0, A, m.Open(oid(1), SIZE, [], pin_replica=True)) == [], "no answer"
        assert store.snapshot()["pinned"] == 1
        store.handle(2.0, A, m.Release([oid(1)]))
        assert store.snapshot()["evictable"] == 0
        (write,) = answers(store.handle(3.0, B, m.Create(oid(1, B), 4 * SIZE)))
        assert isinstance(write, WriteSpill)
        store.spill_write_ended(4.0, None)
        assert store.snapshot()["spilled"] == 1
        assert [type(effect) for effect in store.handle(5.0, A, m.Free([oid(1)], [2]))] == [DiscardSpilled]

    def test_a_replica_without_a_pin_cannot_become_the_primary(self, store: ObjectStore) -> None:
        assert store.handle(1.0, A, m.Open(oid(1), SIZE, [], pin_replica=True)) == []
        assert store.snapshot()["objects"] == 0

    def test_a_replica_that_an_owner_wants_in_its_own_store_is_pulled_and_stays(self, store: ObjectStore) -> None:
        receive = store.handle(1.0, A, m.Open(oid(1), SIZE, [5], pin_replica=True))[0]
        assert isinstance(receive, StartReceive)
        (answer,) = answers(store.receive_ended(2.0, receive.tag, None))
        assert answer.msg == m.ReplicaPinned(oid(1))
        assert store.snapshot()["evictable"] == 0

    @pytest.mark.parametrize("pinned", [False, True])
    def test_a_pinned_replica_in_memory_and_on_disk_leaves_the_disk_when_it_is_unpinned(
        self, store: ObjectStore, pinned: bool
    ) -> None:
        for counter in range(1, 5):
            keep(store, oid(counter, FAR))
        store.handle(1.0, A, m.Create(oid(1), SIZE))
        store.spill_write_ended(1.0, None)
        store.handle(2.0, A, m.Release([oid(1)]))
        assert isinstance(store.handle(3.0, A, m.Open(oid(1, FAR), SIZE, [2]))[0], ReadSpill)
        store.spill_read_ended(4.0, oid(1, FAR), None)
        if pinned:
            assert store.handle(5.0, FAR, m.Release([oid(1, FAR)], unpin_replica=True)) == [], "A reads it"
            effects = store.handle(6.0, A, m.Release([oid(1, FAR)]))
        else:
            store.handle(5.0, A, m.Release([oid(1, FAR)]))
            effects = store.handle(6.0, FAR, m.Release([oid(1, FAR)], unpin_replica=True))
        assert DiscardSpilled(1, 0, SIZE, True) in effects
        numbers = store.snapshot()
        assert numbers["on_disk"] == numbers["spilled"] == 0 and numbers["evictable"] == SIZE

    def test_a_replica_that_is_here_already_can_be_pinned(self, store: ObjectStore) -> None:
        receive = store.handle(0.0, A, m.Open(oid(1, FAR), SIZE, [5]))[0]
        store.receive_ended(0.0, receive.tag, None)  # type: ignore[union-attr]
        store.handle(0.0, A, m.Release([oid(1, FAR)]))
        assert store.snapshot()["evictable"] == SIZE
        (opened,) = store.handle(1.0, FAR, m.Open(oid(1, FAR), SIZE, [2, 5], pin_replica=True))
        assert isinstance(opened, Send) and opened.msg == m.ReplicaPinned(oid(1, FAR))
        assert store.snapshot()["evictable"] == 0 and store.snapshot()["pinned"] == 0
