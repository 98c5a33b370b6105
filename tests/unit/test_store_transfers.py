"""One node store: copies pulled from and sent to other nodes, and deaths of processes and nodes."""

from __future__ import annotations

import pytest
from store_kit import BIG, CAPACITY, FAR, A, B, C, oid, only, pull, put, sent_to, start_pull

from hpcray.base.ids import make_proc, raylet_of
from hpcray.core.effects import CancelReceive, Send, StartReceive, StartSend
from hpcray.core.store.node_store import NodeStore
from hpcray.core.store.pulls import transfer_tag
from hpcray.wire import messages as m


@pytest.fixture
def store() -> NodeStore:
    return NodeStore(2, CAPACITY, full_timeout=10.0)


# ---------------------------------------------------------------- pulls


def test_however_many_open_there_is_one_pull_and_one_is_told_to_announce_it(store: NodeStore) -> None:
    receive = start_pull(store, oid(1, FAR), [7], A)
    assert store.handle(0.0, B, m.Open(oid(1, FAR), 640, [7])) == []
    effects = store.received(0.0, receive.tag, None)
    assert sent_to(effects, A) == [m.Opened(oid(1, FAR), receive.offset, 640, True)]
    assert sent_to(effects, B) == [m.Opened(oid(1, FAR), receive.offset, 640, False)]
    assert only(store.handle(0.0, C, m.Open(oid(1, FAR), 640, [7])), C).pulled is False  # type: ignore[union-attr]


def test_if_the_announcer_dies_the_next_opener_announces(store: NodeStore) -> None:
    pull(store, oid(1, FAR), proc=A)
    store.process_died(0.0, A)
    assert only(store.handle(0.0, B, m.Open(oid(1, FAR), 640, [7])), B).pulled is True  # type: ignore[union-attr]


def test_different_objects_are_asked_from_different_nodes() -> None:
    sources = set()
    for counter in range(8):
        store = NodeStore(2, CAPACITY)
        sources.add(start_pull(store, oid(counter, FAR), [7, 8, 9, 10]).node)
    assert len(sources) > 1
    by_node = {start_pull(NodeStore(node, CAPACITY), oid(1, FAR), [17, 18, 19, 20]).node for node in range(4)}
    assert len(by_node) == 4, "and by different nodes"


def test_after_a_failure_the_next_node_is_asked_with_a_new_tag_and_the_same_block(store: NodeStore) -> None:
    first = start_pull(store, oid(1, FAR), [7, 8])
    second, ask = store.received(0.0, first.tag, "connection reset")
    assert isinstance(second, StartReceive) and isinstance(ask, Send)
    assert {first.node, second.node} == {7, 8}
    assert second.tag != first.tag and second.offset == first.offset
    error = only(store.received(0.0, second.tag, "no route"), A)
    assert isinstance(error, m.StoreError) and error.kind == "lost"
    assert "connection reset" in error.reason and "no route" in error.reason
    assert store.snapshot()["used"] == 0


def test_after_a_refusal_the_block_is_held_until_the_receive_is_over(store: NodeStore) -> None:
    receive = start_pull(store, oid(1, FAR), [7])
    refusal = m.PullRefused(oid(1, FAR), receive.tag, "it is not here")
    assert store.handle(0.0, raylet_of(7), refusal) == [CancelReceive(receive.tag)]
    assert store.handle(0.0, raylet_of(7), refusal) == [], "cancelled once"
    assert store.snapshot()["used"] == 640
    error = only(store.received(0.0, receive.tag, "cancelled"), A)
    assert isinstance(error, m.StoreError) and "it is not here" in error.reason and "cancelled" not in error.reason
    assert store.snapshot()["used"] == 0


def test_bytes_that_came_before_the_cancellation_count(store: NodeStore) -> None:
    receive = start_pull(store, oid(1, FAR), [7])
    store.node_died(0.0, 7)
    assert isinstance(only(store.received(0.0, receive.tag, None), A), m.Opened)


def test_a_later_opener_adds_nodes_to_a_pull_under_way(store: NodeStore) -> None:
    receive = start_pull(store, oid(1, FAR), [7])
    store.handle(0.0, B, m.Open(oid(1, FAR), 640, [7, 9]))
    again = store.received(0.0, receive.tag, "reset")[0]
    assert isinstance(again, StartReceive) and again.node == 9
    effects = store.received(0.0, again.tag, "reset")
    assert isinstance(sent_to(effects, A)[0], m.StoreError), "7 is not asked twice"


def test_a_pull_nobody_waits_for_any_more_is_not_tried_again(store: NodeStore) -> None:
    receive = start_pull(store, oid(1, FAR), [7, 8])
    store.handle(0.0, A, m.Release([oid(1, FAR)]))
    assert store.received(0.0, receive.tag, "reset") == []
    assert store.snapshot()["objects"] == 0


