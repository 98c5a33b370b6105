"""What the pure cores ask the shells to do. Cores return lists of these; shells carry them out in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from hpcray.wire.messages import Message


@dataclass(slots=True, frozen=True)
class Send:
    """Send a message to any process of the job (raylets and the GCS included)."""

    dest: bytes
    msg: Message


@dataclass(slots=True, frozen=True)
class ForkWorker:
    """Fork a worker with this process number and these extra environment variables."""

    number: int
    env: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True, frozen=True)
class KillWorker:
    """SIGKILL this worker of our node. reason: why, for those who hear of its death; "": as the kernel has it."""

    worker: bytes
    reason: str = ""


@dataclass(slots=True, frozen=True)
class StartReceive:
    """Receive `size` bytes from raylet `node` with `tag` into the arena at `offset`; report the end to the store."""

    id: bytes
    node: int
    tag: int
    offset: int
    size: int


@dataclass(slots=True, frozen=True)
class CancelReceive:
    """The receive with this tag will not come."""

    tag: int


@dataclass(slots=True, frozen=True)
class StartSend:
    """Send `size` bytes of the arena at `offset` to raylet `node` with `tag`; report the end to the store."""

    id: bytes
    node: int
    tag: int
    offset: int
    size: int


@dataclass(slots=True, frozen=True)
class Piece:
    """Bytes that lie at `offset` in the arena and belong at `position` in a segment on disk."""

    offset: int
    size: int
    position: int


@dataclass(slots=True, frozen=True)
class WriteSpill:
    """Write these pieces to a segment, which is made if it does not exist; report the end to the store."""

    number: int
    segment: int
    pieces: tuple[Piece, ...]


@dataclass(slots=True, frozen=True)
class ReadSpill:
    """Read a piece of a segment into the arena, or a slot behind it; report the end to the store, with `id`."""

    id: bytes
    segment: int
    piece: Piece


@dataclass(slots=True, frozen=True)
class LendSpilled:
    """Tell a process of this node where on disk an object lies (OnDisk); the store hears of its DiskRead."""

    proc: bytes
    id: bytes
    segment: int
    position: int
    size: int


@dataclass(slots=True, frozen=True)
class DiscardSpilled:
    """These bytes of a segment matter no more; last: neither does any other, close it."""

    segment: int
    position: int
    size: int
    last: bool


Effect = Union[
    Send, ForkWorker, KillWorker, StartReceive, CancelReceive, StartSend, WriteSpill, ReadSpill, DiscardSpilled,
    LendSpilled,
]
