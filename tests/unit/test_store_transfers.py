"""One node store: copies pulled from and sent to other nodes, and deaths of processes and nodes."""

from __future__ import annotations

import pytest
from store_kit import BIG, CAPACITY, FAR, A, B, C, oid, only, pull, put, sent_to, start_pull

from hpcray.common.ids import make_proc, raylet_of
from hpcray.core.effects import CancelReceive, Effect, Send, StartReceive, StartSend
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.core.object_store.pull_manager import FIRST_LINK_RETRY_DELAY, MAX_LINK_RETRIES, transfer_tag
from hpcray.protocol import messages as m


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore(2, CAPACITY, full_timeout=10.0)


def refuse(store: ObjectStore, receive: StartReceive, **fields: bool) -> list[Effect]:
    """The node that was asked refuses, and the receive ends."""
    refusal = m.PullRefused(receive.id, receive.tag, "it is not here", **fields)
    assert store.handle(0.0, raylet_of(receive.node), refusal) == [CancelReceive(receive.tag)]
    return store.receive_ended(0.0, receive.tag, "cancelled")


# ---------------------------------------------------------------- pulls


def test_any_number_of_openers_share_one_pull_and_one_of_them_announces_the_replica(store: ObjectStore) -> None:
    receive = start_pull(store, oid(1, FAR), [7], A)
    assert store.handle(0.0, B, m.Open(oid(1, FAR), 640, [7])) == []
    effects = store.receive_ended(0.0, receive.tag, None)
    assert sent_to(effects, A) == [m.Opened(oid(1, FAR), receive.offset, 640, True)]
    assert sent_to(effects, B) == [m.Opened(oid(1, FAR), receive.offset, 640, False)]
    assert only(store.handle(0.0, C, m.Open(oid(1, FAR), 640, [7])), C).pulled is False  # type: ignore[union-attr]


def test_if_the_announcer_dies_the_next_opener_announces(store: ObjectStore) -> None:
    pull(store, oid(1, FAR), proc=A)
    store.process_died(0.0, A)
    assert only(store.handle(0.0, B, m.Open(oid(1, FAR), 640, [7])), B).pulled is True  # type: ignore[union-attr]


def test_different_objects_are_pulled_from_different_nodes() -> None:
    sources = set()
    for counter in range(8):
        store = ObjectStore(2, CAPACITY)
        sources.add(start_pull(store, oid(counter, FAR), [7, 8, 9, 10]).node)
    assert len(sources) > 1
    by_node = {start_pull(ObjectStore(node, CAPACITY), oid(1, FAR), [17, 18, 19, 20]).node for node in range(4)}
    assert len(by_node) == 4, "and by different nodes"


def test_after_a_failed_pull_the_next_node_gets_a_pull_with_a_new_tag_and_the_same_block(store: ObjectStore) -> None:
    first = start_pull(store, oid(1, FAR), [7, 8])
    second, ask = store.receive_ended(0.0, first.tag, "connection reset")
    assert isinstance(second, StartReceive) and isinstance(ask, Send)
    assert {first.node, second.node} == {7, 8}
    assert second.tag != first.tag and second.offset == first.offset
    assert store.receive_ended(0.0, second.tag, "no route") == [], "both live: they are asked again later"
    assert store.node_died(0.0, first.node) == []
    error = only(store.node_died(0.0, second.node), A)
    assert isinstance(error, m.StoreError) and error.kind == "lost"
    assert "connection reset" in error.reason and "no route" in error.reason
    assert store.snapshot()["used"] == 0


def test_after_a_refusal_the_block_is_held_until_the_receive_is_over(store: ObjectStore) -> None:
    receive = start_pull(store, oid(1, FAR), [7])
    refusal = m.PullRefused(oid(1, FAR), receive.tag, "it is not here")
    assert store.handle(0.0, raylet_of(7), refusal) == [CancelReceive(receive.tag)]
    assert store.handle(0.0, raylet_of(7), refusal) == [], "cancelled once"
    assert store.snapshot()["used"] == 640
    error = only(store.receive_ended(0.0, receive.tag, "cancelled"), A)
    assert isinstance(error, m.StoreError) and "it is not here" in error.reason and "cancelled" not in error.reason
    assert store.snapshot()["used"] == 0


