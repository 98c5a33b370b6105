"""Copies that an owner holds on other nodes, so that the loss of one node does not lose the object. Pure.

The other node's store keeps such a copy for the owner (`Open.keep`): it is never evicted, but may go to disk. It goes
with the object, or with the owner.
"""

from __future__ import annotations

from collections.abc import Callable

from hpcray.base.ids import raylet_of
from hpcray.core.owner.entries import Entry, Waiter
from hpcray.wire.messages import Message, Open, Release


class Replicas:
    """All of one owner.

    Attributes:
        held: for each object the nodes on which it is kept, or will be.
        failed: why a node could not take a copy, for who waits.
    """

    def __init__(self, send: Callable[[bytes, Message], None], notify: Callable[[Waiter], None]) -> None:
        self.held: dict[bytes, set[int]] = {}
        self.failed: dict[tuple[bytes, int], str] = {}
        self._send = send
        self._notify = notify
        self._waiters: dict[tuple[bytes, int], Waiter] = {}

    def hold(self, oid: bytes, entry: Entry, node: int, waiter: Waiter | None = None) -> None:
        """Have `node` keep a copy; it pulls one if it has none. `waiter` counts down when that is decided."""
        nodes = self.held.setdefault(oid, set())
        if waiter is not None:
            self._waiters[oid, node] = waiter
        if node not in nodes:
            nodes.add(node)
            self._send(raylet_of(node), Open(oid, entry.size, list(entry.nodes or ()), keep=True))

    def answered(self, oid: bytes, node: int, problem: str) -> None:
        """The node has the copy, or cannot have it."""
        if problem:
            self._discard(oid, node)
            if (oid, node) in self._waiters:
                self.failed[oid, node] = problem
        waiter = self._waiters.pop((oid, node), None)
        if waiter is not None:
            waiter.count -= 1
            self._notify(waiter)

    def decided(self, oid: bytes, node: int) -> str:
        """Nobody waits for this answer any more: why the node has no copy, "" when it has, or may still get one."""
        self._waiters.pop((oid, node), None)
        return self.failed.pop((oid, node), "")

    def gone(self, oid: bytes) -> None:
        """The object is freed, or no copy of it is left."""
        for node in sorted(self.held.pop(oid, ())):
            self._send(raylet_of(node), Release([oid], keep=True))
            self.answered(oid, node, "the object is gone")

    def fail(self, reason: str) -> None:
        """No answer can come any more."""
        for oid, node in list(self._waiters):
            self.answered(oid, node, reason)

    def node_died(self, node: int) -> None:
        """Its copies are gone with it."""
        for oid in [oid for oid, nodes in self.held.items() if node in nodes]:
            self.answered(oid, node, f"node {node} died")

    def _discard(self, oid: bytes, node: int) -> None:
        nodes = self.held.get(oid)
        if nodes is not None:
            nodes.discard(node)
            if not nodes:
                del self.held[oid]
