"""Processes of neighboring nodes that read in this node's store, in place; owners that read what they keep here."""

from __future__ import annotations

import pytest
from store_kit import CAPACITY, FAR, A, B, answers, oid, pull, put, sent_to, start_pull
from store_neighbors_kit import BOTH_ORDERS, OTHER, SIZE, X, ask, give, gives_both, leave_holes, on_disk, parts, show

from hpcray.common.ids import raylet_of
from hpcray.core.effects import StartReceive, WriteSpill
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.core.object_store.stored_object import StoredObjectState
from hpcray.protocol import messages as m


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore(2, CAPACITY, full_timeout=10.0, spill_threshold=1.0)


class TestNeighbors:
    def test_a_neighbor_reads_like_a_process_of_the_node(self, store: ObjectStore) -> None:
        offset = put(store, oid(1), SIZE)
        assert ask(store, "read", oid(1)) == [m.Opened(oid(1), offset, SIZE, False)]
        store.handle(2.0, A, m.Free([oid(1)], [2]))
        assert store.snapshot()["used"] == SIZE, "it is being read"
        assert give(store, "read", oid(1)) == [] and store.snapshot()["used"] == 0

    def test_an_open_of_a_neighbor_for_an_absent_object_starts_no_pull(self, store: ObjectStore) -> None:
        (error,) = ask(store, "read")
        assert isinstance(error, m.StoreError) and error.kind == "lost" and "is not on node" in error.reason
        assert store.snapshot()["objects"] == 0

    def test_a_neighbor_waits_for_an_object_that_is_being_created_or_pulled_here(self, store: ObjectStore) -> None:
        store.handle(0.0, A, m.Create(oid(1), SIZE))
        assert ask(store, "read", oid(1)) == []
        assert sent_to(store.handle(2.0, A, m.Seal(oid(1))), FAR) == [m.Opened(oid(1), 0, SIZE, False)]
        receive = start_pull(store, X, [7], B, SIZE)
        assert ask(store, "read") == []
        assert sent_to(store.receive_ended(3.0, receive.tag, None), FAR) == [m.Opened(X, receive.offset, SIZE, False)]

    def test_a_neighbor_whose_request_is_the_last_one_announces_the_replica(self, store: ObjectStore) -> None:
        receive = start_pull(store, X, [7], B, SIZE)
        ask(store, "read", proc=OTHER)
        store.handle(1.5, B, m.Release([X]))
        assert sent_to(store.receive_ended(2.0, receive.tag, None), OTHER) == [m.Opened(X, receive.offset, SIZE, True)]
        store.process_died(3.0, OTHER)
        assert ask(store, "read") == [m.Opened(X, receive.offset, SIZE, True)], "perhaps nobody was told"

    def test_a_neighbor_may_release_before_the_answer(self, store: ObjectStore) -> None:
        receive = start_pull(store, X, [7], B, SIZE)
        ask(store, "read")
        give(store, "read")
        assert sent_to(store.receive_ended(3.0, receive.tag, None), FAR) == []
        assert store.lifecycle.clients.clients() == [B]

    @pytest.mark.parametrize("state", ["coming", "here", "waiting", "full", "absent"])
    def test_a_neighbor_that_does_not_know_the_answer_releases_everything(self, store: ObjectStore, state: str) -> None:
        """Its connection has ended; the answer may have been lost with it."""
        if state in ("waiting", "full"):
            on_disk(store, kept=False)
            if state == "waiting":
                leave_holes(store)
        elif state == "coming":
            start_pull(store, X, [7], B, SIZE)
        elif state == "here":
            pull(store, X, SIZE, B)
        ask(store, "read")
        assert (FAR in store.lifecycle.clients.clients()) == (state in ("coming", "here", "waiting"))
        for _ in range(2):
            give(store, "read")
            assert FAR not in store.lifecycle.clients.clients()

    def test_a_dead_neighbor_opens_nothing(self, store: ObjectStore) -> None:
        put(store, oid(1), SIZE)
        store.process_died(1.0, FAR)
        assert ask(store, "read", oid(1)) == [] and store.snapshot()["pinned"] == 0