def test_an_open_that_no_living_node_can_serve_is_lost_at_once(store: NodeStore) -> None:
    store.node_died(0.0, 8)
    for nodes in ([], [2], [8]):
        error = only(store.handle(0.0, A, m.Open(oid(1, FAR), 640, nodes)), A)
        assert isinstance(error, m.StoreError) and error.kind == "lost" and oid(1, FAR).hex() in error.reason


def test_an_object_freed_while_it_is_pulled_goes_with_the_last_pin(store: NodeStore) -> None:
    receive = start_pull(store, oid(1, FAR), [7])
    store.handle(0.0, raylet_of(5), m.Free([oid(1, FAR)], []))
    store.received(0.0, receive.tag, None)
    assert store.snapshot()["objects"] == 1
    store.handle(0.0, A, m.Release([oid(1, FAR)]))
    assert store.snapshot()["objects"] == 0


# ---------------------------------------------------------------- serving other nodes


def test_a_transfer_pins_what_it_reads(store: NodeStore) -> None:
    offset = put(store, oid(1))
    tag = transfer_tag(4, 1)
    assert store.handle(0.0, raylet_of(4), m.Pull(oid(1), tag, 640)) == [StartSend(oid(1), 4, tag, offset, 640)]
    store.handle(0.0, A, m.Free([oid(1)], [2]))
    assert store.snapshot()["used"] == 640
    store.sent(0.0, tag, None)
    assert store.snapshot()["used"] == 0


def test_a_copy_that_is_being_sent_is_not_evicted(store: NodeStore) -> None:
    pull(store, oid(1, FAR), BIG)
    tag = transfer_tag(4, 1)
    store.handle(0.0, raylet_of(4), m.Pull(oid(1, FAR), tag, BIG))
    assert store.handle(0.0, B, m.Create(oid(2, B), BIG)) == []
    assert isinstance(only(store.sent(0.0, tag, None), B), m.Created), "now it may go"
    assert store.snapshot()["evicted"] == 1


def test_what_is_not_here_is_refused(store: NodeStore) -> None:
    assert isinstance(only(store.handle(0.0, raylet_of(4), m.Pull(oid(1), 7, 640)), raylet_of(4)), m.PullRefused)


def test_a_pull_that_expects_another_size_is_refused(store: NodeStore) -> None:
    put(store, oid(1))
    refused = only(store.handle(0.0, raylet_of(4), m.Pull(oid(1), 7, 641)), raylet_of(4))
    assert isinstance(refused, m.PullRefused) and "640" in refused.reason and "641" in refused.reason


def test_a_failed_send_is_reported_to_the_receiver(store: NodeStore) -> None:
    put(store, oid(1))
    store.handle(0.0, raylet_of(4), m.Pull(oid(1), 7, 640))
    refused = only(store.sent(0.0, 7, "endpoint closed"), raylet_of(4))
    assert isinstance(refused, m.PullRefused) and "endpoint closed" in refused.reason
    store.handle(0.0, raylet_of(4), m.Pull(oid(1), 8, 640))
    store.node_died(0.0, 4)
    assert store.sent(0.0, 8, "endpoint closed") == [], "nobody is told who is dead"
    assert store.snapshot()["sending"] == 0


def test_pulls_of_an_object_in_creation_wait_for_the_seal(store: NodeStore) -> None:
    store.handle(0.0, A, m.Create(oid(1), 640))
    assert store.handle(0.0, raylet_of(0), m.Pull(oid(1), 7, 640)) == []
    assert store.handle(0.0, A, m.Seal(oid(1))) == [StartSend(oid(1), 0, 7, 0, 640)]


def test_a_copy_under_way_is_waited_for_only_by_whom_its_root_has_sent(store: NodeStore) -> None:
    receive = start_pull(store, oid(1, FAR), [7])
    for uninvited in (m.Pull(oid(1, FAR), 5, 640), m.Pull(oid(1, FAR), 5, 640, root=8, order=3)):
        refused = only(store.handle(0.0, raylet_of(1), uninvited), raylet_of(1))
        assert isinstance(refused, m.PullRefused) and refused.nodes == [7], "it is told who has the object whole"
    assert store.handle(0.0, raylet_of(4), m.Pull(oid(1, FAR), 6, 640, root=7, order=3)) == []
    effects = store.received(0.0, receive.tag, None)
    assert StartSend(oid(1, FAR), 4, 6, receive.offset, 640) in effects


def test_whoever_waited_for_a_copy_that_does_not_come_is_refused(store: NodeStore) -> None:
    receive = start_pull(store, oid(1, FAR), [7])
    store.handle(0.0, raylet_of(4), m.Pull(oid(1, FAR), 6, 640, root=7, order=3))
    effects = store.received(0.0, receive.tag, "reset")
    assert isinstance(sent_to(effects, raylet_of(4))[0], m.PullRefused)
    assert store.snapshot()["sending"] == store.snapshot()["used"] == 0


