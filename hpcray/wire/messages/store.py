"""Messages of the node store. See `wire.messages`."""

from __future__ import annotations

from msgspec import Struct

from hpcray.wire.messages.gcs import ArgRef


class Create(Struct, array_like=True, tag=60):
    """p→own r: allocate `size` bytes for this object. Answer: Created or StoreError."""

    id: bytes
    size: int


class Created(Struct, array_like=True, tag=61):
    """r→p. The object is unsealed and pinned by its creator."""

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
    """p→own r: pin the object for me; pull it from one of `nodes` if it is not here. Answer: Opened or StoreError.
    p→r of a neighbour: the same, to read it there in place.

    priority: 0 somebody waits for it (get), 1 somebody asked whether it is here (wait), 2 it is fetched ahead. keep:
    (p→other r) not to read it; keep a copy there, in memory or on disk, until I Release it so. Answer: Kept. (p→own r)
    What I have pinned took the primary's place; keep it, in memory or on disk, until it is freed. No answer.
    """

    id: bytes
    size: int
    nodes: list[int]
    priority: int = 0
    keep: bool = False


class Hurry(Struct, array_like=True, tag=73):
    """p→r: the Open that I have under way there has this priority now. No answer."""

    id: bytes
    priority: int


class Prefetch(Struct, array_like=True, tag=74):
    """p→any r: these will soon be read on your node: have them there, if there is room. No answer to me; of a copy that
    is made, the owner is told (AddLocation)."""

    refs: list[ArgRef]


class OnDisk(Struct, array_like=True, tag=75):
    """r→p, in answer to Open: it is on disk, and there is no room to bring it back. Read `size` bytes at `position` of
    the file `path` by yourself, then say DiskRead."""

    id: bytes
    path: str
    position: int
    size: int


class DiskRead(Struct, array_like=True, tag=76):
    """p→own r: I do not need the file of this object any more. Answers one OnDisk.

    error: why it could not be read; this is an Open(id, size, nodes) then.
    """

    id: bytes
    error: str = ""
    size: int = 0
    nodes: list[int] = []


class Opened(Struct, array_like=True, tag=65):
    """r→p, which maps that store. pulled: a copy was made there for it (the opener tells the owner: AddLocation)."""

    id: bytes
    offset: int
    size: int
    pulled: bool


class Kept(Struct, array_like=True, tag=77):
    """r→p: the copy is here and stays until you Release(keep) it. reason: why it is not, or does not stay any more."""

    id: bytes
    reason: str = ""


class Release(Struct, array_like=True, tag=66):
    """p→r: my pins on these objects are gone (one pin per process and object, however many views).

    keep: (p→other r) not my pins, but my wish that they be kept there.
    """

    ids: list[bytes]
    keep: bool = False


class Free(Struct, array_like=True, tag=67):
    """owner→own r→the rs of `nodes`: no reference is left; drop the object when its last pin goes."""

    ids: list[bytes]
    nodes: list[int]


class Unpin(Struct, array_like=True, tag=70):
    """r→p that has pins there: room is short; Release what is pinned and nobody reads, up to about `size` bytes."""

    size: int


class ListStore(Struct, array_like=True, tag=71):
    """p→any r: what is in your store? The `limit` largest objects. Answer: GcsReply(req)."""

    req: int
    limit: int


class Pull(Struct, array_like=True, tag=68):
    """destination r→source r: send object `id` over the data plane, in chunks of `chunk` bytes (0: in one piece) from
    number `first` on; the first one has this tag, those of the others follow. Answer: the bytes, or PullElsewhere, or
    PullRefused.

    root, order: node `root` sent us to you with this number. whole: do not send me elsewhere; refuse if the object is
    not complete with you.
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
    """source r→destination r: many want the object; ask `node`, which is receiving it. You are number `order`."""

    id: bytes
    tag: int
    node: int
    order: int


class PullRefused(Struct, array_like=True, tag=69):
    """source r→destination r: it is not (or no longer) here; full: it is, on disk, but there is no room to read it.
    nodes: who may have it. again: only the order among the readers has changed, ask whom you asked first."""

    id: bytes
    tag: int
    reason: str
    full: bool = False
    nodes: list[int] = []
    again: bool = False