def test_bytes_that_arrived_before_the_cancellation_count(store: ObjectStore) -> None:
    receive = start_pull(store, oid(1, FAR), [7])
    store.node_died(0.0, 7)
    assert isinstance(only(store.receive_ended(0.0, receive.tag, None), A), m.Opened)


def test_a_later_opener_adds_nodes_to_a_pull_under_way(store: ObjectStore) -> None:
    receive = start_pull(store, oid(1, FAR), [7])
    store.handle(0.0, B, m.Open(oid(1, FAR), 640, [7, 9]))
    again = refuse(store, receive)[0]
    assert isinstance(again, StartReceive) and again.node == 9
    assert isinstance(sent_to(refuse(store, again), A)[0], m.StoreError), "7, which refused, is not asked twice"


def test_a_pull_that_is_no_longer_requested_is_not_retried(store: ObjectStore) -> None:
    receive = start_pull(store, oid(1, FAR), [7, 8])
    store.handle(0.0, A, m.Release([oid(1, FAR)]))
    assert store.receive_ended(0.0, receive.tag, "reset") == []
    assert store.snapshot()["objects"] == 0


def test_an_open_that_no_living_node_can_serve_is_lost_at_once(store: ObjectStore) -> None:
    store.node_died(0.0, 8)
    for nodes in ([], [2], [8]):
        error = only(store.handle(0.0, A, m.Open(oid(1, FAR), 640, nodes)), A)
        assert isinstance(error, m.StoreError) and error.kind == "lost" and oid(1, FAR).hex() in error.reason


def test_an_object_freed_while_it_is_pulled_goes_with_the_last_pin(store: ObjectStore) -> None:
    receive = start_pull(store, oid(1, FAR), [7])
    store.handle(0.0, raylet_of(5), m.Free([oid(1, FAR)], []))
    store.receive_ended(0.0, receive.tag, None)
    assert store.snapshot()["objects"] == 1
    store.handle(0.0, A, m.Release([oid(1, FAR)]))
    assert store.snapshot()["objects"] == 0