def test_tags_name_the_receiver_and_never_repeat(store: NodeStore) -> None:
    tags = [start_pull(store, oid(counter, FAR), [7]).tag for counter in range(3)]
    assert len(set(tags)) == 3
    assert {tag >> 48 for tag in tags} == {2}


# ---------------------------------------------------------------- deaths


def test_a_dead_process_loses_its_pins_and_what_it_had_not_sealed(store: NodeStore) -> None:
    pull(store, oid(1, FAR), proc=B, release=False)
    store.handle(0.0, B, m.Create(oid(2, A), 640))
    store.process_died(0.0, B)
    snapshot = store.snapshot()
    assert snapshot["pinned"] == 0 and snapshot["creating"] == 0
    assert snapshot["evictable"] == snapshot["used"] == 640


def test_what_a_dead_process_sealed_for_another_owner_stays(store: NodeStore) -> None:
    put(store, oid(1, A), proc=B, release=False)
    store.process_died(0.0, B)
    assert isinstance(only(store.handle(0.0, C, m.Open(oid(1, A), 640, [2])), C), m.Opened)


def test_objects_of_a_dead_owner_go_when_unpinned(store: NodeStore) -> None:
    put(store, oid(1, A))
    put(store, oid(2, A), proc=B, release=False)
    store.process_died(0.0, A)
    assert store.snapshot()["objects"] == 1
    store.handle(0.0, B, m.Release([oid(2, A)]))
    assert store.snapshot()["objects"] == 0


def test_an_object_made_for_an_owner_already_dead_goes_with_its_pin(store: NodeStore) -> None:
    store.process_died(0.0, FAR)
    store.node_died(0.0, 6)
    for owner in (FAR, make_proc(6, 3)):
        put(store, oid(1, owner), proc=B)
    assert store.snapshot()["objects"] == 0


def test_a_copy_pulled_for_an_owner_already_dead_goes_with_its_pin(store: NodeStore) -> None:
    store.process_died(0.0, FAR)
    pull(store, oid(1, FAR))
    assert store.snapshot()["objects"] == 0


def test_objects_owned_on_a_dead_node_go_when_unpinned(store: NodeStore) -> None:
    put(store, oid(1, FAR), proc=B)
    store.node_died(0.0, 5)
    assert store.snapshot()["objects"] == 0


def test_if_the_creator_dies_those_who_wait_get_another_copy_or_an_error(store: NodeStore) -> None:
    store.handle(0.0, B, m.Create(oid(1), 640))
    store.handle(0.0, C, m.Open(oid(1), 640, [2, 7]))
    receive, _ = store.process_died(0.0, B)
    assert isinstance(receive, StartReceive) and receive.node == 7

    store.handle(0.0, A, m.Create(oid(2), 640))
    store.handle(0.0, C, m.Open(oid(2), 640, [2]))
    error = only(store.process_died(0.0, A), C)
    assert isinstance(error, m.StoreError) and error.kind == "lost"


def test_if_a_creation_becomes_a_pull_other_nodes_look_elsewhere(store: NodeStore) -> None:
    store.handle(0.0, A, m.Create(oid(1), 640))
    store.handle(0.0, C, m.Open(oid(1), 640, [2, 7]))
    assert store.handle(0.0, raylet_of(4), m.Pull(oid(1), transfer_tag(4, 1), 640)) == []
    effects = store.handle(0.0, A, m.Release([oid(1)]))
    (refused,) = sent_to(effects, raylet_of(4))
    assert isinstance(refused, m.PullRefused) and refused.nodes == [7]
    assert [effect.node for effect in effects if isinstance(effect, StartReceive)] == [7]


def test_if_the_source_node_dies_the_next_is_asked_once_the_receive_is_over(store: NodeStore) -> None:
    receive = start_pull(store, oid(1, FAR), [7, 8])
    assert store.node_died(0.0, receive.node) == [CancelReceive(receive.tag)]
    again = store.received(0.0, receive.tag, "cancelled")[0]
    assert isinstance(again, StartReceive) and again.node == 15 - receive.node


def test_a_dead_node_is_not_asked(store: NodeStore) -> None:
    store.node_died(0.0, 7)
    assert start_pull(store, oid(1, FAR), [7, 8]).node == 8


def test_messages_of_the_dead_are_ignored(store: NodeStore) -> None:
    store.process_died(0.0, A)
    assert store.handle(0.0, A, m.Create(oid(1, B), 64)) == []
    assert store.handle(0.0, A, m.Open(oid(1, B), 64, [7])) == []
    store.node_died(0.0, 4)
    assert store.handle(0.0, raylet_of(4), m.Pull(oid(1, B), 9, 64)) == []
    assert store.snapshot()["objects"] == 0
