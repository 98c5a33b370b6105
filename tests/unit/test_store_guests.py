"""Processes of neighbouring nodes that read in this node's store, in place; owners that read what they keep here."""

from __future__ import annotations

from itertools import permutations

import pytest
from store_kit import CAPACITY, FAR, A, B, answers, oid, pull, put, sent_to, start_pull

from hpcray.base.ids import make_proc, raylet_of
from hpcray.core.effects import DiscardSpilled, Effect, LendSpilled, ReadSpill, StartReceive, WriteSpill
from hpcray.core.store.node_store import NodeStore
from hpcray.core.store.objects import State, StoredObject
from hpcray.wire import messages as m

SIZE = CAPACITY // 4 // 64 * 64
X = oid(1, FAR)
OTHER = make_proc(5, 2)
BOTH_ORDERS = list(permutations(("keep", "read")))


@pytest.fixture
def store() -> NodeStore:
    return NodeStore(2, CAPACITY, full_timeout=10.0, spill_threshold=1.0)


def ask(store: NodeStore, what: str, ident: bytes = X, proc: bytes = FAR, now: float = 1.0) -> list[m.Message]:
    """What the store answers to a guest that wants to read, or to an owner that wants a copy kept."""
    keep = what == "keep"
    return sent_to(store.handle(now, proc, m.Open(ident, SIZE, [7] if keep else [], keep=keep)), proc)


def give(store: NodeStore, what: str, ident: bytes = X, proc: bytes = FAR, now: float = 5.0) -> list[Effect]:
    return store.handle(now, proc, m.Release([ident], keep=what == "keep"))


def parts(obj: StoredObject, proc: bytes = FAR) -> set[str]:
    """What a process has of an object."""
    return {name for name, has in (("keep", obj.keepers), ("read", obj.pins)) if proc in has}


def show(messages: list[m.Message]) -> list[str]:
    return ["keep" if isinstance(msg, m.Kept) else "read" for msg in messages]


def gives_both(store: NodeStore, gives: tuple[str, ...]) -> None:
    """It gives up one, and has the other; then that."""
    obj = store._objects[X]
    for _ in range(2):  # the second time changes nothing
        give(store, gives[0])
        assert parts(obj) == {gives[1]}
        assert store._space.can_evict(obj) == (gives[1] == "keep" and obj.disk is not None)
    give(store, gives[1])
    assert parts(obj) == set() and store._space.can_evict(obj)
    assert (FAR in store._holdings.procs()) == (obj.announcer == FAR)


def on_disk(store: NodeStore, kept: bool) -> None:
    """X is on disk, as a primary of this node or as a copy that its owner keeps here; three others are pinned."""
    if kept:
        receive = store.handle(0.0, FAR, m.Open(X, SIZE, [7], keep=True))[0]
        assert isinstance(receive, StartReceive)
        store.received(0.0, receive.tag, None)
    else:
        put(store, X, SIZE)
    for counter in (2, 3, 4):
        put(store, oid(counter), SIZE, release=False)
    (write,) = answers(store.handle(0.0, B, m.Create(oid(5, B), SIZE)))
    assert isinstance(write, WriteSpill)
    store.spilled(0.0, None)
    assert store._objects[X].state is State.SPILLED


def make_room(store: NodeStore) -> list[Effect]:
    """B gives up what it was writing."""
    return store.handle(2.0, B, m.Release([oid(5, B)]))