class TestPinnedAndRead:
    @pytest.mark.parametrize("asks", BOTH_ORDERS)
    @pytest.mark.parametrize("gives", BOTH_ORDERS)
    def test_an_object_here_can_be_pinned_and_read_in_either_order(
        self, store: ObjectStore, asks: tuple[str, ...], gives: tuple[str, ...]
    ) -> None:
        offset = pull(store, X, SIZE, B)
        want = {"keep": [m.ReplicaPinned(X)], "read": [m.Opened(X, offset, SIZE, False)]}
        for what in asks:
            assert ask(store, what) == want[what]
        assert parts(store.lifecycle.objects[X]) == {"keep", "read"} and store.snapshot()["evictable"] == 0
        gives_both(store, gives)
        assert store.snapshot()["evictable"] == SIZE

    @pytest.mark.parametrize("asks", BOTH_ORDERS)
    @pytest.mark.parametrize("gives", BOTH_ORDERS)
    def test_an_object_being_pulled_can_be_pinned_and_read_in_either_order(
        self, store: ObjectStore, asks: tuple[str, ...], gives: tuple[str, ...]
    ) -> None:
        receive = start_pull(store, X, [7], B, SIZE)
        for what in asks:
            assert ask(store, what) == [], "it is not here"
        effects = store.receive_ended(2.0, receive.tag, None)
        assert sorted(show(sent_to(effects, FAR))) == ["keep", "read"], "an answer to each"
        store.handle(3.0, B, m.Release([X]))
        gives_both(store, gives)
        assert store.snapshot()["evictable"] == SIZE

    @pytest.mark.parametrize("asks", BOTH_ORDERS)
    @pytest.mark.parametrize("first", ["keep", "read"])
    def test_a_pin_or_a_read_given_up_during_the_pull_leaves_the_other(
        self, store: ObjectStore, asks: tuple[str, ...], first: str
    ) -> None:
        receive = start_pull(store, X, [7], B, SIZE)
        for what in asks:
            ask(store, what)
        assert give(store, first) == []
        (other,) = {"keep", "read"} - {first}
        assert show(sent_to(store.receive_ended(2.0, receive.tag, None), FAR)) == [other]
        store.handle(3.0, B, m.Release([X]))
        assert parts(store.lifecycle.objects[X]) == {other} and store.snapshot()["evictable"] == 0
        give(store, other)
        assert store.snapshot()["evictable"] == SIZE and store.lifecycle.clients.clients() == [B], "who told its owner"

    def test_a_replica_pulled_for_its_pinner_arrives_though_it_is_no_longer_read(self, store: ObjectStore) -> None:
        (receive, _) = store.handle(0.0, FAR, m.Open(X, SIZE, [7], pin_replica=True))
        assert isinstance(receive, StartReceive)
        ask(store, "read")
        give(store, "read")
        assert sent_to(store.receive_ended(1.0, receive.tag, None), FAR) == [m.ReplicaPinned(X)]
        assert store.snapshot()["evictable"] == 0 and store.snapshot()["pinned"] == 0

    def test_a_pull_that_waits_for_its_turn_is_forgotten_without_pinner_and_reader(self, store: ObjectStore) -> None:
        store.lifecycle.pulls.admission._may_begin = lambda priority: False  # type: ignore[method-assign]
        store.handle(0.0, FAR, m.Open(X, SIZE, [7], pin_replica=True))
        ask(store, "read")
        give(store, "keep")
        assert store.snapshot()["waiting"] == 1
        give(store, "read")
        assert store.snapshot()["objects"] == store.snapshot()["queued"] == len(store.lifecycle.clients) == 0

    def test_a_failed_pull_is_answered_to_pinner_and_reader(self, store: ObjectStore) -> None:
        receive = start_pull(store, X, [7], B, SIZE)
        ask(store, "read")
        ask(store, "keep")
        store.handle(1.0, raylet_of(7), m.PullRefused(X, receive.tag, "it is not here"))
        effects = store.receive_ended(2.0, receive.tag, "cancelled")
        found = sent_to(effects, FAR)
        assert (
            sorted(type(msg).__name__ for msg in found) == ["ReplicaPinned", "StoreError"]
            and len(sent_to(effects, B)) == 1
        )
        assert store.snapshot()["objects"] == len(store.lifecycle.clients) == 0


