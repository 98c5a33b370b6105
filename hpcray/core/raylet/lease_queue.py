"""The queue of one node: which lease requests wait, which is served next, and what is reserved for one that starves.

Fairness is round-robin over (holder, scheduling class): every request has a turn number, and a grant moves it to the
end. Requests are indexed by what they need, so to find that none can be served takes one check per different need,
however many thousand requests wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from msgspec import Struct, field

from hpcray.common.resources import Resources
from hpcray.core.raylet.lease_requests import FIRST_RESERVATION, NEVER, LeaseRequest, QueueKey, WorkerEnv
from hpcray.core.raylet.local_resources import LocalResources, ResourceAllocation
from hpcray.protocol.messages import ResourceContention

# ------------------------------------------------------------ worker cap
# How many tasks of one kind run at once although those that run have lent their CPUs.
#
# A task that waits in `get` lends its CPU, and the next one of its kind may wait for the same: without a limit ten
# thousand tasks that call `get` become ten thousand processes. So a request that has as many leases as the node has
# CPUs for gets further ones after 1 s, 2 s, 4 s, … as in Ray. Each process's request counts alone: the tasks for which
# others wait, which are those of another process, are not held back.


_MOST_DOUBLINGS = 30


class WorkerCap:
    """Requests that are held back, and until when.

    Args:
        initial: seconds until the first lease above the capacity; the next waits twice as long. 0: no request is ever
            held back.
        longest: seconds that one waits at most.
    """

    def __init__(self, initial: float, longest: float) -> None:
        self._initial = initial
        self._longest = max(initial, longest)
        self._held: dict[int, LeaseRequest] = {}
        self._news: list[tuple[LeaseRequest, float]] = []

    def is_due(self, now: float, request: LeaseRequest) -> bool:
        """True if a request at or above its capacity may have one more lease."""
        if not self._initial:
            return True
        if request.admit_at == NEVER:
            wait = min(self._longest, self._initial * 2 ** min(request.live - request.capacity, _MOST_DOUBLINGS))
            request.admit_at = now + wait
            self._news.append((request, wait))
        return now >= request.admit_at

    def hold(self, request: LeaseRequest) -> None:
        """Hold the request back; nothing of it is servable until `released` returns it."""
        request.capped = True
        self._held[id(request)] = request

    def released(self, now: float) -> list[LeaseRequest]:
        """The requests that are held back no more: their time has come, or they have ended leases."""
        found = [one for one in self._held.values() if now >= one.admit_at or one.live < one.capacity]
        for request in found:
            del self._held[id(request)]
            request.capped = False
            if request.live < request.capacity:
                request.admit_at = NEVER
        return found

    def release_all(self) -> list[LeaseRequest]:
        """All requests that are held back; none is any more."""
        found = list(self._held.values())
        self._held.clear()
        for request in found:
            request.capped = False
        return found

    def take_news(self) -> list[tuple[LeaseRequest, bool, float]]:
        """The requests that began to wait since the last call: whether for the longest time, and the seconds."""
        if not self._news:
            return []
        news = [(request, wait >= self._longest, wait) for request, wait in self._news]
        self._news.clear()
        return news


# ------------------------------------------------------------ lease queue


RESERVE_AFTER = 1.0
"""Seconds that a request waits, while others with a later turn are served, before resources are reserved for it."""
LONGEST_RESERVATION = 64.0
"""Seconds. The duration doubles with each reservation for a request. Between two reservations the other requests are
served for as long: the one that waits may itself depend on them, so a reservation without end could hang the job."""
RETURN_GRACE = 5.0
"""Seconds within which a request that was sent back to the GCS and returns keeps its age and its turn."""

Shortage = tuple["set[str]", "tuple[bytes, int] | None"]
"""Names of resources that are short; holder and scheduling class if only one request waits for them."""


class _Bucket(Struct):
    """Waiting requests with the same resources and environment, in the order of their turns."""

    key: QueueKey
    resources: Resources
    env: WorkerEnv
    in_bundle: bool
    requests: OrderedDict[int, LeaseRequest] = field(default_factory=OrderedDict)

    def first(self) -> LeaseRequest:
        return next(iter(self.requests.values()))


class LeaseQueue:
    """Requests that this node should serve and has not, and the reservation for one that has waited for too long.

    Args:
        resources: of the node; the queue only reads them.
        cap: which requests wait although there is room.
        threshold: used share of the node from which on the GCS chooses the node for what could run on any.

    Attributes:
        waiting: number of requests in the queue.
        reserved: the request for which resources are reserved now.
        shared: requests for which the GCS chooses nodes at the moment.
    """

    def __init__(self, resources: LocalResources, cap: WorkerCap, threshold: float = 1.0) -> None:
        self._resources = resources
        self._cap = cap
        self._threshold = threshold
        self.shared: list[LeaseRequest] = []
        self._news: list[LeaseRequest] = []
        self._buckets: dict[QueueKey, _Bucket] = {}
        self._last_turn = 0
        self._latest_served_turn = 0
        self.waiting = 0
        self.reserved: LeaseRequest | None = None
        self._reserved_until = 0.0
        self._no_reservation_until = 0.0
        self._closed = False
        self._recheck_all = False
        self._recheck_keys: set[QueueKey] = set()

    def __iter__(self) -> Iterator[LeaseRequest]:
        for bucket in self._buckets.values():
            yield from bucket.requests.values()

    def update(self, now: float, request: LeaseRequest) -> bool:
        """Add or remove `request` after its counts changed; True if it began to wait."""
        bucket = self._buckets.get(request.queue_key)
        queued = bucket is not None and id(request) in bucket.requests
        if request.servable() > 0:
            if queued:
                return False
            if bucket is None:
                in_bundle = request.bundle is not None
                bucket = _Bucket(request.queue_key, request.resources, request.shape.env, in_bundle)
                self._buckets[request.queue_key] = bucket
            if now - request.returned_at > RETURN_GRACE:
                request.waiting_since = now
                request.turn = 0
            self._insert(bucket, request)
            self.waiting += 1
            self._recheck_keys.add(request.queue_key)
            return True
        if queued and bucket is not None:
            self._remove(bucket, request)
        return False

    def only_request(self) -> LeaseRequest | None:
        """The request that waits, when it is exactly one."""
        return next(iter(self)) if self.waiting == 1 else None

    def short_resources(self) -> set[str]:
        """Names of the resources that waiting requests are short of."""
        found: set[str] = set()
        outside, inside = self._resources.pool.available, self._resources.bundles.available
        for bucket in self._buckets.values():
            free = inside if bucket.in_bundle else outside
            for name, units in bucket.resources.items():
                if free.get(name, 0) < units:
                    found.add(name)
        return found

    def fits(self, resources: Resources, request: LeaseRequest | None = None) -> bool:
        """True if `resources` are free and not reserved for another request.

        Args:
            request: what needs them; None for bundles that do not wait.
        """
        pool, reserved = self._resources.pool, self.reserved
        available = pool.available
        if request is not None and request.bundle is not None:
            available = self._resources.bundles.available
            if not self._resources.bundles.fits(request):
                return False
        if reserved is None or reserved is request:
            for name, units in resources.items():
                if available.get(name, 0) < units:
                    return False
            return not pool.devices or pool.devices_fit(resources)
        kept = reserved.resources
        if not all(available.get(name, 0) >= units + kept.get(name, 0) for name, units in resources.items()):
            return False
        return not pool.devices or pool.devices_fit(resources, kept)

    def release_all(self, now: float) -> None:
        """Hold no request back any more."""
        for request in self._cap.release_all():
            self.update(now, request)

    def take_shared(self) -> list[LeaseRequest]:
        """The requests that were left to the GCS since the last call."""
        news, self._news = self._news, []
        return news

    def end_sharing(self) -> list[LeaseRequest]:
        """The GCS has had time to choose nodes for these requests: what is left of them is decided here."""
        found, self.shared = self.shared, []
        for request in found:
            request.shared, request.was_shared, request.decided_here = False, True, True
        return found

    def recheck_all(self) -> None:
        """Resources or workers may have become free: the next `serve` considers every request."""
        self._recheck_all = True

    def close(self) -> None:
        """Serve no request any more."""
        self._closed = True

    @property
    def closed(self) -> bool:
        """True if no request is served any more."""
        return self._closed

    @property
    def is_due(self) -> bool:
        """False if `serve` would look at no request."""
        return not self._closed and (self._recheck_all or bool(self._recheck_keys))

    def serve(self, now: float, has_worker: Callable[[WorkerEnv], bool]) -> Iterator[LeaseRequest]:
        """Yield requests in the order of their turns while one fits; the caller grants one lease of each.

        Only requests are considered that began to wait since the last call, or all after `recheck_all`.

        Args:
            has_worker: whether a worker with this environment can be had.
        """
        if not self.is_due:
            return
        if self._recheck_all:
            for request in self._cap.released(now):
                self.update(now, request)
        if self.waiting:
            keys = set(self._buckets) if self._recheck_all else self._recheck_keys & self._buckets.keys()
            yield from self._serve_buckets(now, [self._buckets[key] for key in sorted(keys)], has_worker)
        self._recheck_all = False
        self._recheck_keys = set()

    def note_served_unqueued(self) -> None:
        """A request was served without having waited, ahead of every queued one."""
        self._latest_served_turn = self._last_turn + 1

    def _serve_buckets(
        self, now: float, buckets: list[_Bucket], has_worker: Callable[[WorkerEnv], bool]
    ) -> Iterator[LeaseRequest]:
        while True:
            found, servable = None, []
            for one in buckets:
                if one.requests:
                    first = self._next(one)
                    if self.fits(one.resources, first) and has_worker(one.env):
                        servable.append(one)
                        if found is None or first.turn < found[0].turn:
                            found = first, one
            if found is None:
                return
            (request, bucket), buckets = found, servable
            if request.live >= request.capacity and not self._cap.is_due(now, request):
                self._remove(bucket, request)
                self._cap.hold(request)
                continue
            if request.may_share and not request.was_shared and not request.assigned and self._is_used(request):
                self._remove(bucket, request)
                request.shared, request.decided_here = True, False
                self.shared.append(request)
                self._news.append(request)
                continue
            self._latest_served_turn = max(self._latest_served_turn, request.turn)
            yield request
            request.admit_at = NEVER
            request.waiting_since = now
            request.reservation = FIRST_RESERVATION
            if self.reserved is request:
                self.reserved = None
            if id(request) in bucket.requests:
                if request.servable() > 0:
                    del bucket.requests[id(request)]
                    self._append(bucket, request)
                else:
                    self._remove(bucket, request)

    # ------------------------------------------------------------ the reservation

    def update_reservation(self, now: float) -> None:
        """End the reservation when its time is over; make one for the request that needs it most."""
        reserved = self.reserved
        if reserved is not None:
            if now < self._reserved_until:
                return
            self.reserved = None
            self._no_reservation_until = now + reserved.reservation
            reserved.reservation = min(LONGEST_RESERVATION, 2 * reserved.reservation)
        if now < self._no_reservation_until:
            return
        oldest: LeaseRequest | None = None
        for bucket in self._buckets.values():
            request = bucket.first()
            if now - request.waiting_since < RESERVE_AFTER or not self._is_overtaken(request):
                continue
            if not self._resources.pool.is_reachable(request.resources):
                continue  # actors hold what it needs
            if oldest is None or _reservation_order(request) < _reservation_order(oldest):
                oldest = request
        if oldest is not None:
            self.reserved = oldest
            self._reserved_until = now + oldest.reservation

    def check_invariants(self) -> None:
        """Raise AssertionError unless the queue has exactly requests with something to serve, each in its bucket."""
        requests = list(self)
        assert len(requests) == self.waiting, f"{self.waiting} requests are counted, {len(requests)} are queued"
        for key, bucket in self._buckets.items():
            assert bucket.requests and bucket.key == key, f"the bucket of {key} is empty, or of {bucket.key}"
            for ident, request in bucket.requests.items():
                assert ident == id(request) and request.queue_key == key, f"a request is in the bucket of {key}"
                assert request.servable() > 0, f"a request of {request.holder.hex()} waits for nothing"
                request.check_invariants()
        turns = [request.turn for request in requests]
        assert len(set(turns)) == len(turns), f"two requests have the same turn: {sorted(turns)}"
        assert all(0 < turn <= self._last_turn for turn in turns), f"turns {turns}, the last is {self._last_turn}"
        assert self.reserved is None or any(self.reserved is one for one in requests), (
            "the reservation is of no request"
        )

    def _next(self, bucket: _Bucket) -> LeaseRequest:
        """The request of a bucket that is served next: the first, or the one that has the reservation."""
        reserved = self.reserved
        if reserved is not None and reserved.queue_key == bucket.key:
            return reserved
        return next(iter(bucket.requests.values()))

    def _is_used(self, request: LeaseRequest) -> bool:
        return self._resources.pool.utilisation(request.resources) >= self._threshold

    def _is_overtaken(self, request: LeaseRequest) -> bool:
        """True if a request with a later turn was served; one that merely waits for its turn needs no reservation."""
        return request.turn < self._latest_served_turn or request.prepare is not None

    def _insert(self, bucket: _Bucket, request: LeaseRequest) -> None:
        """Insert at the end; a request that was away for a moment still has its turn."""
        if not request.turn:
            self._append(bucket, request)
            return
        first = not bucket.requests or request.turn < bucket.first().turn
        bucket.requests[id(request)] = request
        if first:
            bucket.requests.move_to_end(id(request), last=False)

    def _append(self, bucket: _Bucket, request: LeaseRequest) -> None:
        self._last_turn += 1
        request.turn = self._last_turn
        bucket.requests[id(request)] = request

    def _remove(self, bucket: _Bucket, request: LeaseRequest) -> None:
        del bucket.requests[id(request)]
        self.waiting -= 1
        if not bucket.requests:
            self._buckets.pop(request.queue_key, None)
        if self.reserved is request:
            self.reserved = None


class Shortages:
    """Resources that requests wait for, on this node and elsewhere: leases that hold any of it should not idle.

    Attributes:
        elsewhere: what the GCS last reported of the other nodes.
    """

    def __init__(self, queue: LeaseQueue) -> None:
        self._queue = queue
        self.elsewhere = ResourceContention()

    def exist(self) -> bool:
        """True if any request waits, here or elsewhere."""
        return bool(self.elsewhere.lacking or self._queue.waiting)

    def current(self) -> list[Shortage]:
        """The shortages here, and elsewhere."""
        found: list[Shortage] = []
        if self._queue.waiting:
            only = self._queue.only_request()
            names = self._queue.short_resources()
            found.append((names, (only.holder, only.scheduling_class) if only is not None else None))
        elsewhere = self.elsewhere
        if elsewhere.lacking:
            waiter = (elsewhere.holder, elsewhere.scheduling_class) if elsewhere.holder else None
            found.append((set(elsewhere.lacking), waiter))
        return found

    def affect(self, allocation: ResourceAllocation) -> bool:
        """True if another request waits for a part of what a lease holds."""
        return is_contended(allocation, self.current())


def is_contended(allocation: ResourceAllocation, shortages: list[Shortage]) -> bool:
    """True if one of the shortages is of a part of what a lease holds, and not its own holder's alone."""
    own = (allocation.holder, allocation.scheduling_class)
    return any(only != own and not names.isdisjoint(allocation.resources) for names, only in shortages)


def _reservation_order(request: LeaseRequest) -> tuple[float, float]:
    return request.reservation, request.waiting_since