class TestGuests:
    def test_a_guest_reads_like_a_process_of_the_node(self, store: NodeStore) -> None:
        offset = put(store, oid(1), SIZE)
        assert ask(store, "read", oid(1)) == [m.Opened(oid(1), offset, SIZE, False)]
        store.handle(2.0, A, m.Free([oid(1)], [2]))
        assert store.snapshot()["used"] == SIZE, "it is being read"
        assert give(store, "read", oid(1)) == [] and store.snapshot()["used"] == 0

    def test_what_is_not_here_a_guest_has_not_pulled(self, store: NodeStore) -> None:
        (error,) = ask(store, "read")
        assert isinstance(error, m.StoreError) and error.kind == "lost" and "told: none" in error.reason
        assert store.snapshot()["objects"] == 0

    def test_what_is_being_made_or_pulled_here_it_waits_for(self, store: NodeStore) -> None:
        store.handle(0.0, A, m.Create(oid(1), SIZE))
        assert ask(store, "read", oid(1)) == []
        assert sent_to(store.handle(2.0, A, m.Seal(oid(1))), FAR) == [m.Opened(oid(1), 0, SIZE, False)]
        receive = start_pull(store, X, [7], B, SIZE)
        assert ask(store, "read") == []
        assert sent_to(store.received(3.0, receive.tag, None), FAR) == [m.Opened(X, receive.offset, SIZE, False)]

    def test_whose_request_is_the_last_one_tells_the_owner_of_the_copy(self, store: NodeStore) -> None:
        receive = start_pull(store, X, [7], B, SIZE)
        ask(store, "read", proc=OTHER)
        store.handle(1.5, B, m.Release([X]))
        assert sent_to(store.received(2.0, receive.tag, None), OTHER) == [m.Opened(X, receive.offset, SIZE, True)]
        store.process_died(3.0, OTHER)
        assert ask(store, "read") == [m.Opened(X, receive.offset, SIZE, True)], "perhaps nobody was told"

    def test_it_may_give_up_before_the_answer(self, store: NodeStore) -> None:
        receive = start_pull(store, X, [7], B, SIZE)
        ask(store, "read")
        give(store, "read")
        assert sent_to(store.received(3.0, receive.tag, None), FAR) == []
        assert store._holdings.procs() == [B]

    @pytest.mark.parametrize("state", ["coming", "here", "lent", "absent"])
    def test_who_does_not_know_what_was_answered_gives_everything_back(self, store: NodeStore, state: str) -> None:
        """Its connection has ended; the answer may have been lost with it."""
        if state == "lent":
            on_disk(store, kept=False)
        elif state == "coming":
            start_pull(store, X, [7], B, SIZE)
        elif state == "here":
            pull(store, X, SIZE, B)
        ask(store, "read")
        store.tick(12.0)
        assert (store._lent.procs() == [FAR]) == (state == "lent")
        give(store, "read", now=13.0)
        store.handle(13.0, FAR, m.DiskRead(X))
        assert FAR not in [*store._holdings.procs(), *store._lent.procs()]

    def test_a_dead_one_opens_nothing(self, store: NodeStore) -> None:
        put(store, oid(1), SIZE)
        store.process_died(1.0, FAR)
        assert ask(store, "read", oid(1)) == [] and store.snapshot()["pinned"] == 0


class TestKeptAndRead:
    @pytest.mark.parametrize("asks", BOTH_ORDERS)
    @pytest.mark.parametrize("gives", BOTH_ORDERS)
    def test_what_is_here(self, store: NodeStore, asks: tuple[str, ...], gives: tuple[str, ...]) -> None:
        offset = pull(store, X, SIZE, B)
        want = {"keep": [m.Kept(X)], "read": [m.Opened(X, offset, SIZE, False)]}
        for what in asks:
            assert ask(store, what) == want[what]
        assert parts(store._objects[X]) == {"keep", "read"} and store.snapshot()["evictable"] == 0
        gives_both(store, gives)
        assert store.snapshot()["evictable"] == SIZE

    @pytest.mark.parametrize("asks", BOTH_ORDERS)
    @pytest.mark.parametrize("gives", BOTH_ORDERS)
    def test_what_is_being_pulled(self, store: NodeStore, asks: tuple[str, ...], gives: tuple[str, ...]) -> None:
        receive = start_pull(store, X, [7], B, SIZE)
        for what in asks:
            assert ask(store, what) == [], "it is not here"
        effects = store.received(2.0, receive.tag, None)
        assert sorted(show(sent_to(effects, FAR))) == ["keep", "read"], "an answer to each"
        store.handle(3.0, B, m.Release([X]))
        gives_both(store, gives)
        assert store.snapshot()["evictable"] == SIZE

    @pytest.mark.parametrize("asks", BOTH_ORDERS)
    @pytest.mark.parametrize("first", ["keep", "read"])
    def test_one_is_given_up_while_it_is_being_pulled(
        self, store: NodeStore, asks: tuple[str, ...], first: str
    ) -> None:
        receive = start_pull(store, X, [7], B, SIZE)
        for what in asks:
            ask(store, what)
        assert give(store, first) == []
        (other,) = {"keep", "read"} - {first}
        assert show(sent_to(store.received(2.0, receive.tag, None), FAR)) == [other]
        store.handle(3.0, B, m.Release([X]))
        assert parts(store._objects[X]) == {other} and store.snapshot()["evictable"] == 0
        give(store, other)
        assert store.snapshot()["evictable"] == SIZE and store._holdings.procs() == [B], "who told its owner"

    def test_a_copy_that_is_pulled_for_its_keeper_comes_though_it_is_not_read_any_more(self, store: NodeStore) -> None:
        (receive, _) = store.handle(0.0, FAR, m.Open(X, SIZE, [7], keep=True))
        assert isinstance(receive, StartReceive)
        ask(store, "read")
        give(store, "read")
        assert sent_to(store.received(1.0, receive.tag, None), FAR) == [m.Kept(X)]
        assert store.snapshot()["evictable"] == 0 and store.snapshot()["pinned"] == 0

    def test_waiting_for_its_turn_it_is_forgotten_when_neither_is_wanted(self, store: NodeStore) -> None:
        store._admission._may_begin = lambda priority: False  # type: ignore[method-assign]
        store.handle(0.0, FAR, m.Open(X, SIZE, [7], keep=True))
        ask(store, "read")
        give(store, "keep")
        assert store.snapshot()["waiting"] == 1
        give(store, "read")
        assert store.snapshot()["objects"] == store.snapshot()["queued"] == len(store._holdings) == 0

    def test_when_it_cannot_be_had_both_hear_of_it(self, store: NodeStore) -> None:
        receive = start_pull(store, X, [7], B, SIZE)
        ask(store, "read")
        ask(store, "keep")
        store.handle(1.0, raylet_of(7), m.PullRefused(X, receive.tag, "it is not here"))
        effects = store.received(2.0, receive.tag, "cancelled")
        found = sent_to(effects, FAR)
        assert sorted(type(msg).__name__ for msg in found) == ["Kept", "StoreError"] and len(sent_to(effects, B)) == 1
        assert store.snapshot()["objects"] == len(store._holdings) == 0


