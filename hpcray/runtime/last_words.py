"""The last answers of actors on other nodes.

That an actor has ended is the head's word. What the actor had answered before comes on another way, which may be the
slower one. On that way its raylet says, after all that its worker has sent, that the worker is gone; so may our own
raylet, when the actor's node is dead. Until one of them has spoken the calls in flight stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hpcray.base.ids import node_of
from hpcray.runtime.actor_client import ActorClient
from hpcray.runtime.engine import monotonic

if TYPE_CHECKING:
    from hpcray.runtime.process import Process

PATIENCE = 5.0
"""Seconds. A worker may outlive its actor for longer: hooks of the user's run when it exits."""


class LastWords:
    """Of one process (lock held).

    Args:
        end: all is known of the calls in flight that such a worker had: they are answered, or over.
    """

    def __init__(self, process: Process, end: Callable[[bytes, ActorClient], None]) -> None:
        self._process = process
        self._end = end
        self._open: dict[bytes, ActorClient] = {}

    def wait(self, client: ActorClient) -> bool:
        """Its actor has ended; whether `end` will be called later. Until then calls are sent to no worker."""
        worker = client.worker
        if not worker:
            return client in self._open.values()
        if node_of(worker) == self._process.node:
            self._process.engine.read_rest(worker)
            return False
        client.worker = b""
        self._open[worker] = client
        self._process.engine.add_timer(monotonic() + PATIENCE, lambda now: self.heard(worker))
        return True

    def heard(self, worker: bytes) -> None:
        """Nothing of this worker can come any more."""
        client = self._open.pop(worker, None)
        if client is not None:
            self._end(worker, client)

    def news(self, client: ActorClient) -> None:
        """The head says more of an actor: what was waited for is over."""
        for worker in [worker for worker, other in self._open.items() if other is client]:
            self.heard(worker)