class TestBrokenDataLinks:
    """A data link breaks between two nodes that both live: the only holder is asked again."""

    def pause(self, store: ObjectStore, nodes: list[int] | None = None, now: float = 0.0) -> StartReceive:
        """A pull whose link has broken, with one holder if not said otherwise."""
        receive = start_pull(store, oid(1, FAR), nodes or [7], now=now)
        assert store.receive_ended(now, receive.tag, "the link broke") == [], "no error, and no question at once"
        assert store.snapshot()["paused"] == 1
        store.check_invariants()
        return receive

    def asked_again(self, store: ObjectStore, effects: list[Effect]) -> StartReceive:
        receive, ask = effects
        assert isinstance(receive, StartReceive) and isinstance(ask, Send) and isinstance(ask.msg, m.Pull)
        assert ask.dest == raylet_of(receive.node) and store.snapshot()["paused"] == 0
        store.check_invariants()
        return receive

    def test_an_object_with_one_living_holder_is_pulled_again_after_a_broken_data_link(
        self, store: ObjectStore
    ) -> None:
        first = self.pause(store)
        assert store.tick(FIRST_LINK_RETRY_DELAY / 2) == [], "the pause is not over"
        again = self.asked_again(store, store.tick(FIRST_LINK_RETRY_DELAY))
        assert (again.node, again.offset) == (7, first.offset) and again.tag != first.tag
        assert isinstance(only(store.receive_ended(1.0, again.tag, None), A), m.Opened)

    def test_a_sender_whose_data_link_breaks_says_so_and_is_asked_again(self, store: ObjectStore) -> None:
        receive = start_pull(store, oid(1, FAR), [7])
        assert refuse(store, receive, link_broken=True) == []
        again = self.asked_again(store, store.tick(1.0))
        assert isinstance(only(store.receive_ended(1.0, again.tag, None), A), m.Opened)

    def test_a_failed_send_is_reported_to_the_receiver_as_a_broken_data_link(self, store: ObjectStore) -> None:
        put(store, oid(1))
        store.handle(0.0, raylet_of(4), m.Pull(oid(1), transfer_tag(4, 1), 640))
        (effect,) = store.send_ended(0.0, transfer_tag(4, 1), "the link broke")
        assert isinstance(effect, Send) and effect.msg.link_broken  # type: ignore[union-attr]

    def test_pauses_grow_and_after_the_last_try_the_object_is_lost(self, store: ObjectStore) -> None:
        receive, now = self.pause(store), 0.0
        for attempt in range(MAX_LINK_RETRIES):
            delay = FIRST_LINK_RETRY_DELAY * 2**attempt
            assert store.tick(now + 0.99 * delay) == []
            now += delay
            receive = self.asked_again(store, store.tick(now))
            effects = store.receive_ended(now, receive.tag, "the link broke")
        error = only(effects, A)
        assert isinstance(error, m.StoreError) and error.kind == "lost" and "node 7: the link broke" in error.reason
        assert store.snapshot()["objects"] == store.snapshot()["used"] == 0
        assert store.tick(now + 99.0) == [], "no pull is left behind"

    def test_another_holder_is_asked_at_once(self, store: ObjectStore) -> None:
        first = start_pull(store, oid(1, FAR), [7, 8])
        again = self.asked_again(store, store.receive_ended(0.0, first.tag, "the link broke"))
        assert again.node == 15 - first.node

    def test_a_holder_that_a_later_opener_names_ends_the_pause(self, store: ObjectStore) -> None:
        self.pause(store)
        assert store.handle(0.1, B, m.Open(oid(1, FAR), 640, [7])) == [], "7 is known, and asked when the time comes"
        again = self.asked_again(store, store.handle(0.1, C, m.Open(oid(1, FAR), 640, [9])))
        assert again.node == 9
        assert store.receive_ended(0.2, again.tag, "the link broke") == []
        nodes = {effect.node for effect in store.tick(99.0) if isinstance(effect, StartReceive)}
        assert nodes <= {7, 9} and nodes

    def test_a_holder_that_dies_during_the_pause_is_not_asked(self, store: ObjectStore) -> None:
        self.pause(store)
        error = only(store.node_died(0.1, 7), A)
        assert isinstance(error, m.StoreError) and error.kind == "lost"
        store.check_invariants()

    def test_a_pause_ends_with_the_last_request(self, store: ObjectStore) -> None:
        self.pause(store)
        assert store.handle(0.1, A, m.Release([oid(1, FAR)])) == []
        assert store.snapshot()["objects"] == store.snapshot()["used"] == 0
        store.check_invariants()

    def test_an_opener_that_dies_ends_the_pause_of_its_pull(self, store: ObjectStore) -> None:
        self.pause(store)
        assert store.process_died(0.1, A) == []
        assert store.snapshot()["objects"] == store.snapshot()["paused"] == 0

    def test_what_has_come_before_the_break_is_not_sent_again(self) -> None:
        store = ObjectStore(2, CAPACITY, chunk=640)
        effects = store.handle(0.0, A, m.Open(oid(1, FAR), 1920, [7]))
        tags = [effect.tag for effect in effects if isinstance(effect, StartReceive)]
        store.receive_ended(0.0, tags[0], None)
        assert store.receive_ended(0.0, tags[1], "the link broke") == [CancelReceive(tags[2])]
        assert store.receive_ended(0.0, tags[2], "cancelled") == []
        (ask,) = [effect.msg for effect in store.tick(1.0) if isinstance(effect, Send)]
        assert isinstance(ask, m.Pull) and ask.first == 1

    def test_paused_pulls_do_not_hold_up_others(self) -> None:
        store, size = ObjectStore(2, 4 << 30, chunk=1 << 40), 100 << 20
        for counter in range(1, 6):
            effects = store.handle(0.0, A, m.Open(oid(counter, FAR), size, [7]))
        assert effects == [] and store.snapshot()["queued"] == 1
        begun = store.receive_ended(0.0, transfer_tag(2, 1), "the link broke")
        assert [effect.id for effect in begun if isinstance(effect, StartReceive)] == [oid(5, FAR)]
        again = store.tick(1.0)
        assert [effect.id for effect in again if isinstance(effect, StartReceive)] == [oid(1, FAR)]
        store.check_invariants()


# ---------------------------------------------------------------- serving other nodes