class TestKeptAndReadOnDisk:
    @pytest.mark.parametrize("kept", [False, True])
    def test_who_has_it_kept_is_told_at_once_and_never_where_it_might_read(self, store: NodeStore, kept: bool) -> None:
        on_disk(store, kept)
        assert ask(store, "read") == [], "there is no room"
        assert ask(store, "keep") == [m.Kept(X)]
        (read,) = make_room(store)
        assert isinstance(read, ReadSpill)
        assert ask(store, "keep") == [m.Kept(X)], "its bytes are not there yet"
        assert sent_to(store.restored(3.0, X, None), FAR) == [m.Opened(X, read.piece.offset, SIZE, False)]
        assert parts(store._objects[X]) == {"keep", "read"}

    @pytest.mark.parametrize("kept", [False, True])
    @pytest.mark.parametrize("asks", BOTH_ORDERS)
    @pytest.mark.parametrize("gives", BOTH_ORDERS)
    def test_restored(self, store: NodeStore, kept: bool, asks: tuple[str, ...], gives: tuple[str, ...]) -> None:
        on_disk(store, kept)
        for what in asks:
            ask(store, what)
        make_room(store)
        store.restored(3.0, X, None)
        gives_both(store, gives)
        numbers = store.snapshot()
        assert numbers["evictable"] == SIZE and numbers["on_disk"] == (0 if kept else SIZE), "a copy needs no disk"

    @pytest.mark.parametrize("kept", [False, True])
    @pytest.mark.parametrize("gives", BOTH_ORDERS)
    @pytest.mark.parametrize("later", [0, 1, 2])
    def test_given_up_while_it_is_being_restored(
        self, store: NodeStore, kept: bool, gives: tuple[str, ...], later: int
    ) -> None:
        """later: so many are given up only after that."""
        on_disk(store, kept)
        for what in ("read", "keep"):
            ask(store, what)
        make_room(store)
        for what in gives[: 2 - later]:
            assert give(store, what) == []
        found = sent_to(store.restored(3.0, X, None), FAR)
        assert show(found) == (["read"] if "read" in gives[2 - later :] else [])
        obj = store._objects[X]
        assert parts(obj) == set(gives[2 - later :])
        for what in gives[2 - later :]:
            give(store, what)
        numbers = store.snapshot()
        assert numbers["evictable"] == SIZE and numbers["on_disk"] == (0 if kept else SIZE)
        assert parts(obj) == set() and FAR not in obj.openers

    @pytest.mark.parametrize("gives", BOTH_ORDERS)
    def test_given_up_while_it_lies_on_disk(self, store: NodeStore, gives: tuple[str, ...]) -> None:
        on_disk(store, kept=True)
        ask(store, "read")
        assert store._objects[X].state is State.WAITING
        assert answers(give(store, gives[0])) == []
        assert store._objects[X].state is (State.WAITING if gives[1] == "read" else State.SPILLED)
        assert give(store, gives[1]) == [DiscardSpilled(1, 0, SIZE, True)]
        assert X not in store._objects and FAR not in store._holdings.procs()

    @pytest.mark.parametrize("gives", BOTH_ORDERS)
    def test_lent(self, store: NodeStore, gives: tuple[str, ...]) -> None:
        """The place on disk stays until it was read, whoever keeps the object."""
        on_disk(store, kept=True)
        ask(store, "read")
        assert LendSpilled(FAR, X, 1, 0, SIZE) in store.tick(12.0)
        assert FAR in store._objects[X].keepers
        done = {"keep": lambda: give(store, "keep"), "read": lambda: store.handle(13.0, FAR, m.DiskRead(X))}
        assert done[gives[0]]() == []
        assert (X in store._objects) == (gives[0] == "read")
        effects = done[gives[1]]()
        assert effects == [DiscardSpilled(1, 0, SIZE, True)] and X not in store._objects

    def test_a_file_that_the_guest_cannot_read_loses_it_and_its_keeper_hears_too(self, store: NodeStore) -> None:
        on_disk(store, kept=True)
        ask(store, "read")
        store.tick(12.0)
        found = sent_to(store.handle(13.0, FAR, m.DiskRead(X, "input/output error", SIZE, [])), FAR)
        assert sorted(type(msg).__name__ for msg in found) == ["Kept", "StoreError"]
        assert len(store._lent.procs()) == 0 and X not in store._objects

    def test_a_copy_that_is_pulled_again_after_the_disk_failed_is_not_announced_to_its_keeper_again(
        self, store: NodeStore
    ) -> None:
        on_disk(store, kept=True)
        store.handle(1.0, B, m.Release([oid(5, B)]))
        (read,) = store.handle(2.0, A, m.Open(X, SIZE, [7]))
        assert isinstance(read, ReadSpill)
        effects = store.restored(3.0, X, "input/output error")
        (receive,) = (effect for effect in effects if isinstance(effect, StartReceive))
        effects = store.received(4.0, receive.tag, None)
        assert sent_to(effects, FAR) == [] and len(sent_to(effects, A)) == 1
        assert parts(store._objects[X]) == {"keep"}


