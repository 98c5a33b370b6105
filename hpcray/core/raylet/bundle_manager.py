"""Bundles of placement groups on one node: prepared, committed, returned."""

from __future__ import annotations

from hpcray.common.ids import HEAD
from hpcray.common.resources import UNIT, Resources, add
from hpcray.core.effects import Effect, Send
from hpcray.core.raylet.head_reporter import HeadReporter
from hpcray.core.raylet.lease_queue import RESERVE_AFTER, LeaseQueue
from hpcray.core.raylet.lease_requests import LeaseRequest, LeaseRequestTable, bundles_env
from hpcray.core.raylet.lease_table import LeaseTable
from hpcray.core.raylet.local_resources import COMMITTED, LEAVING, Bundle, LocalResources
from hpcray.protocol import messages as m


class BundleManager:
    """Prepares, commits and returns bundles of this node, as the GCS decides.

    Messages of the GCS to one node arrive in the order sent, so a message after a ReturnBundles is about a later
    attempt.
    """

    def __init__(
        self,
        resources: LocalResources,
        queue: LeaseQueue,
        requests: LeaseRequestTable,
        leases: LeaseTable,
        reporter: HeadReporter,
    ) -> None:
        self._resources = resources
        self._bundles = resources.bundles
        self._queue = queue
        self._requests = requests
        self._leases = leases
        self._reporter = reporter

    # ------------------------------------------------------------ messages of the GCS

    def prepare_bundles(self, now: float, src: bytes, msg: m.PrepareBundles) -> list[Effect]:
        """Hold all of the bundles or none; with a reservation, as soon as there is room."""
        self._queue.recheck_all()
        self.forget_waiting(now, msg.group)
        if not self._queue.closed:
            if self._hold_all(now, msg):
                return [Send(HEAD, m.BundlesPrepared(msg.group, msg.attempt, True))]
            if msg.reservation:
                self._enqueue(now, msg)
                return []
        self._reporter.refuse_bundles(msg)
        return []

    def commit_bundles(self, now: float, src: bytes, msg: m.CommitBundles) -> list[Effect]:
        """Let leases and actors use the group's bundles."""
        self._queue.recheck_all()
        self._commit(now, msg.group.hex())
        return []

    def return_bundles(self, now: float, src: bytes, msg: m.ReturnBundles) -> list[Effect]:
        """End what runs in the bundles; when it has ended, their resources are the node's again."""
        self._queue.recheck_all()
        self._reporter.force_view()
        self.forget_waiting(now, msg.group)
        group = msg.group.hex()
        out: list[Effect] = []
        bundles = [one for one in self._bundles.of_group(group) if one.index in msg.indices and one.state != LEAVING]
        for bundle in bundles:
            self._bundles.end(bundle)
            for allocation in list(bundle.allocations):
                if allocation.worker:
                    self._leases.kill(allocation, msg.reason, out)
                else:
                    self._leases.cancel(allocation)
                    self._reporter.return_undone(now, allocation, "")
        for request in self._requests.of_group(group):
            if request.assigned and not self._queue.fits(request.resources, request):
                self._reporter.return_assigned(now, request)
            self._reporter.request_changed(now, request)
        if not self._bundles.of_group(group):
            self._requests.forget_group(group)
        return out

    # ------------------------------------------------------------ the queue, and a new head

    def serve_waiting(self, now: float, msg: m.PrepareBundles) -> Effect:
        """There is room for bundles that waited: hold them. Returns the answer to the GCS."""
        request = self._requests.bundles.pop(msg.group, None)
        return Send(HEAD, m.BundlesPrepared(msg.group, msg.attempt, self._hold_all(now, msg, request)))

    def forget_waiting(self, now: float, group: bytes) -> None:
        """Bundles of the group wait for room no more, and get no answer."""
        request = self._requests.bundles.pop(group, None)
        if request is not None:
            request.assigned = 0
            self._reporter.request_changed(now, request)

    def held_bundles(self) -> list[tuple[bytes, int, bool]]:
        """For a new head: group id, index and whether it is committed, of each bundle that is not being returned."""
        self._bundles.reset_reported()
        return [
            (bytes.fromhex(one.group), one.index, one.state == COMMITTED)
            for one in self._bundles
            if one.state != LEAVING
        ]

    def _hold_all(self, now: float, msg: m.PrepareBundles, request: LeaseRequest | None = None) -> bool:
        """Hold the bundles if all of them fit.

        Args:
            request: the one that waited for them; what is reserved for it is theirs.
        """
        held: list[Bundle] = []
        group = msg.group.hex()
        for index, resources in msg.bundles.items():
            fits = self._queue.fits(resources, request)
            if not fits or self._bundles.has(group, index):
                break
            held.append(self._bundles.prepare(group, index, resources))
        ok = len(held) == len(msg.bundles)
        for bundle in () if ok else held:
            self._bundles.end(bundle)
        if ok and msg.commit:
            self._commit(now, group)
        return ok

    def _enqueue(self, now: float, msg: m.PrepareBundles) -> None:
        """Wait for room in the queue; resources may be reserved for the bundles at once."""
        need: Resources = {}
        for resources in msg.bundles.values():
            add(need, resources)
        for name in self._resources.pool.devices:
            if need.get(name, 0) > UNIT:
                need[name] = -(-need[name] // UNIT) * UNIT  # parts of several devices: as many whole ones
        shape = m.Shape(tuple(sorted(need.items())), "", bundles_env(msg.group.hex()))
        request = LeaseRequest(HEAD, -1, shape, local=False, decided_here=False, assigned=1, prepare=msg)
        request.return_at = now + msg.reservation
        request.waiting_since, request.returned_at = now - RESERVE_AFTER, now
        self._requests.bundles[msg.group] = request
        self._reporter.request_changed(now, request)

    def _commit(self, now: float, group: str) -> None:
        for bundle in self._bundles.of_group(group):
            self._bundles.commit(bundle)
        for request in self._requests.of_group(group):
            self._reporter.request_changed(now, request)
