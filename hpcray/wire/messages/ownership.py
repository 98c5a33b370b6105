"""Messages between processes: ownership. See `wire.messages`."""

from __future__ import annotations

from msgspec import Struct


class ObjectGet(Struct, array_like=True, tag=90):
    """p→owner: tell me when this object is ready. Answer: ObjectReady (perhaps much later)."""

    id: bytes


class ObjectReady(Struct, array_like=True, tag=91):
    """owner→p. The value (size 0), or where its copies are. status: 0 ok, 2 unknown here (freed). made: so many times
    it was lost and made again."""

    id: bytes
    status: int
    value: bytes
    size: int
    nodes: list[int]
    made: int = 0


class BorrowAdd(Struct, array_like=True, tag=92):
    """p→owner: I hold these; or, with another `borrower`: keep these for it until it takes them (a pledge). seq > 0:
    answer with BorrowAck(seq)."""

    ids: list[bytes]
    borrower: bytes
    seq: int


class BorrowAck(Struct, array_like=True, tag=93):
    """owner→p. seq 0: no answer, only so that we hear of each other's death."""

    seq: int


class BorrowDrop(Struct, array_like=True, tag=94):
    """p→owner: `borrower` holds one count less of each of these."""

    ids: list[bytes]
    borrower: bytes


class AddLocation(Struct, array_like=True, tag=95):
    """p→owner: this node has a sealed copy now."""

    id: bytes
    node: int


class BorrowTake(Struct, array_like=True, tag=96):
    """p→owner: what `giver` had you keep for me I hold myself now."""

    ids: list[bytes]
    giver: bytes


class BorrowAsk(Struct, array_like=True, tag=97):
    """owner→p: `giver` is dead, and had me keep objects for you. Say when nothing of it can reach you any more."""

    giver: bytes


class BorrowEnd(Struct, array_like=True, tag=98):
    """p→owner, answer to BorrowAsk: what I have not taken by now I never will."""

    giver: bytes


class FreeAsked(Struct, array_like=True, tag=99):
    """p→owner: its user wants these gone, whoever refers to them."""

    ids: list[bytes]


class ListRefs(Struct, array_like=True, tag=100):
    """p→owner: what do you know of these? Answer: GcsReply(req)."""

    req: int
    ids: list[bytes]


class ObjectLost(Struct, array_like=True, tag=101):
    """p→owner: none of these nodes has the object. Answer: ObjectReady, with other places, when it was made again, or
    with the error. made: as in the ObjectReady that named the nodes."""

    id: bytes
    made: int
    nodes: list[int]
    reason: str
