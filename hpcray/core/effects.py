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
    """SIGKILL this worker of our node."""

    worker: bytes


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


Effect = Union[Send, ForkWorker, KillWorker, StartReceive, CancelReceive, StartSend]
