"""One node store: large objects travel in chunks, are passed on while they come, and go on where they stopped."""

from __future__ import annotations

import pytest
from store_kit import CAPACITY, FAR, A, B, oid, only, put, sent_to

from hpcray.common.ids import raylet_of
from hpcray.core.effects import CancelReceive, Effect, Send, StartReceive, StartSend
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.core.object_store.pull_manager import transfer_tag
from hpcray.protocol import messages as m

CHUNK = 10 * 64
SIZE = 5 * CHUNK - 100


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore(2, CAPACITY, chunk=CHUNK)


def start(store: ObjectStore, nodes: list[int], ident: bytes | None = None) -> tuple[list[StartReceive], m.Pull]:
    effects = store.handle(0.0, A, m.Open(ident or oid(1, FAR), SIZE, nodes))
    return receives(effects), question(effects)


def receives(effects: list[Effect]) -> list[StartReceive]:
    return [effect for effect in effects if isinstance(effect, StartReceive)]


def sends(effects: list[Effect]) -> list[StartSend]:
    return [effect for effect in effects if isinstance(effect, StartSend)]


def question(effects: list[Effect]) -> m.Pull:
    (pull,) = [effect.msg for effect in effects if isinstance(effect, Send) and isinstance(effect.msg, m.Pull)]
    return pull


def cancel_all(store: ObjectStore, effects: list[Effect]) -> list[Effect]:
    """What the data plane does: every cancelled receive ends."""
    out: list[Effect] = []
    for effect in effects:
        out += store.receive_ended(1.0, effect.tag, "cancelled") if isinstance(effect, CancelReceive) else []
    return out


class TestReceiving:
    def test_every_chunk_has_a_receive_and_one_message_asks_for_all(self, store: ObjectStore) -> None:
        posted, pull = start(store, [7])
        assert [receive.size for receive in posted] == [CHUNK] * 4 + [CHUNK - 100]
        assert [receive.offset for receive in posted] == [posted[0].offset + CHUNK * at for at in range(5)]
        assert [receive.tag for receive in posted] == [pull.tag + at for at in range(5)]
        assert (pull.chunk, pull.first, pull.whole) == (CHUNK, 0, False)

    def test_no_chunk_is_much_shorter_than_the_others(self) -> None:
        store = ObjectStore(2, 64 << 20, chunk=4 << 20)
        effects = store.handle(0.0, A, m.Open(oid(1, FAR), (8 << 20) + 150, [7]))
        sizes = [receive.size for receive in receives(effects)]
        assert sum(sizes) == (8 << 20) + 150 and question(effects).chunk == sizes[0] <= 4 << 20
        assert len(sizes) == 3 and min(sizes) > sizes[0] - 3 * 4096

    def test_an_object_is_sealed_with_its_last_chunk_in_whatever_order_they_arrive(self, store: ObjectStore) -> None:
        posted, _ = start(store, [7])
        for at in (3, 0, 4, 1):
            assert store.receive_ended(1.0, posted[at].tag, None) == []
        assert isinstance(only(store.receive_ended(1.0, posted[2].tag, None), A), m.Opened)

    def test_after_a_failure_the_next_node_sends_what_is_missing_behind_the_gap(self, store: ObjectStore) -> None:
        posted, _ = start(store, [7, 8])
        for at in (0, 1, 3):
            store.receive_ended(1.0, posted[at].tag, None)
        effects = store.receive_ended(1.0, posted[2].tag, "connection reset")
        assert effects == [CancelReceive(posted[4].tag)]
        again = cancel_all(store, effects)
        assert [receive.offset for receive in receives(again)] == [posted[at].offset for at in (2, 3, 4)]
        assert {receive.node for receive in receives(again)} == {15 - posted[0].node}
        assert question(again).first == 2
        for receive in receives(again)[:-1]:
            store.receive_ended(2.0, receive.tag, None)
        assert isinstance(only(store.receive_ended(2.0, receives(again)[-1].tag, None), A), m.Opened)

    def test_chunks_on_their_way_when_the_source_dies_may_still_arrive(self, store: ObjectStore) -> None:
        posted, _ = start(store, [7])
        for receive in posted[:4]:
            store.receive_ended(1.0, receive.tag, None)
        assert store.node_died(1.0, 7) == [CancelReceive(posted[4].tag)]
        assert isinstance(only(store.receive_ended(1.0, posted[4].tag, None), A), m.Opened)

    def test_a_refusal_after_the_first_chunk_ends_the_attempt(self, store: ObjectStore) -> None:
        posted, pull = start(store, [7])
        store.receive_ended(1.0, posted[0].tag, None)
        refusal = m.PullRefused(oid(1, FAR), pull.tag, "its source died", nodes=[9])
        again = cancel_all(store, store.handle(1.0, raylet_of(7), refusal))
        assert question(again).first == 1 and receives(again)[0].node == 9, "the node that it named is asked"


