"""Short ways to drive one node store: that of node 2, with room for a thousand units of 64 bytes."""

from __future__ import annotations

from hpcray.common.ids import PUT_INDEX, make_proc, raylet_of
from hpcray.core.effects import Effect, Send, StartReceive
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.protocol import messages as m

CAPACITY = 1000 * 64
BIG = 600 * 64
A, B, C = (make_proc(2, number) for number in (1, 2, 3))
FAR = make_proc(5, 1)


def oid(counter: int, owner: bytes = A) -> bytes:
    return owner + counter.to_bytes(5, "big") + PUT_INDEX


def answers(effects: list[Effect]) -> list[Effect]:
    """Without what a store that is short of room says to everybody."""
    return [effect for effect in effects if not (isinstance(effect, Send) and isinstance(effect.msg, m.Unpin))]


def sent_to(effects: list[Effect], dest: bytes) -> list[m.Message]:
    return [effect.msg for effect in effects if isinstance(effect, Send) and effect.dest == dest]


def only(effects: list[Effect], dest: bytes) -> m.Message:
    effects = answers(effects)
    (msg,) = sent_to(effects, dest)
    assert len(effects) == 1
    return msg


def put(store: ObjectStore, ident: bytes, size: int = 640, proc: bytes = A, release: bool = True) -> int:
    created = only(store.handle(0.0, proc, m.Create(ident, size)), proc)
    assert isinstance(created, m.Created)
    assert store.handle(0.0, proc, m.Seal(ident)) == []
    if release:
        assert store.handle(0.0, proc, m.Release([ident])) == []
    return created.offset


def start_pull(
    store: ObjectStore, ident: bytes, nodes: list[int], proc: bytes = A, size: int = 640, now: float = 0.0
) -> StartReceive:
    receive, ask = store.handle(now, proc, m.Open(ident, size, nodes))
    assert isinstance(receive, StartReceive)
    assert ask == Send(raylet_of(receive.node), m.Pull(ident, receive.tag, size))
    return receive


def pull(store: ObjectStore, ident: bytes, size: int = 640, proc: bytes = A, release: bool = True) -> int:
    receive = start_pull(store, ident, [7], proc, size)
    opened = only(store.receive_ended(0.0, receive.tag, None), proc)
    assert opened == m.Opened(ident, receive.offset, size, True)
    if release:
        store.handle(0.0, proc, m.Release([ident]))
    return receive.offset