def test_a_send_pins_the_object_that_it_reads(store: ObjectStore) -> None:
    offset = put(store, oid(1))
    tag = transfer_tag(4, 1)
    assert store.handle(0.0, raylet_of(4), m.Pull(oid(1), tag, 640)) == [StartSend(oid(1), 4, tag, offset, 640)]
    store.handle(0.0, A, m.Free([oid(1)], [2]))
    assert store.snapshot()["used"] == 640
    store.send_ended(0.0, tag, None)
    assert store.snapshot()["used"] == 0


def test_a_replica_that_is_being_sent_is_not_evicted(store: ObjectStore) -> None:
    pull(store, oid(1, FAR), BIG)
    tag = transfer_tag(4, 1)
    store.handle(0.0, raylet_of(4), m.Pull(oid(1, FAR), tag, BIG))
    assert store.handle(0.0, B, m.Create(oid(2, B), BIG)) == []
    assert isinstance(only(store.send_ended(0.0, tag, None), B), m.Created), "now it may go"
    assert store.snapshot()["evicted"] == 1


def test_a_pull_of_an_absent_object_is_refused(store: ObjectStore) -> None:
    assert isinstance(only(store.handle(0.0, raylet_of(4), m.Pull(oid(1), 7, 640)), raylet_of(4)), m.PullRefused)


def test_a_pull_that_expects_another_size_is_refused(store: ObjectStore) -> None:
    put(store, oid(1))
    refused = only(store.handle(0.0, raylet_of(4), m.Pull(oid(1), 7, 641)), raylet_of(4))
    assert isinstance(refused, m.PullRefused) and "640" in refused.reason and "641" in refused.reason


def test_a_failed_send_is_reported_to_the_receiver(store: ObjectStore) -> None:
    put(store, oid(1))
    store.handle(0.0, raylet_of(4), m.Pull(oid(1), 7, 640))
    refused = only(store.send_ended(0.0, 7, "endpoint closed"), raylet_of(4))
    assert isinstance(refused, m.PullRefused) and "endpoint closed" in refused.reason
    store.handle(0.0, raylet_of(4), m.Pull(oid(1), 8, 640))
    store.node_died(0.0, 4)
    assert store.send_ended(0.0, 8, "endpoint closed") == [], "nobody is told who is dead"
    assert store.snapshot()["sending"] == 0


def test_pulls_of_an_object_in_creation_wait_for_the_seal(store: ObjectStore) -> None:
    store.handle(0.0, A, m.Create(oid(1), 640))
    assert store.handle(0.0, raylet_of(0), m.Pull(oid(1), 7, 640)) == []
    assert store.handle(0.0, A, m.Seal(oid(1))) == [StartSend(oid(1), 0, 7, 0, 640)]


def test_only_nodes_that_the_root_redirected_wait_for_a_replica_under_way(store: ObjectStore) -> None:
    receive = start_pull(store, oid(1, FAR), [7])
    for uninvited in (m.Pull(oid(1, FAR), 5, 640), m.Pull(oid(1, FAR), 5, 640, root=8, order=3)):
        refused = only(store.handle(0.0, raylet_of(1), uninvited), raylet_of(1))
        assert isinstance(refused, m.PullRefused) and refused.nodes == [7], "it is told who has the object whole"
    assert store.handle(0.0, raylet_of(4), m.Pull(oid(1, FAR), 6, 640, root=7, order=3)) == []
    effects = store.receive_ended(0.0, receive.tag, None)
    assert StartSend(oid(1, FAR), 4, 6, receive.offset, 640) in effects


def test_nodes_that_waited_for_a_replica_that_failed_are_refused(store: ObjectStore) -> None:
    receive = start_pull(store, oid(1, FAR), [7])
    store.handle(0.0, raylet_of(4), m.Pull(oid(1, FAR), 6, 640, root=7, order=3))
    effects = refuse(store, receive)
    assert isinstance(sent_to(effects, raylet_of(4))[0], m.PullRefused)
    assert store.snapshot()["sending"] == store.snapshot()["used"] == 0


def test_tags_name_the_receiver_and_never_repeat(store: ObjectStore) -> None:
    tags = [start_pull(store, oid(counter, FAR), [7]).tag for counter in range(3)]
    assert len(set(tags)) == 3
    assert {tag >> 48 for tag in tags} == {2}


# ---------------------------------------------------------------- deaths