class TestSending:
    def test_chunks_go_in_order_a_few_at_a_time(self, store: ObjectStore) -> None:
        offset = put(store, oid(1), SIZE)
        tag = transfer_tag(4, 1)
        first = sends(store.handle(0.0, raylet_of(4), m.Pull(oid(1), tag, SIZE, CHUNK)))
        assert [(send.tag, send.offset, send.size) for send in first] == [
            (tag + at, offset + at * CHUNK, CHUNK) for at in range(4)
        ]
        (last,) = sends(store.send_ended(1.0, tag, None))
        assert (last.tag, last.size) == (tag + 4, CHUNK - 100)
        for at in range(1, 5):
            assert store.snapshot()["sending"] == 1
            assert store.send_ended(1.0, tag + at, None) == []
        assert (store.snapshot()["sending"], store.snapshot()["sent"]) == (0, 1)

    def test_chunks_that_the_receiver_has_are_not_sent_again(self, store: ObjectStore) -> None:
        offset = put(store, oid(1), SIZE)
        again = sends(store.handle(0.0, raylet_of(4), m.Pull(oid(1), 50, SIZE, CHUNK, first=3, whole=True)))
        assert [(send.tag, send.offset) for send in again] == [(50, offset + 3 * CHUNK), (51, offset + 4 * CHUNK)]

    def test_a_failed_chunk_ends_the_transfer_once_the_others_are_over(self, store: ObjectStore) -> None:
        put(store, oid(1), SIZE)
        tag = transfer_tag(4, 1)
        store.handle(0.0, raylet_of(4), m.Pull(oid(1), tag, SIZE, CHUNK))
        refused = only(store.send_ended(1.0, tag + 1, "endpoint closed"), raylet_of(4))
        assert isinstance(refused, m.PullRefused) and refused.tag == tag
        assert store.send_ended(1.0, tag, None) == [], "nothing more is sent"
        store.handle(1.0, A, m.Free([oid(1)], [2]))
        assert store.snapshot()["used"] > 0, "the block is still being read"
        for at in (2, 3):
            store.send_ended(1.0, tag + at, None)
        assert store.snapshot()["used"] == 0

    def test_a_receiver_that_dies_is_sent_nothing_more(self, store: ObjectStore) -> None:
        put(store, oid(1), SIZE)
        tag = transfer_tag(4, 1)
        store.handle(0.0, raylet_of(4), m.Pull(oid(1), tag, SIZE, CHUNK))
        store.node_died(1.0, 4)
        for at in range(4):
            assert store.send_ended(1.0, tag + at, "the node died") == []
        assert store.snapshot()["sending"] == 0