class TestDeaths:
    def everything(self, store: ObjectStore) -> None:
        """FAR has something pinned, waits for something, and keeps something."""
        on_disk(store, kept=False)
        assert len(ask(store, "read", oid(2), now=13.0)) == len(ask(store, "keep", oid(2), now=13.0)) == 1
        store.handle(13.0, B, m.Open(oid(9, B), SIZE, [7]))
        assert ask(store, "read", oid(9, B), now=13.0) == []

    def held(self, store: ObjectStore, proc: bytes = FAR) -> bool:
        return proc in store.lifecycle.clients.clients()

    def test_a_neighbor_that_dies_leaves_nothing(self, store: ObjectStore) -> None:
        self.everything(store)
        store.process_died(14.0, FAR)
        assert not self.held(store)

    def test_neighbors_of_a_dead_node_go_with_it_unless_they_still_read(self, store: ObjectStore) -> None:
        self.everything(store)
        ask(store, "read", oid(4), OTHER, 13.0)
        store.node_died(14.0, 5, {FAR})
        assert self.held(store) and not self.held(store, OTHER)
        assert store.lifecycle.objects[oid(2)].pins >= {FAR}
        store.process_died(15.0, FAR)
        assert not self.held(store)

    def test_a_neighbor_of_a_dead_node_reads_on_and_its_block_stays(self, store: ObjectStore) -> None:
        offset = put(store, oid(1), SIZE)
        ask(store, "read", oid(1))
        store.node_died(2.0, 5, [FAR])
        store.handle(2.0, A, m.Free([oid(1)], [2]))
        for counter in (2, 3, 4):
            created = sent_to(store.handle(3.0, A, m.Create(oid(counter), SIZE)), A)
            assert [msg.offset == offset for msg in created] == [False]  # type: ignore[union-attr]
        assert answers(store.handle(3.0, A, m.Create(oid(5), SIZE))) == [], "that one must stay"
        (created,) = sent_to(store.process_died(4.0, FAR), A)
        assert isinstance(created, m.Created) and created.offset == offset

    def test_a_neighbor_of_a_dead_node_may_still_open_and_release(self, store: ObjectStore) -> None:
        put(store, oid(1), SIZE)
        store.node_died(2.0, 5, [FAR])
        (opened,) = ask(store, "read", oid(1))
        assert isinstance(opened, m.Opened)
        give(store, "read", oid(1))
        assert store.snapshot()["pinned"] == 0

    def test_objects_of_a_dead_node_go_with_its_last_neighbor_here(self, store: ObjectStore) -> None:
        pull(store, X, SIZE, B)
        ask(store, "keep")
        ask(store, "read")
        store.node_died(2.0, 5, [FAR])
        assert store.snapshot()["objects"] == 1
        store.process_died(3.0, FAR)
        assert store.snapshot()["objects"] == store.snapshot()["used"] == 0

    def test_a_death_of_a_node_leaves_neighbors_of_other_nodes(self, store: ObjectStore) -> None:
        put(store, oid(1), SIZE)
        ask(store, "read", oid(1))
        store.node_died(2.0, 6)
        assert store.snapshot()["pinned"] == 1

    def test_a_queued_prefetch_whose_owners_node_dies_is_forgotten_once(self, store: ObjectStore) -> None:
        store.lifecycle.pulls.admission._may_begin = lambda priority: False  # type: ignore[method-assign]
        store.handle(0.0, B, m.Prefetch([m.ArgRef(X, SIZE, [7])]))
        assert store.snapshot()["queued"] == 1
        assert store.node_died(1.0, 5) == []
        assert store.snapshot()["objects"] == store.snapshot()["queued"] == 0


