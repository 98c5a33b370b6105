"""Processes of neighbouring nodes that read in the store of `store_kit`, and owners that read what they keep there."""

from __future__ import annotations

from itertools import permutations

from store_kit import CAPACITY, FAR, A, B, answers, oid, put, sent_to

from hpcray.base.ids import make_proc
from hpcray.core.effects import Effect, ReadSpill, StartReceive, WriteSpill
from hpcray.core.store.node_store import NodeStore
from hpcray.core.store.objects import State, StoredObject
from hpcray.wire import messages as m

SIZE = CAPACITY // 4 // 64 * 64
HALF = SIZE // 2
X = oid(1, FAR)
OTHER = make_proc(5, 2)
BOTH_ORDERS = list(permutations(("keep", "read")))


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


def make_room(store: NodeStore) -> None:
    """B gives up what it was writing."""
    assert answers(store.handle(0.5, B, m.Release([oid(5, B)]))) == []


def leave_holes(store: NodeStore) -> None:
    """There is as much room as X needs, but not in one piece: who asks for X waits."""
    make_room(store)
    for counter in (6, 7):
        store.handle(0.5, B, m.Create(oid(counter, B), HALF))
    store.handle(0.5, A, m.Release([oid(3)]))
    store.handle(0.5, A, m.Free([oid(3)], [2]))
    store.handle(0.5, B, m.Create(oid(8, B), HALF))
    store.handle(0.5, B, m.Release([oid(7, B)]))
    assert store._blocks.free_bytes == SIZE and store._blocks.largest_free == HALF


def restores(store: NodeStore, effects: list[Effect]) -> int:
    """X is being read back; to where."""
    (read,) = (effect for effect in effects if isinstance(effect, ReadSpill))
    assert read.id == X and store._objects[X].state is State.RESTORING
    return read.piece.offset