class TestBroadcast:
    def ask(self, store: ObjectStore, node: int) -> list[Effect]:
        return store.handle(0.0, raylet_of(node), m.Pull(oid(1), transfer_tag(node, 1), SIZE, CHUNK))

    def test_the_second_asker_is_redirected_to_the_first(self, store: ObjectStore) -> None:
        put(store, oid(1), SIZE)
        assert sends(self.ask(store, 4))
        elsewhere = only(self.ask(store, 5), raylet_of(5))
        assert isinstance(elsewhere, m.PullElsewhere) and (elsewhere.node, elsewhere.order) == (4, 2)
        assert store.snapshot()["sent_on"] == 1

    def test_an_asker_is_served_at_once_when_no_push_is_under_way(self, store: ObjectStore) -> None:
        put(store, oid(1), SIZE)
        for node in (4, 5):
            for send in sends(self.ask(store, node)):
                store.send_ended(1.0, send.tag, None)
            store.send_ended(1.0, transfer_tag(node, 1) + 4, None)
        assert store.snapshot()["sent"] == 2

    def test_an_asker_that_was_redirected_here_or_insists_is_served(self, store: ObjectStore) -> None:
        put(store, oid(1), SIZE)
        self.ask(store, 4)
        assert sends(store.handle(0.0, raylet_of(5), m.Pull(oid(1), 70, SIZE, CHUNK, whole=True)))
        assert sends(store.handle(0.0, raylet_of(6), m.Pull(oid(1), 80, SIZE, CHUNK, root=9, order=4)))

    def test_no_asker_is_redirected_to_a_dead_node(self, store: ObjectStore) -> None:
        put(store, oid(1), SIZE)
        self.ask(store, 4)
        self.ask(store, 5)
        store.node_died(0.0, 5)
        store.node_died(0.0, 4)
        assert sends(self.ask(store, 6))

    def test_a_redirected_pull_asks_the_parent_with_its_order(self, store: ObjectStore) -> None:
        posted, pull = start(store, [7, 8])
        effects = store.handle(0.0, raylet_of(posted[0].node), m.PullElsewhere(oid(1, FAR), pull.tag, 9, 5))
        assert effects == [CancelReceive(receive.tag) for receive in posted]
        moved = cancel_all(store, effects)
        again = question(moved)
        assert {receive.node for receive in receives(moved)} == {9}
        assert (again.root, again.order, again.whole) == (posted[0].node, 5, False)

    def test_if_the_parent_dies_the_root_is_asked_again(self, store: ObjectStore) -> None:
        _, pull = start(store, [7])
        effects = store.handle(0.0, raylet_of(7), m.PullElsewhere(oid(1, FAR), pull.tag, 9, 5))
        moved = receives(cancel_all(store, effects))
        store.receive_ended(1.0, moved[0].tag, None)
        again = cancel_all(store, store.node_died(1.0, 9))
        assert {receive.node for receive in receives(again)} == {7}
        assert (question(again).first, question(again).root, question(again).order) == (1, -1, -1)

    def test_if_the_parent_dies_nodes_that_wait_here_are_sent_back_to_the_root(self, store: ObjectStore) -> None:
        _, pull = start(store, [7])
        effects = store.handle(0.0, raylet_of(7), m.PullElsewhere(oid(1, FAR), pull.tag, 9, 5))
        moved = cancel_all(store, effects)
        assert store.handle(0.0, raylet_of(4), m.Pull(oid(1, FAR), 90, SIZE, CHUNK, root=7, order=6)) == []
        again = cancel_all(store, store.node_died(1.0, 9))
        assert receives(moved) and receives(again)
        (refused,) = sent_to(again, raylet_of(4))
        assert isinstance(refused, m.PullRefused) and refused.nodes == [7]

    def test_a_pull_redirected_to_failing_nodes_insists_at_last_that_the_root_sends(self, store: ObjectStore) -> None:
        effects = store.handle(0.0, A, m.Open(oid(1, FAR), SIZE, [7]))
        for parent in (8, 9, 10):
            assert not question(effects).whole
            elsewhere = m.PullElsewhere(oid(1, FAR), question(effects).tag, parent, parent)
            effects = cancel_all(store, store.handle(0.0, raylet_of(7), elsewhere))
            refusal = m.PullRefused(oid(1, FAR), question(effects).tag, "it is not here")
            effects = cancel_all(store, store.handle(0.0, raylet_of(parent), refusal))
        assert question(effects).whole and receives(effects)[0].node == 7

    def test_chunks_are_relayed_as_soon_as_they_arrive(self, store: ObjectStore) -> None:
        posted, _ = start(store, [7])
        assert store.handle(0.0, raylet_of(4), m.Pull(oid(1, FAR), 90, SIZE, CHUNK, root=7, order=2)) == []
        assert sends(store.receive_ended(1.0, posted[1].tag, None)) == [], "in order"
        assert [send.tag for send in sends(store.receive_ended(1.0, posted[0].tag, None))] == [90, 91]

    def test_a_node_with_a_lower_order_does_not_wait_for_chunks_here(self, store: ObjectStore) -> None:
        """Else two nodes could wait for each other."""
        _, pull = start(store, [7])
        assert store.handle(0.0, raylet_of(4), m.Pull(oid(1, FAR), 90, SIZE, CHUNK, root=7, order=2)) == []
        effects = store.handle(0.0, raylet_of(7), m.PullElsewhere(oid(1, FAR), pull.tag, 4, 5))
        (refused,) = sent_to(effects, raylet_of(4))
        assert isinstance(refused, m.PullRefused)

    def test_a_replica_that_fails_half_way_holds_its_block_until_its_last_send_is_over(
        self, store: ObjectStore
    ) -> None:
        posted, pull = start(store, [7])
        store.handle(0.0, raylet_of(4), m.Pull(oid(1, FAR), 90, SIZE, CHUNK, root=7, order=2))
        store.receive_ended(1.0, posted[0].tag, None)  # its send begins
        refusal = m.PullRefused(oid(1, FAR), pull.tag, "it was lost there")
        effects = cancel_all(store, store.handle(1.0, raylet_of(7), refusal))
        assert {type(msg) for msg in sent_to(effects, raylet_of(4))} == {m.PullRefused}
        assert {type(msg) for msg in sent_to(effects, A)} == {m.StoreError}
        assert store.snapshot()["used"] > 0 and store.snapshot()["objects"] == 0
        store.send_ended(2.0, 90, None)
        assert store.snapshot()["used"] == 0