class TestNeighborsWhenRoomIsShort:
    def test_neighbors_are_asked_to_unpin_and_named_in_the_error(self, store: ObjectStore) -> None:
        for counter in range(1, 5):
            put(store, oid(counter), SIZE)
            ask(store, "read", oid(counter), OTHER if counter == 4 else FAR)
        effects = store.handle(2.0, B, m.Create(oid(9, B), SIZE))
        for proc in (FAR, OTHER):
            assert [type(msg) for msg in sent_to(effects, proc)] == [m.Unpin]
        (error,) = sent_to(store.tick(13.0), B)
        assert isinstance(error, m.StoreError) and error.kind == "full"
        assert error.reason.count("pinned by process 5.1") == 3 and "pinned by process 5.2" in error.reason

    def test_the_error_names_the_pinner_of_a_replica_that_no_process_reads(self) -> None:
        store = ObjectStore(2, CAPACITY, full_timeout=10.0)
        for counter in (1, 2):
            receive = store.handle(0.0, FAR, m.Open(oid(counter, FAR), 2 * SIZE, [7], pin_replica=True))[0]
            store.receive_ended(0.0, receive.tag, None)  # type: ignore[union-attr]
        store.handle(1.0, OTHER, m.Open(oid(2, FAR), 2 * SIZE, []))
        store.handle(2.0, B, m.Create(oid(9, B), SIZE))
        (error,) = sent_to(store.tick(13.0), B)
        assert isinstance(error, m.StoreError)
        assert "a copy kept for process 5.1" in error.reason and "pinned by process 5.2" in error.reason

    def test_a_release_of_a_neighbor_makes_room(self, store: ObjectStore) -> None:
        for counter in range(1, 5):
            put(store, oid(counter), SIZE)
            ask(store, "read", oid(counter))
        store.handle(2.0, B, m.Create(oid(9, B), SIZE))
        assert WriteSpill in [type(effect) for effect in store.handle(3.0, FAR, m.Release([oid(1), oid(2)]))]
        assert [type(msg) for msg in sent_to(store.spill_write_ended(4.0, None), B)] == [m.Created]

    def test_a_pinned_replica_that_was_read_is_not_evicted(self, store: ObjectStore) -> None:
        receive = store.handle(0.0, FAR, m.Open(X, SIZE, [7], pin_replica=True))[0]
        store.receive_ended(0.0, receive.tag, None)  # type: ignore[union-attr]
        ask(store, "read")
        give(store, "read")
        for counter in range(1, 4):
            put(store, oid(counter), SIZE, release=False)
        store.handle(2.0, B, m.Create(oid(9, B), SIZE))
        store.spill_write_ended(3.0, None)
        assert store.lifecycle.objects[X].state is StoredObjectState.SPILLED

    def test_a_replica_that_is_read_is_not_evicted_after_it_was_unpinned(self, store: ObjectStore) -> None:
        pull(store, X, SIZE, B)
        for what in ("read", "keep"):
            ask(store, what)
        give(store, "keep")
        assert answers(store.handle(2.0, A, m.Create(oid(1), 4 * SIZE))) == []
        give(store, "read")
        assert store.snapshot()["creating"] == 1

    def test_a_neighbor_can_raise_the_priority_of_its_open(self, store: ObjectStore) -> None:
        store.handle(0.0, B, m.Open(X, SIZE, [7], 2))
        store.handle(0.0, FAR, m.Open(X, SIZE, [], 2))
        store.handle(0.0, FAR, m.RaisePriority(X, 0))
        assert store.lifecycle.objects[X].priority == 0
