"""Requests to the GCS and to other processes, and the nodes that the GCS has listed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from hpcray.common.exceptions import LocalRayletDiedError
from hpcray.common.ids import HEAD
from hpcray.core.core_worker.object_table import Waiter
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.context import CoreWorkerContext
from hpcray.runtime.core_worker.io_engine import monotonic


class GcsClient:
    """One process's requests to the GCS."""

    def __init__(self, context: CoreWorkerContext) -> None:
        self._context = context
        self._engine = context.engine
        self._last = 0
        self._replies: dict[int, Any] = {}
        self._questions: dict[int, m.Message] = {}
        self._open_requests: list[dict[bytes, int]] = []
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
        self, questions: Mapping[bytes, Callable[[int], m.Message]], timeout: float, gone: set[bytes] | None = None
    ) -> dict[bytes, Any]:
        """Ask raylets and processes, all at once; the values of those that answered, and lived to, within `timeout` s.

        Args:
            questions: for each process or raylet, what makes the message of a request number. Answers are GcsReplies.
            gone: takes those that had ended, or did so before they answered.
        """
        deadline = monotonic() + timeout
        found: dict[bytes, Any] = {}
        with self._engine.lock:
            requests = {proc: self.next_request() for proc in questions}
            self._open_requests.append(requests)
            try:
                for proc, request in requests.items():
                    self._engine.send(proc, questions[proc](request))
                for request in requests.values():
                    waiter = self._replies[request]
                    if isinstance(waiter, Waiter):
                        self._context.block(waiter, deadline)
            finally:
                self._open_requests.remove(requests)
                replies = {proc: self._replies.pop(request) for proc, request in requests.items()}
        for proc, reply in replies.items():
            if isinstance(reply, m.GcsReply) and reply.ok:
                found[proc] = msgspec.msgpack.decode(reply.value)
            elif isinstance(reply, Waiter) and reply.count <= 0 and gone is not None:
                gone.add(proc)
        return found

    def next_request(self) -> int:
        """A number for a request whose GcsReply is waited for (lock held)."""
        self._context.check_alive()
        self._last += 1
        self._replies[self._last] = Waiter()
        return self._last

    def ask(self, question: Callable[[int], m.Message]) -> m.GcsReply:
        """Request an answer of the GCS (lock held; released while waiting), again if the head moves meanwhile.

        Args:
            question: makes the message of a request number. The GCS answers a repeated number as the first time.
        """
        request = self.next_request()
        message = self._questions[request] = question(request)
        self._engine.send(HEAD, message)
        try:
            self._context.block(self._replies[request], None)
        finally:
            del self._questions[request]
            reply = self._replies.pop(request)
        if not isinstance(reply, m.GcsReply):
            raise LocalRayletDiedError(self._context.dead or "the raylet is gone")
        return reply

    def on_reply(self, msg: m.GcsReply) -> None:
        """The GCS answered (lock held)."""
        waiter = self._replies.get(msg.req)
        if isinstance(waiter, Waiter):
            self._replies[msg.req] = msg
            waiter.count = 0
            self._engine.notify(waiter)

    def head_moved(self) -> None:
        """Send open requests to the new head, in the same order: answers of the old one may be lost (lock held)."""
        for question in self._questions.values():
            self._engine.send(HEAD, question)

    def process_died(self, proc: bytes) -> None:
        """Wake those who wait for a reply of a dead process (lock held)."""
        for requests in self._open_requests:
            waiter = self._replies.get(requests.get(proc, -1))
            if isinstance(waiter, Waiter):
                waiter.count = 0
                self._engine.notify(waiter)

    def fail(self) -> None:
        """Our raylet is gone: whoever waits for an answer wakes (lock held)."""
        for waiter in self._replies.values():
            if isinstance(waiter, Waiter):
                waiter.count = 0
                self._engine.notify(waiter)
