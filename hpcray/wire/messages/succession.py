"""Messages of the head's journal and of its succession. See `wire.messages`."""

from __future__ import annotations

from msgspec import Struct

from hpcray.wire.messages.gcs import GcsReply


class Change(Struct, array_like=True, frozen=True):
    """One row of the GCS's tables (`core.gcs.notes`) as it is now. row None: it is no more."""

    table: int
    key: bytes
    row: bytes | None


class Rows(Struct, array_like=True, tag=190):
    """g→r of the standby: what has changed. whole: these are all rows, the first time or anew. taken: by node, how many
    of its messages to the head are in it. answers: what processes will be told of it once the standby has it."""

    serial: int
    changes: list[Change]
    whole: bool
    taken: dict[int, int]
    answers: list[tuple[bytes, GcsReply]] = []


class RowsKept(Struct, array_like=True, tag=191):
    """Its answer."""

    serial: int


class HeadLost(Struct, array_like=True, tag=192):
    """r→r of the standby: I cannot reach the head. The standby finds out by itself whether it is dead."""

    node: int
    reason: str


class NewHead(Struct, array_like=True, tag=193):
    """The standby→every r: the head has died, and I am it now. taken: how many of your messages to the old one I know
    of; the others come again, then Held. reason, epoch: of the old head's death, as in NodeDied."""

    node: int
    term: int
    taken: int
    old: int
    reason: str
    epoch: int
