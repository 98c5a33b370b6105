"""The reports of a node to the GCS: what is free, which requests are unmet, what is refused."""

from __future__ import annotations

from hpcray.common.ids import HEAD
from hpcray.core.effects import Effect, Send
from hpcray.core.raylet.lease_queue import LeaseQueue
from hpcray.core.raylet.lease_requests import LeaseRequest, LeaseRequestTable
from hpcray.core.raylet.lease_table import LeaseReclaimer
from hpcray.core.raylet.local_resources import ResourceAllocation
from hpcray.core.raylet.node_views import NodeViewReporter
from hpcray.core.raylet.peer_requests import PeerRequests
from hpcray.protocol import messages as m


class HeadReporter:
    """Collects during an event what the GCS has to know, and sends it at the end, each fact at most once.

    The order matters: the GCS must know what is free here before it reads a refusal, or it would send the same again.
    """

    def __init__(
        self,
        views: NodeViewReporter,
        queue: LeaseQueue,
        requests: LeaseRequestTable,
        reclaimer: LeaseReclaimer,
        peers: PeerRequests,
    ) -> None:
        self._views = views
        self._queue = queue
        self._requests = requests
        self._reclaimer = reclaimer
        self._peers = peers
        self._view_forced = False
        self._changed: dict[int, LeaseRequest] = {}
        self._refusals: list[Effect] = []
        self._peer_refusals: list[Effect] = []

    def force_view(self) -> None:
        """The GCS changed its figures of what is free here: report all of them."""
        self._view_forced = True

    def note_grant(self, msg: m.GrantLeases, promised: bool) -> None:
        """The GCS has sent a grant. promised: it counts what that needs as taken already."""
        if not self._views.note_promise(msg.shape.resources * msg.count if promised else ()):
            self._view_forced = True

    def request_changed(self, now: float, request: LeaseRequest) -> None:
        """Counts of a request changed: bring the queue, and later the GCS, up to date."""
        self._changed[id(request)] = request
        if self._queue.update(now, request):
            self._reclaimer.mark_due()

    def request_served(self, request: LeaseRequest) -> None:
        """The queue is serving one lease of the request."""
        self._changed[id(request)] = request
        self._reclaimer.mark_due()

    def refuse_leases(self, to: bytes, holder: bytes, scheduling_class: int, count: int) -> None:
        """Refuse a part of a GrantLeases (to: HEAD) or of a raylet's PeerLeaseRequest; nothing if `count` is 0."""
        if count > 0 and to == HEAD:
            self._refusals.append(Send(HEAD, m.GrantLeasesRefused(holder, scheduling_class, count)))
        elif count > 0:
            self._peer_refusals.append(Send(to, m.PeerLeasesRefused(holder, scheduling_class, count)))

    def refuse_actor(self, actor: bytes, reason: str) -> None:
        """Refuse a StartActor. reason: for its owner; "" if there is merely no room."""
        self._refusals.append(Send(HEAD, m.StartActorRefused(actor, reason)))

    def refuse_bundles(self, msg: m.PrepareBundles) -> None:
        """Refuse a PrepareBundles; its request, if it waited, is over."""
        self._requests.bundles.pop(msg.group, None)
        self._refusals.append(Send(HEAD, m.BundlesPrepared(msg.group, msg.attempt, False)))

    def return_assigned(self, now: float, request: LeaseRequest, withdrawn_by: bytes = HEAD) -> None:
        """Send back what was assigned to this node and was not served.

        Args:
            withdrawn_by: a raylet that has withdrawn it, and needs no answer; the GCS does, as its grants may have
                crossed the withdrawal.
        """
        count, request.assigned = request.assigned, 0
        if not count:
            return
        if request.assigned_by == withdrawn_by != HEAD:
            self.request_changed(now, request)
            return  # it was served elsewhere: a later one begins to wait anew
        request.returned_at = now
        self.request_changed(now, request)
        if request.prepare is not None:
            self.refuse_bundles(request.prepare)
        elif request.actor_spec is None:
            self.refuse_leases(request.assigned_by, request.holder, request.scheduling_class, count)
        else:
            self.refuse_actor(request.actor_spec.actor, "")

    def return_undone(self, now: float, allocation: ResourceAllocation, reason: str) -> None:
        """Queue the request of an allocation that was undone before it had a worker, or send it back to the GCS."""
        if allocation.actor_spec is not None:
            self.refuse_actor(allocation.actor_spec.actor, reason)
        elif allocation.lease_request.local:
            self.request_changed(now, allocation.lease_request)
        else:
            by = allocation.lease_request.assigned_by
            self.refuse_leases(by, allocation.holder, allocation.scheduling_class, 1)

    def flush(self, now: float, out: list[Effect]) -> None:
        """At the end of an event: send the view, then unmet requests (to near nodes or to the GCS), then refusals."""
        view = self._views.next_view(now, force=self._view_forced or bool(self._refusals))
        if view is not None:
            out.append(Send(HEAD, view))
        self._view_forced = False
        if now >= self._peers.due_at:
            for request in self._peers.overdue(now, out):
                self._changed[id(request)] = request
        if self._changed:
            for request in self._changed.values():
                if request.local and not self._peers.update(now, request, out):
                    unmet = self._requests.unmet(now, request)
                    if unmet is not None:
                        out.append(Send(HEAD, unmet))
            self._changed.clear()
        if self._refusals or self._peer_refusals:
            out += self._refusals
            out += self._peer_refusals
            self._refusals, self._peer_refusals = [], []