class TestPullAdmission:
    def test_an_urgent_pull_does_not_wait_behind_prefetches(self) -> None:
        store = ObjectStore(2, 4 << 30)
        size = 100 << 20
        begun = [
            bool(receives(store.handle(0.0, A, m.Open(oid(counter, FAR), size, [7], 2)))) for counter in range(1, 7)
        ]
        assert begun == [True] * 4 + [False] * 2 and store.snapshot()["queued"] == 2
        urgent = receives(store.handle(0.0, B, m.Open(oid(9, FAR), size, [8])))
        assert urgent, "a get begins at once"
        assert receives(store.handle(0.0, B, m.Open(oid(5, FAR), size, [7]))), "also of what was only fetched ahead"

    def test_the_next_pull_begins_when_one_has_ended(self) -> None:
        store = ObjectStore(2, 4 << 30, chunk=1 << 40)
        size = 100 << 20
        first = [store.handle(0.0, A, m.Open(oid(counter, FAR), size, [7])) for counter in range(1, 7)]
        effects = store.receive_ended(1.0, receives(first[0])[0].tag, None)
        assert [receive.id for receive in receives(effects)] == [oid(5, FAR)]
        effects = store.receive_ended(1.0, receives(first[1])[0].tag, "reset")
        assert [receive.id for receive in receives(effects)] == [oid(6, FAR)]

    def test_a_pull_released_before_its_turn_is_forgotten(self) -> None:
        store = ObjectStore(2, 4 << 30)
        for counter in range(1, 6):
            store.handle(0.0, A, m.Open(oid(counter, FAR), 100 << 20, [7]))
        store.handle(0.0, A, m.Release([oid(5, FAR)]))
        assert store.snapshot()["queued"] == 0 and store.snapshot()["objects"] == 4

    def test_a_pull_waits_for_room_while_the_objects_that_fill_the_store_arrive(self) -> None:
        store = ObjectStore(2, CAPACITY, full_timeout=10.0, chunk=CHUNK)
        large = CAPACITY // 4 * 3
        posted = receives(store.handle(0.0, A, m.Open(oid(1, FAR), large, [7])))
        assert store.handle(0.0, B, m.Open(oid(2, FAR), large, [7])) == []
        store.receive_ended(9.0, posted[0].tag, None)
        assert store.tick(12.0) == [], "the other one is coming: it can be evicted when it is here and was read"
        error = only(store.tick(20.0), B)
        assert isinstance(error, m.StoreError) and error.kind == "full", "nothing came for ten seconds"
