"""Every lease request that a raylet knows: its own processes', those that the GCS sent, actors and bundles to come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct, field

from hpcray.common.ids import HEAD, node_of
from hpcray.common.labels import ACTOR_SCHEDULING_CLASS, NEAR, bound_to, fails_when_busy, near_node
from hpcray.common.resources import CAPTURING, GROUP, Resources, bundle_of, group_of, in_bundle, plain, to_amounts
from hpcray.protocol.messages import ActorSpec, GrantLeases, PrepareBundles, Shape, UnmetLeaseRequest

WorkerEnv = tuple[tuple[str, str], ...]
"""Environment variables of a worker, fixed for its life: name and value, the assigned GPUs last."""


REMEMBER_FOR = 10.0
"""Seconds that a request of another node, or of an actor, is remembered after its last part was served elsewhere."""
REMEMBER_RESERVED_FOR = 120.0
"""The same for a request that once had a reservation: it may come back from other nodes."""
EXACT_COUNT_LIMIT = 64
"""Larger counts of unserved leases are rounded for the GCS."""
FIRST_RESERVATION = 1.0
"""Seconds that the first reservation for a request lasts."""
NEVER = float("inf")
UNLIMITED = 1 << 62
FOR_BUNDLES = "bundles of"
QueueKey = tuple[tuple[tuple[str, int], ...], WorkerEnv]
"""Resources and environment: requests with the same key can be served by the same worker and fit at the same time."""


class LeaseRequest(Struct, eq=False):
    """One holder's request for leases of one scheduling class, an actor to start here, or bundles to reserve here.

    Attributes:
        local: the holder is a process of this node and sends its requests to this raylet.
        decided_here: this raylet may serve it without the GCS; otherwise only the part `assigned` by the GCS.
        actor_spec: the actor to start; None for leases and bundles.
        total, granted, received: cumulative counts of leases (see `RequestLeases`).
        starting: allocations that still wait for their worker.
        assigned: how many the GCS, or the raylet of the holder, has let this node serve when it can.
        assigned_by: the raylet that was last to do so, HEAD for the GCS: what is refused goes back there.
        spills: any node may serve it, as far as this one knows: the raylet may select nodes (`PeerRequests`).
        peers_since: when it began to lack leases that other nodes were asked for. peers_served_at: when the last one
            came. at_gcs: the GCS has taken it over.
        asked: how many leases raylets were ever asked for, but for those they refused: if as many were received,
            nothing is on its way. `UNLIMITED`, give or take later ones, once the GCS was asked: then what is
            received may have been granted for it.
        return_at: time at which the unserved part of `assigned` goes back.
        waiting_since: when it was last served, or began to wait.
        returned_at: when it was last sent back to the GCS unserved; if it comes back soon it keeps `waiting_since`.
        turn: position in the round-robin order; 0 until it has one.
        reservation: seconds that its next reservation lasts.
        reported_count, reported_received: the counts that the GCS knows. reported_shared: whether it chooses the node,
            as far as it knows.
        may_share: this node's part of the work of a cluster is limited.
        shared: the GCS chooses the node; `decided_here` is False meanwhile.
        was_shared: it has chosen once, and the rest is decided here.
        warned_no_worker: its holder was warned that no worker can be had.
        reported_waiting_at: when its holder last got a report that it waits.
        live: allocations that exist for it. capacity: how many the node has CPUs for.
        capped: it is held back, as it has that many and they have lent their CPUs (`WorkerCap`).
        admit_at: when it gets one more.
        prepare: the bundles to hold here when there is room, for a request of bundles; it needs no worker.
        resources: units of each resource, as the scheduler sees them.
        queue_key: see `QueueKey`.
        bundle: group (id in hex) and bundle index that it is for, None where it is for no group.
        resources_in_bundle: `resources` by the names that they have inside a bundle.
        near: the node that has the arguments; None where no node is preferred.
    """

    holder: bytes
    scheduling_class: int
    shape: Shape
    local: bool
    decided_here: bool
    actor_spec: ActorSpec | None = None
    restarts: int = 0
    total: int = 0
    granted: int = 0
    received: int = 0
    starting: int = 0
    assigned: int = 0
    assigned_by: bytes = HEAD
    spills: bool = False
    peers_since: float = -1.0
    peers_served_at: float = -1.0
    at_gcs: bool = False
    asked: int = 0
    return_at: float = 0.0
    waiting_since: float = 0.0
    returned_at: float = float("-inf")
    turn: int = 0
    reservation: float = FIRST_RESERVATION
    reported_count: int = 0
    reported_received: int = 0
    reported_shared: bool = False
    may_share: bool = False
    shared: bool = False
    was_shared: bool = False
    warned_no_worker: bool = False
    reported_waiting_at: float = 0.0
    prepare: PrepareBundles | None = None
    live: int = 0
    capacity: int = UNLIMITED
    capped: bool = False
    admit_at: float = NEVER
    resources: Resources = field(default_factory=dict)
    queue_key: QueueKey = ((), ())
    bundle: tuple[str, int] | None = None
    resources_in_bundle: Resources = field(default_factory=dict)
    near: int | None = None

    def __post_init__(self) -> None:
        self.near = near_node(self.shape.strategy)
        self.resources = dict(self.shape.resources)
        self.queue_key = (self.shape.resources, self.shape.env)
        self.bundle = bundle_of(self.shape.resources)
        self.resources_in_bundle = self.resources if self.bundle is None else in_bundle(self.resources)

    def unserved(self) -> int:
        """How many leases the holder still lacks, as far as this raylet knows."""
        return max(0, self.total - self.granted - self.starting) if self.local else self.assigned

    def servable(self) -> int:
        """How many of the unserved leases this raylet may grant."""
        if self.capped:
            return 0
        return self.unserved() if self.decided_here else min(self.assigned, self.unserved())

    def check_invariants(self) -> None:
        """Raise AssertionError if a count is impossible."""
        counts = (self.total, self.granted, self.starting, self.assigned, self.live)
        assert min(counts) >= 0, f"request of {self.holder.hex()} has total, granted, starting, assigned, live {counts}"
        assert self.prepare is None or (self.starting, self.granted) == (0, 0), "bundles were given a worker"


def bundles_env(group: str) -> WorkerEnv:
    """Stands for the environment in a request for bundles of this group (id in hex), which needs no worker."""
    return ((FOR_BUNDLES, group),)


def is_bundles_env(env: WorkerEnv) -> bool:
    """True if `env` is one of `bundles_env`."""
    return bool(env) and env[0][0] == FOR_BUNDLES


def round_count(count: int) -> int:
    """`count` rounded down to four binary digits above `EXACT_COUNT_LIMIT`: the GCS needs no message for each change
    of a long queue."""
    if count <= EXACT_COUNT_LIMIT:
        return count
    shift = count.bit_length() - 4
    return count >> shift << shift


class LeaseRequestTable:
    """Creates and finds lease requests, and determines what the GCS should know of them.

    Args:
        node: index of this node.
        only_node: the cluster has no other node, and gets none by itself.
        is_feasible: whether this node could serve these resources if it were empty.
        capacity: for how many times these resources it has CPUs.
        shares: whether the GCS chooses nodes for requests of this node once it is used up to the threshold.

    Attributes:
        actors: requests to start an actor here, by actor id.
        bundles: requests to reserve bundles here, by group id.
    """

    def __init__(
        self,
        node: int,
        only_node: bool,
        is_feasible: Callable[[Resources], bool],
        capacity: Callable[[Resources], int] = lambda resources: UNLIMITED,
        shares: bool = False,
    ) -> None:
        self._node = node
        self._only_node = only_node
        self._is_feasible = is_feasible
        self._capacity = capacity
        self._shares = shares and not only_node
        self._leaving = False
        self._by_holder: dict[bytes, dict[int, LeaseRequest]] = {}
        self._by_group: dict[str, list[LeaseRequest]] = {}
        self.actors: dict[bytes, LeaseRequest] = {}
        self.bundles: dict[bytes, LeaseRequest] = {}

    def __iter__(self) -> Iterator[LeaseRequest]:
        for requests in self._by_holder.values():
            yield from requests.values()
        yield from self.actors.values()

    def holders(self) -> list[bytes]:
        """Every process that has a request here, or had one lately."""
        return list(self._by_holder)

    def leave(self) -> list[LeaseRequest]:
        """This node leaves the job: returns the requests of its processes, which other nodes serve."""
        self._leaving = True
        return self.cluster_grew(False)

    def cluster_grew(self, shares: bool) -> list[LeaseRequest]:
        """This is not the only node any more, if it was: returns the requests of its processes, decided anew.

        Args:
            shares: as given at first, for the number of nodes now.
        """
        self._only_node, self._shares = False, shares
        local = [request for requests in self._by_holder.values() for request in requests.values() if request.local]
        for request in local:
            decided_here = self._is_decided_here(request.shape)
            request.decided_here = decided_here and not request.shared
            request.may_share = shares and decided_here and not request.shape.strategy
            request.spills = self._spills(request.shape)
        return local

    def of_local_process(self, holder: bytes, scheduling_class: int, shape: Shape) -> LeaseRequest:
        """The request of a process of this node for a scheduling class; created if there is none."""
        requests = self._by_holder.setdefault(holder, {})
        request = requests.get(scheduling_class)
        if request is None:
            request = LeaseRequest(
                holder, scheduling_class, shape, local=True, decided_here=self._is_decided_here(shape)
            )
            request.capacity = self._capacity(request.resources)
            request.may_share = self._shares and request.decided_here and not shape.strategy
            request.spills = self._spills(shape)
            requests[scheduling_class] = self._index_by_group(request)
        return request

    def of_grant(self, msg: GrantLeases) -> LeaseRequest | None:
        """The request that a message of the GCS is about; None when its holder, a process of this node, is dead."""
        request = self._by_holder.get(msg.holder, {}).get(msg.scheduling_class)
        if request is None and node_of(msg.holder) != self._node:
            request = LeaseRequest(msg.holder, msg.scheduling_class, msg.shape, local=False, decided_here=False)
            request.capacity = self._capacity(request.resources)
            self._by_holder.setdefault(msg.holder, {})[msg.scheduling_class] = self._index_by_group(request)
        return request

    def of_actor(self, spec: ActorSpec, restarts: int) -> LeaseRequest:
        """The request to start an actor; one that was sent back a moment ago keeps its age."""
        request = self.actors.get(spec.actor)
        if request is None:
            shape = Shape(spec.hold.resources, spec.place.strategy, spec.hold.env or spec.place.env)
            request = LeaseRequest(HEAD, ACTOR_SCHEDULING_CLASS, shape, local=False, decided_here=False)
            self.actors[spec.actor] = self._index_by_group(request)
        request.actor_spec = spec
        request.restarts = restarts
        return request

    def of_group(self, group: str) -> list[LeaseRequest]:
        """The requests for a placement group; whether those of this node are decided here is determined anew."""
        found = self._by_group.get(group, [])
        for request in found:
            request.decided_here = request.local and self._is_decided_here(request.shape)
        return found

    def forget_group(self, group: str) -> None:
        """This node has no bundle of the group any more."""
        self._by_group.pop(group, None)

    def drop_holder(self, holder: bytes) -> list[LeaseRequest]:
        """Forget a dead holder; returns its requests, with nothing left to serve."""
        dropped = list(self._by_holder.pop(holder, {}).values())
        for request in dropped:
            request.total = request.assigned = 0
        return dropped

    def is_for_this_node_only(self, request: LeaseRequest) -> bool:
        """True if no other node could serve a request of this node, so that the GCS need not know of it."""
        return (
            request.local and request.decided_here and (self._only_node or bound_to(request.shape.strategy, self._node))
        )

    def unmet(self, now: float, request: LeaseRequest) -> UnmetLeaseRequest | None:
        """The message about a request of this node for the GCS, None when the GCS knows all that it should."""
        if not request.local or self.is_for_this_node_only(request):
            return None
        count = round_count(request.unserved())
        if not count:
            request.was_shared = request.at_gcs = False
        news = count and request.received != request.reported_received
        if count == request.reported_count and request.shared == request.reported_shared and not news:
            return None
        waited = unserved_for = 0.0
        if request.at_gcs and not request.reported_count:
            waited, unserved_for = now - request.peers_since, now - request.peers_served_at
        if count:
            request.asked = UNLIMITED
        request.reported_count, request.reported_shared = count, request.shared
        request.reported_received = request.received
        return UnmetLeaseRequest(
            request.holder, request.scheduling_class, request.shape, count, request.shared, waited, unserved_for,
            request.received,
        )  # fmt: skip

    def reset_reported(self, now: float) -> list[LeaseRequest]:
        """A new head knows no request: returns all of this node's.

        What was reported may still reach it, as it gets what was on its way to the old one. So it is the new head's
        too: where other nodes served it, nothing would withdraw it.
        """
        local = [request for requests in self._by_holder.values() for request in requests.values() if request.local]
        for request in local:
            if request.reported_count and not request.at_gcs:
                request.at_gcs = True
                request.peers_since = request.peers_served_at = now
            request.reported_count = 0
        return local

    def forget_finished(self, now: float) -> None:
        """Forget the requests of other nodes' processes, and of actors, that ended a while ago."""
        for holder in [holder for holder in self._by_holder if node_of(holder) != self._node]:
            requests = self._by_holder[holder]
            for index in [index for index, request in requests.items() if _is_finished(request, now)]:
                del requests[index]
            if not requests:
                del self._by_holder[holder]
        for actor in [actor for actor, request in self.actors.items() if _is_finished(request, now)]:
            del self.actors[actor]

    def snapshot(self) -> list[dict[str, Any]]:
        """One row per request that is not fully served."""
        return [
            {
                "holder": one.holder,
                "scheduling_class": one.scheduling_class,
                "resources": to_amounts(plain(one.resources)),
                "group": group_of(one.resources.items()),
                "missing": one.unserved(),
                "strategy": one.shape.strategy,
                "starting": one.starting,
                "actor": one.actor_spec.class_name if one.actor_spec else "",
            }
            for one in self
            if one.unserved() or one.starting
        ]

    def _index_by_group(self, request: LeaseRequest) -> LeaseRequest:
        if request.bundle is not None:
            self._by_group.setdefault(request.bundle[0], []).append(request)
        return request

    def _spills(self, shape: Shape) -> bool:
        return not self._leaving and shape.strategy in ("", "SPREAD") and self._is_feasible(dict(shape.resources))

    def _is_decided_here(self, shape: Shape) -> bool:
        if self._leaving or not self._is_feasible(dict(shape.resources)):
            return False
        if shape.strategy == "SPREAD":
            return self._only_node
        if shape.strategy.startswith(NEAR):
            return self._only_node or near_node(shape.strategy) == self._node
        if fails_when_busy(shape.strategy):
            return False
        return shape.strategy in ("", GROUP, CAPTURING) or bound_to(shape.strategy, self._node)


def _is_finished(request: LeaseRequest, now: float) -> bool:
    keep = REMEMBER_FOR if request.reservation == FIRST_RESERVATION else REMEMBER_RESERVED_FOR
    return not request.assigned and not request.live and now - max(request.waiting_since, request.returned_at) > keep
