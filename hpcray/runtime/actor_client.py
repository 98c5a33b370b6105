"""One actor as its callers see it."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from hpcray.base.errors import PendingCallsLimitExceeded
from hpcray.core.owner.tasks import Task
from hpcray.runtime.refs import ObjectRef

PENDING, ALIVE, RESTARTING, DEAD = "PENDING", "ALIVE", "RESTARTING", "DEAD"


class ActorClient:
    """One actor as this process sees it.

    queue: calls not sent yet, in order; the head may wait for its arguments. inflight: sent, not answered.
    out_of_order: calls may overtake those that wait for their arguments; these are in `late` until they are ready.
    hold: the ref that keeps the actor alive, as long as there are such calls: a handle may die before they are done.
    creation_keep: the refs in the constructor's arguments, of an actor that we created, as long as it may run again.
    killed: its worker, after we have had it killed and until we hear what becomes of it; calls wait meanwhile.
    restartable: whether it may run again after it was up. detached: whether handles to it are not counted.
    """

    __slots__ = (
        "actor", "class_name", "creation_keep", "detached", "error", "hold", "inflight", "killed", "late",
        "out_of_order", "queue", "reason", "restartable", "state", "worker",
    )  # fmt: skip

    def __init__(self, actor: bytes, class_name: str, out_of_order: bool) -> None:
        self.actor = actor
        self.class_name = class_name
        self.out_of_order = out_of_order
        self.late: dict[bytes, Task] = {}
        self.hold: Any = None
        self.state = PENDING
        self.worker = self.killed = b""
        self.reason = ""
        self.error = b""
        self.queue: deque[Task] = deque()
        self.inflight: dict[bytes, Task] = {}
        self.creation_keep: Any = None
        self.restartable = self.detached = False

    def kill(self) -> None:
        """It was told to die: what is called from now on must not reach the worker that it still has."""
        if self.worker:
            self.killed, self.worker = self.worker, b""

    def heard(self) -> None:
        """It is known what becomes of it."""
        if self.killed:
            self.worker, self.killed = self.killed, b""

    def check_limit(self, limit: int) -> None:
        """Raise PendingCallsLimitExceeded when one more call would be too many; limit: -1 for none."""
        if 0 <= limit <= len(self.inflight) + len(self.queue) + len(self.late):
            raise PendingCallsLimitExceeded(
                f"actor {self.actor.hex()} has {limit} pending calls; hint: raise max_pending_calls, or wait"
            )


class Handle(Protocol):
    """What a call needs of an `api.actor.ActorHandle`."""

    _actor: bytes
    _class_name: str
    _limit: int
    _keep: ObjectRef[Any] | None
    _out_of_order: bool
