"""What a process of the ownership simulation consists of: refs, views, frames, tasks, and values as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcray.common.ids import OBJECT_BYTES

if TYPE_CHECKING:
    from ownership_process import Process

LARGE = 1 << 20
OK, ERROR = b"\0", b"\2"


class Ref:
    """An ObjectRef: one live one counts one in the table."""

    __slots__ = ("id", "process")

    def __init__(self, process: Process, oid: bytes) -> None:
        self.process, self.id = process, oid
        process.live[oid] += 1

    @property
    def _id(self) -> bytes:
        return self.id

    def __del__(self) -> None:
        self.process.live[self.id] -= 1
        self.process.released.append(self.id)


class View:
    """A buffer in the arena of a node that a reader holds."""

    __slots__ = ("id", "node", "process")

    def __init__(self, process: Process, oid: bytes, node: int) -> None:
        self.process, self.id, self.node = process, oid, node

    def __del__(self) -> None:
        self.process.released.append((self.id,))


class Frame:
    """A running task, or (task None) what outlives tasks: the driver's globals, the state of an actor, a thread."""

    def __init__(self, task: bytes | None = None, submitter: bytes = b"") -> None:
        self.task = task
        self.submitter = submitter
        self.protected: list[bytes] | None = None if task is None else []
        self.vars: list[Ref] = []
        self.views: list[View] = []
        self.done = False


class Submitted:
    """A task on its way, or one that may have to run again, as its submitter knows it."""

    def __init__(self, ident: bytes, worker: bytes, args: list[Ref], slots: list[Ref], retries: int) -> None:
        self.id, self.worker = ident, worker
        self.args, self.slots = args, slots
        self.arg_ids, self.slot_ids = [ref.id for ref in args], [ref.id for ref in slots]
        self.retries = retries
        self.attempt = 0
        self.cancelled = False
        self.sent = False

    def let_go(self) -> None:
        """It is over: its arguments need no protection any more."""
        self.args, self.slots = [], []

    def count(self) -> None:
        """It runs once more."""
        self.retries -= self.retries > 0
        self.attempt += 1


def blob_of(refs: list[Ref]) -> bytes:
    for ref in refs:
        ref.process.world.noted(ref.process.table, ref.id)
    return b"".join(ref.id for ref in refs) + OK


def refs_in(blob: bytes) -> tuple[bytes, ...]:
    return tuple(blob[i : i + OBJECT_BYTES] for i in range(0, len(blob) - 1, OBJECT_BYTES))