class TestDeaths:
    def everything(self, store: NodeStore) -> None:
        """FAR has something pinned, waits for something, keeps something, and has something lent on disk."""
        on_disk(store, kept=False)
        ask(store, "read")
        store.tick(12.0)
        assert store._lent.procs() == [FAR]
        assert len(ask(store, "read", oid(2), now=13.0)) == len(ask(store, "keep", oid(2), now=13.0)) == 1
        store.handle(13.0, B, m.Open(oid(9, B), SIZE, [7]))
        assert ask(store, "read", oid(9, B), now=13.0) == []

    def held(self, store: NodeStore, proc: bytes = FAR) -> bool:
        return proc in [*store._holdings.procs(), *store._lent.procs()]

    def test_a_process_leaves_nothing(self, store: NodeStore) -> None:
        self.everything(store)
        store.process_died(14.0, FAR)
        assert not self.held(store)

    def test_those_of_a_dead_node_go_with_it_unless_they_still_read(self, store: NodeStore) -> None:
        self.everything(store)
        ask(store, "read", oid(4), OTHER, 13.0)
        store.node_died(14.0, 5, {FAR})
        assert self.held(store) and not self.held(store, OTHER)
        assert store._objects[oid(2)].pins >= {FAR} and store._lent.procs() == [FAR]
        store.process_died(15.0, FAR)
        assert not self.held(store)

    def test_who_has_nothing_but_a_file_lent_goes_with_its_node_too(self, store: NodeStore) -> None:
        on_disk(store, kept=False)
        ask(store, "read")
        store.tick(12.0)
        effects = store.node_died(13.0, 5)
        assert effects[-1:] == [DiscardSpilled(1, 0, SIZE, True)] and not self.held(store)

    def test_a_guest_of_a_dead_node_reads_on_and_its_block_stays(self, store: NodeStore) -> None:
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

    def test_it_may_still_open_and_release(self, store: NodeStore) -> None:
        put(store, oid(1), SIZE)
        store.node_died(2.0, 5, [FAR])
        (opened,) = ask(store, "read", oid(1))
        assert isinstance(opened, m.Opened)
        give(store, "read", oid(1))
        assert store.snapshot()["pinned"] == 0

    def test_objects_of_a_dead_node_go_when_its_last_guest_does(self, store: NodeStore) -> None:
        pull(store, X, SIZE, B)
        ask(store, "keep")
        ask(store, "read")
        store.node_died(2.0, 5, [FAR])
        assert store.snapshot()["objects"] == 1
        store.process_died(3.0, FAR)
        assert store.snapshot()["objects"] == store.snapshot()["used"] == 0

    def test_other_nodes_keep_their_guests(self, store: NodeStore) -> None:
        put(store, oid(1), SIZE)
        ask(store, "read", oid(1))
        store.node_died(2.0, 6)
        assert store.snapshot()["pinned"] == 1

    def test_what_is_to_be_fetched_ahead_when_its_owners_node_dies_is_forgotten_once(self, store: NodeStore) -> None:
        store._admission._may_begin = lambda priority: False  # type: ignore[method-assign]
        store.handle(0.0, B, m.Prefetch([m.ArgRef(X, SIZE, [7])]))
        assert store.snapshot()["queued"] == 1
        assert store.node_died(1.0, 5) == []
        assert store.snapshot()["objects"] == store.snapshot()["queued"] == 0


