"""Messages of the object store."""

from __future__ import annotations

from msgspec import Struct

from hpcray.protocol.messages.gcs import ArgRef

PLAIN, MULTI, ERROR = 0, 1, 2
"""The last byte of a blob (a serialized value): how the rest is laid out, see `protocol.serialization`."""


def is_error(blob: bytes | memoryview) -> bool:
    """Whether the blob holds an exception to be raised."""
    return blob[-1] == ERROR


class Create(Struct, array_like=True, tag=60):
    """p→own r: allocate `size` bytes for this object. Answer: Created or StoreError."""

    id: bytes
    size: int


class Created(Struct, array_like=True, tag=61):
    """r→p: answer to Create. The object is unsealed and pinned by its creator."""

    id: bytes
    offset: int
    size: int


class StoreError(Struct, array_like=True, tag=62):
    """r→p: Create or Open failed. kind: "full", "lost", "exists"."""

    id: bytes
    kind: str
    reason: str


class Seal(Struct, array_like=True, tag=63):
    """p→own r: the bytes are written; they never change again. The creator's pin stays until Release."""

    id: bytes


class Open(Struct, array_like=True, tag=64):
    """p→own r: pin the object for the sender; pull it from one of `nodes` if necessary. Answer: Opened or StoreError.
    p→r of a neighbor: the same, to read it there in place.

    priority: 0 a get waits for it, 1 a wait needs it, 2 it is prefetched. pin_replica: the sender does not read the
    object; the replica there stays, in memory or on disk, until the sender releases it with `unpin_replica`. Answer:
    ReplicaPinned. pin_replica without `nodes`, to the own r: the replica that the sender has pinned took the primary's
    place; it stays, in memory or on disk, until it is freed. No answer.
    """

    id: bytes
    size: int
    nodes: list[int]
    priority: int = 0
    pin_replica: bool = False


class RaisePriority(Struct, array_like=True, tag=73):
    """p→r: the Open that the sender has under way there has this priority now. No answer."""

    id: bytes
    priority: int


class Prefetch(Struct, array_like=True, tag=74):
    """p→any r: these objects will soon be read on the receiver's node: pull them, if there is room. No answer to the
    sender; the owner of a replica that is made gets AddLocation."""

    refs: list[ArgRef]


class OnDisk(Struct, array_like=True, tag=75):
    """r→p, in answer to Open: the object is on disk, and there is no room to bring it back. The process reads `size`
    bytes at `position` of the file `path` by itself, then sends DiskRead."""

    id: bytes
    path: str
    position: int
    size: int


class DiskRead(Struct, array_like=True, tag=76):
    """p→own r: the sender does not need the file of this object any more. Each OnDisk is answered by one DiskRead.

    error: why it could not be read; the message counts as an Open(id, size, nodes) then.
    """

    id: bytes
    error: str = ""
    size: int = 0
    nodes: list[int] = []


class Opened(Struct, array_like=True, tag=65):
    """r→p: answer to Open; the process maps that store. pulled: a copy was made there for it, and the process sends the
    owner AddLocation."""

    id: bytes
    offset: int
    size: int
    pulled: bool


class ReplicaPinned(Struct, array_like=True, tag=77):
    """r→p: the replica is here and stays until Release(unpin_replica). reason: why it is not, or stays no longer."""

    id: bytes
    reason: str = ""


class Release(Struct, array_like=True, tag=66):
    """p→r: the pins of the sender on these objects are gone (one pin per process and object, however many views).

    unpin_replica: not the pins, but the request Open(pin_replica) is withdrawn.
    """

    ids: list[bytes]
    unpin_replica: bool = False


class Free(Struct, array_like=True, tag=67):
    """owner→own r→r of each of `nodes`: no reference is left; the objects go with their last pins."""

    ids: list[bytes]
    nodes: list[int]


class Unpin(Struct, array_like=True, tag=70):
    """r→p with pins there: room is short; release what is pinned and not read, up to about `size` bytes."""

    size: int


class ListStore(Struct, array_like=True, tag=71):
    """p→any r: list the `limit` largest objects of the store. Answer: GcsReply(req)."""

    req: int
    limit: int


