"""The reports of a node to the GCS: what is free, which requests are unmet, what is refused."""

from __future__ import annotations

from collections.abc import Iterable

from hpcray.common.ids import HEAD
from hpcray.common.resources import UNIT, Resources
from hpcray.core.effects import Effect, Send
from hpcray.core.raylet.lease_queue import LeaseQueue
from hpcray.core.raylet.lease_requests import LeaseRequest, LeaseRequestTable
from hpcray.core.raylet.lease_table import LeaseReclaimer
from hpcray.core.raylet.local_resources import LocalResources, ResourceAllocation
from hpcray.core.raylet.peer_requests import PeerRequests
from hpcray.protocol import messages as m
from hpcray.protocol.messages import NodeView

# ------------------------------------------------------------ node views
# Views of what is free on a node, for the GCS: what they contain, and when they are sent.


DECREASE_REPORT_DELAY = 0.1
"""Seconds after the last view at which a decrease of free resources is reported at the latest; an increase at once."""
SMALL_CLUSTER = 64
"""Nodes up to which an increase is reported at once."""
REPORT_INTERVAL_PER_NODE = 1e-4
"""In larger clusters a node sends views at most once in this many seconds, times the number of
nodes: the head reads at most ten thousand of them in a second, however many nodes there are."""
AWAITED_SHARE = 0.1
"""Share of this interval after which a view reports more of what requests wait for anywhere."""
OBJECT_STORE_MEMORY = "object_store_memory"
_STORE_REPORT_STEPS = 1000
"""A change of the store's use by less than one in so many of its bytes is not reported."""


class NodeViewReporter:
    """The views that a node sends to the GCS.

    Args:
        resources: what the node has; only read, but for what bundles note as unreported.
        cluster_size: number of nodes that report to the same GCS.
    """

    def __init__(self, resources: LocalResources, cluster_size: int) -> None:
        self._node = resources.node
        self._pool = resources.pool
        self._bundles = resources.bundles
        self._version = 0
        self._reported: Resources = {}
        self._reported_actors: Resources = {}
        self._reported_at = float("-inf")
        self._report_interval = self._quiet_for = 0.0
        self._promised = False
        self._awaited: frozenset[str] = frozenset()
        self._store_used = 0
        self._store_changed = False
        self.set_report_interval(cluster_size)

    def set_report_interval(self, cluster_size: int) -> None:
        """Derive the least time between two views from the number of nodes that report to the same head."""
        self._report_interval = REPORT_INTERVAL_PER_NODE * cluster_size if cluster_size > SMALL_CLUSTER else 0.0
        self._quiet_for = min(self._report_interval, DECREASE_REPORT_DELAY)

    def note_contention(self, lacking: Iterable[str]) -> None:
        """Requests wait in the cluster because these resources are short; none: no request waits."""
        self._awaited = frozenset(lacking)

    def note_promise(self, request: Iterable[tuple[str, int]]) -> bool:
        """The GCS has granted leases here, and counts their resources as taken ahead of this node's next view.

        In a large cluster it would read such a view for each grant. There it gets the next one when that is due: what
        this node grants as promised the GCS knows already. The next view is a full one, as a view that crossed the
        grant undid the promise.

        Args:
            request: units of what the GCS counts as taken; nothing for a grant that may queue here, or a withdrawal.

        Returns:
            False in a small cluster: the view is to be sent at once.
        """
        if not self._report_interval:
            return False
        for name, units in request:
            self._promised = True
            if name in self._reported:
                self._reported[name] -= units
        return True

    def note_store_use(self, used: int) -> None:
        """So many bytes of the object store are in use. It is reported as less free, which no request feels."""
        units = used * UNIT
        least = self._pool.total.get(OBJECT_STORE_MEMORY, 0) // _STORE_REPORT_STEPS
        if units != self._store_used and (not units or abs(units - self._store_used) >= least):
            self._store_used, self._store_changed = units, True

    def next_view(self, now: float, force: bool = False) -> NodeView | None:
        """The message that reports to the GCS what has changed of what is free; None while nothing urgent has.

        Args:
            force: report everything: the GCS may think otherwise.
        """
        elapsed = now - self._reported_at
        early = not force and elapsed < self._quiet_for
        if early and not (elapsed >= self._report_interval * AWAITED_SHARE and self._has_awaited()):
            return None
        pool, reported = self._pool, self._reported
        available, actors = pool.available, pool.held_by_actors
        bundles_changed = self._bundles.has_unreported or self._store_changed
        if not force:
            if not early and not bundles_changed:
                if not self._promised and reported == available and self._reported_actors == actors:
                    return None
                if elapsed < DECREASE_REPORT_DELAY and not any(
                    units > reported.get(name, units - 1) for name, units in available.items()
                ):
                    return None
            force = self._promised
        self._promised = False
        self._version += 1
        self._reported_at = now
        free = {n: units for n, units in available.items() if force or reported.get(n) != units}
        if OBJECT_STORE_MEMORY in available and (self._store_changed or OBJECT_STORE_MEMORY in free):
            free[OBJECT_STORE_MEMORY] = max(0, available[OBJECT_STORE_MEMORY] - self._store_used)
        self._store_changed = False
        held = {n: actors.get(n, 0) for n in available if force or actors.get(n) != self._reported_actors.get(n)}
        self._reported, self._reported_actors = dict(available), dict(actors)
        return NodeView(self._node, self._version, free, self._bundles.take_unreported(), held)

    def _has_awaited(self) -> bool:
        """Return True if there is more than was reported of what requests wait for anywhere."""
        available, reported = self._pool.available, self._reported
        for name in self._awaited:
            if available.get(name, 0) > reported.get(name, 0):
                return True
        return bool(self._awaited) and self._bundles.has_unreported and self._bundles.are_unreported(self._awaited)


# ------------------------------------------------------------ head reporter


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
