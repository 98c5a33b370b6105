"""Processes of neighboring nodes and objects on disk: what comes back for them, and what does not."""

from __future__ import annotations

import pytest
from store_kit import CAPACITY, FAR, A, B, answers, oid, pull, sent_to
from store_neighbors_kit import (
    BOTH_ORDERS,
    SIZE,
    X,
    ask,
    give,
    gives_both,
    leave_holes,
    make_room,
    on_disk,
    parts,
    restores,
    show,
)

from hpcray.common.ids import raylet_of
from hpcray.core.effects import DiscardSpilled, Effect, LendSpilled, ReadSpill, StartReceive, StartSend
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.core.object_store.stored_object import StoredObjectState
from hpcray.protocol import messages as m


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore(2, CAPACITY, full_timeout=10.0, spill_threshold=1.0)


def lent(effects: list[Effect]) -> list[bytes]:
    """Who is to read a file."""
    return [effect.proc for effect in effects if isinstance(effect, LendSpilled)]


class TestPinnedAndReadOnDisk:
    @pytest.mark.parametrize("kept", [False, True])
    def test_a_replica_pin_on_an_object_on_disk_is_answered_at_once_without_a_place(
        self, store: ObjectStore, kept: bool
    ) -> None:
        on_disk(store, kept)
        assert ask(store, "keep") == [m.ReplicaPinned(X)]
        make_room(store)
        effects = store.handle(1.0, FAR, m.Open(X, SIZE, []))
        offset = restores(store, effects)
        assert sent_to(effects, FAR) == [], "its bytes are not there yet"
        assert ask(store, "keep") == [m.ReplicaPinned(X)]
        assert sent_to(store.spill_read_ended(3.0, X, None), FAR) == [m.Opened(X, offset, SIZE, False)]
        assert parts(store.lifecycle.objects[X]) == {"keep", "read"}

    @pytest.mark.parametrize("kept", [False, True])
    @pytest.mark.parametrize("asks", BOTH_ORDERS)
    @pytest.mark.parametrize("gives", BOTH_ORDERS)
    def test_an_object_on_disk_can_be_pinned_and_read_in_either_order(
        self, store: ObjectStore, kept: bool, asks: tuple[str, ...], gives: tuple[str, ...]
    ) -> None:
        on_disk(store, kept)
        make_room(store)
        for what in asks:
            ask(store, what)
        store.spill_read_ended(3.0, X, None)
        gives_both(store, gives)
        numbers = store.snapshot()
        assert numbers["evictable"] == SIZE and numbers["on_disk"] == (0 if kept else SIZE), "a copy needs no disk"

    @pytest.mark.parametrize("kept", [False, True])
    @pytest.mark.parametrize("gives", BOTH_ORDERS)
    @pytest.mark.parametrize("later", [0, 1, 2])
    def test_a_pin_or_a_read_given_up_during_the_restore_leaves_the_other(
        self, store: ObjectStore, kept: bool, gives: tuple[str, ...], later: int
    ) -> None:
        """later: so many are given up only after that."""
        on_disk(store, kept)
        make_room(store)
        for what in ("read", "keep"):
            ask(store, what)
        for what in gives[: 2 - later]:
            assert give(store, what) == []
        found = sent_to(store.spill_read_ended(3.0, X, None), FAR)
        assert show(found) == (["read"] if "read" in gives[2 - later :] else [])
        obj = store.lifecycle.objects[X]
        assert parts(obj) == set(gives[2 - later :])
        for what in gives[2 - later :]:
            give(store, what)
        numbers = store.snapshot()
        assert numbers["evictable"] == SIZE and numbers["on_disk"] == (0 if kept else SIZE)
        assert parts(obj) == set() and FAR not in obj.openers

    @pytest.mark.parametrize("gives", BOTH_ORDERS)
    def test_a_pin_or_a_read_given_up_while_waiting_for_room_leaves_the_other(
        self, store: ObjectStore, gives: tuple[str, ...]
    ) -> None:
        on_disk(store, kept=True)
        leave_holes(store)
        assert ask(store, "read") == []
        assert store.lifecycle.objects[X].state is StoredObjectState.WAITING
        assert answers(give(store, gives[0])) == []
        assert store.lifecycle.objects[X].state is (
            StoredObjectState.WAITING if gives[1] == "read" else StoredObjectState.SPILLED
        )
        assert give(store, gives[1]) == [DiscardSpilled(1, 0, SIZE, True)]
        assert X not in store.lifecycle.objects and FAR not in store.lifecycle.clients.clients()

    def test_an_unreadable_object_is_lost_for_its_reader_and_its_pinner(self, store: ObjectStore) -> None:
        on_disk(store, kept=True)
        make_room(store)
        ask(store, "read")
        found = sent_to(store.spill_read_ended(3.0, X, "input/output error"), FAR)
        assert sorted(type(msg).__name__ for msg in found) == ["ReplicaPinned", "StoreError"]
        assert X not in store.lifecycle.objects and FAR not in store.lifecycle.clients.clients()

    def test_a_replica_pulled_again_after_the_disk_failed_is_not_confirmed_to_its_pinner_again(
        self, store: ObjectStore
    ) -> None:
        on_disk(store, kept=True)
        make_room(store)
        (read,) = store.handle(2.0, A, m.Open(X, SIZE, [7]))
        assert isinstance(read, ReadSpill)
        effects = store.spill_read_ended(3.0, X, "input/output error")
        (receive,) = (effect for effect in effects if isinstance(effect, StartReceive))
        effects = store.receive_ended(4.0, receive.tag, None)
        assert sent_to(effects, FAR) == [] and len(sent_to(effects, A)) == 1
        assert parts(store.lifecycle.objects[X]) == {"keep"}