class Pull(Struct, array_like=True, tag=68):
    """destination r→source r: send object `id` over the data plane, in chunks of `chunk` bytes (0: in one piece) from
    number `first` on; the first one has this tag, those of the others follow. Answer: the bytes, or PullElsewhere, or
    PullRefused.

    root, order: node `root` sent the asker here with this number. whole: do not redirect; refuse if the object is not
    complete here.
    """

    id: bytes
    tag: int
    size: int
    chunk: int = 0
    first: int = 0
    root: int = -1
    order: int = -1
    whole: bool = False


class PullElsewhere(Struct, array_like=True, tag=72):
    """source r→destination r: many nodes pull the object; ask `node`, which is receiving it, as number `order`."""

    id: bytes
    tag: int
    node: int
    order: int


class PullRefused(Struct, array_like=True, tag=69):
    """source r→destination r: the object is not (or no longer) here. full: it is, on disk, but there is no room to
    read it. nodes: may have it. again: only the order among the readers has changed, ask the first source again.
    link_broken: the data link broke while it was sent; it is still here."""

    id: bytes
    tag: int
    reason: str
    full: bool = False
    nodes: list[int] = []
    again: bool = False
    link_broken: bool = False


class ObjectGet(Struct, array_like=True, tag=90):
    """p→owner: request the value or the locations of an object. Answer: ObjectReady, once it is ready."""

    id: bytes


class ObjectReady(Struct, array_like=True, tag=91):
    """owner→p: the value (size 0), or where its copies are. status: 0 ok, 2 unknown here (freed). remake_count: how
    often the object was lost and reconstructed."""

    id: bytes
    status: int
    value: bytes
    size: int
    nodes: list[int]
    remake_count: int = 0


class BorrowAdd(Struct, array_like=True, tag=92):
    """p→owner: `borrower`, the sender itself, holds these; another `borrower`: keep these for it until it takes
    them (a pledge). seq > 0: the answer is BorrowAck(seq)."""

    ids: list[bytes]
    borrower: bytes
    seq: int


class BorrowAck(Struct, array_like=True, tag=93):
    """owner→p: answer to BorrowAdd. seq 0: no answer, only so that each of the two learns of the other's death."""

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
    """p→owner: the sender itself holds now what `giver` had the owner keep for it."""

    ids: list[bytes]
    giver: bytes


class KeepCopies(Struct, array_like=True, tag=222):
    """owner→p: the owner's node leaves the job. Have your node keep these objects for you, then drop your borrows.
    contained: by object, the refs inside its value; hold these too. The owner sends it again while you borrow them."""

    ids: list[bytes]
    contained: dict[bytes, list[bytes]] = {}


class SettleBorrows(Struct, array_like=True, tag=97):
    """owner→p: `giver` is dead, and had the owner keep objects for the receiver. Answer: BorrowsSettled, when
    nothing of the giver can reach the receiver any more."""

    giver: bytes


class BorrowsSettled(Struct, array_like=True, tag=98):
    """p→owner: what the sender has not taken of the giver's pledges by now it never will."""

    giver: bytes


class FreeRequest(Struct, array_like=True, tag=99):
    """p→owner: free these objects, whatever refers to them."""

    ids: list[bytes]


class ListRefs(Struct, array_like=True, tag=100):
    """p→owner: what does the owner know of these objects? Answer: GcsReply(req)."""

    req: int
    ids: list[bytes]


class ObjectLost(Struct, array_like=True, tag=101):
    """p→owner: none of these nodes has the object. Answer: ObjectReady, with other locations, when it was
    reconstructed, or with the error. remake_count: as in the ObjectReady that named the nodes. resident: the
    object that stays in a process and is a part of its value, where it is this part that is lost, with its process."""

    id: bytes
    remake_count: int
    nodes: list[int]
    reason: str
    resident: bytes = b""


# ------------------------------------------------------------ overflow
# Offsets of objects in a node's store.


OVERFLOW = 1 << 48
"""Offsets from here on are positions in a store's overflow file, not in its arena."""
