"""Copies that nobody reads yet: fetched ahead, or kept for their owner."""

from __future__ import annotations

import pytest
from store_kit import CAPACITY, FAR, A, B, answers, oid, put, sent_to

from hpcray.base.ids import raylet_of
from hpcray.core.effects import DiscardSpilled, ReadSpill, Send, StartReceive, WriteSpill
from hpcray.core.store.node_store import NodeStore
from hpcray.wire import messages as m

SIZE = CAPACITY // 4 // 64 * 64


@pytest.fixture
def store() -> NodeStore:
    return NodeStore(2, CAPACITY, full_timeout=10.0, spill_threshold=1.0)


def prefetch(*idents: bytes, nodes: tuple[int, ...] = (7,)) -> m.Prefetch:
    return m.Prefetch([m.ArgRef(ident, SIZE, list(nodes)) for ident in idents])


def keep(store: NodeStore, ident: bytes, proc: bytes = FAR) -> None:
    """The owner, on node 5, has a copy kept here."""
    receive, _ = store.handle(0.0, proc, m.Open(ident, SIZE, [5], keep=True))
    assert isinstance(receive, StartReceive)
    effects = store.received(0.0, receive.tag, None)
    assert sent_to(effects, proc) == [m.Kept(ident)]


class TestFetchedAhead:
    def test_it_comes_its_owner_hears_of_it_and_who_opens_it_has_it_at_once(self, store: NodeStore) -> None:
        receive, ask = store.handle(0.0, B, prefetch(oid(1, FAR)))
        assert isinstance(receive, StartReceive) and isinstance(ask, Send) and ask.dest == raylet_of(7)
        assert store.received(1.0, receive.tag, None) == [Send(FAR, m.AddLocation(oid(1, FAR), 2))]
        effects = store.handle(2.0, A, m.Open(oid(1, FAR), SIZE, [7]))
        assert effects == [Send(A, m.Opened(oid(1, FAR), receive.offset, SIZE, False))], "nobody has to tell it again"

    def test_who_opens_it_meanwhile_waits_for_the_same_transfer_more_urgently(self, store: NodeStore) -> None:
        receive, _ = store.handle(0.0, B, prefetch(oid(1, FAR)))
        assert store.handle(0.5, A, m.Open(oid(1, FAR), SIZE, [7])) == []
        assert store._objects[oid(1, FAR)].priority == 0
        effects = store.received(1.0, receive.tag, None)  # type: ignore[union-attr]
        assert effects == [Send(A, m.Opened(oid(1, FAR), 0, SIZE, True))], "the opener tells the owner, as always"

    def test_it_makes_way_for_anything(self, store: NodeStore) -> None:
        for counter in range(1, 5):
            receive = store.handle(0.0, B, prefetch(oid(counter, FAR)))[0]
            store.received(0.0, receive.tag, None)  # type: ignore[union-attr]
        effects = store.handle(1.0, A, m.Create(oid(1), 4 * SIZE))
        assert [type(msg) for msg in sent_to(effects, A)] == [m.Created]

    def test_without_room_it_is_not_fetched_and_drives_nothing_out(self, store: NodeStore) -> None:
        for counter in range(1, 5):
            put(store, oid(counter), SIZE)
        assert store.handle(1.0, B, prefetch(oid(1, FAR))) == []
        assert store.snapshot()["waiting"] == 0 and store.snapshot()["objects"] == 4

    def test_what_is_freed_before_its_turn_is_forgotten(self) -> None:
        waiting = NodeStore(2, CAPACITY)
        waiting._admission._may_begin = lambda priority: False  # type: ignore[method-assign]
        assert waiting.handle(0.0, B, prefetch(oid(1, FAR))) == []
        assert waiting.snapshot()["queued"] == 1
        waiting.handle(0.0, raylet_of(5), m.Free([oid(1, FAR)], []))
        assert waiting.snapshot()["queued"] == waiting.snapshot()["objects"] == 0

    def test_what_lies_on_disk_here_comes_back(self, store: NodeStore) -> None:
        for counter in range(1, 5):
            put(store, oid(counter), SIZE)
        store.handle(1.0, B, m.Create(oid(9, B), SIZE))
        store.spilled(1.0, None)
        store.handle(1.0, A, m.Free([oid(4)], [2]))
        (read,) = store.handle(2.0, B, prefetch(oid(1), nodes=(2,)))
        assert isinstance(read, ReadSpill) and read.id == oid(1)


class TestUrgency:
    def test_a_hurry_raises_what_its_sender_has_asked_for_and_nothing_else(self, store: NodeStore) -> None:
        store.handle(0.0, A, m.Open(oid(1, FAR), SIZE, [7], 1))
        obj = store._objects[oid(1, FAR)]
        store.handle(0.0, B, m.Hurry(oid(1, FAR), 0))
        assert obj.priority == 1, "B has not asked for it"
        store.handle(0.0, A, m.Hurry(oid(1, FAR), 0))
        assert obj.priority == 0
        assert store.handle(0.0, A, m.Hurry(oid(8, FAR), 0)) == [], "nor is anything made of what is not here"


