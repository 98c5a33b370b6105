"""Questions to the GCS, and what was learned of the cluster's nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from hpcray.base.errors import LocalRayletDiedError
from hpcray.base.ids import HEAD
from hpcray.core.owner.table import Waiter
from hpcray.runtime.engine import monotonic
from hpcray.wire import messages as m

if TYPE_CHECKING:
    from hpcray.runtime.process import Process


class GcsClient:
    """One process's requests to the GCS."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._engine = process.engine
        self._last = 0
        self._replies: dict[int, Any] = {}
        self._questions: dict[int, m.Message] = {}
        self._asked: list[dict[bytes, int]] = []
        self._node_indices: dict[str, int] = {}

    def call(self, method: str, *args: Any) -> Any:
        """One query to the GCS. Raises ValueError with its message when it refuses."""
        packed = msgspec.msgpack.encode(args)
        with self._engine.lock:
            reply = self.ask(lambda request: m.GcsCall(request, method, packed))
        if not reply.ok:
            raise ValueError(reply.value.decode())
        return msgspec.msgpack.decode(reply.value)

    def nodes(self) -> list[dict[str, Any]]:
        """The cluster's nodes, in the form of `ray.nodes()`."""
        found: list[dict[str, Any]] = self.call("nodes")
        self._node_indices = {node["NodeID"]: node["Index"] for node in found}
        return found

    def node_index(self, node_id: str) -> int | None:
        """Index of the node with this id; None when there is none."""
        if node_id not in self._node_indices:
            self.nodes()
        return self._node_indices.get(node_id)

    def node_ids(self) -> list[str]:
        """Ids of all nodes known."""
        return list(self._node_indices)

    def ask_many(
        self,
        questions: Mapping[bytes, Callable[[int], m.Message]],
        timeout: float,
        gone: set[bytes] | None = None,
    ) -> dict[bytes, Any]:
        """Ask raylets and processes, all at once; the values of those that answered, and lived to, within `timeout` s.

        Args:
            questions: for each process or raylet, what makes the message of a request number. Answers are GcsReplies.
            gone: takes those that had ended, or did so before they answered.
        """
        deadline = monotonic() + timeout
        found: dict[bytes, Any] = {}
        with self._engine.lock:
            asked = {proc: self.next_request() for proc in questions}
            self._asked.append(asked)
            try:
                for proc, request in asked.items():
                    self._engine.send(proc, questions[proc](request))
                for request in asked.values():
                    waiter = self._replies[request]
                    if isinstance(waiter, Waiter):
                        self._process.block(waiter, deadline)
            finally:
                self._asked.remove(asked)
                replies = {proc: self._replies.pop(request) for proc, request in asked.items()}
        for proc, reply in replies.items():
            if isinstance(reply, m.GcsReply) and reply.ok:
                found[proc] = msgspec.msgpack.decode(reply.value)
            elif isinstance(reply, Waiter) and reply.count <= 0 and gone is not None:
                gone.add(proc)
        return found

    def next_request(self) -> int:
        """A number for a request whose GcsReply is waited for (lock held)."""
        self._process.check_alive()
        self._last += 1
        self._replies[self._last] = Waiter()
        return self._last

    def ask(self, question: Callable[[int], m.Message]) -> m.GcsReply:
        """The GCS's answer (lock held; released while waiting). Should the head move meanwhile, it is asked again.

        Args:
            question: makes the message of a request number. The GCS answers the same number in the same way.
        """
        request = self.next_request()
        message = self._questions[request] = question(request)
        self._engine.send(HEAD, message)
        try:
            self._process.block(self._replies[request], None)
        finally:
            del self._questions[request]
            reply = self._replies.pop(request)
        if not isinstance(reply, m.GcsReply):
            raise LocalRayletDiedError(self._process.dead or "the raylet is gone")
        return reply

    def on_reply(self, msg: m.GcsReply) -> None:
        """The GCS answered (lock held)."""
        waiter = self._replies.get(msg.req)
        if isinstance(waiter, Waiter):
            self._replies[msg.req] = msg
            waiter.count = 0
            self._engine.notify(waiter)

    def head_moved(self) -> None:
        """An answer may have gone down with the old head: ask the new one, in the same order (lock held)."""
        for question in self._questions.values():
            self._engine.send(HEAD, question)

    def process_died(self, proc: bytes) -> None:
        """It will not answer (lock held)."""
        for asked in self._asked:
            waiter = self._replies.get(asked.get(proc, -1))
            if isinstance(waiter, Waiter):
                waiter.count = 0
                self._engine.notify(waiter)

    def fail(self) -> None:
        """Our raylet is gone: whoever waits for an answer wakes (lock held)."""
        for waiter in self._replies.values():
            if isinstance(waiter, Waiter):
                waiter.count = 0
                self._engine.notify(waiter)
