"""Tasks on their way: what the submitter knows of each until its reply."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from hpcray.wire.messages import Message, Shape


class Function:
    """A remote function as its submitter knows it: `blob` is what workers need to run it.

    us: running mean of the run time in microseconds, -1 until the first reply. It decides on pipelining.
    max_calls: a worker leaves after so many calls of it; 0 means never.
    """

    __slots__ = ("blob", "id", "max_calls", "name", "us")

    def __init__(self, ident: bytes, name: str, blob: bytes, max_calls: int = 0) -> None:
        self.id, self.name, self.blob, self.max_calls = ident, name, blob, max_calls
        self.us = -1.0


class Task:
    """One submitted task or actor call: enough to send it again.

    keep: the object refs that its arguments mention; they protect those objects until the reply.
    slots: the object ids of its top-level ref arguments, in slot order. attempt: runs beyond the first.
    """

    __slots__ = (
        "args", "attempt", "cancelled", "cost", "fn", "id", "keep", "klass", "method", "num_returns", "retries",
        "retry_exceptions", "slots", "waiting", "worker",
    )  # fmt: skip

    def __init__(
        self,
        ident: bytes,
        fn: Function | None,
        method: str,
        args: bytes,
        num_returns: int,
        keep: list[Any] | None,
        slots: list[bytes] | None,
        retries: int,
    ) -> None:
        self.id = ident
        self.fn = fn
        self.method = method
        self.args = args
        self.num_returns = num_returns
        self.keep = keep
        self.slots = slots
        self.retries = retries
        self.retry_exceptions: Any = False
        self.attempt = 0
        self.cost = 0.0
        self.waiting = 0
        self.cancelled = False
        self.klass: Any = None
        self.worker: bytes | None = None

    @property
    def name(self) -> str:
        """Function or method name, for people."""
        return self.fn.name if self.fn is not None else self.method


class LeasedWorker:
    """A worker that we hold a lease on.

    inflight: tasks sent and not answered, in order. load: their expected time in microseconds. reclaimed: others wait
    for its node, so it goes back once what it has is done. wanted: others wait, so it does not stay idle. leaving: it
    ends after the call that runs; nobody else can use it, so its lease ends with it. progress: time of its last answer,
    -1 where not known.
    """

    __slots__ = (
        "asked_back", "idle_since", "inflight", "klass", "lease", "leaving", "load", "proc", "progress", "reclaimed",
        "wanted",
    )  # fmt: skip

    def __init__(self, proc: bytes, lease: bytes, klass: LeaseClass, now: float) -> None:
        self.proc, self.lease, self.klass = proc, lease, klass
        self.inflight: dict[bytes, Task] = {}
        self.load = 0.0
        self.idle_since = now
        self.progress = now
        self.asked_back = False
        self.reclaimed = self.leaving = self.wanted = False


class LeaseClass:
    """Tasks that ask for the same thing of a node, and the workers leased for them.

    idle: those with nothing to do, the one used last at the end. ring: all, in the order in which they are tried next.
    promised: for some queued tasks the node to which their arguments are being fetched. passed: how often others were
    taken instead of the first one.
    """

    __slots__ = ("granted_local", "idle", "index", "passed", "promised", "queue", "ring", "sent_total", "shape")

    def __init__(self, index: int, shape: Shape) -> None:
        self.index, self.shape = index, shape
        self.queue: deque[Task] = deque()
        self.idle: dict[bytes, LeasedWorker] = {}
        self.ring: deque[LeasedWorker] = deque()
        self.promised: dict[bytes, int] = {}
        self.passed = 0
        self.granted_local = 0
        self.sent_total = 0


Push = Callable[[Task, bytes], None]
Send = Callable[[bytes, Message], None]
