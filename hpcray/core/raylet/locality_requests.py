"""Requests of this node for leases at the nodes that have the arguments: sent there, and not through the GCS."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpcray.common.ids import raylet_of
from hpcray.core.effects import Effect, Send
from hpcray.core.raylet.lease_requests import LeaseRequest
from hpcray.protocol import messages as m

MOST_COMING = 64
"""Leases of one request that its near node is asked for at once, at most; more when some have arrived."""


@dataclass(slots=True, eq=False)
class LocalityRequest:
    """A request that its near node knows, and the GCS does not.

    Attributes:
        count: leases that its holder lacked when it last changed. coming: how many of them the near node was asked for.
    """

    request: LeaseRequest
    node: int
    count: int = 0
    coming: int = 0


class LocalityRequests:
    """Sends requests for leases near their arguments to the node that has these, while that node alone may serve them.

    For so long the GCS would pass them on, and nothing else: in a large cluster that was half of its work. It takes
    over as soon as it has something to choose: when the near node refuses, or is dead, or when a request has waited for
    `locality_wait`. So every request is at the GCS after that time at the latest, whatever was lost.

    Args:
        node: index of this node.
        locality_wait: seconds for which a request waits for the near node alone.
        enabled: whether the cluster is large.

    Attributes:
        enabled: as given; False: the GCS gets all requests.
    """

    def __init__(self, node: int, locality_wait: float, enabled: bool) -> None:
        self.enabled = enabled
        self._node = node
        self._locality_wait = locality_wait
        self._open: dict[tuple[bytes, int], LocalityRequest] = {}  # the oldest first
        self._sent_to: dict[bytes, set[int]] = {}
        self._dead: set[int] = set()

    def update(self, now: float, request: LeaseRequest, out: list[Effect]) -> bool:
        """Counts of a request have changed. Returns True if the near node knows of it; else the GCS has to."""
        node = request.near
        if node is None:
            return False
        key = (request.holder, request.scheduling_class)
        near, count = self._open.get(key), request.unserved()
        if near is None:
            if not count or not self._may_open(request, node):
                return False
            near = self._open[key] = LocalityRequest(request, node)
            request.near_since = request.near_served_at = now
            self._sent_to.setdefault(request.holder, set()).add(node)
        if count < near.count:
            near.coming = max(0, near.coming - (near.count - count))
            request.near_served_at = now
        near.count = count
        if not count:
            del self._open[key]
            self._send(near, 0, out)
            return True
        lacking = min(count, request.capacity, MOST_COMING) - near.coming
        if lacking > 0:
            near.coming += lacking
            self._send(near, lacking, out)
        return True

    def nothing_coming(self, request: LeaseRequest) -> None:
        """The holder repeats a request: it has returned a lease, and what was coming may be that one."""
        near = self._open.get((request.holder, request.scheduling_class))
        if near is not None:
            near.coming = 0

    def overdue(self, now: float, out: list[Effect]) -> list[LeaseRequest]:
        """The requests that have waited for their near node long enough: what queues there is withdrawn."""
        found: list[LeaseRequest] = []
        while self._open:
            near = next(iter(self._open.values()))
            if now - near.request.near_since < self._locality_wait:
                break
            found.append(self._close(near))
            self._send(near, 0, out)
        return found

    def refused(self, node: int, holder: bytes, scheduling_class: int) -> LeaseRequest | None:
        """A near node serves a request no further: returns it; None if the GCS has it already."""
        near = self._open.get((holder, scheduling_class))
        return self._close(near) if near is not None and near.node == node else None

    def node_died(self, node: int) -> list[LeaseRequest]:
        """A node is dead: returns the requests that were sent to it."""
        self._dead.add(node)
        return [self._close(near) for near in list(self._open.values()) if near.node == node]

    def holder_died(self, holder: bytes, reason: str) -> list[Effect]:
        """A process of this node is gone. The nodes that were asked for leases for it learn that after the requests."""
        for key in [key for key in self._open if key[0] == holder]:
            del self._open[key]
        nodes = self._sent_to.pop(holder, set()) - self._dead
        return [Send(raylet_of(node), m.ProcDied(holder, reason)) for node in sorted(nodes)]

    def check_invariants(self, requests: Iterable[LeaseRequest]) -> None:
        """Raise AssertionError unless each request is at its near node, or at the GCS, and nowhere twice.

        Args:
            requests: all of this node.
        """
        for one in requests:
            near = self._open.get((one.holder, one.scheduling_class))
            if near is not None:
                where = f"{one.unserved()} leases near node {near.node} for {one.holder.hex()}"
                assert near.request is one and near.count == one.unserved() > 0, f"{where}: {near.count} are noted"
                assert 0 < near.coming <= near.count, f"{where}: {near.coming} are coming"
                assert not one.reported_count and near.node not in self._dead, f"{where}: the GCS should have them"

    def _may_open(self, request: LeaseRequest, node: int) -> bool:
        if not self.enabled or self._locality_wait <= 0 or request.near_at_gcs or request.reported_count:
            return False
        return node != self._node and node not in self._dead

    def _close(self, near: LocalityRequest) -> LeaseRequest:
        """The GCS takes the request over, until nothing is lacking."""
        del self._open[near.request.holder, near.request.scheduling_class]
        near.request.near_at_gcs = True
        return near.request

    def _send(self, near: LocalityRequest, count: int, out: list[Effect]) -> None:
        request = near.request
        message = m.LocalityLeaseRequest(request.holder, request.scheduling_class, request.shape, count)
        out.append(Send(raylet_of(near.node), message))