class TestRoomIsShort:
    def test_guests_are_asked_for_what_they_do_not_need_and_named(self, store: NodeStore) -> None:
        for counter in range(1, 5):
            put(store, oid(counter), SIZE)
            ask(store, "read", oid(counter), OTHER if counter == 4 else FAR)
        effects = store.handle(2.0, B, m.Create(oid(9, B), SIZE))
        for proc in (FAR, OTHER):
            assert [type(msg) for msg in sent_to(effects, proc)] == [m.Unpin]
        (error,) = sent_to(store.tick(13.0), B)
        assert isinstance(error, m.StoreError) and error.kind == "full"
        assert error.reason.count("pinned by process 5.1") == 3 and "pinned by process 5.2" in error.reason

    def test_for_whom_a_copy_is_kept_is_said_where_nobody_reads_it(self) -> None:
        store = NodeStore(2, CAPACITY, full_timeout=10.0)
        for counter in (1, 2):
            receive = store.handle(0.0, FAR, m.Open(oid(counter, FAR), 2 * SIZE, [7], keep=True))[0]
            store.received(0.0, receive.tag, None)  # type: ignore[union-attr]
        store.handle(1.0, OTHER, m.Open(oid(2, FAR), 2 * SIZE, []))
        store.handle(2.0, B, m.Create(oid(9, B), SIZE))
        (error,) = sent_to(store.tick(13.0), B)
        assert isinstance(error, m.StoreError)
        assert "a copy kept for process 5.1" in error.reason and "pinned by process 5.2" in error.reason

    def test_what_they_give_up_makes_room(self, store: NodeStore) -> None:
        for counter in range(1, 5):
            put(store, oid(counter), SIZE)
            ask(store, "read", oid(counter))
        store.handle(2.0, B, m.Create(oid(9, B), SIZE))
        assert WriteSpill in [type(effect) for effect in store.handle(3.0, FAR, m.Release([oid(1), oid(2)]))]
        assert [type(msg) for msg in sent_to(store.spilled(4.0, None), B)] == [m.Created]

    def test_a_kept_copy_that_was_read_is_not_evicted(self, store: NodeStore) -> None:
        receive = store.handle(0.0, FAR, m.Open(X, SIZE, [7], keep=True))[0]
        store.received(0.0, receive.tag, None)  # type: ignore[union-attr]
        ask(store, "read")
        give(store, "read")
        for counter in range(1, 4):
            put(store, oid(counter), SIZE, release=False)
        store.handle(2.0, B, m.Create(oid(9, B), SIZE))
        store.spilled(3.0, None)
        assert store._objects[X].state is State.SPILLED

    def test_a_copy_that_is_read_is_not_evicted_though_it_is_kept_no_more(self, store: NodeStore) -> None:
        pull(store, X, SIZE, B)
        for what in ("read", "keep"):
            ask(store, what)
        give(store, "keep")
        assert answers(store.handle(2.0, A, m.Create(oid(1), 4 * SIZE))) == []
        give(store, "read")
        assert store.snapshot()["creating"] == 1

    def test_a_guest_hurries_what_it_waits_for(self, store: NodeStore) -> None:
        store.handle(0.0, B, m.Open(X, SIZE, [7], 2))
        store.handle(0.0, FAR, m.Open(X, SIZE, [], 2))
        store.handle(0.0, FAR, m.Hurry(X, 0))
        assert store._objects[X].priority == 0