def test_a_dead_process_loses_its_pins_and_what_it_had_not_sealed(store: ObjectStore) -> None:
    pull(store, oid(1, FAR), proc=B, release=False)
    store.handle(0.0, B, m.Create(oid(2, A), 640))
    store.process_died(0.0, B)
    snapshot = store.snapshot()
    assert snapshot["pinned"] == 0 and snapshot["creating"] == 0
    assert snapshot["evictable"] == snapshot["used"] == 640


def test_an_object_that_a_dead_process_sealed_for_another_owner_stays(store: ObjectStore) -> None:
    put(store, oid(1, A), proc=B, release=False)
    store.process_died(0.0, B)
    assert isinstance(only(store.handle(0.0, C, m.Open(oid(1, A), 640, [2])), C), m.Opened)


def test_objects_of_a_dead_owner_go_when_unpinned(store: ObjectStore) -> None:
    put(store, oid(1, A))
    put(store, oid(2, A), proc=B, release=False)
    store.process_died(0.0, A)
    assert store.snapshot()["objects"] == 1
    store.handle(0.0, B, m.Release([oid(2, A)]))
    assert store.snapshot()["objects"] == 0


def test_an_object_created_for_a_dead_owner_goes_with_its_pin(store: ObjectStore) -> None:
    store.process_died(0.0, FAR)
    store.node_died(0.0, 6)
    for owner in (FAR, make_proc(6, 3)):
        put(store, oid(1, owner), proc=B)
    assert store.snapshot()["objects"] == 0


def test_a_replica_pulled_for_a_dead_owner_goes_with_its_pin(store: ObjectStore) -> None:
    store.process_died(0.0, FAR)
    pull(store, oid(1, FAR))
    assert store.snapshot()["objects"] == 0


def test_objects_owned_on_a_dead_node_go_when_unpinned(store: ObjectStore) -> None:
    put(store, oid(1, FAR), proc=B)
    store.node_died(0.0, 5)
    assert store.snapshot()["objects"] == 0


def test_if_the_creator_dies_openers_get_another_copy_or_an_error(store: ObjectStore) -> None:
    store.handle(0.0, B, m.Create(oid(1), 640))
    store.handle(0.0, C, m.Open(oid(1), 640, [2, 7]))
    receive, _ = store.process_died(0.0, B)
    assert isinstance(receive, StartReceive) and receive.node == 7

    store.handle(0.0, A, m.Create(oid(2), 640))
    store.handle(0.0, C, m.Open(oid(2), 640, [2]))
    error = only(store.process_died(0.0, A), C)
    assert isinstance(error, m.StoreError) and error.kind == "lost"


def test_if_a_creation_becomes_a_pull_waiting_nodes_are_refused(store: ObjectStore) -> None:
    store.handle(0.0, A, m.Create(oid(1), 640))
    store.handle(0.0, C, m.Open(oid(1), 640, [2, 7]))
    assert store.handle(0.0, raylet_of(4), m.Pull(oid(1), transfer_tag(4, 1), 640)) == []
    effects = store.handle(0.0, A, m.Release([oid(1)]))
    (refused,) = sent_to(effects, raylet_of(4))
    assert isinstance(refused, m.PullRefused) and refused.nodes == [7]
    assert [effect.node for effect in effects if isinstance(effect, StartReceive)] == [7]


def test_if_the_source_node_dies_the_next_node_gets_the_pull_once_the_receive_is_over(store: ObjectStore) -> None:
    receive = start_pull(store, oid(1, FAR), [7, 8])
    assert store.node_died(0.0, receive.node) == [CancelReceive(receive.tag)]
    again = store.receive_ended(0.0, receive.tag, "cancelled")[0]
    assert isinstance(again, StartReceive) and again.node == 15 - receive.node


def test_no_object_is_pulled_from_a_dead_node(store: ObjectStore) -> None:
    store.node_died(0.0, 7)
    assert start_pull(store, oid(1, FAR), [7, 8]).node == 8


def test_messages_of_the_dead_are_ignored(store: ObjectStore) -> None:
    store.process_died(0.0, A)
    assert store.handle(0.0, A, m.Create(oid(1, B), 64)) == []
    assert store.handle(0.0, A, m.Open(oid(1, B), 64, [7])) == []
    store.node_died(0.0, 4)
    assert store.handle(0.0, raylet_of(4), m.Pull(oid(1, B), 9, 64)) == []
    assert store.snapshot()["objects"] == 0