class TestKept:
    def test_it_goes_to_disk_but_is_never_evicted(self, store: NodeStore) -> None:
        for counter in range(1, 5):
            keep(store, oid(counter, FAR))
        (write,) = answers(store.handle(1.0, A, m.Create(oid(1), SIZE)))
        assert isinstance(write, WriteSpill)
        effects = store.spilled(1.0, None)
        assert [type(msg) for msg in sent_to(effects, A)] == [m.Created]
        numbers = store.snapshot()
        assert (numbers["objects"], numbers["spilled"], numbers["evicted"]) == (5, 1, 1)
        store.handle(2.0, A, m.Release([oid(1)]))
        (read,) = store.handle(3.0, raylet_of(4), m.Pull(oid(1, FAR), 4 << 48 | 1, SIZE))
        assert isinstance(read, ReadSpill), "other nodes can have it"

    def test_who_gives_it_up_makes_it_a_copy_like_any_other(self, store: NodeStore) -> None:
        keep(store, oid(1, FAR))
        assert store.snapshot()["evictable"] == 0
        store.handle(1.0, FAR, m.Release([oid(1, FAR)], keep=True))
        assert store.snapshot()["evictable"] == SIZE

    def test_on_disk_it_goes_when_it_is_given_up_or_its_owner_dies(self, store: NodeStore) -> None:
        for counter in range(1, 5):
            keep(store, oid(counter, FAR))
        store.handle(1.0, A, m.Create(oid(1), 2 * SIZE))
        store.spilled(1.0, None)
        assert store.snapshot()["spilled"] == 2
        assert [type(effect) for effect in store.handle(2.0, FAR, m.Release([oid(1, FAR)], keep=True))] == [
            DiscardSpilled
        ]
        assert DiscardSpilled in [type(effect) for effect in store.process_died(3.0, FAR)]
        assert store.snapshot()["on_disk"] == 0

    def test_what_its_owner_here_has_pinned_takes_the_place_of_the_first_copy(self, store: NodeStore) -> None:
        receive = store.handle(0.0, A, m.Open(oid(1), SIZE, [5]))[0]
        store.received(0.0, receive.tag, None)  # type: ignore[union-attr]
        assert store.handle(1.0, A, m.Open(oid(1), SIZE, [], keep=True)) == [], "no answer"
        assert store.snapshot()["pinned"] == 1
        store.handle(2.0, A, m.Release([oid(1)]))
        assert store.snapshot()["evictable"] == 0
        (write,) = answers(store.handle(3.0, B, m.Create(oid(1, B), 4 * SIZE)))
        assert isinstance(write, WriteSpill)
        store.spilled(4.0, None)
        assert store.snapshot()["spilled"] == 1
        assert [type(effect) for effect in store.handle(5.0, A, m.Free([oid(1)], [2]))] == [DiscardSpilled]

    def test_what_nobody_has_pinned_is_not_kept_for_a_process_of_the_node(self, store: NodeStore) -> None:
        assert store.handle(1.0, A, m.Open(oid(1), SIZE, [5], keep=True)) == []
        assert store.snapshot()["objects"] == 0

    @pytest.mark.parametrize("pinned", [False, True])
    def test_on_disk_and_in_memory_it_leaves_the_disk_when_it_is_given_up(self, store: NodeStore, pinned: bool) -> None:
        for counter in range(1, 5):
            keep(store, oid(counter, FAR))
        store.handle(1.0, A, m.Create(oid(1), SIZE))
        store.spilled(1.0, None)
        store.handle(2.0, A, m.Release([oid(1)]))
        assert isinstance(store.handle(3.0, A, m.Open(oid(1, FAR), SIZE, [2]))[0], ReadSpill)
        store.restored(4.0, oid(1, FAR), None)
        if pinned:
            assert store.handle(5.0, FAR, m.Release([oid(1, FAR)], keep=True)) == [], "A reads it"
            effects = store.handle(6.0, A, m.Release([oid(1, FAR)]))
        else:
            store.handle(5.0, A, m.Release([oid(1, FAR)]))
            effects = store.handle(6.0, FAR, m.Release([oid(1, FAR)], keep=True))
        assert DiscardSpilled(1, 0, SIZE, True) in effects
        numbers = store.snapshot()
        assert numbers["on_disk"] == numbers["spilled"] == 0 and numbers["evictable"] == SIZE

    def test_a_copy_that_is_here_already_stays_from_then_on(self, store: NodeStore) -> None:
        receive = store.handle(0.0, A, m.Open(oid(1, FAR), SIZE, [5]))[0]
        store.received(0.0, receive.tag, None)  # type: ignore[union-attr]
        store.handle(0.0, A, m.Release([oid(1, FAR)]))
        assert store.snapshot()["evictable"] == SIZE
        (opened,) = store.handle(1.0, FAR, m.Open(oid(1, FAR), SIZE, [2, 5], keep=True))
        assert isinstance(opened, Send) and opened.msg == m.Kept(oid(1, FAR))
        assert store.snapshot()["evictable"] == 0 and store.snapshot()["pinned"] == 0
