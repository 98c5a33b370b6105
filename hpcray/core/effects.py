"""What the pure cores ask the shells to do. Cores return lists of these; shells carry them out in order.

They are made by the hundred thousand: a `Struct` costs a quarter of what a frozen dataclass does.
"""

from __future__ import annotations

from typing import Union

from msgspec import Struct

from hpcray.protocol.messages import Message


class Send(Struct, frozen=True):
    """Send a message to any process of the job (raylets and the GCS included)."""

    dest: bytes
    msg: Message


class ForkWorker(Struct, frozen=True):
    """Fork a worker with this process number and these extra environment variables."""

    number: int
    env: tuple[tuple[str, str], ...] = ()


class Preload(Struct, frozen=True):
    """Import these modules before the next worker is forked, with these environment variables set."""

    modules: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()


class KillWorker(Struct, frozen=True):
    """SIGKILL this worker of our node. reason: why, for those who hear of its death; "": its work is not needed, and
    it may leave by itself first."""

    worker: bytes
    reason: str = ""


class StartReceive(Struct, frozen=True):
    """Receive `size` bytes from raylet `node` with `tag` into the arena at `offset`; report the end to the store."""

    id: bytes
    node: int
    tag: int
    offset: int
    size: int


class CancelReceive(Struct, frozen=True):
    """The receive with this tag will not come."""

    tag: int


class StartSend(Struct, frozen=True):
    """Send `size` bytes of the arena at `offset` to raylet `node` with `tag`; report the end to the store."""

    id: bytes
    node: int
    tag: int
    offset: int
    size: int


class Piece(Struct, frozen=True):
    """Bytes that lie at `offset` in the arena and belong at `position` in a segment on disk."""

    offset: int
    size: int
    position: int


class WriteSpill(Struct, frozen=True):
    """Write these pieces to a segment, which is made if it does not exist; report the end to the store."""

    number: int
    segment: int
    pieces: tuple[Piece, ...]


class ReadSpill(Struct, frozen=True):
    """Read a piece of a segment into the arena, or a slot behind it; report the end to the store, with `id`."""

    id: bytes
    segment: int
    piece: Piece


class LendSpilled(Struct, frozen=True):
    """Tell a process of this node where on disk an object lies (OnDisk); the store hears of its DiskRead."""

    proc: bytes
    id: bytes
    segment: int
    position: int
    size: int


class ReserveOverflow(Struct, frozen=True):
    """Reserve disk space for these bytes of the overflow file; report the end to the store, with `id`."""

    id: bytes
    position: int
    size: int


class ReleaseOverflow(Struct, frozen=True):
    """Give the disk space of these bytes of the overflow file back."""

    position: int
    size: int


class DiscardSpilled(Struct, frozen=True):
    """These bytes of a segment matter no more; last: neither does any other, close it."""

    segment: int
    position: int
    size: int
    last: bool


Effect = Union[
    Send, ForkWorker, Preload, KillWorker, StartReceive, CancelReceive, StartSend, WriteSpill, ReadSpill,
    DiscardSpilled, LendSpilled, ReserveOverflow, ReleaseOverflow,
]  # fmt: skip
