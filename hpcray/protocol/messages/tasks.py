"""Messages between processes: tasks, actor calls, streams, cancelling."""

from __future__ import annotations

from msgspec import Struct

from hpcray.protocol.messages.gcs import ArgRef


class FunctionDef(Struct, array_like=True, tag=80):
    """submitter→worker, once per connection and function, ahead of its first task. id: 16-byte digest of the blob.
    max_calls: the worker leaves after so many calls of it; 0 means never."""

    id: bytes
    name: str
    blob: bytes
    max_calls: int = 0


class PushTask(Struct, array_like=True, tag=81):
    """submitter→leased worker. args: serialized (args, kwargs) with placeholders for `refs` and `inline` values."""

    task: bytes
    fn: bytes
    args: bytes
    num_returns: int = 1
    refs: list[ArgRef] | None = None
    inline: list[bytes] | None = None


class ActorCall(Struct, array_like=True, tag=82):
    """caller→actor. Calls of one caller arrive, and start, in the order sent."""

    task: bytes
    method: str
    args: bytes
    num_returns: int = 1
    refs: list[ArgRef] | None = None
    inline: list[bytes] | None = None


class TaskDone(Struct, array_like=True, tag=83):
    """worker→submitter: one small return value. us: run time in microseconds."""

    task: bytes
    value: bytes
    us: int


class Returned(Struct, array_like=True):
    """One return value: inline (`size` 0) or in the worker's node store."""

    value: bytes
    size: int = 0
    contained: list[bytes] | None = None


class TaskReply(Struct, array_like=True, tag=84):
    """worker→submitter, the general form. status: 0 ok, 1 the user's exception (value of every return is the error
    blob), 2 cancelled. borrowed: refs from the arguments that the submitter owns and the worker still holds."""

    task: bytes
    status: int
    returns: list[Returned]
    us: int
    borrowed: list[bytes] | None = None


class ReturnTasks(Struct, array_like=True, tag=85):
    """submitter→worker: give back the sender's tasks that have not started. leaving: the answer to a worker that
    leaves, and the last message to it."""

    leaving: bool = False


class TasksReturned(Struct, array_like=True, tag=86):
    """worker→submitter: these tasks will not run here. requested: False when the worker returned them by itself
    because it blocks in get. leaving: nor will any other that was sent; the worker has had its `max_calls`, or
    (requested) runs its last call now."""

    tasks: list[bytes]
    requested: bool
    leaving: bool = False


class CancelTask(Struct, array_like=True, tag=87):
    """submitter→worker: cancel a task. force: kill the worker. recursive: cancel its child tasks, too."""

    task: bytes
    force: bool
    recursive: bool


class LeaseAttached(Struct, array_like=True, tag=88):
    """submitter→worker, ahead of its first task under a lease: what the lease holds, its environment, how it was
    placed."""

    resources: tuple[tuple[str, int], ...]
    env: tuple[tuple[str, str], ...] = ()
    strategy: str = ""


class CancelRef(Struct, array_like=True, tag=120):
    """borrower→owner: cancel the task that makes this object."""

    id: bytes
    force: bool
    recursive: bool


class CallOptions(Struct, array_like=True, tag=121):
    """submitter→worker, ahead of a task or call that has options of its own. name: its option `name`; group: its
    concurrency group; skip: how many of the values that it yields came from an earlier run; window: how many may be
    sent that were not taken, -1: any number; missing: the only returns that its owner lacks, None: all; per_yield: how
    many values each `yield` gives; transport: of the tensors in its values, which stay where they are made."""

    task: bytes
    name: str = ""
    group: str = ""
    skip: int = 0
    window: int = -1
    missing: list[int] | None = None
    per_yield: int = 1
    transport: str = ""


class StreamItem(Struct, array_like=True, tag=122):
    """worker→submitter: value number `index` of what a task (`num_returns` -1) yields, from 0."""

    task: bytes
    index: int
    item: Returned


class StreamTaken(Struct, array_like=True, tag=123):
    """submitter→worker: the consumer has taken `count` values of a stream."""

    task: bytes
    count: int


class ResidentMoved(Struct, array_like=True, tag=126):
    """worker that ends→owner of a value: the part of it that stayed in the worker, its object `resident`, is with the
    rest of it now: in `value`, the blob, or, where that is empty, in the store of the worker's node, `size` bytes in
    all."""

    id: bytes
    resident: bytes
    value: bytes
    size: int = 0