class TestOnDiskWithoutRoom:
    """A guest has no way to the file that a process of the node would be lent; its own node can be sent the object."""

    def full(self, messages: list[m.Message], why: str = "no room to bring it back") -> bool:
        """This, and no more, is what a guest has heard."""
        (error,) = messages
        return isinstance(error, m.StoreError) and (error.id, error.kind) == (X, "full") and why in error.reason

    @pytest.mark.parametrize("kept", [False, True])
    def test_a_neighbor_that_opens_an_object_on_disk_without_room_gets_an_error_at_once(
        self, store: ObjectStore, kept: bool
    ) -> None:
        on_disk(store, kept)
        effects = store.handle(1.0, FAR, m.Open(X, SIZE, []))
        assert self.full(sent_to(effects, FAR)) and len(effects) == 1, "nobody is asked to make way"
        assert store.lifecycle.objects[X].state is StoredObjectState.SPILLED and store.snapshot()["waiting"] == 0
        assert parts(store.lifecycle.objects[X]) == ({"keep"} if kept else set())
        assert (FAR in store.lifecycle.clients.clients()) == kept
        assert store.tick(12.0) == [] and store.snapshot()["lent"] == 0

    @pytest.mark.parametrize("as_before", [False, True])
    def test_a_neighbor_gets_an_error_though_a_process_of_the_node_is_lent_the_file(
        self, store: ObjectStore, as_before: bool
    ) -> None:
        """as_before: somebody has just waited for room in vain."""
        on_disk(store, kept=False)
        if as_before:
            store.handle(0.5, B, m.Open(X, SIZE, [2]))
            assert lent(store.tick(2.0)) == [B]
        effects = store.handle(2.0, A, m.Open(X, SIZE, [2]))
        assert (lent(effects) == [A]) == as_before and store.snapshot()["waiting"] == (not as_before)
        assert self.full(ask(store, "read", now=2.0))
        effects = store.tick(3.5)
        assert lent(effects) == ([] if as_before else [A]) and sent_to(effects, FAR) == []

    def test_a_neighbor_that_waited_gets_an_error_when_the_file_is_lent(self, store: ObjectStore) -> None:
        on_disk(store, kept=False)
        leave_holes(store)
        assert ask(store, "read") == [], "there seems to be room"
        assert answers(store.handle(1.0, A, m.Open(X, SIZE, [2]))) == []
        effects = store.tick(2.5)
        assert lent(effects) == [A] and self.full(sent_to(effects, FAR))
        assert (
            store.lifecycle.objects[X].state is StoredObjectState.SPILLED
            and FAR not in store.lifecycle.clients.clients()
        )
        assert store.snapshot()["lent"] == 1
        assert answers(store.handle(3.0, A, m.DiskRead(X))) == []

    def test_the_node_of_the_neighbor_is_sent_the_object_straight_from_disk(self) -> None:
        store = ObjectStore(2, CAPACITY, full_timeout=10.0, spill_threshold=1.0, slots=1)
        on_disk(store, kept=False)
        assert self.full(ask(store, "read"))
        (read,) = store.handle(1.0, raylet_of(5), m.Pull(X, 77, SIZE))
        assert isinstance(read, ReadSpill) and read.piece.offset == CAPACITY, "beside the arena"
        (send,) = store.spill_read_ended(2.0, read.id, None)
        assert send == StartSend(X, 5, 77, CAPACITY, SIZE)
        store.send_ended(3.0, 77, None)
        assert store.lifecycle.objects[X].state is StoredObjectState.SPILLED and store.snapshot()["from_disk"] == 1

    def test_evictable_replicas_make_way_for_the_open_of_a_neighbor(self, store: ObjectStore) -> None:
        on_disk(store, kept=False)
        make_room(store)
        pull(store, oid(9, B), SIZE, B)
        restores(store, store.handle(1.0, FAR, m.Open(X, SIZE, [])))
        assert oid(9, B) not in store.lifecycle.objects

    def test_a_neighbor_waits_for_an_object_that_is_being_restored_for_others(self, store: ObjectStore) -> None:
        on_disk(store, kept=False)
        make_room(store)
        offset = restores(store, store.handle(1.0, A, m.Open(X, SIZE, [2])))
        assert ask(store, "read") == [] and not store.lifecycle.queue.has_room(SIZE)
        assert sent_to(store.spill_read_ended(2.0, X, None), FAR) == [m.Opened(X, offset, SIZE, False)]

    def test_a_neighbor_waits_for_an_object_that_is_not_on_disk_though_there_is_no_room(
        self, store: ObjectStore
    ) -> None:
        on_disk(store, kept=False)
        store.handle(1.0, B, m.Open(oid(9, B), SIZE, [7]))
        assert ask(store, "read", oid(9, B)) == [] and store.snapshot()["waiting"] == 1
        effects = store.handle(2.0, B, m.Release([oid(5, B)]))
        (receive,) = (effect for effect in effects if isinstance(effect, StartReceive))
        found = sent_to(store.receive_ended(3.0, receive.tag, None), FAR)
        assert found == [m.Opened(oid(9, B), receive.offset, SIZE, False)]
