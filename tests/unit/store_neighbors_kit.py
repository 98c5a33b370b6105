"""Processes of neighboring nodes that read in the store of `store_kit`, and owners that read what they keep there."""

from __future__ import annotations

from itertools import permutations

from store_kit import CAPACITY, FAR, A, B, answers, oid, put, sent_to

from hpcray.common.ids import make_proc
from hpcray.core.effects import Effect, ReadSpill, StartReceive, WriteSpill
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.core.object_store.stored_object import StoredObject, StoredObjectState
from hpcray.protocol import messages as m

SIZE = CAPACITY // 4 // 64 * 64
HALF = SIZE // 2
X = oid(1, FAR)
OTHER = make_proc(5, 2)
BOTH_ORDERS = list(permutations(("keep", "read")))


def ask(store: ObjectStore, what: str, ident: bytes = X, proc: bytes = FAR, now: float = 1.0) -> list[m.Message]:
    """What the store answers to a guest that wants to read, or to an owner that wants a copy kept."""
    keep = what == "keep"
    return sent_to(store.handle(now, proc, m.Open(ident, SIZE, [7] if keep else [], pin_replica=keep)), proc)


def give(store: ObjectStore, what: str, ident: bytes = X, proc: bytes = FAR, now: float = 5.0) -> list[Effect]:
    return store.handle(now, proc, m.Release([ident], unpin_replica=what == "keep"))


def parts(obj: StoredObject, proc: bytes = FAR) -> set[str]:
    """What a process has of an object."""
    return {name for name, has in (("keep", obj.replica_pinners), ("read", obj.pins)) if proc in has}


def show(messages: list[m.Message]) -> list[str]:
    return ["keep" if isinstance(msg, m.ReplicaPinned) else "read" for msg in messages]


def gives_both(store: ObjectStore, gives: tuple[str, ...]) -> None:
    """It gives up one, and has the other; then that."""
    obj = store.lifecycle.objects[X]
    for _ in range(2):  # the second time changes nothing
        give(store, gives[0])
        assert parts(obj) == {gives[1]}
        assert store.lifecycle.eviction.is_candidate(obj) == (gives[1] == "keep" and obj.spill_slot is not None)
    give(store, gives[1])
    assert parts(obj) == set() and store.lifecycle.eviction.is_candidate(obj)
    assert (FAR in store.lifecycle.clients.clients()) == (obj.announcer == FAR)


def on_disk(store: ObjectStore, kept: bool) -> None:
    """X is on disk, as a primary of this node or as a copy that its owner keeps here; three others are pinned."""
    if kept:
        receive = store.handle(0.0, FAR, m.Open(X, SIZE, [7], pin_replica=True))[0]
        assert isinstance(receive, StartReceive)
        store.receive_ended(0.0, receive.tag, None)
    else:
        put(store, X, SIZE)
    for counter in (2, 3, 4):
        put(store, oid(counter), SIZE, release=False)
    (write,) = answers(store.handle(0.0, B, m.Create(oid(5, B), SIZE)))
    assert isinstance(write, WriteSpill)
    store.spill_write_ended(0.0, None)
    assert store.lifecycle.objects[X].state is StoredObjectState.SPILLED


def make_room(store: ObjectStore) -> None:
    """B gives up what it was writing."""
    assert answers(store.handle(0.5, B, m.Release([oid(5, B)]))) == []


def leave_holes(store: ObjectStore) -> None:
    """There is as much room as X needs, but not in one piece: who asks for X waits."""
    make_room(store)
    for counter in (6, 7):
        store.handle(0.5, B, m.Create(oid(counter, B), HALF))
    store.handle(0.5, A, m.Release([oid(3)]))
    store.handle(0.5, A, m.Free([oid(3)], [2]))
    store.handle(0.5, B, m.Create(oid(8, B), HALF))
    store.handle(0.5, B, m.Release([oid(7, B)]))
    assert store.lifecycle.blocks.free_bytes == SIZE and store.lifecycle.blocks.largest_free == HALF


def restores(store: ObjectStore, effects: list[Effect]) -> int:
    """X is being read back; to where."""
    (read,) = (effect for effect in effects if isinstance(effect, ReadSpill))
    assert read.id == X and store.lifecycle.objects[X].state is StoredObjectState.RESTORING
    return read.piece.offset
